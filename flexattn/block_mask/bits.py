"""bits: which pairs of a mask's partial blocks attend, one bit each.

Evaluating some mask_mods takes longer than attention: 13 x 13 neighborhoods take 19 instructions per pair and kernel.
Their pairs are evaluated once, when the mask is built (`mask_build/on_gpu.py`). Kernels then test a bit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

BITS_BLOCK = 128  # rows and columns of the blocks that have bits
ROW_WORDS = 8  # of a row of a block. Word w has the columns w, w + 8, w + 16, ..., from the lowest bit on.
BLOCK_WORDS = BITS_BLOCK * ROW_WORDS
BLOCK_BYTES = 2 * BLOCK_WORDS
HALF = BITS_BLOCK // 2  # rows of a warpgroup, and rows or columns that kernels can skip
BITS_TENSORS = 8  # of a mask
COUNTED = 2**16 - 1  # the part of PairBits.count that is a number of halves. A mask has at most 2**15 (MOST_BYTES).


class PairBits(NamedTuple):
    """The bits of the partial blocks of one direction: rows are queries (as in kv_runs) or keys (as in q_runs)."""

    first: Tensor  # int32 [B * H * row blocks]: the number of a row's first partial block; the others follow it
    # int16 [(blocks + 1) * BLOCK_WORDS], rows of blocks in order. The last block is loaded, but never used.
    words: Tensor
    # int32 [2 * blocks + 1], two for each block in the order of words, for its columns below and from HALF on: 4 times
    # the first column in units of HALF, plus 1 if rows below HALF attend to any of the columns, plus 2 if other rows
    # do. One more is loaded, but never used.
    halves: Tensor
    # int32 [B * H * row blocks]: halves of a row of blocks that any row attends to. By query, plus (COUNTED + 1) times
    # the place in `halves` of the one that kernels take first: the last of the block on the diagonal, if it is partial.
    count: Tensor

    def take(self, heads: Tensor, count: int) -> PairBits:
        """Return the bits for some (b, h) pairs of `count`, int64 [n]. They share the words."""
        firsts, counts = (t.view(count, -1)[heads].flatten() for t in (self.first, self.count))
        return PairBits(firsts, self.words, self.halves, counts)


class MaskBits(NamedTuple):
    """The bits of a mask, for kernels that own queries and for kernels that own keys."""

    by_query: PairBits
    by_key: PairBits
    lengths: tuple[int, int]  # of queries and keys. Pairs past them have no bit.
    skips_halves: bool  # whether kernels skip halves of blocks, because enough of them are empty
    computed: int | None = None  # the quarters of blocks that kernels compute, of all batches and heads; None: unknown

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.by_query, *self.by_key)

    @staticmethod
    def from_tensors(tensors: tuple[Tensor, ...], lengths: tuple[int, int], skips_halves: bool) -> MaskBits:
        """Inverse of `tensors`."""
        of_query, of_key = tensors[: BITS_TENSORS // 2], tensors[BITS_TENSORS // 2 :]
        return MaskBits(PairBits(*of_query), PairBits(*of_key), lengths, skips_halves)

    @property
    def blocks(self) -> int:
        """The number of blocks that have bits."""
        return len(self.by_query.words) // BLOCK_WORDS - 1

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def take(self, heads: Tensor, count: int) -> MaskBits:
        """Return the bits for some (b, h) pairs of `count`, int64 [n]."""
        by_query, by_key = (bits.take(heads, count) for bits in (self.by_query, self.by_key))
        return MaskBits(by_query, by_key, self.lengths, self.skips_halves)

    def repeated(self, heads: Tensor, count: int) -> MaskBits:
        """Return the bits for (b, h) pairs that repeat all `count` ones equally often."""
        computed = None if self.computed is None else self.computed * len(heads) // count
        return self.take(heads, count)._replace(computed=computed)
