"""Boxes of blocks, coarse to fine: bounds decide most of a mask, so the cost follows its boundary, not Q x KV.

A coarse box that is proved empty or full is done. Any other box is split into smaller ones, down to single blocks.
In a block, sampled positions that disagree prove PARTIAL. Blocks that are still UNKNOWN are evaluated exactly by
the caller's `evaluate`.

Memory is bounded, however large and unstructured a mask is. Boxes are refined, sampled and evaluated depth first, some
thousands at a time, and results are merged to runs along the way. A mask of more than MOST_RUNS runs is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from flexattn.errors import ArgumentError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.boxes import Bounds
from flexattn.graph.interval_bounds import FULL, PARTIAL, UNKNOWN, bound
from flexattn.graph.quotients import split_for_bounds
from flexattn.process.frozen_class import frozen
from flexattn.process.progress import Progress

_FANOUT = 4  # a box is split into 4 x 4
_COARSEST = 64  # maximum number of initial boxes per (b, h)
_CHUNK = 2**15  # boxes bounded at once
_SAMPLED = 2**13  # blocks sampled at once
_TOGETHER = 2**18  # boxes merged, blocks evaluated, or lines of boxes converted to runs at once
_PAIRS = 2**26  # pairs evaluated between two progress checks
MOST_RUNS = 2**23  # of one kind, by query or by key; 8 bytes each
# A block of at most _FEW_PAIRS pairs is evaluated as soon as a box of at most _BOX_PAIRS pairs is undecided, because
# computing its bound costs more.
_FEW_PAIRS, _BOX_PAIRS = 64, 4096

Evaluate = Callable[[np.ndarray], np.ndarray]  # blocks (int32 [n, 3]) as in `unknown` -> their classes (uint8 [n])

# Sampled positions in a block, as fractions of its sides: the corners, the middles, then evenly scattered ones (a
# Kronecker sequence). A block that stays undecided is sampled at more positions.
_SCATTERED = np.arange(1, 97)[:, None] * (0.7548776662, 0.5698402910) % 1
_SAMPLES = (
    np.array([(0, 0), (0, 1), (1, 0), (1, 1)]),
    np.array([(0.5, 0.5), (0, 0.5), (0.5, 0), (1, 0.5), (0.5, 1)]),
    _SCATTERED[:16],
    _SCATTERED[16:],
)


@frozen
class BlockClasses:
    """The full, partial and unknown blocks of a mask, as disjoint boxes of blocks. All other blocks are empty."""

    shape: tuple[int, int, int, int]  # B, H, query blocks, key blocks
    block_size: tuple[int, int]
    full: np.ndarray  # int32 [n, 5]: b * H + h, then first and one past the last query block, the same for key blocks
    partial: np.ndarray  # int32 [n, 5], as in `full`
    unknown: np.ndarray  # int32 [n, 3]: b * H + h, query block, key block
    boxes: int = 0  # number of bounded boxes
    samples: int = 0  # number of sampled positions
    evaluated: int = 0  # number of evaluated blocks

    def joined(self) -> BlockClasses:
        """Return the same classes with full blocks converted to partial ones."""
        return replace(self, full=self.full[:0], partial=np.concatenate([self.full, self.partial]))

    def dense(self) -> np.ndarray:
        """Return the class of each block, uint8 [B, H, query blocks, key blocks]."""
        B, H, q_blocks, kv_blocks = self.shape
        # Corners of the boxes with alternating signs. Cumulative sums along both axes fill the boxes.
        corners = np.zeros((B * H, q_blocks + 1, kv_blocks + 1), np.int8)
        for kind, boxes in ((FULL, self.full), (PARTIAL, self.partial), (UNKNOWN, _as_boxes(self.unknown))):
            row, q_first, q_end, kv_first, kv_end = boxes.T
            for q, kv, value in ((q_first, kv_first, kind), (q_end, kv_end, kind)):
                np.add.at(corners, (row, q, kv), np.int8(value))
            for q, kv in ((q_first, kv_end), (q_end, kv_first)):
                np.subtract.at(corners, (row, q, kv), np.int8(kind))
        np.cumsum(corners, axis=1, dtype=np.int8, out=corners)
        np.cumsum(corners, axis=2, dtype=np.int8, out=corners)
        return corners[:, :-1, :-1].astype(np.uint8).reshape(self.shape)

    def runs(self, kind: int, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (row_ptr int32 [rows + 1], runs int32 [n, 2]) of the FULL or PARTIAL blocks, with merged runs.

        Rows are (b, h, query block) with runs of key blocks. If `transposed`, rows are (b, h, key block).
        """
        B, H, q_blocks, kv_blocks = self.shape
        row, *ends = (self.full if kind == FULL else self.partial).T
        rows, (first, end, lo, hi) = (kv_blocks, (*ends[2:], *ends[:2])) if transposed else (q_blocks, ends)
        first, end = (row.astype(np.int64) * rows + x for x in (first, end))  # lines: rows of all (b, h)
        steps = np.bincount(first, minlength=B * H * rows + 1) - np.bincount(end, minlength=B * H * rows + 1)
        sizes = np.cumsum(steps[:-1])
        counts, runs, total = [np.zeros(1, np.int64)], [np.zeros((0, 2), np.int32)], 0
        for lines in _groups(sizes, _TOGETHER):
            of_lines, found = _runs_of_lines(first, end, lo, hi, *lines)
            counts.append(of_lines)
            runs.append(found)
            total += len(found)
            if total > MOST_RUNS:
                raise too_many_runs(self.shape, self.block_size)
        return np.cumsum(np.concatenate(counts)).astype(np.int32), np.concatenate(runs)


