"""block_lists: the block lists of packed sequences, from the interval of keys of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, RunLists, Runs
from flexattn.call.varlen.packing import LONGEST, Packing, has_kernels
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.linear import Linear
from flexattn.graph.row_bounds import (
    Both,
    Complement,
    Condition,
    Either,
    RowInterval,
    Solved,
    WholeRows,
    nodes_of,
    row_bounds,
)
from flexattn.mods.combine import noop_mask
from flexattn.torch_state.transforms import outside

BLOCK = 128
# Sequences are short if that many of the longest one would fit into the batch, in blocks. There must also be that many
# blocks of all heads: without long ones first, multiprocessors wait at the end for the last ones.
_SHORT, _MANY = 16, 1024
_ROWS = 128  # of blocks, at a time


def mask_of_rows(
    bound: BoundMod, packing: Packing, window: tuple[int, int] | None, lengths: tuple[int, int], H: int, both: bool,
    longest: int,
) -> BlockMask:  # fmt: skip
    """Return the block lists of a packed mask. `both`: for a backward too. `longest`: no sequence has more rows.

    Programs take the longest rows first. If all sequences are short, they take rows in order instead, one sequence at a
    time. A backward takes keys, whose queries and sums of dq then stay in L2: for 64 x 256 tokens 345 us instead of 378
    (H200, 16 heads, D 128). A forward takes queries, from the last one on, and their keys stay in L2: 98 us, not 105.

    `window`: of a mask that consists of sequences and a window only. It is None if there is also a mask_mod, whose
    intervals are then evaluated in torch.
    """
    with outside(), torch.no_grad():
        reach = reach_of(longest, lengths[1], H)
        short = reach is not None
        H = H if bound.graph.reads("h") else 1
        on_device = has_kernels(packing.sequence.device)
        intervals = None if window is not None and on_device else _intervals(bound, lengths, H)
        if on_device:
            kv_runs, q_runs = _launch(packing, window, intervals, lengths, H, both, short)
        else:
            assert intervals is not None
            kv_runs, q_runs = _in_torch(*intervals, lengths[1], both)
        if short:
            _put_in_order(kv_runs.order, descending=True)
            if q_runs is not None:
                _put_in_order(q_runs.order, descending=False)
        return _mask_of(kv_runs, q_runs, lengths, H, reach)


def _put_in_order(order: Tensor, descending: bool) -> None:
    """Write the order of the rows of each head by position, instead of by length."""
    n = order.size(1)
    ends = (n - 1, -1, -1) if descending else (0, n, 1)
    order.copy_(torch.arange(*ends, dtype=order.dtype, device=order.device))


def flat_lists(mask: BlockMask) -> list[Tensor]:
    """Return the lists of a mask of `mask_of_rows` as tensors of `flat_sizes`."""
    lists = (mask.kv_runs,) if mask.q_runs is None else (mask.kv_runs, mask.q_runs)
    return [x for runs in lists for x in (*map(torch.flatten, runs.tensors[:4]), _longer(runs.order))]


def _longer(order: Tensor) -> Tensor:
    return torch.nn.functional.pad(order.flatten(), (0, 1))


def flat_sizes(n: int) -> tuple[int, ...]:
    """Return the sizes of the flat tensors of one direction with n rows in all.

    None is 1, also for a single row: with symbolic lengths torch would compile another graph for that.
    """
    return n + 1, 4 * n, n + 1, 2 * n, n + 1


def mask_of_flat(lists: Sequence[Tensor], lengths: tuple[int, int], longest: int, heads: int) -> BlockMask:
    """Return the mask whose `flat_lists` are given. `heads`: of query."""
    rows = -(-lengths[0] // BLOCK)
    H = (lists[0].numel() - 1) // rows if rows else 1
    runs = [RunLists.from_tensors(_of_flat(lists[i : i + DIRECTION], H)) for i in range(0, len(lists), DIRECTION)]
    both = len(runs) > 1
    return _mask_of(runs[0], runs[1] if both else None, lengths, H, reach_of(longest, lengths[1], heads))


DIRECTION = 5  # tensors of the lists of one direction


def _of_flat(flat: Sequence[Tensor], H: int) -> tuple[Tensor, ...]:
    row_ptr, runs, full_row_ptr, full_runs, order = flat
    return row_ptr, runs.view(-1, 2), full_row_ptr, full_runs.view(-1, 2), order[:-1].view(H, -1)


def _mask_of(
    kv_runs: RunLists, q_runs: RunLists | None, lengths: tuple[int, int], H: int, reach: int | None
) -> BlockMask:
    mask = BlockMask.from_runs(kv_runs, q_runs, 1, H, lengths, BLOCK, noop_mask, full_overhangs=False)
    mask._built_from_mod = True
    mask.reach = reach
    return mask


def reach_of(longest: int, T_k: int, heads: int) -> int | None:
    """Return the length of the longest sequence, in whole blocks, if programs take rows in order."""
    blocks, of_longest = -(-T_k // BLOCK), -(-longest // BLOCK)
    return of_longest * BLOCK if blocks >= _SHORT * of_longest and heads * blocks >= _MANY else None


Intervals = tuple[Tensor, Tensor, bool]


def _in_torch(low: Tensor, high: Tensor, exact: bool, T_k: int, both: bool) -> tuple[RunLists, RunLists | None]:
    blocks = _blocks(low, high, T_k, exact)
    q_runs = _lists(*_transposed(*blocks, -(-T_k // BLOCK))) if both else None
    return _lists(*blocks), q_runs


def _launch(
    packing: Packing, window: tuple[int, int] | None, intervals: Intervals | None, lengths: tuple[int, int], H: int,
    both: bool, short: bool,
) -> tuple[RunLists, RunLists | None]:  # fmt: skip
    from flexattn.call.varlen import kernels

    of_rows: Any = kernels.blocks_of_rows
    of_columns: Any = kernels.blocks_of_columns
    (T_q, T_k), first = lengths, packing.sequence
    rows, columns = -(-T_q // BLOCK), -(-T_k // BLOCK)
    low, high, exact = (None, None, True) if intervals is None else intervals
    if low is not None and high is not None:
        low, high = low.contiguous(), high.contiguous()
    left, right = (-1, -1) if window is None else (min(x, LONGEST) for x in window)
    kv_runs, q_runs = _empty_lists(H, rows, first.device), None
    with torch.cuda.device_of(first):
        if rows:
            of_rows[(rows, H)](
                low, high, first, *kv_runs.tensors[:4], T_q, T_k, rows, packing.stride, left, right, EXACT=exact,
                BLOCK=BLOCK,
            )  # fmt: skip
            if not short:
                _order(kv_runs, H, rows)
        if both:
            q_runs = _empty_lists(H, columns, first.device)
            if columns:
                of_columns[(columns, H)](kv_runs.partial.runs, *q_runs.tensors[:4], rows, columns, ROWS=_ROWS)
                if not short:
                    _order(q_runs, H, columns)
    return kv_runs, q_runs


def _empty_lists(H: int, rows: int, device: torch.device) -> RunLists:
    n = H * rows
    make = torch.empty if n else torch.zeros

    def empty(*shape: int) -> Tensor:
        return make(shape, dtype=torch.int32, device=device)

    return RunLists(Runs(empty(n + 1), empty(2 * n, 2)), Runs(empty(n + 1), empty(n, 2)), empty(H, rows))


def _order(lists: RunLists, H: int, rows: int) -> None:
    from flexattn.call.varlen import kernels

    kernel: Any = kernels.longest_first
    kernel[(-(-rows // _ROWS), H)](lists.partial.runs, lists.order, rows, ROWS=_ROWS)


def _intervals(bound: BoundMod, lengths: tuple[int, int], H: int) -> Intervals:
    """Return the first key and the last + 1 that each row may attend to, [H, T_q], and whether it attends to all."""
    T_q, T_k = lengths
    graph, device = bound.graph, bound.captures[-1].device
    tree = row_bounds(graph, "kv_idx")
    inputs: dict[str, Tensor] = {
        "b": torch.zeros((), dtype=torch.int32, device=device),
        "h": torch.arange(H, dtype=torch.int32, device=device)[:, None],
        "q_idx": torch.arange(T_q, dtype=torch.int32, device=device),
        "kv_idx": torch.zeros((), dtype=torch.int32, device=device),
    }
    wanted = sorted(nodes_of(tree))
    values = dict(zip(wanted, graph.evaluate(inputs, bound.captures, bound.numbers, outputs=wanted), strict=True))
    low, high, exact = _ends(tree, values, torch.zeros((), dtype=torch.int64, device=device))
    shape = (H, T_q)
    low = torch.zeros(shape, dtype=torch.int64, device=device) if low is None else low.clamp(0, T_k).expand(shape)
    high = low.new_full(shape, T_k) if high is None else high.clamp(0, T_k).expand(shape)
    return low, high, exact


_FAR = 2**40
Ends = tuple[Tensor | None, Tensor | None, bool]


def _ends(tree: RowInterval, values: dict[int, Any], zero: Tensor) -> Ends:
    """Return the ends of an interval, None where it has none, and whether the interval is exact."""
    match tree:
        case Solved(side, bound):
            found = _sum_of(bound, values, zero)
            return (found, None, True) if side == "low" else (None, found, True)
        case WholeRows(node):
            return None, torch.where(values[node], zero + _FAR, zero - _FAR), True
        case Condition():
            return None, None, False
        case Complement(of):
            low, high, exact = _ends(of, values, zero)
            return high, low, exact
        case Both(x, y):
            (low, high, exact), (other_low, other_high, other_exact) = (_ends(t, values, zero) for t in (x, y))
            return (
                _either(torch.maximum, low, other_low),
                _either(torch.minimum, high, other_high),
                exact and other_exact,
            )
        case Either(x, y):
            (low, high, exact), (other_low, other_high, other_exact) = (_ends(t, values, zero) for t in (x, y))
            both_low = None if low is None or other_low is None else torch.minimum(low, other_low)
            both_high = None if high is None or other_high is None else torch.maximum(high, other_high)
            return both_low, both_high, exact and other_exact


def _sum_of(bound: Linear, values: dict[int, Any], zero: Tensor) -> Tensor:
    total = zero + bound.constant
    for node, factor in bound.terms:
        total = total + factor * values[node].long()
    return total


def _either(function: Any, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if y is None else y if x is None else function(x, y)


def _blocks(low: Tensor, high: Tensor, T_k: int, exact: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the blocks [begin, end) of each row of blocks, and the full ones in them, [H, rows of blocks] each."""
    H, T_q = low.shape
    rows = -(-T_q // BLOCK) * BLOCK - T_q
    lives = low < high
    pad = torch.nn.functional.pad

    def blocks(x: Tensor, fill: int) -> Tensor:
        return pad(x, (0, rows), value=fill).view(H, -1, BLOCK)

    begin = blocks(torch.where(lives, low, _FAR), _FAR).amin(-1)
    end = blocks(torch.where(lives, high, 0), 0).amax(-1)
    end = (end + BLOCK - 1) // BLOCK
    begin = torch.minimum(begin // BLOCK, end)
    if not exact:
        return begin, end, end, end
    full_begin = (blocks(low, 0).amax(-1) + BLOCK - 1) // BLOCK
    full_end = blocks(torch.where(lives, high, 0), 0).amin(-1) // BLOCK  # none where rows of the block are past T_q
    none = full_end <= full_begin
    return begin, end, torch.where(none, end, full_begin), torch.where(none, end, full_end)


def _lists(begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor) -> RunLists:
    """Return lists with two partial runs and one full run per row of blocks. Runs may be empty."""
    heads, rows = begin.shape
    row_ptr = torch.arange(heads * rows + 1, dtype=torch.int32, device=begin.device)
    partial = torch.stack((begin, full_begin, full_end, end), -1).int().view(-1, 2)
    full = torch.stack((full_begin, full_end), -1).int().view(-1, 2)
    order = (end - begin).argsort(dim=-1, descending=True, stable=True).int()
    return RunLists(Runs(row_ptr * 2, partial), Runs(row_ptr, full), order)


def _transposed(
    begin: Tensor, end: Tensor, full_begin: Tensor, full_end: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same for columns: all rows from the first to the last with this column. Others are partial too."""
    column = torch.arange(columns, device=begin.device)[None, :, None]

    def hull(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        holds = (first[:, None] <= column) & (column < last[:, None])  # [H, columns, rows]
        count = holds.sum(-1)
        if holds.size(-1) == 0:
            return count, count, count
        start = holds.byte().argmax(-1)
        stop = holds.size(-1) - holds.flip(-1).byte().argmax(-1)
        return torch.where(count > 0, start, 0), torch.where(count > 0, stop, 0), count

    start, stop, _ = hull(begin, end)
    full_start, full_stop, count = hull(full_begin, full_end)
    whole = (count > 0) & (count == full_stop - full_start)
    return start, stop, torch.where(whole, full_start, stop), torch.where(whole, full_stop, stop)
