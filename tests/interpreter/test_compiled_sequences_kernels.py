"""Operators with packed sequences and layouts launch the kernels of an equal earlier one, on what they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from packed_cases import integers
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods, varlen_attn
from flexattn.runtime import launch
from flexattn.torch_compile import operators

pytest.importorskip("triton")
pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
OPTIONS = {"BACKEND": "TRITON"}
B, H, N, D = 2, 2, 64, 16


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    launch.forget_launches()
    yield
    launch.forget_launches()


@pytest.fixture
def posed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each operator that is not repeated."""
    found: list[int] = []
    problem = operators._problem
    monkeypatch.setattr(operators, "_problem", lambda *a, **k: found.append(1) or problem(*a, **k))
    return found


def ends(*lengths: int) -> Tensor:
    return integers(0, *accumulate(lengths))


def equal(compiled: Callable[..., Any], f: Callable[..., Any], args: tuple[Any, ...], learned: list[Tensor]) -> None:
    found, expected = (_results(g, args, learned) for g in (compiled, f))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def _results(f: Callable[..., Any], args: tuple[Any, ...], learned: list[Tensor]) -> list[Tensor]:
    out = f(*args)
    if not learned:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, learned, torch.linspace(-1, 1, out.numel()).view(out.shape))]


@pytest.mark.parametrize("mask_mod", [None, mods.sliding_window(9)], ids=["window", "mask_mod"])
def test_packed(mask_mod: Any, posed: list[int]) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, bias: Tensor) -> Tensor:
        out = varlen_attn(
            q, k, v, cu, cu, 64, 64, window_size=(-1, 0), mask_mod=mask_mod, kernel_options=OPTIONS,
            score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j),
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for i, lengths in enumerate(((20, 0, 13, 31), (1, 1, 60, 2), (16, 16, 16, 16))):
        x = [torch.randn(64, H, D, requires_grad=True) for _ in range(3)]
        bias = torch.randn(H, requires_grad=True)
        equal(compiled, f, (*x, ends(*lengths), bias), [*x, bias])
        assert len(posed) == 2, i  # a forward and a backward, of the first step


LAYOUTS: dict[str, Any] = {
    "lengths": {"masked": False},
    "mask": {"masked": True},
    "documents": {"masked": True, "documents": True},
    "pages": {"masked": True, "paged": True},
}


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, M: int, posed: list[int]) -> None:
    _layouts(M, posed, **LAYOUTS[name])


def _layouts(M: int, posed: list[int], masked: bool, documents: bool = False, paged: bool = False) -> None:
    mod = mods.document_causal(torch.arange(N) // 12) if documents else mods.sliding_window(20)
    mask = create_block_mask(mod, None, None, N, N, BLOCK_SIZE=16, device="cpu") if masked else None
    shape = (8, 16, H, D) if paged else (B, H, N, D)

    def f(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, used: Tensor, offsets: Tensor, table: Tensor) -> Tensor:
        return flex_attention(
            q, k, v, lambda s, b, h, i, j: s + slopes[h] * (i - j), mask, kernel_options=OPTIONS, seqused_k=used,
            q_offsets=offsets, block_table=table if paged else None,
        )  # fmt: skip

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    k, v = torch.randn(shape), torch.randn(shape)
    used, offsets = integers(10, 40), integers(10 - M, 40 - M)
    with torch.no_grad():
        for i in range(3):
            table = torch.randperm(8, generator=torch.Generator().manual_seed(i)).int().view(B, 4)
            equal(compiled, f, (torch.randn(B, H, M, D), k, v, torch.randn(H), used, offsets, table), [])
            used, offsets = used + 1, offsets + 1
            assert len(posed) == 1, i