def classify_by_boxes(
    mask: BoundMod, B: int, H: int, Q: int, KV: int, BLOCK_SIZE: tuple[int, int], evaluate: Evaluate | None = None
) -> BlockClasses:
    """Classify the blocks of a mask. A block that extends past the lengths is never FULL.

    B and H are those of the mask (1 if it broadcasts). The captured tensors are read on the CPU. Blocks that bounds and
    samples do not decide are passed to `evaluate`, or stay unknown if it is None.
    """
    search = _Search(mask, B, H, Q, KV, BLOCK_SIZE, evaluate)
    search.run()
    return search.result(B, H)


def classify_all(B: int, H: int, Q: int, KV: int, BLOCK_SIZE: tuple[int, int], evaluate: Evaluate) -> BlockClasses:
    """Classify the blocks of a mask by evaluating all of them."""
    blocks = (-(-Q // BLOCK_SIZE[0]), -(-KV // BLOCK_SIZE[1]))
    total = B * H * math.prod(blocks)
    found, progress = _Found((B, H, *blocks), BLOCK_SIZE), Progress(total)
    step = _at_once(BLOCK_SIZE)
    for start in range(0, total, step):
        every = np.unravel_index(np.arange(start, min(start + step, total)), (B * H, *blocks))
        some = np.stack(every, axis=1).astype(np.int32)
        found.add_classes(some, evaluate(some))
        progress.advance(len(some), evaluated=len(some))
    none = np.zeros((0, 3), np.int32)
    return BlockClasses((B, H, *blocks), BLOCK_SIZE, found.boxes(FULL), found.boxes(PARTIAL), none, evaluated=total)


def _at_once(block_size: tuple[int, int]) -> int:
    """Return the number of blocks to evaluate at once."""
    return max(1, min(_TOGETHER, _PAIRS // math.prod(block_size)))


class _Found:
    """Boxes of each kind, merged to runs before their number gets large."""

    def __init__(self, shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> None:
        self.shape, self.block_size = shape, block_size
        self.kept: dict[int, list[np.ndarray]] = {FULL: [], PARTIAL: []}
        self.recent: dict[int, list[np.ndarray]] = {FULL: [], PARTIAL: []}

    def add(self, kind: int, boxes: np.ndarray) -> None:
        """Add boxes, int32 [n, 5]."""
        self.recent[kind].append(boxes)
        if sum(map(len, self.recent[kind])) > _TOGETHER:
            self.kept[kind].append(_joined(np.concatenate(self.recent[kind])))
            self.recent[kind] = []
            if sum(map(len, self.kept[kind])) > MOST_RUNS + MOST_RUNS // 4:
                self.kept[kind] = [_joined(np.concatenate(self.kept[kind]))]
                if len(self.kept[kind][0]) > MOST_RUNS:
                    raise too_many_runs(self.shape, self.block_size)

    def add_classes(self, blocks: np.ndarray, classes: np.ndarray) -> None:
        """Add blocks (int [n, 3]) that are FULL or PARTIAL."""
        for kind in (FULL, PARTIAL):
            self.add(kind, _as_boxes(blocks[classes == kind]))

    def boxes(self, kind: int) -> np.ndarray:
        return np.concatenate([np.zeros((0, 5), np.int32), *self.kept[kind], *self.recent[kind]])


def too_many_runs(shape: tuple[int, int, int, int], block_size: tuple[int, int]) -> ArgumentError:
    """Return the error for a mask with too many runs of blocks. It names a block size that is certain to have fewer."""
    B, H, *blocks = shape
    scale = 2  # blocks that are not adjacent are separate runs: a row has at most half as many runs as blocks
    while B * H * math.prod(-(-n // scale) for n in blocks) > 2 * MOST_RUNS:
        scale *= 2
    found = f"{block_size}, with which this mask is more than {MOST_RUNS:,} runs of blocks"
    use = tuple(size * scale for size in block_size)
    return ArgumentError(message("BLOCK_SIZE", found, "blocks that are fewer, or form longer runs", f"Use {use}."))


def _joined(boxes: np.ndarray) -> np.ndarray:
    """Return boxes after merging adjacent boxes of one block's height in a row."""
    low = boxes[:, 2] == boxes[:, 1] + 1
    flat, tall = boxes[low], boxes[~low]
    flat = flat[np.lexsort((flat[:, 3], flat[:, 1], flat[:, 0]))]
    begins = np.ones(len(flat), bool)
    begins[1:] = (flat[1:, :2] != flat[:-1, :2]).any(axis=1) | (flat[1:, 3] != flat[:-1, 4])
    ends = np.append(begins[1:], True)[: len(flat)]
    return np.concatenate([tall, np.concatenate([flat[begins, :4], flat[ends, 4:]], axis=1)])


def _groups(sizes: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of groups of consecutive sizes with a sum of at most `most`, or of a single size."""
    sums = np.cumsum(sizes)
    first = before = 0
    while first < len(sizes):
        end = max(first + 1, int(np.searchsorted(sums, before + most, side="right")))
        yield first, end
        first, before = end, int(sums[end - 1])


def _runs_of_lines(
    first: np.ndarray, end: np.ndarray, lo: np.ndarray, hi: np.ndarray, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of runs of each line in [start, stop), and the runs, int32 [n, 2].

    Each box covers the lines [first, end) and the blocks [lo, hi).
    """
    there = np.flatnonzero((first < stop) & (end > start))
    first, end = np.maximum(first[there], start), np.minimum(end[there], stop)
    heights = end - first
    box = np.repeat(np.arange(len(there)), heights)
    line = first[box] + np.arange(len(box)) - np.repeat(np.cumsum(heights) - heights, heights)
    lo, hi = lo[there][box], hi[there][box]
    order = np.argsort((line << 32) | lo, kind="stable")
    line, lo, hi = line[order], lo[order], hi[order]
    begins = np.ones(len(line), bool)
    begins[1:] = (line[1:] != line[:-1]) | (lo[1:] != hi[:-1])
    ends = np.append(begins[1:], True)[: len(line)]
    counts = np.bincount(line[begins] - start, minlength=stop - start)
    return counts, np.stack([lo[begins], hi[ends]], axis=1).astype(np.int32)


class _Search:
    """The state of one refinement."""

    def __init__(
        self, mask: BoundMod, B: int, H: int, Q: int, KV: int, block_size: tuple[int, int], evaluate: Evaluate | None
    ) -> None:
        # A mask that does not read b (h) is bounded for one value and repeated.
        self.B, self.H = (B if mask.graph.reads("b") else min(B, 1)), (H if mask.graph.reads("h") else min(H, 1))
        self.lengths, self.block_size = (Q, KV), block_size
        self.blocks = (-(-Q // block_size[0]), -(-KV // block_size[1]))
        granule = min(128, *((size & -size) for size in block_size))
        self.bounds = Bounds(bound(split_for_bounds(mask)), mask.captures, mask.numbers, max(granule, 16))
        self.evaluate, self.heads = evaluate, H
        self.found = _Found((B, H, *self.blocks), block_size)
        self.unknown: list[np.ndarray] = []  # int32 [n, 3], not evaluated yet
        self.boxes = self.samples = self.evaluated = 0
        self.progress = Progress(self.B * self.H * math.prod(self.blocks))
        self.leaf = 1  # side of the smallest boxes to bound, in blocks
        pairs = math.prod(block_size)
        while evaluate is not None and pairs <= _FEW_PAIRS and pairs * (_FANOUT * self.leaf) ** 2 <= _BOX_PAIRS:
            self.leaf *= _FANOUT

    def run(self) -> None:
        size = 1
        while size < self.leaf or -(-self.blocks[0] // size) * -(-self.blocks[1] // size) > _COARSEST:
            size *= _FANOUT
        counts = [-(-n // size) for n in self.blocks]
        grid = np.indices((self.B * self.H, *counts), dtype=np.int64).reshape(3, -1)
        self.refine(grid, size)
        self.flush()

    def refine(self, boxes: np.ndarray, size: int) -> None:
        """Bound the boxes [3, n] (row, query box, key box) of `size` x `size` blocks, and split undecided boxes."""
        left: list[np.ndarray] = []
        for chunk in _chunks(boxes):
            classes = self.bounds.classify(*self.ends(chunk, size))
            self.boxes += len(classes)
            self.found.add(FULL, self.in_blocks(chunk[:, classes == FULL], size))
            left.append(chunk[:, classes == UNKNOWN])
            self.progress.advance(size**2 * int(np.count_nonzero(classes != UNKNOWN)))
        undecided = np.concatenate(left, axis=1) if left else boxes
        if size == self.leaf == 1:
            for chunk in _chunks(undecided, _SAMPLED):
                self.sample(chunk)
        elif size == self.leaf:
            for chunk in _chunks(undecided, max(1, _TOGETHER // size**2)):
                self.leave(self.cut(chunk, size, 1))
        elif undecided.shape[1]:
            for chunk in _chunks(undecided, _CHUNK // 4):
                self.refine(self.cut(chunk, _FANOUT, size // _FANOUT), size // _FANOUT)

    def cut(self, boxes: np.ndarray, count: int, size: int) -> np.ndarray:
        """Split boxes into count x count boxes of `size` x `size` blocks."""
        parts = np.arange(count)
        row, q, kv = boxes[:, :, None, None]
        q, kv = q * count + parts[:, None], kv * count + parts
        inside = (q * size < self.blocks[0]) & (kv * size < self.blocks[1])
        return np.stack([np.broadcast_to(x, inside.shape)[inside] for x in (row, q, kv)])

    def in_blocks(self, boxes: np.ndarray, size: int) -> np.ndarray:
        """Return the boxes as int32 [n, 5] in blocks, clipped at the last block."""
        row, q, kv = boxes
        q_end, kv_end = (np.minimum((x + 1) * size, n) for x, n in zip((q, kv), self.blocks, strict=True))
        return np.stack([row, q * size, q_end, kv * size, kv_end], axis=1).astype(np.int32)

    def ends(self, boxes: np.ndarray, size: int) -> list[np.ndarray]:
        """Return the ends of the boxes in (b, h, q_idx, kv_idx), clipped at the lengths."""
        row, *places = boxes
        b, h = row // self.H, row % self.H
        ends = [b, b, h, h]
        for x, block, length in zip(places, self.block_size, self.lengths, strict=True):
            ends += [x * (size * block), np.minimum((x + 1) * (size * block), length) - 1]
        return ends

    def sample(self, blocks: np.ndarray) -> None:
        """Evaluate a few positions of each block. A true and a false one prove PARTIAL."""
        row, q, kv = blocks
        full_size = (self.lengths[0] // self.block_size[0], self.lengths[1] // self.block_size[1])
        some_true = np.zeros(len(row), bool)
        some_false = (q >= full_size[0]) | (kv >= full_size[1])  # positions past the lengths count as masked out
        open_blocks = np.arange(len(row))
        for places in _SAMPLES:
            b, _, h, _, q_lo, q_hi, kv_lo, kv_hi = (x[:, None] for x in self.ends(blocks[:, open_blocks], 1))
            at_q = q_lo + ((q_hi - q_lo) * places[:, 0]).astype(np.int64)
            at_kv = kv_lo + ((kv_hi - kv_lo) * places[:, 1]).astype(np.int64)
            sure, maybe = self.bounds(b, b, h, h, at_q, at_q, at_kv, at_kv)
            shape = at_q.shape
            self.samples += at_q.size
            some_true[open_blocks] |= np.broadcast_to(sure, shape).any(axis=1)
            some_false[open_blocks] |= ~np.broadcast_to(maybe, shape).all(axis=1)
            open_blocks = np.flatnonzero(~(some_true & some_false))
            if not len(open_blocks):
                break
        proved = some_true & some_false
        self.found.add(PARTIAL, self.in_blocks(blocks[:, proved], 1))
        self.progress.advance(int(np.count_nonzero(proved)))
        self.leave(blocks[:, ~proved])

    def leave(self, blocks: np.ndarray) -> None:
        """Collect undecided blocks, and evaluate them when there are many."""
        self.unknown.append(blocks.T.astype(np.int32))
        if sum(map(len, self.unknown)) > _at_once(self.block_size):
            self.flush()

    def flush(self) -> None:
        """Evaluate the undecided blocks."""
        if self.evaluate is None or not self.unknown:
            return
        blocks = np.concatenate(self.unknown)
        self.unknown = []
        step = _at_once(self.block_size)
        for start in range(0, len(blocks), step):
            some = blocks[start : start + step]
            named = some.copy()
            named[:, 0] = some[:, 0] // self.H * self.heads + some[:, 0] % self.H  # numbered as if the mask read h
            self.found.add_classes(some, self.evaluate(named))
            self.evaluated += len(some)
            self.progress.advance(len(some), evaluated=len(some))

    def result(self, B: int, H: int) -> BlockClasses:
        full, overhanging = self.without_overhang(self.found.boxes(FULL))
        partial = np.concatenate([self.found.boxes(PARTIAL), *overhanging])
        unknown = _as_boxes(np.concatenate([np.zeros((0, 3), np.int32), *self.unknown]))
        full, partial, unknown = (self.repeated(boxes, B, H) for boxes in (full, partial, unknown))
        return BlockClasses(
            (B, H, *self.blocks), self.block_size, full, partial, unknown[:, [0, 1, 3]], self.boxes, self.samples,
            self.evaluated,
        )  # fmt: skip

    def without_overhang(self, full: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Remove a last block that extends past the length from the full boxes, because it is partial."""
        overhanging = []
        for axis, n in enumerate(self.blocks):
            if self.lengths[axis] % self.block_size[axis]:
                first, end = 1 + 2 * axis, 2 + 2 * axis
                last = full[full[:, end] == n]
                last[:, first] = n - 1
                overhanging.append(last)
                full[:, end] = np.minimum(full[:, end], n - 1)
                full = full[full[:, first] < full[:, end]]
        return full, overhanging

    def repeated(self, boxes: np.ndarray, B: int, H: int) -> np.ndarray:
        """Repeat boxes over batches or heads that the mask does not read."""
        if (self.B, self.H) == (B, H):
            return boxes
        b, h = boxes[:, 0] // max(self.H, 1), boxes[:, 0] % max(self.H, 1)
        bs = np.arange(B) if self.B != B else np.zeros(1, int)
        hs = np.arange(H) if self.H != H else np.zeros(1, int)
        rows = (b + bs[:, None, None]) * H + h + hs[:, None]
        repeated = np.broadcast_to(boxes, (*rows.shape, 5)).reshape(-1, 5).copy()
        repeated[:, 0] = rows.ravel()
        return repeated


def _as_boxes(blocks: np.ndarray) -> np.ndarray:
    row, q, kv = blocks.T
    return np.stack([row, q, q + 1, kv, kv + 1], axis=1).astype(np.int32)


def _chunks(boxes: np.ndarray, size: int = _CHUNK) -> Iterator[np.ndarray]:
    return (boxes[:, start : start + size] for start in range(0, boxes.shape[1], size))
