"""Second derivatives, forward mode and torch.func on a GPU, where the first derivative is a kernel's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import assert_near
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.reference import attention

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

LENGTH = 200
CASES: dict[str, tuple[Callable[..., Any] | None, tuple[int, ...] | None, Any]] = {
    "plain": (None, None, None),
    "softcap": (lambda t: lambda s, b, h, i, j: torch.tanh(s * t[h]), (4,), mods.causal),
    "bias": (lambda t: lambda s, b, h, i, j: s + t[h, (i - j).clamp(-9, 9) + 9], (4, 19), mods.sliding_window(50)),
}


def leaves(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = CASES[name][1]
    shapes = [(2, 4, LENGTH, 32), (2, 2, LENGTH, 32), (2, 2, LENGTH, 32), *([] if shape is None else [shape])]
    return tuple(torch.randn(s, generator=generator, device="cuda", dtype=torch.float64).to(dtype) for s in shapes)


def attend(name: str, dense: bool) -> Callable[..., Tensor]:
    """Return (query, key, value, table) -> out, by kernels or by the reference."""
    make, _, mask_mod = CASES[name]
    mask = None if mask_mod is None or dense else create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cuda")

    def run(query: Tensor, key: Tensor, value: Tensor, *captured: Tensor) -> Tensor:
        score_mod = make(*captured) if make else None
        if dense:
            return attention(query, key, value, score_mod, mask_mod, dtype=query.dtype)[0]
        return flex_attention(query, key, value, score_mod, mask, enable_gqa=True)

    return run


def curvature(run: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradient of the square of the gradient."""
    tensors = tuple(x.requires_grad_() for x in tensors)
    out = run(*tensors)
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum((g.square().sum() for g in first), out.new_zeros(())), tensors)


def tangent(run: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the derivative of out along a direction."""
    return (torch.func.jvp(run, tensors, tuple(x.cos() for x in tensors))[1],)


def gradient(run: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return torch.func's gradient."""
    return torch.func.grad(lambda x: run(*x).square().sum())(tensors)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("derive", [curvature, tangent, gradient], ids=lambda f: f.__name__)
def test_derivative(name: str, derive: Callable[..., tuple[Tensor, ...]]) -> None:
    found = derive(attend(name, False), leaves(name, torch.float32))
    usual = derive(attend(name, True), leaves(name, torch.float32))
    truth = derive(attend(name, True), leaves(name, torch.float64))
    for a, b, exact in zip(found, usual, truth, strict=True):
        assert_near(name, a, b, exact, torch.float32)
