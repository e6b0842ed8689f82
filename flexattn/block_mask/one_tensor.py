"""one_tensor: the run lists of a mask as one int32 tensor, whose layout follows from its size and the mask's shape.

An operator in a compiled graph takes one tensor for each set of lists. The lengths of the lists differ between masks of
the same shape, and each length that a graph sees would compile it again. So the runs of all lists have the same
capacity, a power of two, and only the size of the whole tensor varies. It is marked as dynamic.

    for each direction (query rows, then key rows if there are any)
        row_ptr of the partial blocks [rows + 1], of the full blocks [rows + 1], order [rows]
    for each direction
        runs of the partial blocks [capacity, 2], of the full blocks [capacity, 2]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.block_mask.runs import RunLists, Runs

_LEAST = 16  # runs; a size of 0 or 1 would be specialized by torch.compile


def pack(directions: Sequence[RunLists], capacity: int | None = None) -> Tensor:
    """Return the lists of one or two directions as one tensor, int32 [n].

    `capacity` is the number of runs that each list has room for; None: what these lists need.
    """
    runs = [r.runs for lists in directions for r in (lists.partial, lists.full)]
    if capacity is None:
        capacity = max(_LEAST, 1 << (max(len(r) for r in runs) - 1).bit_length() if any(map(len, runs)) else 0)
    parts = [t for lists in directions for t in (lists.partial.row_ptr, lists.full.row_ptr, lists.order.flatten())]
    for r in runs:
        parts += [r.flatten(), r.new_empty(2 * (capacity - len(r)))]  # never read
    return with_symbols(torch.cat(parts), 0)


_SYMBOLS = "_dynamo_weak_dynamic_indices"


def with_symbols(tensor: Tensor, *dims: int) -> Tensor:
    """Let torch.compile make sizes symbols in its first graph, as torch._dynamo.maybe_mark_dynamic does."""
    setattr(tensor, _SYMBOLS, set(dims))
    return tensor


def savable(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd can save: a copy, if it was made in inference_mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return with_symbols(tensor.clone(), *getattr(tensor, _SYMBOLS, ()))


def most_runs(heads: int, rows: int, columns: int) -> int:
    """Return a capacity that any lists of a grid of blocks fit in. They then take as much memory as PyTorch's lists."""
    return heads * (rows * columns // 2 + rows + columns) + _LEAST


def packed_size(heads: int, rows: Sequence[int], capacity: int) -> int:
    """Return the number of elements of a packed tensor. `rows` is as for `unpack`."""
    return sum(3 * heads * n + 2 + 4 * capacity for n in rows)


def unpack(packed: Tensor, heads: int, rows: Sequence[int], exact: bool) -> list[RunLists]:
    """Return the lists as views of a packed tensor.

    Args:
        packed: the result of `pack`.
        heads: number of pairs (b, h) of the mask.
        rows: number of blocks along each direction, for one pair (b, h).
        exact: drop the unused capacity. The host then reads the number of runs, and waits for a GPU.
    """
    counts = [heads * n for n in rows]
    start = sum(3 * n + 2 for n in counts)
    capacity = (packed.numel() - start) // (4 * len(counts))
    found, at = [], 0
    for n in counts:
        row_ptrs = packed[at : at + n + 1], packed[at + n + 1 : at + 2 * n + 2]
        order = packed[at + 2 * n + 2 : at + 3 * n + 2].view(heads, -1) if n else packed.new_empty((heads, 0))
        lists = []
        for row_ptr in row_ptrs:
            used = int(row_ptr[-1]) if exact else capacity
            lists.append(Runs(row_ptr, packed[start : start + 2 * used].view(-1, 2)))
            start += 2 * capacity
        found.append(RunLists(lists[0], lists[1], order))
        at += 3 * n + 2
    return found
