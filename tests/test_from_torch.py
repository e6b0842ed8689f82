"""from_torch: PyTorch's masks are converted once."""

from __future__ import annotations

import pytest
import torch
from block_masks import check_consistent, create, live_pairs
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import from_torch
from flexattn.errors import ArgumentError, MaskError
from flexattn.mods import causal, noop_mask


def test_from_torch_converts_once():
    theirs = upstream.create_block_mask(causal, 2, 2, 70, 70, "cpu", 16)
    ours = from_torch(theirs)
    check_consistent(ours)
    assert torch.equal(live_pairs(ours), live_pairs(create(causal, 2, 2, 70, 70, BLOCK_SIZE=16)))
    assert from_torch(theirs) is ours
    theirs.kv_num_blocks[0, 0, 4] = 0
    changed = from_torch(theirs.from_kv_blocks(*theirs.as_tuple(False)[1:5], BLOCK_SIZE=16, seq_lengths=(70, 70)))
    assert changed.counts() != ours.counts()
    with pytest.raises(MaskError, match="q_indices: found other blocks"):
        from_torch(theirs)  # seen to have changed, and its two directions do not agree any more
    theirs.kv_num_blocks[0, 0, 4] = 5 - theirs.full_kv_num_blocks[0, 0, 4]
    theirs.mask_mod = noop_mask
    assert from_torch(theirs).mask_mod is noop_mask


def test_from_torch_knows_the_noop_mask():
    theirs = upstream.create_block_mask(upstream.noop_mask, None, None, 70, 70, "cpu", 16)
    assert from_torch(theirs).mask_mod is noop_mask


def test_from_torch_refuses_others():
    with pytest.raises(ArgumentError, match="block_mask: found int, expected a BlockMask"):
        from_torch(3)
