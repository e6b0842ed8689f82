"""Which plans of hopper_forward have a fixed reference. tests/test_gpu_fixed_reference.py compares their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import create_block_mask, explain, mods
from flexattn.process.config import settings


def is_fixed(N: int, mask_mod: Any = None, dtype: torch.dtype = torch.bfloat16, **options: Any) -> bool:
    q, k = (torch.empty(1, 2, n, 64, dtype=dtype) for n in (256, N))
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, 256, N, device="cpu")
    plan = explain(q, k, k, None, mask, target="sm_90", **options).plans[0]
    assert plan.spec.name == "hopper_forward"
    assert ("maxima   of some tiles" in str(plan)) == plan.fixed_reference
    return plan.fixed_reference


def test_long_rows() -> None:
    assert is_fixed(2048)
    assert is_fixed(2048, mods.causal)
    assert not is_fixed(2047)
    assert is_fixed(8192, mods.sliding_window(2048))
    assert not is_fixed(8192, mods.sliding_window(2047))


def test_what_needs_all_maxima() -> None:
    assert not is_fixed(4096, dtype=torch.float16)
    assert not is_fixed(4096, kernel_options={"BATCH_INVARIANT": True})


def test_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "fixed_reference")
    settings.cache_clear()
    try:
        assert not is_fixed(4096)
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert is_fixed(4096)
