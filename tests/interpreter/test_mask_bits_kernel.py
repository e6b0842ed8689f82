"""The kernel that computes the bits of partial blocks, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_bits import reference_bits

from flexattn import create_block_mask, mods
from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_BYTES, ROW_WORDS
from flexattn.machine.target import INTERPRETER
from flexattn.mask_build import pair_bits as mask_bits
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.pair_bits import pair_bits
from flexattn.trace.trace import trace

pytest.importorskip("triton")

CPU = torch.device("cpu")
TABLE = torch.rand(2, 3, 400, generator=torch.Generator().manual_seed(0)) < 0.5


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return TABLE[b, h, q_idx] ^ TABLE[b, h, kv_idx]


MASKS: dict[str, tuple[Callable[..., Any], int | None, int | None, int, int]] = {
    "neighborhood": (mods.natten_2d(16, 20, 5), None, None, 320, 320),
    "diagonals": (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 < 3, None, None, 200, 300),
    "first of a row": (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 5 != 1), None, None, 384, 257),
    "by batch and head": (by_head, 2, 3, 130, 260),
    "by head alone": (lambda b, h, q_idx, kv_idx: (q_idx * (h + 1) + kv_idx) % 3 == 0, 2, 2, 129, 128),
    "number": (lambda b, h, q_idx, kv_idx, n=37: (q_idx * kv_idx) % n < 5, None, None, 128, 128),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_bits_of_a_mask(name: str) -> None:
    mod, *sizes = MASKS[name]
    mask = create_block_mask(mod, *sizes, device="cpu")
    bound = trace(mod, "mask")
    plan = plan_mask(bound, INTERPRETER)
    assert plan is not None
    # As when it is built: the mask of the batches and heads that the mod reads, which is then expanded.
    built = create_block_mask(
        mod, *(n if bound.graph.reads(axis) else None for axis, n in zip("bh", sizes[:2], strict=True)), *sizes[2:],
        device="cpu",
    )  # fmt: skip
    assert built.q_runs is not None
    of = (built.B, built.H, *built.seq_lengths)
    bits = pair_bits(plan, bound, built.kv_runs.partial, built.q_runs.partial, of, CPU, INTERPRETER)
    assert bits is not None
    blocks = BITS_BLOCK * ROW_WORDS
    for found, expected in zip(bits[:2], reference_bits(built)[:2], strict=True):
        assert torch.equal(found.first, expected.first)
        assert torch.equal(found.words[:-blocks], expected.words[:-blocks])
    assert bits.nbytes > 2 * BLOCK_BYTES * int(bits.by_query.first[-1])
    # Expanded lists find the same words.
    heads = torch.arange(built.B * built.H).view(built.B, built.H).expand(mask.B, mask.H).flatten()
    wide, expected = bits.take(heads, built.B * built.H), reference_bits(mask)
    for found, whole in zip(wide[:2], expected[:2], strict=True):
        rows = len(found.first) - 1
        assert rows == len(whole.first) - 1
        counts = whole.first.diff()
        for row in range(rows):
            span = slice(int(found.first[row]) * blocks, (int(found.first[row]) + int(counts[row])) * blocks)
            assert torch.equal(
                found.words[span], whole.words[int(whole.first[row]) * blocks :][: int(counts[row]) * blocks]
            )


def test_masks_without_or_with_too_many_partial_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = trace(MASKS["diagonals"][0], "mask")
    plan = plan_mask(bound, INTERPRETER)
    mask = create_block_mask(MASKS["diagonals"][0], None, None, 256, 256, device="cpu")
    assert plan is not None
    assert mask.q_runs is not None
    full = mask.kv_runs.full, mask.q_runs.full
    assert pair_bits(plan, bound, *full, (1, 1, 256, 256), CPU, INTERPRETER) is None
    monkeypatch.setattr(mask_bits, "MOST_BYTES", 2 * 3 * BLOCK_BYTES)
    partial = mask.kv_runs.partial, mask.q_runs.partial
    assert pair_bits(plan, bound, *partial, (1, 1, 256, 256), CPU, INTERPRETER) is None
