"""When Hopper's backward skips the first and the last queries of partial blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexattn import BlockMask, create_block_mask, explain, mods
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.graph.equal_runs import EqualRuns
from flexattn.process.config import settings
from flexattn.trace.trace import trace

S = 640
ENDS = torch.arange(S, dtype=torch.int32) // 70 * 70 + 70
OF_BATCHES = torch.stack([ENDS, ENDS + 1])
IDS = ENDS // 70

Mod = Callable[..., Any]


def build(mask_mod: Mod, B: int | None = None, H: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, B, H, S, S, device="cpu")


def with_runs(mask_mod: Mod) -> BlockMask:
    """Return a mask with the runs of equal elements of its only tensor, as a GPU finds them when it builds the mask."""
    mask = build(mask_mod)
    mask._remember(trace(mask_mod, "mask"), (EqualRuns(0, torch.stack([ENDS - 70, ENDS])),))
    return mask


def backward(mask: BlockMask, B: int = 1, B_kv: int = 1, D: int = 128, heads: int = 4) -> KernelPlan:
    """Return the plan of the kernel for dk and dv."""
    q, k = (torch.zeros(n, heads, S, D, dtype=torch.bfloat16, requires_grad=True) for n in (B, B_kv))
    plans = explain(q, k, k, None, mask, target="sm_90").plans
    return next(plan for plan in plans if "dk" in plan.spec.gradients)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return abs(q_idx - kv_idx) <= 50


def in_sequence(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < ENDS[q_idx]) & (kv_idx >= ENDS[q_idx] - 70)


def of_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < OF_BATCHES[b, q_idx]) & (kv_idx >= OF_BATCHES[b, q_idx] - 70)


def of_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return abs(q_idx - kv_idx) <= 50 + h


MASKS: dict[str, tuple[Callable[[], BlockMask], bool]] = {
    "window": (lambda: build(window), True),
    "causal window": (lambda: build(mods.sliding_window(100)), True),
    "window and a condition": (lambda: build(mods.and_masks(window, lambda b, h, q, k: IDS[q] == IDS[k])), True),
    "runs of documents": (lambda: with_runs(mods.document_causal(IDS)), True),
    "documents without known runs": (lambda: build(mods.document_causal(IDS)), False),
    "ends of queries": (lambda: build(in_sequence), True),
    "by batch": (lambda: build(of_batch, 2), True),
    "by head": (lambda: build(of_head, None, 4), False),
    "causal": (lambda: build(mods.causal), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_with_bounds_for_each_key(name: str) -> None:
    make, trims = MASKS[name]
    mask = make()
    plan = backward(mask, B=2 if name == "by batch" else 1, B_kv=2 if name == "by batch" else 1)
    assert plan.spec.name == "hopper_backward"
    assert plan.trims_runs == trims
    assert ("without the first and last 64 queries" in str(plan)) == trims


def test_batches_that_share_keys_have_their_own_bounds() -> None:
    assert not backward(build(of_batch, 2), B=2).trims_runs
    assert backward(build(in_sequence), B=2).trims_runs


def test_lists_by_hand_take_precedence() -> None:
    mask = build(window)
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    by_hand = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=window, seq_lengths=(S, S))
    assert not backward(by_hand).trims_runs


@pytest.mark.parametrize("D", [40, 64, 96, 128, 192, 256])
def test_head_dims(D: int) -> None:
    assert backward(build(window), D=D, heads=16).trims_runs


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "trimmed_runs")
    settings.cache_clear()
    try:
        assert not backward(build(window)).trims_runs
    finally:
        monkeypatch.undo()
        settings.cache_clear()
