"""kernel_plan: what a kernel's source depends on, and nothing else. A KernelPlan is the cache key of a kernel.

Lengths, strides, batch, heads, scale, captured values and lifted numbers are runtime arguments. Whether pointers and
strides are multiples of 16 bytes is a field, since without it no load is vectorised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Argument, Tensors
from flexattn.compile.head_dims import pieces_of, widths_of
from flexattn.compile.kernel_source import kernel_name
from flexattn.compile.mod_plan import ModPlan
from flexattn.compile.tiles import Tile
from flexattn.machine.target import Target

Phase = Literal["fwd", "bwd"]

MEMORY = {"float": "float32 sums: 4 bytes", "integer": "int64 sums, the same in any order: 8 bytes"}


@dataclass(frozen=True)
class Rings:
    """How many tiles Hopper's backward holds in shared memory."""

    queries: int  # for dk each waits one step longer than its gradient, where there is room
    gradients: int
    ds: int
    dq: int  # of 32 columns each, on their way to the sum


# By widths; those of 256 fill 226 of 227 KB.
RINGS = {
    (64, 64): Rings(4, 3, 3, 2), (128, 128): Rings(3, 2, 2, 4), (192, 128): Rings(2, 2, 2, 6),
    (256, 256): Rings(2, 2, 1, 2),
}  # fmt: skip


