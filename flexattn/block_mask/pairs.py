"""Evaluates mask_mod in a mask's partial blocks, in bounded memory, and counts the pairs that attend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask.runs import Runs
from flexattn.errors import DeviceError, message
from flexattn.graph.bound_mod import BoundMod

# Pairs evaluated at a time. A graph needs about 4 bytes per pair for each of its nodes.
_PAIRS = {"cpu": 2**21}
_PAIRS_ON_GPU = 2**24


class Pairs(NamedTuple):
    """The number of (query, key) pairs in the computed blocks of a mask, and the number of those that attend."""

    executed: int
    useful: int


def count_useful(
    bound: BoundMod, heads: list[Runs], H: int, lengths: tuple[int, int], block_size: tuple[int, int]
) -> int:
    """Return the number of pairs in partial blocks that attend; `heads` are the partial runs of each b * H + h.

    Heads with equal runs, for which the mod gives the same result, are evaluated once.
    """
    bound = placed(bound, heads[0].runs.device)
    b_read, h_read = bound.graph.reads("b"), bound.graph.reads("h")
    counts: list[int] = []
    for head, runs in enumerate(heads):
        b, h = divmod(head, H)
        alike = b * b_read * H + h * h_read  # the first head with the same result of the mod
        if alike < head and _same_runs(runs, heads[alike]):
            counts.append(counts[alike])
        else:
            counts.append(_count_pairs(bound, (b, h), runs, lengths, block_size))
    return sum(counts)


def placed(bound: BoundMod, device: torch.device) -> BoundMod:
    """Return the mod with its captured tensors on the device of the mask. Only CPU scalars are moved."""
    bound = bound.on(device)
    for capture, described in zip(bound.captures, bound.graph.captures, strict=True):
        if capture.device != device:
            found = f"the captured tensor {described.name} on {capture.device}"
            fix = "Move the mask with .to(device), which moves these tensors too."
            raise DeviceError(message("mask_mod", found, f"the device of the mask, {device}", fix))
    return bound


def _same_runs(one: Runs, other: Runs) -> bool:
    return torch.equal(one.row_ptr, other.row_ptr) and torch.equal(one.runs, other.runs)


def _count_pairs(
    bound: BoundMod, head: tuple[int, int], runs: Runs, lengths: tuple[int, int], block_size: tuple[int, int]
) -> int:
    """Return the number of attending pairs in the blocks of one (b, h), in bounded memory."""
    read = bound.graph.reads("q_idx"), bound.graph.reads("kv_idx")
    return sum(
        int(((c.live * c.keys[:, None]).sum(2) * c.queries).sum())
        for c in chunks(bound, head, runs, lengths, block_size, read)
    )


class Chunk(NamedTuple):
    """A mod evaluated in some blocks, or in a window of one: `live[n, i, j]` is its result at (q[n, i], kv[n, j])."""

    q: Tensor  # int32 [blocks, i]
    queries: Tensor  # int32, how many queries each q stands for: 0 past the length
    kv: Tensor  # int32 [blocks, j]
    keys: Tensor  # int32, how many keys each kv stands for
    live: Tensor  # bool [blocks, i, j], 1 along an axis that the mod does not read

    def attends(self) -> Tensor:
        """Return which pairs attend, bool [blocks, i, j], false past the lengths."""
        return self.live & (self.queries > 0)[:, :, None] & (self.keys > 0)[:, None]


def chunks(
    bound: BoundMod, head: tuple[int, int], runs: Runs, lengths: tuple[int, int], block_size: tuple[int, int],
    read: tuple[bool, bool] = (True, True),
) -> Iterator[Chunk]:  # fmt: skip
    """Evaluate a mod in the blocks of one (b, h), in the order of the runs, about `_PAIRS` pairs at a time.

    `read`: whether the mod is evaluated at each query and key of a block. Otherwise the first one represents all.
    """
    device = runs.runs.device
    b, h = (torch.full((1, 1, 1), i, dtype=torch.int32, device=device) for i in head)
    most = _PAIRS.get(device.type, _PAIRS_ON_GPU)
    sizes = [max(1, min(n, length)) if r else 1 for n, length, r in zip(block_size, lengths, read, strict=True)]
    q_step = min(sizes[0], most)
    kv_step = min(sizes[1], max(1, most // q_step))
    step = max(1, most // (q_step * kv_step))
    ends = (runs.runs[:, 1] - runs.runs[:, 0]).cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    for start in range(0, total, step):
        rows, columns = _blocks_of(runs, ends, start, start + step)
        for q_start in range(0, sizes[0], q_step):
            q, queries = _positions(rows, block_size[0], lengths[0], range(q_start, q_start + q_step), read[0])
            for kv_start in range(0, sizes[1], kv_step):
                window = range(kv_start, kv_start + kv_step)
                kv, keys = _positions(columns, block_size[1], lengths[1], window, read[1])
                with torch.no_grad():
                    live = bound(b, h, q[:, :, None], kv[:, None])
                yield Chunk(q, queries, kv, keys, live)


def attending(
    bound: BoundMod, head: tuple[int, int], runs: Runs, lengths: tuple[int, int], block_size: tuple[int, int],
    cell: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Return the number of pairs in the blocks of one (b, h) that attend, in each cell of queries x keys, int64."""
    down, across = (-(-n // size) for n, size in zip(lengths, cell, strict=True))
    total = torch.zeros(down * across, dtype=torch.int64, device=runs.runs.device)
    bound = placed(bound, total.device)
    for c in chunks(bound, head, runs, lengths, block_size):
        number = (c.q.long() // cell[0] * across)[:, :, None] + (c.kv // cell[1])[:, None]
        total += torch.bincount(number[c.attends()], minlength=len(total))
    return total.view(down, across)


def _blocks_of(runs: Runs, ends: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the blocks numbered `start` to `stop`, int64 [n]; `ends` are summed run lengths."""
    numbers = torch.arange(start, min(stop, int(ends[-1])), device=ends.device)
    run = torch.searchsorted(ends, numbers, right=True)
    return torch.searchsorted(runs.row_ptr.long(), run, right=True) - 1, runs.runs[run, 1] - (ends[run] - numbers)


def _positions(blocks: Tensor, size: int, length: int, window: range, read: bool) -> tuple[Tensor, Tensor]:
    """Return the positions to evaluate in each block, and how many each represents, int32 [blocks, positions].

    If the mod does not read an axis, its first position represents all. Past the length, repeated positions count 0.
    """
    first = blocks[:, None] * size
    if not read:
        return first.int(), (length - first).clamp(max=size).int()
    offsets = torch.arange(window.start, min(window.stop, size), device=blocks.device)
    return (first + offsets).clamp(max=length - 1).int(), (first + offsets < length).int()
