"""tiles: the order of tokens in which a mask of a grid touches fewer blocks, and whether calls are faster in it."""

from __future__ import annotations

import math

from flexattn.block_mask import BlockMask
from flexattn.block_mask.bits import BITS_BLOCK
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.process.config import settings

# A tile is one block, and each half of its tokens is as square as possible (docs/layout.md). The first one of which a
# grid consists is taken.
_TILES = ((16, 8), (8, 16), (32, 4), (4, 32), (8, 4, 4), (4, 8, 4), (4, 4, 8), (2, 8, 8), (8, 8, 2))
# Quarters of blocks that a row of blocks must save to pay for the copies into tiles and back. In 13 x 13 neighborhoods
# of 128 x 128 tokens it saves 35 of 52: forward and backward of 16 heads (D 64, H200) take 155 and 335 us instead of
# 315 and 611, and the copies 64 us each, the time of 13 quarters of each row in the forward, and 7 in the backward.
_LEAST_SAVED = 16


def tiles_of(mask: BlockMask, bound: BoundMod) -> TiledGrid | None:
    """Return the order in which a mask is to be built too, None if there is none. `bound` is its mask_mod.

    Only masks with bits have one: kernels read them, and so do not compute the row-major positions of each pair.
    """
    tokens, keys = mask.seq_lengths
    if mask.bits is None or tokens != keys or "tiles" in settings().without:
        return None
    shape = token_grid(specialized(bound.wide or bound.graph, bound.numbers), tokens)
    for tile in _TILES:
        if shape is not None and len(shape) == len(tile):
            grid = TiledGrid(shape, tile)
            assert math.prod(tile) == BITS_BLOCK
            if grid.has_whole_tiles:
                return grid
    return None


def pays(mask: BlockMask, in_tiles: BlockMask) -> bool:
    """Return whether calls are faster if they copy tokens into the order of tiles, and back."""
    before, after = mask.bits, in_tiles.bits
    if before is None or after is None or before.computed is None or after.computed is None:
        return False
    return before.computed - after.computed >= _LEAST_SAVED * len(before.by_query.first)
