"""mask: properties, expand, copies and the pytree of a BlockMask, and its documented examples."""

from __future__ import annotations

import copy
import doctest
import pickle

import numpy as np
import pytest
import torch
from block_masks import ONE, ZERO, check_consistent, create, live_pairs, table_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import WAIT, Operations
from torch import Tensor
from torch.utils import _pytree as pytree

from flexattn import mods
from flexattn.block_mask import BlockMask
from flexattn.block_mask import mask as mask_module
from flexattn.block_mask.captures import survey
from flexattn.errors import DeviceError, MaskError
from flexattn.mask_build import create as create_module
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import causal, noop_mask

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


@pytest.mark.parametrize("mod", [causal, lambda b, h, q_idx, kv_idx: q_idx + 20 * h >= kv_idx])
def test_the_host_does_not_wait_to_expand_a_mask_that_it_built(mod):
    mask = create(mod, None, None if mod is causal else 2, 70, 70, BLOCK_SIZE=16)
    with Operations() as operations:
        wide = mask._expand(3, 2, is_exact=True)
    assert WAIT not in operations.others
    with Operations() as operations:
        other = mask.expand(3, 2)
    assert operations.others[WAIT] == 4, "the number of runs of each kind and direction"
    check_consistent(wide)
    assert all(map(torch.equal, wide.kv_runs.tensors, other.kv_runs.tensors))


def test_pickle_and_deepcopy():
    mask = create(causal, 2, None, 70, 70, BLOCK_SIZE=16)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert torch.equal(other.to_dense(), mask.to_dense())
        assert torch.equal(other._adjust(50, 50).to_dense(), mask._adjust(50, 50).to_dense())
    part = mask[1, :, 2:]
    assert torch.equal(live_pairs(pickle.loads(pickle.dumps(part))), live_pairs(part))
    assert copy.deepcopy(mask).mask_mod is copy.copy(mask).mask_mod is causal


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


@pytest.mark.parametrize("module", [mask_module, create_module])
def test_examples_in_the_documentation(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 1


def test_a_mask_that_reads_b_is_not_repeated():
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + b, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert mask.expand(1, 3).shape == (1, 3, 64, 64)
    with pytest.raises(MaskError, match=r"B: found 2, expected 1, as the mask_mod reads b\. Build it with"):
        mask.expand(2, 1)


def test_assigned_lists_are_those_of_no_mod():
    ids = torch.arange(300) // 40
    mask, other = (create(mods.document_causal(ids), None, None, 300, 300) for _ in range(2))
    assert mask.is_built and mask._prepared is not None
    mask.kv_runs, mask.q_runs = other.kv_runs, other.q_runs
    assert not mask.is_built and mask._prepared is None, "compiled graphs would take the old lists"
    assert not mask.to("meta").is_built and not copy.copy(mask).is_built and not copy.deepcopy(mask).is_built
    again = create(mods.document_causal(ids), None, None, 300, 300)
    again.q_runs = other.q_runs
    assert not again.is_built and again._prepared is None


def test_lengths_of_numpy_and_devices_that_do_not_exist() -> None:
    mask = create_block_mask(mods.causal, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    mask.seq_lengths = (np.int64(100), np.int32(128))
    assert mask.seq_lengths == (100, 128) and all(type(n) is int for n in mask.seq_lengths)
    for device in ("no such device", torch.float16, *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(DeviceError, match=r"device: found .*, expected a device of torch"):
            mask.to(device)  # type: ignore[arg-type]
