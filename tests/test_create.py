"""create_block_mask against brute force and against PyTorch's, and what it refuses."""

from __future__ import annotations

import functools
import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import brute_force, classes
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import mods
from flexattn.block_mask import BlockMask
from flexattn.errors import ArgumentError, DeviceError, IndexRangeError, MaskError
from flexattn.graph.bound_mod import BoundMod
from flexattn.mask_build import boxes
from flexattn.mask_build import cache as mask_cache
from flexattn.mask_build import create as create_module
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.mods import causal, noop_mask
from flexattn.process import progress
from flexattn.trace.trace import trace

Mod = Callable[..., Tensor]
FIELDS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
create = functools.partial(create_block_mask, device="cpu")


def random_mods() -> st.SearchStrategy[Mod]:
    """Draw masks of every kind: constants, one index, bands, tables."""

    def table(seed: int, share: float) -> Mod:
        bits = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) < share
        return lambda b, h, q_idx, kv_idx: bits[b, h, q_idx, kv_idx]

    def rows(seed: int) -> Mod:
        bits = torch.rand(64, generator=torch.Generator().manual_seed(seed)) < 0.7
        return lambda b, h, q_idx, kv_idx: bits[q_idx]

    def documents(seed: int, n: int) -> Mod:
        ids = torch.randint(n, (64,), generator=torch.Generator().manual_seed(seed)).sort().values
        return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    number, seed = st.integers(0, 70), st.integers(0, 9)
    leaf = st.one_of(
        st.sampled_from([causal, noop_mask, lambda b, h, q_idx, kv_idx: q_idx + h > kv_idx * (b + 1)]),
        number.map(lambda n: lambda b, h, q_idx, kv_idx: kv_idx < n),
        number.map(lambda n: lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= n),
        number.map(lambda n: lambda b, h, q_idx, kv_idx: kv_idx < n * b),
        seed.map(rows),
        st.builds(table, seed, st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0])),
        st.builds(documents, seed, st.integers(1, 6)),
    )
    return st.one_of(leaf, st.builds(mods.and_masks, leaf, leaf), st.builds(mods.or_masks, leaf, leaf))


batch, heads, length = st.integers(1, 4), st.integers(1, 3), st.integers(1, 64)
block = st.one_of(st.integers(1, 80), st.sampled_from([16, 32]))


@settings(max_examples=120)
@given(
    random_mods(), batch, heads, length, length, block, block, st.booleans(), st.sampled_from([7, 300, 2**21]),
    st.sampled_from(["boxes", "no boxes"]), st.sampled_from([2, 30, 2**18]),
)  # fmt: skip
def test_equal_to_brute_force_and_to_torch(mod, B, H, Q, KV, q_block, kv_block, separate, pairs, way, together):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(create_module._PAIRS, "cpu", pairs)
        patch.setattr(boxes, "_TOGETHER", together)
        if way == "no boxes":
            patch.setattr(create_module, "DTYPES", frozenset())
        mask = create(mod, B, H, Q, KV, BLOCK_SIZE=(q_block, kv_block), separate_full_blocks=separate)
    some, every = classes(brute_force(mod, B, H, Q, KV), (q_block, kv_block))
    partial, full = mask._blocks()
    assert torch.equal(full, every & separate)
    assert torch.equal(partial, some & ~full)
    transposed = mask._blocks(transposed=True)
    assert torch.equal(transposed[0].mT, partial)
    assert torch.equal(transposed[1].mT, full)

    theirs = upstream.create_block_mask(mod, B, H, Q, KV, "cpu", (q_block, kv_block), separate_full_blocks=separate)
    for name in FIELDS:
        ours, expected = getattr(mask, name), getattr(theirs, name)
        assert (ours is None) == (expected is None), name
        assert ours is None or (ours.dtype == torch.int32 and torch.equal(ours, expected)), name
    assert torch.equal(mask.to_dense(), theirs.to_dense())
    assert mask.shape == theirs.shape
    assert not mask.full_overhangs


@settings(max_examples=40)
@given(random_mods(), batch, heads, length, length)
def test_create_mask_is_the_dense_mask(mod, B, H, Q, KV):
    assert torch.equal(create_mask(mod, B, H, Q, KV, device="cpu"), brute_force(mod, B, H, Q, KV))


