"""token_tiles: the order of tokens in which a mask of a grid has fewer blocks."""

from __future__ import annotations

from flexattn.block_mask import BlockMask
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.process.config import settings

# A tile has the 128 tokens of a block, and each half of them is as square as possible (docs/layout.md). The first one
# of which a grid consists is taken. Descriptors of a grid of three dims, by batch and head, would have six.
_TILES = ((16, 8), (8, 16), (32, 4), (4, 32))

# The order of tiles is used if kernels compute at most this part of the quarters of blocks of row-major order.
MOST_LEFT = 0.9


def tiles_of(mask: BlockMask, bound: BoundMod) -> TiledGrid | None:
    """Return the order in which a mask is to be built too, None if there is none. `bound` is its mask_mod.

    Only masks with bits have one: kernels read them, and so do not compute the row-major positions of each pair.
    """
    tokens, keys = mask.seq_lengths
    if mask.bits is None or tokens != keys or settings().without & {"hopper", "tiles"}:
        return None
    shape = token_grid(specialized(bound.wide or bound.graph, bound.numbers), tokens)
    grids = (TiledGrid(shape, tile) for tile in _TILES if shape is not None and len(tile) == len(shape))
    return next((grid for grid in grids if grid.has_whole_tiles), None)


def part_left(mask: BlockMask, in_tiles: BlockMask) -> float:
    """Return the part of the quarters of blocks computed in row-major order that is computed in the order of tiles."""
    before, after = mask.bits, in_tiles.bits
    if before is None or after is None or not before.computed or after.computed is None:
        return 1.0
    return after.computed / before.computed
