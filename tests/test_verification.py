"""verify: correct calls pass with any mod and mask, and an error in each result is found where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, create_block_mask, mods, verification, verify

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