class Operand(Protocol):
    """One or several arguments of a kernel, which may depend on the plan."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]: ...


@dataclass(frozen=True)
class Feature:
    """An optional part of a kernel. As an operand, it adds its operands to plans that have it."""

    name: str
    wanted: Callable[[Problem, Tensors], bool]  # by a problem and the arrays of the launch
    operands: tuple[Operand, ...]
    outputs: Callable[[Problem], dict[str, Tensor]] | None = None  # arrays that a launch allocates for it
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


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: two equal plans give the same source, byte for byte."""

    spec: KernelSpec
    target: Target
    dtype: torch.dtype
    D: int
    Dv: int
    tile: Tile
    aligned: bool  # all strides but the last, which is 1, and the pointers are multiples of 16 bytes
    tma: bool = False  # streamed tiles come through tensor descriptors (sm_90 and later)
    wide_rows: bool = False  # a stride between rows needs 64 bits
    score: ModPlan | None = None
    grad: ModPlan | None = None
    mask: ModPlan | None = None
    blocks: tuple[int, int] | None = None  # BLOCK_SIZE of the mask, None without one
    full_overhangs: bool = False  # a full block may reach past the lengths
    float_index: bool = True  # lengths are below 2**22: index differences are exact in float32
    precision: str = "ieee"  # of float32 products: ieee, tf32 or tf32x3
    exact: bool = False
    features: tuple[str, ...] = ()  # names of the spec's optional parts that the kernel has
    # Rows' bits must not hang on where the compiler found a product to fuse into a sum, which differs between the
    # places that one expression is inlined at.
    batch_invariant: bool = False
    integer_sums: bool = False  # gradients of captured tensors are added as integers: deterministic algorithms

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.spec.name

    @property
    def is_hopper(self) -> bool:
        """Whether it is a Gluon kernel with a role for each group of warps."""
        return self.spec.gluon

    @property
    def is_forward(self) -> bool:
        return self.spec.phase == "fwd"

    @property
    def transposed(self) -> bool:
        """Whether a program owns keys and loops over queries."""
        return self.spec.owns_keys

    @property
    def has_dropout(self) -> bool:
        return "dropout" in self.features

    @property
    def scale(self) -> str:
        """The argument that q k^T is multiplied by.

        Without a score_mod nothing reads the score itself, so log2(e) is part of the scale. An exact backward keeps
        the score in the natural domain, to avoid that rounding.
        """
        return "qk_scale" if self.score is None and not (self.exact and not self.is_forward) else "sm_scale"

    @property
    def name(self) -> str:
        """The kernel function's name, as profilers show it."""
        return kernel_name(self.spec.name, *(m.graph.name for m in (self.score, self.mask) if m is not None))

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of q and k, and of v, in the tiles of a Hopper kernel."""
        return widths_of(self.D, self.Dv)

    @property
    def adds_dq(self) -> bool:
        """Whether it adds to a float32 sum of dq."""
        return self.spec.gluon and len(self.spec.gradients) == 3

    @property
    def rings(self) -> Rings:
        """Tiles under way in Hopper's backward."""
        return RINGS[self.widths]

    @property
    def key_stages(self) -> int:
        """Tiles of keys under way in hopper_dq: each waits one step longer than its values, for dq."""
        return self.tile.num_stages + 1

    @property
    def tiles_of_queries(self) -> int:
        """Tiles of queries in hopper_forward: with two the next one comes while one is worked on.

        Causal, D 64: 391 -> 400 TFLOP/s. At D 128 it changes nothing and takes all shared memory, above there is none.
        """
        return 2 if self.widths[0] == 64 else 1

    @property
    def shares_output(self) -> bool:
        """Whether hopper_forward's output leaves from the buffer of its queries, since both do not fit."""
        return self.widths[0] > 128

    @property
    def scales_gradient(self) -> bool:
        """Whether d(score) is taken and anything else than the gradient that comes in, as it is for `score + bias`."""
        if self.grad is None or not self.spec.gradients:
            return False
        output = self.grad.graph.outputs[0]
        return output is None or not self.grad.graph.is_input(output, "grad")

    @property
    def sums(self) -> str:
        """How the kernel sums gradients of captured tensors: float, integer or sizes; "" without such gradients."""
        if not self.spec.captures or self.grad is None or not self.grad.graph.sites:
            return ""
        return "sizes" if self.spec.captures == "sizes" else "integer" if self.integer_sums else "float"

    @property
    def unit(self) -> int:
        """Elements in 16 bytes where strides are multiples of that, otherwise 1: strides are passed in this unit."""
        return 16 // self.dtype.itemsize if self.aligned else 1

    @property
    def outer(self) -> tuple[int, int]:
        """(rows of a mask block on the side that a program owns, tile rows): they give the programs per block."""
        own = int(self.transposed)
        tile = (self.tile.BLOCK_M, self.tile.BLOCK_N)[own]
        return (self.blocks[own] if self.blocks else tile), tile

    @property
    def cuts_blocks(self) -> bool:
        """Whether blocks of the streamed side are no whole number of tiles."""
        if self.blocks is None:
            return False
        return bool(self.blocks[0] % self.tile.BLOCK_M if self.transposed else self.blocks[1] % self.tile.BLOCK_N)

    @property
    def has_partial_step(self) -> bool:
        """Whether dK/dV takes fewer queries at a time in partial blocks."""
        return self.blocks is not None and self.tile.partial_m != self.tile.BLOCK_M

    @property
    def tiles_per_block(self) -> int:
        block, tile = self.outer
        return -(-block // tile)

    def __repr__(self) -> str:
        return self.text()

    def text(self, origin: str = "") -> str:
        """Return the plan to be read, and where its tile comes from if that is told."""
        t = self.tile
        kinds = f"{str(self.dtype).removeprefix('torch.')}  D {self.D}  Dv {self.Dv}"
        lines = [
            f"KernelPlan {self.name}",
            f"    target   {self.target}",
            f"    dtype    {kinds}  {'aligned' if self.aligned else 'unaligned rows'}{'  tma' if self.tma else ''}",
            f"    tile     BLOCK_M {t.BLOCK_M}  BLOCK_N {t.BLOCK_N}  warps {t.num_warps}  stages {t.num_stages}"
            + (f"  ({origin})" if origin else ""),
            f"    blocks   {f'{self.blocks[0]} x {self.blocks[1]}' if self.blocks else 'none: every pair attends'}",
        ]
        lines += [
            f"    {m.role:<8} {m.graph.name}  {m.graph.location}" for m in (self.score, self.mask) if m is not None
        ]
        lines += [f.text for f in self.spec.features if f.name in self.features and f.text]
        if self.batch_invariant:
            lines.append("    order    batch-invariant: keys ascending, nothing fused")
        if self.adds_dq:
            lines.append(f"    memory   a float32 sum of dq: {128 * pieces_of(self.D)} bytes for each row, padded")
        if self.sums in MEMORY:
            lines.append(f"    memory   {MEMORY[self.sums]} for each element of a captured tensor that learns")
        return "\n".join(lines)
