"""slices: indexing and cropping a BlockMask, against dense arrays and PyTorch's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from block_masks import FULL_FIELDS, PARTIAL_FIELDS, check_consistent, create, live_pairs, table_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as upstream

from flexattn import flex_attention, mods
from flexattn.block_mask import BlockMask
from flexattn.errors import ArgumentError, IndexRangeError, MaskError, UnsupportedError
from flexattn.mask_build import create as create_module
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.mods import causal, noop_mask
from flexattn.trace.trace import trace

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


@pytest.mark.parametrize("queries", [64, 50, 48, 40, 16, 1, 0])
def test_assigned_lengths(queries: int):
    """As in decoding loops that assign `mask.seq_lengths = (1, N)`."""
    mask, whole = (create(causal, None, None, 64, 60, BLOCK_SIZE=16) for _ in range(2))
    mask.seq_lengths = (queries, 60)
    check_consistent(mask)
    cut = whole._adjust(queries, 60)
    assert mask.shape == cut.shape and torch.equal(mask.to_dense(), cut.to_dense())
    assert mask.is_built and mask.full_overhangs == cut.full_overhangs
    assert torch.equal(mask.full_kv_num_blocks, cut.full_kv_num_blocks)


@pytest.mark.parametrize("lengths", [(40, 60), (16, 60), (1, 60), (50, 33), (64, 64), (64, 20)])
@pytest.mark.parametrize("compiles", [False, True])
def test_calls_before_and_after_an_assignment(lengths: tuple[int, int], compiles: bool):
    mask = create(causal, None, None, 50, 60, BLOCK_SIZE=16).prepare()
    q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (64, 64, 64))

    def call(M: int, N: int) -> torch.Tensor:
        return flex_attention(q[:, :, :M], k[:, :, :N], v[:, :, :N], block_mask=mask)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call
    call(50, 60)
    mask.seq_lengths = lengths
    mask.prepare()
    M, N = lengths
    attended = torch.ones(M, N, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, :M], k[:, :, :N], v[:, :, :N], attended)
    for _ in range(2):
        torch.testing.assert_close(call(M, N), expected)


def test_an_assignment_that_fails_changes_nothing():
    mask = create(causal, None, None, 60, 60, BLOCK_SIZE=16)
    mask.dq_kv_order = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="dq_kv_order"):
        mask.seq_lengths = (62, 60)
    assert mask.seq_lengths == (60, 60) and mask.is_built


def test_longer_assigned_lengths():
    mask = create(causal, None, None, 50, 60, BLOCK_SIZE=16)
    for lengths in ((65, 60), (50, 65)):
        with pytest.raises(MaskError, match=r"seq_lengths: found .*, expected at most \(64, 64\)"):
            mask.seq_lengths = lengths
    with pytest.raises(ArgumentError, match="seq_lengths: found 3"):
        mask.seq_lengths = 3
    with pytest.raises(MaskError, match=r"BLOCK_SIZE: found .* blocks of \(16, 16\)"):
        mask.BLOCK_SIZE = (32, 32)
    assert mask.is_built and mask.seq_lengths == (50, 60)
    mask.seq_lengths = (64, 40)
    assert mask.seq_lengths == (64, 40) and not mask.is_built
    assert mask.build_counts is None and mask.reach is None
    check_consistent(mask)


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
        for module in (create_module, upstream)
    )
    for act in (lambda m: m[:, :, :2], lambda m: m._adjust(64, 64), lambda m: m.to("cpu")):
        assert act(ours).dq_kv_order_spt is True
        # torch leaves entries past the counts undefined, and so do we: compare those that count
        a, b = act(ours), act(theirs)
        counted = torch.arange(a.q_indices.shape[-1]) < a.q_num_blocks[..., None]
        assert torch.equal(a.dq_write_order[counted], b.dq_write_order[counted])
