"""BlockMask: fields, slices, crops, copies and pictures, against dense arrays and against PyTorch's."""

from __future__ import annotations

import copy
import doctest
import functools
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as upstream
from torch.utils import _pytree as pytree

from flexattn import mods
from flexattn.block_mask import BlockMask, RunLists, Runs, from_torch, picture, plot
from flexattn.block_mask import mask as mask_module
from flexattn.block_mask import pairs as pairs_module
from flexattn.block_mask.captures import survey
from flexattn.block_mask.runs import LaterRunLists, runs_of
from flexattn.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    IndexRangeError,
    MaskError,
    MutationError,
    UnsupportedError,
)
from flexattn.mask_build import create as classify
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.mods import causal, noop_mask
from flexattn.trace import memo
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


# Runs.


@given(st.integers(0, 5), st.integers(0, 12), st.integers(0, 9), st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_runs_and_dense_blocks_are_each_others_inverse(rows, columns, seed, share):
    blocks = torch.rand(rows, columns, generator=seeded(seed)) < share
    runs = runs_of(blocks)
    assert torch.equal(runs.dense(columns), blocks)
    assert torch.equal(runs.count(), blocks.sum(1, dtype=torch.int32))
    assert (runs.runs[:, 0] < runs.runs[:, 1]).all()
    if rows:
        chosen = torch.randint(rows, (7,), generator=seeded(seed))
        assert torch.equal(runs.take(chosen).dense(columns), blocks[chosen])


# Lists from outside.


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


ONE, ZERO = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
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


# Slices.

takes = st.one_of(
    st.just(slice(None)),
    st.integers(-2, 1),
    st.slices(3),
    st.lists(st.integers(-2, 1), min_size=1, max_size=3),
    st.lists(st.integers(-2, 1), min_size=1, max_size=3).map(torch.tensor),
)


def places(index: Any, size: int) -> list[int]:
    """Return what an index takes of an axis."""
    if isinstance(index, slice):
        return list(range(size))[index]
    return [range(size)[i] for i in (index if isinstance(index, list) else torch.as_tensor(index).view(-1).tolist())]


@settings(max_examples=100)
@given(st.integers(0, 9), takes, takes, takes, st.sampled_from([16, 24, 70]), st.integers(1, 3))
def test_a_slice_computes_what_the_whole_does_there(seed, b, h, q, block, indices):
    whole = create(table_mask(seed), 3, 2, 70, 50, BLOCK_SIZE=(block, 16))
    index = (b, h, q)[:indices]
    try:
        part = whole[index]
    except IndexRangeError as error:
        assert "expected it last" in str(error) or "expected from" in str(error)
        return
    check_consistent(part)
    b, h, q = (b, h, q)[:indices] + (slice(None),) * (3 - indices)
    rows = [row for n in places(q, -(-70 // block)) for row in range(n * block, min(n * block + block, 70))]
    expected = create_mask(whole.mask_mod, 3, 2, 70, 50, device="cpu")
    expected = expected[places(b, 3)][:, places(h, 2)][:, :, rows]
    assert part.shape == tuple(expected.shape)
    if part.numel():
        assert torch.equal(live_pairs(part), expected)


def test_slices_of_slices():
    whole = create(table_mask(1), 3, 2, 70, 70, BLOCK_SIZE=16)
    part = whole[1:, :, 1:][:, [1, 0], torch.tensor([2, 0])][-1]
    expected = create_mask(whole.mask_mod, 3, 2, 70, 70, device="cpu")[2:, [1, 0]][
        :, :, [*range(48, 64), *range(16, 32)]
    ]
    assert torch.equal(live_pairs(part), expected)
    assert part.mask_mod.__name__ == whole.mask_mod.__name__


def test_slicing_is_torchs_where_torch_is_right():
    arguments = (table_mask(2), 3, 2, 64, 70, "cpu", 16)
    ours, theirs = create_block_mask(*arguments), upstream.create_block_mask(*arguments)
    for index in (0, -1, (0, 1), (slice(0, 2), slice(1, 2)), (0, 0, torch.tensor([1])), (slice(None), 1, slice(1, 3))):
        a, b = ours[index], theirs[index]
        for name in (*PARTIAL_FIELDS[:2], *FULL_FIELDS[:2], *PARTIAL_FIELDS[2:], *FULL_FIELDS[2:]):
            count, index_of = getattr(a, name), getattr(b, name)
            assert count.shape == index_of.shape, name
            assert not name.endswith("num_blocks") or torch.equal(count, index_of), name
        assert torch.equal(a.to_dense(), b.to_dense())


def test_decoding_one_token_uses_a_slice():
    whole = create(causal, None, None, 512, 512, BLOCK_SIZE=1)
    step = whole[:, :, 100]
    assert step.seq_lengths == (1, 512)
    assert create_mask(step.mask_mod, None, None, 1, 512, device="cpu").sum() == 101


def test_slices_with_new_offsets_do_not_retrace():
    whole = create(causal, None, None, 512, 512, BLOCK_SIZE=16)
    assert len({trace(whole[:, :, i].mask_mod, "mask").graph for i in range(1, 9)}) == 1


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((0, 0, 0, 0), "found 4 indices, expected at most 3: batch, head, Q-block. Key blocks cannot be indexed"),
        (3, "batch index: found 3, expected from -3 to 2"),
        ((0, -3), "head index: found -3, expected from -2 to 1"),
        ((0, 0, torch.tensor([1, 9])), "Q-block index: found 9, expected from -5 to 4"),
        (torch.tensor([0.5]), "batch index: found torch.float32 tensor, 1-D, expected an int, a slice, or a 1-D"),
        (torch.zeros(2, 2).int(), "found torch.int32 tensor, 2-D"),
        (None, "batch index: found NoneType"),
        (torch.tensor([True]), "found 1 booleans, expected 3"),
        ((0, 0, [4, 0]), "found block 4, which holds 6 of 16 queries, in the middle, expected it last"),
    ],
)
def test_bad_indices(index, text):
    with pytest.raises(IndexError, match=re.escape(text)):
        create(table_mask(0), 3, 2, 70, 70, BLOCK_SIZE=16)[index]


def test_boolean_indices():
    whole = create(table_mask(3), 3, 2, 70, 70, BLOCK_SIZE=16)
    part = whole[torch.tensor([True, False, True])]
    assert torch.equal(live_pairs(part), live_pairs(whole)[[0, 2]])


# Crops.


@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(0, 70), st.integers(0, 70), st.sampled_from([8, 16, 70, 100]), st.booleans())
def test_adjust_computes_what_a_mask_of_that_size_does(seed, q_len, kv_len, block, separate):
    mod = table_mask(seed)
    whole = create(mod, 3, 2, 70, 70, BLOCK_SIZE=(block, 16), separate_full_blocks=separate)
    part, rebuilt = whole._adjust(q_len, kv_len), create(mod, 3, 2, q_len, kv_len, BLOCK_SIZE=(block, 16))
    check_consistent(part)
    assert part.shape == rebuilt.shape
    assert not part.full_overhangs
    if q_len and kv_len:
        assert torch.equal(live_pairs(part), live_pairs(rebuilt))
    if separate:
        assert torch.equal(part._blocks()[1], rebuilt._blocks()[1])
    assert (part._blocks()[0] | ~rebuilt._blocks()[0]).all()


def test_adjust_keeps_the_full_blocks_of_lists():
    full = (torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]]))
    never = mods.not_mask(noop_mask)
    mask = BlockMask.from_kv_blocks(torch.zeros_like(full[0]), full[1], *full, BLOCK_SIZE=16, mask_mod=never)
    assert not mask.full_overhangs
    part = mask._adjust(32, 20)
    assert part.full_overhangs
    assert torch.equal(live_pairs(part), live_pairs(mask)[..., :20])


