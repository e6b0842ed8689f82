"""on_target: a mask that was built here, as create_block_mask builds it on a GPU of another machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from flexattn.block_mask import BlockMask
from flexattn.block_mask.mask import NO_BITS
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import captures_compared
from flexattn.machine.hopper_kernels import no_hopper_kernels
from flexattn.machine.target import Target
from flexattn.mask_build.bits_by_pairs import evaluated_bits
from flexattn.mask_build.create import built_mask, sizes_read, with_tiles
from flexattn.mask_build.hopper_blocks import HOPPER_BLOCKS
from flexattn.mask_build.pair_bits import NO_PARTIAL, NO_READER, impossible, unwanted
from flexattn.trace.trace import trace


def as_on_target(mask: BlockMask, target: Target) -> tuple[BlockMask, ...]:
    """Return a mask as it is built on a GPU: with the blocks and bits that its kernels read, and an order of tiles.

    The masks that are built on the way follow it. Slices, moved masks and masks from files have nothing else to read.
    """
    if not mask.is_built or mask.device.type == "meta" or mask._no_bits == NO_BITS:
        return (mask,)
    copied = copy.copy(mask)
    copied._forget_derived()
    if no_hopper_kernels(target):
        copied._no_bits = NO_READER
        return (copied,)
    bound = trace(mask.mask_mod, "mask")
    mask.check_captures(bound)
    made: list[BlockMask] = []

    def in_blocks(mask_mod: Callable[..., Any], bound: BoundMod) -> BlockMask:
        sizes = sizes_read(bound, (mask.B, mask.H, *mask.seq_lengths))
        small = built_mask(mask_mod, bound, sizes, mask.device, HOPPER_BLOCKS, mask._separate)
        runs = small.equal_runs()
        found = _with_bits(small, bound, target)._expand(mask.B, mask.H, is_exact=True)
        found._remember(bound, runs)
        made.append(found)
        return found

    own = in_blocks(mask.mask_mod, bound)
    if mask.BLOCK_SIZE != HOPPER_BLOCKS:
        copied._no_bits = unwanted(bound.graph, mask.BLOCK_SIZE, (), target)
        copied._for_hopper = with_tiles(own, bound, in_blocks)
        return copied, *made
    copied._bits, copied._no_bits = own.bits, own._no_bits
    return with_tiles(copied, bound, in_blocks), *made[1:]


def _with_bits(mask: BlockMask, bound: BoundMod, target: Target) -> BlockMask:
    """Give a mask its bits, or the reason why it has none."""
    if mask.bits is not None:  # it was built by kernels
        return mask
    partial = mask.counts()[1]
    reason = NO_PARTIAL if partial == 0 else ""
    reason = reason or unwanted(bound.graph, mask.BLOCK_SIZE, captures_compared(bound.graph), target)
    mask._no_bits = reason or impossible(bound, partial)
    mask._bits = None if mask._no_bits else evaluated_bits(mask, bound.on(mask.device))
    return mask
