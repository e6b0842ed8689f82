"""kernel_plan: KernelPlan, the cache key of a kernel: everything that changes its source, and nothing else.

Lengths, strides, batch, heads, scale, captured values and lifted numbers are runtime arguments. Whether pointers and
strides are multiples of 16 bytes is a field, because loads are vectorized only if the compiler knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Argument, Tensors
from flexattn.compile.head_dims import pieces_of, smallest_widths, split_head_dim
from flexattn.compile.kernel_source import kernel_name
from flexattn.compile.mod_plan import ModPlan
from flexattn.compile.tiles import Tile
from flexattn.machine.target import Target
from flexattn.process.frozen_class import frozen

Phase = Literal["fwd", "bwd"]

MEMORY = {"float": "float32 sums: 4 bytes", "integer": "int64 sums, the same in any order: 8 bytes"}
HOPPER_ROWS = 64  # queries per consumer warpgroup in Hopper's forward, keys per consumer warpgroup in its backward
_MOST_PAGES = 8  # of a tile that are looked up one by one


@frozen
class Rings:
    """Number of shared memory buffers in the rings of Hopper's backward."""

    queries: int  # one more than gradients if it fits: dk reads each tile one step later
    gradients: int
    ds: int = 0  # if it computes dq
    dq: int = 0  # buffers of 32 columns for the atomic adds to dq
    keys: int = 1  # tiles of keys


class Operand(Protocol):
    """One or more arguments of a kernel. They may depend on the plan."""

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]: ...


@frozen
class Feature:
    """An optional part of a kernel. It is an operand that adds its operands to plans that have the feature."""

    name: str
    wanted: Callable[[Problem, Tensors], bool]  # whether a problem, with these arrays of the launch, needs it
    operands: tuple[Operand, ...]
    outputs: Callable[[Problem], dict[str, Tensor]] | None = None  # arrays that the engine allocates for it
    text: str = ""  # its line in a printed plan

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        if self.name not in plan.features:
            return ()
        return tuple(a for operand in self.operands for a in operand.arguments(plan))


@frozen(eq=False)
class KernelSpec:
    """One kernel. Its signature, launch arguments, strides and features are derived from `operands`, in that order."""

    name: str  # also the name of its template
    phase: Phase
    tensors: tuple[str, ...]  # [B, H, rows, D] tensors that it reads and writes
    operands: tuple[Operand, ...]
    shared_bytes: Callable[[KernelPlan], int]  # upper bound on the shared memory of a program
    owns_keys: bool = False  # programs own keys and loop over queries, instead of the reverse
    products: bool = True  # computes scores, so it has mods and masks
    dims: tuple[str, str] = ("q", "v")  # the tensors whose head dims are its plan's D and Dv
    owns_both: bool = False  # other programs own queries; needs owns_keys
    streams: tuple[str, ...] = ()  # tensors that the inner loop may load through TMA
    gradients: tuple[str, ...] = ()  # which of dq, dk and dv it computes
    # What it does with gradients of captured tensors: adds them to buffers, sums them over the batch and adds the sums,
    # or computes their magnitudes.
    captures: Literal["", "adds", "adds over batch", "sizes"] = ""
    gluon: bool = False  # a Gluon kernel
    # Widths of its tiles, (of q and k, of v), if it is a Gluon kernel: ascending. TMA pads narrower heads with zeros.
    widths: tuple[tuple[int, int], ...] = ()
    rings: Mapping[tuple[int, int], Rings] = field(default_factory=dict)  # by widths, if programs own keys
    # The same if the next tile of keys is loaded during the current one, for the widths where both fit.
    prefetch_rings: Mapping[tuple[int, int], Rings] = field(default_factory=dict)
    fills_padding: bool = False  # its programs also own the padding after the last row
    # Programs own queries of all heads that share a key head, and one split of the keys. merge_splits follows.
    splits_keys: bool = False
    persistent: bool = False  # at most one program per SM, which processes several tiles
    owns_dq: bool = False  # programs own stripes of keys, and write dq of the queries whose keys are in one stripe
    separates_dk: bool = False  # dk and dv are summed by two roles, which read queries at different times
    token_tiles: bool = False  # it can compute the tokens of a grid tile by tile (KernelPlan.token_tile)
    row_ends: bool = False  # it computes the bounds of the mask's rows once per tile, and its loops read them
    tile_options: tuple[str, str] | None = None  # kernel_options for BLOCK_M and BLOCK_N
    tiled_as: str = ""  # the kernel whose rows of the tile table it uses; "": its own
    fixed_tile: Tile | None = None  # used instead of the tile table

    def __repr__(self) -> str:
        return f"KernelSpec({self.name})"

    @property
    def sums_over_batch(self) -> bool:
        """Whether it sums gradients of captured tensors over the batch before it adds them."""
        return self.captures == "adds over batch"

    @property
    def only_captures(self) -> bool:
        """Whether it computes gradients of captured tensors, or their magnitudes, and no other gradients."""
        return bool(self.captures) and not self.gradients

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features that a plan of this kernel may have."""
        return tuple(operand for operand in self.operands if isinstance(operand, Feature))

    def arguments(self, plan: KernelPlan) -> tuple[Argument, ...]:
        """Return the runtime arguments of the plan's kernel, in order."""
        return tuple(argument for operand in self.operands for argument in operand.arguments(plan))


