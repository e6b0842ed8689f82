"""Traced mods against the same mods run by Python on real 0-d tensors: values, gradients, memo, errors, prints."""

from __future__ import annotations

import enum
import functools
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn import flex_attention, mods
from flexattn.errors import ModError, RetraceWarning, UnsupportedError
from flexattn.graph import mod_graph as graph
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import BoundMod
from flexattn.trace import aten
from flexattn.trace.trace import stats, trace

torch.set_num_threads(1)

B, H, M, N = 2, 3, 11, 13
PLACES = [(0, 0, 0, 0), (1, 2, 10, 12), (0, 1, 7, 3), (1, 0, 3, 7), (1, 1, 5, 5), (0, 2, 10, 0)]
POINTS = [torch.tensor(column, dtype=torch.int32) for column in zip(*PLACES, strict=True)]


def scores(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([-1.7, 0.4, 2.3, -0.2, 0.9, 5.1], dtype=dtype)


def values(*shape: int, dtype: torch.dtype = torch.float64, low: float = 0.2, high: float = 1.7) -> Tensor:
    """Return a learnable tensor of distinct values in (low, high)."""
    n = math.prod(shape)
    flat = low + (high - low) * ((torch.arange(n, dtype=torch.float64) * 0.754877666) % 1.0)
    return flat.reshape(shape).to(dtype).requires_grad_()


def eager(mod: Callable[..., Any], score: Tensor | None) -> Tensor:
    """Run a mod by Python at each of the points."""
    rows = []
    for i in range(len(PLACES)):
        place = [p[i] for p in POINTS]
        rows.append(torch.as_tensor(mod(*place) if score is None else mod(score[i], *place)))
    return torch.stack(rows)


def run(bound: BoundMod, score: Tensor | None) -> Tensor:
    out = bound(*POINTS) if score is None else bound(score, *POINTS)
    return out.expand(len(PLACES))


def gradients(bound: BoundMod, score: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Return d(score) and d(leaf), from the gradient graph, a scatter-add per site, and torch through the prologue."""
    wrt = tuple(i for i, c in enumerate(bound.captures) if c.requires_grad)
    graph = differentiate(bound.graph, wrt)
    inputs = dict(zip(bound.graph.inputs, (score, *POINTS), strict=True)) | {"grad": grad}
    d_score, *d_sites = graph.evaluate(inputs, bound.captures, bound.numbers)
    buffers = {i: torch.zeros_like(bound.captures[i]) for i in wrt}
    for site, d_site in zip(graph.sites, d_sites, strict=True):
        node = graph.nodes[site]
        index = graph.evaluate(inputs, bound.captures, bound.numbers, outputs=node.args)
        place = tuple(i.long().expand(len(PLACES)) for i in index if i is not None)
        d_site = d_site.expand(len(PLACES)).to(bound.captures[node.value].dtype)  # type: ignore
        if place:
            buffers[node.value].index_put_(place, d_site, accumulate=True)  # type: ignore
        else:
            buffers[node.value] += d_site.sum()  # type: ignore
    if not wrt or not leaves:
        return [d_score, *(None for _ in leaves)]
    outputs = [bound.captures[i] for i in wrt]
    return [d_score, *torch.autograd.grad(outputs, leaves, [buffers[i] for i in wrt], allow_unused=True)]


def check_score(
    mod: Callable[..., Any], *leaves: Tensor, dtype: torch.dtype = torch.float64, tol: float = 0
) -> BoundMod:
    """Assert that a traced score_mod has the values and gradients of eager."""
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
            torch.testing.assert_close(found.expand_as(wanted), wanted, **kw)  # type: ignore
    return bound


def check_mask(mod: Callable[..., Any]) -> BoundMod:
    bound = trace(mod, "mask")
    torch.testing.assert_close(run(bound, None), eager(mod, None))
    return bound


# Score mods of upstream's tests (G.1 "Score mods", "Captured buffers", G.4) and more of their kind.

SCALE = values(N)
TABLE = values(2 * N)
GLOBAL_GAIN = 1.5
OFFSET = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12], dtype=torch.int64)


def a(*shape: int, **kw: Any) -> Tensor:
    return values(*shape, **kw)


def score_mods() -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return makers of (mod, *learnable tensors)."""
    mods: dict[str, Callable[[], tuple[Any, ...]]] = {}

    def case(maker: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        mods[maker.__name__] = maker
        return maker

    def plain(**functions: Callable[..., Any]) -> None:
        mods.update({name: lambda f=f: (f,) for name, f in functions.items()})

    def learned(shape: tuple[int, ...], **functions: Callable[..., Any]) -> None:
        """Cases `f(t)` -> mod with one learnable tensor of `shape`."""
        for name, f in functions.items():

            def make(f: Any = f) -> tuple[Any, ...]:
                t = a(*shape)
                return f(t), t

            mods[name] = make

    plain(
        noop=lambda s, b, h, q, k: s,
        causal=lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
        rel_bias=lambda s, b, h, q, k: s + (q - k),
        rel_causal=lambda s, b, h, q, k: torch.where(q <= k, s + (q - k), float("-inf")),
        alibi_constant=lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 3)),
        squared=lambda s, b, h, q, k: s * s,
        times_two=lambda s, b, h, q, k: s * 2,
        head_offset=lambda s, b, h, q, k: s * h,
        trig=lambda s, b, h, q, k: torch.sin(torch.cos(s)),
        trig2=lambda s, b, h, q, k: torch.sin(s) * torch.cos(s) + torch.tan(s),
        silu=lambda s, b, h, q, k: F.silu(s),
        gelu=lambda s, b, h, q, k: F.gelu(s),
        gelu_tanh=lambda s, b, h, q, k: F.gelu(s, approximate="tanh"),
        softplus=lambda s, b, h, q, k: F.softplus(s),
        logsigmoid=lambda s, b, h, q, k: F.logsigmoid(s),
        elu_mish=lambda s, b, h, q, k: F.elu(s) + F.mish(s) + F.hardswish(s) + F.leaky_relu(s, 0.2),
        relu6_celu=lambda s, b, h, q, k: F.relu6(s) + F.celu(s) + F.selu(s) + F.hardtanh(s) + F.hardsigmoid(s),
        relu=lambda s, b, h, q, k: torch.relu(s) + s.relu(),
        clamp=lambda s, b, h, q, k: s.clamp(-1, 2) + s.clamp(min=0.0) + torch.clamp(s, max=0.5),
        clip_tensor=lambda s, b, h, q, k: torch.clamp(s, min=s.new_zeros(()), max=torch.ones_like(s) * 2),
        lerp=lambda s, b, h, q, k: torch.lerp(s, s * 2, 0.25),
        addcmul=lambda s, b, h, q, k: torch.addcmul(s, s, s * 2, value=0.5) + torch.addcdiv(s, s, s * s + 1.0),
        powers=lambda s, b, h, q, k: s**2 + s**3 + s**-1 + abs(s) ** 0.5 + 2**s + (s * s) ** 1.5 + s.square(),
        int_powers=lambda s, b, h, q, k: s + q**2 + 2**h + (h + 1) ** h,
        reciprocal=lambda s, b, h, q, k: s.reciprocal() + 1 / s + (s * s).rsqrt(),
        logs=lambda s, b, h, q, k: torch.log1p(s * s) + torch.log2(s.abs()) + torch.logaddexp(s, s * 2),
        hypot=lambda s, b, h, q, k: torch.hypot(s, s + 1) + torch.atan2(s, s * s) + torch.copysign(s, s - 1.0),
        xlogy=lambda s, b, h, q, k: torch.xlogy(s * s, s * s + 1) + torch.special.expit(s) + torch.special.erf(s),
        rounding=lambda s, b, h, q, k: s.floor() + s.ceil() * 2 + s.round() * 3 + s.trunc() + torch.frac(s) + s.sign(),
        int_division=lambda s, b, h, q, k: s + q // 3 + (q - k) % 4 + torch.div(q - k, 3, rounding_mode="trunc"),
        float_division=lambda s, b, h, q, k: (
            s % 1.5 + s.detach() // 2.0 + torch.fmod(s, 0.7)
            + torch.div(s, 0.4, rounding_mode="floor")
        ),
        true_division=lambda s, b, h, q, k: s + q / 3 + q / (k + 1),
        bit_arithmetic=lambda s, b, h, q, k: s + ((q & 3) | (k << 1) ^ h) + (q >> 1) + ~q,
        bool_arithmetic=lambda s, b, h, q, k: (
            s * (q >= k) + (q > k).to(s.dtype) - (q == k).float()
            + ((q > 1) & (k > 1)) * 1
        ),
        logical=lambda s, b, h, q, k: (
            torch.where(torch.logical_or(q > k, ~(h == 1)) ^ torch.logical_not(s > 0),
            s, s * 0.5)
        ),
        minimum=lambda s, b, h, q, k: torch.minimum(s, s * s) + torch.maximum(s, -s) + torch.fmax(s, s * 2),
        nan_handling=lambda s, b, h, q, k: (
            torch.nan_to_num(s)
            + torch.where(torch.isfinite(s) & ~torch.isnan(s), s, 0.0)
        ),
        masked_fill=lambda s, b, h, q, k: s.masked_fill(q < k, float("-inf")),
        fills=lambda s, b, h, q, k: (
            s + h.new_zeros(()) + torch.zeros_like(s) + torch.full_like(s, 3.0) + torch.ones(())
            + s.new_full((), 2)
        ),
        tensor_literal=lambda s, b, h, q, k: (
            s * torch.tensor(2.0) + torch.tensor([1, 2, 3])[h]
            + torch.arange(5)[h] * 2
        ),
        dtype_chain=lambda s, b, h, q, k: s + q.to(torch.int8) + k.double() + h.type_as(s) + (q - k).float() + q.long(),
        finfo=lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(torch.float32).min),
        isin=lambda s, b, h, q, k: torch.where(torch.isin(q, torch.tensor([3, 7])), s, 0.0),
        python_constant=lambda s, b, h, q, k: 1.5,
        python_int=lambda s, b, h, q, k: 2,
        ignores_score=lambda s, b, h, q, k: (q - k) * 0.25,
        sub_rsub=lambda s, b, h, q, k: (
            1.0 - s + torch.sub(s, q, alpha=2) + torch.rsub(s, 3.0)
            + torch.add(s, k, alpha=3)
        ),
        deep=lambda s, b, h, q, k: (
            torch.tanh(torch.exp(-s.abs())) * torch.expm1(s * 0.1) + torch.sinh(s * 0.2)
            + torch.cosh(s * 0.2)
        ),
        inverse=lambda s, b, h, q, k: (
            torch.atan(s) + torch.asinh(s) + torch.asin(torch.tanh(s))
            + torch.acosh(s * s + 1.1)
        ),
        augmented=lambda s, b, h, q, k: augmented(s, q),
        detached=lambda s, b, h, q, k: s * s.detach() + s.data,
        no_grad=lambda s, b, h, q, k: s + without_gradient(s),
        reductions=lambda s, b, h, q, k: reductions(torch.stack([s, s * 2, torch.sin(s)])),
        signs=lambda s, b, h, q, k: s * torch.signbit(s) + torch.deg2rad(s).sinc() + s.detach().heaviside(s.detach()),
        stacked=lambda s, b, h, q, k: torch.stack([s, s * 2, s * 3]).sum() + torch.stack([s, s * s])[h % 2],
        concatenated=lambda s, b, h, q, k: torch.cat([s.view(1), (s * s).reshape(1)]).flip(0)[0],
    )  # fmt: skip
    learned(
        (N,),
        slope=lambda t: lambda s, b, h, q, k: s + t[h] * (k - q),
        multiplicative_bias=lambda t: lambda s, b, h, q, k: s * t[q],
        global_tokens_bias=lambda t: lambda s, b, h, q, k: s + t[k],
        relative_1d_bias=lambda t: lambda s, b, h, q, k: s + t[torch.abs(q - k)],
        symmetric_bias=lambda t: lambda s, b, h, q, k: s + t[q] + t[k],
        local_window_bias=lambda t: lambda s, b, h, q, k: s + t[torch.clamp(q - k + 3, 0, 2 * 3)],
        indirect_bias=lambda t: lambda s, b, h, q, k: s + t[OFFSET[q]],
        head_gate=lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h]),
        head_gate_prologue=lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t)[h],
        softmaxed=lambda t: lambda s, b, h, q, k: s + torch.softmax(t, 0)[k],
        negative_index=lambda t: lambda s, b, h, q, k: s + t[-1 - h] + t[-1] + t[h - 3],
        sliced=lambda t: lambda s, b, h, q, k: s + t[2:][h] + t[1::2][h] + t[-4:][h],
        mean_of_capture=lambda t: lambda s, b, h, q, k: s + t.mean() * t.sum() + t.max(),
        detached_capture=lambda t: lambda s, b, h, q, k: s * t.detach()[h] + t[h].detach() * t[q],
        size_as_value=lambda t: lambda s, b, h, q, k: s + t[(q + k) % t.shape[0]] * t.numel(),
        select_calls=lambda t: lambda s, b, h, q, k: (
            s + t.select(0, 1) + torch.select(t, 0, h) + t.take(q.long())
            + torch.take(t, k.long())
        ),
        index_select=lambda t: lambda s, b, h, q, k: (
            s + t.index_select(0, q.view(1))[0]
            + torch.gather(t, 0, k[None].long())[0]
        ),
        nested_gathers=lambda t: lambda s, b, h, q, k: s + t[OFFSET[OFFSET[q]]] * t[(t[q] * 3).long()],
        global_and_closure=lambda t: lambda s, b, h, q, k: s * GLOBAL_GAIN + SCALE.detach()[q] * t[q],
        list_index=lambda t: lambda s, b, h, q, k: s + t[[0, 2]].sum() + t[[1, 2, 0]][h],
        small_vector=lambda t: lambda s, b, h, q, k: (
            s + (t[:4] * s).sum() + (t[:3] * t[h]).norm()
            + torch.dot(t[:3] * s, t[:3])
        ),
        tensor_vector_index=lambda t: lambda s, b, h, q, k: (
            s + t[torch.stack([q, k])].sum()
            + t[torch.stack([q, k])].prod()
        ),
        where_capture=lambda t: lambda s, b, h, q, k: torch.where(q > k, s + t[q], s - t[k]),
        number_and_capture=lambda t: lambda s, b, h, q, k, gain=2.5, shift=1: s * gain + t[h + shift] * gain,
    )  # fmt: skip
    learned(
        (),
        temperature=lambda t: lambda s, b, h, q, k: s / t,
        temperature_exp=lambda t: lambda s, b, h, q, k: s * torch.exp(t) + t,
        temperature_detached=lambda t: lambda s, b, h, q, k: s * t.detach() + t,
        returns_capture=lambda t: lambda s, b, h, q, k: t,
        remainder_by_capture=lambda t: lambda s, b, h, q, k: s % t + torch.fmod(s, t) + abs(s) ** t,
        zero_d_index=lambda t: lambda s, b, h, q, k: s + t[()] + t[...],
    )  # fmt: skip
    learned(
        (1,),
        one_element=lambda t: lambda s, b, h, q, k: s * t[0],
        one_element_minus=lambda t: lambda s, b, h, q, k: s * t[-1] + t.squeeze() + t.view(()) + t.sum(),
        one_element_gather=lambda t: lambda s, b, h, q, k: s * t[h * 0],
        broadcast_vector=lambda t: lambda s, b, h, q, k: ((s * t).sum() + (t * q)[0]),
    )  # fmt: skip
    learned(
        (M, N),
        absolute_2d_bias=lambda t: lambda s, b, h, q, k: s + t[q, k],
        chained_2d=lambda t: lambda s, b, h, q, k: s + t[q][k],
        transposed=lambda t: lambda s, b, h, q, k: s + t.T[k, q] + t.transpose(0, 1)[k][q] + t.t()[k, q],
        flattened=lambda t: lambda s, b, h, q, k: s + t.view(-1)[q * N + k] + t.reshape(-1)[q * N + k] + t.flatten()[k],
        row_norm=lambda t: lambda s, b, h, q, k: s + t[q].norm() + t[q].sum() + t[q, :4].mean() + t[:, k].amax(),
        row_slices=lambda t: lambda s, b, h, q, k: s + t[q][2:][k % 4] + t[q, 1::3][h] + t[q][-3:][h] + t[q].flip(0)[k],
        row_view=lambda t: lambda s, b, h, q, k: s + t[q, :12].view(3, 4)[h, 2] + t[q][:6].reshape(2, 3)[b, h],
        row_elementwise=lambda t: lambda s, b, h, q, k: s + (t[q] * t[0] + 1.0)[k] + torch.exp(t[q])[k],
        row_dot=lambda t: lambda s, b, h, q, k: s + torch.dot(t[q], t[h]) + t[q] @ t[h] + (t[:3] @ t[q])[h],
        ellipsis=lambda t: lambda s, b, h, q, k: s + t[..., k][q] + t[q, ...][k] + t[None, q, k][0] + t[q, None, k][0],
        none_index=lambda t: lambda s, b, h, q, k: s + t[:, None, :][q, 0, k] + t.unsqueeze(0)[0, q, k],
        embedding=lambda t: lambda s, b, h, q, k: s + F.embedding(q, t)[k] + F.embedding(q[None], t)[0, k],
        expanded=lambda t: lambda s, b, h, q, k: s + t[None].expand(4, -1, -1)[b, q, k] + t[:1].expand(5, N)[h, k],
        permuted_row=lambda t: lambda s, b, h, q, k: (
            s + t[q][None, :].permute(1, 0)[k, 0]
            + t[q].unsqueeze(-1).squeeze(-1)[k]
        ),
        select_dim=lambda t: lambda s, b, h, q, k: s + t.select(1, k)[q] + torch.select(t, -1, k).select(0, q),
        any_all=lambda t: lambda s, b, h, q, k: torch.where((t[q] > 1.0).any() & (t[q] > 0.1).all(), s, s * 2),
        vector_index=lambda t: lambda s, b, h, q, k: s + t[torch.stack([q, q]), k].sum() + t[q, torch.stack([k, k])][1],
    )  # fmt: skip
    learned(
        (H, M, N),
        head_specific_bias=lambda t: lambda s, b, h, q, k: s + t[h, q, k],
        mixed_index=lambda t: lambda s, b, h, q, k: (
            s + t[0, q, k] + t[h, :, k][q] + t[h, 2:, 1:][q % 5, k % 5]
            + t[-1][q][-2]
        ),
        weird_head=lambda t: lambda s, b, h, q, k: s + t[h][q, k] + t[:, q][h, k] + t[h, -1, k] + t[..., 2][h, q],
        split_index=lambda t: lambda s, b, h, q, k: s + t[h, :, k].mean() + t[torch.stack([h, h]), :, k][1, q],
    )  # fmt: skip
    learned(
        (B, H, M, N),
        batch_head_bias=lambda t: lambda s, b, h, q, k: s + t[b, h, q, k],
        index_weird1=lambda t: lambda s, b, h, q, k: s + t[0][b, h][q].sum() + t[0][h, q][k],
        index_weird2=lambda t: lambda s, b, h, q, k: s + t[b][h][torch.tensor(2), q],
        viewed_4d=lambda t: lambda s, b, h, q, k: (
            s + t.view(B * H, M, N)[b * H + h, q, k]
            + t.permute(3, 2, 1, 0)[k, q, h, b]
        ),
        diagonal=lambda t: lambda s, b, h, q, k: s + t.diagonal(dim1=2, dim2=3)[b, h, q],
    )  # fmt: skip

    @case
    def captured_all_dims() -> tuple[Any, ...]:
        tok, batch, head = a(N), a(B), a(H)
        return (lambda s, b, h, q, k: (s + tok[q] * tok[k]) * batch[b] + head[h]), tok, batch, head

    @case
    def distinct_biases() -> tuple[Any, ...]:
        x, y = a(N), a(N)
        return (lambda s, b, h, q, k: s + x[q] + y[k]), x, y

    @case
    def equal_sizes_in_prologue() -> tuple[Any, ...]:
        x, y = a(N), a(N)
        return (lambda s, b, h, q, k: s + (x * y)[q] + torch.outer(x, y)[q, k]), x, y

    @case
    def transposed_capture() -> tuple[Any, ...]:
        x = a(N, M)
        return (lambda s, b, h, q, k: s + x.mT[q, k]), x

    @case
    def one_tensor_twice() -> tuple[Any, ...]:
        x = a(N)
        y = x
        return (lambda s, b, h, q, k: s * x[q] + y[k]), x

    @case
    def view_of_parameter() -> tuple[Any, ...]:
        x = a(N, 2)
        y = x[:, 1]
        return (lambda s, b, h, q, k: s + y[q] * x[k, 0]), x

    @case
    def composed() -> tuple[Any, ...]:
        x = a(N)

        def inner(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + x[q]

        return (lambda s, b, h, q, k: inner(inner(s, b, h, q, k) * 2, b, h, k, q)), x

    @case
    def partial() -> tuple[Any, ...]:
        x = a(N)

        def inner(
            table: Tensor, gain: float, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, c: int
        ) -> Tensor:
            return s * gain + table[q] + c

        return functools.partial(functools.partial(inner, x), 0.5, c=3), x

    @case
    def bound_method() -> tuple[Any, ...]:
        @dataclass
        class Bias:
            table: Tensor
            gain: float = 0.3
            unused: dict[str, Any] = field(default_factory=lambda: {"x": [object()]})

            def scaled(self, k: Tensor) -> Tensor:
                return self.table[k] * self.gain

            def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + self.scaled(k) + self.scaled(q) * self.gain

        x = a(N)
        return Bias(x).mod, x

    @case
    def callable_object() -> tuple[Any, ...]:
        class Bias:
            factor = 0.25

            def __init__(self, table: Tensor) -> None:
                self.parts = {"tables": [table, 2.0]}

            @property
            def table(self) -> Tensor:
                return self.parts["tables"][0]

            def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + self.table[k] * self.parts["tables"][1] * self.factor

        x = a(N)
        return Bias(x), x

    @case
    def module_with_parameters() -> tuple[Any, ...]:
        class Learned(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Parameter(a(N).detach())
                self.register_buffer("shift", a(H).detach())
                self.inner = torch.nn.Linear(2, 2)
                self.extra = torch.nn.ParameterList([a(N).detach()])

            def forward(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s * self.table[q] + self.shift[h] + self.inner.bias[0] + self.extra[0][k]

        module = Learned().double()
        return module, module.table, module.inner.bias, module.extra[0]

    @case
    def module_method() -> tuple[Any, ...]:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Parameter(a(N).detach())

            def helper(self, q: Tensor) -> Tensor:
                return self.table[q]

            def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + self.helper(q)

        model = Model()
        return model.score, model.table

    @case
    def containers() -> tuple[Any, ...]:
        x, y = a(N), a(N)
        Pair = namedtuple("Pair", "first second")
        tables = {"x": x, "rest": (y, Pair(3, 0.5))}
        return (lambda s, b, h, q, k: s + tables["x"][q] + tables["rest"][0][k] * tables["rest"][1].second), x, y  # type: ignore

    @case
    def loops() -> tuple[Any, ...]:
        tables = [a(N), a(N), a(N)]

        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            for i, table in enumerate(tables):
                s = s + table[q] * (i + 1)
            return s

        return mod, *tables

    return mods


def augmented(s: Tensor, q: Tensor) -> Tensor:
    x = s * 2
    x += q
    x *= 0.5
    return x


def reductions(x: Tensor) -> Tensor:
    total = x.sum() + x.mean() + x.prod() + x.max() + x.amin() + x.norm() + x.norm(1) + x.norm(math.inf) + x.var()
    total = total + x.std() + torch.softmax(x, 0)[1] + torch.logsumexp(x, 0) + x.cumsum(0)[1] + (x @ x) + x.abs().all()
    return total + x.unsqueeze(0).sum(0, keepdim=True).mean() + torch.einsum("i,i->", x, x)


def without_gradient(s: Tensor) -> Tensor:
    with torch.no_grad():
        return s * s


SCORE_MODS = score_mods()


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_matches_eager(name: str) -> None:
    mod, *leaves = SCORE_MODS[name]()
    check_score(mod, *leaves)


def test_half_precision_captures_compute_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        table = values(N, dtype=dtype)
        bound = check_score(lambda s, b, h, q, k, table=table: s + table[q] * s, table, dtype=torch.float32, tol=2e-2)
        assert bound.captures[0].dtype == dtype
        rounded = trace(lambda s, b, h, q, k, dtype=dtype: (s * 1.001).to(dtype) + 0.0, "score")
        expected = (scores(torch.float32) * 1.001).to(dtype).float()
        torch.testing.assert_close(run(rounded, scores(torch.float32)), expected, rtol=0, atol=0)


# Mask mods.

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


def test_torch_combinators() -> None:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    check_mask(and_masks(causal, or_masks(MASK_MODS["document"], MASK_MODS["window"])))


def test_mask_captures_carry_no_gradient() -> None:
    limits = values(N)
    (captured,) = trace(lambda b, h, q, k: k < limits[q], "mask").captures
    assert not captured.requires_grad


# The memo: values are read at each call, kinds are the key.


def traces(f: Callable[[], Any]) -> int:
    before = stats()["traces"]
    f()
    return stats()["traces"] - before


def test_new_values_are_hits_and_never_stale() -> None:
    def make(table: Tensor, gain: float, shift: int) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s * gain + table[q + shift] * (2 * shift + 1)

        return mod

    check_score(make(values(M + 5), 0.5, 1))
    for size, gain, shift in ((M + 4, 2.5, 4), (400, -1.0, 0), (M + 1, 1.0, 1), (77, 0.0, -3)):
        mod = make(values(size), gain, shift)
        assert traces(lambda mod=mod: trace(mod, "score", torch.float64)) == 0
        check_score(mod)


def test_rebound_closure_and_global_are_read_anew() -> None:
    gain = 2.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gain * GLOBAL_GAIN

    check_score(mod)
    gain = 3.0
    assert traces(lambda: check_score(mod)) == 0
    global GLOBAL_GAIN
    GLOBAL_GAIN = -0.25
    assert traces(lambda: check_score(mod)) == 0
    GLOBAL_GAIN = 1.5


def test_flags_strings_and_other_dtypes_are_other_mods() -> None:
    def make(flag: bool, word: str, table: Tensor) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s + table[q] if flag else s - 1
            return s * 2 if word == "twice" else s

        return mod

    for flag in (True, False):
        for word in ("once", "twice"):
            assert traces(lambda f=flag, w=word: check_score(make(f, w, values(N)))) == 1
            assert traces(lambda f=flag, w=word: check_score(make(f, w, values(N)))) == 0
    assert traces(lambda: check_score(make(True, "once", values(N).detach().float()))) == 1
    assert traces(lambda: check_score(make(True, "once", OFFSET))) == 1


def test_decisions_on_numbers_are_guards() -> None:
    def make(cap: float, window: int) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap > 0:
                s = cap * torch.tanh(s / cap)
            for i in range(window):
                s = s + (q // (i + window)) * i
            return s

        return mod

    assert traces(lambda: check_score(make(2.0, 2))) == 1
    assert traces(lambda: check_score(make(3.0, 2))) == 0
    assert traces(lambda: check_score(make(-3.0, 2))) == 1
    assert traces(lambda: check_score(make(3.0, 4))) == 1
    assert traces(lambda: check_score(make(2.5, 2))) == 0


def test_numbers_in_all_positions() -> None:
    """Some become runtime numbers, some (math.sqrt, int) literals under a guard: the value is right in any case."""

    def make(g: float, n: int) -> list[Callable[..., Tensor]]:
        return [
            lambda s, b, h, q, k: s * math.sqrt(g) + math.exp(-g),
            lambda s, b, h, q, k: torch.clamp(s, -g, g) + s**n + sum(q * i for i in range(n)),
            lambda s, b, h, q, k: s.masked_fill(q < k, -g) + torch.where(q > k, g, s) + torch.where(q > k, g, 0.0),
            lambda s, b, h, q, k: s + max(n, 2) + min(g, 1.0) + abs(g) + n**2 + (n << 1) + g**2 + 2**-n,
            lambda s, b, h, q, k: s + torch.tensor(g) + torch.full((), g) + torch.tensor([g, 2.0])[0] + s.new_tensor(g),
            lambda s, b, h, q, k: s * round(g, 1) + int(g) + n / 2 + n % 2 + n // 2 + float(n),
            lambda s, b, h, q, k: s + (q - k) / g + g / (q + 1) + (q - k) / n,
            lambda s, b, h, q, k: torch.lerp(s, s * 2, g) + torch.add(s, s, alpha=g) + torch.addcmul(s, s, s, value=g),
            lambda s, b, h, q, k: F.elu(s, g) + F.hardtanh(s, -g, g) + torch.pow(g, s) + F.softplus(s, beta=g),
        ]

    for g, n in ((0.5, 3), (1.25, 2), (0.5, 4)):
        for mod in make(g, n):
            check_score(mod)


def test_divisors_and_infinities_stay_literals() -> None:
    def make(stride: int, low: float) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: torch.where(q % stride == k // stride, s, low)

    for stride in (2, 3):
        bound = check_score(make(stride, -math.inf))
        assert bound.numbers == ()
        assert next(n.value for n in bound.graph.nodes if n.op == "const") == stride
    assert check_score(make(3, -2.0)).numbers == (-2.0,)


def test_same_and_different_tensors() -> None:
    def make(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + x[q] * y[q]

    x, y = values(N), values(N) * 2
    assert len(check_score(make(x, x)).captures) == 1
    assert len(check_score(make(x, y)).captures) == 2


class _Layer(torch.nn.Module):
    """A layer whose forward calls attention with mods of its own, and does much that no mod does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(2))
        self.left = 3
        self.right = 5

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.table[h]

    def behind(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < self.left

    def ahead(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx - q_idx < self.right

    def forward(self, q: Tensor, closure: bool = False) -> Tensor:
        _Straight.apply(getattr(self, "table"))  # noqa: B009  (out of reach of the mods)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self.table[h]

        return flex_attention(q, q, q, score_mod if closure else self.score_mod)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize("closure", [False, True])
def test_a_layer_may_call_attention_with_its_own_method(closure: bool) -> None:
    layer, q = _Layer(), torch.randn(1, 2, 8, 4)
    layer(q, closure).sum().backward()
    assert layer.table.grad is not None
    before = stats()["traces"]
    layer(q, closure)
    _Layer()(q, closure)
    assert stats()["traces"] == before


def test_every_attribute_that_any_method_of_an_object_reads_is_watched() -> None:
    layer = _Layer()
    mod = mods.and_masks(layer.behind, layer.ahead)
    assert trace(mod, "mask").numbers == (3, 5)
    layer.left, layer.right = 4, 9
    before = stats()["traces"]
    assert trace(mod, "mask").numbers == (4, 9)
    assert stats()["traces"] == before


def test_what_a_method_reaches_through_an_operator_of_its_object_is_followed() -> None:
    class Table:
        def __init__(self) -> None:
            self.values = torch.ones(3)

        def __getitem__(self, index: Tensor) -> Tensor:
            return self.values[index]

        def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self[h]

    table, other = Table(), Table()
    assert trace(table.score_mod, "score").captures[0] is table.values
    before = stats()["traces"]
    assert trace(other.score_mod, "score").captures[0] is other.values
    assert stats()["traces"] == before


def test_custom_functions_are_refused_where_they_run() -> None:
    use = False

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return _Straight.apply(score) if use else score * 2

    trace(mod, "score")
    use = True
    with pytest.raises(UnsupportedError, match=r"autograd\.Function _Straight at .*test_trace\.py:\d+, expected plain"):
        trace(mod, "score")
    x = torch.ones((), requires_grad=True)
    assert _Straight.apply(x * 1.4).item() == 1.0  # outside of a trace it works as ever
    trace(lambda b, h, q_idx, kv_idx: _Straight.apply(q_idx.float()) > 1, "mask")


def test_attributes_by_computed_names_are_followed() -> None:
    class Hidden:
        gain = 2.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * getattr(Hidden, "ga" + "in") + getattr(Hidden, "tab" + "le")[q]

    for gain in (2.0, 3.0):
        Hidden.gain, Hidden.table = gain, values(N)
        assert traces(lambda: check_score(mod, Hidden.table)) == (gain == 2.0)


def test_wrapped_functions_and_namespaces() -> None:
    gain = 2.0

    @functools.lru_cache
    def hidden(x: Tensor) -> Tensor:
        return x * gain

    check_score(lambda s, b, h, q, k: hidden(s))
    gain = 3.0
    check_score(lambda s, b, h, q, k: hidden(s))
    settings = SimpleNamespace(gain=1.0, table=values(N))
    for settings.gain in (4.0, 5.0):
        mod = lambda s, b, h, q, k: s * settings.gain + settings.table[q]  # noqa: E731
        assert check_score(mod, settings.table).numbers == (settings.gain,)


def test_numpy_numbers() -> None:
    gain, shift = np.float32(0.5), np.int64(2)
    assert check_score(lambda s, b, h, q, k: s * gain + (q + shift)).numbers == (0.5, 2)


def test_long_literal_lists_are_loaded() -> None:
    bound = check_score(lambda s, b, h, q, k: s + torch.tensor([i * i for i in range(40)])[q + k])
    assert [c.shape for c in bound.captures] == [(40,)]
    check_score(lambda s, b, h, q, k: s + torch.linspace(0, 1, 50, dtype=torch.float64)[q] + torch.arange(100).sum())


def test_a_long_list_is_one_tensor_for_all_calls() -> None:
    """Neither a node for each number, nor a tensor for each call; the list is read again when it changes."""
    numbers = [i * 7 % 1000 for i in range(5000)]
    table = [[i / 3 + j for j in range(7)] for i in range(100)]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = torch.tensor(table)[q, k % 7] + torch.tensor([0.5] * 20 + [1, True], dtype=torch.float64).square()[k]
        return s * torch.as_tensor(numbers)[q * 100 + k] + near - s.new_tensor(numbers).long()[k]

    first = check_score(mod)
    assert len(first.graph.nodes) < 60
    assert {c.shape for c in first.captures} == {(5000,), (100, 7), (22,)}
    assert all(a is b for a, b in zip(first.captures, trace(mod, "score", torch.float64).captures, strict=True))
    numbers[100 * POINTS[2][1] + POINTS[3][1]] += 1
    check_score(mod)


def test_a_long_list_is_placed_on_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, there = list(range(5000)), torch.device("meta")
    mod = lambda s, b, h, q, k: s + torch.tensor(numbers)[q]  # noqa: E731
    (first,) = trace(mod, "score").on(there).captures
    monkeypatch.setattr(graph, "_literal_on", None)
    assert first.device == there and trace(mod, "score").on(there).captures[0] is first


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_callers_mode_is_not_part_of_the_trace(context: Callable[[], Any]) -> None:
    table = values(N)

    def make(unique: str) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s * table[q] * len(unique)

    with context():
        bound = trace(make(str(context)), "score", torch.float64)
    assert "detach" not in repr(bound.graph)
    assert traces(lambda: check_score(make(str(context)), table)) == 0


def test_what_a_mod_changes_is_changed_as_by_python() -> None:
    class Bias:
        def __init__(self) -> None:
            self.tables, self.gain, self.calls = [values(N)], 2.0, 0

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            self.calls += 1
            return s + self.tables[0][q] * self.gain

    bias = Bias()
    table = bias.tables[0]
    with pytest.warns(RetraceWarning, match="changes the attribute 'calls' of a captured object of Bias") as caught:
        for calls in (1, 2, 3):
            trace(bias, "score")
            assert (bias.calls, bias.gain, len(bias.tables)) == (calls, 2.0, 1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert bias.tables[0] is table


def test_recursion_and_cycles() -> None:
    table = values(N)

    def folded(s: Tensor, q: Tensor, depth: int) -> Tensor:
        return s if depth == 0 else folded(s + table[q], q, depth - 1)

    check_score(lambda s, b, h, q, k: folded(s, q, 2), table)

    class Node:
        def __init__(self) -> None:
            self.owner, self.table = self, table

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.owner.owner.table[q]

    check_score(Node(), table)


def test_literals_of_many_kinds() -> None:
    class Mode(enum.Enum):
        ADD, SCALE = 1, 2

    def make(mode: Mode, kinds: frozenset[str], dtype: torch.dtype) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s + q.to(dtype) if mode is Mode.ADD else s * 2
            return -s if "negative" in kinds else s

        return mod

    for mode in Mode:
        assert traces(lambda m=mode: check_score(make(m, frozenset(["negative"]), torch.float64))) == 1
        assert traces(lambda m=mode: check_score(make(m, frozenset(["negative"]), torch.float64))) == 0


# Errors: the user's line, and what to write instead.


def line(mod: Callable[..., Any], offset: int = 1) -> str:
    return f"test_trace.py:{mod.__code__.co_firstlineno + offset}"


def refuse(mod: Any, kind: str, pattern: str, error: type[Exception] = ModError, offset: int | None = None) -> None:
    with pytest.raises(error, match=pattern) as caught:
        trace(mod, kind)  # type: ignore[arg-type]
    if offset is not None:
        assert line(mod, offset) in str(caught.value), str(caught.value)


def test_data_dependent_control_flow() -> None:
    def branch(s, b, h, q, k):
        if q > k:
            return s
        return -s

    def chained(b, h, q, k):
        return q > k and h == 0

    def item(s, b, h, q, k):
        return s * q.item()

    def as_int(s, b, h, q, k):
        return s * SCALE[int(q)]

    def ranged(s, b, h, q, k):
        return s + SCALE[h : h + 1].sum()

    def negation(b, h, q, k):
        return not q > k

    refuse(branch, "score", r"torch\.where\(condition", offset=1)
    refuse(chained, "mask", r"`&`", offset=1)
    refuse(negation, "mask", r"`~`", offset=1)
    for mod in (item, as_int, ranged):
        refuse(mod, "score", "reads the value of a tensor", offset=1)


def test_mutation_and_randomness() -> None:
    table = values(N).detach()

    def changes_capture(s, b, h, q, k):
        table[0] = 1.0
        return s

    def changes_score(s, b, h, q, k):
        s += 1
        return s

    def adds_in_place(s, b, h, q, k):
        table.add_(1)
        return s

    def noise(s, b, h, q, k):
        return s + torch.rand(())

    def dropout(s, b, h, q, k):
        return F.dropout(s, 0.5)

    for mod in (changes_capture, changes_score, adds_in_place):
        refuse(mod, "score", "in place", offset=1)
    for mod in (noise, dropout):
        refuse(mod, "score", "random numbers", offset=1)
    assert torch.equal(table, values(N))


def test_results() -> None:
    one = values(1)
    refuse(lambda s, b, h, q, k: s * one, "score", r"shape \[1\], expected a scalar.*scale\[0\]", offset=0)
    refuse(lambda s, b, h, q, k: None, "score", "type NoneType, expected a scalar tensor")
    refuse(lambda b, h, q, k: q - k, "mask", r"torch\.int64, expected torch\.bool\. Write a comparison", offset=0)
    refuse(lambda b, h, q, k: 1, "mask", "type int, expected a bool tensor")


def test_calls() -> None:
    refuse(3, "score", "found 3, expected a callable")
    refuse(causal, "score", "looks like a mask_mod: pass it as block_mask")
    refuse(lambda s, b, h, q, k: s, "mask", "looks like a score_mod")
    refuse(lambda s, b, h: s, "score", "5 positional parameters")
    refuse(lambda s, b, h, q, k, *, c: s, "score", "5 positional parameters")
    trace(lambda *args: args[0], "score")
    trace(lambda s, *rest: s, "score")
    trace(lambda s, b, h, q, k, extra=1: s * extra, "score")


def test_results_that_are_no_scores() -> None:
    mine = "score_mod mod, line .*"

    def refused(mod: Callable[..., Any], pattern: str) -> None:
        mod.__name__ = "mod"
        refuse(mod, "score", pattern)

    refused(lambda s, b, h, q, k: torch.complex(s, s), "score_mod mod")
    refused(lambda s, b, h, q, k: s.to(torch.complex64), mine + "dtype torch.complex64, expected a real number")
    refused(lambda s, b, h, q, k: q >= k, mine + r"dtype torch.bool, expected a real number. It looks like a mask_mod")
    refused(lambda s, b, h, q, k: True, "score_mod mod: found a result of type bool.* It looks like a mask_mod")
    refused(lambda s, b, h, q, k: 1j, "score_mod mod: found a result of type complex.*real part")
    refused(lambda s, b, h, q, k: s.unsqueeze(0), mine + r"shape \[1\]")
    refused(lambda s, b, h, q, k: s * q.item(), "score_mod mod at .* reads the value of a tensor")
    refused(lambda s, b, h, q, k: s * torch.rand(()), "score_mod mod at .* draws random numbers")
    refused(lambda s, b, h, q, k: torch.nonzero(s).sum(), "score_mod mod at .* reads the value of a tensor")


def test_messages_name_the_kind_of_mod() -> None:
    def mod(b, h, q, k):
        return q + k

    refuse(mod, "mask", "mask_mod mod, line .*: found a result of dtype torch.int64")
    refuse(lambda b, h, q, k: q, "mask", "^mask_mod, line")


def test_arguments_are_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row has no parameter for goes to PyTorch's decomposition, or is refused."""
    long = values(N, 4)
    refuse(lambda s, b, h, q, k: s + s.view(torch.int32), "score", "reads the bits of a", UnsupportedError)
    refuse(lambda s, b, h, q, k: s + long[q].roll(1)[0] + torch.gcd(q, k), "score", "gcd.* of steps", UnsupportedError)
    refuse(
        lambda s, b, h, q, k: s + long[q].scatter(0, q[None], s[None].double())[1],
        "score",
        "torch.where",
        UnsupportedError,
    )
    monkeypatch.setitem(aten.ROWS, "round.decimals", aten.ROWS["floor"])
    refuse(lambda s, b, h, q, k: torch.round(s, decimals=1), "score", "no rule: .*'decimals'", UnsupportedError)


def test_unknown_operators_and_long_reductions() -> None:
    long = values(N, 256)
    refuse(lambda s, b, h, q, k: s + long[q].norm(), "score", "over 256 elements", UnsupportedError)
    refuse(lambda s, b, h, q, k: torch.special.bessel_j0(s), "score", "bessel_j0", UnsupportedError, offset=0)
    refuse(lambda s, b, h, q, k: s + long[q].sort()[0][k], "score", "sort", UnsupportedError, offset=0)
    refuse(lambda s, b, h, q, k: _Straight.apply(s), "score", "autograd.Function", UnsupportedError)


def test_the_users_exception_is_the_cause() -> None:
    def fails(s, b, h, q, k):
        raise KeyError("no such bias")

    with pytest.raises(ModError, match="raised KeyError: 'no such bias'") as caught:
        trace(fails, "score")
    assert isinstance(caught.value.__cause__, KeyError)
    assert line(fails) in str(caught.value)


# Prints.


def test_printed_alibi() -> None:
    slopes = values(H, dtype=torch.float32)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    graph = trace(alibi, "score").graph
    assert_expected_inline(
        repr(graph),
        """\
def alibi(score, b, h, q_idx, kv_idx, slopes: f32[:]):
    t0 = slopes[h]       # f32
    t1 = kv_idx - q_idx  # i32
    t2 = f32(t1)         # f32
    t3 = t0 * t2         # f32
    t4 = score + t3      # f32
    return t4""",
    )
    assert_expected_inline(
        repr(differentiate(graph, (0,))),
        """\
def alibi_grad(grad, score, b, h, q_idx, kv_idx, slopes: f32[:]):
    t0 = slopes[h]       # f32
    t1 = kv_idx - q_idx  # i32
    t2 = f32(t1)         # f32
    t3 = grad * t2       # f32
    return grad, t3""",
    )


def test_printed_window() -> None:
    window = 128

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    assert_expected_inline(
        repr(trace(sliding, "mask").graph),
        """\
def sliding(b, h, q_idx, kv_idx, window: int):
    t0 = q_idx >= kv_idx  # bool
    t1 = q_idx - kv_idx   # i32
    t2 = i32(window)      # i32
    t3 = t1 < t2          # bool
    t4 = t0 & t3          # bool
    return t4""",
    )


# Random mods.

TABLES = {"t1": values(N), "t2": values(M, N), "t0": values()}


def expressions() -> st.SearchStrategy[str]:
    """Python text of scalar expressions, smooth where the samples lie."""
    index = st.sampled_from(
        ["q", "k", "h", "(q + k) % 5", "abs(q - k)", "torch.clamp(q - k, 0, 6)", "-1 - h", "q // 2"]
    )
    leaf = st.one_of(
        st.sampled_from(["s", "s", "q", "k", "h", "b", "0.75", "2", "t0", "t1.mean()", "torch.exp(t0)"]),
        st.builds("t1[{}]".format, index),
        st.builds("torch.sigmoid(t1)[{}]".format, index),
        st.builds("t2[q, {}]".format, index),
        st.builds("t2[q][{}]".format, index),
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        unary = st.sampled_from(
            ["torch.tanh({})", "torch.sin({})", "torch.sigmoid({})", "(-{})", "F.silu({})", "({} ** 2)"]
        )
        binary = st.sampled_from(["({} + {})", "({} - {})", "({} * {})", "torch.where(q >= k, {}, {})"])
        compare = st.sampled_from(["torch.where({} > {}, {}, {})"])
        tensor = inner.map(lambda x: f"(0 * s + {x})")
        return st.one_of(
            st.builds(lambda f, x: f.format(x), unary, tensor),
            st.builds(lambda f, x, y: f.format(x, y), binary, tensor, inner),
            st.builds(lambda f, *x: f.format(*x), compare, tensor, inner, inner, inner),
        )

    return st.recursive(leaf, grow, max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(expressions())
def test_random_mods(text: str) -> None:
    mod = eval(f"lambda s, b, h, q, k: 0 * s + {text}", {"torch": torch, "F": F, **TABLES})
    check_score(mod, *TABLES.values())
