"""bits_by_pairs: the bits of a mask in torch operations, on any device. On a GPU, a generated kernel writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_WORDS, COUNTED, HALF, ROW_WORDS, MaskBits, PairBits
from flexattn.block_mask.dense import dense_blocks
from flexattn.graph.bound_mod import BoundMod
from flexattn.mask_build.pair_bits import computed_quarters, is_sparse

_BLOCKS = 64  # evaluated at a time: 2**20 pairs
_GROUPS = BITS_BLOCK // ROW_WORDS


def evaluated_bits(mask: BlockMask, bound: BoundMod) -> MaskBits:
    """Return the bits of a mask in blocks of 128 x 128. `bound` is its mask_mod, on its device."""
    partial, full = dense_blocks(mask)
    places = partial.nonzero()  # [blocks, 4]: b, h, row and column of each partial block
    parts = [_bits(_pairs(bound, some, mask.seq_lengths)) for some in places.split(_BLOCKS)]
    words, words_by_key, needs = map(torch.cat, zip(*parts, strict=True))
    b, h, row, column = places.T
    by_key = (((b * mask.H + h) * partial.size(3) + column) * partial.size(2) + row).argsort()
    quarters, blocks, whole = int(needs.sum()), len(places), int(full.sum())
    skips = is_sparse(quarters, blocks, whole)
    return MaskBits(
        _of_direction(words, needs, partial, True),
        _of_direction(words_by_key[by_key], needs.mT[by_key], partial.mT, False),
        mask.seq_lengths, skips, computed_quarters(quarters, blocks, whole, skips),
    )  # fmt: skip


def _pairs(bound: BoundMod, places: Tensor, lengths: tuple[int, int]) -> Tensor:
    """Return which pairs of some blocks attend, bool [blocks, BITS_BLOCK, BITS_BLOCK]."""
    b, h, row, column = places.int().T[..., None, None]  # [blocks, 1, 1] each
    offsets = torch.arange(BITS_BLOCK, dtype=torch.int32, device=places.device)
    q_idx, kv_idx = row * BITS_BLOCK + offsets[:, None], column * BITS_BLOCK + offsets
    inside = (q_idx < lengths[0]) & (kv_idx < lengths[1])
    q_idx, kv_idx = q_idx.clamp(max=lengths[0] - 1), kv_idx.clamp(max=lengths[1] - 1)
    with torch.no_grad():
        return (bound(b, h, q_idx, kv_idx) & inside).expand(len(places), BITS_BLOCK, BITS_BLOCK)


def _bits(pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the words of blocks by query and by key, int16 [blocks, BLOCK_WORDS], and which quarters have a pair."""
    halves = pairs.unflatten(2, (2, HALF)).any(3)
    return _words(pairs), _words(pairs.mT), halves.unflatten(1, (2, HALF)).any(2)  # [blocks, half of rows, of columns]


def _words(pairs: Tensor) -> Tensor:
    values = 2.0 ** torch.arange(_GROUPS, device=pairs.device)  # sums are below 2**16, so they are exact
    groups = pairs.unflatten(-1, (_GROUPS, ROW_WORDS)).mT.to(torch.float32)
    return (groups @ values).to(torch.int32).to(torch.int16).flatten(1)


def _of_direction(words: Tensor, needs: Tensor, partial: Tensor, by_query: bool) -> PairBits:
    """Return the bits of the blocks in `partial`, whose rows are queries (by_query) or keys."""
    device, columns = words.device, partial.nonzero()[:, 3:]
    unused = torch.zeros(BLOCK_WORDS, dtype=torch.int16, device=device)
    counts = partial.sum(-1).flatten()  # of rows of blocks
    first = counts.cumsum(0) - counts
    starts = 2 * columns + torch.arange(2, device=device)
    halves = (4 * starts + needs[:, 0] + 2 * needs[:, 1]).flatten()
    rows = torch.arange(len(counts), device=device).repeat_interleave(counts)
    needed = torch.zeros_like(counts).index_add_(0, rows, needs.any(1).sum(1))
    if by_query:
        own = torch.arange(partial.size(2), device=device)[:, None]
        before = (partial & (torch.arange(partial.size(3), device=device) < own)).sum(-1).flatten()
        start = (2 * torch.minimum(before, counts - 1) + 1).clamp(min=0)
        needed = needed + start * (COUNTED + 1)
    return PairBits(
        first.int(), torch.cat((words.flatten(), unused)), torch.cat((halves, halves.new_zeros(1))).int(), needed.int()
    )
