"""lists: a BlockMask from PyTorch's index lists, runs and dense blocks; what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from block_masks import ONE, ZERO, check_consistent, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask, RunLists, Runs
from flexattn.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    MaskError,
    UnsupportedError,
)
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import causal, noop_mask


@settings(max_examples=60)
@given(st.integers(0, 99), st.booleans(), st.booleans(), st.sampled_from([(2, 3), (3,), ()]))
def test_lists_may_be_in_any_order_narrow_and_doubled(seed, separate, compact, batch_dims):
    rows, columns = 5, 7
    generator = seeded(seed)
    kind = torch.randint(3, (*batch_dims, rows, columns), generator=generator)
    kind = torch.where(torch.arange(columns) < (3 if compact else columns), kind, 0)
    lists = []
    for blocks in (kind == 1, kind == 2):
        count, index = blocks.sum(-1), blocks.byte().argsort(dim=-1, descending=True, stable=True)
        width = 3 if compact else columns
        index = index[..., :width].clone()
        for row, n in zip(index.view(-1, width), count.flatten().tolist(), strict=True):
            row[:n] = row[torch.randperm(n, generator=generator)]
            row[n:] = torch.randint(-99, 99, (width - n,), generator=generator)  # never looked at
        if width > 3:
            index, count = torch.cat((index[..., :1], index), -1), count + (count > 0)
        lists += [count, index.int() if seed % 2 else index]
    lists = lists if separate else [*lists[:2], None, None]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, seq_lengths=(70, 100))
    check_consistent(mask)
    assert mask.shape == (*batch_dims, 70, 100)
    assert mask.kv_indices.shape == (*batch_dims, rows, min(columns, lists[1].shape[-1]))
    assert torch.equal(mask.to_dense().bool(), (kind > 0) if separate else (kind == 1))
    assert torch.equal(mask.kv_num_blocks, (kind == 1).sum(-1).int())
    assert mask.full_overhangs == separate
    assert (mask.full_kv_indices is None) == (mask.full_q_num_blocks is None) == (not separate)
    again = BlockMask(*mask.as_tuple(flatten=False)[:9], BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
    assert torch.equal(again.to_dense(), mask.to_dense())


def test_from_kv_blocks_is_torchs():
    count = torch.tensor([[[1, 2, 0], [3, 1, 2]]])
    index = torch.tensor([[[[1, 0, 0], [0, 2, 0], [0, 0, 0]], [[0, 1, 2], [1, 0, 0], [0, 2, 0]]]])
    full = (torch.tensor([[[1, 0, 1], [0, 1, 0]]]), torch.tensor([[[[2, 0, 0]] * 3, [[0, 0, 0]] * 3]]))
    for lists in ((count, index), (count, index, *full)):
        ours, theirs = (cls.from_kv_blocks(*lists, BLOCK_SIZE=64) for cls in (BlockMask, upstream.BlockMask))
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b), name
        assert ours.shape == theirs.shape
        assert ours.numel() == theirs.numel()
        assert torch.equal(ours.to_dense(), theirs.to_dense())


def test_a_block_in_both_lists_is_full():
    lists = (torch.tensor([[[2]]]), torch.tensor([[[[0, 1]]]]), torch.tensor([[[1]]]), torch.tensor([[[[1, 0]]]]))
    assert BlockMask.from_kv_blocks(*lists).counts() == (1, 1, 0)


def test_without_q_blocks():
    mask = BlockMask.from_kv_blocks(torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 2).int(), compute_q_blocks=False)
    for other in (mask, mask[0], mask[:, :, 1], mask._adjust(200, 200), mask.to("cpu"), mask.expand(2, 2)):
        assert other.q_runs is other.q_indices is other.q_num_blocks is other.full_q_indices is None
        check_consistent(other)
        repr(other)


def test_as_tuple_is_torchs():
    arguments = (causal, 2, None, 100, 130, "cpu", (32, 64))
    ours, theirs = create_block_mask(*arguments), upstream.create_block_mask(*arguments)
    for flatten, size in ((True, 17), (False, 15)):
        a, b = ours.as_tuple(flatten), theirs.as_tuple(flatten)
        assert len(a) == len(b) == size
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def test_positional_constructor():
    theirs = upstream.create_block_mask(causal, 1, 1, 96, 96, "cpu", 32)
    fields = theirs.as_tuple(flatten=False)
    mask = BlockMask(*fields[:9], (32, 32), causal, dq_write_order=torch.zeros(1), dq_kv_order_spt=True)
    assert mask.BLOCK_SIZE == (32, 32)
    assert mask.mask_mod is causal
    assert mask.dq_kv_order_spt is True
    assert torch.equal(mask.dq_write_order, torch.zeros(1))
    assert BlockMask(*fields[:9], 32).mask_mod is noop_mask
    assert BlockMask((96, 96), *fields[1:3], None, None, None, None, None, None, 32).q_runs is None


MALFORMED = [
    ({"kv_num_blocks": None}, AssertionError, "must be both provided or omitted: kv_num_blocks is None"),
    ({"kv_num_blocks": None, "kv_indices": None}, AssertionError, "must be provided: found None"),
    ({"full_kv_num_blocks": ONE}, AssertionError, "full_kv_indices is None. Pass both"),
    ({"full_kv_indices": ZERO}, AssertionError, "full_kv_num_blocks is None. Pass both"),
    ({"q_indices": ZERO}, AssertionError, "q_num_blocks is None"),
    ({"full_q_indices": ZERO, "q_num_blocks": ONE, "q_indices": ZERO}, AssertionError, "full_q_num_blocks is None"),
    ({"kv_num_blocks": ONE[0, 0, 0], "kv_indices": ZERO[0, 0, 0]}, RuntimeError, "BlockMask must have at least 2"),
    ({"kv_indices": ZERO[None], "kv_num_blocks": ONE[None]}, MaskError, "kv_indices: found 5 dimensions"),
    ({"kv_indices": ZERO + 2}, MaskError, "kv_indices: found an entry out of range, expected indices in [0, 2)"),
    ({"kv_indices": ZERO - 1}, MaskError, "kv_indices: found an entry out of range"),
    ({"kv_num_blocks": ONE + 2}, MaskError, "kv_num_blocks: found an entry out of range, expected counts in [0, 2]"),
    ({"kv_num_blocks": -ONE}, MaskError, "kv_num_blocks: found an entry out of range"),
    ({"kv_num_blocks": ONE[..., :1]}, MaskError, "kv_num_blocks: found shape (1, 1, 1), expected (1, 1, 2)"),
    ({"kv_indices": ZERO.float()}, DtypeError, "kv_indices: found torch.float32, expected an integer dtype"),
    ({"kv_num_blocks": [1, 1]}, MaskError, "kv_num_blocks: found list, expected a tensor"),
    ({"kv_indices": ZERO.to("meta")}, DeviceError, "kv_indices: found meta, expected cpu"),
    ({"seq_lengths": (300, 256)}, MaskError, "kv_indices: found 2 rows, expected 3, the blocks of seq_lengths"),
    ({"seq_lengths": (256, 128), "kv_indices": ZERO + 1}, MaskError, "expected indices in [0, 1)"),
    ({"seq_lengths": 256}, ArgumentError, "seq_lengths: found 256, expected a pair of ints"),
    ({"seq_lengths": (256, -1)}, ArgumentError, "seq_lengths: found (256, -1), expected a pair of ints, each >= 0"),
    ({"BLOCK_SIZE": 0}, ArgumentError, "BLOCK_SIZE: found 0, expected an int or a pair of ints, each >= 1"),
    ({"mask_mod": 3}, ArgumentError, "mask_mod: found int, expected a function of (b, h, q_idx, kv_idx)"),
    ({"dq_write_order_full": ONE}, ValueError, "dq_write_order_full requires dq_write_order"),
    ({"q_num_blocks": ONE, "q_indices": ZERO}, MaskError, "q_indices: found other blocks, expected the transpose"),
    (
        {"full_kv_num_blocks": ONE.expand(2, 1, 2), "full_kv_indices": ZERO.expand(2, 1, 2, 2)},
        MaskError,
        "full_kv_indices: found batch and heads (2, 1), expected (1, 1)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), MALFORMED)
def test_malformed(change, error, text):
    names = ("seq_lengths", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    arguments = dict.fromkeys(names) | {"seq_lengths": (256, 256), "kv_num_blocks": ONE, "kv_indices": ZERO} | change
    with pytest.raises(error, match=re.escape(text)):
        BlockMask(**arguments)


def test_from_kv_blocks_refuses():
    with pytest.raises(RuntimeError, match="kv_indices: found 1 dimensions, expected at least 2"):
        BlockMask.from_kv_blocks(torch.ones(()).int(), torch.zeros(1).int())
    with pytest.raises(ValueError, match="dq_kv_order must be a bool, Tensor, or None: found int"):
        BlockMask.from_kv_blocks(ONE, ZERO, dq_kv_order=1)
    order = torch.arange(2)
    mask = BlockMask.from_kv_blocks(ONE, ZERO, dq_write_order=order, dq_kv_order=order)
    for doing, act in (("Slicing", lambda: mask[0]), ("Adjusting", lambda: mask._adjust(1, 1))):
        with pytest.raises(UnsupportedError, match=f"{doing} BlockMask with tensor dq_kv_order is not supported"):
            act()


def test_from_runs():
    rows = Runs(torch.tensor([0, 1, 2]).int(), torch.tensor([[0, 1], [0, 2]]).int())
    none = Runs(torch.zeros(3).int(), torch.zeros(0, 2).int())
    mask = BlockMask.from_runs(RunLists(rows, none, torch.tensor([[1, 0]]).int()), None, 1, 1, (200, 200))
    check_consistent(mask)
    assert mask.to_dense().tolist() == [[[[1, 0], [1, 1]]]]
    with pytest.raises(MaskError, match=re.escape("kv_runs: found 2 and 2 rows, expected B * H * 2 = 4")):
        BlockMask.from_runs(mask.kv_runs, None, 2, 1, (200, 200))


def test_from_blocks_refuses():
    with pytest.raises(
        MaskError, match=re.escape("partial: found torch.int32 [1, 1, 2, 2], expected torch.bool [B, H")
    ):
        BlockMask.from_blocks(ZERO, None, (256, 256))
