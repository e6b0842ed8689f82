"""When Hopper's backward loads the next tile of keys during the current one."""

from __future__ import annotations

import pytest
import torch
from mask_bits import with_bits

from flexattn import create_block_mask, explain, mods
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.process.config import settings


def backward(D: int, S: int, Hq: int, Hkv: int, window: int, has_bits: bool = False) -> KernelPlan:
    """Return the plan of the kernel for dk and dv."""
    q, k = (torch.zeros(1, H, S, D, dtype=torch.bfloat16, requires_grad=True) for H in (Hq, Hkv))
    mask = create_block_mask(mods.sliding_window(window), None, None, S, S, device="cpu") if window else None
    if has_bits:
        mask = with_bits(create_block_mask(mods.block_diffusion(S // 2, 32), None, None, S, S, device="cpu"), False)
    plans = explain(q, k, k, None, mask, enable_gqa=True, target="sm_90").plans
    return next(plan for plan in plans if "dk" in plan.spec.gradients)


@pytest.mark.parametrize(
    ("D", "S", "heads", "window", "prefetches"),
    [
        (64, 4096, (4, 4), 0, True), (40, 4096, (4, 4), 0, True), (96, 4096, (4, 4), 0, True),
        (128, 4096, (4, 4), 0, True), (128, 4096, (8, 2), 0, True), (128, 4096, (4, 4), 512, True),
        (256, 512, (4, 4), 0, False),
    ],
    ids=str,
)  # fmt: skip
def test_two_buffers_of_keys(D: int, S: int, heads: tuple[int, int], window: int, prefetches: bool) -> None:
    plan = backward(D, S, *heads, window)
    assert plan.spec.name.startswith("hopper_backward")
    assert plan.prefetches_keys == prefetches
    assert plan.rings.keys == 1 + prefetches
    assert ("of the next tile are loaded" in str(plan)) == prefetches


@pytest.mark.parametrize(
    ("D", "S", "heads", "prefetches"),
    [
        (64, 4096, (4, 4), True), (96, 2048, (4, 4), True), (96, 2176, (4, 4), False), (128, 1024, (4, 4), True),
        (128, 2048, (4, 4), False), (128, 512, (8, 2), False),  # a tile of keys has the queries of four heads
    ],
    ids=str,
)  # fmt: skip
def test_with_bits(D: int, S: int, heads: tuple[int, int], prefetches: bool) -> None:
    plan = backward(D, S, *heads, 0, has_bits=True)
    assert "bits" in plan.features
    assert plan.prefetches_keys == prefetches


@pytest.mark.parametrize(("D", "prefetches"), [(64, True), (96, True), (128, False)])
def test_stripes(D: int, prefetches: bool) -> None:
    """At D 128 all four buffers of dq are needed, and there is no memory for a second tile of keys."""
    plan = backward(D, 256, 132, 132, 0)
    assert plan.spec.name == "hopper_backward_stripes"
    assert plan.prefetches_keys == prefetches


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "early_keys")
    settings.cache_clear()
    try:
        assert not backward(64, 1024, 4, 4, 0).prefetches_keys
    finally:
        monkeypatch.undo()
        settings.cache_clear()
