"""Repeated calls with packed sequences are never stale: lengths, mods and what these read are looked at each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from packed_cases import integers
from test_repeated_calls import afresh, is_repeated
from torch import Tensor

from flexattn import mods, varlen_attn
from flexattn.call.varlen import arguments
from flexattn.errors import ArgumentError, MutationError
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
LENGTHS = (20, 0, 13, 31)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    launch.forget_launches()
    yield
    launch.forget_launches()


def offsets(*lengths: int) -> Tensor:
    return integers(0, *accumulate(lengths))


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(64, 2, 16, requires_grad=True) for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, **options: Any) -> Tensor:
    out = varlen_attn(q, k, v, cu, cu, 64, 64, kernel_options={"BACKEND": "TRITON"}, **options)
    assert isinstance(out, Tensor)
    return out


def with_gradients(call: Callable[[], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    out = call()
    return (out, *torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel()).view(out.shape)))


def test_lengths_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    call = lambda: with_gradients(lambda: attend(q, k, v, cu, window_size=(-1, 0)), q, k, v)  # noqa: E731
    first = call()
    assert is_repeated(call, monkeypatch)
    for x, y in zip(first, call(), strict=True):
        assert torch.equal(x, y)
    cu.copy_(offsets(1, 1, 60, 2))
    changed = call()
    assert not torch.equal(changed[0], first[0])
    for x, y in zip(changed, afresh(call), strict=True):
        assert torch.equal(x, y)
    cu = offsets(*LENGTHS)  # other tensors with the first lengths
    for x, y in zip(call(), first, strict=True):
        assert torch.equal(x, y)


def test_what_mods_read_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    table, gain, reach = torch.tensor([0.3, -0.1], requires_grad=True), 0.5, torch.tensor([3, 9])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * gain + table[h] * (q_idx - kv_idx) * (b + 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < reach[h]

    def call() -> tuple[Tensor, ...]:
        return with_gradients(lambda: attend(q, k, v, cu, score_mod=score_mod, mask_mod=mask_mod), q, k, v, table)

    first = call()
    assert is_repeated(call, monkeypatch)
    with torch.no_grad():
        table.mul_(3)
    assert is_repeated(call, monkeypatch)
    second = call()
    assert not torch.equal(first[0], second[0])
    for x, y in zip(second, afresh(call), strict=True):
        assert torch.equal(x, y)
    gain = 0.25
    for x, y in zip(call(), afresh(call), strict=True):
        assert torch.equal(x, y)
    before = call()
    reach[0] = 20  # the block lists depend on it
    after = call()
    assert not torch.equal(before[0], after[0])
    for x, y in zip(after, afresh(call), strict=True):
        assert torch.equal(x, y)


def test_windows_scales_and_needs_are_kinds() -> None:
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    for options in (
        {"window_size": (3, 0)}, {"window_size": (3, 1)}, {"scale": 0.5}, {}, {"mask_mod": mods.causal},
        {"mask_mod": mods.sliding_window(4)}, {"mask_mod": mods.sliding_window(7)}, {"window_size": (3, 0)},
    ):  # fmt: skip
        found = attend(q, k, v, cu, **options), attend(q, k, v, cu, **options)
        with torch.no_grad():
            found += attend(q, k, v, cu, **options), attend(q, k, v, cu, **options)
        expected = afresh(lambda options=options: attend(q, k, v, cu, **options))
        assert all(torch.equal(x, expected) for x in found)


def test_lengths_changed_before_the_backward() -> None:
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    for _ in range(3):
        bias = torch.zeros(64, requires_grad=True)
        out = attend(q, k, v, cu, score_mod=lambda s, b, h, q_idx, kv_idx, bias=bias: s + bias[kv_idx])
        expected = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
        cu.add_(0)  # a new version: the packing that the forward used is another tensor
        assert torch.equal(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], expected)
        with torch.no_grad():
            bias.add_(1)
        with pytest.raises(MutationError):
            torch.autograd.grad(out.sum(), q)


def test_lengths_of_inference_mode_and_data() -> None:
    """Neither changes a version."""
    q, k, v = (x.detach() for x in leaves())
    with torch.inference_mode():
        cu = offsets(*LENGTHS)
        attend(q, k, v, cu)
        cu.copy_(offsets(40, 24, 0, 0))
        assert torch.equal(attend(q, k, v, cu), attend(q, k, v, offsets(40, 24, 0, 0)))
    cu = offsets(*LENGTHS)
    attend(q, k, v, cu)
    cu.data = offsets(40, 24, 0, 0)
    assert torch.equal(attend(q, k, v, cu), attend(q, k, v, offsets(40, 24, 0, 0)))


def test_what_a_mask_mod_reads_is_not_kept() -> None:
    """The pointers to it are: without a GPU these are tensors."""
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    table = torch.rand(64)
    for _ in range(2):
        attend(q, k, v, cu, mask_mod=lambda b, h, q_idx, kv_idx: table[kv_idx] < 0.5)
    states = [mask._state for _, mask in arguments.masks.found.values() if mask._state is not None]
    assert states and all(not t.numel() for state in states for t in (*state.captures, *state.bound.captures))


@pytest.mark.parametrize("most", [1, -1, 64.0, True, "x"])
def test_max_q_is_checked_in_each_call(most: object) -> None:
    (q, k, v), cu = leaves(), offsets(*LENGTHS)
    for _ in range(2):
        varlen_attn(q, k, v, cu, cu, 64, 64)
    with pytest.raises(ArgumentError, match="max_k"):
        varlen_attn(q, k, v, cu, cu, 64, most)
    with pytest.raises(ArgumentError, match="max_q"):
        varlen_attn(q, k, v, cu, cu, most, 64)
