"""small_backward: which backwards run as one kernel, and what is compiled for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import Setting
from sm90 import SM90, report
from small_cases import check_small, in_one_launch

from flexattn import create_block_mask, explain, mods
from flexattn.compile.render import render
from flexattn.process.config import settings

pytest.importorskip("triton")

from emulation import emulated

ONE = ["backward_small"]
SIZES = (1, 8, 256, 64)  # B, heads, tokens and head dim


@pytest.fixture(autouse=True)
def one_launch() -> Iterator[None]:
    with in_one_launch(2):
        yield


def kernels(
    sizes: tuple[int, int, int, int] = SIZES, heads_kv: int | None = None, dtype: torch.dtype = torch.bfloat16,
    first: int = 0, **rest: Any,
) -> list[str]:  # fmt: skip
    """Return the kernels of the backward of a call on an H200."""
    B, H, S, D = sizes
    memory = torch.zeros(3, B * H * S * D + 8, dtype=dtype)
    q, k, v = (x[first:].as_strided((B, h, S, D), (H * S * D, S * D, D, 1), x.storage_offset() + first)
               for x, h in zip(memory, (H, heads_kv or H, heads_kv or H), strict=True))  # fmt: skip
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    plans = explain(q, k, v, enable_gqa=True, target="sm_90", **rest).plans
    return [plan.spec.name for plan in plans if not plan.is_forward]


def mask(length: int, block: int = 128) -> Any:
    return create_block_mask(mods.causal, None, None, length, length, device="cpu", BLOCK_SIZE=block)


def test_small_calls_run_as_one_kernel() -> None:
    assert kernels() == ONE
    assert kernels(block_mask=mask(256)) == ONE
    assert kernels(block_mask=mask(256), score_mod=mods.alibi(8)) == ONE
    assert kernels(score_mod=mods.softcap(20.0)) == ONE
    assert kernels(heads_kv=4) == ONE
    assert kernels(dtype=torch.float16) == ONE


def test_longer_calls_do_not() -> None:
    """Programs would read many tiles, or wait for others."""
    assert kernels((1, 8, 512, 64)) == ONE
    assert kernels((1, 8, 576, 64)) != ONE
    assert kernels((1, 16, 512, 64)) == ONE
    assert kernels((1, 17, 512, 64)) != ONE
    assert kernels(heads_kv=1) != ONE  # 8 heads of 4 tiles


def test_other_calls_do_not() -> None:
    """What the kernel does not have, and what the user chose."""
    table = torch.randn(8, requires_grad=True)
    assert kernels(score_mod=lambda s, b, h, i, j: s + table[h]) != ONE
    bias = torch.randn(256, 256)
    assert kernels(score_mod=lambda s, b, h, i, j: s + bias[i, j]) != ONE
    assert kernels(dtype=torch.float32) != ONE
    assert kernels((1, 8, 256, 128)) != ONE
    assert kernels(first=1) != ONE
    assert kernels(sink=torch.zeros(8)) != ONE
    assert kernels(dropout_p=0.1) != ONE
    for options in ({"BATCH_INVARIANT": True}, {"bwd_BACKEND": "HOPPER"}, {"BLOCK_M1": 64}, {"bwd_num_warps": 4}):
        assert kernels(kernel_options=options) != ONE, options
    assert kernels(kernel_options={"fwd_BACKEND": "HOPPER"}) == ONE


def test_blocks_that_its_tile_does_not_fit() -> None:
    wanted = {"BACKEND": "TRITON"}  # on Hopper, lists of other blocks are rebuilt otherwise
    assert kernels(block_mask=mask(256, 64), kernel_options=wanted) == ONE
    assert kernels(block_mask=mask(256, 96), kernel_options=wanted) != ONE


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_targets_have_others(target: str) -> None:
    q = torch.zeros(SIZES, dtype=torch.bfloat16, requires_grad=True)
    assert explain(q, q, q, target=target).plans[1].spec.name == "backward_delta"


@pytest.mark.parametrize("empty", [(0, 8, 8), (2, 0, 0)], ids=str)
def test_empty_calls_can_be_explained(empty: tuple[int, int, int]) -> None:
    B, Hq, Hkv = empty
    q, k = (torch.zeros(B, H, 64, 64, dtype=torch.bfloat16, requires_grad=True) for H in (Hq, Hkv))
    assert explain(q, k, k, target="sm_90").plans == ()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "one_launch")
    settings.cache_clear()
    try:
        assert kernels() != ONE
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.parametrize(
    ("score_mod", "masked"),
    [(None, False), (mods.alibi(8), True), (mods.softcap(20.0), True)],
    ids=["no mods", "alibi causal", "softcap causal"],
)
def test_registers_suffice(score_mod: Any, masked: bool) -> None:
    q = torch.zeros(SIZES, dtype=torch.bfloat16, requires_grad=True)
    plans = explain(q, q, q, score_mod, mask(256) if masked else None, target="sm_90").plans
    (plan,) = (plan for plan in plans if not plan.is_forward)
    found = report(render(plan), SM90)
    assert plan.spec.name == "backward_small" and found.spill_bytes == 0
    assert found.shared_bytes <= plan.spec.shared_bytes(plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of masked places
@pytest.mark.parametrize("name", ["causal", "softcap", "keys shared by the batch", "over rows"])
def test_as_it_is_compiled(name: str) -> None:
    """Its PTX, emulated."""
    with emulated("sm_90"):
        check_small(name, Setting("cpu", torch.bfloat16, options=(("BACKEND", "TRITON"), ("USE_TMA", False))))
