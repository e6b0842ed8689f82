"""dense: block masks as dense arrays of blocks, and the mask whose blocks are all partial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flexattn.block_mask.mask import BlockMask
from flexattn.block_mask.runs import RunLists, Runs
from flexattn.mods.combine import noop_mask
from flexattn.options import LARGEST_TILE
from flexattn.torch_state.lasting import cached_on_device
from flexattn.torch_state.transforms import outside


def dense_blocks(blocks: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the partial and the full blocks, bool [B, H, query blocks, key blocks]."""
    rows, columns = (-(-n // size) for n, size in zip(blocks.seq_lengths, blocks.BLOCK_SIZE, strict=True))
    shape, lists = (blocks.B, blocks.H, rows, columns), blocks.kv_runs
    return lists.partial.dense(columns).view(shape), lists.full.dense(columns).view(shape)


@cached_on_device
def all_partial(M: int, N: int, device: torch.device) -> BlockMask:
    """Return a mask with all blocks partial: the problem's mask decides. Making it waits for nothing."""
    rows, columns = -(-M // LARGEST_TILE), -(-N // LARGEST_TILE)
    with outside_of_call():
        lists = [_one_run_per_row(*sizes, device) for sizes in ((rows, columns), (columns, rows))]
    return BlockMask.from_runs(
        lists[0], lists[1], 1, 1, (M, N), (LARGEST_TILE, LARGEST_TILE), noop_mask, separate_full_blocks=False,
        full_overhangs=False,
    )  # fmt: skip


def _one_run_per_row(rows: int, columns: int, device: torch.device) -> RunLists:
    """Return lists in which all blocks of all rows are partial."""
    count = torch.arange(rows + 1, dtype=torch.int32, device=device)
    runs = torch.arange(2, dtype=torch.int32, device=device).mul(columns).expand(rows, 2).contiguous()
    no_runs = Runs(torch.zeros_like(count), runs[:0])
    return RunLists(Runs(count, runs), no_runs, count[None, :-1].contiguous())


@contextlib.contextmanager
def outside_of_call() -> Iterator[None]:
    """Make tensors that outlive the modes of the current call."""
    with torch.inference_mode(False), torch.no_grad(), outside():
        yield
