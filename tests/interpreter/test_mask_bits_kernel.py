"""The kernel that computes the bits of partial blocks, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_bits import assert_same_bits, reference_bits

from flexattn import BlockMask, create_block_mask, mods
from flexattn.block_mask import BuiltMask
from flexattn.block_mask.bits import BLOCK_BYTES
from flexattn.machine.target import INTERPRETER
from flexattn.mask_build import launch_plan, on_gpu, pair_bits
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.on_gpu import build_lists
from flexattn.process import events
from flexattn.trace.trace import trace

pytest.importorskip("triton")

CPU = torch.device("cpu")
TABLE = torch.rand(2, 3, 400, generator=torch.Generator().manual_seed(0)) < 0.5


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return TABLE[b, h, q_idx] ^ TABLE[b, h, kv_idx]


def alternate(q_idx: Any, kv_idx: Any) -> Any:
    """Return true in every second block of each row and column."""
    return (q_idx // 128 + kv_idx // 128) % 2 == 0


MASKS: dict[str, tuple[Callable[..., Any], int | None, int | None, int, int]] = {
    "neighborhood": (mods.natten_2d(16, 20, 5), None, None, 320, 320),
    "diagonals": (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 < 3, None, None, 200, 300),
    "first of a row": (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 5 != 1), None, None, 384, 257),
    "by batch and head": (by_head, 2, 3, 130, 260),
    "by head alone": (lambda b, h, q_idx, kv_idx: (q_idx * (h + 1) + kv_idx) % 3 == 0, 2, 2, 129, 128),
    "number": (lambda b, h, q_idx, kv_idx, n=37: (q_idx * kv_idx) % n < 5, None, None, 128, 128),
    "queries alone": (lambda b, h, q_idx, kv_idx: q_idx % 3 == 1, None, None, 140, 150),
    "several runs": (lambda b, h, q_idx, kv_idx: alternate(q_idx, kv_idx) & (kv_idx % 9 > 3), None, None, 260, 900),
    "runs in chunks": (lambda b, h, q_idx, kv_idx: alternate(q_idx, kv_idx) & (q_idx % 9 > 3), None, None, 8500, 60),
}


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give masks bits, although the interpreter is no Hopper GPU."""
    monkeypatch.setattr(on_gpu, "unwanted", lambda *_: "")


def built(mod: Callable[..., Any], sizes: tuple[int, int, int, int], block: int = 128) -> BuiltMask:
    bound = trace(mod, "mask")
    plan = plan_mask(bound, INTERPRETER)
    assert plan is not None
    return build_lists(plan, bound, sizes, (block, block), CPU, True)


def mask_of(name: str) -> tuple[BlockMask, BlockMask]:
    """Return a mask as it is built, of the batches and heads that the mod reads, and the expanded one."""
    mod, B, H, *lengths = MASKS[name]
    graph = trace(mod, "mask").graph
    own = B if graph.reads("b") else None, H if graph.reads("h") else None
    few, mask = (create_block_mask(mod, *heads, *lengths, device="cpu") for heads in (own, (B, H)))
    return few, mask


@pytest.mark.parametrize("name", MASKS)
def test_the_bits_of_a_mask(name: str) -> None:
    few, mask = mask_of(name)
    made = built(MASKS[name][0], (few.B, few.H, *few.seq_lengths))
    bits = made.bits
    assert bits is not None
    assert made.no_bits == ""
    assert bits.blocks > 0
    assert_same_bits(bits, few)
    assert bits.nbytes > 2 * BLOCK_BYTES * bits.blocks
    assert made.bytes >= bits.nbytes
    # Expanded lists find the same words.
    heads = torch.arange(few.B * few.H).view(few.B, few.H).expand(mask.B, mask.H).flatten()
    assert_same_bits(bits.repeated(heads, few.B * few.H), mask)


@pytest.mark.parametrize("room", [True, False], ids=["one allocation", "runs apart"])
def test_lists_in_steps(monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    monkeypatch.setattr(launch_plan, "SMALL_LISTS", (0, 0))
    if not room:
        monkeypatch.setattr(launch_plan, "_SMALL", 0)
    launch_plan.recipe_of.cache_clear()
    try:
        for name in ("by batch and head", "several runs"):
            few, _ = mask_of(name)
            bits = built(MASKS[name][0], (few.B, few.H, *few.seq_lengths)).bits
            assert bits is not None
            assert_same_bits(bits, few)
    finally:
        launch_plan.recipe_of.cache_clear()


def test_the_reference_says_which_bits_are_wrong() -> None:
    mask, _ = mask_of("diagonals")
    bits = reference_bits(mask)
    assert_same_bits(bits, mask)
    bits.by_key.words[5] ^= 1
    with pytest.raises(AssertionError):
        assert_same_bits(bits, mask)


def test_masks_without_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mod, sizes = MASKS["diagonals"][0], (1, 1, 256, 256)
    events.forget_fallbacks()
    assert built(lambda b, h, q_idx, kv_idx: q_idx < 128, sizes).no_bits == "no block is partial"
    assert events.fallbacks() == {}, "nothing slower was taken"
    monkeypatch.setattr(pair_bits, "MOST_BYTES", 2 * 4 * BLOCK_BYTES)
    assert built(mod, sizes).bits is not None
    monkeypatch.setattr(pair_bits, "MOST_BYTES", 2 * 4 * BLOCK_BYTES - 1)
    assert "4 blocks would take more than" in (built(mod, sizes).no_bits)
    assert sorted(events.fallbacks().values()) == [1]
    with torch.inference_mode():
        table = torch.arange(256)
    made = built(lambda b, h, q_idx, kv_idx: (table[q_idx] * 5 + table[kv_idx]) % 3 == 0, sizes)
    assert made.bits is None
    assert "inference mode" in made.no_bits
