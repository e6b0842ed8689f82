"""lists: the BlockMask and the runs of equal elements that the arguments of an operator describe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, InTiles
from flexattn.block_mask.bits import BITS_TENSORS, MaskBits
from flexattn.block_mask.one_tensor import unpack
from flexattn.block_mask.prepared import MaskForm, MaskNumbers, Origin, digest_of
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.layout import TiledGrid
from flexattn.mods.combine import noop_mask

_OWN, _OF_TILES = 2, 2 + BITS_TENSORS  # where the bits begin, and the lists of the order of tiles
_MOST_MASKS = 16  # that are kept for the same lists


def mask_of_lists(
    lists: Sequence[Tensor], form: MaskForm, query: Tensor, M: int, N: int, bound: BoundMod | None
) -> BlockMask:
    """Return the mask whose lists are in a packed tensor. It is cached as long as this tensor lives.

    `lists` are the tensors of a Prepared, M and N the lengths that it was built for, and `bound` is its mask_mod.
    """
    cached = Origin.of(lists[0]).masks
    B, Hq = query.shape[0], query.shape[1]
    has_bits = form.has_bits and bound is not None and _was_built_from(lists, bound)
    sizes = form, B, Hq, M, N
    read = lists[: len(lists) - len(form.runs)] if has_bits else lists[:1]
    numbers = MaskNumbers.of_sizes(lists[1]) if has_bits else MaskNumbers()
    key = *sizes, *numbers, *[t.data_ptr() for t in read[1:]]
    mask = cached.get(key)
    if mask is None:
        mask = _mask(read[0], *sizes)
        if has_bits:
            mask._bits = MaskBits.from_tensors(tuple(read[_OWN:_OF_TILES]), (M, N), numbers.skips_halves)
            if form.tile is not None:
                grid = TiledGrid((M // numbers.columns, numbers.columns), form.tile)
                in_tiles, of_tiles = _mask(read[_OF_TILES], *sizes), tuple(read[_OF_TILES + 1 :])
                in_tiles._bits = MaskBits.from_tensors(of_tiles, (M, N), numbers.tiles_skip_halves)
                mask._in_tiles = InTiles(grid, in_tiles)
        if len(cached) >= _MOST_MASKS:  # Inductor's code copies tensors that are not aligned, so addresses may differ
            cached.clear()
        cached[key] = mask
    return mask


def _mask(packed: Tensor, form: MaskForm, B: int, Hq: int, M: int, N: int) -> BlockMask:
    B, H = B if form.per_batch else 1, Hq if form.per_head else 1
    rows = [-(-n // step) for n, step in zip((M, N), form.BLOCK_SIZE, strict=True)]
    # Views of another tensor with the same memory: views of `packed` would keep it alive, and with it this entry.
    own = torch.empty(0, dtype=packed.dtype, device=packed.device)
    own.set_(packed.untyped_storage(), 0, (packed.numel(),), (1,))
    by_query, *by_key = unpack(own, B * H, rows if form.both else rows[:1], exact=packed.is_cpu)
    mask = BlockMask._of_runs(
        by_query, by_key[0] if by_key else None, B, H, (M, N), form.BLOCK_SIZE, noop_mask, True, form.full_overhangs
    )
    mask._built_from_mod = form.is_built
    return mask


def equal_runs_of(lists: Sequence[Tensor], form: MaskForm, mask: BoundMod) -> tuple[EqualRuns, ...]:
    """Return the runs of equal elements in captured tensors, if the graph is the one that they were found for."""
    if not form.runs or not _was_built_from(lists, mask):
        return ()
    places = lists[len(lists) - len(form.runs) :]
    return tuple([EqualRuns(i, place) for i, place in zip(form.runs, places, strict=True)])


def _was_built_from(lists: Sequence[Tensor], mask: BoundMod) -> bool:
    """Return whether a mask_mod computes what lists with bits or runs were built from."""
    origin = Origin.of(lists[0])
    if origin.record is None:
        return MaskNumbers.of_sizes(lists[1]).digest == digest_of(mask)
    return origin.is_graph_of(mask)
