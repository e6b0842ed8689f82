"""Splits the work of a BlockMask into strips of query rows and tiles of keys that are wide enough for fast products.

A strip is some rows of some heads of some batch entries. Its tiles list the keys that any of its rows attends to: first
the keys that every row attends to (no mask_mod needed), then the rest. Columns of a tile may be apart in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flexattn.block_mask import Runs
from flexattn.call.problem import Problem
from flexattn.graph.interval_bounds import FULL, PARTIAL
from flexattn.process.frozen_class import frozen

# Elements of a tile of scores, and of a tile of keys or values: 2 and 8 MiB in float32. On two cores with 1 MiB of L2
# each, tiles of 0.25M to 1M scores were within 2% of each other; smaller ones cost up to 10% more.
_SCORES = 1 << 19
_OPERAND = 1 << 21
_STACKED_ROWS = 1024  # rows of all heads of a strip together; more if they have few keys
_MAX_HEADS = 16
# Factor on a GPU, where an operation takes as long for many elements as for few.
_ON_GPU = 8
# Batch entries and heads with their own masks share a strip if each has at most this many pairs. Otherwise separate
# strips are faster than computing each other's pairs.
_MERGED_PAIRS = 1 << 14


@frozen
class States:
    """Which pairs lie in partial and in full blocks: bool, broadcasting to a tile's columns; None: no such pair."""

    partial: Tensor | None
    full: Tensor | None

    @property
    def live(self) -> Tensor:
        """All listed pairs."""
        found = [x for x in (self.partial, self.full) if x is not None]
        return found[0] if len(found) == 1 else found[0] | found[1]


@frozen
class Tile:
    """Some keys of a strip: `keys` are half-open ranges. All rows attend to the first `full` columns.

    Tiles of `fixed_strips` may extend past the last key, and strips past the last query. Nothing there attends.
    """

    keys: tuple[tuple[int, int], ...]
    width: int
    full: int
    states: States | None  # of the columns after `full`; None if all are in partial blocks


@frozen
class Strip:
    """Rows [m0, m1) of some batch entries: for each key head in [n0, n1), its query heads [g0, g1) of the group."""

    batches: range
    key_heads: tuple[int, int]
    group: tuple[int, int]
    rows: tuple[int, int]
    tiles: tuple[Tile, ...]


@frozen
class Piece:
    """Batch entries and key heads whose rows and keys are all computed by one thread."""

    batches: range
    key_heads: tuple[int, int]


Share = tuple[Piece, ...]  # the work of one thread


def whole(problem: Problem) -> Share:
    """Return the whole problem as one share."""
    return (Piece(range(problem.query.shape[0]), (0, problem.key.shape[1])),)


