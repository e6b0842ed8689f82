"""kernel_plan: what a kernel's source depends on, and nothing else. A KernelPlan is the cache key of a kernel.

Lengths, strides, batch, heads, scale, captured values and lifted numbers are runtime arguments. Whether pointers and
strides are multiples of 16 bytes is a field, since without it no load is vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flexattn.compile.kernel_source import kernel_name
from flexattn.compile.lower import ModPlan
from flexattn.compile.tiles import Tile
from flexattn.machine.target import Target

KERNELS = ("forward", "backward_delta", "backward_dq", "backward_dkdv")
# Widths (of q and k, of v) that Hopper's kernels are made for; narrower heads are filled with zeros by the TMA unit.
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
# A program owns keys and walks queries.
TRANSPOSED = ("backward_dkdv", "hopper_backward", "hopper_backward_wide", "hopper_dkdv")
PAIR, FUSED = KERNELS[2:], ("hopper_backward", "backward_dq_rows")  # the ways from delta to all gradients
# Forms of backward_dq: gradients of captured tensors without dq, and how large each row's contributions to them are.
CAPTURES, SIZES = "backward_captures", "backward_sizes"
BATCH_CAPTURES = "backward_batch_captures"  # a kernel of its own: contributions are summed over the batch first
SCATTERS = ("backward_dq", CAPTURES, SIZES, BATCH_CAPTURES)

MEMORY = {"float": "float32 sums: 4 bytes", "integer": "int64 sums, the same in any order: 8 bytes"}


@dataclass(frozen=True)
class Part:
    """A slice of a head dim that one matrix product takes: `width` is a power of two, `used` what is there."""

    index: int
    offset: int
    width: int
    used: int


def widths_of(D: int, Dv: int) -> tuple[int, int]:
    """Return the least of WIDTHS that hold these head dims; (0, 0) where none does."""
    return next((widths for widths in WIDTHS if widths[0] >= D and widths[1] >= Dv), (0, 0))


def pieces_of(D: int) -> int:
    """Return of how many pieces of 32 columns Hopper's float32 sum of dq is."""
    return -(-D // 32)


@lru_cache(1024)
def split_head_dim(dim: int) -> tuple[Part, ...]:
    """Split a head dim into powers of two: 192 = 128 + 64, 96 = 64 + 32; one padded part where two do not help."""
    padded = max(16, 1 << (dim - 1).bit_length())
    large = padded // 2
    rest = max(16, 1 << (dim - large - 1).bit_length()) if dim > large else 0
    if large >= 16 and rest and large + rest < padded:
        return (Part(0, 0, large, large), Part(1, large, rest, dim - large))
    return (Part(0, 0, padded, dim),)


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


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: two equal plans give the same source, byte for byte."""

    kernel: str  # of KERNELS, FUSED or SCATTERS, or hopper_forward, hopper_dq, hopper_dkdv: the name of a template
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
    max_scores: bool = False
    has_dlse: bool = False
    has_sink: bool = False
    has_dropout: bool = False
    # Rows' bits must not hang on where the compiler found a product to fuse into a sum, which differs between the
    # places that one expression is inlined at.
    batch_invariant: bool = False
    integer_sums: bool = False  # gradients of captured tensors are added as integers: deterministic algorithms

    @property
    def is_hopper(self) -> bool:
        """Whether it is a Gluon kernel with a role for each group of warps."""
        return self.kernel.startswith("hopper")

    @property
    def transposed(self) -> bool:
        """Whether a program owns keys and walks queries."""
        return self.kernel in TRANSPOSED

    @property
    def name(self) -> str:
        """The kernel function's name, as profilers show it."""
        return kernel_name(self.kernel, *(m.graph.name for m in (self.score, self.mask) if m is not None))

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of q and k, and of v, in the tiles of a Hopper kernel."""
        return widths_of(self.D, self.Dv)

    @property
    def adds_dq(self) -> bool:
        """Whether it adds to a float32 sum of dq."""
        return self.kernel in ("hopper_backward", "hopper_backward_wide")

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
        if self.grad is None or self.kernel in (CAPTURES, SIZES, BATCH_CAPTURES):
            return False
        output = self.grad.graph.outputs[0]
        return output is None or not self.grad.graph.is_input(output, "grad")

    @property
    def sums(self) -> str:
        """How the gradients of captured tensors are summed: "float", "integer", "sizes" (`scatter.py`), "" for none."""
        if self.kernel not in SCATTERS or self.grad is None or not self.grad.graph.sites:
            return ""
        return "sizes" if self.kernel == SIZES else "integer" if self.integer_sums else "float"

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
        if self.has_dropout:
            lines.append("    dropout  by Philox, from seed and place")
        if self.has_sink:
            lines.append("    sink     one more term of each sum")
        if self.batch_invariant:
            lines.append("    order    batch-invariant: keys ascending, nothing fused")
        if self.adds_dq:
            lines.append(f"    memory   a float32 sum of dq: {128 * pieces_of(self.D)} bytes for each row, padded")
        if self.sums in MEMORY:
            lines.append(f"    memory   {MEMORY[self.sums]} for each element of a captured tensor that learns")
        return "\n".join(lines)
