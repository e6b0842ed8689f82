"""Block diffusion (Arriola et al., 2025): noised and clean copies of a sequence, trained together in one pass."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import checked_int
from flexattn.mods.kinds import MaskMod, named


def block_diffusion(length: int, block: int) -> MaskMod:
    """Mask of `2 * length` tokens: first the noised sequence, then the clean one, both split into blocks.

    A noised block attends to itself and to the clean blocks before it. A clean block attends to the clean blocks up to
    and including itself.

    >>> import torch
    >>> i = torch.arange(4)
    >>> block_diffusion(2, 1)(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    length = checked_int("length", length, 1, "It is the length of one of the two copies.")
    block = checked_int("block", block, 1, "It is the number of tokens of a block.")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block, kv_block = q_idx % length // block, kv_idx % length // block
        noised_itself = ~q_clean & ~kv_clean & (q_block == kv_block)
        noised_to_clean = ~q_clean & kv_clean & (q_block > kv_block)
        clean_to_clean = q_clean & kv_clean & (q_block >= kv_block)
        return noised_itself | noised_to_clean | clean_to_clean

    return named(mask, "block_diffusion", length, block)
