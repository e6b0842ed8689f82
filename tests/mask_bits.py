"""The bits of a mask's partial blocks, computed from the dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn import BlockMask, create_mask
from flexattn.block_mask.bits import BITS_BLOCK, ROW_WORDS, MaskBits, PairBits
from flexattn.block_mask.dense import dense_blocks

GROUPS = BITS_BLOCK // ROW_WORDS


def reference_bits(mask: BlockMask) -> MaskBits:
    """Return the bits that a mask should have."""
    lengths = mask.seq_lengths
    dense = create_mask(mask.mask_mod, mask.B, mask.H, *lengths, device=mask.device)
    past = [-n % BITS_BLOCK for n in lengths]
    dense = torch.nn.functional.pad(dense, (0, past[1], 0, past[0]))
    partial, _ = dense_blocks(mask)
    return MaskBits(_of_direction(dense, partial), _of_direction(dense.mT, partial.mT), lengths)


def _of_direction(dense: Tensor, partial: Tensor) -> PairBits:
    tiles = dense.unflatten(-1, (-1, BITS_BLOCK)).unflatten(-3, (-1, BITS_BLOCK)).transpose(-3, -2)
    blocks = tiles[partial]  # [blocks, BITS_BLOCK, BITS_BLOCK]
    words = blocks.unflatten(-1, (GROUPS, ROW_WORDS)).int() << torch.arange(GROUPS, device=dense.device)[:, None]
    unused = torch.zeros(BITS_BLOCK * ROW_WORDS, dtype=torch.int16, device=dense.device)
    first = torch.nn.functional.pad(partial.sum(-1).flatten().cumsum(0, dtype=torch.int32), (1, 0))
    return PairBits(first, torch.cat((words.sum(-2).to(torch.int16).flatten(), unused)))


def with_bits(mask: BlockMask) -> BlockMask:
    """Give a mask the bits that it has on Hopper, and return it."""
    mask._bits = reference_bits(mask)
    return mask
