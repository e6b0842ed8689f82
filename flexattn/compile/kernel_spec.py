"""KernelSpec: what is the same for all plans of one kernel. `kernels.py` holds the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.tiles import Tile

if TYPE_CHECKING:
    from flexattn.compile.kernel_plan import KernelPlan

Tensors = Mapping[str, Tensor]  # by the names that templates give them: q, k, v, o, do, dq, dk, dv, lse_ptr, ...
Phase = Literal["fwd", "bwd"]


@dataclass(frozen=True)
class LaunchContext:
    """What the arguments of a launch are computed from."""

    plan: KernelPlan
    problem: Problem
    tensors: Tensors  # the spec's tensors


# Where a launch finds the value of an argument.


@dataclass(frozen=True)
class FromShapes:
    """A number that is the same for all launches with the same shapes, strides and numbers."""

    value: Callable[[LaunchContext], int | float]


@dataclass(frozen=True)
class FromTensors:
    """The tensor or array that the engine passes by this name."""

    name: str


@dataclass(frozen=True)
class FromProblem:
    """A tensor of the problem: a list of the mask, a captured tensor, the seed of dropout."""

    tensor: Callable[[Problem], Tensor]


@dataclass(frozen=True)
class TensorDescriptor:
    """A TMA descriptor of a tensor that the engine passes by this name."""

    name: str
    block: tuple[int, ...]  # shape of a tile


@dataclass(frozen=True)
class TileCounter:
    """An int32 zero that persistent programs take their tiles from, new for each launch."""


@dataclass(frozen=True)
class Argument:
    """One runtime argument of a kernel: its name in the template, its Triton type and where a launch finds it."""

    name: str
    type: str  # as Triton writes it: i32, fp32, *bf16, tensordesc<...>
    source: FromShapes | FromTensors | FromProblem | TensorDescriptor | TileCounter
    divisible: bool = False  # a pointer that is a multiple of 16 bytes

    @property
    def is_descriptor(self) -> bool:
        return isinstance(self.source, TensorDescriptor)


class Operand(Protocol):
    """One or several arguments of a kernel, which may depend on the plan."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]: ...


@dataclass(frozen=True)
class Feature:
    """An optional part of a kernel. As an operand, it adds its operands to plans that have it."""

    name: str
    wanted: Callable[[Problem, Tensors], bool]  # by a problem and the arrays of the launch
    operands: tuple[Operand, ...]
    text: str = ""  # the line that it adds to a printed plan

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        if self.name not in plan.features:
            return ()
        return tuple(a for operand in self.operands for a in operand.arguments(plan))


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel. Its signature, launch arguments, strides and features follow from `operands`, in that order."""

    name: str  # also that of its template
    phase: Phase
    tensors: tuple[str, ...]  # [B, H, rows, D] tensors that it reads and writes
    operands: tuple[Operand, ...]
    shared_bytes: Callable[[KernelPlan], int]  # upper bound of the shared memory of a program
    owns_keys: bool = False  # programs own keys and loop over queries, not the other way round
    products: bool = True  # computes scores, so that mods and masks are part of it
    dims: tuple[str, str] = ("q", "v")  # the tensors whose head dims are its plan's D and Dv
    streams: tuple[str, ...] = ()  # tensors that the inner loop may load through TMA
    gradients: tuple[str, ...] = ()  # of dq, dk, dv: what it computes
    # What it does with gradients of captured tensors: adds them to buffers, adds what it summed over the batch, or
    # finds how large they are.
    captures: Literal["", "adds", "adds over batch", "sizes"] = ""
    gluon: bool = False  # a Gluon kernel with a role for each group of warps
    fills_padding: bool = False  # its programs also own the padding after the last row
    persistent: bool = False  # at most one program for each multiprocessor, which takes tile after tile
    tile_options: tuple[str, str] | None = None  # kernel_options for BLOCK_M and BLOCK_N
    tiled_as: str = ""  # the kernel whose rows of the tile table it uses; "": its own
    fixed_tile: Tile | None = None  # instead of one from the table

    def __repr__(self) -> str:
        return f"KernelSpec({self.name})"

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that a plan of this kernel may have."""
        return tuple(operand for operand in self.operands if isinstance(operand, Feature))

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        """Return the runtime arguments of the plan's kernel, in order."""
        return tuple(argument for operand in self.operands for argument in operand.arguments(plan))
