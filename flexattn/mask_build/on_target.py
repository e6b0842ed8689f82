"""on_target: a mask that was built here, as create_block_mask builds it on a GPU of another machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from flexattn.block_mask import BlockMask
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import captures_compared
from flexattn.machine.target import Target
from flexattn.mask_build.bits_by_pairs import evaluated_bits
from flexattn.mask_build.create import built_mask, with_tiles
from flexattn.mask_build.hopper_blocks import HOPPER_BLOCKS
from flexattn.mask_build.pair_bits import NO_PARTIAL, impossible, unwanted
from flexattn.trace.trace import trace


def as_on_target(mask: BlockMask, target: Target) -> tuple[BlockMask, ...]:
    """Return a mask as it is built on a GPU: with the blocks and bits that its kernels read, and an order of tiles.

    The masks that are built on the way follow it. It is returned as it is if it was not built from its mask_mod, or if
    kernels of this target read nothing else.
    """
    if not mask.is_built or not target.is_hopper:
        return (mask,)
    bound = trace(mask.mask_mod, "mask")
    mask.check_captures(bound)
    made: list[BlockMask] = []

    def in_blocks(mask_mod: Callable[..., Any], bound: BoundMod) -> BlockMask:
        shape = (mask.B, mask.H, *mask.seq_lengths)
        found = built_mask(mask_mod, bound, shape, mask.device, HOPPER_BLOCKS, mask._separate)
        made.append(_with_bits(found, bound, target))
        return made[-1]

    copied = copy.copy(mask)
    if mask.BLOCK_SIZE == HOPPER_BLOCKS:
        copied._prepared = copied._state = None
        return with_tiles(_with_bits(copied, bound, target), bound, in_blocks), *made
    copied._for_hopper = with_tiles(in_blocks(mask.mask_mod, bound), bound, in_blocks)
    return copied, *made


def _with_bits(mask: BlockMask, bound: BoundMod, target: Target) -> BlockMask:
    """Give a mask its bits, or the reason why it has none."""
    if mask.bits is not None or mask.device.type == "cuda":
        return mask
    partial = mask.counts()[1]
    reason = NO_PARTIAL if partial == 0 else ""
    reason = reason or unwanted(bound.graph, mask.BLOCK_SIZE, captures_compared(bound.graph), target)
    mask._no_bits = reason or impossible(bound, partial)
    mask._bits = None if mask._no_bits else evaluated_bits(mask, bound.on(mask.device))
    return mask
