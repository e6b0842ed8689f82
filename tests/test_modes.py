"""Calls inside of torch's modes: default devices and dtypes change nothing, what records a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn.errors import DeviceError, UnsupportedError
from flexattn.torch_state.modes import undisturbed, users_device

X = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
BIAS = torch.tensor([0.5, -0.25])


def _result(x: Tensor) -> Tensor:
    """Build a mask and attend, with numbers made in the mods and a sink."""
    mask = flexattn.create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx >= torch.tensor(0)) & (kv_idx % 7 != 3),
        None, None, 40, 40, device="cpu", BLOCK_SIZE=16,
    )  # fmt: skip
    score_mod = lambda score, b, h, q_idx, kv_idx: score * 0.75 + BIAS[h] * torch.where(q_idx > 20, 0.5, 1.0)  # noqa: E731
    return flexattn.flex_attention(x, x, x, score_mod, mask, sink=0.5)


def _second_gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(_result(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": _result,
    "gradients": _second_gradient,
    "torch.func": torch.func.grad(lambda x: _result(x).square().sum()),
    "vmap": lambda x: torch.func.vmap(_result)(x[None]),
    "mask": lambda x: flexattn.create_mask(flexattn.mods.causal, None, None, 40, 40, device="cpu").int(),
    "explain": lambda x: torch.tensor(len(flexattn.explain(x, x, x, lambda s, b, h, i, j: s - j).plans), device="cpu"),
}


class _Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "function mode": _Function,
    "dispatch mode": _Dispatch,
    "inference": torch.inference_mode,
}
WITH_GRADIENTS = ("gradients", "torch.func")


@pytest.mark.parametrize(
    ("around", "use"), [(a, u) for a in SURROUNDINGS for u in USES if a != "inference" or u not in WITH_GRADIENTS]
)
def test_modes_around_a_call_change_nothing(around: str, use: str) -> None:
    want = USES[use](X)
    with SURROUNDINGS[around]():
        got = USES[use](X)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    want = _second_gradient(X)
    torch.set_default_dtype(dtype)
    try:
        got = _second_gradient(X)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, want)


def test_mods_run_with_the_default_device_of_the_user() -> None:
    def default() -> str:
        with users_device():
            modes = _get_current_function_mode_stack()
        return modes[-1].device.type if modes else "none"

    inside = undisturbed("flexattn")(lambda: (default(), undisturbed("flexattn")(default)()))
    assert inside() == ("none", "none")
    for name, seen in (("cuda", "cuda"), ("meta", "cpu")):  # tensors that a mod makes must have values
        with torch.device(name):
            assert inside() == (seen, seen)
    assert inside() == ("none", "none")


def test_a_backward_under_a_default_device() -> None:
    x = X.clone().requires_grad_()
    loss = _result(x).square().sum()
    (want,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.device("meta"):
        (got,) = torch.autograd.grad(loss, x, torch.ones((), device="cpu"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


RECORDED: dict[str, Callable[[], object]] = {
    "BlockMask": lambda: _under(
        FakeTensorMode(), lambda: flexattn.BlockMask.from_blocks(torch.ones(1, 1, 2, 2).bool(), None, (32, 32), 16)
    ),
    "create_block_mask": lambda: _under(
        FakeTensorMode(), lambda: flexattn.create_block_mask(flexattn.mods.causal, None, None, 8, 8, device="cpu")
    ),
}


def _under(mode: AbstractContextManager[object], call: Callable[[], object]) -> object:
    with mode:
        return call()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_call_is_refused(name: str) -> None:
    found = r"^(create_block_mask|BlockMask): found a call inside of \w+, as in torch.export and make_fx"
    with pytest.raises(UnsupportedError, match=found):
        RECORDED[name]()


def test_a_call_inside_of_a_mod_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"flex_attention: found a call inside of a mod"):
        flexattn.flex_attention(X, X, X, lambda s, b, h, i, j: s + flexattn.flex_attention(X, X, X)[b, h, i, 0])


@pytest.mark.parametrize("make", [flexattn.create_block_mask, flexattn.create_mask])
def test_no_mask_of_tensors_on_the_meta_device(make: Callable[..., object]) -> None:
    ids = torch.zeros(8, device="meta")
    with pytest.raises(
        DeviceError, match=r"mask_mod's captured tensor 'ids': found meta, expected a tensor with values"
    ):
        make(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], None, None, 8, 8)


def test_a_mask_for_the_meta_device() -> None:
    mask = flexattn.create_block_mask(lambda b, h, i, j: (i * i + j) % 5 == 0, None, None, 40, 40, "meta", 16)
    assert mask.device.type == "meta" and mask.shape == (1, 1, 40, 40)
