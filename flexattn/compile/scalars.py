"""scalars: the scalar arguments of kernels: lengths, heads, strides of block lists, scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from flexattn.call.dropout import Dropout
from flexattn.call.problem import Problem
from flexattn.compile.arguments import block_mask_of
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.stripes import stripe_of
from flexattn.compile.tiles import Tile
from flexattn.graph.row_bounds import longest_row
from flexattn.machine.target import l2_bytes, processors
from flexattn.options import LARGEST_TILE, option

LOG2E = math.log2(math.e)


def moves_rows(problem: Problem) -> bool:
    """Whether the row of the mask of a query is not its row in the tensor."""
    return problem.layout is not None and problem.layout.q_offsets is not None


def _touched(problem: Problem) -> int:
    """Return the most rows of mask blocks that the queries of a sequence may be in."""
    if problem.block_mask is None:
        return 1
    M, rows = problem.query.size(2), problem.block_mask.BLOCK_SIZE[0]
    return (M + rows - 2) // rows + 1 if moves_rows(problem) else -(-M // rows)


def padded(rows: int) -> int:
    """Return the rows per head of arrays that backward kernels read without a mask; tiles may start at any row."""
    return -(-rows // LARGEST_TILE) * LARGEST_TILE + LARGEST_TILE


# Least tiles per multiprocessor in a group of heads, if tiles have unequal lengths. With fewer, programs are idle at
# the end of the last group. Backward of 32 and 8 heads, causal, 2x8192: in groups of 2 key heads 5,060 us, of 4 4,781,
# of 6 4,529, of 8 4,498, and of 16, which do not fit in L2, 4,669 (H200).
_TILES_PER_PROCESSOR = 3


def heads_per_group(head_bytes: int, l2: int, heads: int, fewest: float = 1.0) -> int:
    """Return how many heads to process at a time, so that their streamed tensors stay in L2.

    Groups have about the same size. With 16 heads in groups of 3, the last group would have one head, and most SMs
    would be idle at the end.

    `fewest`: how many heads have enough tiles. A group has at least these, even if their tensors do not fit.
    """
    fitting = max(1.0, l2 * 0.6 / max(1, head_bytes))
    if fewest > fitting:
        sizes = [n for n in range(math.ceil(fewest), min(heads, int(1.5 * fewest)) + 1) if heads % n == 0]
        return sizes[0] if sizes else min(heads, math.ceil(fewest))
    return -(-heads // max(1, round(heads / fitting)))


def _heads(plan: KernelPlan, problem: Problem) -> int:
    """Return the number of heads, over all batches, whose tiles are assigned to programs."""
    B, Hq = problem.query.shape[:2]
    if plan.transposed:
        return problem.key.size(0) * problem.key.size(1)
    return Hq if plan.spec.sums_over_batch else B * Hq


def tiles_of(plan: KernelPlan, problem: Problem) -> int:
    """Return the number of tiles assigned to programs, over all heads."""
    rows = (problem.key if plan.transposed else problem.query).size(2)
    if plan.spec.splits_keys:
        tiles = problem.query.size(0) * problem.key.size(1) * _row_tiles(plan, problem) * splits_of(problem)
        return tiles if plan.blocks is None else tiles * _touched(problem)
    if "q_offsets" in plan.features and not plan.transposed:
        return _touched(problem) * plan.tiles_per_block * _heads(plan, problem)
    if plan.spec.owns_dq:
        return -(-rows // stripe_of(problem)) * _heads(plan, problem)
    if plan.spec.owns_both:
        return tiles_of_both(plan.tile, problem)
    if plan.spec.fills_padding:
        return padded(rows) // plan.tile.BLOCK_M * _heads(plan, problem)
    return -(-rows // plan.outer[0]) * plan.tiles_per_block * _heads(plan, problem)


def tiles_of_both(tile: Tile, problem: Problem) -> int:
    """Return the tiles of keys of all key heads, and the tiles of queries of all heads."""
    (B, Hq, M, _), k = problem.query.shape, problem.key
    return k.size(0) * k.size(1) * -(-k.size(2) // tile.BLOCK_N) + B * Hq * -(-M // tile.BLOCK_M)


def _row_tiles(plan: KernelPlan, problem: Problem) -> int:
    """Return the tiles of the rows that share a key head: queries times heads of the group."""
    return -(-problem.query.size(2) * _group_size(plan, problem) // plan.tile.BLOCK_M)


SPLIT_ROWS = 64  # largest tile of rows of forward_split
_FEWEST_KEYS, _MOST_SPLITS = 256, 256  # fewest keys of a split, most splits
_FEWEST_KEYS_OF_WAVES = 1024  # fewest keys of a split, if there is more than one wave of programs
# Number of waves if programs have different amounts of work: _WAVES if lengths are on the device, _WAVES_OF_MASK with a
# mask. With a mask, the programs of splits that are not used compute what the row attends to before they end.
_WAVES, _WAVES_OF_MASK = 6, 2
FEW_SPLITS = 4  # a sequence that would use fewer splits than this uses one, or filling_splits
_LONG = 1024  # keys


def filling_splits(problem: Problem) -> int:
    """Return the fewest splits of a sequence: SPLIT_KV, or enough to fill all multiprocessors."""
    given = option(problem.options, "SPLIT_KV", "fwd")
    if isinstance(given, int) and given > 0:
        return given
    # Two programs per multiprocessor read as much as three, and one with wide heads fills its shared memory.
    resident = 1 if max(problem.query.size(3), problem.value.size(3)) > 256 else 2
    most = max(1, min(_most_keys(problem) // _FEWEST_KEYS, _MOST_SPLITS))
    return _splits(_programs(problem), resident * processors(problem.query.device), most)


def splits_of(problem: Problem) -> int:
    """Return the splits of a sequence that attends to all N keys.

    If sequences may attend to different numbers of keys, the kernel divides each in proportion, for balance. A batch
    with lengths from 1 to 32,768 reads 4.0 TB/s with at most 2 splits and 4.3 with 6 (H200, 32 sequences). Rows of a
    window attend to about the same number of keys: of 16,384 keys, a window of 4,096 takes 144 us in one split, and
    156 us with three unused splits besides.
    """
    fill = filling_splits(problem)
    if _most_keys(problem) < problem.N:
        return fill
    layout = problem.layout
    varies = problem.block_mask is not None or (layout is not None and layout.seqused_k is not None)
    if option(problem.options, "SPLIT_KV", "fwd") or not varies or problem.query.size(0) == 1:
        return fill
    most = max(1, min(problem.N // _FEWEST_KEYS_OF_WAVES, _MOST_SPLITS))
    waves = _WAVES if problem.block_mask is None else _WAVES_OF_MASK
    return max(fill, _splits(_programs(problem), 3 * processors(problem.query.device), most, waves))


def _most_keys(problem: Problem) -> int:
    """Return a bound of the keys that the queries of a sequence attend to."""
    mask = problem.mask
    window = None if mask is None else longest_row(mask.graph, mask.numbers)
    return problem.N if window is None else min(problem.N, window + problem.query.size(2) - 1)


def _programs(problem: Problem) -> int:
    """Return the programs of forward_split for each split."""
    (B, Hq, M, _), Hkv = problem.query.shape, problem.key.size(1)
    return B * Hkv * -(-M * (Hq // Hkv) // SPLIT_ROWS)


def pays_to_split(problem: Problem) -> bool:
    """Whether forward_split is expected to be faster than the forward.

    The cache must be long. It must also be read less often than by the forward, whose tiles have queries of one head,
    or the forward must have too few programs for all multiprocessors.
    """
    (B, Hq, M, _), Hkv, N = problem.query.shape, problem.key.size(1), problem.N
    group = Hq // Hkv
    reads, reads_of_forward = -(-M * group // SPLIT_ROWS), group * -(-M // SPLIT_ROWS)
    return N >= _LONG and (reads == 1 or 2 * reads <= reads_of_forward or B * Hq < processors(problem.query.device))


@lru_cache(1024)
def _splits(programs: int, resident: int, most: int, waves: int = 1) -> int:
    """Return the number of splits for `programs` programs per split, of which `resident` run at the same time.

    The last wave should be nearly full: 8 heads with a cache of 131,072 tokens read 4.2 TB/s in 32 splits (0.97 waves)
    and 3.9 in 66 (2 waves), on an H200.
    """
    fewest = min(most, -(-waves * resident * 9 // (10 * programs)))
    parts = {splits: programs * splits / resident for splits in range(fewest, min(most, 4 * fewest) + 1)}
    full = {splits: n / math.ceil(n) for splits, n in parts.items()}
    return next(splits for splits, part in full.items() if part >= max(full.values()) - 0.03)


def _heads_per_group(plan: KernelPlan, problem: Problem) -> int:
    q, v = problem.query, problem.value
    if plan.is_forward and plan.spec.persistent and problem.block_mask is None:
        # Programs claim tiles as late as possible, so all work on one head at a time: 1,648 us instead of 1,689 for
        # 2x16x8192, D 128 (H200).
        return 1
    rows = _queries_at_once(problem) * _group_size(plan, problem) if plan.transposed else _keys_at_once(problem)
    head_bytes = rows * (q.size(3) + v.size(3)) * q.element_size()
    heads = _heads(plan, problem)
    fewest = 1.0
    if problem.block_mask is not None and heads:
        fewest = _TILES_PER_PROCESSOR * processors(q.device) * heads / max(1, tiles_of(plan, problem))
    return heads_per_group(head_bytes, l2_bytes(q.device), heads, fewest)


def _queries_at_once(problem: Problem) -> int:
    """Return the queries of a head that programs that own keys read at the same time."""
    M, blocks = problem.query.size(2), problem.block_mask
    return M if blocks is None or blocks.reach is None else min(M, blocks.reach)


def _keys_at_once(problem: Problem) -> int:
    """Return the keys of a head that programs that own queries read at the same time."""
    N, blocks = problem.N, problem.block_mask
    return N if blocks is None or blocks.reach is None else min(N, blocks.reach)


def _group_size(plan: KernelPlan, problem: Problem) -> int:
    return problem.query.size(1) // problem.key.size(1)


def _qk_scale(plan: KernelPlan, problem: Problem) -> float:
    # The forward's running maximum needs a positive factor. It applies the sign, or a scale of zero, to q.
    scale = problem.scale
    return (abs(scale) * LOG2E or 1.0) if plan.is_forward else scale * LOG2E


def _stride_h(problem: Problem, axis: int) -> int:
    """Return the number of block lists per head along an axis, or 0 if all heads share them."""
    blocks = block_mask_of(problem)
    return -(-blocks.seq_lengths[axis] // blocks.BLOCK_SIZE[axis]) if blocks.H > 1 else 0


def _stride_b(problem: Problem, axis: int) -> int:
    blocks = block_mask_of(problem)
    rows = -(-blocks.seq_lengths[axis] // blocks.BLOCK_SIZE[axis])
    return rows * blocks.H if blocks.B > 1 else 0


def _sink_stride(problem: Problem, d: int) -> int:
    assert problem.sink is not None
    return problem.sink.stride(d) if problem.sink.size(d) > 1 else 0


def _block_table(problem: Problem) -> Tensor:
    assert problem.layout is not None and problem.layout.block_table is not None
    return problem.layout.block_table


def _descale_stride(problem: Problem, name: str) -> int:
    """Return the stride of a page, 0 if all pages have the same descale."""
    descale = getattr(problem.layout, name)
    return descale.stride(0) if descale.dim() == 2 else 0


def _dropout(problem: Problem) -> Dropout:
    assert problem.dropout is not None
    return problem.dropout


# Triton type and value of each scalar argument.
SCALARS: dict[str, tuple[str, Callable[[KernelPlan, Problem], int | float]]] = {
    "tiles": ("i32", tiles_of),
    "stripe": ("i32", lambda plan, problem: stripe_of(problem)),
    "splits": ("i32", lambda plan, problem: splits_of(problem)),
    "filling_splits": ("i32", lambda plan, problem: filling_splits(problem)),
    "row_tiles": ("i32", _row_tiles),
    "M": ("i32", lambda plan, problem: problem.query.size(2)),
    "M_padded": ("i32", lambda plan, problem: padded(problem.query.size(2))),
    "N": ("i32", lambda plan, problem: problem.N),
    "tiles_across": ("i32", lambda plan, problem: problem.tiles.grid.shape[1] // problem.tiles.grid.tile[1]),
    "dq_pieces": ("i32", lambda plan, problem: pieces_of(problem.query.size(3))),
    "B": ("i32", lambda plan, problem: problem.query.size(0)),
    "heads": ("i32", _heads),
    "heads_q": ("i32", lambda plan, problem: problem.query.size(1)),
    "heads_kv": ("i32", lambda plan, problem: problem.key.size(1)),
    "group_size": ("i32", _group_size),
    "heads_per_group": ("i32", _heads_per_group),
    "batch_repeats": ("i32", lambda plan, problem: problem.query.size(0) // max(1, problem.key.size(0))),
    "batch_shares_keys": ("i32", lambda plan, problem: int(problem.key.size(0) == 1)),
    "sm_scale": ("fp32", lambda plan, problem: problem.scale),
    "dq_scale": ("fp32", lambda plan, problem: problem.scale),
    "dk_scale": ("fp32", lambda plan, problem: problem.scale),
    "qk_scale": ("fp32", _qk_scale),
    "q_sign": ("fp32", lambda plan, problem: float((problem.scale > 0) - (problem.scale < 0))),
    "stride_mask_b": ("i32", lambda plan, problem: _stride_b(problem, plan.transposed)),
    "stride_mask_h": ("i32", lambda plan, problem: _stride_h(problem, plan.transposed)),
    "stride_rows_b": ("i32", lambda plan, problem: _stride_b(problem, axis=0)),
    "stride_rows_h": ("i32", lambda plan, problem: _stride_h(problem, axis=0)),
    "sparse_q": ("i32", lambda plan, problem: block_mask_of(problem).BLOCK_SIZE[0]),
    "sparse_kv": ("i32", lambda plan, problem: block_mask_of(problem).BLOCK_SIZE[1]),
    "stride_sink_b": ("i64", lambda plan, problem: _sink_stride(problem, 0)),
    "stride_sink_h": ("i64", lambda plan, problem: _sink_stride(problem, 1)),
    "mask_rows": ("i32", lambda plan, problem: block_mask_of(problem).seq_lengths[0]),
    "mask_blocks": ("i32", lambda plan, problem: _touched(problem)),
    "stride_table": ("i32", lambda plan, problem: _block_table(problem).stride(0)),
    "num_pages": ("i32", lambda plan, problem: problem.key.size(0)),
    "stride_k_descale": ("i32", lambda plan, problem: _descale_stride(problem, "k_descale")),
    "stride_v_descale": ("i32", lambda plan, problem: _descale_stride(problem, "v_descale")),
    "drop_below": ("i32", lambda plan, problem: _dropout(problem).drop_below),
    "keep_scale": ("fp32", lambda plan, problem: _dropout(problem).keep_scale),
    "drop_q": ("i32", lambda plan, problem: _dropout(problem).q_offset),
    "drop_kv": ("i32", lambda plan, problem: _dropout(problem).kv_offset),
    "drop_bh": ("i32", lambda plan, problem: _dropout(problem).bh_offset),
    "drop_heads": ("i32", lambda plan, problem: _dropout(problem).heads or problem.query.size(1)),
}
