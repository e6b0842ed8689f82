"""runs: sets of blocks against dense arrays of them, and lists that are made when asked for."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from block_masks import create, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexattn.block_mask.runs import LaterRunLists, runs_of
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import causal


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


def test_lists_that_are_first_looked_at_in_a_transform_belong_to_none() -> None:
    want = create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=32).kv_runs.tensors
    lists = LaterRunLists(lambda: tuple(x.view(x.shape) for x in want))

    def number(x: Tensor) -> Tensor:
        return x * len(lists.order)

    torch.func.grad(number)(torch.ones(()))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in lists.tensors)
