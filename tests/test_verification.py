"""verify: correct calls pass with any mod and mask, and an error in each result is found where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, create_block_mask, mods, verification, verify
from flexattn.errors import ArgumentError, DeviceError, DtypeError, UnsupportedError

B, Hq, Hkv, M, N, D, Dv = 2, 4, 2, 70, 90, 16, 24


def inputs(dtype: torch.dtype = torch.float32, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Hq, M, D), (batch, Hkv, N, D), (batch, Hkv, N, Dv)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Some rows of query and of key have no pair."""
    return (kv_idx - q_idx > 5 * h) & (kv_idx < 60 + b) & (q_idx > 3)


TABLE = torch.randn(Hq, M + N)
SCORES: dict[str, Any] = {
    "none": None,
    "softcap": mods.softcap(5.0),
    "table": lambda score, b, h, q_idx, kv_idx: score + TABLE[h, q_idx - kv_idx + N],
    "constant": lambda score, b, h, q_idx, kv_idx: 0.5,
    "masks": lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx % 3 == 0, score, -float("inf")),
}


def masks() -> dict[str, Any]:
    window_mask = create_block_mask(window, B, Hq, M, N, device="cpu", BLOCK_SIZE=16)
    return {
        "none": None,
        "window": window_mask,
        "by hand": BlockMask.from_kv_blocks(
            window_mask.kv_num_blocks, window_mask.kv_indices, BLOCK_SIZE=16, mask_mod=mods.causal, seq_lengths=(M, N)
        ),
        "torch": upstream.create_block_mask(window, B, Hq, M, N, device="cpu", BLOCK_SIZE=16),
    }


@pytest.mark.parametrize("mask", ["none", "window", "by hand", "torch"])
@pytest.mark.parametrize("score", list(SCORES))
def test_correct_calls_pass(score: str, mask: str) -> None:
    found = verify(*inputs(), SCORES[score], masks()[mask], enable_gqa=True, rows=12)
    assert found, str(found)
    assert [c.name for c in found.comparisons] == ["out", "lse", "dq", "dk", "dv"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [1, B])
def test_dtypes_and_shared_keys(dtype: torch.dtype, batch: int) -> None:
    found = verify(*inputs(dtype, batch), mods.softcap(5.0), masks()["window"], 0.3, True, rows=12)
    assert found, str(found)


def test_forward_alone_and_repeated() -> None:
    found = verify(*inputs(), enable_gqa=True, gradients=False)
    assert [c.name for c in found.comparisons] == ["out", "lse"] and found
    assert found == verify(*inputs(), enable_gqa=True, gradients=False)
    assert found != verify(*inputs(), enable_gqa=True, gradients=False, seed=1)


def test_empty() -> None:
    query, key, value = inputs()
    assert verify(query[:, :, :0], key, value, enable_gqa=True)
    assert verify(query, key[:, :, :0], value[:, :, :0], enable_gqa=True)


HALVES = (torch.bfloat16, torch.float16)
DRAWN_MASKS = {
    "none": None, "causal": mods.causal, "window": mods.sliding_window(20), "prefix": mods.prefix_lm(5),
    "documents": lambda b, h, q_idx, kv_idx: q_idx // 37 == kv_idx // 37,
}  # fmt: skip
DRAWN_SCORES: dict[str, Callable[[int], Any]] = {
    "none": lambda heads: None,
    "softcap": lambda heads: mods.softcap(20.0),
    "alibi": mods.alibi,
    "learned": lambda heads: mods.relative_bias(torch.nn.Parameter(torch.randn(heads, 63))),
    "cancels": lambda heads: lambda score, b, h, q_idx, kv_idx: (score + 10) * (score + 10) * 0.02,
}


