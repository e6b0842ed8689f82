"""finite: whether what kernels compute in rows past the end is finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexattn import mods
from flexattn.graph.differentiate import differentiate
from flexattn.graph.finite import stays_finite
from flexattn.trace.trace import trace

TABLE, CAP = torch.rand(8) + 1, 20.0
FINITE: dict[str, Callable[..., Any]] = {
    "alibi": mods.alibi(8),
    "softcap": mods.softcap(CAP),
    "t5": mods.t5_bias(torch.rand(32, 8)),  # its logarithm is rounded to an index
    "branches": lambda s, b, h, i, j: torch.where(i > j, s * TABLE[h], -s),
    "over a number": lambda s, b, h, i, j: s / CAP,
    "quotient of indices": lambda s, b, h, i, j: s + TABLE[i // (j + 1)],
    "of heads and keys": lambda s, b, h, i, j: s / TABLE[h] + torch.log(TABLE[j]),
    "infinite": lambda s, b, h, i, j: torch.where(i > j, s, float("-inf")),
    "index": lambda s, b, h, i, j: s + (i - j).abs(),
}
NOT_FINITE: dict[str, Callable[..., Any]] = {
    "over a row": lambda s, b, h, i, j: s / TABLE[i],
    "log": lambda s, b, h, i, j: s + torch.log(TABLE[i]),
    "over an index": lambda s, b, h, i, j: s + 1.0 / (8 - i),
    "power": lambda s, b, h, i, j: s + TABLE[i] ** -0.5,
    "float remainder": lambda s, b, h, i, j: s % TABLE[i],
}


@pytest.mark.parametrize("name", [*FINITE, *NOT_FINITE])
def test_scores(name: str) -> None:
    graph = trace((FINITE | NOT_FINITE)[name], "score").graph
    assert stays_finite(graph) == (name in FINITE)


def test_gradients() -> None:
    """The derivative of a square root is infinite at 0, where the square root is finite."""
    graph = trace(lambda s, b, h, i, j: s.abs().sqrt(), "score").graph
    assert not stays_finite(differentiate(graph, ()))
    graph = trace(FINITE["softcap"], "score").graph
    assert stays_finite(differentiate(graph, ()))
