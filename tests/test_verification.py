"""verify: correct calls pass with any mod and mask, and an error in each result is found where it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, create_block_mask, mods, verification, verify
from flexattn.errors import ArgumentError, UnsupportedError

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
