"""bits_by_pairs: the bits of a mask in torch operations, on any device. On a GPU, a generated kernel writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_WORDS, HALF, ROW_WORDS, MaskBits, PairBits
from flexattn.block_mask.dense import dense_blocks
from flexattn.graph.bound_mod import BoundMod
from flexattn.mask_build.pair_bits import computed_quarters, is_sparse

_BLOCKS = 64  # evaluated at a time: 2**20 pairs
_GROUPS = BITS_BLOCK // ROW_WORDS


def evaluated_bits(mask: BlockMask, bound: BoundMod) -> MaskBits:
    """Return the bits of a mask in blocks of 128 x 128. `bound` is its mask_mod, on its device."""
    partial, full = dense_blocks(mask)
    places = partial.nonzero()  # [blocks, 4]: b, h, row and column of each partial block
    pairs = torch.cat([_pairs(bound, some, mask.seq_lengths) for some in places.split(_BLOCKS)])
    by_key = partial.mT.nonzero()
    number = torch.zeros_like(partial, dtype=torch.int64)
    number[partial] = torch.arange(len(places), device=places.device)
    of_keys = pairs[number.mT[partial.mT]].mT
    quarters = int(pairs.unflatten(2, (2, HALF)).unflatten(1, (2, HALF)).any(4).any(2).sum())
    blocks, whole = len(places), int(full.sum())
    skips = is_sparse(quarters, blocks, whole)
    return MaskBits(
        _of_direction(pairs, places, partial), _of_direction(of_keys, by_key, partial.mT), mask.seq_lengths, skips,
        computed_quarters(quarters, blocks, whole, skips),
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


def _of_direction(pairs: Tensor, places: Tensor, partial: Tensor) -> PairBits:
    """Return the bits of blocks whose rows are queries, or keys. `places` are those of the blocks in `partial`."""
    device = pairs.device
    words = (pairs.unflatten(-1, (_GROUPS, ROW_WORDS)).int() << torch.arange(_GROUPS, device=device)[:, None]).sum(-2)
    unused = torch.zeros(BLOCK_WORDS, dtype=torch.int16, device=device)
    counts = partial.sum(-1).flatten()  # of rows of blocks
    first = counts.cumsum(0) - counts
    needs = pairs.unflatten(2, (2, HALF)).unflatten(1, (2, HALF)).any(4).any(2)  # [blocks, half of rows, of columns]
    starts = 2 * places[:, 3:] + torch.arange(2, device=device)
    halves = (4 * starts + needs[:, 0] + 2 * needs[:, 1]).flatten()
    rows = torch.arange(len(counts), device=device).repeat_interleave(counts)
    needed = torch.zeros_like(counts).index_add_(0, rows, needs.any(1).sum(1))
    return PairBits(
        first.int(), torch.cat((words.to(torch.int16).flatten(), unused)),
        torch.cat((halves, halves.new_zeros(1))).int(), needed.int(),
    )  # fmt: skip
