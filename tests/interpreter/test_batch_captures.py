"""Gradients of captured tensors that all batches share are summed over these before they are added to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import Call, Setting, check, deterministic, given, results
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, explain, flex_attention, mods

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

AT = Setting("cpu", torch.float32)
B, H, M, N, D = 3, 2, 20, 27, 8
CELLS = (torch.arange(M)[:, None] * 5 + torch.arange(N) * 3) % 11
Make = Callable[[Tensor], Callable[..., Any]]

# (mod of a tensor, its shape)
SHARED: dict[str, tuple[Make, tuple[int, ...]]] = {
    "pairs": (lambda t: lambda s, b, h, i, j: s + t[h, i, j], (H, M, N)),
    "product": (lambda t: lambda s, b, h, i, j: s * torch.sigmoid(t[0, i, j]), (1, M, N)),
    "cells": (lambda t: lambda s, b, h, i, j: s + t[CELLS[i, j], h] * t[CELLS[i, j] - 2, 0] + b, (11, H)),
}
NOT_SHARED: dict[str, tuple[Make, tuple[int, ...]]] = {
    "of a batch": (lambda t: lambda s, b, h, i, j: s + t[b, i, j], (B, M, N)),
    "of rows": (lambda t: lambda s, b, h, i, j: s + t[i], (M,)),
    "of distances": (lambda t: lambda s, b, h, i, j: s + t[(i - j).clamp(-9, 9)], (19,)),
}


def call_of(make: Make, shape: tuple[int, ...], mask_mod: Any = None) -> Call:
    q, k, v = (AT.randn(B, heads, n, D, seed=i) for i, (heads, n) in enumerate(((H, M), (1, N), (1, N))))
    table = AT.randn(*shape, seed=3)
    reads_b = mask_mod is of_batch
    mask = create_block_mask(mask_mod, B if reads_b else None, None, M, N, "cpu", 16) if mask_mod else None
    return Call(q, k, v, make(table), mask, mask_mod, learned=(table,))


def of_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx + 3 * b >= kv_idx


def kernels(call: Call) -> list[str]:
    tensors = (x.detach().requires_grad_() for x in (call.query, call.key, call.value))
    options = {"BACKEND": "TRITON"}
    shown = explain(*tensors, call.score_mod, call.mask, enable_gqa=True, kernel_options=options)
    return [plan.spec.name for plan in shown.plans]


@pytest.mark.parametrize(("mask_mod", "exactly"), [(None, False), (mods.causal, True)], ids=["", "deterministic"])
@pytest.mark.parametrize("name", SHARED)
def test_gradients(name: str, mask_mod: Any, exactly: bool) -> None:
    call = call_of(*SHARED[name], mask_mod)
    for x in call.learned:
        x.requires_grad_()
    assert "backward_batch_captures" in kernels(call)
    with deterministic(exactly):
        check(call)


def test_where_nothing_else_learns() -> None:
    """The gradient is that of a call in which all learn."""
    call = call_of(*SHARED["cells"], mods.causal)
    wanted = results(call, "ours")[-1]
    q, k, v = (x.detach() for x in (call.query, call.key, call.value))
    (table,) = call.learned
    out, aux = flex_attention(
        q, k, v, call.score_mod, call.mask, enable_gqa=True, return_aux=AuxRequest(lse=True),
        kernel_options={"BACKEND": "TRITON"},
    )  # fmt: skip
    assert aux.lse is not None
    (found,) = torch.autograd.grad((out, aux.lse), table, given(call, out, aux.lse))
    assert wanted is not None
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_what_is_added_at_once(name: str) -> None:
    call = call_of(*NOT_SHARED[name])
    for x in call.learned:
        x.requires_grad_()
    assert "backward_batch_captures" not in kernels(call)


def test_a_mask_that_tells_batches_apart() -> None:
    call = call_of(*SHARED["pairs"], of_batch)
    for x in call.learned:
        x.requires_grad_()
    assert "backward_batch_captures" not in kernels(call)
