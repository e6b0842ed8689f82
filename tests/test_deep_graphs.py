"""Mods of hundreds and thousands of operations: no stage may recurse once for each, or take quadratic time."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mod_grammar import classify_boxes
from torch import Tensor

import flexattn.compile.lower
from flexattn import create_block_mask, explain, flex_attention
from flexattn.compile.lower import Dialect, lower, lower_score
from flexattn.compile.mod_plan import CaptureLayout, ModPlan
from flexattn.compile.render import render
from flexattn.errors import CompileError
from flexattn.graph.builder import Builder, Expr
from flexattn.graph.differentiate import differentiate
from flexattn.graph.facts import analyze
from flexattn.graph.interval_bounds import EMPTY
from flexattn.graph.interval_bounds import bound as bounding
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import SCORE_INPUTS, Capture
from flexattn.trace.trace import trace

SPANS = 300


def spans(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Documents of 2 tokens, written as a loop over their spans."""
    found = q < 0
    for start in range(0, 2 * SPANS, 2):
        found = found | ((q >= start) & (q < start + 2) & (k >= start) & (k < start + 2))
    return found


def test_a_mask_of_300_spans() -> None:
    n = 2 * SPANS
    mask = create_block_mask(spans, None, None, n, n, device="cpu", BLOCK_SIZE=64)
    x = torch.randn(1, 1, n, 4, dtype=torch.float64, requires_grad=True)
    documents = torch.arange(n) // 2
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, documents[:, None] == documents)
    out = flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, dense)))
    half = x.detach().bfloat16().requires_grad_()
    for target in ("sm_80", "sm_90"):
        explained = explain(half, half, half, block_mask=mask, target=target)
        assert repr(explained)
        for plan in explained.plans:
            ast.parse(render(plan).text)


def chained(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    for i in range(200):
        score = torch.sin(score) * 0.9 + 0.1 * score if i % 4 else score - 0.001 * (q - k)
    return score


def test_200_chained_operations_forward_and_backward() -> None:
    x = torch.randn(1, 1, 24, 4, dtype=torch.float64, requires_grad=True)
    out = flex_attention(x, x, x, chained)
    n = torch.arange(24)
    scores = chained(x @ x.mT / 2, n, n, n[:, None], n)
    torch.testing.assert_close(out, scores.softmax(-1) @ x)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, scores.softmax(-1) @ x)))
    half = x.detach().bfloat16().requires_grad_()
    for target in ("sm_80", "sm_90"):
        for plan in explain(half, half, half, chained, target=target).plans:
            ast.parse(render(plan).text)


STEPS: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "sine": lambda x, d, c: x.apply("sin"), "sum": lambda x, d, c: x + c, "product": lambda x, d, c: x * c * c,
    "quotient": lambda x, d, c: c / x, "double": lambda x, d, c: x + x,
    "both": lambda x, d, c: (x + c) * 0.5 + d.cast(x.dtype),
}  # fmt: skip


def of_steps(step: Callable[[Expr, Expr, Expr], Expr], count: int) -> ModGraph:
    builder = Builder()
    x = builder.input("score", torch.float32)
    q, k = (builder.input(n, torch.int32) for n in ("q_idx", "kv_idx"))
    captured = builder.load(0, torch.float32, (k,))
    total = q - k
    for _ in range(count):
        total = total + 1
        x = step(x, total, captured)
    return builder.build("deep", SCORE_INPUTS, (Capture("c", torch.float32, 1),), (), [x])


@pytest.mark.parametrize("name", STEPS)
def test_thousands_of_operations(name: str) -> None:
    graph = of_steps(STEPS[name], 500)
    gradient = differentiate(graph, (0,))
    layouts = (CaptureLayout(dense=True, aligned=False, wide=False),)
    assert analyze(graph).result and repr(graph) and bounding(graph)
    for dialect in (Dialect(ptx=True), Dialect(exact=True), Dialect(columns="kv_idx")):
        ast.parse(lower_score(ModPlan(graph, "score", layouts, ()), "score_mod", dialect))
    ast.parse(lower(ModPlan(gradient, "score", layouts, ()), "score_grad", Dialect(ptx=True)))


def test_lowered_chains_compute_the_same() -> None:
    """Cutting a chain into pieces loses no operation: the statements run as Python give what the graph gives."""
    graph = of_steps(STEPS["both"], 150)
    layouts = (CaptureLayout(dense=True, aligned=False, wide=False),)
    text = lower_score(ModPlan(graph, "score", layouts, ()), "score_mod", Dialect(exact=True))
    values: dict[str, Any] = {"score": torch.tensor(0.5), "q_idx": torch.tensor(9), "kv_idx": torch.tensor(2)}
    (wanted,) = graph.evaluate(values, [torch.tensor([0.0, 0.0, 0.3])], ())
    body = [line for line in text.splitlines() if not line.startswith(("@", "def "))]
    body = [line for line in body if "tl.load" not in line or not line.lstrip().startswith("if")]
    scope = _Scope(values)
    result = scope.run("\n".join(line.strip() for line in body))
    torch.testing.assert_close(result, wanted)


class _Scope:
    """Runs lowered statements on numbers: loads give 0.3, casts convert to float."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.names: dict[str, Any] = {**values, "sm_scale": 1.0, "live": None, "c": 0.3}

    def run(self, text: str) -> Tensor:
        text = text.replace(".to(tl.float32)", ".float()")
        result = None
        for line in text.splitlines():
            target, _, expression = line.partition(" = ")
            if line.startswith("return "):
                result = eval(line.removeprefix("return "), {}, self.names)
            else:
                self.names[target] = torch.tensor(0.3) if "tl.load" in line else eval(expression, {}, self.names)
        assert result is not None
        return result


def test_bounds_of_a_deep_mask_exclude_other_documents() -> None:
    boxes = torch.tensor([[0, 0, 0, 0, 0, 63, 320, 383]]).numpy()
    traced = trace(spans, "mask")
    assert classify_boxes(bounding(traced.graph), traced.captures, traced.numbers, boxes)[0] == EMPTY


def test_a_mod_that_no_kernel_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexattn.compile.lower, "MOST_OPERATIONS", 30)
    layouts = (CaptureLayout(dense=True, aligned=False, wide=False),)
    with pytest.raises(CompileError, match=r"score_mod: found \d+ operations in deep, expected at most 30"):
        lower_score(ModPlan(of_steps(STEPS["sum"], 50), "score", layouts, ()), "score_mod", Dialect())