class Drawn(NamedTuple):
    """A call."""

    tensors: tuple[Tensor, Tensor, Tensor]
    score: Any
    mask: BlockMask | None
    scale: float | None

    def verified(self, seed: int) -> verification.Verification:
        return verify(*self.tensors, self.score, self.mask, self.scale, True, seed=seed, rows=16)


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    """A call of any size, dtype, mask, score_mod and magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from((torch.float32, *HALVES)))
    shared, groups, batch = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 4), (1, 2)))
    head_dim = draw(st.sampled_from((1, 16, 32, 64, 128, 256)))
    value_dim = draw(st.sampled_from((head_dim, 1, 32)))
    q_len = draw(st.sampled_from((1, 2, 5, 33, 128, 300)))
    kv_len = draw(st.sampled_from((q_len, q_len, 1, 65, 200)))
    magnitude, offset = draw(st.sampled_from((1.0, 1.0, 0.1, 20.0))), draw(st.sampled_from((0.0, 0.0, 3.0)))
    shapes = (
        (batch, shared * groups, q_len, head_dim), (draw(st.sampled_from((1, batch))), shared, kv_len, head_dim)
    )  # fmt: skip
    query, key = (torch.randn(shape, generator=generator) for shape in shapes)
    value = torch.randn(*key.shape[:3], value_dim, generator=generator) + offset
    mask_mod = DRAWN_MASKS[draw(st.sampled_from(tuple(DRAWN_MASKS)))]
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, q_len, kv_len, device="cpu")
    score = DRAWN_SCORES[draw(st.sampled_from(tuple(DRAWN_SCORES)))](shared * groups)
    tensors = (query * magnitude).to(dtype), key.to(dtype), value.to(dtype)
    return Drawn(tensors, score, mask, draw(st.sampled_from((None, None, 1.0, -0.3))))


@settings(max_examples=40)
@given(calls(), st.integers(0, 99))
def test_random_correct_calls_pass(call: Drawn, seed: int) -> None:
    found = call.verified(seed)
    assert found, str(found)


class Rounded(torch.autograd.Function):
    """Attention as kernels in half precision compute it: weights and their gradients are rounded before products."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        query, key, value, keep, scale = args
        q, k, v = (x.float() for x in (query, key, value))
        score = (q @ k.mT * scale).masked_fill(~keep, -math.inf)
        largest = score.amax(-1, keepdim=True).clamp(min=-1e30)
        weight = torch.exp(score - largest)
        total = weight.sum(-1, keepdim=True)
        out = torch.where(total == 0, 0.0, weight.to(query.dtype).float() @ v / total).to(query.dtype)
        lse = (total.log() + largest).squeeze(-1)
        ctx.save_for_backward(query, key, value, torch.exp(score - lse.unsqueeze(-1)).nan_to_num(0.0), out)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weight, out = ctx.saved_tensors
        q, k, v, d_out = (x.float() for x in (query, key, value, grads[0]))
        d_score = weight * (d_out @ v.mT - (out.float() * d_out).sum(-1, keepdim=True))
        weight, d_score = (x.to(query.dtype).float() for x in (weight, d_score))
        found = d_score @ k * ctx.scale, d_score.mT @ q * ctx.scale, weight.mT @ d_out
        return *(x.to(query.dtype) for x in found), None, None


