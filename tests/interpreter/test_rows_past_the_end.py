"""Tiles have rows past the end of query, where a score_mod may be anything. It has no effect on gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quick import slow_unless

from flexattn import create_block_mask, flex_attention, reference

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of rows past the end

M, N, INF, NAN = 50, 70, math.inf, math.nan
ROWS = torch.linspace(0.5, 1.5, M)
LONGER = torch.cat([ROWS, torch.full((78,), NAN)])
WIDE = torch.nn.functional.pad(torch.linspace(-1, 1, M * N).view(M, N), (0, 230, 0, 250), value=NAN)
IDS, BY_ID = torch.arange(M) % 4 + 1, 1 / torch.tensor([0.0, 0.5, 1.0, 2.0, 0.7])  # id 0 is past the end
KEYS = torch.where(torch.arange(N) % 5 == 0, -INF, 0.0)
LATE_KEYS = torch.where(torch.arange(N) < M, 0.0, NAN)  # of keys that only rows past the end attend to
ZERO, GAIN, THERE = torch.tensor(0), torch.tensor([1.3]), torch.ones(M, dtype=torch.bool)
SCORES: dict[str, Callable[..., Any]] = {
    "a longer table": lambda s, b, h, i, j: s + LONGER[i],
    "a longer table of pairs": lambda s, b, h, i, j: s + WIDE[i, j],
    "a table by ids": lambda s, b, h, i, j: s * BY_ID[IDS[i]],
    "-inf times rows": lambda s, b, h, i, j: (s + KEYS[j]) * ROWS[i],
    "-inf times a distance": lambda s, b, h, i, j: s + torch.where(j % 7 == 0, -INF, GAIN[h]) * (M - i),
    "a branch": lambda s, b, h, i, j: torch.where(THERE[i], s, NAN),
    "keys that no row reads": lambda s, b, h, i, j: s + LATE_KEYS[j],
    "overflow": lambda s, b, h, i, j: s * GAIN[h] + (i * 1300).to(torch.float16) * 1e-5,
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("a longer table", "a branch"), SCORES))
def test_gradients_are_those_of_the_reference(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).requires_grad_() for n in (M, N, N))
    mask_mod = (lambda b, h, i, j: i + ZERO >= j) if name == "keys that no row reads" else None
    mask = mask_mod and create_block_mask(mask_mod, 1, 1, M, N, device="cpu", BLOCK_SIZE=32)
    out = flex_attention(q, k, v, SCORES[name], mask, kernel_options={"BACKEND": "TRITON"})
    expected, _ = reference.attention(q, k, v, SCORES[name], mask_mod)
    for x, y in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)
