"""operands: the kinds of operands that kernels have. Each gives the arguments that it is in a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexattn.block_mask import BlockMask
from flexattn.call.dropout import Dropout
from flexattn.call.problem import Problem
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_spec import (
    Argument,
    FromProblem,
    FromShapes,
    FromTensors,
    LaunchContext,
    Operand,
    TensorDescriptor,
    TileCounter,
)
from flexattn.compile.mod_plan import TRITON_POINTER
from flexattn.compile.scatter import capture_sum_arguments
from flexattn.machine.target import l2_bytes
from flexattn.options import LARGEST_TILE

LOG2E = math.log2(math.e)
_KEY_TENSORS = ("k", "v", "dk", "dv")  # their rows are keys


@dataclass(frozen=True)
class Pointers:
    """Pointers to [B, H, rows, D] tensors."""

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        dtype = TRITON_POINTER[plan.dtype]
        return tuple(Argument(f"{name}_ptr", dtype, FromTensors(name), plan.aligned) for name in self.names)


@dataclass(frozen=True)
class Strides:
    """Strides of batch, head and row of [B, H, rows, D] tensors, in the plan's unit; the last stride is 1."""

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(argument for name in self.names for argument in self._of(name, plan))

    @staticmethod
    def _of(name: str, plan: KernelPlan) -> tuple[Argument, ...]:
        row = "n" if name in _KEY_TENSORS else "m"
        types = ("i64", "i64", "i64" if plan.wide_rows else "i32")
        return tuple(
            Argument(f"stride_{name}{dim}", kind, FromShapes(lambda of, d=d: _stride(of, name, d)))
            for d, (dim, kind) in enumerate(zip(("b", "h", row), types, strict=True))
        )


def _stride(of: LaunchContext, name: str, d: int) -> int:
    tensor = of.tensors[name]
    shared = d == 0 and tensor.size(0) == 1  # keys that the batch shares
    return 0 if shared else tensor.stride(d) // of.plan.unit


@dataclass(frozen=True)
class Array:
    """A pointer to a contiguous array that the engine allocates."""

    name: str
    type: str
    divisible: bool = False  # by 16 bytes, whatever the user's tensors are

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument(self.name, self.type, FromTensors(self.name), self.divisible),)


@dataclass(frozen=True)
class Own:
    """A pointer to a tensor of the problem."""

    name: str
    type: str
    tensor: Callable[[Problem], torch.Tensor]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument(self.name, self.type, FromProblem(self.tensor)),)


