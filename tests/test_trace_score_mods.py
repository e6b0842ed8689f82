"""Traced score_mods against the same mods run by Python: values and gradients, of written and random mods."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_comparison import B, H, M, N, check_score, run, scores, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn.trace.trace import trace

# Those of upstream's tests ("Score mods", "Captured buffers") and more of their kind.

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
        detached_in_place=lambda s, b, h, q, k: s * detached_in_place(s),
        copied=lambda s, b, h, q, k: s * torch.tensor(s) + torch.tensor([s, 2.0])[h % 2] + s.new_tensor(s) * s,
        sinc_at_zero=lambda s, b, h, q, k: torch.sinc(s * (q != k)),
        atan2_at_zero=lambda s, b, h, q, k: s + torch.atan2(s * (q != k), s * (q != k)),
        no_grad_in_place=lambda s, b, h, q, k: s * changed_without_gradient(s, q),
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
        several_without_gradient=lambda t: lambda s, b, h, q, k: sum(
            (x[h % 2] if x.ndim else x for x in several_without_gradient(t)), s * t[q]
        ),
        new_tensor=lambda t: lambda s, b, h, q, k: s * t[h] + s.new_tensor(t[q]),
        alias=lambda t: lambda s, b, h, q, k: changed_alias(s * t[q], k),
        no_grad_in_place_of_learned=lambda t: lambda s, b, h, q, k: s * sums_without_gradient(s, t, q),
        deviation_and_mean_of_equals=lambda t: lambda s, b, h, q, k: s + sum(torch.std_mean(torch.stack([t[q], t[k]]))),
        xlogy_at_zero=lambda t: lambda s, b, h, q, k: (
            torch.xlogy(t[h] * (q != k), torch.where(q < k, 2.0, torch.where(q > k, 3.0, (h % 2) * 1.5)))
            + torch.special.xlog1py(t[h] * (q != k), torch.where(q != k, 2.0, h - 1.0)) + s
        ),
        hard=lambda t: lambda s, b, h, q, k: sum(
            (f(t[q] - t[q].detach() + [-3, 0, 3, 6, 1, -1][i]) for f in HARD for i in range(6)), s
        ),
        extremes_of_equals=lambda t: lambda s, b, h, q, k: (
            s + torch.fmax(t[q], t[q].detach()) - torch.fmin(t[k].detach(), t[k])
        ),
        array=lambda t: lambda s, b, h, q, k: s * torch.asarray(s * t[k], requires_grad=False),
        deviation_of_equals=lambda t: lambda s, b, h, q, k: s + torch.stack([t[q], t[k]]).std(),
        sinc_of_zero=lambda t: lambda s, b, h, q, k: s + torch.sinc(t[h] * (q - k)),
        clamp_to_equal_bounds=lambda t: lambda s, b, h, q, k: torch.clamp(s, t[q], t[q]) + torch.clamp(s, t[q], t[k]),
        clamp_to_nan=lambda t: lambda s, b, h, q, k: torch.nan_to_num(s.clamp(min=torch.where(q > k, t[q], math.nan))),
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
        return (lambda s, b, h, q, k: s + tables["x"][q] + tables["rest"][0][k] * tables["rest"][1].second), x, y

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


def detached_in_place(s: Tensor) -> Tensor:
    x = s * 2
    x.detach_()
    return x + s


def several_without_gradient(t: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (*t.split(2)[:1], t.max(0).values, t.sort()[0], t.unbind()[1])


def changed_alias(x: Tensor, y: Tensor) -> Tensor:
    alias = torch.as_tensor(x)
    alias.add_(y)
    return x


def changed_without_gradient(s: Tensor, q: Tensor) -> Tensor:
    distance, kept = q + 0.5, s.detach() + 0
    with torch.no_grad():
        squared = s * s
        squared.add_(1)
        distance.mul_(2)
        kept.mul_(3)
    return squared.mul_(s) + distance + kept


def sums_without_gradient(s: Tensor, t: Tensor, q: Tensor) -> Tensor:
    """Tensors without a gradient stay without one, whatever is added to them under no_grad."""
    total, row, kept = torch.zeros(N, dtype=t.dtype), torch.zeros((), dtype=s.dtype), t[q] * 2
    with torch.no_grad():
        total += t
        row.copy_(s).mul_(s)
        row += kept
        product = kept.detach().clone()
        product *= s
        product *= s
        same = kept.to(kept.dtype)
    total[0]
    row = row + kept
    row += same
    return total.mean() + row + product


HARD = (F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish)
SCORE_MODS = score_mods()


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:Converting a tensor with requires_grad")  # of PyTorch
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


@pytest.mark.parametrize("exponent", [math.inf, -math.inf, math.nan])
def test_exponents_that_are_not_finite(exponent: float) -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s**exponent + s.sigmoid() ** exponent

    score, place = torch.tensor([-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan]), torch.tensor(0)
    found = trace(mod, "score")(score, *[place] * 4)
    torch.testing.assert_close(found, mod(score, *[place] * 4), equal_nan=True)
