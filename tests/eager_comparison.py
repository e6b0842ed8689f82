"""Compare values and gradients of traced mods with the same mods run eagerly on 0-d tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.differentiate import differentiate
from flexattn.trace.trace import stats, trace

B, H, M, N = 2, 3, 11, 13
PLACES = [(0, 0, 0, 0), (1, 2, 10, 12), (0, 1, 7, 3), (1, 0, 3, 7), (1, 1, 5, 5), (0, 2, 10, 0)]
POINTS = [torch.tensor(column, dtype=torch.int32) for column in zip(*PLACES, strict=True)]


def scores(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([-1.7, 0.4, 2.3, -0.2, 0.9, 5.1], dtype=dtype)


def values(*shape: int, dtype: torch.dtype = torch.float64, low: float = 0.2, high: float = 1.7) -> Tensor:
    """Return a tensor of distinct values in (low, high) that requires a gradient."""
    n = math.prod(shape)
    flat = low + (high - low) * ((torch.arange(n, dtype=torch.float64) * 0.754877666) % 1.0)
    return flat.reshape(shape).to(dtype).requires_grad_()


def eager(mod: Callable[..., Any], score: Tensor | None) -> Tensor:
    """Run a mod eagerly at each point."""
    rows = []
    for i in range(len(PLACES)):
        place = [p[i] for p in POINTS]
        rows.append(torch.as_tensor(mod(*place) if score is None else mod(score[i], *place)))
    return torch.stack(rows)


def run(bound: BoundMod, score: Tensor | None) -> Tensor:
    out = bound(*POINTS) if score is None else bound(score, *POINTS)
    return out.expand(len(PLACES))


def gradients(bound: BoundMod, score: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Return d(score) and d(leaf): the gradient graph, a scatter-add per site, and autograd through the prologue."""
    wrt = tuple(i for i, c in enumerate(bound.captures) if c.requires_grad)
    graph = differentiate(bound.graph, wrt)
    inputs = dict(zip(bound.graph.inputs, (score, *POINTS), strict=True)) | {"grad": grad}
    d_score, *d_sites = graph.evaluate(inputs, bound.captures, bound.numbers)
    buffers = {i: torch.zeros_like(bound.captures[i]) for i in wrt}
    for site, d_site in zip(graph.sites, d_sites, strict=True):
        node = graph.loads[site]
        assert d_site is not None
        index = graph.evaluate(inputs, bound.captures, bound.numbers, outputs=node.args)
        place = tuple(i.long().expand(len(PLACES)) for i in index if i is not None)
        d_site = d_site.expand(len(PLACES)).to(bound.captures[node.capture].dtype)
        if place:
            buffers[node.capture].index_put_(place, d_site, accumulate=True)
        else:
            buffers[node.capture] += d_site.sum()
    if not wrt or not leaves:
        return [d_score, *(None for _ in leaves)]
    outputs = [bound.captures[i] for i in wrt]
    return [d_score, *torch.autograd.grad(outputs, leaves, [buffers[i] for i in wrt], allow_unused=True)]


def check_score(
    mod: Callable[..., Any], *leaves: Tensor, dtype: torch.dtype = torch.float64, tol: float = 0
) -> BoundMod:
    """Assert that a traced score_mod has the same values and gradients as the eager one."""
    score = scores(dtype).requires_grad_()
    bound = trace(mod, "score", dtype)
    kw: dict[str, Any] = {"rtol": tol, "atol": tol} if tol else {}
    expected = eager(mod, score).to(dtype)
    torch.testing.assert_close(run(bound, score), expected, **kw)
    if not expected.requires_grad:
        assert differentiate(bound.graph, ()).outputs == (None,)
        return bound
    grad = torch.linspace(0.5, 2.0, len(PLACES), dtype=dtype)
    d_expected = torch.autograd.grad(expected, [score, *leaves], grad, allow_unused=True)
    for found, wanted in zip(gradients(bound, score, grad, list(leaves)), d_expected, strict=True):
        wanted = torch.zeros_like(found) if wanted is None and found is not None else wanted
        found = torch.zeros_like(wanted) if found is None and wanted is not None else found
        if wanted is not None:
            torch.testing.assert_close(found.expand_as(wanted), wanted, **kw)
    return bound


def check_mask(mod: Callable[..., Any]) -> BoundMod:
    bound = trace(mod, "mask")
    torch.testing.assert_close(run(bound, None), eager(mod, None))
    return bound


def traces(f: Callable[[], Any]) -> int:
    before = stats()["traces"]
    f()
    return stats()["traces"] - before


class Straight(torch.autograd.Function):
    """round, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g
