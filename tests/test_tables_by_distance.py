"""Indices of the distance q_idx - kv_idx that cost much are taken once for each distance; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask, explain, flex_attention, mods
from flexattn.graph.tables_by_distance import read_tables_by_distance
from flexattn.reference import attention
from flexattn.trace.trace import trace

M, N, H = 37, 50, 4
Mod = Callable[..., Any]


def steps(table: Tensor, width: int) -> Mod:
    return lambda s, b, h, i, j: s + table[h, (i - j + N) // width]


MODS: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...]]] = {
    "t5": (mods.t5_bias, (32, H)),
    "t5 causal": (lambda t: mods.t5_bias(t, bidirectional=False), (16, H)),
    "steps": (lambda t: steps(t, 7), (H, 30)),
    "twice": (lambda t: lambda s, b, h, i, j: s * t[(i - j).abs() // 3] + t[(i - j).abs() // 3], (40,)),
    "two ways": (lambda t: lambda s, b, h, i, j: s + t[h, (i - j).abs() // 3] * t[h, (j - i).abs() // 5], (H, 40)),
    "from the end": (lambda t: lambda s, b, h, i, j: s + t[(i - j) // 2], (64,)),
    "beside others": (lambda t: lambda s, b, h, i, j: s * t[i, 0] + t[h + b, (i - j) ** 2 % 11], (M, 11)),
}


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, H, M, 8), (2, H, N, 8), (2, H, N, 8))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("masked", [False, True])
def test_results_and_gradients(name: str, masked: bool) -> None:
    make, shape = MODS[name]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    leaves, mod = [*inputs(), table], make(table)
    assert (
        read_tables_by_distance(trace(mod, "score", torch.float64), M, N)
        .graph.captures[-1]
        .name.endswith("_by_distance")
    )
    mask = create_block_mask(mods.causal, None, None, M, N, device="cpu", BLOCK_SIZE=16) if masked else None
    out = flex_attention(*leaves[:3], mod, mask)
    want, _ = attention(*leaves[:3], mod, mods.causal if masked else None)
    d_out = torch.randn_like(want)
    grads, wanted = (torch.autograd.grad(x, leaves, d_out) for x in (out, want))
    torch.testing.assert_close([out, *grads], [want, *wanted], rtol=1e-6, atol=1e-6)  # T5 takes a float32 logarithm


VECTOR, SQUARE, SHORT = torch.zeros(99), torch.zeros(99, 99), torch.zeros(5)
UNCHANGED: dict[str, Mod] = {
    "alibi": mods.alibi(H),
    "softcap": mods.softcap(3.0),
    "relative": mods.relative_bias(torch.zeros(H, 2 * N + 1)),
    "cheap": lambda s, b, h, i, j: s + VECTOR[(i - j).clamp(-9, 9) + 9],
    "two indices of places": lambda s, b, h, i, j: s + SQUARE[i // 2, j // 2],
    "no distance": lambda s, b, h, i, j: s + VECTOR[(i + j) // 2],
    "outside at some distance": lambda s, b, h, i, j: s + SHORT[(i - j) // 7],
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_stays_as_it_is(name: str) -> None:
    bound = trace(UNCHANGED[name], "score")
    assert read_tables_by_distance(bound, M, N) is bound


def test_large_tensors_stay_as_they_are() -> None:
    table = torch.zeros(2**16, 8)
    bound = trace(lambda s, b, h, i, j: s + table[b, (i - j).abs() // 9], "score")
    assert read_tables_by_distance(bound, 30, 40) is not bound
    assert read_tables_by_distance(bound, 300, 400) is bound


def test_lengths_and_numbers_share_a_graph() -> None:
    table = torch.randn(H, 200)
    graphs = {
        read_tables_by_distance(trace(steps(table, 7), "score"), m, n).graph for m, n in ((37, 50), (20, 30), (9, 50))
    }
    assert len(graphs) == 1


def test_explain_shows_it() -> None:
    shown = explain(*inputs(torch.float32), mods.t5_bias(torch.zeros(32, H)))
    assert "table_by_distance[h, " in repr(shown.score) and "log" not in repr(shown.score)
