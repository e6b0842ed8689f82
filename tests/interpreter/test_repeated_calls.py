"""Repeated calls are never stale: what changed since the first call of a kind is seen, or is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quick import slow_unless
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flexattn
from flexattn import api, create_block_mask, mods
from flexattn.engines import repeated_calls
from flexattn.errors import ArgumentError, MaskError, MutationError
from flexattn.mask_build import create
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
LENGTH = 32


def attend(*arguments: Any, **options: Any) -> Any:
    return flexattn.flex_attention(*arguments, **options, kernel_options={"BACKEND": "TRITON"})


def leaves(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    launch.forget_launches()
    yield
    launch.forget_launches()


def afresh(call: Callable[[], Any]) -> Any:
    """Run a call as the first one of its kind."""
    launch.forget_launches()
    return call()


def is_repeated(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    posed = []
    with monkeypatch.context() as patch:
        pose = api.pose
        patch.setattr(api, "pose", lambda *a, **k: posed.append(1) or pose(*a, **k))
        call()
    return not posed


def masked(ids: Tensor | None = None) -> flexattn.BlockMask:
    ids = torch.arange(LENGTH) // 12 if ids is None else ids
    return create_block_mask(mods.document_causal(ids), None, None, LENGTH, LENGTH, BLOCK_SIZE=16)


def test_numbers_and_tensors_of_a_score_mod_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves()
    gain, table = 0.5, torch.rand(2)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * gain + table[h] * kv_idx

    call = lambda: attend(q, k, v, score_mod)  # noqa: E731
    call()
    assert is_repeated(call, monkeypatch)
    before = call()
    table.mul_(3)
    assert is_repeated(call, monkeypatch)
    assert not torch.equal(before, call()) and torch.equal(call(), afresh(call))
    table = torch.rand(2)
    assert torch.equal(call(), afresh(call))
    for gain in (0.25, -0.0, 0.0, 0.5):
        found = call()
        assert torch.equal(found, afresh(call)), gain


def test_a_changed_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(LENGTH) // 12
    mask, (q, k, v) = masked(ids), leaves()
    call = lambda: attend(q, k, v, None, mask)  # noqa: E731
    call()
    assert is_repeated(call, monkeypatch)
    ids[3] = 7
    with pytest.raises(MutationError, match="changed in place"):
        call()
    mask = masked(ids)
    first = call()
    assert torch.equal(first, call()) and torch.equal(first, afresh(call))


def test_an_assigned_mask_mod_is_used() -> None:
    mask, (q, k, v) = masked(), leaves()
    call = lambda: attend(q, k, v, None, mask)  # noqa: E731
    before = call()
    call()
    mask.mask_mod = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0
    assert not torch.equal(before, call()) and torch.equal(call(), afresh(call))


def test_a_mask_of_other_lengths_is_refused() -> None:
    mask, (q, k, v) = masked(), leaves()
    for _ in range(2):
        attend(q, k, v, None, mask)
    with pytest.raises(MaskError, match="lengths"):
        attend(*leaves(length=48), None, mask)
    mask.seq_lengths = (LENGTH, LENGTH - 1)
    with pytest.raises(MaskError, match="lengths"):
        attend(q, k, v, None, mask)


def test_arguments_that_compare_equal_are_still_checked() -> None:
    q, k, v = leaves()
    for _ in range(2):
        attend(q, k, v, scale=1.0)
    with pytest.raises(ArgumentError, match="scale"):
        attend(q, k, v, scale=float("nan"))
    assert torch.equal(attend(q, k, v, scale=1), attend(q, k, v, scale=1.0))
    shared = q, k[:, :1], v[:, :1]
    attend(*shared, enable_gqa=True)
    with pytest.raises(ArgumentError, match="enable_gqa"):
        attend(*shared)


def test_in_place_changes_before_the_backward_are_refused() -> None:
    ids, table = torch.arange(LENGTH) // 12, torch.rand(2)
    mask = masked(ids)
    for name, changed in (("value", "v"), ("table", "table"), (".*", "ids")):
        q, k, v = (x.detach().requires_grad_() * 1 for x in leaves())
        for _ in range(3):
            out = attend(q, k, v, lambda s, b, h, q_idx, kv_idx: s + table[h], mask)
        with torch.no_grad():
            {"v": v, "table": table, "ids": ids}[changed].add_(0)
        with pytest.raises(MutationError, match=name):
            out.sum().backward()
        mask = masked(ids)


@pytest.mark.slow
def test_gradients_of_gradients() -> None:
    q, k, v = (x.double().float().detach().requires_grad_() for x in leaves())
    mask = masked()

    def second() -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(attend(q, k, v, None, mask).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    expected = second()
    for _ in range(2):
        for a, b in zip(second(), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_subsets_of_gradients_and_lse() -> None:
    q, k, v = leaves()
    table = torch.rand(2, requires_grad=True)

    def call(wanted: list[Tensor], of_lse: bool) -> list[Tensor]:
        out, aux = attend(
            q, k, v, lambda s, b, h, q_idx, kv_idx: s + table[h] * q_idx, masked(),
            return_aux=flexattn.AuxRequest(lse=True),
        )  # fmt: skip
        roots = [out.square().sum(), *([aux.lse.sum()] if of_lse else [])]
        return list(torch.autograd.grad(roots, wanted))

    for wanted in ([q], [k], [table], [q, v], [k, v, table], [q, k, v, table]):
        for of_lse in (False, True):
            found = [call(wanted, of_lse) for _ in range(3)]
            launch.forget_launches()
            expected = call(wanted, of_lse)
            for other in found:
                assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


def test_counters_modes_and_transforms_see_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, (q, k, v) = masked(), leaves()
    call = lambda: attend(q, k, v, None, mask)  # noqa: E731
    for _ in range(2):
        call()
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    assert counter.get_total_flops() == 2 * 2 * (16 + 16) * mask.pairs().useful
    before = flexattn.counters().guard_hits
    call()
    assert flexattn.counters().guard_hits == before + 1
    tangent = torch.func.jvp(lambda q: attend(q, k, v, None, mask), (q,), (torch.ones_like(q),))[1]
    assert tangent.abs().sum() > 0
    assert is_repeated(call, monkeypatch)


def test_weak_points_of_the_key() -> None:
    """Contiguous or not, aligned or not, negated in memory: the results are those of the first call of each."""
    q, k, v = (x.detach() for x in leaves())

    def biased(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q_idx, kv_idx: s + 9 * table[kv_idx]

    bias = torch.complex(torch.zeros(LENGTH), torch.rand(LENGTH)).conj().imag
    assert bias.is_neg()
    plain = bias.resolve_neg()
    for table in (plain, bias, torch.stack([plain, plain], -1)[:, 0], plain):
        out = attend(q, k, v, biased(table))
        expected = attend(q, k, v, biased(plain))
        torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_dropped_masks_are_freed() -> None:
    mask, (q, k, v) = masked(), leaves()
    for _ in range(3):
        attend(q, k, v, None, mask).sum().backward()
    alive = weakref.ref(mask)
    del mask
    assert alive() is None, "without the collector of cycles"
    gc.collect()
    assert len(repeated_calls._calls) == 1


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("setting", slow_unless(lambda name: name == "no_grad", CONTEXTS))
def test_settings_around_a_call(setting: str) -> None:
    mask, (q, k, v) = masked(), leaves()
    call = lambda: attend(q, k, v, mods.softcap(5.0), mask)  # noqa: E731
    expected = call()
    for _ in range(3):
        with CONTEXTS[setting]():
            out = call()
        assert out.dtype == (torch.float16 if setting == "autocast" else torch.float32)
        assert out.requires_grad == (setting not in ("no_grad", "inference"))
        torch.testing.assert_close(out.float(), expected, atol=3e-2 if setting == "autocast" else 0, rtol=0)
        assert torch.equal(call(), expected)


def in_other_memory(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("hooked_first", [False, True])
def test_hooks_may_return_saved_tensors_with_other_strides(hooked_first: bool) -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves())
    mask, d_out = masked(), torch.randn(1, 2, LENGTH, 16)

    def call(hooked: bool) -> tuple[Tensor, ...]:
        if not hooked:
            return torch.autograd.grad(attend(q, k, v, None, mask), (q, k, v), d_out)
        with torch.autograd.graph.saved_tensors_hooks(in_other_memory, lambda t: t):
            out = attend(q, k, v, None, mask)
        return torch.autograd.grad(out, (q, k, v), d_out)

    expected = afresh(lambda: call(False))
    order = [True, False, False, True, True] if hooked_first else [False, False, True, False, True]
    for hooked in order:
        for x, y in zip(call(hooked), expected, strict=True):
            torch.testing.assert_close(x, y)


def test_a_negative_bit_is_another_kind() -> None:
    q, k, v = (x.detach() for x in leaves())
    d_out = torch.randn_like(q)
    learned = tuple(x.clone().requires_grad_() for x in (q, k, v))
    for _ in range(3):
        attend(q, k, v)
        torch.autograd.grad(attend(*learned), learned, d_out)
    assert torch.equal(attend(torch._neg_view(q), k, v), attend(-q, k, v))
    found = torch.autograd.grad(attend(*learned), learned, torch._neg_view(d_out))
    expected = torch.autograd.grad(attend(*learned), learned, -d_out)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("replaced", ["other lists", "none"])
def test_replaced_lists_of_the_backward_are_used(replaced: str) -> None:
    q, k, v = leaves()
    mask, other = masked(), create_block_mask(mods.causal, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    call = lambda: torch.autograd.grad(attend(q, k, v, None, mask).sum(), (q, k, v))  # noqa: E731
    for _ in range(3):
        call()
    mask.q_runs = other.q_runs if replaced == "other lists" else None
    if replaced == "none":
        with pytest.raises(MaskError, match="q_indices"):
            call()
    else:
        for x, y in zip(call(), afresh(call), strict=True):
            assert torch.equal(x, y)


def test_a_mask_with_two_sets_of_blocks_has_calls_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "engine_of", lambda problem: api.triton)
    monkeypatch.setattr(create, "needs_hopper_blocks", lambda device, size: size != (128, 128))
    wide = masked()
    narrow = [x.detach().half().requires_grad_() for x in leaves()]
    both = [leaves(), narrow]

    def call(tensors: Any) -> tuple[Tensor, ...]:
        out = flexattn.flex_attention(*tensors, block_mask=wide)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    expected = [afresh(lambda tensors=tensors: call(tensors)) for tensors in both]
    launch.forget_launches()
    for turn in range(3):
        for tensors, wanted in zip(both, expected, strict=True):
            assert is_repeated(lambda tensors=tensors: call(tensors), monkeypatch) == (turn > 0)
            assert all(map(torch.equal, call(tensors), wanted))
