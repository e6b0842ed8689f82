"""register_operator: custom operators and autograd.Functions in mods, with the meaning that a user gave them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.errors import DtypeError, UnsupportedError
from flexattn.trace import registered
from flexattn.trace.trace import trace


@torch.library.custom_op("flexattn_tests::tanh_approx", mutates_args=())
def tanh_approx(x: Tensor) -> Tensor:
    return torch.tanh(x)


@tanh_approx.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class TanhApprox(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.flexattn_tests.tanh_approx(x)


def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.ops.flexattn_tests.tanh_approx(s / 20)


def capped_by_function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * TanhApprox.apply(s / 20)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    registered._meanings.clear()


def outcome(mod: Any) -> list[Tensor]:
    """Return the result and the gradient of attention with a score_mod."""
    x = torch.linspace(-9, 9, 64, dtype=torch.float64).reshape(1, 1, 8, 8).requires_grad_()
    out = flexattn.flex_attention(x, x, x, mod)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


@pytest.mark.parametrize(
    ("op", "mod"),
    [(tanh_approx, capped), (torch.ops.flexattn_tests.tanh_approx, capped), (TanhApprox, capped_by_function),
     (torch.ops.flexattn_tests.tanh_approx.default, capped)],
)  # fmt: skip
def test_values_and_gradients_are_those_of_like(op: Any, mod: Any) -> None:
    flexattn.register_operator(op, like=torch.tanh)
    wanted = outcome(lambda s, b, h, q, k: 20 * torch.tanh(s / 20))
    torch.testing.assert_close(outcome(mod), wanted, rtol=0, atol=0)


def test_a_python_function_and_a_later_registration() -> None:
    flexattn.register_operator(tanh_approx, like=lambda x: x / (1 + x.abs()))
    first = outcome(capped)
    torch.testing.assert_close(first, outcome(lambda s, b, h, q, k: 20 * (s / 20) / (1 + (s / 20).abs())))
    flexattn.register_operator(tanh_approx, like=torch.sin)
    torch.testing.assert_close(outcome(capped), outcome(lambda s, b, h, q, k: 20 * torch.sin(s / 20)))


def test_what_is_not_registered_names_the_way() -> None:
    fix = r"register_operator\(torch.ops.flexattn_tests.tanh_approx, like=torch.tanh\)"
    with pytest.raises(UnsupportedError, match=fix):
        trace(capped, "score")
    with pytest.raises(UnsupportedError, match=r"register_operator\(TanhApprox, like=...\)"):
        trace(capped_by_function, "score")


def test_arguments() -> None:
    with pytest.raises(DtypeError, match=r"op: found .*expected an operator"):
        flexattn.register_operator(torch.tanh, like=torch.tanh)
    with pytest.raises(DtypeError, match="like: found 3"):
        flexattn.register_operator(tanh_approx, like=3)
