"""token_tiles: problems with a mask of a grid. Tensors are copied into the order of tiles, and results back.

Nothing outside of an engine's forward or backward sees the order, so each of them may choose it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flexattn.block_mask import InTiles
from flexattn.block_mask.bits import BITS_BLOCK
from flexattn.call.memory_order import empty_in_order, in_large_elements
from flexattn.call.pose import place_captures
from flexattn.call.problem import Gradients, Needs, Problem
from flexattn.layout import TiledGrid
from flexattn.options import selects_portable_kernels
from flexattn.process.config import settings

Results = tuple[Tensor, Tensor, Tensor | None]

_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 128  # head dims of Hopper kernels that read bits in the forward and the backward; rows are units of 16 bytes
# Blocks of 128 queries, in all heads. With fewer, the host may need longer than the GPU. With 2,048, kernels and copies
# of a forward take 0.23 ms, and of a backward 0.5 (H200). The host needed 0.27 to 0.47 and 0.85 in a first version.
_LEAST_BLOCKS = 8192
# Quarters of blocks that each 128 queries must save for each 64 columns of head dim, to pay for the copies. In 13 x 13
# neighborhoods of 128 x 128 tokens 35 of 52 are saved: forward and backward of 16 heads (D 64, H200) take 155 and 335
# us instead of 315 and 611, and the copies 80 and 170, which is the time of 17 and 22 quarters.
_LEAST_SAVED = 24


def read_in_tiles(problem: Problem) -> InTiles | None:
    """Return the mask in the order in which a problem is computed, None if that is its own.

    A score_mod and dropout would depend on positions in that order.
    """
    blocks = problem.block_mask
    tiles = None if blocks is None else blocks._in_tiles
    if blocks is None or tiles is None or problem.score is not None or problem.dropout is not None:
        return None
    query, key, value = problem.query, problem.key, problem.value
    tokens = tiles.grid.tokens
    allowed = (
        problem.layout is None
        and not problem.batch_invariant
        and query.dtype in _HALF
        and all(n <= _WIDEST and n * query.itemsize % 16 == 0 for n in (query.size(3), value.size(3)))
        and "hopper" not in settings().without
        and query.size(2) == key.size(2) == tokens
        and blocks.seq_lengths == tiles.mask.seq_lengths
        and query.size(0) * query.size(1) * tokens >= _LEAST_BLOCKS * BITS_BLOCK
        and tiles.saved * 64 >= _LEAST_SAVED * max(query.size(3), value.size(3))
        and not selects_portable_kernels(dict(problem.options))
    )
    return tiles if allowed else None


def planned_in_tiles(problem: Problem, tiles: InTiles) -> Problem:
    """Return a problem in the order of tiles, with tensors in the form of the copies, but without values."""
    tensors = problem.query, problem.key, problem.value
    query, key, value = (empty_in_order(x, x.size(3)).requires_grad_(x.requires_grad) for x in tensors)
    return _masked(problem, tiles).with_fields(query=query, key=key, value=value)


def _masked(problem: Problem, tiles: InTiles) -> Problem:
    """Return a problem with the mask in the order of tiles, but tensors in row-major order."""
    bound = place_captures(tiles.bound, problem.query.device, "mask_mod")
    return problem.with_fields(block_mask=tiles.mask, mask=bound, equal_runs=tiles.mask.equal_runs())


def forward_in_tiles(problem: Problem, tiles: InTiles, forward: Callable[[Problem], Results]) -> Results:
    """Return what `forward` returns for a problem."""
    grid = tiles.grid
    query, key, value = (_copied(x, grid, True) for x in (problem.query, problem.key, problem.value))
    out, lse, largest = forward(_masked(problem, tiles).with_fields(query=query, key=key, value=value))
    return _copied(out, grid, False), grid.restore(lse, 2), None if largest is None else grid.restore(largest, 2)


def backward_in_tiles(
    problem: Problem, tiles: InTiles, backward: Callable[..., Gradients], out: Tensor, lse: Tensor, d_out: Tensor,
    d_lse: Tensor | None, needs: Needs,
) -> Gradients:  # fmt: skip
    """Return what `backward` returns for a problem."""
    grid = tiles.grid
    tensors = problem.query, problem.key, problem.value, out, d_out
    query, key, value, out, d_out = (_copied(x, grid, True) for x in tensors)
    inner = _masked(problem, tiles).with_fields(query=query, key=key, value=value)
    lse, d_lse = grid.permute(lse, 2), None if d_lse is None else grid.permute(d_lse, 2)
    *found, captured, of_sink = backward(inner, out, lse, d_out, d_lse, needs)
    dq, dk, dv = (None if x is None else _copied(x, grid, False) for x in found)
    return dq, dk, dv, captured, of_sink


def _copied(x: Tensor, grid: TiledGrid, to_tiles: bool) -> Tensor:
    """Return [B, H, tokens, D] in the order of tiles, or in row-major order, with the same order of dims in memory."""
    found = empty_in_order(x, x.size(3))
    source, target = in_large_elements(x, found)
    sizes, of_source, of_target = _tile_views(source.shape, source.stride(), target.stride(), grid, to_tiles)
    target.as_strided(sizes, of_target).copy_(source.as_strided(sizes, of_source))
    return found


@lru_cache(1024)
def _tile_views(
    shape: Sequence[int], of_source: Sequence[int], of_target: Sequence[int], grid: TiledGrid, to_tiles: bool
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return the sizes of views with the dims of tiles, and their strides in the source and the target of a copy."""
    views = grid.tiles_of_row_major, grid.tiles_in_order
    source, target = (
        view(torch.empty_strided(shape, strides, device="meta"), 2)
        for view, strides in zip(views if to_tiles else views[::-1], (of_source, of_target), strict=True)
    )
    return tuple(source.shape), source.stride(), target.stride()
