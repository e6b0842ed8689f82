"""stripes: when programs of Hopper's backward own all keys of short sequences, and what is planned then."""

from __future__ import annotations

import pytest
import torch
from sm90 import SM90, report

from flexattn import create_block_mask, mods
from flexattn.call.problem import Problem
from flexattn.call.varlen.arguments import Packed, PackedArguments
from flexattn.call.varlen.mods import packed_mask
from flexattn.compile.render import render
from flexattn.compile.schedule import expected_backward
from flexattn.compile.shared_memory import shared_bytes
from flexattn.compile.stripes import stripe_of
from flexattn.process.config import settings
from flexattn.trace.trace import trace

NAMES = ["backward_delta", "hopper_backward", "backward_dq_rows"]


def dense(B: int, Hq: int, Hkv: int, S: int, D: int = 128, causal: bool = False) -> Problem:
    q, k = (torch.zeros(B, H, S, D, dtype=torch.bfloat16, requires_grad=True) for H in (Hq, Hkv))
    mask = create_block_mask(mods.causal, None, None, S, S, device="cpu") if causal else None
    return Problem(q, k, k, 0.1, mask=trace(mods.causal, "mask") if causal else None, block_mask=mask)


def packed(sequences: int, length: int, Hq: int = 16, Hkv: int = 16, D: int = 128) -> Problem:
    T = sequences * length
    cu = torch.arange(0, T + 1, length, dtype=torch.int32)
    q, k = (torch.zeros(1, H, T, D, dtype=torch.bfloat16, requires_grad=True) for H in (Hq, Hkv))
    found = Packed.of(PackedArguments(cu, cu, length, length, (-1, 0)), q, k)
    mask = packed_mask(None, found.packing, found.window)
    return Problem(q, k, k, 0.1, mask=mask, block_mask=found.blocks_of(mask, (T, T), Hq, True))


def kernels(problem: Problem) -> list[str]:
    q, k, v = problem.query, problem.key, problem.value
    plans = expected_backward(problem, {"q": q, "k": k, "v": v, "o": q}, SM90)
    return [plan.spec.name for plan in plans]


@pytest.mark.parametrize(
    ("sizes", "stripe"),
    [
        ((33, 4, 4, 128), 128), ((33, 4, 4, 100), 128), ((33, 4, 4, 256), 256), ((33, 4, 4, 300), 384),
        ((8, 4, 4, 256), 0),  # 32 programs, most multiprocessors would be idle
        ((35, 4, 4, 256), 0),  # 140 programs, as long as 264
        ((33, 4, 4, 640), 0),  # would be read from HBM again for each tile of keys
        ((66, 8, 2, 256), 256), ((66, 8, 2, 400), 0), ((66, 2, 2, 512, 64), 512), ((66, 2, 2, 0), 0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_dense_calls(sizes: tuple[int, ...], stripe: int, causal: bool) -> None:
    problem = dense(*sizes, causal=causal and sizes[3] > 0)
    assert stripe_of(problem) == stripe
    if sizes[3]:
        assert kernels(problem) == [n + "_stripes" if n == NAMES[1] and stripe else n for n in NAMES]


@pytest.mark.parametrize(
    ("problem", "stripe"),
    [
        ((64, 256), 1024), ((64, 256, 32, 8), 512), ((128, 64, 32, 8), 0), ((40, 256), 0), ((64, 1024), 0),
        ((66, 512), 1024), ((24, 700), 0),
    ],
    ids=str,
)  # fmt: skip
def test_packed_calls(problem: tuple[int, ...], stripe: int) -> None:
    """40 x 256 tokens have 80 of 132 programs in the second wave, or 28 in the third one."""
    assert stripe_of(packed(*problem)) == stripe


def test_long_keys_of_short_queries_have_none() -> None:
    """No queries would have all their keys in one stripe."""
    cu_q, cu_k = (torch.arange(0, 33 * n, n, dtype=torch.int32) for n in (128, 4096))
    q, k = (torch.zeros(1, 16, 32 * n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (128, 4096))
    found = Packed.of(PackedArguments(cu_q, cu_k, 128, 4096), q, k)
    mask = packed_mask(None, found.packing, found.window)
    blocks = found.blocks_of(mask, (32 * 128, 32 * 4096), 16, True)
    assert stripe_of(Problem(q, k, k, 0.1, mask=mask, block_mask=blocks)) == 0


def test_lists_by_hand_have_none() -> None:
    """Their two directions may differ. A query could then have keys in a stripe that the other direction lacks."""
    problem = dense(33, 4, 4, 256, causal=True)
    mask = problem.block_mask
    assert mask is not None and stripe_of(problem) == 256
    edited = mask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=mods.causal)
    assert stripe_of(problem.with_fields(block_mask=edited)) == 0


@pytest.mark.parametrize(("without", "backward"), [("stripes", "hopper_backward"), ("hopper", "backward_dq")])
def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, without: str, backward: str) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", without)
    settings.cache_clear()
    try:
        assert backward in kernels(dense(33, 4, 4, 256))
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_wide_heads_have_none() -> None:
    assert "hopper_backward_wide" in kernels(dense(33, 4, 4, 256, D=256))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "spills"),
    [(dense(33, 4, 4, 256), 300), (dense(66, 2, 2, 512, 64, causal=True), 60), (packed(64, 256), 424)],
    ids=["full 128", "causal 64", "packed 128"],
)
def test_sm90(problem: Problem, spills: int) -> None:
    q, k, v = problem.query, problem.key, problem.value
    plan = expected_backward(problem, {"q": q, "k": k, "v": v, "o": q}, SM90)[1]
    assert plan.spec.owns_dq
    found = report(render(plan))
    assert found.spill_bytes <= spills and not found.warnings
    assert 0.95 * shared_bytes(plan) <= found.shared_bytes <= shared_bytes(plan)
