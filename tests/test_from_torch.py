"""from_torch: PyTorch's masks are converted once."""

from __future__ import annotations

import pytest
import torch
from block_masks import check_consistent, create, live_pairs
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, mods
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_our_mask_is_one_of_torch():
    """Other software that checks for PyTorch's class accepts it, and PyTorch's own flex_attention computes it."""
    x = torch.randn(1, 2, 256, 16)
    ids = torch.arange(256) // 50
    mask = flexattn.create_block_mask(mods.document_causal(ids), None, None, 256, 256, device="cpu")
    assert isinstance(mask, upstream.BlockMask)
    expected = flexattn.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(upstream.flex_attention(x, x, x, block_mask=mask), expected)
    for whole, ours in ((mask.as_tuple(), mask._flatten()), (mask[0].as_tuple(), mask[0]._flatten())):
        assert len(whole) == 17 and ours


def test_every_method_of_torchs_mask_is_ours_or_reads_our_fields():
    inherited = {name for name in vars(upstream.BlockMask) if not name.startswith("__")} - set(vars(BlockMask))
    helpers = {
        "_TENSOR_ATTRS",
        "_CONTEXT_ATTRS",
        "_dq_kv_order",
        "_slice_dq_kv_order",
        "_wrap_context_value",
        "_unwrap_context_value",
    }
    assert inherited <= helpers
