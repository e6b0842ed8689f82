"""Masks whose dense blocks are known, and properties that every BlockMask must have."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.block_mask.runs import runs_of
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.trace.trace import trace

create = functools.partial(create_block_mask, device="cpu")
PARTIAL_FIELDS = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
FULL_FIELDS = tuple(f"full_{name}" for name in PARTIAL_FIELDS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table_mask(seed: int, B: int = 3, H: int = 2, Q: int = 70, KV: int = 70) -> Any:
    """Return a mask that reads everything, with whole blocks of ones and zeros in it."""
    coarse = torch.randint(3, (B, H, -(-Q // 8), -(-KV // 8)), generator=seeded(seed))
    fine = torch.rand(B, H, Q, KV, generator=seeded(seed)) < 0.5
    scaled = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :Q, :KV]
    table = torch.where(scaled == 2, fine, scaled == 1)
    return lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx]


def check_consistent(mask: BlockMask) -> None:
    """Check what must hold of every mask: both directions agree, runs are sorted and joined, order is by length."""
    for lists, transposed in ((mask.kv_runs, False), (mask.q_runs, True)):
        if lists is None:
            continue
        for runs, blocks in zip((lists.partial, lists.full), mask._blocks(transposed), strict=True):
            again = runs_of(blocks)
            assert torch.equal(runs.row_ptr, again.row_ptr)
            assert torch.equal(runs.runs, again.runs)
            assert runs.row_ptr.dtype == runs.runs.dtype == torch.int32
        counts = (lists.partial.count() + lists.full.count()).view(lists.order.shape)
        sorted_counts = counts.gather(1, lists.order.long())
        assert torch.equal(sorted_counts, counts.sort(1, descending=True).values)
    partial, full = mask._blocks()
    assert not (partial & full).any()
    if mask.q_runs is not None:
        assert torch.equal(partial, mask._blocks(True)[0].mT)
        assert torch.equal(full, mask._blocks(True)[1].mT)


def live_pairs(mask: BlockMask) -> Tensor:
    """Return what a mask computes, dense: full blocks, and partial blocks where its mod attends."""
    Q, KV = mask.seq_lengths
    dense = [
        blocks.repeat_interleave(mask.BLOCK_SIZE[0], 2).repeat_interleave(mask.BLOCK_SIZE[1], 3)[:, :, :Q, :KV]
        for blocks in mask._blocks()
    ]
    return dense[1] | (dense[0] & create_mask(mask.mask_mod, mask.B, mask.H, Q, KV, device="cpu"))


ONE, ZERO = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)


def bind(mask: BlockMask) -> Any:
    return trace(mask.mask_mod, "mask")
