"""Cuts the work of a BlockMask into strips of query rows and tiles of keys that are wide enough for fast products.

A strip is some rows of some heads of one batch entry. Its tiles list the keys that any of its rows attends to: first
those that every row attends to (no mask to ask), then the rest. Columns of a tile need not be adjacent in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, Runs
from flexattn.problem import Problem

PARTIAL, FULL = 1, 2

# Elements of a tile of scores, and of a tile of keys or values: 2 and 8 MiB in float32. On two cores with 1 MiB of L2
# each, tiles of 0.25M to 1M scores were within 2% of each other; smaller ones cost up to 10% more.
_SCORES = 1 << 19
_OPERAND = 1 << 21
_STACKED_ROWS = 1024  # rows of all heads of a strip together
_MAX_HEADS = 16


@dataclass(frozen=True)
class Tile:
    """Some keys of a strip: `keys` are half-open ranges, of which the first `full` columns attend everywhere.

    Those of `fixed_strips` may pass the last key, as their strips may pass the last query: no place there attends.
    """

    keys: tuple[tuple[int, int], ...]
    width: int
    full: int
    states: Tensor | None  # int8 [rows or 1, width - full]: 0, PARTIAL or FULL; None where all are PARTIAL


@dataclass(frozen=True)
class Strip:
    """Rows [m0, m1) of batch entry `batch`: for each key head in [n0, n1), its query heads [g0, g1) of the group."""

    batch: int
    key_heads: tuple[int, int]
    group: tuple[int, int]
    rows: tuple[int, int]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Share:
    """What one of `count` threads does: whole key heads, so that no two threads add to the same keys."""

    index: int
    count: int
    heads: int  # key heads that stay together

    def has(self, batch: int, key_head: int, blocks: int) -> bool:
        return (batch * blocks + key_head // self.heads) % self.count == self.index


def shares(problem: Problem, threads: int) -> list[Share]:
    """Divide the key heads among at most `threads` threads."""
    Bkv, Hkv = problem.key.shape[:2]
    count = max(1, min(threads, Bkv * Hkv))
    heads = Hkv if Bkv % count == 0 else max(1, Hkv // count)
    return [Share(i, count, max(1, heads)) for i in range(count)]


def strips(problem: Problem, share: Share | None = None) -> Iterator[Strip]:
    """Yield strips that cover every attended pair (of the share) exactly once, those of the last rows first."""
    B, Hq, M, _ = problem.query.shape
    Bkv, Hkv, N, _ = problem.key.shape
    mask = problem.block_mask
    mask_B, mask_H = (1, 1) if mask is None else (mask.B, mask.H)
    together = min(Hkv, _MAX_HEADS) if share is None else min(share.heads, _MAX_HEADS)
    heads_at_once = 1 if mask_H > 1 else together * (Hq // Hkv)
    rows_wanted = 128 if heads_at_once > 4 else 256
    for mask_b in range(mask_B):
        for mask_h in range(mask_H):
            for rows, ranges in _rows(mask, mask_b, mask_h, M, N, rows_wanted):
                m = rows[1] - rows[0]
                groups = list(_head_groups(problem, mask_h if mask_H > 1 else None, m, together))
                widths = {g: _width(problem, g, m) for g in groups}
                tiles = {w: tuple(_tiles(ranges, w)) for w in set(widths.values())}
                for batch in range(B) if mask_B == 1 else (mask_b,):
                    for key_heads, group in groups:
                        if share is None or share.has(batch % Bkv, key_heads[0], -(-Hkv // share.heads)):
                            yield Strip(batch, key_heads, group, rows, tiles[widths[key_heads, group]])


# Of every strip and tile where calls must be alike: then each product has one shape, and BLAS one way to take it.
FIXED_ROWS, FIXED_KEYS = 128, 512


def fixed_strips(problem: Problem, share: Share | None = None) -> Iterator[Strip]:
    """Yield strips as `strips` does, of one head and FIXED_ROWS each, with tiles of FIXED_KEYS, the first keys first.

    The problem is one of `batch_invariant.in_one_class`.
    """
    B, Hq, M, _ = problem.query.shape
    Bkv, Hkv, N, _ = problem.key.shape
    mask = problem.block_mask
    assert mask is not None and not any(size % FIXED_ROWS for size in mask.BLOCK_SIZE)
    partial, blocks = _as_numpy(mask.kv_runs.partial), -(-M // mask.BLOCK_SIZE[0])
    G = Hq // Hkv
    for mask_b in range(mask.B):
        for mask_h in range(mask.H):
            for m0 in reversed(range(0, M, FIXED_ROWS)):
                row = (mask_b * mask.H + mask_h) * blocks + m0 // mask.BLOCK_SIZE[0]
                runs = partial[1][partial[0][row] : partial[0][row + 1]] * mask.BLOCK_SIZE[1]
                tiles = tuple(_fixed_tiles(np.minimum(runs, N), min(FIXED_ROWS, M - m0)))
                for batch in range(B) if mask.B == 1 else (mask_b,):
                    for head in range(Hq) if mask.H == 1 else (mask_h,):
                        h, g = divmod(head, G)
                        if share is None or share.has(batch % Bkv, h, -(-Hkv // share.heads)):
                            yield Strip(batch, (h, h + 1), (g, g + 1), (m0, m0 + FIXED_ROWS), tiles)


def _fixed_tiles(runs: np.ndarray, rows: int) -> Iterator[Tile]:
    """Yield the tiles of FIXED_KEYS that hold any of these runs of keys, for that many rows of a strip."""
    if not len(runs):
        return
    listed = np.zeros(-(-int(runs.max()) // FIXED_KEYS) * FIXED_KEYS, np.int8)
    for lo, hi in runs.tolist():
        listed[lo:hi] = PARTIAL
    there = np.arange(FIXED_ROWS)[:, None] < rows
    for i, columns in enumerate(listed.reshape(-1, FIXED_KEYS)):
        if columns.any():
            states = columns[None] if rows == FIXED_ROWS else columns * there
            keys = ((i * FIXED_KEYS, (i + 1) * FIXED_KEYS),)
            yield Tile(keys, FIXED_KEYS, 0, None if states.all() else torch.from_numpy(states))


Group = tuple[tuple[int, int], tuple[int, int]]


def _head_groups(problem: Problem, only: int | None, m: int, together: int) -> Iterator[Group]:
    """Yield (key heads, members of the group) so that their rows together stay near _STACKED_ROWS.

    No key heads go together that stand on two sides of a multiple of `together`.
    """
    Hq, Hkv = problem.query.shape[1], problem.key.shape[1]
    G = Hq // Hkv
    if only is not None:
        yield (only // G, only // G + 1), (only % G, only % G + 1)
        return
    members = min(G, max(1, _STACKED_ROWS // m))
    heads = min(together, max(1, _STACKED_ROWS // (m * G)))
    for first in range(0, Hkv, together):
        last = min(first + together, Hkv)
        for h in range(first, last, heads):
            for g in range(0, G, members):
                yield (h, min(h + heads, last)), (g, min(g + members, G))


def _width(problem: Problem, group: Group, m: int) -> int:
    (h0, h1), (g0, g1) = group
    head_dim = max(problem.query.shape[-1], problem.value.shape[-1], 1)
    by_scores = _SCORES // ((h1 - h0) * (g1 - g0) * m)
    by_operand = _OPERAND // ((h1 - h0) * head_dim)
    return max(64, min(by_scores, by_operand))


@dataclass(frozen=True)
class _Ranges:
    """The keys of some rows: ranges where all attend, the other ranges, and the states of single blocks there."""

    full: list[tuple[int, int]]
    rest: list[tuple[int, int]]
    states: np.ndarray | None = None  # int8 [query blocks, key blocks from first_block on]
    first_block: int = 0
    block: tuple[int, int] = (1, 1)
    rows: tuple[int, int] = (0, 0)


def _rows(
    mask: BlockMask | None, mask_b: int, mask_h: int, M: int, N: int, wanted: int
) -> Iterator[tuple[tuple[int, int], _Ranges]]:
    """Yield ranges of about `wanted` rows, several query blocks or a part of one, with the keys of each."""
    if mask is None:
        for m0 in reversed(range(0, M, wanted)):
            yield (m0, min(m0 + wanted, M)), _Ranges([(0, N)] if N else [], [])
        return
    block_m, block_n = mask.BLOCK_SIZE
    partial, full = _as_numpy(mask.kv_runs.partial), _as_numpy(mask.kv_runs.full)
    blocks = (len(partial[0]) - 1) // (mask.B * mask.H)
    first_row = (mask_b * mask.H + mask_h) * blocks
    at_once = max(1, wanted // block_m)
    # The last rows first: under a causal mask they are the longest, and threads end together.
    for i in reversed(range(0, min(blocks, -(-M // block_m)), at_once)):
        m0, m1 = i * block_m, min((i + at_once) * block_m, M)
        states, first_block = _block_states(partial, full, range(first_row + i, first_row + min(i + at_once, blocks)))
        all_full = (states == FULL).all(0)
        some = (states > 0).any(0) & ~all_full
        uneven = states if (states[:, some] != PARTIAL).any() else None
        ranges = _Ranges(
            _key_ranges(all_full, first_block, block_n, N), _key_ranges(some, first_block, block_n, N),
            uneven, first_block, (block_m, block_n), (m0, m1),
        )  # fmt: skip
        pieces = -(-(m1 - m0) // wanted)
        step = -(-(m1 - m0) // pieces)
        for m in range(m0, m1, step):
            yield (m, min(m + step, m1)), ranges


def _as_numpy(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    return runs.row_ptr.cpu().numpy(), runs.runs.cpu().numpy()


def _block_states(
    partial: tuple[np.ndarray, np.ndarray], full: tuple[np.ndarray, np.ndarray], rows: range
) -> tuple[np.ndarray, int]:
    """Return the states of the blocks of some rows, from the first listed key block to the last."""
    listed = [
        (row - rows.start, state, lo, hi)
        for (ptr, runs), state in ((partial, PARTIAL), (full, FULL))
        for row in rows
        for lo, hi in runs[ptr[row] : ptr[row + 1]].tolist()
    ]
    first = min((lo for _, _, lo, _ in listed), default=0)
    last = max((hi for _, _, _, hi in listed), default=0)
    states = np.zeros((len(rows), last - first), np.int8)
    for row, state, lo, hi in listed:
        states[row, lo - first : hi - first] = state
    return states, first


def _key_ranges(blocks: np.ndarray, first_block: int, block_n: int, N: int) -> list[tuple[int, int]]:
    """Turn flags of blocks into ranges of keys inside of the length."""
    edges = np.flatnonzero(np.diff(blocks, prepend=False, append=False)) + first_block
    ranges = ((lo * block_n, min(hi * block_n, N)) for lo, hi in edges.reshape(-1, 2).tolist())
    return [(lo, hi) for lo, hi in ranges if lo < hi]


def _tiles(ranges: _Ranges, most: int) -> Iterator[Tile]:
    """Pack the ranges, full ones first, into tiles of nearly equal width."""
    total = sum(hi - lo for lo, hi in ranges.full + ranges.rest)
    if total == 0:
        return
    even = -(-total // -(-total // most))
    width = min(most, -(-even // 64) * 64)
    keys: list[tuple[int, int]] = []
    have = full = 0
    for is_full, (lo, hi) in [(True, r) for r in ranges.full] + [(False, r) for r in ranges.rest]:
        while lo < hi:
            take = min(hi - lo, width - have)
            if keys and keys[-1][1] == lo:
                keys[-1] = (keys[-1][0], lo + take)
            else:
                keys.append((lo, lo + take))
            have, full, lo = have + take, full + take * is_full, lo + take
            if have == width:
                yield Tile(tuple(keys), have, full, _element_states(ranges, keys, full))
                keys, have, full = [], 0, 0
    if keys:
        yield Tile(tuple(keys), have, full, _element_states(ranges, keys, full))


def _element_states(ranges: _Ranges, keys: list[tuple[int, int]], full: int) -> Tensor | None:
    """Spread the states of blocks over rows and the columns after `full`."""
    if ranges.states is None:
        return None
    columns = np.concatenate([np.arange(lo, hi) for lo, hi in keys])[full:] // ranges.block[1] - ranges.first_block
    rows = np.arange(*ranges.rows) // ranges.block[0] - ranges.rows[0] // ranges.block[0]
    return torch.from_numpy(ranges.states[rows[:, None], columns])
