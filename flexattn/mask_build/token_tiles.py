"""token_tiles: the order of tokens in which a mask of a grid touches fewer blocks, and how many it saves."""

from __future__ import annotations

from flexattn.block_mask import BlockMask
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.machine.triton_versions import has_gluon
from flexattn.process.config import settings

# A tile has the 128 tokens of a block, and each half of them is as square as possible (docs/layout.md). The first one
# of which a grid consists is taken.
_TILES = ((16, 8), (8, 16), (32, 4), (4, 32), (8, 4, 4), (4, 8, 4), (4, 4, 8), (2, 8, 8), (8, 8, 2))

# Quarters of blocks in each row of blocks. With fewer, calls with head dims from 32 on are not faster
# (engines/token_tiles.py).
LEAST_SAVED = 12


def tiles_of(mask: BlockMask, bound: BoundMod) -> TiledGrid | None:
    """Return the order in which a mask is to be built too, None if there is none. `bound` is its mask_mod.

    Only masks with bits have one: kernels read them, and so do not compute the row-major positions of each pair.
    """
    tokens, keys = mask.seq_lengths
    if mask.bits is None or tokens != keys or settings().without & {"hopper", "tiles"} or not has_gluon():
        return None
    shape = token_grid(specialized(bound.wide or bound.graph, bound.numbers), tokens)
    grids = (TiledGrid(shape, tile) for tile in _TILES if shape is not None and len(tile) == len(shape))
    return next((grid for grid in grids if grid.has_whole_tiles), None)


def saved_quarters(mask: BlockMask, in_tiles: BlockMask) -> float:
    """Return how many quarters of blocks kernels compute less in the order of tiles, for each row of blocks."""
    before, after = mask.bits, in_tiles.bits
    if before is None or after is None or before.computed is None or after.computed is None:
        return 0.0
    return (before.computed - after.computed) / len(before.by_query.first)
