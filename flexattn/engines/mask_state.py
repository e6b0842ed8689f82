"""mask_state: what repeated calls need of a BlockMask. It is kept in the mask."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.problem import Problem
from flexattn.compile.arguments import OF_MASK, PARTS, Part
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.frozen import FrozenMod
from flexattn.runtime.known import Pointer, pointer_of
from flexattn.runtime.launch import CACHES, remember
from flexattn.trace.follow import Guard
from flexattn.trace.trace import recall

TraceSettings = tuple[object, ...]  # the default dtype and the registered operators, on which traces depend


class MaskReads(NamedTuple):
    """What a mask_mod reads, and the guard that reads it again."""

    guard: Guard
    settings: TraceSettings
    tensors: Sequence[Tensor]
    numbers: Sequence[int | float]


class MaskState:
    """The graph, the tensors and the pointers of a BlockMask. Calls run the same kernels if `kind` is the same."""

    __slots__ = (
        "_addresses", "_parts", "_pointer", "_reads", "_versions", "blocks", "bound", "equal_runs", "kind",
    )  # fmt: skip

    def __init__(self, blocks: BlockMask, reads: MaskReads | None, problem: Problem) -> None:
        """`problem` is one with this mask. Without `reads` nothing is kept of what the mask_mod reads."""
        bound, equal_runs = problem.mask, problem.equal_runs
        # A copy, because a backward may read the lists of a mask that was edited after the forward.
        self.blocks, self._reads = copy.copy(blocks), reads
        self.blocks._state = None
        tensors = () if reads is None else reads.tensors
        self._versions = [t._version for t in tensors]
        self._addresses = [t.data_ptr() for t in tensors]
        self._pointer = pointer_of(problem.query.device)
        # The pointers to each part of a problem that is a part of the mask. Others are made when asked for.
        self._parts: dict[Part, list[Pointer]] = {"kv_runs": list(map(self._pointer, PARTS["kv_runs"](problem)))}
        if bound is not None:
            self._parts["mask"] = list(map(self._pointer, PARTS["mask"](problem)))
        tiles = blocks.in_tiles
        kind = (
            blocks.B, blocks.H, blocks.full_overhangs, blocks.is_built, blocks.q_runs is None, blocks.device,
            blocks.bits is None, blocks.skips_halves,
            None if tiles is None else (tiles.grid, tiles.mask.bits is None, tiles.mask.skips_halves),
            None if bound is None else (bound.graph, bound.numbers, *map(memory_form, bound.captures)),
            *[(r.capture, r.places.shape, r.places.stride(), r.places.data_ptr() & 15) for r in equal_runs],
        )  # fmt: skip
        self.kind = _kinds.get(kind)
        if self.kind is None:
            self.kind = _Kind()
            remember(_kinds, kind, self.kind)
        # Block lists of packed sequences are found by the tensors they were computed from, which they must not keep.
        self.bound: BoundMod | None = bound
        self.equal_runs: tuple[EqualRuns, ...] = equal_runs
        if reads is None and bound is not None:
            self.bound = BoundMod(bound.graph, (NOTHING,) * len(bound.captures), bound.numbers)

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """The tensors of the mask_mod; none if they are not kept."""
        return () if self.bound is None or self._reads is None else self.bound.captures

    def holds(self, blocks: BlockMask, settings: TraceSettings) -> bool:
        """Return whether the mask, and what its mod reads, are as they were."""
        assert self._reads is not None
        guard, before, known, numbers = self._reads
        found = guard(blocks._mask_mod) if before == settings and blocks._kv_runs is self.blocks._kv_runs else None
        if found is None or found[1] != numbers:
            return False
        for now, tensor, version, address in zip(found[0], known, self._versions, self._addresses, strict=True):
            if now is not tensor or now._version != version or now.data_ptr() != address:
                return False
        return True

    def pointers(self, part: Part) -> list[Pointer]:
        """Return the pointers to a part of a problem."""
        found = self._parts.get(part)
        if found is None:
            found = self._parts[part] = list(map(self._pointer, OF_MASK[part](self.blocks)))
        return found


class _Kind:
    """Stands for all masks with which calls run the same kernels on the same layouts."""


NOTHING = torch.empty(0, device="cpu")  # in the place of tensors that are not kept
_kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
CACHES.append(_kinds)


def memory_form(t: Tensor) -> tuple[object, ...]:
    """Return what kernels depend on of a captured tensor, besides its dtype, which is part of the graph."""
    return t.shape, t.stride(), t.data_ptr() & 15, t.is_neg()


def reads_of(blocks: BlockMask, settings: TraceSettings) -> MaskReads | None:
    """Return what a mask's mod reads, if its trace is known and its captures are the user's own tensors."""
    guard = _guard_of(blocks._mask_mod, settings)
    found = None if guard is None else guard(blocks._mask_mod)
    if guard is None or found is None:
        return None
    tensors, numbers = found
    if any(isinstance(n, float) and n == 0.0 for n in numbers):  # 0.0 == -0.0
        return None
    if any(t.is_inference() or t.is_neg() or t.device != blocks.device for t in tensors):
        return None
    return MaskReads(guard, settings, tensors, numbers)


def _guard_of(mod: Any, settings: TraceSettings) -> Guard | None:
    if type(mod) is FrozenMod:
        return lambda other: (mod.captures, mod.numbers) if other is mod else None
    known = recall(mod, ("mask", torch.float32, *settings))
    return None if known is None or known[0].traced.picks is None else known[0].guard
