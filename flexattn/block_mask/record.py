"""What a mask was built from: the values that its mask_mod captured, checked for changes, moved and extracted."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask.bits import MaskBits
from flexattn.block_mask.captures import substitute, survey
from flexattn.block_mask.runs import RunLists
from flexattn.errors import MutationError
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.mod_graph import ModGraph
from flexattn.process.frozen_class import frozen

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

    @property
    def reads_numpy(self) -> bool:
        """Whether the mod captures a number of numpy."""
        return any(isinstance(part, str) and part == "numpy" for part in survey(self.mod).key)

    @staticmethod
    def of(mod: Mod, bound: BoundMod, runs: tuple[EqualRuns, ...]) -> CaptureRecord:
        captures, reached = (tuple([(seen(t),) for t in ts]) for ts in (bound.captures, bound.reached))
        return CaptureRecord(
            mod, bound.graph, captures, bound.numbers, reached, bound.wide or bound.graph, runs, bound.prologue
        )

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
        if self.numbers != bound.numbers:
            for number, before, now in zip(self.graph.numbers, self.numbers, bound.numbers, strict=False):
                if before != now:
                    raise changed(f"mask_mod's captured number {number.name!r}", f"was {before} and is {now}")
        if bound.graph is not self.graph and bound.graph.computes != self.graph.computes:
            raise changed("what mask_mod computes", "has changed")
        if bound.prologue[0] != self.prologue[0]:
            raise changed("what mask_mod computes from the tensors that it captures", "has changed")
        of_prologue = self.prologue[1], bound.prologue[1]
        if any(of_prologue) and repr(of_prologue[0]) != repr(of_prologue[1]):  # distinguishes 0.0 from -0.0
            raise changed("a number that mask_mod combines with a captured tensor", "has changed")
        if all(map(_is_any, self.captures, bound.captures)):
            return
        if len(bound.reached) != len(self.reached):
            raise changed("the tensors that mask_mod captures", "have changed")
        for name, before, now in zip(bound.reached_names, self.reached, bound.reached, strict=True):
            if not _is_any(before, now):
                how = "was changed in place" if any(ref() is now for ref, _ in before) else "is another tensor"
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


def _is_any(before: AnyOf, now: Tensor) -> bool:
    return is_same(before[0], now) or any(is_same(seen, now) for seen in before[1:])


def _copies(before: AnyOf, memo: dict[int, Any]) -> AnyOf:
    """Return the deep copies of a tensor; none if its values have changed since it was seen."""
    tensors = ((ref(), version) for ref, version in before)
    # A non-leaf tensor has no deep copy, so only code that shares the tensor can read it.
    return tuple(
        seen(copy.deepcopy(t, memo)) for t, version in tensors if t is not None and t.is_leaf and _version(t) == version
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def changed(what: str, how: str) -> MutationError:
    """Return the error for a value that is not what a mask was built from."""
    return MutationError(
        f"block_mask: {what} {how}, expected the values that the mask was built from. "
        "Build the mask again with create_block_mask, or assign block_mask.mask_mod to keep its blocks."
    )


def move(mod: Mod, device: torch.device) -> Mod:
    """Return the mod with its captured tensors on `device`; the same mod if none has to move."""
    found = survey(mod)
    moved = {id(t): t.to(device) for t in found.tensors if t.device != device}
    return substitute(mod, moved, found.numbers)[0] if moved else mod


@frozen
class Shell:
    """A mod without its captured tensors. Equal for closures of one definition whose other values are equal."""

    key: tuple[Any, ...]
    mod: Mod = field(compare=False)

    def fill(self, tensors: Sequence[Any]) -> Mod:
        """Return the mod with these captured tensors."""
        found = survey(self.mod)
        pairs = {id(old): new for old, new in zip(found.tensors, tensors, strict=True)}
        return substitute(self.mod, pairs, found.numbers)[0] if pairs else self.mod


def lift(mod: Mod) -> tuple[list[Tensor], Shell]:
    """Separate the captured tensors from a mod."""
    found = survey(mod)
    whole = () if found.followed else (id(mod),)
    return found.tensors, Shell((*found.key, *found.numbers, *whole), mod)