def rounded(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """`flex_attention` without score_mod."""
    _, mask, scale, _ = rest
    sizes = query.size(2), key.size(2)
    keep = flexattn.create_mask(mods.noop_mask if mask is None else mask.mask_mod, None, None, *sizes, device="cpu")
    heads = [x.expand(query.size(0), -1, -1, -1) for x in (key, value)]
    heads = [x.repeat_interleave(query.size(1) // key.size(1), 1) for x in heads]
    out, lse = Rounded.apply(query, *heads, keep, query.size(3) ** -0.5 if scale is None else scale)  # type: ignore[misc]
    return out, flexattn.AuxOutput(lse=lse)


@settings(max_examples=40)
@given(calls(), st.integers(0, 99))
def test_kernels_that_round_pass(call: Drawn, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "flex_attention", rounded)
        found = call._replace(score=None).verified(seed)
    assert found, str(found)


def test_a_gpus_tanh_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, tanh of half precision has a relative error of 2 ** -11. Here the results are those of such scores."""
    call, cap = flexattn.flex_attention, 20.0

    def rough(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        sign = torch.where((q_idx * 7 + kv_idx * 5) % 3 == 0, 1.0, -1.0)
        return cap * torch.tanh(score / cap) * (1 + sign * 2.0**-11)

    def on_gpu(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, *rest: Any, **options: Any) -> Any:
        return call(query, key, value, rough, *rest, **options)

    monkeypatch.setattr(verification, "flex_attention", on_gpu)
    query, key, value = (3 * x for x in inputs(torch.bfloat16))
    assert not verify(query, key, value, mods.softcap(cap), enable_gqa=True)
    monkeypatch.setattr(verification, "_approximation", lambda *call: verification._APPROXIMATION)
    assert verify(query, key, value, mods.softcap(cap), enable_gqa=True)


def late(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, : x.size(2) // 2], torch.zeros_like(x[:, :, x.size(2) // 2 :])], 2)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"late rows are 0": late, "scaled": lambda x: (1.2 * x).to(x.dtype)}


class Changed(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.change = args[1]
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@settings(max_examples=8)
@given(
    change=st.sampled_from(tuple(CHANGES)), mask_mod=st.sampled_from((mods.causal, mods.sliding_window(100))),
    dtype=st.sampled_from(HALVES), head_dim=st.sampled_from((32, 64, 128, 256)),
    length=st.sampled_from((64, 200, 600)), score=st.sampled_from((None, mods.softcap(20.0), mods.alibi(4))),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_changed_results_in_half_precision_are_found(
    name: str, change: str, mask_mod: Any, dtype: torch.dtype, head_dim: int, length: int, score: Any, seed: int
) -> None:
    """The first rows, whose values are the largest, allow nothing in the others."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, h, length, head_dim, generator=generator).to(dtype) for h in (4, 2, 2))
    changed = CHANGES[change] if (name, change) != ("out", "scaled") else lambda x: (1.1 * x).to(x.dtype)

    def wrong(*tensors: Any, **options: Any) -> Any:
        first = [Changed.apply(x, changed) if f"d{n}" == name else x for n, x in zip("qkv", tensors[:3], strict=True)]
        out, aux = flexattn.flex_attention(*first, *tensors[3:], **options)
        return changed(out) if name == "out" else out, aux

    mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "flex_attention", wrong)
        found = verify(query, key, value, score, mask, enable_gqa=True, seed=seed)
    assert not next(c for c in found.comparisons if c.name == name).passed, str(found)


class Wrong(torch.autograd.Function):
    """The identity, with an error in the last row and head of the gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gradient = grads[0].clone()
        gradient[-1, -1, -1, 3] += 0.1
        return gradient


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("value", [0.1, torch.nan])
def test_an_error_is_found(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    def wrong(*tensors: Any, **options: Any) -> Any:
        first = [Wrong.apply(x) if f"d{n}" == name else x for n, x in zip("qkv", tensors[:3], strict=True)]
        out, aux = flexattn.flex_attention(*first, *tensors[3:], **options)
        out, lse = out.clone(), aux.lse.clone()
        if name == "out":
            out[-1, -1, -1, 3] += value
        if name == "lse":
            lse[-1, -1, -1] += value
        return out, aux._replace(lse=lse)

    monkeypatch.setattr(verification, "flex_attention", wrong)
    found = verify(*inputs(), mods.softcap(5.0), enable_gqa=True, rows=4)
    assert not found and "TOO LARGE" in str(found)
    comparison = next(c for c in found.comparisons if c.name == name)
    assert not comparison.passed
    last = (B - 1, Hq - 1, M - 1) if name in ("out", "lse", "dq") else (B - 1, Hkv - 1, N - 1)
    assert comparison.at == last


def test_inputs_for_which_dense_half_precision_overflows() -> None:
    query, value = (20 * torch.randn(1, 1, 40, 256, dtype=torch.float16) for _ in range(2))
    found = verify(query, query, value, rows=8)
    assert found, str(found)
    assert all(math.isfinite(c.bound) for c in found.comparisons)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 8])
def test_rows_with_one_weight_pass(dtype: torch.dtype, rows: int) -> None:
    """Their gradient of query is a difference of equal numbers."""
    query, key, value = (torch.randn(1, 2, 64, 64).to(dtype) for _ in range(3))
    for q, k in ((query, query), (20 * query, key)):
        found = verify(q, k, value, rows=rows)
        assert found, str(found)


@pytest.mark.parametrize("D", [16, 64])
@pytest.mark.parametrize("factor", [3, 10])
def test_rows_with_one_weight_pass_in_float64(factor: float, D: int) -> None:
    """There the dense computation has no error of its own: the estimates of rounding alone allow what is found."""
    mask = create_block_mask(mods.causal, None, None, 128, 128, device="cpu")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, 128, D, generator=generator, dtype=torch.float64) for _ in range(3))
        found = verify(q * factor, k * factor, v, None, mask, seed=seed)
        assert found, found


@pytest.mark.parametrize("factor", [1e2, 1e4, 1e5])
def test_scores_whose_lse_needs_more_than_float32(factor: float) -> None:
    q, k, v = (torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = verify(q * factor, k * factor, v, rows=64)
    assert found, found
    assert all(math.isfinite(c.error) for c in found.comparisons)


def test_contexts() -> None:
    with torch.inference_mode():
        tensors = inputs()
        assert verify(*tensors, enable_gqa=True, rows=4)
    assert verify(*tensors, enable_gqa=True, rows=4)
    with torch.no_grad():
        assert len(verify(*inputs(), enable_gqa=True, rows=4).comparisons) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert verify(*inputs(), enable_gqa=True, rows=4) == verify(*inputs(torch.bfloat16), enable_gqa=True, rows=4)
    tensors = inputs()
    with torch.device("meta"):
        assert verify(*tensors, enable_gqa=True, rows=4)


@pytest.mark.parametrize("rows", [0, -1, 2.0])
def test_rows_that_compare_nothing(rows: Any) -> None:
    with pytest.raises(ArgumentError, match="rows: found"):
        verify(*inputs(), enable_gqa=True, rows=rows)


@pytest.mark.parametrize(
    ("seed", "kind", "text"),
    [
        ("a", DtypeError, "'a', expected an int"), (None, DtypeError, "None, expected an int"),
        (True, DtypeError, "True, expected an int"), (2**64, ArgumentError, f"{2**64}, expected an int of 64 bits"),
    ],
)  # fmt: skip
def test_other_seeds(seed: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"seed: found {text}"):
        verify(*inputs(), enable_gqa=True, seed=seed)


def test_seeds() -> None:
    found = verify(*inputs(), enable_gqa=True, rows=4, seed=-1)
    assert found == verify(*inputs(), enable_gqa=True, rows=4, seed=2**64 - 1)
    assert found == verify(*inputs(), enable_gqa=True, rows=4, seed=np.int64(-1))  # type: ignore[arg-type]


def test_what_has_no_values() -> None:
    query, key, value = inputs()
    with pytest.raises(DtypeError, match=r"query: found a NoneType, expected a torch\.Tensor"):
        verify(None, key, value)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"value: found a list, expected a torch\.Tensor"):
        verify(query, key, [1.0])  # type: ignore[arg-type]
    meta = [x.to("meta") for x in (query, key, value)]
    with pytest.raises(DeviceError, match="query: found device meta, expected cpu or cuda"):
        verify(*meta, enable_gqa=True)
    with FakeTensorMode():
        fakes = [torch.empty(x.shape) for x in (query, key, value)]
    with pytest.raises(UnsupportedError, match=r"query: found .*FakeTensor.*It has no values"):
        verify(*fakes, enable_gqa=True)


def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.randn(5, 2, 16)] * 2, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(UnsupportedError, match="query: found a nested tensor"):
        verify(nested, nested, nested)


@pytest.mark.parametrize("name", ["dk", "dv"])
@pytest.mark.parametrize("value", [1e3, torch.nan])
def test_an_error_in_one_row_is_found(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    """If it is large, also in a row that is not sampled."""

    def wrong(*tensors: Any, **options: Any) -> Any:
        first = [OneRow.apply(x, value) if f"d{n}" == name else x for n, x in zip("qkv", tensors[:3], strict=True)]
        return flexattn.flex_attention(*first, *tensors[3:], **options)

    monkeypatch.setattr(verification, "flex_attention", wrong)
    found = verify(*inputs(), enable_gqa=True, rows=2)
    assert [(c.name, c.at) for c in found.comparisons if not c.passed] == [(name, (1, 0, 37))]


def test_nan_in_one_row_that_spreads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of dk is NaN, and so is what is expected from the output of the call."""

    def wrong(query: Tensor, *tensors: Any, **options: Any) -> Any:
        error = torch.zeros_like(query)
        error[1, 0, 37] = torch.nan
        return flexattn.flex_attention(query + error, *tensors, **options)

    monkeypatch.setattr(verification, "flex_attention", wrong)
    found = verify(*inputs(), enable_gqa=True, rows=2)
    assert not found and found.comparisons[0].at == (1, 0, 37)


class OneRow(torch.autograd.Function):
    """The identity, with an error in one row of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: float) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].clone()
        gradient[1, 0, 37, 3] += ctx.error
        return gradient, None


def test_rows_that_are_nan_in_both_are_counted() -> None:
    q = torch.randn(1, 1, 16, 8)
    found = verify(q, q, q, gradients=False)
    assert all(c.nan_rows == 0 for c in found.comparisons) and "NaN" not in str(found)
    nan = q.clone()
    nan[0, 0, 3] = torch.nan
    found = verify(nan, q, q, gradients=False, rows=1)
    assert found
    assert [c.nan_rows for c in found.comparisons] == [1, 1]
    assert str(found).count("1 row is NaN in both") == 2
