"""What a mask was built from: the values that its mask_mod captured, checked for changes, moved and extracted."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask.bits import MaskBits
from flexattn.block_mask.captures import NUMBER_OF_NUMPY, substitute, survey
from flexattn.block_mask.runs import RunLists
from flexattn.errors import MutationError
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.frozen import FrozenMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.lasting import is_capturing
from flexattn.torch_state.modes import outside_of_modes
from flexattn.torch_state.subclasses import has_no_values
from flexattn.torch_state.transforms import outside

Mod = Callable[..., Any]
Seen = tuple["weakref.ref[Tensor]", int | None]  # a tensor and its version
AnyOf = tuple[Seen, ...]  # after a deep copy: the tensor, which closures share, or its copy


class BuildCounts(NamedTuple):
    """What building a mask evaluated."""

    boxes: int  # boxes of blocks with computed bounds
    samples: int | None  # sampled single positions; None if a GPU built the mask
    blocks: int  # blocks evaluated pair by pair, counted per batch and head that the mod distinguishes


class BuiltMask(NamedTuple):
    """Result of building a mask: its blocks as query rows and key rows, and the runs found in captured tensors."""

    by_query: RunLists
    by_key: RunLists
    counts: BuildCounts
    bytes: int  # memory of the lists and the bits
    runs: tuple[EqualRuns, ...] = ()
    bits: MaskBits | None = None
    no_bits: str = "it was not built by kernels"  # why it has no bits


class CaptureRecord(NamedTuple):
    """The graph, tensors and numbers that a mask was built from. Tensors are weakly referenced, with their versions."""

    mod: Mod
    graph: ModGraph
    captures: tuple[AnyOf, ...]  # captures of the graph
    numbers: tuple[int | float, ...]
    reached: tuple[AnyOf, ...]  # the user's tensors, from which a prologue may compute captures at each call
    wide: ModGraph  # the graph before it was narrowed for the numbers
    runs: tuple[EqualRuns, ...]  # in the captures
    prologue: tuple[str, tuple[int | float, ...]]  # the graph that computes captures: its text and its numbers
    contents: tuple[bytes | None, ...]  # digests of `reached`, which a mod that is traced at each call may create anew

    @property
    def reads_numpy(self) -> bool:
        """Whether the mod captures a number of numpy."""
        return any(type(part) is tuple and part[:1] == (NUMBER_OF_NUMPY,) for part in survey(self.mod).key)

    @staticmethod
    def of(mod: Mod, bound: BoundMod, runs: tuple[EqualRuns, ...]) -> CaptureRecord:
        captures, reached = (tuple([(seen(t),) for t in ts]) for ts in (bound.captures, bound.reached))
        is_guarded = bound.origin is not None or type(mod) is FrozenMod
        contents = tuple([None if is_guarded else _contents(t) for t in bound.reached])
        wide = bound.wide or bound.graph
        return CaptureRecord(mod, bound.graph, captures, bound.numbers, reached, wide, runs, bound.prologue, contents)

    def deepcopied(self, memo: dict[int, Any]) -> CaptureRecord:
        """Return the record of a deep copy of the mask, whose mod may contain copies of the same values."""
        mod = copy.deepcopy(self.mod, memo)
        if mod is self.mod:  # a function: its copy shares what it captures
            return self
        captures, reached = (
            tuple([(*before, *_copies(before, memo)) for before in tensors])
            for tensors in (self.captures, self.reached)
        )
        return self._replace(mod=mod, captures=captures, reached=reached)

    def check(self, bound: BoundMod) -> None:
        """Raise MutationError if `bound`, the same mod bound now, has different values than those recorded."""
        may_differ = self.numbers != bound.numbers or 0.0 in self.numbers  # in each call: repr takes longer
        if may_differ and _differ(self.numbers, bound.numbers):
            for number, before, now in zip(self.graph.numbers, self.numbers, bound.numbers, strict=False):
                if _differ(before, now):
                    raise changed(f"mask_mod's captured number {number.name!r}", f"was {before} and is {now}")
        if bound.graph is not self.graph and bound.graph.computes != self.graph.computes:
            raise changed("what mask_mod computes", "has changed")
        if bound.prologue[0] != self.prologue[0]:
            raise changed("what mask_mod computes from the tensors that it captures", "has changed")
        if self.prologue[1] and _differ(self.prologue[1], bound.prologue[1]):
            raise changed("a number that mask_mod combines with a captured tensor", "has changed")
        if all(map(is_any, self.captures, bound.captures)):
            return
        if len(bound.reached) != len(self.reached):
            raise changed("the tensors that mask_mod captures", "have changed")
        described = zip(bound.reached_names, self.reached, self.contents, bound.reached, strict=True)
        for name, before, contents, now in described:
            if not is_any(before, now) and (contents is None or contents != _contents(now)):
                how = "is another tensor" if contents is None else "has other values"
                how = "was changed in place" if any(ref() is now for ref, _ in before) else how
                raise changed(f"mask_mod's captured tensor {name!r}", how)


def seen(tensor: Tensor, gone: Callable[[object], None] | None = None) -> Seen:
    """Return a weak reference to a tensor and its version; `gone` is called when the tensor is freed."""
    return weakref.ref(tensor, gone), _version(tensor)


def is_same(seen: Seen, tensor: Tensor) -> bool:
    """Return whether this is the tensor that was seen, at the same version."""
    return seen[0]() is tensor and seen[1] == _version(tensor)


def is_unchanged(seen: Seen) -> bool:
    """Return whether a tensor that was seen has the same version, or does not exist any more."""
    tensor = seen[0]()
    return tensor is None or seen[1] == _version(tensor)


def are_unchanged(before: AnyOf) -> bool:
    """Return whether a tensor that was seen, or one of its copies, is unchanged. Freed tensors are ignored."""
    exist = [seen for seen in before if seen[0]() is not None]
    return not exist or any(map(is_unchanged, exist))


def is_any(before: AnyOf, now: Tensor) -> bool:
    """Return whether this is the tensor that was seen, or one of its copies, unchanged."""
    return is_same(before[0], now) or any(is_same(seen, now) for seen in before[1:])


def _copies(before: AnyOf, memo: dict[int, Any]) -> AnyOf:
    """Return the deep copies of a tensor; none if its values have changed since it was seen."""
    tensors = ((ref(), version) for ref, version in before)
    # A non-leaf tensor has no deep copy, so only code that shares the tensor can read it.
    return tuple(
        seen(copy.deepcopy(t, memo)) for t, version in tensors if t is not None and t.is_leaf and _version(t) == version
    )


def _differ(before: object, now: object) -> bool:
    """Return whether numbers differ: 0.0 and -0.0 do, nan and nan do not."""
    return repr(before) != repr(now)


def _contents(tensor: Tensor) -> bytes | None:
    """Return a digest of the values of a tensor, None if the host cannot read them now."""
    if has_no_values(tensor) or is_capturing(tensor.device):
        return None
    digest = hashlib.blake2b(repr((tensor.dtype, tensor.shape)).encode())
    with torch.inference_mode(False), outside(), outside_of_modes(), torch._C.DisableTorchFunction():
        digest.update(tensor.detach().cpu().resolve_neg().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def changed(what: str, how: str) -> MutationError:
    """Return the error for a value that is not what a mask was built from."""
    return MutationError(
        f"block_mask: {what} {how}, expected the values that the mask was built from. "
        "Build the mask again with create_block_mask. A mod made in a loop must bind what it reads, as in "
        "lambda b, h, q_idx, kv_idx, w=w: ... To keep the blocks for another mod, assign block_mask.mask_mod."
    )


def move(mod: Mod, device: torch.device) -> Mod:
    """Return the mod with its captured tensors on `device`; the same mod if none has to move."""
    found = survey(mod)
    if all(t.device == device for t in found.tensors):
        return mod
    return substitute(mod, found, [t.to(device) for t in found.tensors])


@frozen
class Shell:
    """A mod without its captured tensors. Equal for closures of one definition whose other values are equal."""

    key: tuple[Any, ...]
    mod: Mod = field(compare=False)

    def fill(self, tensors: Sequence[Any]) -> Mod:
        """Return the mod with these captured tensors."""
        found = survey(self.mod)
        return substitute(self.mod, found, tensors) if found.tensors else self.mod


def lift(mod: Mod) -> tuple[list[Tensor], Shell]:
    """Separate the captured tensors from a mod."""
    found = survey(mod)
    whole = () if found.followed else (id(mod),)
    return found.tensors, Shell((*found.key, repr(found.numbers), *whole), mod)
