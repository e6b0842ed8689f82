"""Boxes of blocks, coarse to fine: bounds decide most of a mask, so the cost follows its boundary, not Q x KV.

A coarse box that is surely empty or surely full is done; any other is cut into smaller ones, down to single blocks.
There sampled places that disagree prove PARTIAL. What is still UNKNOWN is for the caller to evaluate exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flexattn.bound import FULL, PARTIAL, UNKNOWN, Bounds, bound
from flexattn.graph import BoundMod

_FANOUT = 4  # a box is cut into 4 x 4
_COARSEST = 64  # boxes in each (b, h) to begin with, at most
_CHUNK = 2**15  # boxes bounded at once

# Places in a block that are looked at, as fractions of its sides: the corners, the middles, then scattered evenly (a
# Kronecker sequence), the more the longer a block stays undecided.
_SCATTERED = np.arange(1, 97)[:, None] * (0.7548776662, 0.5698402910) % 1
_SAMPLES = (
    np.array([(0, 0), (0, 1), (1, 0), (1, 1)]),
    np.array([(0.5, 0.5), (0, 0.5), (0.5, 0), (1, 0.5), (0.5, 1)]),
    _SCATTERED[:16],
    _SCATTERED[16:],
)


@dataclass(frozen=True)
class BlockClasses:
    """Which blocks of a mask are full, partial or not known, as disjoint boxes of blocks; all others are empty."""

    shape: tuple[int, int, int, int]  # B, H, query blocks, key blocks
    full: np.ndarray  # int32 [n, 5]: b * H + h, then first and one past the last query block, first and past key block
    partial: np.ndarray  # int32 [n, 5], likewise
    unknown: np.ndarray  # int32 [n, 3]: b * H + h, query block, key block
    boxes: int = 0  # that were bounded
    samples: int = 0  # places that were looked at

    def joined(self) -> BlockClasses:
        """Return the same with the full blocks as partial ones."""
        return replace(self, full=self.full[:0], partial=np.concatenate([self.full, self.partial]))

    def resolve(self, classes: np.ndarray) -> BlockClasses:
        """Return the same with classes (EMPTY, FULL or PARTIAL, uint8 [n]) for the unknown blocks."""
        full, partial = (_as_boxes(self.unknown[classes == kind]) for kind in (FULL, PARTIAL))
        return replace(
            self,
            full=np.concatenate([self.full, full]),
            partial=np.concatenate([self.partial, partial]),
            unknown=self.unknown[classes == UNKNOWN],
        )

    def dense(self) -> np.ndarray:
        """Return the class of each block, uint8 [B, H, query blocks, key blocks]."""
        B, H, q_blocks, kv_blocks = self.shape
        # Corners of the boxes with alternating signs; running sums along both axes fill the boxes.
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
        """Return (row_ptr int32 [rows + 1], runs int32 [n, 2]) of the FULL or PARTIAL blocks, touching ones joined.

        Rows are (b, h, query block) and runs are of key blocks; transposed, the other way round.
        """
        B, H, q_blocks, kv_blocks = self.shape
        row, q_first, q_end, kv_first, kv_end = (self.full if kind == FULL else self.partial).T.astype(np.int64)
        if transposed:
            q_blocks, q_first, q_end, kv_first, kv_end = kv_blocks, kv_first, kv_end, q_first, q_end
        heights = q_end - q_first
        box = np.repeat(np.arange(len(row)), heights)
        within = np.arange(len(box)) - np.repeat(np.cumsum(heights) - heights, heights)
        line = row[box] * q_blocks + q_first[box] + within
        order = np.argsort((line << 32) | kv_first[box], kind="stable")
        line, first, end = line[order], kv_first[box][order], kv_end[box][order]
        begins = np.ones(len(line), bool)
        begins[1:] = (line[1:] != line[:-1]) | (first[1:] != end[:-1])
        ends = np.append(begins[1:], True)[: len(line)]
        counts = np.bincount(line[begins], minlength=B * H * q_blocks)
        row_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return row_ptr, np.stack([first[begins], end[ends]], axis=1).astype(np.int32)


def classify_by_boxes(mask: BoundMod, B: int, H: int, Q: int, KV: int, BLOCK_SIZE: tuple[int, int]) -> BlockClasses:
    """Classify the blocks of a mask as far as bounds and samples prove it. A block is FULL only inside of the lengths.

    B and H are those of the mask (1 where it broadcasts). The captured tensors are read on the CPU.
    """
    search = _Search(mask, B, H, Q, KV, BLOCK_SIZE)
    search.run()
    return search.result(B, H)


def undecided(B: int, H: int, Q: int, KV: int, BLOCK_SIZE: tuple[int, int]) -> BlockClasses:
    """Return all blocks of a mask as unknown."""
    blocks = (-(-Q // BLOCK_SIZE[0]), -(-KV // BLOCK_SIZE[1]))
    every = np.indices((B * H, *blocks), dtype=np.int32).reshape(3, -1).T
    none = np.zeros((0, 5), np.int32)
    return BlockClasses((B, H, *blocks), none, none, every)


class _Search:
    """The state of one refinement."""

    def __init__(self, mask: BoundMod, B: int, H: int, Q: int, KV: int, block_size: tuple[int, int]) -> None:
        # A mask that does not read b (h) is bounded for one and repeated.
        self.B, self.H = (B if mask.graph.reads("b") else min(B, 1)), (H if mask.graph.reads("h") else min(H, 1))
        self.lengths, self.block_size = (Q, KV), block_size
        self.blocks = (-(-Q // block_size[0]), -(-KV // block_size[1]))
        granule = min(128, *((size & -size) for size in block_size))
        self.bounds = Bounds(bound(mask.graph), mask.captures, mask.numbers, max(granule, 16))
        self.found: dict[int, list[np.ndarray]] = {FULL: [], PARTIAL: [], UNKNOWN: []}
        self.boxes = self.samples = 0

    def run(self) -> None:
        size = 1
        while -(-self.blocks[0] // size) * -(-self.blocks[1] // size) > _COARSEST:
            size *= _FANOUT
        counts = [-(-n // size) for n in self.blocks]
        grid = np.indices((self.B * self.H, *counts), dtype=np.int64).reshape(3, -1)
        self.refine(grid, size)

    def refine(self, boxes: np.ndarray, size: int) -> None:
        """Bound the boxes [3, n] (row, query box, key box) of `size` x `size` blocks, and cut what is not decided."""
        left: list[np.ndarray] = []
        for chunk in _chunks(boxes):
            classes = self.bounds.classify(*self.ends(chunk, size))
            self.boxes += len(classes)
            self.found[FULL].append(self.in_blocks(chunk[:, classes == FULL], size))
            left.append(chunk[:, classes == UNKNOWN])
        undecided = np.concatenate(left, axis=1) if left else boxes
        if size == 1:
            for chunk in _chunks(undecided):
                self.sample(chunk)
        elif undecided.shape[1]:
            step = _CHUNK // 4
            for start in range(0, undecided.shape[1], step):
                self.refine(self.cut(undecided[:, start : start + step], size // _FANOUT), size // _FANOUT)

    def cut(self, boxes: np.ndarray, size: int) -> np.ndarray:
        parts = np.arange(_FANOUT)
        row, q, kv = boxes[:, :, None, None]
        q, kv = q * _FANOUT + parts[:, None], kv * _FANOUT + parts
        inside = (q * size < self.blocks[0]) & (kv * size < self.blocks[1])
        return np.stack([np.broadcast_to(x, inside.shape)[inside] for x in (row, q, kv)])

    def in_blocks(self, boxes: np.ndarray, size: int) -> np.ndarray:
        """Return the boxes as int32 [n, 5] in blocks, cut off at the last block."""
        row, q, kv = boxes
        q_end, kv_end = (np.minimum((x + 1) * size, n) for x, n in zip((q, kv), self.blocks, strict=True))
        return np.stack([row, q * size, q_end, kv * size, kv_end], axis=1).astype(np.int32)

    def ends(self, boxes: np.ndarray, size: int) -> list[np.ndarray]:
        """Return the ends of the boxes in (b, h, q_idx, kv_idx), cut off at the lengths."""
        row, *places = boxes
        b, h = row // self.H, row % self.H
        ends = [b, b, h, h]
        for x, block, length in zip(places, self.block_size, self.lengths, strict=True):
            ends += [x * (size * block), np.minimum((x + 1) * (size * block), length) - 1]
        return ends

    def sample(self, blocks: np.ndarray) -> None:
        """Look at a few places of each block: a true and a false one prove PARTIAL."""
        row, q, kv = blocks
        full_size = (self.lengths[0] // self.block_size[0], self.lengths[1] // self.block_size[1])
        some_true = np.zeros(len(row), bool)
        some_false = (q >= full_size[0]) | (kv >= full_size[1])  # what reaches past the lengths counts as masked there
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
        self.found[PARTIAL].append(self.in_blocks(blocks[:, proved], 1))
        self.found[UNKNOWN].append(self.in_blocks(blocks[:, ~proved], 1))

    def result(self, B: int, H: int) -> BlockClasses:
        full, partial, unknown = (
            np.concatenate([np.zeros((0, 5), np.int32), *self.found[kind]]) for kind in (FULL, PARTIAL, UNKNOWN)
        )
        full, overhanging = self.without_overhang(full)
        partial = np.concatenate([partial, *overhanging])
        full, partial, unknown = (self.repeated(boxes, B, H) for boxes in (full, partial, unknown))
        return BlockClasses((B, H, *self.blocks), full, partial, unknown[:, [0, 1, 3]], self.boxes, self.samples)

    def without_overhang(self, full: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Cut the last block, where it reaches past the length, off the full boxes: it is partial."""
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
        """Repeat boxes over the batch or the heads that the mask does not read."""
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


def _chunks(boxes: np.ndarray) -> Iterator[np.ndarray]:
    return (boxes[:, start : start + _CHUNK] for start in range(0, boxes.shape[1], _CHUNK))
