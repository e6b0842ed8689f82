"""pairs: how many (q, kv) pairs a mask computes, and how many of them attend."""

from __future__ import annotations

import pytest
import torch
from block_masks import create, live_pairs, table_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from flexattn import mods
from flexattn.block_mask import BlockMask
from flexattn.block_mask import pairs as pairs_module
from flexattn.errors import DeviceError, MutationError
from flexattn.mods import causal, noop_mask


@settings(max_examples=40)
@given(
    st.integers(0, 9), st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 16, 24, 100]), st.integers(1, 90),
    st.sampled_from([50, 2000, 2**21]),
)  # fmt: skip
def test_pairs(seed, Q, KV, q_block, kv_block, most):
    mask = create(table_mask(seed), 3, 2, Q, KV, BLOCK_SIZE=(q_block, kv_block))
    blocks = mask.to_dense().bool().repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)[:, :, :Q, :KV]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module._PAIRS, "cpu", most)
        assert mask.pairs() == (int(blocks.sum()), int(live_pairs(mask).sum()))


def test_pairs_of_a_part():
    whole = create(table_mask(4), 3, 2, 70, 70, BLOCK_SIZE=16)
    for part in (whole[1:, 1, torch.tensor([2, 0])], whole._adjust(50, 33)):
        assert part.pairs().useful == int(live_pairs(part).sum())
    assert whole[0:0].pairs() == (0, 0)


@pytest.mark.parametrize(
    ("mod", "useful"),
    [
        (noop_mask, 2 * 100 * 50),
        (mods.not_mask(noop_mask), 0),
        (lambda b, h, q_idx, kv_idx: b == 1, 100 * 50),
        (lambda b, h, q_idx, kv_idx: q_idx % 4 == b, 2 * 25 * 50),
        (lambda b, h, q_idx, kv_idx: kv_idx < 7, 2 * 100 * 7),
    ],
)
def test_pairs_of_partial_blocks_where_the_mod_reads_less_than_both_positions(mod, useful):
    mask = BlockMask.from_blocks(torch.ones(2, 1, 4, 2, dtype=torch.bool), None, (100, 50), 32, mod)
    assert mask.pairs() == (2 * 100 * 50, useful)


def test_pairs_ask_alike_heads_once(monkeypatch):
    asked = []
    count_pairs = pairs_module._count_pairs
    monkeypatch.setattr(pairs_module, "_count_pairs", lambda *args: asked.append(args[1]) or count_pairs(*args))
    blocks = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool).expand(2, 3, 2, 2).clone()
    blocks[1, 1, 0, 1] = True  # not alike
    mask = BlockMask.from_blocks(blocks, None, (32, 32), 16, causal)
    assert mask.pairs() == (6 * 3 * 256 + 256, 6 * 32 * 33 // 2)
    assert asked == [(0, 0), (1, 1)]
    asked.clear()
    wide = BlockMask.from_blocks(blocks, None, (32, 32), 16, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + 32 * h)
    assert wide.pairs().useful == 2 * 32 * 33 // 2
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 1)]


def test_full_blocks_are_useful_up_to_the_lengths():
    lists = (torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]]), torch.tensor([[[2, 1]]]), torch.tensor([[[[0, 1]] * 2]]))  # fmt: skip  # noqa: E501
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, seq_lengths=(20, 25), mask_mod=mods.not_mask(noop_mask))
    assert mask.full_overhangs
    assert mask.pairs() == (20 * 25, 16 * 25 + 4 * 16)


def test_pairs_of_a_long_mask():
    assert create(causal, 4, 8, 2**14, 2**14).pairs() == (32 * 128 * 129 // 2 * 128**2, 32 * 2**13 * (2**14 + 1))


def test_pairs_refuse_what_changed_or_lies_elsewhere():
    ids = torch.zeros(64, dtype=torch.int32)
    mask = create(mods.document(ids), None, None, 64, 64, BLOCK_SIZE=48)
    assert mask.pairs() == (64 * 64, 64 * 64)
    ids += 1
    with pytest.raises(MutationError, match="captured tensor 'ids' was changed in place"):
        mask.pairs()
    mask.mask_mod = mods.document(ids.to("meta"))
    with pytest.raises(
        DeviceError, match=r"mask_mod: found the captured tensor .* on meta, expected the device of the"
    ):
        mask.pairs()
