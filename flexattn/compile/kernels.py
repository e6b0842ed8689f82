"""kernels: the table of kernels. An operand adds its arguments to the template, the signature and the launch.

The forward is FORWARD or HOPPER_FORWARD. For short queries it is FORWARD_SPLIT (on Hopper with latent keys
HOPPER_LATENT) and MERGE_SPLITS. The backward is SMALL, or it starts with DELTA, followed by HOPPER_BACKWARD (or its
WIDE or STRIPES form) and DQ_ROWS, or by DQ and DKDV, which have Hopper forms too. DQ also computes the gradients of
captured tensors. CAPTURES computes them without dQ, BATCH_CAPTURES sums them over the batch first, SIZES bounds them
for integer sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexattn.call.problem import Problem
from flexattn.compile.head_dims import split_head_dim
from flexattn.compile.hopper_descriptors import (
    dq_descriptors,
    forward_descriptors,
    key_descriptors,
    latent_descriptors,
    stripe_descriptors,
)
from flexattn.compile.kernel_plan import Feature, KernelPlan, KernelSpec, Operand, Rings
from flexattn.compile.operands import (
    Array,
    BitPointers,
    CaptureSumArguments,
    Counter,
    DescriptorOperand,
    Descriptors,
    HalfPointers,
    ListPointers,
    MaskLists,
    ModArguments,
    OfProblem,
    Pointers,
    RedoneCount,
    Scalars,
    ScoreScale,
    Strides,
    When,
    streamed_descriptors,
)
from flexattn.compile.scalars import moves_rows
from flexattn.compile.shared_memory import (
    batch_capture_bytes,
    delta_bytes,
    dq_rows_bytes,
    hopper_dq_bytes,
    hopper_forward_bytes,
    hopper_keys_bytes,
    hopper_latent_bytes,
    product_bytes,
    small_bytes,
)
from flexattn.compile.tiles import Tile
from flexattn.options import option


def _of_rows(problem: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an empty array with one element per query: [B, Hq, M]."""
    return torch.empty(problem.query.shape[:3], dtype=dtype, device=problem.query.device)


MAX_SCORES = Feature(
    "max_scores",
    wanted=lambda problem, arrays: problem.max_scores,
    operands=(Array("max_ptr", "*fp32"),),
    outputs=lambda problem: {"max_ptr": _of_rows(problem)},
)
PROFILE = Feature(
    "profile",
    wanted=lambda problem, arrays: option(problem.options, "PROFILE") is True,
    operands=(Array("cycles_ptr", "*i64"),),  # [B, Hq, M], written at the first query of each tile
    outputs=lambda problem: {"cycles_ptr": _of_rows(problem, torch.int64)},
    text="    profile  clock cycles of each program",
)
SINK = Feature(
    "sink",
    wanted=lambda problem, arrays: problem.sink is not None,
    operands=(OfProblem("sink_ptr", "*fp32", "sink"), Scalars(("stride_sink_b", "stride_sink_h"))),
    text="    sink     one more term of each sum",
)
DROPOUT = Feature(
    "dropout",
    wanted=lambda problem, arrays: problem.dropout is not None,
    operands=(
        OfProblem("seed_ptr", "*i64", "seed"),
        Scalars(("drop_below", "keep_scale", "drop_q", "drop_kv", "drop_bh", "drop_heads")),
    ),
    text="    dropout  by Philox, from seed and position",
)
DLSE = Feature(
    "dlse",
    wanted=lambda problem, arrays: "dlse_ptr" in arrays,
    operands=(Array("dlse_ptr", "*fp32"),),  # [B, Hq, M]
)

# Tiles of tokens in a row of the grid.
TOKEN_TILES = When(lambda plan: plan.token_tile is not None, (Scalars(("tiles_across",)),))

