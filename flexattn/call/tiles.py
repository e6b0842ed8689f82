"""tiles: calls with a mask of a grid, whose tokens are copied into the order of tiles, and their results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from flexattn.block_mask import BlockMask
from flexattn.block_mask.bits import BITS_BLOCK
from flexattn.call.blocks_read import reads_hopper_blocks
from flexattn.call.memory_order import dense_strides, in_large_elements
from flexattn.layout import TiledGrid
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import is_transforming

Result = tuple[Tensor, Tensor, Tensor | None]

_WIDEST = 128  # head dims of kernels that read bits in the forward and the backward
_LEAST_BLOCKS = 2048  # of queries, in all heads. With fewer, the time of a call is that of its launches.


def reads_tiles(
    mask: BlockMask, query: Any, key: Any, value: Any, score_mod: object, dropout_p: float,
    kernel_options: Mapping[str, object] | None,
) -> bool:  # fmt: skip
    """Return whether a call computes in the order of tiles of its mask. Dynamo traces this function.

    A score_mod and dropout would depend on positions in that order.
    """
    tiles = mask._in_tiles
    if tiles is None or score_mod is not None or dropout_p != 0.0:
        return False
    tokens = tiles[0].tokens
    for x in (query, key, value):
        if type(x) not in (Tensor, Parameter) or x.is_nested or x.dim() != 4:
            return False
        if x.size(2) != tokens or x.size(3) > _WIDEST:
            return False
    if not reads_hopper_blocks(query, kernel_options) or (kernel_options or {}).get("BATCH_INVARIANT"):
        return False
    if query.size(0) * query.size(1) * tokens < _LEAST_BLOCKS * BITS_BLOCK:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    return not is_transforming() and not torch._C._len_torch_dispatch_stack()


def attend_in_tiles(
    compute: Callable[..., Result], needs_lse: bool, mask: BlockMask, query: Tensor, key: Tensor, value: Tensor,
    *arguments: Any,
) -> Result:  # fmt: skip
    """Return what `compute` returns for a call with this mask, but lse as it is if it is not needed.

    `arguments` follow block_mask.
    """
    tiles = mask._in_tiles
    assert tiles is not None
    grid, in_tiles = tiles
    compiles = torch.compiler.is_dynamo_compiling()  # Inductor fuses the copies with what computes the tensors
    query, key, value = (
        [grid.permute(x, 2) for x in (query, key, value)] if compiles else _Copied.apply(grid, True, query, key, value)
    )
    out, lse, max_scores = compute(query, key, value, None, in_tiles, *arguments)
    out = grid.restore(out, 2) if compiles else _Copied.apply(grid, False, out)[0]
    return out, grid.restore(lse, 2) if needs_lse else lse, None if max_scores is None else grid.restore(max_scores, 2)


class _Copied(Function):
    """Copies of tensors [B, H, tokens, D] in the order of tiles, or back in row-major order."""

    @staticmethod
    def forward(ctx: Any, grid: TiledGrid, to_tiles: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.grid, ctx.to_tiles = grid, to_tiles
        ctx.set_materialize_grads(False)
        return tuple([_copied(x, grid, to_tiles) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = iter(_Copied.apply(ctx.grid, not ctx.to_tiles, *(x for x in gradients if x is not None)))
        return None, None, *(None if x is None else next(found) for x in gradients)


def _copied(x: Tensor, grid: TiledGrid, to_tiles: bool) -> Tensor:
    form = _form(x.shape, x.stride(), x.itemsize, grid, to_tiles)
    found = torch.empty_strided(x.shape, form.strides, dtype=x.dtype, device=x.device)
    source, target = in_large_elements(x, found)
    views = form.views if source is x else form.large_views
    target.as_strided(*views[1]).copy_(source.as_strided(*views[0]))
    return found


View = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


@frozen
class _Form:
    """How tensors of a form are copied: the strides of the copy, and views of both with the dims of tiles."""

    strides: tuple[int, ...]
    views: tuple[View, View]
    large_views: tuple[View, View]  # of elements of 16 bytes


@lru_cache(1024)
def _form(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, grid: TiledGrid, to_tiles: bool) -> _Form:
    of_copy, unit = dense_strides(shape, strides), 16 // itemsize
    views = grid.tiles_of_row_major, grid.tiles_in_order

    def of(shape: Sequence[int], *strides: Sequence[int]) -> Any:
        tensors = [torch.empty_strided(shape, s, device="meta") for s in strides]
        found = [view(x, 2) for view, x in zip(views if to_tiles else views[::-1], tensors, strict=True)]
        return tuple((tuple(x.shape), x.stride()) for x in found)

    large = ((*(n // unit for n in s[:3]), 1) for s in (strides, of_copy))
    return _Form(of_copy, of(shape, strides, of_copy), of((*shape[:3], shape[3] // unit), *large))
