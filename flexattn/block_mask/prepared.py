"""prepared: a mask as the arguments of an operator in a compiled graph: tensors, and its form as text.

torch.compile guards the text by value and the tensors by kind, so masks of equal form share a graph.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.block_mask.record import CaptureRecord, changed, is_unchanged
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.narrow import specialized


@dataclass(frozen=True)
class MaskForm:
    """What kernels need to know about a mask besides its lists and its mod."""

    BLOCK_SIZES: tuple[tuple[int, int], ...]  # of each set of lists; the first is that of the mask
    both: bool  # whether each set has lists of key rows too, for the backward
    per_batch: bool  # whether batches have lists of their own
    per_head: bool
    full_overhangs: bool
    is_built: bool
    graph: str = ""  # digest of the graph that the mask was built from
    runs: tuple[int, ...] = ()  # its captures with known runs of equal elements, whose places follow the lists

    def dumps(self) -> str:
        return json.dumps(list(asdict(self).values()))

    @staticmethod
    @lru_cache(256)
    def loads(text: str) -> MaskForm:
        sizes, *rest, runs = json.loads(text)
        return MaskForm(tuple(map(tuple, sizes)), *rest, tuple(runs))


@dataclass(frozen=True)
class Prepared:
    """The arguments of operators for a mask."""

    tensors: tuple[Tensor, ...]  # each set of lists as one tensor (see packed.py), then the places of equal runs
    text: str  # a MaskForm


class Recorded:
    """What the lists of a mask were built from, for checks by an operator, which is given the lists alone."""

    def __init__(self, record: CaptureRecord, is_whole: bool) -> None:
        self.record = record
        self.is_whole = is_whole  # False for a slice of a mask: its mod captures other tensors

    @staticmethod
    def of(lists: Tensor) -> Recorded | None:
        """Return the record of packed lists, if they have one."""
        return _recorded.get(lists)

    def keep(self, lists: Tensor) -> None:
        _recorded[lists] = self

    def is_graph_of(self, mask: BoundMod) -> bool:
        """Return whether a mod computes what the mask was built from. Numbers may be literals in one of the graphs."""
        return specialized(mask.wide or mask.graph, mask.numbers).digest == self.digest

    @cached_property
    def digest(self) -> str:
        return specialized(self.record.wide, self.record.numbers).digest

    def check(self, mask: BoundMod) -> None:
        """Raise MutationError if values of mask_mod changed since the lists were built.

        `mask` is what an operator of a graph was given. Its captures may be other tensor objects with the same memory,
        or copies of it that the compiler made, so they are compared by memory and version, then by value.
        """
        record = self.record
        for before in (*record.captures, *record.reached):
            if not any(is_unchanged(seen) for seen in before):
                raise changed("a tensor that mask_mod captures", "was changed in place")
        if not self.is_whole:
            return
        if not self.is_graph_of(mask):
            raise changed("what mask_mod computes, or a number that it captures,", "has changed")
        for described, before, now in zip(record.graph.captures, record.captures, mask.captures, strict=True):
            is_computed = all(before[0][0] is not seen[0][0] for seen in record.reached)
            if is_computed and before[0][0]() is None:
                continue  # computed from the user's tensors at each call, which an operator is not given
            if not any(_equals(seen[0](), now) for seen in before):
                raise changed(f"mask_mod's captured tensor {described.name!r}", "is another tensor")


def _equals(before: Tensor | None, now: Tensor) -> bool:
    """Return whether a tensor has the values of the one that was captured; None: it does not exist any more."""
    if before is None or before.shape != now.shape or before.dtype != now.dtype:
        return False
    same = before.data_ptr() == now.data_ptr() and before.stride() == now.stride()
    return same or before.device != now.device or torch.equal(before, now)


_recorded = WeakTensorKeyDictionary()
