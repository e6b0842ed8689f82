"""The engine for problems without any (q, kv) pair. It returns zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.call.problem import Needs, Problem
from flexattn.call.sinks import sink_gradient
from flexattn.call.wide_dtype import wide_dtype


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out 0, lse -inf or the sink, and row maxima -inf, with the right shapes."""
    query, value = problem.query, problem.value
    out = query.new_zeros((*query.shape[:3], value.shape[3]))
    wide = wide_dtype(query)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    largest = lse.to(torch.float32, copy=True) if problem.max_scores else None
    return out, lse if problem.sink is None else lse.copy_(problem.sink[..., None].expand(lse.shape)), largest


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...], Tensor | None]:
    """Return zero gradients for everything that is needed."""
    inputs = (problem.query, problem.key, problem.value)
    dq, dk, dv = (torch.zeros_like(x) if need else None for x, need in zip(inputs, needs[:3], strict=True))
    captures = () if problem.score is None else problem.score.captures
    d_sink = sink_gradient(problem.sink, lse, _or_zeros(d_lse, lse)) if problem.sink is not None and needs[3] else None
    return dq, dk, dv, tuple(torch.zeros_like(c) if c.is_floating_point() else None for c in captures), d_sink


def _or_zeros(d_lse: Tensor | None, lse: Tensor) -> Tensor:
    return torch.zeros_like(lse) if d_lse is None else d_lse