def test_create_mask_of_a_score_mod_tells_where_it_is_not_minus_infinity():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score + 1, -float("inf"))

    dense = create_mask(mod, 2, None, 3, 3, device="cpu")
    assert dense.shape == (2, 1, 3, 3)
    assert torch.equal(dense[1, 0], torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("size", [1, 4, 128])
def test_short_and_empty_sequences(lengths, size):
    mask = create(causal, 2, None, *lengths, BLOCK_SIZE=size)
    assert mask.shape == (2, 1, *lengths)
    grid = tuple(-(-n // size) for n in lengths)
    assert mask.kv_indices.shape == (2, 1, *grid)
    assert mask.q_indices.shape == (2, 1, *grid[::-1])
    assert 0 <= mask.sparsity() <= 100
    assert torch.equal(mask.to_dense() > 0, classes(brute_force(causal, 2, 1, *lengths), (size, size))[0]) or 0 in grid
    assert create_mask(causal, 2, None, *lengths, device="cpu").shape == (2, 1, *lengths)


@pytest.mark.parametrize("spt", [False, True])
def test_dq_write_order_is_torchs(spt):
    bits = torch.rand(5, 7) < 0.4

    def mod(b, h, q_idx, kv_idx):
        return bits[q_idx // 16, kv_idx // 16]

    arguments = (mod, 2, 1, 80, 112, "cpu", 16)
    ours = create_block_mask(*arguments, compute_dq_write_order=True, dq_kv_order=spt)
    theirs = upstream.create_block_mask(*arguments, compute_dq_write_order=True, dq_kv_order=spt)
    assert torch.equal(ours.dq_write_order, theirs.dq_write_order)
    assert torch.equal(ours.dq_write_order_full, theirs.dq_write_order_full)
    assert (ours.dq_kv_order, ours.dq_kv_order_spt) == (theirs.dq_kv_order, theirs.dq_kv_order_spt)


@pytest.mark.parametrize("block", [128, (64, 5000)])
def test_pairs_are_evaluated_in_bounded_chunks(monkeypatch, block):
    table = torch.rand(300, 700, generator=torch.Generator().manual_seed(0)) < 0.001
    evaluated = []

    def noting(self, *index, call=BoundMod.__call__):
        evaluated.append(torch.broadcast_shapes(*(i.shape for i in index)).numel())
        return call(self, *index)

    monkeypatch.setitem(create_module._PAIRS, "cpu", 2**12)
    monkeypatch.setattr(create_module, "DTYPES", frozenset())  # nothing is bounded
    monkeypatch.setattr(BoundMod, "__call__", noting)
    create(lambda b, h, q_idx, kv_idx: table[q_idx, kv_idx], None, None, 300, 700, BLOCK_SIZE=block)
    assert max(evaluated) <= 2**12
    assert sum(evaluated) >= 300 * 700


# Masks without structure.


def hashed(b, h, q_idx, kv_idx):
    return ((q_idx * 1664525) ^ (kv_idx * 22695477)) % 7 < 3


def mixed(b, h, q_idx, kv_idx):
    return (q_idx * 7919 + kv_idx * 104729) % 1000 % 2 == 0


def checkered(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


def checkered_by_4(b, h, q_idx, kv_idx):
    return (q_idx // 4 + kv_idx // 4) % 2 == 0


def striped(b, h, q_idx, kv_idx):
    return (q_idx // 16) % 2 == 0


def evaluated_pairs(monkeypatch, *arguments, **rest) -> int:
    """Return how many pairs building a mask evaluates."""
    pairs = []

    def noting(self, *index, call=BoundMod.__call__):
        pairs.append(torch.broadcast_shapes(*(i.shape for i in index)).numel())
        return call(self, *index)

    mask_cache.clear()
    with monkeypatch.context() as patch:
        patch.setattr(BoundMod, "__call__", noting)
        create(*arguments, **rest)
    return sum(pairs)


def test_partial_blocks_are_seen_by_a_few_of_their_pairs(monkeypatch):
    assert evaluated_pairs(monkeypatch, hashed, None, None, 1024, 1024) <= 64 * 256
    rare = lambda b, h, q_idx, kv_idx: (q_idx * 1664525) ^ (kv_idx * 22695477) == 77  # noqa: E731
    assert evaluated_pairs(monkeypatch, rare, None, None, 1024, 1024) <= 1024 * 1024 + 64 * 256


def test_small_blocks_are_evaluated_without_a_bound_for_each(monkeypatch):
    for size in (1, 2, 8):
        mask = create(hashed, None, None, 256, 256, BLOCK_SIZE=size)
        assert mask.build_counts.boxes < 100 and mask.build_counts.samples == 0
        assert evaluated_pairs(monkeypatch, hashed, None, None, 256, 256, BLOCK_SIZE=size) == 256 * 256
        assert torch.equal(mask.to_dense().bool()[0, 0], create_mask(hashed, 1, 1, 256, 256, "cpu")[0, 0]) or size > 1


def test_memory_does_not_grow_with_a_mask_without_structure(monkeypatch):
    """Only what is returned does, and here that is little: all blocks are partial."""
    for name, size in (("_TOGETHER", 2**10), ("_CHUNK", 2**10), ("_SAMPLED", 2**9), ("MOST_RUNS", 2**11)):
        monkeypatch.setattr(boxes, name, size)

    def peak(length: int) -> int:
        mask_cache.clear()
        tracemalloc.start()
        create(mixed, None, None, length, length, BLOCK_SIZE=16)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    create(mixed, None, None, 64, 64)  # what is imported and traced once
    assert peak(4096) < 24 * 65_536  # bytes per block


@pytest.mark.parametrize(("mod", "size"), [(checkered, 1), (striped, 16), (checkered_by_4, 4)])
def test_a_mask_of_too_many_runs_names_the_block_size_to_use(monkeypatch, mod, size):
    monkeypatch.setattr(boxes, "MOST_RUNS", 150)
    monkeypatch.setattr(boxes, "_TOGETHER", 64)
    table = create_mask(mod, 1, 1, 512 if size == 16 else 128, 512 if size == 16 else 128, "cpu")[0, 0]
    noisy = lambda b, h, q_idx, kv_idx: table[q_idx, kv_idx]  # noqa: E731
    expected = (
        rf"BLOCK_SIZE: found \({size}, {size}\), with which this mask is more than 150 runs of blocks, .* Use \((\d+), "
    )
    with pytest.raises(ArgumentError, match=expected) as refused:
        create(noisy, None, None, *table.shape, BLOCK_SIZE=size)
    use = int(re.search(r"Use \((\d+), ", str(refused.value))[1])
    mask = create(noisy, None, None, *table.shape, BLOCK_SIZE=use)
    assert sum(mask.counts()) == (len(table) // use) ** 2


def test_a_build_that_takes_long_tells_how_far_it_is(monkeypatch, capsys):
    create(hashed, None, None, 256, 256, BLOCK_SIZE=16)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    mask_cache.clear()
    create(hashed, None, None, 256, 256, BLOCK_SIZE=16)
    lines = capsys.readouterr().err.splitlines()
    shape = r"flexattn create_block_mask: \d+% of 256 blocks after \d+ s, \d+ evaluated pair by pair"
    assert lines and all(re.fullmatch(shape, line) for line in lines)


def test_a_large_mask_is_stored_as_runs():
    mask = create(mods.sliding_window(64), None, None, 16384, 16384, BLOCK_SIZE=64)
    assert sum(t.numel() * t.element_size() for t in (*mask.kv_runs.tensors, *mask.q_runs.tensors)) < 20 * 256 * 4
    assert mask.counts() == (0, 511, 256 * 256 - 511)


def test_batches_and_heads_that_the_mod_does_not_read_are_classified_once():
    mask = create(causal, 8, 4, 64, 64, BLOCK_SIZE=16)
    assert mask.build_counts.boxes == create(causal, None, None, 64, 64, BLOCK_SIZE=16).build_counts.boxes
    assert mask.kv_num_blocks.shape == (8, 4, 4)
    assert torch.equal(mask.kv_indices[7, 3], mask.kv_indices[0, 0])
    assert mask.kv_runs.order.shape == (32, 4)


def test_a_long_mask_costs_its_boundary():
    lengths = torch.randint(200, 1500, (200,), generator=torch.Generator().manual_seed(0))
    ids = torch.repeat_interleave(torch.arange(200, dtype=torch.int32), lengths)[:65536]
    mask = create(mods.and_masks(causal, mods.document(ids)), None, None, 65536, 65536)
    assert mask.build_counts.blocks == 0
    assert mask.build_counts.boxes + mask.build_counts.samples < 20_000  # of 262,144 blocks
    assert sum(mask.counts()[:2]) < 6000


def test_only_undecided_blocks_are_evaluated():
    bits = torch.ones(256, 256, dtype=torch.bool)
    bits[200, 100] = False
    mask = create(
        lambda b, h, q_idx, kv_idx: bits[q_idx, kv_idx] & (q_idx >= kv_idx), None, None, 256, 256, BLOCK_SIZE=16
    )
    assert mask.counts() == (119, 17, 120)
    assert 0 < mask.build_counts.blocks <= 120


def test_masks_without_captures_are_built_on_the_host_for_any_device():
    mask = create_block_mask(causal, None, None, 64, 64, device="meta", BLOCK_SIZE=16)
    assert mask.device.type == "meta"
    assert mask.kv_runs.full.runs.shape == (3, 2)


def test_literal_tensors_go_where_the_mask_is():
    def mod(b, h, q_idx, kv_idx):
        return kv_idx < torch.tensor([[0, 7, 9, 20]]).sum(0)[q_idx % 4] + torch.tensor(list(range(40)))[q_idx % 40]

    assert any(c.literal for c in trace(mod, "mask").graph.captures)
    here = create(mod, None, None, 64, 64, BLOCK_SIZE=16)
    there = create_block_mask(mod, None, None, 64, 64, device="meta", BLOCK_SIZE=16)
    assert here.counts()[1] > 0
    assert there.device.type == "meta"
    assert there.kv_runs.full.runs.shape == here.kv_runs.full.runs.shape


def test_dtypes_that_have_no_bounds_are_evaluated():
    ids = torch.arange(64).to(torch.uint16)
    mask = create(lambda b, h, q_idx, kv_idx: ids[q_idx].int() >= ids[kv_idx].int(), None, None, 64, 64, BLOCK_SIZE=16)
    assert mask.counts() == create(causal, None, None, 64, 64, BLOCK_SIZE=16).counts()
    assert mask.build_counts.boxes == 0


def test_longest_rows_come_first():
    order = create(causal, None, None, 64, 64, BLOCK_SIZE=16).kv_runs.order
    assert order.tolist() == [[3, 2, 1, 0]]


def test_device_is_that_of_the_captured_tensors():
    ids = torch.zeros(8, dtype=torch.int32)
    assert create_block_mask(mods.document(ids), None, None, 8, 8).device == torch.device("cpu")
    with pytest.raises(DeviceError, match=re.escape("captured tensor 'ids': found cpu, expected meta. Move ids")):
        create_block_mask(mods.document(ids), None, None, 8, 8, device="meta")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"Q_LEN": -1}, ArgumentError, "Q_LEN: found -1, expected an int >= 0. Take it from the shape"),
        ({"KV_LEN": 2.0}, ArgumentError, "KV_LEN: found 2.0, expected an int >= 0"),
        ({"Q_LEN": 2**30 + 1}, ArgumentError, "Q_LEN: found 1073741825, expected at most 1073741824. Split it"),
        ({"B": 0}, ArgumentError, "B: found 0, expected an int >= 1 or None"),
        ({"Q_LEN": torch.tensor(8)}, ArgumentError, "Q_LEN: found tensor(8), expected an int >= 0. Pass int(Q_LEN)."),
        ({"B": np.bool_(True)}, ArgumentError, "B: found np.True_, expected an int >= 1 or None"),
        ({"H": True}, ArgumentError, "H: found True, expected an int >= 1 or None"),
        ({"BLOCK_SIZE": 0}, ArgumentError, "BLOCK_SIZE: found 0, expected a positive int, or two: (query, key)"),
        ({"BLOCK_SIZE": (16, 16, 16)}, ArgumentError, "BLOCK_SIZE: found (16, 16, 16), expected a positive int"),
        ({"dq_kv_order": torch.zeros(1)}, ValueError, "dq_kv_order: found Tensor, expected a bool"),
        ({"mask_mod": lambda s, b, h, q, kv: s}, AssertionError, "It looks like a score_mod"),
        ({"mask_mod": lambda b, h, q, kv: q - kv}, AssertionError, "expected torch.bool"),
    ],
)
def test_refusals(change, error, text):
    arguments = {"mask_mod": causal, "B": None, "H": None, "Q_LEN": 8, "KV_LEN": 8} | change
    with pytest.raises(error, match=re.escape(text)):
        create(**arguments)


def test_sizes_of_numpy():
    sizes = np.array([2, 3, 20, 24])
    made = create_block_mask(causal, *sizes, device="cpu", BLOCK_SIZE=sizes[2])
    assert (made.B, made.H, made.seq_lengths, made.BLOCK_SIZE) == (2, 3, (20, 24), (20, 20))
    assert {type(n) for n in (made.B, made.H, *made.seq_lengths, *made.BLOCK_SIZE)} == {int}
    assert flexattn.create_mask(causal, *sizes, device="cpu").shape == (2, 3, 20, 24)


@pytest.mark.parametrize("of", ["b", "h"])
def test_without_b_and_h_the_mask_is_of_batch_0_and_head_0(of):
    """As in PyTorch. transformers compares such a mask of a dense table with its own."""
    allowed = torch.rand(1, 1, 150, 150) < 0.1

    def table(b, h, q, kv):
        return allowed[b, 0, q, kv] if of == "b" else allowed[0, h, q, kv]

    makers = create_block_mask, upstream.create_block_mask
    ours, theirs = (make(table, None, None, 150, 150, device="cpu") for make in makers)
    assert ours.shape == theirs.shape == (1, 1, 150, 150)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(create_mask(table, None, None, 150, 150, device="cpu"), allowed)
    x = torch.randn(1, 1, 150, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, allowed)
    torch.testing.assert_close(flexattn.flex_attention(x, x, x, block_mask=ours), expected.nan_to_num())
    more = x.expand(2, 2, -1, -1)
    with pytest.raises(MaskError, match=f"which reads {of}, expected that of query, 2"):
        flexattn.flex_attention(more, more, more, block_mask=ours)


def test_compile_flag_warns():
    with pytest.warns(DeprecationWarning, match="_compile on create_block_mask does nothing"):
        create(causal, None, None, 8, 8, _compile=True)


@pytest.mark.gpu
def test_on_a_gpu():
    ids = torch.arange(40, device="cuda").repeat_interleave(25)
    mod = mods.document_causal(ids)
    mask = create_block_mask(mod, None, None, 1000, 1000, BLOCK_SIZE=64)
    assert mask.device == ids.device
    other = create(mods.document_causal(ids.cpu()), None, None, 1000, 1000, BLOCK_SIZE=64)
    assert torch.equal(mask.to("cpu").to_dense(), other.to_dense())
    assert mask.counts() == other.counts()
    assert mask.sparsity() == other.sparsity()
    assert torch.equal(mask[:, :, 3:7].to_dense().cpu(), other[:, :, 3:7].to_dense())
    assert torch.equal(mask._adjust(500, 700).to_dense().cpu(), other._adjust(500, 700).to_dense())
    assert other.to("cuda").mask_mod(0, 0, ids[:2], ids[:2]).device == ids.device


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_torch_built_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert create_block_mask(mods.causal, None, None, 64, 64).device.type == "cpu"


def test_an_index_outside_of_a_captured_tensor_is_named():
    ids = torch.zeros(20, dtype=torch.int32)

    def same_document(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    text = (
        r"mask_mod same_document \(.*test_create\.py:\d+\): found index 31 in dimension 0 of the captured tensor "
        r"`ids`, expected -20 to 19, as its size is 20\. Pad `ids` up to the lengths of query and key, or clamp"
    )
    ones = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for build in (
        lambda: create_block_mask(same_document, None, None, 32, 32, device="cpu", BLOCK_SIZE=16),
        lambda: create_mask(same_document, None, None, 32, 32, device="cpu"),
        lambda: BlockMask.from_blocks(ones, None, (32, 32), 16, same_document).pairs(),
    ):
        with pytest.raises(IndexRangeError, match=text):
            build()
    with pytest.raises(IndexRangeError, match=r"found index -21 in dimension 0 of the captured tensor `ids`"):
        create_mask(lambda b, h, q_idx, kv_idx: ids[-1 - q_idx] == ids[0], None, None, 21, 1, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_storages_of_captured_tensors_stay_resizable(dtype):
    """Tensor.numpy forbids it. FSDP resizes the storages of parameters."""
    limit = torch.ones(70).to(dtype)
    create_block_mask(lambda b, h, q, kv: (limit[kv] > 0) & (q >= kv), None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
    assert limit.untyped_storage().resizable()