def test_adjust_does_not_grow():
    with pytest.raises(ValueError, match=re.escape("found (64, 80), expected at most those of the mask, (64, 64)")):
        create(causal, None, None, 64, 64)._adjust(64, 80)


def test_write_order_follows_slices_and_crops():
    ours, theirs = (
        module.create_block_mask(causal, 1, 1, 96, 96, "cpu", 32, compute_dq_write_order=True)
        for module in (classify, upstream)
    )
    for act in (lambda m: m[:, :, :2], lambda m: m._adjust(64, 64), lambda m: m.to("cpu")):
        assert act(ours).dq_kv_order_spt is True
        # torch leaves entries past the counts undefined, and so do we: compare those that count
        a, b = act(ours), act(theirs)
        counted = torch.arange(a.q_indices.shape[-1]) < a.q_num_blocks[..., None]
        assert torch.equal(a.dq_write_order[counted], b.dq_write_order[counted])


# Properties.


def test_sparsity_is_of_the_real_lengths():
    assert create(causal, None, None, 100, 100).sparsity() == 0.0
    assert create(mods.not_mask(noop_mask), None, None, 100, 100).sparsity() == 100.0
    assert create(causal, 2, 3, 2048, 2048).sparsity() == 46.875
    mask = create(causal, None, None, 20, 20, BLOCK_SIZE=16)
    assert mask.sparsity() == pytest.approx(100 * 16 * 4 / 400)
    assert mask.counts() == (0, 3, 1)
    assert mask.numel() == 400