# Of Hopper kernels alone: their plans get it in hopper.py.
BITS = Feature(
    "bits",
    wanted=lambda problem, arrays: problem.has_bits,
    operands=(BitPointers(),),
    text="    bits     of the pairs in partial blocks, instead of mask_mod",
)
HALVES = Feature(
    "halves",
    wanted=lambda problem, arrays: problem.skips_halves,
    operands=(HalfPointers(),),
    text="    halves   of partial blocks without a pair that attends are skipped",
)
SEQUSED_K = Feature(
    "seqused_k",
    wanted=lambda problem, arrays: problem.layout is not None and problem.layout.seqused_k is not None,
    operands=(OfProblem("seqused_k_ptr", "*i32", "seqused_k"),),
    text="    lengths  of sequences, from seqused_k",
)
# Only where block lists are read from q_offsets on: Layout.read_by_engines drops offsets that only mods need.
Q_OFFSETS = Feature(
    "q_offsets",
    wanted=lambda problem, arrays: moves_rows(problem),
    operands=(OfProblem("q_offsets_ptr", "*i32", "q_offsets"), Scalars(("mask_rows",))),
    text="    rows     of the mask from q_offsets on",
)
PAGES = Feature(
    "pages",
    wanted=lambda problem, arrays: problem.is_paged,
    operands=(OfProblem("block_table_ptr", "*i32", "block_table"), Scalars(("stride_table", "num_pages"))),
    text="    pages    of keys, from block_table",
)
DESCALES = Feature(
    "descales",
    wanted=lambda problem, arrays: problem.layout is not None and problem.layout.is_quantized,
    operands=(OfProblem("k_descale_ptr", "*fp32", "k_descale"), OfProblem("v_descale_ptr", "*fp32", "v_descale")),
    text="    float8   keys and values, multiplied by k_descale and v_descale",
)  # fmt: skip
PAGE_DESCALES = Feature(
    "page_descales",
    wanted=lambda problem, arrays: problem.layout is not None and problem.layout.has_page_descales,
    operands=(Scalars(("stride_k_descale", "stride_v_descale")),),
)
_SEQUENCES = (SEQUSED_K, Q_OFFSETS)
_LAYOUT = (*_SEQUENCES, PAGES, DESCALES, PAGE_DESCALES)


def _reads_values_with_keys(problem: Problem, arrays: object) -> bool:
    """Whether each tile of values is the first parts of a tile of keys."""
    keys, values = split_head_dim(problem.key.size(3)), split_head_dim(problem.value.size(3))
    quantized = problem.layout is not None and problem.layout.is_quantized
    return problem.values_in_keys and not quantized and keys[: len(values)] == values


VALUES_IN_KEYS = Feature(
    "values_in_keys", wanted=_reads_values_with_keys, operands=(),
    text="    values   are the first columns of the keys",
)  # fmt: skip

# The number of tiles that programs of HOPPER_BACKWARD and HOPPER_DKDV have claimed.
_CLAIMED = Array("counter_ptr", "*i32")
# What DELTA sets to zero for the kernels after it (schedule.zeroed_arrays).
CLAIMED = Feature("claimed", wanted=lambda problem, arrays: "counter_ptr" in arrays, operands=(_CLAIMED,))
# The sums of dq, [B * Hq * M_padded, 32 * pieces].
ZEROED = Feature(
    "zeroed",
    wanted=lambda problem, arrays: "dq_sum_ptr" in arrays,
    operands=(Array("dq_sum_ptr", "*fp32", divisible=True), Scalars(("dq_pieces",))),
)

# The first key and the last + 1 of each 64 queries, int32 [B * Hq * M_padded // 64, 2] (stripes.py).
_SPANS = (Array("spans_ptr", "*i32"), Scalars(("stripe",)))
SPANS = Feature("spans", wanted=lambda problem, arrays: "spans_ptr" in arrays, operands=_SPANS)
SPANS_OF_LISTS = Feature(
    "lists",
    wanted=lambda problem, arrays: "spans_ptr" in arrays and problem.block_mask is not None,
    operands=(
        ListPointers("kv_runs", "kv"), Scalars(("stride_rows_b", "stride_rows_h", "sparse_q", "sparse_kv")),
    ),
)  # fmt: skip

