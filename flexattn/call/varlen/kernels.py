"""kernels: Triton kernels that describe packed sequences: their rows, and the block lists of their mask.

In torch operations the same takes 60 launches for a forward and 110 with a backward.
"""

import triton
import triton.language as tl


@triton.jit
def pack_rows(
    cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, out_ptr, ascends_ptr, sequences, T_q, T_k, stride_out, steps,
    ROWS: tl.constexpr, CHECKS: tl.constexpr,
):  # fmt: skip
    """Write the columns of a Packing [5, T_q], and if cu_seq_q and cu_seq_k ascend from 0 to at most T_q or T_k."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < T_q
    # Binary search for the number of sequences that end up to the row.
    low, high = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32) + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        passed = tl.load(cu_q_ptr + 1 + middle, mask=inside & (low < high), other=0) <= row
        high = tl.where((low < high) & (passed == 0), middle, high)
        low = tl.where((low < high) & passed, middle + 1, low)
    exists = inside & (low < sequences)
    first = tl.load(cu_q_ptr + low, mask=exists, other=0)
    last = tl.load(cu_q_ptr + low + 1, mask=exists, other=0)
    k_start = tl.load(cu_k_ptr + low, mask=exists, other=0)
    if used_k_ptr is None:
        k_end = tl.load(cu_k_ptr + low + 1, mask=exists, other=0)
    else:
        k_end = k_start + tl.load(used_k_ptr + low, mask=exists, other=0)
    diagonal = tl.where(exists, k_end - last + row, -1)
    if used_q_ptr is not None:
        hole = row - first >= tl.load(used_q_ptr + low, mask=exists, other=0)
        k_end, diagonal = tl.where(hole, k_start, k_end), tl.where(hole, k_start - 1, diagonal)
    tl.store(out_ptr + row, tl.where(exists, low, 0), mask=inside)
    tl.store(out_ptr + stride_out + row, tl.where(exists, row - first, 0), mask=inside)
    tl.store(out_ptr + 2 * stride_out + row, k_start, mask=inside)
    tl.store(out_ptr + 3 * stride_out + row, k_end, mask=inside)
    tl.store(out_ptr + 4 * stride_out + row, diagonal, mask=inside)
    if CHECKS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(ascends_ptr, ascends(cu_q_ptr, sequences, T_q, ROWS))
            tl.store(ascends_ptr + 1, ascends(cu_k_ptr, sequences, T_k, ROWS))


@triton.jit
def ascends(cu_ptr, sequences, most, ROWS: tl.constexpr):
    """Return whether cu ascends from 0 to at most `most`."""
    wrong = tl.zeros([ROWS], tl.int32)
    for i0 in range(0, sequences, ROWS):
        i = i0 + tl.arange(0, ROWS)
        step = tl.load(cu_ptr + i + 1, mask=i < sequences, other=0) - tl.load(cu_ptr + i, mask=i < sequences, other=0)
        wrong += (step < 0).to(tl.int32)
    return (tl.sum(wrong, 0) == 0) & (tl.load(cu_ptr) == 0) & (tl.load(cu_ptr + sequences) <= most)


@triton.jit
def store_lists(
    row, begin, end, full_begin, full_end, heads_rows, row_ptr_ptr, partial_ptr, full_row_ptr_ptr, full_ptr
):
    """Write two partial runs and one full run of a row of blocks, and where they are."""
    tl.store(row_ptr_ptr + row, 2 * row)
    tl.store(full_row_ptr_ptr + row, row)
    if row == heads_rows - 1:
        tl.store(row_ptr_ptr + row + 1, 2 * row + 2)
        tl.store(full_row_ptr_ptr + row + 1, row + 1)
    tl.store(partial_ptr + 4 * row, begin)
    tl.store(partial_ptr + 4 * row + 1, full_begin)
    tl.store(partial_ptr + 4 * row + 2, full_end)
    tl.store(partial_ptr + 4 * row + 3, end)
    tl.store(full_ptr + 2 * row, full_begin)
    tl.store(full_ptr + 2 * row + 1, full_end)


@triton.jit
def blocks_of_rows(
    low_ptr, high_ptr, packing_ptr, row_ptr_ptr, partial_ptr, full_row_ptr_ptr, full_ptr, T_q, T_k, rows,
    stride_packing, left, right, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the lists of each row of blocks, from the interval of keys [low, high) of each row.

    The intervals are int64 [H, T_q], or those of a Packing with a window of `left` keys before and `right` after the
    diagonal, -1 for all. EXACT: rows attend to all keys of their interval. Otherwise no block is full.
    """
    r, h = tl.program_id(0), tl.program_id(1)
    row = r * BLOCK + tl.arange(0, BLOCK)
    inside = row < T_q
    if low_ptr is None:
        low = tl.load(packing_ptr + 2 * stride_packing + row, mask=inside, other=0)
        high = tl.load(packing_ptr + 3 * stride_packing + row, mask=inside, other=0)
        diagonal = tl.load(packing_ptr + 4 * stride_packing + row, mask=inside, other=0)
        low = tl.where(left >= 0, tl.maximum(low, diagonal - left), low)
        high = tl.where(right >= 0, tl.minimum(high, diagonal + right + 1), high)
        low, high = tl.minimum(tl.maximum(low, 0), T_k), tl.minimum(tl.maximum(high, 0), T_k)
    else:
        at = h.to(tl.int64) * T_q + row
        low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32)
        high = tl.load(high_ptr + at, mask=inside, other=0).to(tl.int32)
    lives = inside & (low < high)
    end = tl.cdiv(tl.max(tl.where(lives, high, 0), 0), BLOCK)
    begin = tl.minimum(tl.min(tl.where(lives, low, T_k), 0) // BLOCK, end)
    full_begin, full_end = end, end
    if EXACT:
        full_begin = tl.cdiv(tl.max(low, 0), BLOCK)
        full_end = tl.min(tl.where(lives, high, 0), 0) // BLOCK  # none where rows of the block are past T_q
        none = full_end <= full_begin
        full_begin, full_end = tl.where(none, end, full_begin), tl.where(none, end, full_end)
    store_lists(
        h * rows + r, begin, end, full_begin, full_end, tl.num_programs(1) * rows,
        row_ptr_ptr, partial_ptr, full_row_ptr_ptr, full_ptr,
    )  # fmt: skip


@triton.jit
def blocks_of_columns(
    partial_of_rows_ptr, row_ptr_ptr, partial_ptr, full_row_ptr_ptr, full_ptr, rows, columns,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the lists of each column of blocks, from those of the rows.

    A column lists all rows from its first to its last.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    start, stop = tl.full([ROWS], 2147483647, tl.int32), tl.zeros([ROWS], tl.int32)
    full_start, full_stop, full_count = start, stop, stop
    for r0 in range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)
        base = partial_of_rows_ptr + 4 * (h * rows + r)
        begin, end = tl.load(base, mask=r < rows, other=0), tl.load(base + 3, mask=r < rows, other=0)
        full_begin, full_end = (
            tl.load(base + 1, mask=r < rows, other=0),
            tl.load(base + 2, mask=r < rows, other=0),
        )
        holds, full = (begin <= c) & (c < end), (full_begin <= c) & (c < full_end)
        start, stop = tl.where(holds, tl.minimum(start, r), start), tl.where(holds, tl.maximum(stop, r + 1), stop)
        full_start = tl.where(full, tl.minimum(full_start, r), full_start)
        full_stop = tl.where(full, tl.maximum(full_stop, r + 1), full_stop)
        full_count += full.to(tl.int32)
    last = tl.max(stop, 0)
    first = tl.minimum(tl.min(start, 0), last)
    full_last, count = tl.max(full_stop, 0), tl.sum(full_count, 0)
    full_first = tl.min(full_start, 0)
    whole = (count > 0) & (count == full_last - full_first)
    store_lists(
        h * columns + c, first, last, tl.where(whole, full_first, last), tl.where(whole, full_last, last),
        tl.num_programs(1) * columns, row_ptr_ptr, partial_ptr, full_row_ptr_ptr, full_ptr,
    )  # fmt: skip


@triton.jit
def longest_first(partial_ptr, order_ptr, rows, ROWS: tl.constexpr):
    """Write the order of the rows of blocks, by length, then by position. Each program finds the ranks of some rows."""
    h = tl.program_id(1)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = partial_ptr + 4 * (h * rows + mine)
    length = tl.load(base + 3, mask=mine < rows, other=0) - tl.load(base, mask=mine < rows, other=0)
    rank = tl.zeros([ROWS], tl.int32)
    for r0 in range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)
        base = partial_ptr + 4 * (h * rows + r)
        other = tl.load(base + 3, mask=r < rows, other=0) - tl.load(base, mask=r < rows, other=0)
        before = (other[None, :] > length[:, None]) | (
            (other[None, :] == length[:, None]) & (r[None, :] < mine[:, None])
        )
        rank += tl.sum((before & (r < rows)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + h * rows + rank, mine, mask=mine < rows)
