"""prepared: a mask as the arguments of an operator in a compiled graph: tensors, and its form as text.

torch.compile guards the text by value and the tensors by kind, so masks of equal form share a graph.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask.one_tensor import with_symbols
from flexattn.block_mask.record import AnyOf, CaptureRecord, Seen, are_unchanged, changed, is_any, is_unchanged
from flexattn.errors import DtypeError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import specialized
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.lasting import is_capturing
from flexattn.trace.trace import trace


@frozen
class MaskForm:
    """What kernels need to know about a mask besides its lists and its mod."""

    BLOCK_SIZE: tuple[int, int]
    both: bool  # whether there are lists of key rows too, for the backward
    per_batch: bool  # whether batches have lists of their own
    per_head: bool
    full_overhangs: bool
    is_built: bool
    runs: tuple[int, ...] = ()  # its captures with known runs of equal elements, whose places come last
    is_torchs: bool = False  # the lists are those of PyTorch's BlockMask
    has_bits: bool = False  # whether the tensors include those of its MaskBits
    # The tile of its grid. The lists and the bits of the mask in the order of tiles follow its own bits.
    tile: tuple[int, ...] | None = None

    def dumps(self) -> str:
        return json.dumps(list(asdict(self).values()))

    @staticmethod
    @lru_cache(256)
    def loads(text: str) -> MaskForm:
        given = dict(zip((f.name for f in fields(MaskForm)), json.loads(text), strict=True))
        for name in ("BLOCK_SIZE", "runs", "tile"):
            given[name] = None if given[name] is None else tuple(given[name])
        return MaskForm(**given)


class MaskNumbers(NamedTuple):
    """What a mask has in numbers that are not in its form, so that a graph takes masks with any of them."""

    digest: int = 0  # of what it was built from; 0 if that is not known, or if it has neither bits nor runs
    skips_halves: bool = False  # as in its bits
    tiles_skip_halves: bool = False  # as in those of the order of tiles
    columns: int = 1  # of its grid

    def as_sizes(self, device: torch.device) -> Tensor:
        """Return an empty tensor whose sizes are the numbers: torch.compile makes sizes symbols, and no constants."""
        halves = 2 * self.skips_halves + self.tiles_skip_halves
        sizes = (0, 4 * self.digest + halves + _LEAST, self.columns)
        return with_symbols(torch.empty(sizes, dtype=torch.int8, device=device), 1, 2)

    @staticmethod
    def of_sizes(sizes: Tensor) -> MaskNumbers:
        """Inverse of `as_sizes`."""
        digest, halves = divmod(sizes.size(1) - _LEAST, 4)
        return MaskNumbers(digest, halves & 2 != 0, halves & 1 != 0, sizes.size(2))


_LEAST = 2  # graphs are for one value of a size of 0 or 1


@frozen
class Prepared:
    """The arguments of operators for a mask."""

    # The lists as one tensor (see one_tensor.py), MaskNumbers as sizes, the bits, the lists and the bits of the mask in
    # the order of tiles, then the places of equal runs.
    tensors: tuple[Tensor, ...]
    text: str  # a MaskForm


def digest_of(mask: BoundMod) -> int:
    """Return a digest of what a mod computes. Numbers may be literals of its graph or not."""
    return _digest(mask.wide or mask.graph, mask.numbers)


def _digest(graph: ModGraph, numbers: tuple[int | float, ...]) -> int:
    # Below 2**40: the product of the sizes in MaskNumbers must be below 2**63. Grids with bits have fewer than
    # 2**21 columns.
    return int(specialized(graph, numbers).digest[:10], 16)


class Origin:
    """What packed lists were built from, for an operator that is given the lists alone. It is an attribute of them."""

    def __init__(self, record: CaptureRecord | None) -> None:
        self.record = record
        self.masks: dict[Hashable, Any] = {}  # made of these lists
        # Values of captures that mask_mod computes from other tensors: on a CPU, and if they still exist. On a GPU the
        # host would wait to compare them.
        self._computed = () if record is None else tuple(_computed(record, seen) for seen in record.captures)
        self._passed: tuple[Any, ...] = ()  # the last mod that passed, with captures of the record
        # `reached` also has tensors of which mask_mod reads only the shape. Watch them only if a capture is computed.
        computes = record is not None and any(is_computed(record, seen) for seen in record.captures)
        self._watched = () if record is None else (*(record.reached if computes else ()), *record.captures)

    @staticmethod
    def of(lists: Tensor) -> Origin:
        """Return the origin of packed lists. Lists that a graph creates, or that come from a file, have no record."""
        found = getattr(lists, _ATTRIBUTE, None)
        if found is None:
            found = Origin(None)
            found.keep(lists)
        return found

    def keep(self, lists: Tensor) -> None:
        setattr(lists, _ATTRIBUTE, self)

    def __reduce__(self) -> tuple[Any, ...]:  # copies of the lists, and lists in files, have no record
        return type(None), ()

    def is_graph_of(self, mask: BoundMod) -> bool:
        """Return whether a mod computes what the mask was built from. Numbers may be literals in one of the graphs."""
        return digest_of(mask) == self.digest

    @cached_property
    def digest(self) -> int:
        """The digest of what the mask was built from, 0 if that is not known."""
        return 0 if self.record is None else _digest(self.record.wide, self.record.numbers)

    def has_passed(self, captures: Sequence[Tensor]) -> bool:
        """Return whether a mod that passed the check still does. `captures` are the tensors that it captures now."""
        return self.record is None or _are_same(self.record, captures)

    def check(self, mask: BoundMod | None) -> None:
        """Raise MutationError if values of mask_mod changed since the lists were built.

        `mask` is what an operator of a graph was given, None if every pair attends. Its captures may be other tensor
        objects with the same memory, or copies of it that the compiler made, so they are compared by memory and
        version, then by value.
        """
        record = self.record
        if record is None:
            return
        if not all(map(are_unchanged, self._watched)):
            raise changed("a tensor that mask_mod captures", "was changed in place")
        if mask is None:
            if not specialized(record.wide, record.numbers).is_true:
                raise changed("what mask_mod computes, or a number that it captures,", "has changed")
            return
        passed = (mask.graph, repr(mask.numbers), *map(id, mask.captures))
        if passed == self._passed and _are_same(record, mask.captures):
            return
        if not self.is_graph_of(mask):
            if record.reads_numpy:  # Dynamo makes a tensor of it
                fix = "Capture int(n) or float(n) instead of n."
                found = "a mask_mod that captures a numpy number"
                raise DtypeError(message("block_mask", found, "Python numbers in torch.compile", fix))
            raise changed("what mask_mod computes, or a number that it captures,", "has changed")
        asks_mod = False
        for described, before, value, now in zip(
            record.graph.captures, record.captures, self._computed, mask.captures, strict=True
        ):
            if value is not None:
                if value.shape != now.shape or not (torch.equal(value, now) or _are_close(value, now)):
                    raise changed(f"mask_mod's captured tensor {described.name!r}", "has other values")
                # Inductor may have changed the last bits, or the values differ.
                asks_mod = asks_mod or not torch.equal(value, now)
            elif is_computed(record, before):
                asks_mod = asks_mod or not is_capturing(now.device)
            elif not any(_is_equal(seen, now) for seen in before):
                raise changed(f"mask_mod's captured tensor {described.name!r}", "was changed, or is another tensor")
        if asks_mod:
            record.check(trace(record.mod, "mask"))
        if _are_same(record, mask.captures):
            self._passed = passed


_ATTRIBUTE = "_flexattn_origin"


def _are_same(record: CaptureRecord, captures: Sequence[Tensor]) -> bool:
    """Return whether these are the tensors of a record, unchanged. Computed captures are new tensors at each call.

    It runs in each call of an operator: for one capture, nested generators take 1.6 us, and this less than 1.0.
    """
    return len(record.captures) == len(captures) and all(map(is_any, record.captures, captures))


def is_computed(record: CaptureRecord, capture: AnyOf) -> bool:
    """Return whether mask_mod computes a capture from the user's tensors, at each call."""
    return all(capture[0][0] is not seen[0][0] for seen in record.reached)


def _computed(record: CaptureRecord, capture: AnyOf) -> Tensor | None:
    value = capture[0][0]() if is_computed(record, capture) else None
    return value.clone() if value is not None and value.is_cpu else None


def _are_close(before: Tensor, now: Tensor) -> bool:
    if not now.is_floating_point():
        return False
    # Functions that Inductor compiled differ from torch's in the last bits. They compute half precision in float32.
    ulps = 1 if now.dtype.itemsize < 4 else 16
    return torch.allclose(before, now, rtol=ulps * torch.finfo(now.dtype).eps, atol=0, equal_nan=True)


def _is_equal(seen: Seen, now: Tensor) -> bool:
    """Return whether a tensor has the values of the one that was captured, if that exists and did not change."""
    before = seen[0]() if is_unchanged(seen) else None
    if before is None or before.shape != now.shape or before.dtype != now.dtype or before.device != now.device:
        return False
    same = before.data_ptr() == now.data_ptr() and before.stride() == now.stride()
    if same or is_capturing(now.device):  # a CUDA graph passes copies
        return True
    return torch.equal(before, now)
