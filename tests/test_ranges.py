"""Ranges, linear forms and shift invariance of index expressions hold at every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from flexattn.graph.linear import Affine, affine, linear_forms, shift_invariant
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.ranges import index_ranges
from flexattn.trace.trace import trace

M, N = 7, 11
TABLE = torch.zeros(64)


def index_of(expression: Callable[..., Any]) -> tuple[ModGraph, int, tuple[int | float, ...]]:
    """Return the graph of `score + TABLE[expression]`, the node of its index, and its numbers."""
    bound = trace(lambda s, b, h, q, kv: s + TABLE[expression(q, kv).int()], "score")
    (load,) = [node for node in bound.graph.nodes if node.op == "load"]
    return bound.graph, load.args[0], bound.numbers


def values_of(expression: Callable[..., Any]) -> torch.Tensor:
    """Return the index at every position, int64 [M, N]."""
    q, kv = torch.arange(M, dtype=torch.int32)[:, None], torch.arange(N, dtype=torch.int32)[None, :]
    return expression(q, kv).int().expand(M, N).long()


STEPS: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, q, kv: x + q, lambda x, q, kv: x - kv, lambda x, q, kv: -x, lambda x, q, kv: x + 5,
    lambda x, q, kv: x * 3, lambda x, q, kv: x.clamp(-4, 9), lambda x, q, kv: x // 2, lambda x, q, kv: x % 5,
    lambda x, q, kv: x.abs(), lambda x, q, kv: x.to(torch.int8), lambda x, q, kv: x.to(torch.int64),
    lambda x, q, kv: x * 100, lambda x, q, kv: x.to(torch.uint8).to(torch.int32),
]  # fmt: skip


@given(st.lists(st.sampled_from(STEPS), max_size=6))
def test_ranges_hold_sums_are_sums_and_invariants_stay(steps: list[Callable[[Any, Any, Any], Any]]) -> None:
    def expression(q: Any, kv: Any) -> Any:
        x = q - kv
        for step in steps:
            x = step(x, q, kv)
        return x

    graph, index, numbers = index_of(expression)
    values = values_of(expression)
    found = index_ranges(graph, numbers, (1, 1, M, N))[index]
    if found is not None:
        assert found[0] <= int(values.min()) and int(values.max()) <= found[1]
    form = affine(graph, index)
    if form is not None:
        q, kv = torch.arange(M)[:, None], torch.arange(N)[None, :]
        rest = values - form.q * q - form.kv * kv
        assert (rest == rest[0, 0]).all()
    if shift_invariant(graph)[index]:
        assert torch.equal(values[1:, 1:], values[:-1, :-1])


@pytest.mark.parametrize(
    ("expression", "range_", "invariant"),
    [
        (lambda q, kv: q - kv + 10, (0, 16), True),
        (lambda q, kv: (q - kv).clamp(-3, 3) + 3, (0, 6), True),
        (lambda q, kv: q + kv, (0, 16), False),
        (lambda q, kv: q * 100 + kv, (0, 610), False),
        (lambda q, kv: (q * 100).to(torch.int8), None, False),
        (lambda q, kv: q.to(torch.int8) - kv.to(torch.int8), (-10, 6), False),
    ],
)
def test_what_is_known(expression: Callable[..., Any], range_: tuple[int, int] | None, invariant: bool) -> None:
    graph, index, numbers = index_of(expression)
    assert index_ranges(graph, numbers, (1, 1, M, N))[index] == range_
    assert shift_invariant(graph)[index] == invariant


def test_a_sum_of_indices() -> None:
    graph, index, _ = index_of(lambda q, kv: 3 - (kv - q) + q)
    form = affine(graph, index)
    assert isinstance(form, Affine) and (form.q, form.kv) == (2, -1)
    assert affine(*index_of(lambda q, kv: (q - kv) * 2)[:2]) is None
    assert affine(*index_of(lambda q, kv: (q - kv).to(torch.int8))[:2]) is None


def test_comparisons_of_sums_that_may_wrap_are_invariant_only_by_assumption() -> None:
    bound = trace(lambda b, h, q, kv, n=2**31 - 1: q + n >= kv + n, "mask")
    output = bound.graph.output
    assert shift_invariant(bound.graph, assuming_exact=True)[output]
    assert not shift_invariant(bound.graph)[output]
    near = trace(lambda b, h, q, kv: q - kv <= 9, "mask")
    assert shift_invariant(near.graph)[near.graph.output]


def test_a_long_chain_is_taken_apart_in_parts() -> None:
    bound = trace(lambda s, b, h, q, kv: s + TABLE[sum((TABLE[h + i].int() for i in range(100)), q - kv)], "score")
    forms = linear_forms(bound.graph)
    assert max(len(form.terms) for form in forms) <= 64
    index = next(load.args[0] for n, load in bound.graph.loads.items() if "q_idx" in bound.graph.dependence[n])
    assert shift_invariant(bound.graph)[index]
