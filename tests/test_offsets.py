"""at_offsets, and mods.shifted: mods of a part of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import create_mask, mods
from flexattn.graph.offsets import at_offsets
from flexattn.graph.row_bounds import is_interval, row_bounds
from flexattn.trace.trace import trace

TABLE = torch.randn(64)
IDS = torch.arange(64) // 9


def scored(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * 0.5 + TABLE[kv_idx] - TABLE[q_idx] * (q_idx - kv_idx)


MASKS: dict[str, Any] = {
    "window": mods.sliding_window(7), "documents": mods.document_causal(IDS),
    "blocks": lambda b, h, q_idx, kv_idx: q_idx // 8 * 3 > kv_idx // 4,
}  # fmt: skip


@pytest.mark.parametrize("offsets", [(0, 0), (16, 0), (0, 24), (40, 32)])
def test_a_score_mod_at_offsets(offsets: tuple[int, int]) -> None:
    q, kv = torch.arange(24)[:, None], torch.arange(32)[None, :]
    score, zero = torch.randn(24, 32), torch.tensor(0)
    found = at_offsets(trace(scored, "score"), *offsets)(score, zero, zero, q.int(), kv.int())
    torch.testing.assert_close(found, scored(score, zero, zero, q + offsets[0], kv + offsets[1]))


@pytest.mark.parametrize("offsets", [(16, 0), (0, 24), (40, 32)])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_at_offsets(name: str, offsets: tuple[int, int]) -> None:
    q, kv, zero = torch.arange(24)[:, None], torch.arange(32)[None, :], torch.tensor(0)
    wanted = MASKS[name](zero, zero, q + offsets[0], kv + offsets[1])
    assert torch.equal(at_offsets(trace(MASKS[name], "mask"), *offsets)(zero, zero, q.int(), kv.int()), wanted)


@pytest.mark.parametrize("offset", [100, 2**24, 2**24 + 1, 2**29, 2**30 - 64])
def test_shifted_windows_are_intervals_and_right(offset: int) -> None:
    mod = mods.shifted(mods.sliding_window(7), offset, offset - 5)
    for column in ("q_idx", "kv_idx"):
        assert is_interval(row_bounds(trace(mod, "mask").graph, column)) or offset > 2**24
    plain = mods.shifted(mods.sliding_window(7), 5, 0)
    assert torch.equal(create_mask(mod, None, None, 40, 50, "cpu"), create_mask(plain, None, None, 40, 50, "cpu"))
