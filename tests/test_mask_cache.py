"""The same mask again: the same lists without work, and never those of tensors that have changed since."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from flexattn import create_block_mask
from flexattn.block_mask import BlockMask
from flexattn.mask_build import cache as mask_cache


@pytest.fixture(autouse=True)
def empty():
    mask_cache.clear()
    yield
    mask_cache.clear()


def documents(ids):
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def window(width):
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < width


def build(mod, length=256, **rest) -> BlockMask:
    return create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=16, **rest)


def ids_of(seed: int) -> torch.Tensor:
    return torch.randint(4, (256,), generator=torch.Generator().manual_seed(seed)).sort().values


def test_masks_without_tensors_are_found_at_once():
    first = build(window(9))
    again = build(window(9))
    assert again.kv_runs is first.kv_runs and again.q_runs is first.q_runs
    assert again is not first and again.build_counts == first.build_counts
    assert mask_cache.stats() == {"hits": 1, "builds": 1}


@pytest.mark.parametrize(
    "change",
    [{"length": 240}, {"separate_full_blocks": False}, {"mod": window(10)}, {"mod": window(9.0)}],
    ids=lambda c: next(iter(c)),
)
def test_what_changes_the_lists_is_in_the_key(change):
    first = build(window(9))
    other = build(**({"mod": window(9)} | change))
    assert other.kv_runs is not first.kv_runs
    assert mask_cache.stats()["hits"] == 0


def test_tensors_are_remembered_from_the_second_build_on():
    """Until then nothing is kept of them: a new tensor in each step costs no copy."""
    ids = ids_of(0)
    masks = [build(documents(ids)) for _ in range(4)]
    assert mask_cache.stats() == {"hits": 2, "builds": 2}
    assert masks[3].kv_runs is masks[2].kv_runs is masks[1].kv_runs
    assert build(documents(ids)).mask_mod is not masks[0].mask_mod


def test_two_masks_of_one_code_stand_side_by_side():
    one, other = ids_of(0), ids_of(1)
    for _ in range(4):
        a, b = build(documents(one)), build(documents(other))
    assert a.kv_runs is not b.kv_runs
    assert mask_cache.stats() == {"hits": 4, "builds": 4}


def counted(write) -> None:
    """Build until the mask is remembered, write into its tensor, and compare with a mask of a fresh one."""
    ids = ids_of(0)
    for _ in range(3):
        build(documents(ids))
    assert mask_cache.stats()["hits"] == 1
    write(ids)
    ours, fresh = build(documents(ids)), build(documents(ids.clone()))
    assert torch.equal(ours.to_dense(), fresh.to_dense())
    assert mask_cache.stats()["hits"] == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda ids: ids.fill_(1),
        lambda ids: ids.data.fill_(1),
        lambda ids: np.copyto(ids.numpy(), 1),
    ],
    ids=["in place", "data", "numpy"],
)
def test_every_write_is_seen_also_one_that_counts_no_version(write):
    counted(write)


def test_a_prologue_is_part_of_the_key():
    ids = ids_of(0)

    def forward(b, h, q_idx, kv_idx):
        return ids.roll(3)[q_idx] == ids.roll(3)[kv_idx]

    def backward(b, h, q_idx, kv_idx):
        return ids.flip(0)[q_idx] == ids.flip(0)[kv_idx]

    for _ in range(3):
        ours, other = build(forward), build(backward)
    assert torch.equal(ours.to_dense(), build(documents_both(ids.roll(3))).to_dense())
    assert torch.equal(other.to_dense(), build(documents_both(ids.flip(0))).to_dense())


def documents_both(ids):
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_what_only_the_cache_keeps_goes_with_the_users_tensors():
    create_block_mask(documents(ids_of(0)), None, None, 256, 256, device="cpu", BLOCK_SIZE=16)
    before = live_tensors()
    ids = [ids_of(seed) for seed in range(20)]
    for _ in range(2):
        for each in ids:
            build(documents(each))
    assert mask_cache.memory() > 20 * ids[0].nbytes, "lists and copies"
    del ids, each
    assert live_tensors() <= before
    assert mask_cache.memory() == 0 and not mask_cache._built


def test_masks_and_copies_take_a_bounded_number_of_bytes(monkeypatch):
    monkeypatch.setattr(mask_cache, "MEMORY", 40_000)
    monkeypatch.setattr(mask_cache, "_LARGEST", 10_000)
    ids = [ids_of(seed) for seed in range(30)]
    for each in ids:
        for _ in range(2):
            build(documents(each))
    assert 20_000 < mask_cache.memory() <= 40_000
    assert build(documents(ids[-1])).kv_runs is build(documents(ids[-1])).kv_runs
    assert mask_cache.stats()["hits"] == 2, "the last ones are there"
    kept = mask_cache.memory()
    large = torch.zeros(2000, dtype=torch.int64)
    for _ in range(3):
        build(documents(large))
    assert mask_cache.memory() == kept and mask_cache.stats()["hits"] == 2


def test_masks_without_tensors_are_bounded_too():
    for width in range(100):
        build(window(width), length=32)
    assert len(mask_cache._built) == 64
    build(window(99), length=32)
    build(window(36), length=32)
    assert mask_cache.stats()["hits"] == 2
    build(window(35), length=32)
    assert mask_cache.stats()["hits"] == 2


def test_lists_are_counted_in_bytes():
    ids = ids_of(0)
    mask = build(documents(ids))
    assert mask_cache.memory() == sum(t.nbytes for runs in (mask.kv_runs, mask.q_runs) for t in runs.tensors)
    build(documents(ids))
    assert mask_cache.memory() == ids.nbytes + sum(t.nbytes for r in (mask.kv_runs, mask.q_runs) for t in r.tensors)


def test_inference_tensors_are_never_remembered():
    with torch.inference_mode():
        ids = ids_of(0)
        for _ in range(3):
            build(documents(ids))
    assert mask_cache.stats()["hits"] == 0