def shares(problem: Problem, threads: int) -> list[Share]:
    """Divide the key heads among at most `threads` threads, so that no two of them add to the same keys."""
    B, (Bkv, Hkv) = problem.query.shape[0], problem.key.shape[:2]
    count = max(1, min(threads, Bkv * Hkv))
    if Bkv % count == 0 or Bkv >= 8 * count:
        return [(Piece(range(i, B, count), (0, Hkv)),) for i in range(count)]
    heads = max(1, Hkv // count)
    batches = [range(B)] if Bkv == 1 else [range(b, b + 1) for b in range(B)]
    pieces = [Piece(b, (h, min(h + heads, Hkv))) for b in batches for h in range(0, Hkv, heads)]
    return [tuple(pieces[i::count]) for i in range(count)]


def strips(problem: Problem, share: Share | None = None) -> Iterator[Strip]:
    """Yield strips that cover every attended pair (of the share) exactly once."""
    limits = _Limits.of(problem)
    for piece in share or whole(problem):
        for part in _parts(problem, piece, limits):
            yield from _strips_of(problem, part, limits)


@frozen
class _Limits:
    """Maximum sizes of the strips and tiles of a problem."""

    scores: int  # elements of a tile
    shared: int  # elements of a tile shared by heads and batch entries
    operand: int  # elements of keys or values
    rows: int  # of each head
    stacked_rows: int  # of all heads together
    head_dim: int

    @staticmethod
    def of(problem: Problem) -> _Limits:
        times, head_dim = 1 if problem.query.is_cpu else _ON_GPU, max(problem.query.shape[3], problem.value.shape[3], 1)
        return _Limits(
            times * _SCORES, times * _SCORES // 4, times * _OPERAND, times * 128, times * _STACKED_ROWS, head_dim
        )


@frozen
class _Part:
    """Batch entries and heads with one list of blocks per row, or with small masks that are merged."""

    batches: range
    key_heads: tuple[int, int]
    group: tuple[int, int]
    mask_batches: Sequence[int]  # entries of the mask: one per batch entry and head, or one for all of them
    mask_heads: Sequence[int]


def _parts(problem: Problem, piece: Piece, limits: _Limits) -> Iterator[_Part]:
    block_mask, M, N = problem.block_mask, problem.query.shape[2], problem.key.shape[2]
    G = problem.query.shape[1] // problem.key.shape[1]
    batches, (h0, h1) = piece.batches, piece.key_heads
    merges = max(M, 64) * N <= _MERGED_PAIRS
    heads = [(piece.key_heads, (0, G), range(1))]
    if block_mask is not None and block_mask.H > 1:
        at_once = max(1, limits.shared // max(1, G * M * N))
        together = [(h, min(h + at_once, h1)) for h in range(h0, h1, at_once)]
        heads = [((a, b), (0, G), range(a * G, b * G)) for a, b in together]
        if not merges:
            heads = [((h, h + 1), (g, g + 1), range(h * G + g, h * G + g + 1)) for h in range(h0, h1) for g in range(G)]
    for key_heads, group, of_heads in heads:
        if block_mask is None or block_mask.B == 1:
            yield _Part(batches, key_heads, group, range(1), of_heads)
            continue
        pairs = (key_heads[1] - key_heads[0]) * (group[1] - group[0]) * M * N
        at_once = max(1, limits.shared // max(1, pairs)) if merges else 1
        for chosen in _chunks(batches, at_once):
            yield _Part(chosen, key_heads, group, chosen, of_heads)


def _chunks(batches: range, size: int) -> list[range]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def _strips_of(problem: Problem, part: _Part, limits: _Limits) -> Iterator[Strip]:
    (h0, h1), (g0, g1), block_mask = part.key_heads, part.group, problem.block_mask
    heads_at_once = min(h1 - h0, _MAX_HEADS) * (g1 - g0)
    one_mask = block_mask is None or block_mask.H == 1
    for rows, ranges in _rows(problem, part, limits.rows if heads_at_once > 4 else 2 * limits.rows):
        m, keys = rows[1] - rows[0], ranges.count
        groups = list(_head_groups(limits, part, m, keys)) if one_mask else [(part.key_heads, part.group)]
        widths = {g: _width(limits, g, m) for g in groups}
        tiles = {w: tuple(_tiles(ranges, w)) for w in set(widths.values())}
        at_once = {g: _batches_at_once(limits, g, m, keys) for g in groups}
        for group in groups:
            for batches in [part.batches] if len(part.mask_batches) > 1 else _chunks(part.batches, at_once[group]):
                yield Strip(batches, *group, rows, tiles[widths[group]])


def _batches_at_once(limits: _Limits, group: Group, m: int, keys: int) -> int:
    """Return the number of batch entries in a strip whose scores fit in the L2 cache; 1 if a tile is large."""
    (h0, h1), (g0, g1) = group
    heads, rows = h1 - h0, (g1 - g0) * m
    by_scores = limits.shared // (heads * rows * max(keys, 1))
    by_operand = limits.operand // (heads * max(rows, keys) * limits.head_dim)
    return max(1, min(by_scores, by_operand))


# Sizes in batch-invariant mode: every product then has the same shape, and BLAS computes it the same way.
FIXED_ROWS, FIXED_KEYS = 128, 512


def fixed_strips(problem: Problem, share: Share | None = None) -> Iterator[Strip]:
    """Yield strips like `strips`, of one head and FIXED_ROWS each, with tiles of FIXED_KEYS in ascending order.

    The problem is one from `batch_invariant.as_batch_invariant`.
    """
    Hq, M = problem.query.shape[1:3]
    Hkv, N = problem.key.shape[1:3]
    block_mask = problem.block_mask
    assert block_mask is not None and not any(size % FIXED_ROWS for size in block_mask.BLOCK_SIZE)
    partial, blocks = _as_numpy(block_mask.kv_runs.partial), -(-M // block_mask.BLOCK_SIZE[0])
    G = Hq // Hkv
    for piece in share or whole(problem):
        heads = range(piece.key_heads[0] * G, piece.key_heads[1] * G)
        for mask_b, batches in [(0, piece.batches)] if block_mask.B == 1 else [(b, (b,)) for b in piece.batches]:
            for mask_h, its_heads in [(0, heads)] if block_mask.H == 1 else [(h, (h,)) for h in heads]:
                for m0 in reversed(range(0, M, FIXED_ROWS)):
                    row = (mask_b * block_mask.H + mask_h) * blocks + m0 // block_mask.BLOCK_SIZE[0]
                    runs = partial[1][partial[0][row] : partial[0][row + 1]] * block_mask.BLOCK_SIZE[1]
                    tiles = tuple(_fixed_tiles(np.minimum(runs, N), min(FIXED_ROWS, M - m0), problem.query.device))
                    for batch in batches:
                        for h, g in (divmod(head, G) for head in its_heads):
                            yield Strip(range(batch, batch + 1), (h, h + 1), (g, g + 1), (m0, m0 + FIXED_ROWS), tiles)


def _fixed_tiles(runs: np.ndarray, rows: int, device: torch.device) -> Iterator[Tile]:
    """Yield the tiles of FIXED_KEYS that contain any of these runs of keys, for a strip with that many rows."""
    if not len(runs):
        return
    listed = np.zeros(-(-int(runs.max()) // FIXED_KEYS) * FIXED_KEYS, np.bool_)
    for lo, hi in runs.tolist():
        listed[lo:hi] = True
    there = np.arange(FIXED_ROWS)[:, None] < rows
    for i, columns in enumerate(listed.reshape(-1, FIXED_KEYS)):
        if columns.any():
            live = columns[None] if rows == FIXED_ROWS else columns & there
            keys = ((i * FIXED_KEYS, (i + 1) * FIXED_KEYS),)
            states = None if live.all() else States(torch.from_numpy(live).to(device), None)
            yield Tile(keys, FIXED_KEYS, 0, states)


Group = tuple[tuple[int, int], tuple[int, int]]


def _head_groups(limits: _Limits, part: _Part, m: int, keys: int) -> Iterator[Group]:
    """Yield (key heads, group members) that limit the stacked rows, or the scores if there are few keys."""
    (h0, h1), (g0, g1) = part.key_heads, part.group
    keys = max(keys, 1)
    stacked = max(limits.stacked_rows, min(limits.shared // keys, limits.operand // limits.head_dim))
    members = min(g1 - g0, max(1, stacked // m))
    most_heads = max(_MAX_HEADS, limits.operand // (keys * limits.head_dim))
    heads = min(most_heads, max(1, stacked // (m * (g1 - g0))))
    for h in range(h0, h1, heads):
        for g in range(g0, g1, members):
            yield (h, min(h + heads, h1)), (g, min(g + members, g1))


def _width(limits: _Limits, group: Group, m: int) -> int:
    (h0, h1), (g0, g1) = group
    by_scores = limits.scores // ((h1 - h0) * (g1 - g0) * m)
    by_operand = limits.operand // ((h1 - h0) * limits.head_dim)
    return max(64, min(by_scores, by_operand))


@frozen
class _Ranges:
    """The keys of some rows: ranges that all rows attend to, the other ranges, and their states per block."""

    full: list[tuple[int, int]]
    rest: list[tuple[int, int]]
    states: np.ndarray | None = None  # int8 [batches, key heads, group, query blocks, key blocks from first_block on]
    first_block: int = 0
    block: tuple[int, int] = (1, 1)
    rows: int = 0
    device: torch.device | None = None

    @property
    def count(self) -> int:
        return sum(hi - lo for lo, hi in self.full + self.rest)


def _rows(problem: Problem, part: _Part, wanted: int) -> Iterator[tuple[tuple[int, int], _Ranges]]:
    """Yield ranges of about `wanted` rows (several query blocks or a part of one) with their keys."""
    block_mask, M, N = problem.block_mask, problem.query.shape[2], problem.key.shape[2]
    if block_mask is None:
        for m0 in reversed(range(0, M, wanted)):
            yield (m0, min(m0 + wanted, M)), _Ranges([(0, N)] if N else [], [])
        return
    block_m, block_n = block_mask.BLOCK_SIZE
    partial, full = _as_numpy(block_mask.kv_runs.partial), _as_numpy(block_mask.kv_runs.full)
    blocks = (len(partial[0]) - 1) // (block_mask.B * block_mask.H)
    entries = np.asarray(part.mask_batches)[:, None] * block_mask.H + np.asarray(part.mask_heads)
    group = part.group[1] - part.group[0] if len(part.mask_heads) > 1 else 1
    at_once = max(1, wanted // block_m)
    # The last rows come first: under a causal mask they have the most keys, so threads finish together.
    for i in reversed(range(0, min(blocks, -(-M // block_m)), at_once)):
        m0, m1 = i * block_m, min((i + at_once) * block_m, M)
        listed = entries[..., None] * blocks + np.arange(i, min(i + at_once, blocks))
        states, first_block = _block_states(partial, full, listed.reshape(-1))
        heads = listed.shape[1] // group
        states = states.reshape(len(entries), heads, group, listed.shape[2], states.shape[1])
        all_full = (states == FULL).all((0, 1, 2, 3))
        some = (states > 0).any((0, 1, 2, 3)) & ~all_full
        uneven = states if (states[..., some] != PARTIAL).any() else None
        ranges = _Ranges(
            _key_ranges(all_full, first_block, block_n, N), _key_ranges(some, first_block, block_n, N),
            uneven, first_block, (block_m, block_n), m1 - m0, problem.query.device,
        )  # fmt: skip
        pieces = -(-(m1 - m0) // wanted)
        step = -(-(m1 - m0) // pieces)
        for m in range(m0, m1, step):
            yield (m, min(m + step, m1)), ranges


def _as_numpy(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    return runs.row_ptr.cpu().numpy(), runs.runs.cpu().numpy()


def _block_states(
    partial: tuple[np.ndarray, np.ndarray], full: tuple[np.ndarray, np.ndarray], rows: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the states of the blocks of some rows, int8 [rows, key blocks], and the first key block."""
    listed = [(state, *_runs_of(lists, rows)) for lists, state in ((partial, PARTIAL), (full, FULL)) if len(lists[1])]
    listed = [(state, owners, runs) for state, owners, runs in listed if len(runs)]
    if not listed:
        return np.zeros((len(rows), 0), np.int8), 0
    first = min(int(runs[:, 0].min()) for _, _, runs in listed)
    width = max(int(runs[:, 1].max()) for _, _, runs in listed) - first + 1
    steps = np.zeros(len(rows) * width, np.int8)
    for state, owners, runs in listed:
        start = owners * width - first
        steps[start + runs[:, 0]] += state  # runs of a row never share a start or an end
        steps[start + runs[:, 1]] -= state
    return steps.reshape(len(rows), width).cumsum(1, dtype=np.int8)[:, :-1], first


def _runs_of(lists: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of some rows, with the index of the row of each run."""
    ptr, runs = lists
    first, end = ptr[rows], ptr[rows + 1]
    count = end - first
    owners = np.repeat(np.arange(len(rows)), count)
    shift = (end - count.cumsum())[owners]  # position of run i in `runs`, minus i
    return owners, runs[shift + np.arange(len(owners))]


def _key_ranges(blocks: np.ndarray, first_block: int, block_n: int, N: int) -> list[tuple[int, int]]:
    """Convert flags of blocks to ranges of keys within the length."""
    framed = np.zeros(len(blocks) + 2, np.bool_)
    framed[1:-1] = blocks
    edges = np.flatnonzero(framed[1:] != framed[:-1]) + first_block
    ranges = ((lo * block_n, min(hi * block_n, N)) for lo, hi in edges.reshape(-1, 2).tolist())
    return [(lo, hi) for lo, hi in ranges if lo < hi]


def _tiles(ranges: _Ranges, most: int) -> Iterator[Tile]:
    """Pack the ranges, full ones first, into tiles of nearly equal width."""
    total = ranges.count
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


def _element_states(ranges: _Ranges, keys: list[tuple[int, int]], full: int) -> States | None:
    """Expand the states of blocks to rows and to the columns after `full`."""
    if ranges.states is None:
        return None
    columns = np.concatenate([np.arange(lo, hi) for lo, hi in keys])[full:] // ranges.block[1] - ranges.first_block
    found = (_spread(ranges, (ranges.states == state)[..., columns]) for state in (PARTIAL, FULL))
    return States(*found)


def _spread(ranges: _Ranges, blocks: np.ndarray) -> Tensor | None:
    """Repeat rows of blocks for each query, if there are several rows; return None if no block is true."""
    if not blocks.any():
        return None
    if blocks.shape[-2] > 1:
        blocks = blocks.repeat(ranges.block[0], -2)[..., : ranges.rows, :]
    return torch.from_numpy(blocks).to(ranges.device)
