"""Heads that programs process at a time: their streamed tensors fit in L2, or they have enough tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_cases import Sizes

import flexattn.explanation as explanation
from flexattn import create_block_mask, explain, mods
from flexattn.compile import scalars
from flexattn.compile.scalars import heads_per_group

L2 = 50 << 20


@dataclass(frozen=True)
class Case:
    sizes: Sizes
    forward: int
    backward: int


CASES = {
    "heads that fit in L2": Case(Sizes(8, 16, 16, 2048, 2048, 128, 128), 32, 32),
    "enough tiles": Case(Sizes(2, 16, 16, 8192, 8192, 128, 128), 8, 8),
    "grouped heads, whose queries do not fit": Case(Sizes(2, 32, 8, 8192, 8192, 128, 128), 8, 8),
    "wide heads": Case(Sizes(2, 8, 8, 8192, 8192, 256, 256), 8, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_of_causal_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, problems, pose = CASES[name], [], explanation.pose

    def kept(*arguments: Any, **options: Any) -> Any:
        problems.append(pose(*arguments, **options))
        return problems[-1]

    monkeypatch.setattr(explanation, "pose", kept)
    monkeypatch.setattr(scalars, "l2_bytes", lambda device: L2)
    monkeypatch.setattr(scalars, "processors", lambda device: 132)
    at = case.sizes
    q = torch.empty(at.B, at.Hq, at.M, at.D, dtype=torch.bfloat16, requires_grad=True)
    k = torch.empty(at.B, at.Hkv, at.N, at.D, dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(mods.causal, None, None, at.M, at.N, device="cpu")
    plans = explain(q, k, k, None, mask, enable_gqa=True, target="sm_90").plans
    found = [scalars._heads_per_group(plan, problems[-1]) for plan in plans if plan.spec.name.startswith("hopper")]
    assert found == [case.forward, case.backward]


@pytest.mark.parametrize("heads", [1, 7, 16, 31, 128])
@pytest.mark.parametrize("fewest", [1.0, 6.2, 25.0])
def test_groups_fit_or_have_enough_tiles(heads: int, fewest: float) -> None:
    for head_bytes in (1 << 14, 1 << 20, 1 << 25):
        n = heads_per_group(head_bytes, L2, heads, fewest)
        assert 1 <= n <= heads
        if fewest > max(1, L2 * 0.6 / head_bytes):
            assert n >= min(heads, fewest) and n <= max(1.5 * fewest, fewest + 1)
        else:
            assert n * head_bytes <= max(L2, head_bytes)
