"""operands: the kinds of kernel operands. Each returns its arguments for a plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexattn.call.layout import FLOAT8
from flexattn.compile.arguments import (
    IN_TILES,
    Argument,
    DescriptorOf,
    FromProblem,
    FromShapes,
    FromTensors,
    Part,
    RedoneTiles,
    TileCounter,
)
from flexattn.compile.head_dims import split_head_dim
from flexattn.compile.kernel_plan import KernelPlan, Operand
from flexattn.compile.mod_plan import TRITON_POINTER
from flexattn.compile.scalars import SCALARS
from flexattn.compile.scatter import capture_sum_arguments
from flexattn.process.frozen_class import frozen

_KEY_TENSORS = ("k", "v", "dk", "dv")  # tensors with a row per key


@frozen
class Pointers:
    """Pointers to [B, H, rows, D] tensors."""

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        keys = FLOAT8 if "descales" in plan.features else plan.dtype
        types = {name: TRITON_POINTER[keys if name in ("k", "v") else plan.dtype] for name in self.names}
        return tuple(Argument(f"{name}_ptr", types[name], FromTensors(name), plan.aligned) for name in self.names)


@frozen
class Strides:
    """Strides of batch, head and row of [B, H, rows, D] tensors; the last stride is 1.

    They are in the plan's unit, and those of float8 tensors in units of 16 elements.
    """

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(argument for name in self.names for argument in self._of(name, plan))

    @staticmethod
    def _of(name: str, plan: KernelPlan) -> tuple[Argument, ...]:
        row = "n" if name in _KEY_TENSORS else "m"
        types = ("i64", "i64", "i64" if plan.wide_rows else "i32")
        return tuple(
            Argument(f"stride_{name}{dim}", kind, FromShapes(lambda _, tensors, d=d: _stride(plan, tensors[name], d)))
            for d, (dim, kind) in enumerate(zip(("b", "h", row), types, strict=True))
        )


def _stride(plan: KernelPlan, tensor: torch.Tensor, d: int) -> int:
    shared = d == 0 and tensor.size(0) == 1  # keys are shared by the batch
    unit = 16 // tensor.element_size() if plan.aligned else 1
    return 0 if shared else tensor.stride(d) // unit


@frozen
class Array:
    """A pointer to a contiguous array that the engine allocates."""

    name: str
    type: str
    divisible: bool = False  # the pointer is a multiple of 16 bytes, even if the user's tensors are not aligned

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument(self.name, self.type, FromTensors(self.name), self.divisible),)


@frozen
class OfProblem:
    """A pointer to a tensor of the problem."""

    name: str
    type: str
    part: Part

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument(self.name, self.type, FromProblem(self.part)),)


@frozen
class Scalars:
    """Numbers of SCALARS."""

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(self._of(name, plan) for name in self.names)

    @staticmethod
    def _of(name: str, plan: KernelPlan) -> Argument:
        kind, value = SCALARS[name]
        return Argument(name, kind, FromShapes(lambda problem, _: value(plan, problem)))


@frozen
class Counter:
    """The counter from which persistent programs take tile indices."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument("counter_ptr", "*i32", TileCounter()),)


@frozen
class RedoneCount:
    """The count of tiles that were computed again."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument("redone_ptr", "*i32", RedoneTiles()),) if plan.fixed_reference else ()


@frozen
class When:
    """Operands of the plans that satisfy a condition."""

    condition: Callable[[KernelPlan], bool]
    operands: tuple[Operand, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(a for operand in self.operands for a in operand.arguments(plan)) if self.condition(plan) else ()


@frozen
class ScoreScale:
    """The factor of q k^T; see KernelPlan.scale."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return Scalars((plan.scale,)).arguments(plan)


@frozen
class MaskLists:
    """The block lists along the axis that programs own, and their strides by batch and head."""

    strides: tuple[str, ...] = ("stride_mask_b", "stride_mask_h")

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        if plan.blocks is None:
            return ()
        pointers = ListPointers("q_runs", "q") if plan.transposed else ListPointers("kv_runs", "kv")
        return (*pointers.arguments(plan), *Scalars(self.strides).arguments(plan))


@frozen
class ListPointers:
    """Pointers to the block lists of one direction."""

    part: Part
    side: str  # the start of their names

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        part = _part_read(plan, self.part)
        names = (f"{self.side}_{name}_ptr" for name in _LISTS)
        return tuple(Argument(name, "*i32", FromProblem(part, i)) for i, name in enumerate(names))


@frozen
class BitPointers:
    """Pointers to the bits of partial blocks, whose rows are on the axis that programs own."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        part = _part_read(plan, "q_bits" if plan.transposed else "kv_bits")
        return (
            Argument("bits_first_ptr", "*i32", FromProblem(part, 0)),
            Argument("bits_ptr", "*i16", FromProblem(part, 1), divisible=True),
        )


@frozen
class HalfPointers:
    """Pointers to the halves of partial blocks, whose rows are on the axis that programs own."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        part = _part_read(plan, "q_bits" if plan.transposed else "kv_bits")
        return (
            Argument("halves_ptr", "*i32", FromProblem(part, 2)),
            Argument("half_count_ptr", "*i32", FromProblem(part, 3)),
        )


def _part_read(plan: KernelPlan, part: Part) -> Part:
    """Return the part of a mask that a kernel reads: with tiles of tokens, the same of the mask in their order."""
    return part if plan.token_tile is None else IN_TILES[part]


_LISTS = ("partial", "partial_runs", "full", "full_runs", "order")  # as in RunLists.tensors


@frozen
class ModArguments:
    """The captured tensors and numbers of score_mod and mask_mod."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(argument for mod in (plan.score, plan.mask) if mod for argument in mod.arguments())


@frozen
class CaptureSumArguments:
    """The gradient accumulators of captured tensors."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return capture_sum_arguments(plan.grad, plan.sums) if plan.grad is not None and plan.sums else ()


@frozen
class DescriptorOperand:
    """A TMA descriptor: its argument name, the tensor or array that it describes, and the shape of a tile."""

    argument: str
    of: str
    block: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the plan's dtype
    layout: str = ""  # in shared memory, in Gluon's notation
    is_grid: bool = False  # a row-major grid of tokens, whose two dims the block has in place of rows

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        element = TRITON_POINTER[self.dtype or plan.dtype][1:]
        kind = f"tensordesc<{element}{list(self.block)}{',' if self.layout else ''}{self.layout}>"
        return (Argument(self.argument, kind, DescriptorOf(self.of, self.block, self.is_grid)),)


def streamed_descriptors(plan: KernelPlan, rows: int, partial: bool = False) -> tuple[DescriptorOperand, ...]:
    """Return descriptors of the streamed tensors, one for each part of a head dim. `partial`: for partial blocks."""
    dims = (split_head_dim(plan.D), split_head_dim(plan.Dv))
    return tuple(
        DescriptorOperand(
            f"{tensor}_desc{'_partial' if partial else ''}_{part.index}", tensor, (1, 1, rows, part.width)
        )
        for tensor, parts in zip(plan.spec.streams, dims, strict=False)  # Hopper kernels have no streams
        for part in parts
    )


@frozen
class Descriptors:
    """TMA descriptors. They depend on the plan's tile and head dims."""

    of: Callable[[KernelPlan], tuple[DescriptorOperand, ...]]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(a for descriptor in self.of(plan) for a in descriptor.arguments(plan))