@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(1, 70), st.integers(1, 70), st.integers(1, 90), st.integers(1, 90))
def test_sparsity_counts_pairs(seed, Q, KV, q_block, kv_block):
    mask = create(table_mask(seed), 3, 2, Q, KV, BLOCK_SIZE=(q_block, kv_block))
    blocks = mask.to_dense().bool().repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)[:, :, :Q, :KV]
    assert mask.sparsity() == pytest.approx(100 * (1 - blocks.float().mean().item()), abs=1e-4)


def test_expand():
    mask = create(lambda b, h, q_idx, kv_idx: q_idx + 20 * h >= kv_idx, 1, 2, 70, 70, BLOCK_SIZE=16)
    wide = mask.expand(3, 2)
    check_consistent(wide)
    assert torch.equal(wide.to_dense(), mask.to_dense().expand(3, 2, 5, 5))
    with pytest.raises(MaskError, match="H: found 4, expected 2, which the mask has"):
        mask.expand(1, 4)


# Changes of what was captured.


def bind(mask: BlockMask) -> Any:
    return trace(mask.mask_mod, "mask")


class Holder:
    def __init__(self) -> None:
        self.ids = torch.zeros(64, dtype=torch.int32)
        self.weight = torch.ones(3)
        self.window = 5

    def mask(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & (q_idx - kv_idx < self.window)


def test_changed_captures_raise():
    holder = Holder()
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    part, crop = mask[:, :, 1:], mask._adjust(40, 40)
    for m in (mask, part, crop):
        m.check_captures(bind(m))
    holder.weight += 1  # not read by the mask
    mask.check_captures(bind(mask))
    holder.ids += 1
    for m in (mask, part, crop):
        with pytest.raises(MutationError, match="captured tensor 'ids' was changed in place, expected the values that"):
            m.check_captures(bind(m))
    mask.mask_mod = holder.mask
    mask.check_captures(bind(mask))


def test_rebound_captures_raise():
    holder = Holder()
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    holder.ids = holder.ids.clone()
    with pytest.raises(MutationError, match="captured tensor 'ids' is another tensor"):
        mask.check_captures(bind(mask))
    mask = create(holder.mask, None, None, 64, 64, BLOCK_SIZE=16)
    holder.window = 6
    with pytest.raises(MutationError, match="captured number 'window' was 5 and is 6"):
        mask.check_captures(bind(mask))


def test_captures_that_torch_computes_at_each_call_are_watched_at_their_source():
    lengths = torch.tensor([3, 5, 8])

    def mod(b, h, q_idx, kv_idx):
        return kv_idx < lengths.cumsum(0)[q_idx % 3]

    mask = create(mod, None, None, 16, 16, BLOCK_SIZE=4)
    mask.check_captures(bind(mask))
    lengths[1] = 7
    with pytest.raises(MutationError, match="captured tensor 'lengths' was changed in place"):
        mask.check_captures(bind(mask))


def test_lists_have_no_record():
    ids = torch.zeros(256, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(ONE, ZERO, mask_mod=mods.document(ids))
    ids += 1
    mask.check_captures(bind(mask))


# Copies.


def test_to_moves_what_the_mod_captured():
    holder = Holder()
    bias = torch.zeros(64, dtype=torch.bool)
    mod = mods.or_masks(functools.partial(lambda t, b, h, q, kv: t[kv], bias), holder.mask, mods.document(holder.ids))
    mask = create(mod, None, None, 64, 64, BLOCK_SIZE=16)[:, :, 1:]
    assert mask.to("cpu").mask_mod is mask.mask_mod
    moved = mask.to("meta")
    assert moved.device == torch.device("meta")
    assert {t.device.type for t in survey(moved.mask_mod).tensors} == {"meta"}
    assert {t.device.type for t in survey(mask.mask_mod).tensors} == {"cpu"}
    assert holder.ids.device.type == "cpu"
    assert moved.shape == mask.shape


def test_pickle_and_deepcopy():
    mask = create(causal, 2, None, 70, 70, BLOCK_SIZE=16)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert other.mask_mod is causal
        assert torch.equal(other.to_dense(), mask.to_dense())
        assert torch.equal(other._adjust(50, 50).to_dense(), mask._adjust(50, 50).to_dense())
    part = mask[1, :, 2:]
    assert torch.equal(live_pairs(pickle.loads(pickle.dumps(part))), live_pairs(part))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(create(lambda b, h, q, kv: q >= kv, None, None, 16, 16))


class Segments(torch.nn.Module):
    """A mask_mod that reads a buffer and a number, and a mask of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(32) // 8)
        self.reach = 3
        self.mask = create(self.method, None, None, 32, 32, BLOCK_SIZE=16)

    def method(self, b, h, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & (q_idx - kv_idx < self.reach)


MODS_TO_COPY = {
    "method": lambda owner: owner.method,
    "closure": lambda owner: lambda b, h, q_idx, kv_idx: owner.method(b, h, q_idx, kv_idx),
    "partial": lambda owner: functools.partial(lambda own, *places: own.method(*places), owner),
    "closure in a partial": lambda owner: functools.partial(lambda last, *p: owner.method(*p) & (p[2] < last), 31),
    "slice": lambda owner: owner.method,
}


@pytest.mark.parametrize("change", ["ids", "reach"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", MODS_TO_COPY)
def test_a_copy_refuses_changes_of_what_its_mod_reads(kind, how, change):
    owner = Segments()
    mask = create(MODS_TO_COPY[kind](owner), None, None, 32, 32, BLOCK_SIZE=16)
    mask = mask[:, :, :1] if kind == "slice" else mask
    copied, other = how([mask, owner]) if how is copy.deepcopy else (how(mask), owner)
    # A function has no deep copy: its copy reads what the original reads.
    read_by_copy = owner if "closure" in kind else other
    accept(mask), accept(copied)
    change_of(read_by_copy, change)
    with pytest.raises(MutationError, match=change):
        accept(copied)
    if read_by_copy is not owner:
        accept(mask)
        change_of(owner, change)
    with pytest.raises(MutationError, match=change):
        accept(mask)


def accept(mask):
    mask.check_captures(trace(mask.mask_mod, "mask"))


def change_of(owner, what):
    if what == "ids":
        owner.ids[3] += 1
    else:
        owner.reach += 1


def test_a_model_is_copied_with_its_mask():
    model = Segments()
    state = {"ids": torch.arange(32) // 4}
    other = copy.deepcopy(model)
    assert torch.equal(live_pairs(other.mask), live_pairs(model.mask))
    other.load_state_dict(state)
    accept(model.mask)
    with pytest.raises(MutationError, match="ids"):
        accept(other.mask)
    model.ids[0] = 5
    with pytest.raises(MutationError, match="ids"):
        accept(copy.deepcopy(model).mask)


def test_a_mask_that_moved_refuses_changes():
    model = Segments()
    moved = model.mask.to("meta")
    assert moved.mask_mod is not model.method
    moved.mask_mod.__self__.reach = 9
    with pytest.raises(MutationError, match="reach"):
        accept(moved)
    model.ids[0] = 5
    with pytest.raises(MutationError, match="ids"):
        model.mask.to("meta")


@pytest.mark.parametrize(
    "copied", [lambda lists: lists, copy.deepcopy, lambda lists: pickle.loads(pickle.dumps(lists))]
)
def test_lists_that_are_made_when_asked_for(copied):
    want = create(causal, 2, None, 70, 70, BLOCK_SIZE=16).kv_runs
    lists = copied(LaterRunLists(functools.partial(tuple, want.tensors)))
    assert not {"partial", "full", "order"} & vars(lists).keys()
    assert all(map(torch.equal, lists.tensors, want.tensors))
    assert lists.order is lists.order
    with pytest.raises(AttributeError):
        lists.others  # noqa: B018


@pytest.mark.parametrize("transposed", [True, False])
def test_pytree(transposed):
    def build(window: int) -> BlockMask:
        ids = torch.zeros(70, dtype=torch.int32)
        mask = create(mods.and_masks(mods.document(ids), mods.sliding_window(window)), 2, None, 70, 70, BLOCK_SIZE=16)
        if not transposed:
            mask.q_runs = None
        return mask

    mask = build(9)
    leaves, context = mask._flatten()
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert len(leaves) == (11 if transposed else 6)
    again = BlockMask._unflatten(leaves, context)
    assert torch.equal(live_pairs(again), live_pairs(mask))
    assert repr(again) == repr(mask)
    pairs, same = mask._flatten_with_keys()
    assert same == context == build(9)._flatten()[1]
    assert context != build(8)._flatten()[1]
    assert [p.name for p, _ in pairs][-1] == "_closure_0"
    assert all(a is b for (_, a), b in zip(pairs, leaves, strict=True))
    moved = BlockMask._unflatten([leaf.to("meta") for leaf in leaves], context)
    assert moved.device.type == survey(moved.mask_mod).tensors[0].device.type == "meta"


def test_pytree_registration_as_users_do_it():
    class Mask(BlockMask):
        pass

    pytree.register_pytree_node(
        Mask, Mask._flatten, Mask._unflatten, flatten_with_keys_fn=Mask._flatten_with_keys, serialized_type_name="Mask"
    )
    mask = Mask.from_kv_blocks(ONE, ZERO, mask_mod=causal)
    doubled = pytree.tree_map(lambda t: t.clone(), {"mask": mask})["mask"]
    assert isinstance(doubled, Mask)
    assert torch.equal(doubled.to_dense(), mask.to_dense())


# PyTorch's masks.


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


# Pictures.


def test_repr():
    mask = create(mods.document_causal(offsets=torch.tensor([0, 300, 1000])), 2, None, 1000, 1000)
    assert_expected_inline(
        repr(mask),
        """\
BlockMask(document_causal, B=2, H=1, Q_LEN=1000, KV_LEN=1000, BLOCK_SIZE=(128, 128), full=14, partial=38, empty=76, sparsity=59.49%)
    (0, 0)
    ░░
    ██░░
    ░░░░░░
        ░░░░
        ░░██░░
        ░░████░░
        ░░██████░░
        ░░░░░░░░░░░░""",  # noqa: E501
    )


def test_string_is_laid_out_as_torchs():
    mod = mods.and_masks(causal, mods.padding(torch.tensor([300, 500])))
    ours = create(mod, 2, None, 512, 512)
    theirs = upstream.create_block_mask(mod, 2, None, 512, 512, "cpu")
    assert str(ours).replace("full=11, partial=8, empty=13, ", "").replace("░", "█") == str(theirs).replace("░", "█")
    assert_expected_inline(
        str(ours[1]).replace(" ", "."),
        """\
BlockMask(shape=(1,.1,.512,.512),.full=6,.partial=4,.empty=6,.sparsity=37.50%,.
(0,.0)
░░......
██░░....
████░░..
██████░░
)""",
    )


def test_pictures_of_every_size():
    mask = create(causal, None, None, 1000, 1000, BLOCK_SIZE=8)
    lines = mask.to_string().splitlines()
    assert (len(lines), len(lines[1])) == (19, 36)  # 125 blocks, 7 to a cell
    assert lines[1].startswith("░░ ")
    assert lines[18] == "██" * 17 + "░░"
    assert len(mask.to_string(grid_size=-1).splitlines()) == 126
    assert len(mask.to_string(grid_size=(4, 9)).splitlines()) == 5
    assert len(repr(mask).splitlines()) == 17
    assert "To print out more, set BlockMask.to_string(limit=N)" in mask.expand(3, 3).to_string()
    assert "..." not in mask.expand(2, 2).to_string()
    for lengths in ((0, 0), (0, 9), (9, 0), (1, 1)):
        small = create(causal, None, None, *lengths)
        head = f"BlockMask(causal, B=1, H=1, Q_LEN={lengths[0]}, KV_LEN={lengths[1]}, BLOCK_SIZE=(128, 128), "
        counts = "full=0, partial=1, empty=0" if lengths == (1, 1) else "full=0, partial=0, empty=0"
        picture = ["    ░░"] if lengths == (1, 1) else []
        assert repr(small).splitlines() == [f"{head}{counts}, sparsity=0.00%)", *picture]
        assert small.to_string().splitlines() == ["(0, 0)", *(line.strip() for line in picture)]


def test_repr_of_an_empty_slice():
    text = repr(create(causal, 2, None, 16, 16)[0:0])
    assert text == (
        "BlockMask(causal, B=0, H=1, Q_LEN=16, KV_LEN=16, BLOCK_SIZE=(128, 128), full=0, partial=0, empty=0, "
        "sparsity=0.00%)"
    )


@given(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30), st.integers(0, 9), st.integers(1, 9))
def test_a_cell_says_what_all_of_its_blocks_are(seed, rows, columns, down, across):
    coarse = torch.randint(3, (-(-rows // 4), -(-columns // 4)), generator=seeded(seed))
    noise = torch.randint(40, (rows, columns), generator=seeded(seed)) == 0
    kind = torch.where(noise, 1, coarse.repeat_interleave(4, 0).repeat_interleave(4, 1)[:rows, :columns])
    lines = picture.draw(runs_of(kind == 1), runs_of(kind == 2), columns, (down, across), 1)
    row_step, column_step = max(1, -(-rows // max(1, down))), max(1, -(-columns // across))
    cells = [[c.unique().tolist() for c in band.split(column_step, 1)] for band in kind.split(row_step)]
    expected = ["".join({(0,): " ", (2,): "█"}.get(tuple(c), "░") for c in row) for row in cells]
    assert lines == (expected if rows and columns else [])


def lower_triangle(blocks: int) -> BlockMask:
    """Return the mask of causal with this many blocks of one token, whose runs are fewer than its blocks."""
    below = torch.arange(blocks, dtype=torch.int32)
    diagonal = Runs(torch.arange(blocks + 1, dtype=torch.int32), torch.stack((below, below + 1), 1))
    full = Runs((torch.arange(blocks + 1) - 1).clamp(min=0).int(), torch.stack((0 * below, below), 1)[1:])
    lists = RunLists(diagonal, full, below.flip(0)[None])
    return BlockMask.from_runs(lists, None, 1, 1, (blocks, blocks), 1, causal)


def test_a_hundred_thousand_blocks_are_drawn_from_their_runs(monkeypatch):
    monkeypatch.setattr(Runs, "dense", None)  # would take 10 GB
    mask = lower_triangle(100_000)
    triangle = [("██" * i + "░░").ljust(40) for i in range(20)]
    assert mask.to_string().splitlines() == ["(0, 0)", *triangle]
    assert repr(mask).splitlines() == [
        "BlockMask(causal, B=1, H=1, Q_LEN=100000, KV_LEN=100000, BLOCK_SIZE=(1, 1), full=4999950000, partial=100000, "
        "empty=4999950000, sparsity=50.00%)",
        *("    " + "██" * i + "░░" for i in range(16)),
    ]
    cells, step = plot.image(*mask._rows_of(0), 100_000)
    assert (tuple(cells.shape), step) == ((2000, 2000, 3), (50, 50))
    monkeypatch.setattr(picture, "_CELLS", 64)  # in bands, and a few runs at a time
    monkeypatch.setattr(picture, "_RUNS", 777)
    assert mask.to_string().splitlines() == ["(0, 0)", *triangle]


def test_a_block_among_many_is_seen():
    one = Runs((torch.arange(10_001) > 9_000).int(), torch.tensor([[7_777, 7_778]]).int())
    none = Runs(torch.zeros(10_001).int(), torch.zeros(0, 2).int())
    order = torch.arange(10_000).int()[None]
    mask = BlockMask.from_runs(RunLists(one, none, order), None, 1, 1, (1_280_000, 1_280_000))
    assert "full=0, partial=1, empty=99999999, sparsity=99.999999%)" in repr(mask)
    assert [line for line in mask.to_string().splitlines()[1:] if line.strip()] == [" " * 30 + "░░" + " " * 8]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (100.0, "100.00"), (99.994, "99.99"), (99.996, "99.996"), (0.004, "0.004"), (49.996, "50.00")],
)
def test_percentages_of_0_and_100_are_true(value, text):
    assert mask_module._percent(value) == text


# Pairs.


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
    with pytest.raises(MutationError, match="captured tensor 'of_token' was changed in place"):
        mask.pairs()
    mask.mask_mod = mods.document(ids.to("meta"))
    with pytest.raises(
        DeviceError, match=r"mask_mod: found the captured tensor .* on meta, expected the device of the"
    ):
        mask.pairs()


# Plots.


def test_image_of_blocks():
    kind = torch.tensor([[2, 1, 0], [0, 2, 1]])
    cells, step = plot.image(runs_of(kind == 1), runs_of(kind == 2), 3)
    empty, partial, full = (list(colour) for colour in plot.COLOURS.values())
    assert step == (1, 1)
    assert cells.dtype == torch.uint8
    assert cells.tolist() == [[full, partial, empty], [empty, full, partial]]


def test_image_of_many_blocks_has_their_mean_colour():
    kind = torch.tensor([[2, 2, 0, 0, 1], [2, 2, 0, 1, 1], [0, 0, 0, 0, 0]])
    cells, step = plot.image(runs_of(kind == 1), runs_of(kind == 2), 5, (2, 3))
    empty, partial, full = plot.COLOURS.values()
    assert step == (2, 2)
    mixed = [round((3 * e + p) / 4) for e, p in zip(empty, partial, strict=True)]
    assert cells.tolist() == [[list(full), mixed, list(partial)], [list(empty)] * 3]


@pytest.mark.parametrize("grid", [(0, 0), (0, 3), (3, 0)])
def test_image_of_nothing(grid):
    none = runs_of(torch.zeros(grid, dtype=torch.bool))
    assert plot.image(none, none, grid[1])[0].shape == (*grid, 3)


def test_plot_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("Run pip install flexattn[plot]")):
        create(causal, None, None, 64, 64).plot()


@pytest.mark.parametrize(("place", "text"), [({"b": 2}, "b: found 2, expected 0 <= b < 2"), ({"h": -1}, "h: found -1")])
def test_plot_refuses_places_that_are_not_there(place, text):
    with pytest.raises(IndexRangeError, match=re.escape(text)):
        create(causal, 2, None, 64, 64).plot(**place)


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    for lengths in ((1000, 500), (0, 9), (1, 1)):
        given = Figure().subplots()
        mask = create(mods.padding(torch.tensor([1000, 200])), 2, None, *lengths)
        ax = mask.plot(given, b=1)
        ax.figure.canvas.draw()
        assert ax is given
        assert ax.get_xlim() == (0, max(1, lengths[1]))
        assert ax.get_ylim() == (max(1, lengths[0]), 0)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["empty", "partial", "full"]
        assert len(ax.images) == (lengths != (0, 9))
    mask = create(causal, None, None, 1000, 500)
    ax = mask.plot()
    assert ax.images[0].get_extent() == [0, 512, 1024, 0]
    assert ax.images[0].get_array().shape == (8, 4, 3)
    sys.modules["matplotlib.pyplot"].close(ax.figure)


@pytest.mark.parametrize("module", [mask_module, classify])
def test_examples_in_the_documentation(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 1


def test_a_mask_that_reads_b_is_not_repeated():
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + b, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert mask.expand(1, 3).shape == (1, 3, 64, 64)
    with pytest.raises(MaskError, match=r"B: found 2, expected 1, as the mask_mod reads b\. Build it with"):
        mask.expand(2, 1)


def test_lists_that_are_first_looked_at_in_a_transform_belong_to_none() -> None:
    want = create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=32).kv_runs.tensors
    lists = LaterRunLists(lambda: tuple(x.view(x.shape) for x in want))

    def number(x: Tensor) -> Tensor:
        return x * len(lists.order)

    torch.func.grad(number)(torch.ones(()))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in lists.tensors)


def test_a_mod_that_is_traced_again_is_the_same() -> None:
    """Its graph may have the name of another of its kind; old graphs are forgotten."""
    ids = torch.arange(40) // 9

    def mask_of(window: int) -> BlockMask:
        mod = mods.and_masks(mods.document(ids), mods.sliding_window(window))
        return create_block_mask(mod, None, None, 40, 40, device="cpu")

    mask_of(9)
    mask = mask_of(3)
    before = trace(mask.mask_mod, "mask").graph
    memo.clear()
    after = trace(mask.mask_mod, "mask")
    assert after.graph != before
    mask.check_captures(after)
    ids += 1
    with pytest.raises(MutationError, match="'of_token' was changed in place"):
        mask.check_captures(after)
    again = mask_of(3)
    memo.clear()
    other = trace(mods.and_masks(mods.document(ids), mods.sliding_window(4)), "mask")
    with pytest.raises(MutationError, match="'window' was 3 and is 4"):
        again.check_captures(other)
    with pytest.raises(MutationError, match="is something else"):
        again.check_captures(trace(mods.or_masks(mods.document(ids), mods.sliding_window(3)), "mask"))
