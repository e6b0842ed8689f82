"""Traced mask_mods against the same mods run by Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from eager_comparison import N, check_mask, values
from torch import Tensor

from flexattn.errors import ModError
from flexattn.trace.trace import trace

WINDOW = 3
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3])
VISIBLE = torch.tensor([True, False] * 6 + [True])
LENGTHS = torch.tensor([7, 12], dtype=torch.int32)
PREFIX = torch.tensor([[4, 5, 6], [1, 2, 3]])
LIMIT = torch.tensor(5)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def both(*mods: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = b.new_ones((), dtype=torch.bool)
        for m in mods:
            result = result & m(b, h, q, k)
        return result

    return mod


def either(*mods: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = b.new_zeros((), dtype=torch.bool)
        for m in mods:
            result = result | m(b, h, q, k)
        return result

    return mod


def natten(side: int, reach: int) -> Callable[..., Tensor]:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        qx, qy, kx, ky = q // side, q % side, k // side, k % side
        cx, cy = qx.clamp(reach, side - 1 - reach), qy.clamp(reach, side - 1 - reach)
        return ((cx - kx).abs() <= reach) & ((cy - ky).abs() <= reach)

    return mod


MASK_MODS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
    "always": lambda b, h, q, k: True,
    "never": lambda b, h, q, k: q.new_zeros((), dtype=torch.bool),
    "composed": both(causal, either(lambda b, h, q, k: q - k <= WINDOW, lambda b, h, q, k: k < 2)),
    "document": lambda b, h, q, k: SEGMENTS[q] == SEGMENTS[k],
    "visible": lambda b, h, q, k: VISIBLE[k],
    "visible_rows": lambda b, h, q, k: VISIBLE[k] & VISIBLE[q] | (k == q),
    "lengths": lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[b]),
    "prefix": lambda b, h, q, k: (k < PREFIX[b, h]) | (q >= k),
    "prefix_chained": lambda b, h, q, k: (k < PREFIX[b][h]) | (q >= k),
    "zero_d": lambda b, h, q, k: q + LIMIT >= k,
    "natten": natten(4, 1),
    "odd_keys": lambda b, h, q, k: k % 2 == 0,
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k) & (h != 1),
    "per_head": lambda b, h, q, k: (q - k).abs() <= h * 2 + 1,
    "negated": lambda b, h, q, k: ~(q < k),
    "bit": lambda b, h, q, k: ((q & k) == 0) | ((q ^ k) > 4),
    "float_index": lambda b, h, q, k: q.float() * 0.5 >= k.float().sqrt(),
    "partial": functools.partial(lambda offset, b, h, q, k: q + offset >= k, 2),
    "logical": lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(k == 3)),
    "where": lambda b, h, q, k: torch.where(h == 0, q >= k, q <= k),
}  # fmt: skip


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod_matches_eager(name: str) -> None:
    check_mask(MASK_MODS[name])


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_of_numpy(value: bool) -> None:
    found = np.bool_(value)
    assert bool(trace(lambda b, h, q, k: found, "mask")(*[torch.tensor(0)] * 4)) is value
    assert bool(trace(lambda b, h, q, k: np.bool_(not value), "mask")(*[torch.tensor(0)] * 4)) is not value


def test_torch_combinators() -> None:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    check_mask(and_masks(causal, or_masks(MASK_MODS["document"], MASK_MODS["window"])))


def test_mask_captures_carry_no_gradient() -> None:
    limits = values(N)
    (captured,) = trace(lambda b, h, q, k: k < limits[q], "mask").captures
    assert not captured.requires_grad


def test_indices_in_other_integer_dtypes() -> None:
    table = torch.arange(N).to(torch.int8)
    with pytest.raises(ModError, match=r"found an index in another integer dtype, .* Convert it with .long\(\)"):
        trace(lambda b, h, q, k: table[table[k]] > q, "mask")
