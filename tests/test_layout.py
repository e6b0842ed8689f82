"""TiledGrid: its order is a permutation by tiles, and attention in this order is the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask, create_mask, flex_attention, mods
from flexattn.errors import ArgumentError, DtypeError, FlexAttentionError, IndexRangeError, ModError
from flexattn.layout import TiledGrid

GRIDS = [
    ((12,), (4,)), ((13,), (4,)), ((8, 12), (4, 6)), ((9, 13), (4, 6)), ((5, 7), (8, 16)), ((4, 6, 8), (2, 3, 4)),
    ((5, 7, 9), (2, 3, 4)), ((3, 4, 5, 6), (2, 3, 2, 4)), ((6, 6), (1, 1)), ((6, 6), (6, 6)),
]  # fmt: skip


def by_hand(grid: TiledGrid) -> list[int]:
    """The order, from loops over tiles and the tokens in them."""
    found = []
    for starts in itertools.product(*(range(0, n, t) for n, t in zip(grid.shape, grid.tile, strict=True))):
        ends = [min(s + t, n) for s, t, n in zip(starts, grid.tile, grid.shape, strict=True)]
        for at in itertools.product(*(range(s, e) for s, e in zip(starts, ends, strict=True))):
            position = 0
            for n, i in zip(grid.shape, at, strict=True):
                position = position * n + i
            found.append(position)
    return found


@pytest.mark.parametrize(("shape", "tile"), GRIDS, ids=str)
def test_order(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    grid = TiledGrid(shape, tile)
    assert grid.tokens == math.prod(shape)
    assert grid.order().tolist() == by_hand(grid) == [grid.row_major(i) for i in range(grid.tokens)]
    x = torch.randn(2, grid.tokens, 3)
    assert torch.equal(grid.restore(grid.permute(x)), x)
    assert torch.equal(grid.permute(x.mT, dim=-1)[1, 2], x[1, by_hand(grid), 2])


def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - (q_idx - kv_idx).abs() * 0.1 * (h + 1)


@pytest.mark.parametrize(("shape", "tile"), [((16, 24), (4, 8)), ((11, 15), (4, 8)), ((5, 6, 7), (2, 4, 4))], ids=str)
def test_attention_is_the_same(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    grid = TiledGrid(shape, tile)
    mod = mods.natten_2d(shape[0], shape[1], 5) if len(shape) == 2 else mods.natten_3d(shape[0], shape[1], shape[2], 3)
    S = grid.tokens
    masks = [create_block_mask(m, None, None, S, S, device="cpu", BLOCK_SIZE=32) for m in (mod, grid.mod(mod))]
    order = grid.order()
    dense = create_mask(mod, None, None, S, S, device="cpu")[0, 0]
    assert torch.equal(create_mask(grid.mod(mod), None, None, S, S, device="cpu")[0, 0], dense[order][:, order])
    q, k, v = (torch.randn(1, 2, S, 8, requires_grad=True) for _ in range(3))
    expected = flex_attention(q, k, v, bias, masks[0])
    in_tiles = flex_attention(grid.permute(q), grid.permute(k), grid.permute(v), grid.mod(bias), masks[1])
    found = grid.restore(in_tiles)
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)


def test_each_mod_and_grid_has_a_mask_of_its_own() -> None:
    """The tracer guards what the rewritten mods read."""
    for tile in ((2, 3), (4, 3)):
        grid = TiledGrid((8, 9), tile)
        order = grid.order()
        for mod in (mods.causal, mods.natten_2d(8, 9, 3), lambda b, h, q_idx, kv_idx: q_idx == kv_idx):
            dense = create_mask(mod, None, None, 72, 72, device="cpu")[0, 0]
            found = create_mask(grid.mod(mod), None, None, 72, 72, device="cpu")[0, 0]
            assert torch.equal(found, dense[order][:, order])


def test_windows_touch_fewer_blocks() -> None:
    grid, S = TiledGrid((32, 128), (8, 16)), 32 * 128
    mod = mods.natten_2d(32, 128, 13)
    touched = []
    for m in (mod, grid.mod(mod)):
        full, partial, _ = create_block_mask(m, None, None, S, S, device="cpu").counts()
        touched.append(full + partial)
    assert touched[1] < 0.75 * touched[0]


@pytest.mark.parametrize(
    ("shape", "tile", "text"),
    [
        ((4, 4), (2,), "tile: found 1 sizes, expected 2, as in shape"), ((4, 0), (2, 2), r"shape: found \(4, 0\)"),
        ([4, 4], (2, 2), "shape: found"), ((), (), "shape: found"), ((4, 4), (2, 2.0), "tile: found"),
    ],
)  # fmt: skip
def test_errors(shape: tuple[int, ...], tile: tuple[int, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        TiledGrid(shape, tile)


@pytest.mark.parametrize(("shape", "dim"), [((2, 17, 3), -2), ((2, 15, 3), 1), ((16,), -2), ((16, 3), 2)])
def test_tensors_with_other_numbers_of_tokens(shape: tuple[int, ...], dim: int) -> None:
    grid, x = TiledGrid((4, 4), (2, 2)), torch.zeros(shape)
    for order in (grid.permute, grid.restore):
        with pytest.raises(ArgumentError, match=f"x: found shape .*, expected 16 tokens along dim {dim}"):
            order(x, dim)


GRID = TiledGrid((4, 6), (2, 4))


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda x: x([1] * 24), DtypeError, "x: found a list, expected a tensor"),
        (lambda x: x(torch.zeros(24, 2), 0.5), DtypeError, "dim: found 0.5, expected an int"),
        (lambda x: x(torch.zeros(24, 2), "a"), DtypeError, "dim: found 'a', expected an int"),
        (lambda x: x(torch.zeros(2, 24), True), DtypeError, "dim: found True, expected an int"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", [GRID.permute, GRID.restore, TiledGrid((4, 6), (2, 3)).permute])
def test_arguments_of_other_types(
    order: Callable[..., Tensor], wrong: Callable[[Any], object], kind: type[FlexAttentionError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        wrong(order)


def test_dims_of_numpy() -> None:
    x = torch.randn(2, 24)
    for grid in (GRID, TiledGrid((4, 6), (2, 3))):
        assert torch.equal(grid.restore(grid.permute(x, np.int64(1)), np.int64(1)), x)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mod", "found"), [(3, "an int"), (None, "a NoneType"), (torch.ones(2), r"float32 \[2\]")])
def test_what_is_no_mod(mod: Any, found: str) -> None:
    with pytest.raises(ModError, match=f"mod: found {found}, expected a callable mask_mod"):
        GRID.mod(mod)


@pytest.mark.parametrize("position", [24, 25, -1])
def test_positions_that_do_not_exist(position: int) -> None:
    with pytest.raises(IndexRangeError, match=f"position: found {position}, expected one of the 24 tokens, 0 to 23"):
        GRID.row_major(position)
