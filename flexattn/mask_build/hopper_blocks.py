"""hopper_blocks: the blocks that Hopper kernels read of a mask, whatever BLOCK_SIZE it was built with.

Other blocks need portable kernels, which are slower even where their blocks have far fewer pairs. Portable kernels with
the blocks of the mask over Hopper kernels with these, forward and backward (bfloat16, 2 x 16 x 8,192, H200):

    causal, blocks of 64                     1.4x  1.3x
    causal, blocks of 32                     2.8x  2.8x
    window of 256, blocks of 64              2.1x  1.2x
    window of 64, blocks of 512              2.5x  2.1x
    10 % of blocks of 64 at random           2.5x  1.1x    these blocks have 3.2 times the pairs
    2 % of blocks of 16 at random            3.7x  2.4x    33 times
"""

from __future__ import annotations

import torch

from flexattn.block_mask.bits import BITS_BLOCK
from flexattn.machine.hopper_kernels import no_hopper_kernels
from flexattn.machine.target import target_of

HOPPER_BLOCKS = (BITS_BLOCK, BITS_BLOCK)


def needs_hopper_blocks(device: torch.device, block_size: tuple[int, int]) -> bool:
    """Return whether Hopper kernels compute on this device, and read other blocks than these."""
    return block_size != HOPPER_BLOCKS and device.type == "cuda" and not no_hopper_kernels(target_of(device))