@dataclass(frozen=True)
class Scalars:
    """Numbers of SCALARS."""

    names: tuple[str, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(Argument(name, SCALARS[name][0], FromShapes(SCALARS[name][1])) for name in self.names)


@dataclass(frozen=True)
class Counter:
    """The counter from which persistent programs take tiles."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return (Argument("counter_ptr", "*i32", TileCounter()),)


@dataclass(frozen=True)
class When:
    """Operands of the plans that a condition holds for."""

    condition: Callable[[KernelPlan], bool]
    operands: tuple[Operand, ...]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(a for operand in self.operands for a in operand.arguments(plan)) if self.condition(plan) else ()


@dataclass(frozen=True)
class ScoreScale:
    """The factor of q k^T, with log2(e) in it where no score_mod reads the score."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return Scalars((plan.scale,)).arguments(plan)


@dataclass(frozen=True)
class MaskLists:
    """The lists of blocks along the axis that programs own, and where those of a batch and head begin."""

    strides: tuple[str, ...] = ("stride_mask_b", "stride_mask_h")

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        if plan.blocks is None:
            return ()
        side, by_key = ("q", True) if plan.transposed else ("kv", False)
        pointers = (
            Argument(f"{side}_{name}_ptr", "*i32", FromProblem(lambda p, n=name: _lists(p, by_key)[n]))
            for name in ("partial", "partial_runs", "full", "full_runs", "order")
        )
        return (*pointers, *Scalars(self.strides).arguments(plan))


def _mask(problem: Problem) -> BlockMask:
    assert problem.block_mask is not None
    return problem.block_mask


def _lists(problem: Problem, by_key: bool) -> dict[str, torch.Tensor]:
    mask = _mask(problem)
    lists = mask.q_runs if by_key else mask.kv_runs
    assert lists is not None
    return {
        "partial": lists.partial.row_ptr, "partial_runs": lists.partial.runs, "full": lists.full.row_ptr,
        "full_runs": lists.full.runs, "order": lists.order,
    }  # fmt: skip


@dataclass(frozen=True)
class ModArguments:
    """The captured tensors and numbers of score_mod and mask_mod."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(argument for mod in (plan.score, plan.mask) if mod for argument in mod.arguments())


@dataclass(frozen=True)
class CaptureSums:
    """The buffers that gradients of captured tensors are added to."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return capture_sum_arguments(plan.grad, plan.sums) if plan.grad is not None and plan.sums else ()


@dataclass(frozen=True)
class Described:
    """A TMA descriptor: its argument, the tensor or array that it describes, and the shape of a tile."""

    argument: str
    of: str
    block: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: that of the plan
    layout: str = ""  # in shared memory, as Gluon writes it

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        element = TRITON_POINTER[self.dtype or plan.dtype][1:]
        kind = f"tensordesc<{element}{list(self.block)}{',' if self.layout else ''}{self.layout}>"
        return (Argument(self.argument, kind, TensorDescriptor(self.of, self.block)),)


@dataclass(frozen=True)
class Descriptors:
    """TMA descriptors, which depend on the plan's tile and head dims."""

    of: Callable[[KernelPlan], tuple[Described, ...]]

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        return tuple(a for descriptor in self.of(plan) for a in descriptor.arguments(plan))


def padded(rows: int) -> int:
    """Return the rows of a head in arrays that backward kernels read without a guard; tiles may begin at any row."""
    return -(-rows // LARGEST_TILE) * LARGEST_TILE + LARGEST_TILE


def heads_per_group(head_bytes: int, l2: int, heads: int) -> int:
    """Return how many heads to work on at a time, so that what they stream stays in L2.

    Groups are about even: of 16 heads in groups of 3 the last one alone would leave most programs idle at the end.
    """
    most = max(1.0, l2 * 0.6 / max(1, head_bytes))
    groups = max(1, round(heads / most))
    return -(-heads // groups)


def _heads(of: LaunchContext) -> int:
    """Return the heads that programs own tiles of."""
    B, Hq = of.problem.query.shape[:2]
    if of.plan.transposed:
        return of.problem.key.size(0) * of.problem.key.size(1)
    return Hq if of.plan.spec.captures == "adds over batch" else B * Hq


def tiles_of(of: LaunchContext) -> int:
    """Return the tiles of all heads that programs own."""
    plan, problem = of.plan, of.problem
    rows = (problem.key if plan.transposed else problem.query).size(2)
    if plan.spec.fills_padding:
        return padded(rows) // plan.tile.BLOCK_M * _heads(of)
    return -(-rows // plan.outer[0]) * plan.tiles_per_block * _heads(of)


def _heads_per_group(of: LaunchContext) -> int:
    q, k, v = of.problem.query, of.problem.key, of.problem.value
    rows = q.size(2) * _group_size(of) if of.plan.transposed else k.size(2)
    head_bytes = rows * (q.size(3) + v.size(3)) * q.element_size()
    return heads_per_group(head_bytes, l2_bytes(q.device), _heads(of))


def _group_size(of: LaunchContext) -> int:
    return of.problem.query.size(1) // of.problem.key.size(1)


def _qk_scale(of: LaunchContext) -> float:
    # The forward's maximum needs a positive factor: the sign, or a scale of zero, is applied to q there.
    scale = of.problem.scale
    return (abs(scale) * LOG2E or 1.0) if of.plan.is_forward else scale * LOG2E


def _blocks(of: LaunchContext) -> int:
    """Return the rows of blocks of the lists."""
    rows = (of.problem.key if of.plan.transposed else of.problem.query).size(2)
    return -(-rows // _mask(of.problem).BLOCK_SIZE[of.plan.transposed])


def _mask_stride_b(of: LaunchContext) -> int:
    mask = _mask(of.problem)
    return _blocks(of) * mask.H if mask.B > 1 else 0


def _sink_stride(of: LaunchContext, d: int) -> int:
    assert of.problem.sink is not None
    return of.problem.sink.stride(d) if of.problem.sink.size(d) > 1 else 0


def _dropout(of: LaunchContext) -> Dropout:
    assert of.problem.dropout is not None
    return of.problem.dropout


# Triton type and value of each number that kernels receive.
SCALARS: dict[str, tuple[str, Callable[[LaunchContext], int | float]]] = {
    "tiles": ("i32", tiles_of),
    "M": ("i32", lambda of: of.problem.query.size(2)),
    "M_padded": ("i32", lambda of: padded(of.problem.query.size(2))),
    "N": ("i32", lambda of: of.problem.key.size(2)),
    "B": ("i32", lambda of: of.problem.query.size(0)),
    "heads": ("i32", _heads),
    "heads_q": ("i32", lambda of: of.problem.query.size(1)),
    "heads_kv": ("i32", lambda of: of.problem.key.size(1)),
    "group_size": ("i32", _group_size),
    "heads_per_group": ("i32", _heads_per_group),
    "batch_repeats": ("i32", lambda of: of.problem.query.size(0) // max(1, of.problem.key.size(0))),
    "batch_shares_keys": ("i32", lambda of: int(of.problem.key.size(0) == 1)),
    "sm_scale": ("fp32", lambda of: of.problem.scale),
    "dq_scale": ("fp32", lambda of: of.problem.scale),
    "dk_scale": ("fp32", lambda of: of.problem.scale),
    "qk_scale": ("fp32", _qk_scale),
    "q_sign": ("fp32", lambda of: float((of.problem.scale > 0) - (of.problem.scale < 0))),
    "stride_mask_b": ("i32", _mask_stride_b),
    "stride_mask_h": ("i32", lambda of: _blocks(of) if _mask(of.problem).H > 1 else 0),
    "stride_sink_b": ("i64", lambda of: _sink_stride(of, 0)),
    "stride_sink_h": ("i64", lambda of: _sink_stride(of, 1)),
    "drop_below": ("i32", lambda of: _dropout(of).drop_below),
    "keep_scale": ("fp32", lambda of: _dropout(of).keep_scale),
}
