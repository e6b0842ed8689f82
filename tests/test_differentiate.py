"""Gradient graphs: what they contain and what they leave out (values: test_trace_score_mods, test_operators)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import GRAD_INPUTS
from flexattn.trace.trace import trace

TABLE = torch.rand(8)
OTHER = torch.rand(8, 8)


def gradient(mod: Callable[..., Any], *wrt: int) -> ModGraph:
    return differentiate(trace(mod, "score").graph, wrt)


def sites(graph: ModGraph) -> list[str]:
    return [graph.captures[graph.loads[s].capture].name for s in graph.sites]


def test_the_gradient_of_a_bias_reads_nothing() -> None:
    graph = gradient(lambda score, b, h, q, k: score + TABLE[q - k], 0)
    assert graph.inputs == GRAD_INPUTS
    assert len(graph.outputs) == 2
    assert graph.outputs[0] == graph.outputs[1]
    assert graph.reads("grad") and not graph.reads("score")


def test_alibi_reads_positions_but_not_the_score() -> None:
    graph = gradient(lambda score, b, h, q, k: score + TABLE[h] * (q - k), 0)
    assert not graph.reads("score") and graph.reads("q_idx")


def test_only_wanted_captures_are_sites() -> None:
    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * TABLE[h] + OTHER[q, k] + OTHER[k, q] + TABLE[q].detach()

    assert sites(gradient(mod, 0)) == ["TABLE"]
    assert sites(gradient(mod, 1)) == ["OTHER", "OTHER"]
    assert sorted(sites(gradient(mod, 0, 1))) == ["OTHER", "OTHER", "TABLE"]
    assert sites(gradient(mod)) == []


def test_a_mod_that_ignores_the_score_has_no_gradient() -> None:
    assert gradient(lambda score, b, h, q, k: (q - k) * 0.5).outputs == (None,)
    assert gradient(lambda score, b, h, q, k: score.detach() * 2).outputs == (None,)
    assert gradient(lambda score, b, h, q, k: score.round()).outputs == (None,)
    assert gradient(lambda score, b, h, q, k: (score > 0) * 1.0).outputs == (None,)


def test_a_load_that_is_used_for_decisions_only_is_no_site() -> None:
    assert sites(gradient(lambda score, b, h, q, k: torch.where(TABLE[q] > 0.5, score, -score), 0)) == []
    assert sites(gradient(lambda score, b, h, q, k: score + OTHER[(TABLE[q] * 8).long(), k], 0)) == []


def test_half_precision_loads_have_float32_gradients() -> None:
    half = TABLE.bfloat16()
    graph = gradient(lambda score, b, h, q, k: score * half[q], 0)
    assert graph.outputs[1] is not None and graph.nodes[graph.outputs[1]].dtype == torch.float32
    assert graph.nodes[graph.sites[0]].dtype == torch.bfloat16


def test_index_expressions_of_a_site_stay_in_the_graph() -> None:
    graph = gradient(lambda score, b, h, q, k: score + OTHER[torch.clamp(q - k, 0, 7), h], 0)
    assert [graph.nodes[a].op for a in graph.nodes[graph.sites[0]].args] == ["minimum", "input"]


def test_gradients_are_made_once() -> None:
    graph = trace(lambda score, b, h, q, k: score * 2, "score").graph
    assert differentiate(graph, ()) is differentiate(graph, ())