@frozen
class KernelPlan:
    """One kernel. Equal plans give the same source, byte for byte."""

    spec: KernelSpec
    target: Target
    dtype: torch.dtype
    D: int
    Dv: int
    tile: Tile
    aligned: bool  # pointers and all strides but the last, which is 1, are multiples of 16 bytes
    tma: bool = False  # streamed tiles are loaded through tensor descriptors (sm_90 and later)
    wide_rows: bool = False  # a stride between rows needs 64 bits
    score: ModPlan | None = None
    grad: ModPlan | None = None
    mask: ModPlan | None = None
    blocks: tuple[int, int] | None = None  # BLOCK_SIZE of the mask, None without one
    full_overhangs: bool = False  # a full block may extend past the lengths
    # Each query attends to an interval of keys, whose bounds the mask_mod gives. The kernel computes them and reads no
    # block lists: `blocks` is None.
    intervals: bool = False
    page_size: int = 0  # keys in a page, 0 without a block_table
    # (rows, columns) of a tile of 128 tokens, if tensors hold a grid of tokens in row-major order, and rows and columns
    # of scores, and of arrays between kernels, are in the order of tiles.
    token_tile: tuple[int, int] | None = None
    float_index: bool = True  # lengths are below 2**22: index differences are exact in float32
    precision: str = "ieee"  # of float32 products: ieee, tf32 or tf32x3
    exact: bool = False
    features: tuple[str, ...] = ()  # names of the spec's optional parts that the kernel has
    # No FMA contraction. The compiler contracts the same expression differently at each place where it is inlined, so
    # a row's bits could depend on which loop computes it.
    batch_invariant: bool = False
    # Weights of most tiles are relative to an earlier maximum. Tiles whose sums overflow are computed again.
    fixed_reference: bool = False
    prefetches_keys: bool = False  # Hopper's backward loads the next tile of keys during the current one
    trims_runs: bool = False  # Hopper's backward skips the first and last queries of partial blocks without a pair
    integer_sums: bool = False  # gradients of captured tensors are summed as integers, for deterministic algorithms

    def with_fields(self, **changes: object) -> KernelPlan:
        """Return a copy with other fields. A call with new lengths makes six, and dataclasses.replace is slow."""
        made = object.__new__(KernelPlan)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def is_hopper(self) -> bool:
        """Whether it is a Gluon kernel."""
        return self.spec.gluon

    @property
    def is_forward(self) -> bool:
        return self.spec.phase == "fwd"

    @property
    def transposed(self) -> bool:
        """Whether a program owns keys and loops over queries."""
        return self.spec.owns_keys

    @property
    def cuts_runs(self) -> bool:
        """Whether the last tile of a run of full blocks may be partial."""
        return self.cuts_blocks or self.full_overhangs or "seqused_k" in self.features or "q_offsets" in self.features

    @property
    def mask_of_pairs(self) -> ModPlan | None:
        """The mask_mod, if it is evaluated for (query, key) pairs."""
        return None if self.intervals else self.mask

    @property
    def pages_per_tile(self) -> int:
        """Pages of the keys of a tile, if tiles begin where pages do; 0 if the page of each key is looked up."""
        if not self.page_size or self.cuts_blocks:
            return 0
        pages = max(1, self.tile.BLOCK_N // self.page_size)  # both are powers of two
        return pages if pages <= _MOST_PAGES else 0

    @property
    def one_loop(self) -> bool:
        """Whether forward_split has one inner loop, for whole and partial tiles.

        A second one keeps q in registers until it starts. With wide heads these spill: 480 bytes at D 576, Dv 512.
        """
        return self.spec.splits_keys and max(self.D, self.Dv) * self.dtype.itemsize > 512

    @property
    def reads_column_pairs(self) -> bool:
        """Whether two columns of float8 values are loaded as one element."""
        wide = all(p.width >= 32 and p.used % 2 == 0 for p in split_head_dim(self.Dv))
        return "descales" in self.features and self.aligned and wide and self.dtype.itemsize == 2

    @property
    def has_dropout(self) -> bool:
        return "dropout" in self.features

    @property
    def scale(self) -> str:
        """Name of the argument that q k^T is multiplied by.

        Without a score_mod, log2(e) is part of the scale. An exact backward leaves it out, to avoid its rounding.
        """
        return "qk_scale" if self.score is None and not (self.exact and not self.is_forward) else "sm_scale"

    @property
    def name(self) -> str:
        """The kernel function's name, as profilers show it."""
        return kernel_name(self.spec.name, *(m.graph.name for m in (self.score, self.mask) if m is not None))

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of q and k, and of v, in the tiles of a Hopper kernel. (0, 0): it has none for these head dims."""
        return smallest_widths(self.spec.widths, self.D, self.Dv)

    @property
    def adds_dq(self) -> bool:
        """Whether it adds to a float32 accumulator of dq in global memory."""
        return self.spec.gluon and len(self.spec.gradients) == 3

    @property
    def rings(self) -> Rings:
        """Ring sizes of Hopper's backward."""
        return (self.spec.prefetch_rings if self.prefetches_keys else self.spec.rings)[self.widths]

    @property
    def key_stages(self) -> int:
        """Buffers for tiles of keys in hopper_dq: one more than for values, because dq reads keys one step later."""
        return self.tile.num_stages + 1

    @property
    def tiles_of_queries(self) -> int:
        """Buffers for tiles of queries in hopper_forward. With two, the next tile is loaded during the current one.

        Causal, D 64: 391 -> 400 TFLOP/s. At D 128 two give no speedup and use all shared memory. Above D 128 they do
        not fit.
        """
        return 2 if self.widths[0] == 64 and self.pairs == 1 else 1

    @property
    def shares_output(self) -> bool:
        """Whether hopper_forward stores its output from the buffer of the queries, because both do not fit."""
        return self.widths[0] > 128

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of hopper_forward."""
        return self.tile.BLOCK_M // HOPPER_ROWS

    @property
    def pairs(self) -> int:
        """Pairs of consumer warpgroups of hopper_forward, each of which computes tiles of its own.

        Where halves of blocks are skipped, a tile of queries has few tiles of keys, and most of the time of a pair is
        latency.
        """
        narrow = self.widths == (64, 64) and self.score is None
        return 2 if self.is_forward and "halves" in self.features and narrow else 1

    @property
    def weights_form(self) -> str:
        """How hopper_forward keeps weights until they are multiplied by values, see `hopper_weights.py.jinja`.

        Time with float32 relative to operand: causal D 64 0.93, D 128 0.98 to 1.00, ALiBi 0.96. But without a mask
        1.01, with a window of 1,024 at D 128, whose maxima are all taken, 1.02, and with bits 1.04 unless halves are
        skipped.
        """
        if self.consumers * self.pairs > 2:  # at most 160 registers each
            return "pairs"
        plain_bits = "bits" in self.features and "halves" not in self.features
        if self.blocks is None or plain_bits or self.widths[0] > 128:
            return "operand"
        return "float32" if self.fixed_reference or self.widths[0] == 64 else "operand"

    @property
    def keeps_keys(self) -> bool:
        """Whether Hopper's backward keeps keys and values in registers, as operands of its products.

        A product of 64 x 64 x 16 with both operands in shared memory reads 128 bytes per cycle, all that there is. Full
        D 64 without: 0.89 of the rate; causal D 192 (hopper_backward_wide): 0.96. At D 96 it changes nothing. At 128,
        and in hopper_dkdv at 192, they do not fit.
        """
        return self.widths == (64, 64) or (self.widths == (192, 128) and self.adds_dq)

    @property
    def delays_dk(self) -> bool:
        """Whether Hopper's backward adds the previous tile of queries to dk, so that it does not wait for its own dS.

        With a derivative of the score there is enough work to hide the wait (tanh: 4 % faster, D 128). In hopper_dkdv
        at D 192, the dS of the tile before does not fit in registers.
        """
        return (not self.scales_gradient or self.widths[0] == 64) and self.widths != (192, 128)

    @property
    def frees_queries(self) -> bool:
        """Whether Hopper's backward releases each buffer of queries by itself, and not with one of dO.

        It does if they are read before the end of a step. Otherwise the release of dO is enough. One mbarrier.arrive
        less is one barrier of the warpgroup less in each step: full and causal D 64 0.99, softcap 0.98 of the time.
        Where queries would be released later for it, at D 128, it takes 0.98 (documents) to 1.01 (ALiBi).
        """
        ends_with_step = self.scores_ahead or not self.delays_dk
        return not ends_with_step or self.spec.separates_dk

    @property
    def scores_ahead(self) -> bool:
        """Whether hopper_backward computes the scores of the next tile while dS of this one is computed.

        Time relative to the order without, D 64: full 0.90 to 0.96, causal 0.92 to 0.98, grouped heads 0.92, documents
        1.00. With a score_mod it spills: softcap 1.08, ALiBi 1.01. With bits it takes 1.00, or 1.05 if the words are
        loaded ahead too, at D 96 1.05, and at 128 the registers do not suffice. With stripes it spills 220 bytes, and
        was not measured.
        """
        plain = self.score is None and "bits" not in self.features and not self.spec.owns_dq
        return self.adds_dq and self.widths == (64, 64) and plain

    @property
    def scales_gradient(self) -> bool:
        """Whether score_mod changes the gradient of the score. `score + bias` does not."""
        if self.grad is None or not self.spec.gradients:
            return False
        output = self.grad.graph.outputs[0]
        return output is None or not self.grad.graph.is_input(output, "grad")

    @property
    def sums(self) -> str:
        """How the kernel sums gradients of captured tensors: "float", "integer" or "sizes"; "" if it does not."""
        if not self.spec.captures or self.grad is None or not self.grad.graph.sites:
            return ""
        return "sizes" if self.spec.captures == "sizes" else "integer" if self.integer_sums else "float"

    @property
    def unit(self) -> int:
        """The unit that strides are passed in: the elements in 16 bytes if aligned, otherwise 1."""
        return 16 // self.dtype.itemsize if self.aligned else 1

    @property
    def outer(self) -> tuple[int, int]:
        """(rows of a mask block, rows of a tile) on the axis that a program owns."""
        own = int(self.transposed)
        tile = (self.tile.BLOCK_M, self.tile.BLOCK_N)[own]
        return (self.blocks[own] if self.blocks else tile), tile

    @property
    def cuts_blocks(self) -> bool:
        """Whether the block size on the streamed axis is not a multiple of the tile size."""
        if self.blocks is None:
            return False
        return bool(self.blocks[0] % self.tile.BLOCK_M if self.transposed else self.blocks[1] % self.tile.BLOCK_N)

    @property
    def has_partial_step(self) -> bool:
        """Whether dK/dV uses a smaller BLOCK_M in partial blocks."""
        return self.blocks is not None and self.tile.partial_m != self.tile.BLOCK_M

    @property
    def tiles_per_block(self) -> int:
        block, tile = self.outer
        return -(-block // tile)

    def __repr__(self) -> str:
        return self.text()

    def text(self, origin: str = "") -> str:
        """Return the printed plan, with the origin of its tile if given."""
        t = self.tile
        kinds = f"{str(self.dtype).removeprefix('torch.')}  D {self.D}  Dv {self.Dv}"
        without = "each query attends to an interval of keys" if self.intervals else "every pair attends"
        lines = [
            f"KernelPlan {self.name}",
            f"    target   {self.target}",
            f"    dtype    {kinds}  {'aligned' if self.aligned else 'unaligned rows'}{'  tma' if self.tma else ''}",
            f"    tile     BLOCK_M {t.BLOCK_M}  BLOCK_N {t.BLOCK_N}  warps {t.num_warps}  stages {t.num_stages}"
            + (f"  ({origin})" if origin else ""),
        ]
        if self.spec.products:
            lines.append(f"    blocks   {'{} x {}'.format(*self.blocks) if self.blocks else f'none: {without}'}")
        lines += [
            f"    {m.role:<8} {m.graph.name}  {m.graph.location}" for m in (self.score, self.mask) if m is not None
        ]
        if self.token_tile is not None:
            lines.append("    tokens   of a row-major grid, in tiles of {} x {}".format(*self.token_tile))
        lines += [f.text for f in self.spec.features if f.name in self.features and f.text]
        if self.batch_invariant:
            lines.append("    order    batch-invariant: keys ascending, nothing fused")
        if self.fixed_reference:
            lines.append("    maxima   of some tiles of keys; a tile of queries whose sums overflow is computed again")
        if self.prefetches_keys:
            lines.append("    keys     of the next tile are loaded during the current one")
        if self.trims_runs:
            lines.append("    runs     of partial blocks, without the first and last 64 queries if no pair attends")
        if self.is_hopper and self.pairs > 1:
            lines.append(f"    roles    {self.pairs} pairs of consumers, each with tiles of its own")
        if self.adds_dq:
            lines.append(f"    memory   a float32 sum of dq: {128 * pieces_of(self.D)} bytes for each row, padded")
        if self.sums in MEMORY:
            lines.append(f"    memory   {MEMORY[self.sums]} per element of a captured tensor that requires a gradient")
        return "\n".join(lines)
