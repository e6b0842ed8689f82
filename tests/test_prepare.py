"""BlockMask.prepare: further sets of lists, for kernels whose tiles are not the blocks of the mask."""

from __future__ import annotations

import pytest
import torch
from mask_cases import MASKS, assert_same_lists, make_mask

from flexattn import create_block_mask, flex_attention, mods
from flexattn.block_mask import BlockMask
from flexattn.errors import MaskError, MutationError, UnsupportedError
from flexattn.torch_compile import operators

T = 192
IDS = torch.arange(T) // 50


def mask_of(**kwargs):
    return create_block_mask(mods.document_causal(IDS), None, None, T, T, device="cpu", BLOCK_SIZE=64, **kwargs)


@pytest.mark.parametrize("size", [(16, 32), (192, 64), (24, 40)])
@pytest.mark.parametrize("name", ["causal", "sliding", "batches", "heads", "table"])
def test_lists_at_another_size_are_those_of_a_mask_of_that_size(name, size):
    assert name in MASKS
    mod = make_mask(name, T)
    mask = create_block_mask(mod, 2, 3, T, T, device="cpu", BLOCK_SIZE=64).prepare(size)
    wanted = create_block_mask(mod, 2, 3, T, T, device="cpu", BLOCK_SIZE=size)
    found = mask.at(size)
    assert_same_lists([found.kv_runs, found.q_runs], [wanted.kv_runs, wanted.q_runs])
    x = torch.randn(2, 3, T, 16)
    torch.testing.assert_close(flex_attention(x, x, x, block_mask=found), flex_attention(x, x, x, block_mask=mask))


def test_a_missing_set_is_an_error():
    mask = mask_of()
    with pytest.raises(MaskError, match=r"Call block_mask.prepare\(\(32, 32\)\)"):
        mask.at((32, 32))
    assert mask.at((64, 64)) is mask and mask.prepare(32).at((32, 32)).BLOCK_SIZE == (32, 32)


def test_masks_that_were_edited_cannot_be_refined():
    other = mask_of()
    other.mask_mod = mods.causal
    for mask in (
        mask_of()[:],
        mask_of().to("cpu"),
        other,
        BlockMask.from_blocks(torch.ones(1, 1, 3, 3).bool(), None, (T, T), 64),
    ):
        with pytest.raises(UnsupportedError, match="BLOCK_SIZE: found"):
            mask.prepare(32)


def test_a_stale_mask_cannot_be_refined():
    ids = IDS.clone()
    mask = create_block_mask(mods.document_causal(ids), None, None, T, T, device="cpu", BLOCK_SIZE=64)
    ids[3] = 7
    with pytest.raises(MutationError, match="block_mask: "):
        mask.prepare(32)


def test_operators_carry_all_sets(monkeypatch):
    seen = []
    original = operators.mask_of_lists
    monkeypatch.setattr(operators, "mask_of_lists", lambda *args: seen.append(original(*args)) or seen[-1])
    torch._dynamo.reset()
    x = torch.randn(1, 2, T, 16)
    mask = mask_of().prepare(32, (16, 64))
    out = torch.compile(lambda x, m: flex_attention(x, x, x, block_mask=m), fullgraph=True, backend="eager")(x, mask)
    assert torch.equal(out, flex_attention(x, x, x, block_mask=mask))
    for size in ((32, 32), (16, 64)):
        ours, wanted = seen[-1].at(size), mask.at(size)
        assert_same_lists([ours.kv_runs, ours.q_runs], [wanted.kv_runs, wanted.q_runs])
    with pytest.raises(MaskError, match="prepare"):
        seen[-1].at((8, 8))
