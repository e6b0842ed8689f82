"""dense: block masks as dense arrays of blocks, and the mask whose blocks are all partial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from flexattn.block_mask.mask import BlockMask
from flexattn.block_mask.runs import run_lists_of
from flexattn.mods.combine import noop_mask
from flexattn.options import LARGEST_TILE
from flexattn.torch_state.transforms import outside


def dense_blocks(blocks: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the partial and the full blocks, bool [B, H, query blocks, key blocks]."""
    rows, columns = (-(-n // size) for n, size in zip(blocks.seq_lengths, blocks.BLOCK_SIZE, strict=True))
    shape, lists = (blocks.B, blocks.H, rows, columns), blocks.kv_runs
    return lists.partial.dense(columns).view(shape), lists.full.dense(columns).view(shape)


@lru_cache(64)
def all_partial(M: int, N: int, device: torch.device) -> BlockMask:
    """Return a mask with all blocks partial: the problem's mask decides."""
    rows, columns = -(-M // LARGEST_TILE), -(-N // LARGEST_TILE)
    with outside_of_call():
        blocks = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device)
        lists = [run_lists_of(x, torch.zeros_like(x)) for x in (blocks, blocks.mT)]
    return BlockMask.from_runs(
        lists[0], lists[1], 1, 1, (M, N), (LARGEST_TILE, LARGEST_TILE), noop_mask, separate_full_blocks=False,
        full_overhangs=False,
    )  # fmt: skip


@contextlib.contextmanager
def outside_of_call() -> Iterator[None]:
    """Make tensors that outlive the modes of the current call."""
    with torch.inference_mode(False), torch.no_grad(), outside():
        yield
