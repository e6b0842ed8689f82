"""split: quotients and remainders of sums are the same without multiples of the divisor, and their bounds tighter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mod_grammar import build, classify_boxes, on_grid
from test_bound import EMPTY, UNKNOWN, brute_force
from torch import Tensor

from flexattn import create_block_mask, create_mask, mods
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.interval_bounds import bound
from flexattn.graph.quotients import split, split_for_bounds
from flexattn.layout import TiledGrid
from flexattn.mask_build.boxes import classify_by_boxes
from flexattn.trace.trace import trace

FACTORS = st.integers(-20, 20)


@given(
    st.sampled_from(["floordiv", "mod"]), st.integers(1, 12), st.tuples(FACTORS, FACTORS, FACTORS), st.integers(1, 6),
    st.integers(-30, 30),
)  # fmt: skip
def test_values_are_the_same(op: str, divisor: int, factors: tuple[int, int, int], inner: int, compared: int) -> None:
    def write(bu: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        q, kv = (x.cast(torch.int64) for x in (q, kv))  # with int32 the sums may wrap around, and are left as they are
        dividend = q * factors[0] + kv * factors[1] + q.apply("floordiv", inner) * factors[2] - 7
        return dividend.apply(op, divisor) < compared

    mod = build(write)
    found = BoundMod(split(mod.graph))
    assert found.graph != mod.graph or all(f % divisor for f in factors if f)
    i, j = torch.arange(40), torch.arange(33)
    assert torch.equal(on_grid(found, 0, 0, i, j), on_grid(mod, 0, 0, i, j))
    boxes = classify_by_boxes(mod, 1, 1, 40, 33, (8, 8)).dense()
    expected = brute_force(mod, 1, 1, 40, 33, (8, 8))
    assert (boxes == expected)[boxes != UNKNOWN].all()


def test_bounds_are_tighter() -> None:
    def write(bu: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q.apply("mod", 8).cast(torch.int64) + kv.cast(torch.int64) * 128).apply("mod", 128) > 7

    mod = build(write)
    box = [[0, 0, 0, 0, 0, 127, 0, 127]]
    before, after = (classify_boxes(bound(g), (), (), box)[0] for g in (mod.graph, split(mod.graph)))
    assert (before, after) == (UNKNOWN, EMPTY)


@pytest.mark.parametrize("value", [2**40, 2**62, 2**63 - 1])
def test_sums_that_may_wrap(value: int) -> None:
    def write(bu: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        wide = q.cast(torch.int64) * value
        return (wide + kv.cast(torch.int64) * 24).apply("mod", 12) > 5

    mod = build(write)
    found = classify_by_boxes(mod, 1, 1, 40, 40, (4, 4)).dense()
    assert (found == brute_force(mod, 1, 1, 40, 40, (4, 4)))[found != UNKNOWN].all()


TABLE = torch.randint(0, 4, (24 * 40,), generator=torch.Generator().manual_seed(0))


def same_label(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (TABLE[q_idx] == TABLE[kv_idx]) & ((q_idx % 40 - kv_idx % 40).abs() < 9)


@pytest.mark.parametrize(
    ("grid", "mod"),
    [
        (TiledGrid((24, 40), (4, 8)), mods.natten_2d(24, 40, 5)),
        (TiledGrid((24, 40), (5, 7)), mods.natten_2d(24, 40, (3, 7))),
        (TiledGrid((6, 10, 16), (2, 4, 4)), mods.natten_3d(6, 10, 16, 3)),
        (TiledGrid((24, 40), (4, 8)), same_label),
    ],
    ids=["2d", "ragged", "3d", "captured"],
)
def test_masks_in_tiles(grid: TiledGrid, mod: Callable[..., Tensor]) -> None:
    S = grid.tokens
    found = create_block_mask(grid.mod(mod), None, None, S, S, device="cpu", BLOCK_SIZE=32)
    order = grid.order()
    dense = create_mask(mod, None, None, S, S, device="cpu")[0, 0][order][:, order]
    blocks = dense.view(S // 32, 32, S // 32, 32)
    some, every = blocks.any(3).any(1), blocks.all(3).all(1)
    assert torch.equal(found.to_dense()[0, 0].bool(), some)
    assert found.counts()[0] == int(every.sum())


@pytest.mark.parametrize(
    ("grid", "mod", "most"),
    [
        (TiledGrid((128, 128), (16, 8)), mods.natten_2d(128, 128, 13), 0),
        (TiledGrid((32, 32, 32), (8, 4, 4)), mods.natten_3d(32, 32, 32, 7), 216),
    ],
    ids=["2d", "3d"],
)
def test_few_blocks_of_windows_in_tiles_are_evaluated(grid: TiledGrid, mod: Callable[..., Tensor], most: int) -> None:
    mask = create_block_mask(grid.mod(mod), None, None, grid.tokens, grid.tokens, device="cpu")
    assert mask.build_counts is not None and mask.build_counts.blocks <= most < mask.counts()[1] / 20


@pytest.mark.parametrize("mod", [mods.causal, mods.sliding_window(7), mods.natten_2d(8, 8, 3)])
def test_graphs_without_such_quotients_keep_their_numbers(mod: Callable[..., Tensor]) -> None:
    """One graph of bounds serves all windows."""
    traced = trace(mod, "mask")
    assert split_for_bounds(traced) is traced.graph
