"""Known calls in Triton's interpreter: they compute what the first call of their kind computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import CASES, Setting, results
from quick import slow_unless
from torch import Tensor

from flexattn import api
from flexattn.engines import repeat, triton
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

# Captured tensors with and without gradients, masks, layouts that are copied, sinks, dropout, gradients of lse.
KINDS = (
    "plain", "score-relative", "score-views", "score-dense_factor", "unmasked-clamped", "mask-document",
    "mask_softcap-sliding", "layout-transposed", "gradient_layout-expanded_rows", "sink-heads-None-late_rows",
    "dropout_tile-16x32-captured",
)  # fmt: skip

# Kinds whose calls go through all stages each time: a prologue, a sink, dropout.
POSED = {"score-views", "sink-heads-None-late_rows", "dropout_tile-16x32-captured"}


def equal(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("plain", "score-relative"), KINDS))
def test_a_known_call_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CASES[name](Setting("cpu", torch.float32))
    second = replace(first, query=first.query * 0.5, value=first.value.flip(2))
    launch.forget_launches()
    found = results(second, "ours")
    launch.forget_launches()
    other = results(first, "ours")
    assert len(triton._forwards) == len(triton._backwards) == 1
    monkeypatch.setattr(triton, "_forward", None)
    monkeypatch.setattr(triton, "_backward", None)
    known = results(second, "ours")
    assert equal(found, known)
    assert not torch.equal(other[0], known[0]), "the calls differ"  # type: ignore[arg-type]
    assert len(repeat._calls) == (name not in POSED)
    if name not in POSED:
        monkeypatch.setattr(api, "pose", None)
        monkeypatch.setattr(triton, "forward", None)
        monkeypatch.setattr(triton, "backward", None)
    assert equal(found, results(second, "ours"))
    assert equal(other, results(first, "ours"))