_LSE = Array("lse_ptr", "*fp32")  # [B, Hq, M]
# Both [B * Hq, M_padded]. shift is lse in the domain of the scores, +inf for rows without keys. delta is
# dlse - rowsum(out * dO).
_SHIFT, _DELTA = (Array(name, "*fp32", divisible=True) for name in ("shift_ptr", "delta_ptr"))


def _has_tma(plan: KernelPlan) -> bool:
    return plan.tma


def _has_no_tma(plan: KernelPlan) -> bool:
    return not plan.tma


def _key_streams(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    return streamed_descriptors(plan, plan.tile.BLOCK_N) if plan.tma else ()


def _query_streams(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    if not plan.tma:
        return ()
    whole = streamed_descriptors(plan, plan.tile.BLOCK_M)
    partial = streamed_descriptors(plan, plan.tile.partial_m, partial=True) if plan.has_partial_step else ()
    return (*whole, *partial)


_KEYS = (When(_has_no_tma, (Pointers(("k", "v")),)),)
_KEY_STRIDES = (When(_has_tma, (Scalars(("batch_shares_keys",)),)), When(_has_no_tma, (Strides(("k", "v")),)))

FORWARD = KernelSpec(
    "forward",
    phase="fwd",
    tensors=("q", "k", "v", "o"),
    operands=(
        Descriptors(_key_streams), Pointers(("q",)), *_KEYS, Pointers(("o",)), _LSE, MAX_SCORES, PROFILE, SINK,
        Strides(("q",)), *_KEY_STRIDES, Strides(("o",)),
        Scalars(("M", "N", "heads", "heads_q", "group_size", "heads_per_group")), ScoreScale(),
        When(lambda plan: plan.score is None, (Scalars(("q_sign",)),)), DROPOUT, *_LAYOUT,
        MaskLists(),
        ModArguments(),
    ),
    shared_bytes=product_bytes,
    streams=("k", "v"),
    tile_options=("BLOCK_M", "BLOCK_N"),
)  # fmt: skip

# [B, Hq, M, splits, Dv] and [B, Hq, M, splits]: the results of the splits, and their lse in the exp2 domain.
_SPLIT_RESULTS = (Array("part_ptr", "*fp32", divisible=True), Array("part_lse_ptr", "*fp32"))
FORWARD_SPLIT = KernelSpec(
    "forward_split",
    phase="fwd",
    tensors=("q", "k", "v", "o"),  # MERGE_SPLITS writes o; expected_backward needs its shape and strides
    operands=(
        Pointers(("q", "k", "v")), *_SPLIT_RESULTS, Strides(("q", "k", "v")),
        Scalars(("M", "N", "heads_q", "heads_kv", "group_size", "row_tiles", "splits", "filling_splits")), ScoreScale(),
        When(lambda plan: plan.score is None, (Scalars(("q_sign",)),)), *_LAYOUT, VALUES_IN_KEYS,
        When(lambda plan: plan.blocks is not None, (Scalars(("mask_blocks",)),)), MaskLists(), ModArguments(),
    ),
    shared_bytes=product_bytes,
    splits_keys=True,
    tile_options=("BLOCK_M", "BLOCK_N"),
)  # fmt: skip
MERGE_SPLITS = KernelSpec(
    "merge_splits",
    phase="fwd",
    tensors=("o",),
    operands=(
        *_SPLIT_RESULTS, Pointers(("o",)), _LSE, SINK, Strides(("o",)), Scalars(("M", "heads_q", "splits")),
    ),
    shared_bytes=lambda plan: 0,
    products=False,
    dims=("v", "v"),
    fixed_tile=Tile(1, 16, 4, 1),  # one row, 16 splits at a time
)  # fmt: skip

DELTA = KernelSpec(
    "backward_delta",
    phase="bwd",
    tensors=("o", "do"),
    operands=(
        Pointers(("o", "do")), DLSE, _LSE, _DELTA, _SHIFT, Strides(("o", "do")), Scalars(("M", "M_padded", "heads_q")),
        ZEROED, CLAIMED, When(lambda plan: "spans" in plan.features, (Scalars(("N",)),)), SPANS, SPANS_OF_LISTS,
        TOKEN_TILES,
    ),
    shared_bytes=delta_bytes,
    products=False,
    dims=("v", "v"),
    fills_padding=True,
    token_tiles=True,
)  # fmt: skip


def _dq_operands(writes_dq: bool) -> tuple[Operand, ...]:
    own = (Strides(("dq",)), Scalars(("dq_scale",))) if writes_dq else ()
    return (
        Descriptors(_key_streams), Pointers(("q",)), *_KEYS, Pointers(("do",)),
        *((Pointers(("dq",)),) if writes_dq else ()), _SHIFT, _DELTA,
        Strides(("q",)), *_KEY_STRIDES, Strides(("do",)), *own, DROPOUT,
        Scalars(("M", "M_padded", "N", "heads", "heads_q", "group_size", "heads_per_group")), ScoreScale(),
        *_SEQUENCES, MaskLists(), ModArguments(), CaptureSumArguments(),
    )  # fmt: skip


DQ = KernelSpec(
    "backward_dq",
    phase="bwd",
    tensors=("q", "k", "v", "do", "dq"),
    operands=_dq_operands(writes_dq=True),
    shared_bytes=product_bytes,
    streams=("k", "v"),
    gradients=("dq",),
    captures="adds",
    tile_options=("BLOCK_M2", "BLOCK_N2"),
)
CAPTURES = replace(
    DQ,
    name="backward_captures",
    tensors=("q", "k", "v", "do"),
    operands=_dq_operands(writes_dq=False),
    gradients=(),
    tiled_as="backward_dq",
)
SIZES = replace(CAPTURES, name="backward_sizes", captures="sizes")
BATCH_CAPTURES = KernelSpec(
    "backward_batch_captures",
    phase="bwd",
    tensors=("q", "k", "v", "do"),
    operands=(
        Pointers(("q", "k", "v", "do")), _SHIFT, _DELTA, Strides(("q", "k", "v", "do")),
        Scalars(("M", "M_padded", "N", "B", "heads_q", "group_size")), ScoreScale(), MaskLists(("stride_mask_h",)),
        ModArguments(), CaptureSumArguments(),
    ),
    shared_bytes=batch_capture_bytes,
    captures="adds over batch",
    tile_options=("BLOCK_M2", "BLOCK_N2"),
    tiled_as="backward_dq",
)  # fmt: skip
DKDV = KernelSpec(
    "backward_dkdv",
    phase="bwd",
    tensors=("q", "k", "v", "do", "dk", "dv"),
    operands=(
        Descriptors(_query_streams), When(_has_no_tma, (Pointers(("q", "do")),)), Pointers(("k", "v", "dk", "dv")),
        _SHIFT, _DELTA, When(_has_no_tma, (Strides(("q", "do")),)), Strides(("k", "v", "dk", "dv")),
        Scalars(("M", "M_padded", "N", "heads", "heads_q", "heads_kv", "group_size", "batch_repeats")),
        Scalars(("heads_per_group",)), ScoreScale(), Scalars(("dk_scale",)), DROPOUT, *_SEQUENCES, MaskLists(),
        ModArguments(),
    ),
    shared_bytes=product_bytes,
    owns_keys=True,
    streams=("q", "do"),
    gradients=("dk", "dv"),
    tile_options=("BLOCK_M1", "BLOCK_N1"),
)  # fmt: skip

_WHOLE = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
# All of a small backward. Its tile fits every mask block that is a multiple of 64.
SMALL = KernelSpec(
    "backward_small",
    phase="bwd",
    tensors=_WHOLE,
    operands=(
        Pointers(_WHOLE), DLSE, _LSE, Strides(_WHOLE),
        Scalars(("M", "N", "heads", "heads_q", "heads_kv", "group_size", "batch_repeats", "dq_scale", "dk_scale")),
        ScoreScale(), MaskLists(),
        When(lambda plan: plan.blocks is not None, (
            ListPointers("kv_runs", "kv"), Scalars(("stride_rows_b", "stride_rows_h")),
        )),
        ModArguments(),
    ),
    shared_bytes=small_bytes,
    owns_keys=True,
    owns_both=True,
    gradients=("dq", "dk", "dv"),
    fixed_tile=Tile(64, 64, 8, 1),
)  # fmt: skip

# Hopper kernels, in Gluon. `hopper_roles.py` has their roles and buffers. `hopper.py` decides when they run.

HOPPER_FORWARD = KernelSpec(
    "hopper_forward",
    phase="fwd",
    tensors=("q", "k", "v", "o"),
    operands=(
        Descriptors(forward_descriptors), Scalars(("tiles",)), Counter(), RedoneCount(), _LSE, MAX_SCORES, SINK,
        Scalars(("M", "N", "heads", "heads_q", "group_size", "heads_per_group", "batch_shares_keys")), ScoreScale(),
        MaskLists(), BITS, HALVES, TOKEN_TILES, ModArguments(),
    ),
    shared_bytes=hopper_forward_bytes,
    gluon=True,
    widths=((64, 64), (96, 128), (128, 128), (192, 128), (256, 256)),
    persistent=True,
    token_tiles=True,
    row_ends=True,
)  # fmt: skip
HOPPER_LATENT = KernelSpec(
    "hopper_latent",
    phase="fwd",
    tensors=("q", "k", "v", "o"),
    operands=(
        Descriptors(latent_descriptors), Pointers(("q",)), *_SPLIT_RESULTS, Strides(("q",)),
        Scalars(("M", "N", "heads_q", "heads_kv", "group_size", "row_tiles", "splits", "filling_splits")),
        Scalars(("batch_shares_keys",)), ScoreScale(), SEQUSED_K, VALUES_IN_KEYS,
    ),
    shared_bytes=hopper_latent_bytes,
    splits_keys=True,
    gluon=True,
    widths=((576, 512),),
)  # fmt: skip
HOPPER_DQ = KernelSpec(
    "hopper_dq",
    phase="bwd",
    tensors=("q", "k", "v", "do", "dq"),
    operands=(
        Descriptors(dq_descriptors), _SHIFT, _DELTA,
        Scalars(("M", "M_padded", "N", "heads", "heads_q", "group_size", "heads_per_group", "batch_shares_keys")),
        Scalars(("dq_scale",)), ScoreScale(), MaskLists(), ModArguments(),
    ),
    shared_bytes=hopper_dq_bytes,
    gradients=("dq",),
    gluon=True,
    widths=((64, 64), (96, 96), (128, 128), (192, 128)),
)  # fmt: skip

_KEY_RINGS = {(64, 64): Rings(4, 3, 3, 2), (96, 96): Rings(4, 3, 3, 3), (128, 128): Rings(3, 2, 2, 4)}
_PREFETCH_RINGS = {
    (64, 64): Rings(4, 3, 3, 2, keys=2),
    (96, 96): Rings(3, 3, 3, 3, keys=2),
    (128, 128): Rings(3, 2, 2, 2, keys=2),
}
_DKDV_RINGS = _KEY_RINGS | {(192, 128): Rings(3, 2)}
# At 256 the rings fill 226 of 227 KB.
_WIDE_RINGS = {(192, 128): Rings(2, 2, 2, 6, keys=2), (256, 256): Rings(2, 2, 1, 2)}
_KEY_SCALARS = Scalars((
    "M", "M_padded", "N", "heads", "heads_q", "heads_kv", "group_size", "batch_repeats", "heads_per_group", "dk_scale",
))  # fmt: skip
HOPPER_DKDV = KernelSpec(
    "hopper_dkdv",
    phase="bwd",
    tensors=("q", "k", "v", "do", "dk", "dv"),
    operands=(
        Descriptors(key_descriptors), Scalars(("tiles",)), _CLAIMED, _KEY_SCALARS, ScoreScale(), MaskLists(), BITS,
        HALVES, TOKEN_TILES, ModArguments(),
    ),
    shared_bytes=hopper_keys_bytes,
    owns_keys=True,
    gradients=("dk", "dv"),
    gluon=True,
    widths=tuple(_DKDV_RINGS),
    rings=_DKDV_RINGS,
    persistent=True,
    token_tiles=True,
)  # fmt: skip
HOPPER_BACKWARD = replace(
    HOPPER_DKDV,
    name="hopper_backward",
    tensors=(*DKDV.tensors, "dq"),
    gradients=("dq", "dk", "dv"),
    widths=tuple(_KEY_RINGS),
    rings=_KEY_RINGS,
    prefetch_rings=_PREFETCH_RINGS,
)
HOPPER_BACKWARD_STRIPES = replace(
    HOPPER_BACKWARD,
    name="hopper_backward_stripes",
    operands=(
        Descriptors(stripe_descriptors), *_SPANS, Scalars(("dq_scale",)),
        # It stores dq with its first tile of keys.
        *[o for o in HOPPER_BACKWARD.operands[1:] if o not in (HALVES, TOKEN_TILES)],
    ),
    # At D 128 not: four buffers hold a sum of dq that is loaded.
    prefetch_rings={widths: _PREFETCH_RINGS[widths] for widths in ((64, 64), (96, 96))},
    owns_dq=True,
    token_tiles=False,
)  # fmt: skip
HOPPER_BACKWARD_WIDE = replace(
    HOPPER_BACKWARD,
    name="hopper_backward_wide",
    operands=tuple([o for o in HOPPER_BACKWARD.operands if o not in (BITS, HALVES, TOKEN_TILES)]),
    widths=tuple(_WIDE_RINGS),
    rings=_WIDE_RINGS,
    prefetch_rings={},
    separates_dk=True,
    token_tiles=False,
)
# The last step after HOPPER_BACKWARD: its float32 sums of dq -> dq.
DQ_ROWS = KernelSpec(
    "backward_dq_rows",
    phase="bwd",
    tensors=("dq",),
    operands=(
        Array("dq_sum_ptr", "*fp32"), Pointers(("dq",)), Strides(("dq",)),
        Scalars(("M", "M_padded", "heads_q", "dq_scale")), SPANS, TOKEN_TILES,
    ),
    shared_bytes=dq_rows_bytes,
    products=False,
    fixed_tile=Tile(64, 64, 4, 1),
    token_tiles=True,
)  # fmt: skip

KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        FORWARD, FORWARD_SPLIT, MERGE_SPLITS, DELTA, DQ, CAPTURES, SIZES, BATCH_CAPTURES, DKDV, SMALL, HOPPER_FORWARD,
        HOPPER_LATENT, HOPPER_DQ, HOPPER_DKDV, HOPPER_BACKWARD, HOPPER_BACKWARD_STRIPES, HOPPER_BACKWARD_WIDE, DQ_ROWS,
    )
}  # fmt: skip

SPLIT = (FORWARD_SPLIT, MERGE_SPLITS)  # the alternative to FORWARD for short queries
# The alternatives after DELTA.
PAIR, FUSED, FUSED_STRIPES = (DQ, DKDV), (HOPPER_BACKWARD, DQ_ROWS), (HOPPER_BACKWARD_STRIPES, DQ_ROWS)
