"""score_reductions: reductions over the score are refused with the user's line; other reductions are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexattn import flex_attention
from flexattn.errors import ModError
from flexattn.trace.score_reductions import FIXES
from flexattn.trace.trace import trace

TABLE = torch.randn(5, 3)

REFUSED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda s, b, h, q, k: s.sum(),
    "mean": lambda s, b, h, q, k: s - torch.mean(s, -1, keepdim=True),
    "max": lambda s, b, h, q, k: s - s.max(),
    "max along dim": lambda s, b, h, q, k: s - s.max(dim=-1).values,
    "amax": lambda s, b, h, q, k: s - torch.amax(s, -1),
    "argmax": lambda s, b, h, q, k: s * s.argmax(),
    "softmax": lambda s, b, h, q, k: torch.softmax(s, -1),
    "softmax of F": lambda s, b, h, q, k: F.softmax(s, dim=-1, dtype=torch.float32),
    "log_softmax": lambda s, b, h, q, k: s.log_softmax(-1),
    "softmax of more": lambda s, b, h, q, k: ((s + TABLE[h, 0]) * 2).softmax(-1),
    "logsumexp": lambda s, b, h, q, k: s - torch.logsumexp(s, -1),
    "norm": lambda s, b, h, q, k: s / s.norm(),
    "normalize": lambda s, b, h, q, k: F.normalize(s, dim=-1),
    "var": lambda s, b, h, q, k: s / s.var(unbiased=False),
    "any": lambda s, b, h, q, k: torch.where((s > 0).any(), s, 0.0),
    "cumsum": lambda s, b, h, q, k: s.cumsum(-1),
    "topk": lambda s, b, h, q, k: torch.where(s >= s.topk(1).values, s, -torch.inf),
    "sort": lambda s, b, h, q, k: s.sort().values,
}
ACCEPTED: dict[str, Callable[..., Tensor]] = {
    "of a captured row": lambda s, b, h, q, k: s + TABLE[h].sum() + TABLE[h].amax(),
    "of a captured number": lambda s, b, h, q, k: s + TABLE[h, 0].sum(),
    "of a captured table": lambda s, b, h, q, k: s + TABLE.max() + TABLE.mean(),
    "softmax of a captured row": lambda s, b, h, q, k: s + torch.softmax(TABLE[h], -1)[k % 3],
    "of a position": lambda s, b, h, q, k: torch.where(q.max() >= k, s, -torch.inf),
    "of a row with the score": lambda s, b, h, q, k: s * (TABLE[h] * s).sum(),
    "of stacked scores": lambda s, b, h, q, k: torch.stack([s, 2 * s]).softmax(0)[1],
    "maximum": lambda s, b, h, q, k: torch.max(s, TABLE[h, 0]) + torch.minimum(s, TABLE[h, 1]),
    "a loss of two numbers": lambda s, b, h, q, k: s + F.huber_loss(s, TABLE[h, 0]) + F.mse_loss(s, TABLE[h, 0]),
    "isin": lambda s, b, h, q, k: torch.where(torch.isin(s, torch.tensor([1.0, 2.0])), s, 0.0),
    "nothing": lambda s, b, h, q, k: torch.logaddexp(s, TABLE[h, 0]).clamp(-9, 9),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reduction_over_the_score_is_refused(name: str) -> None:
    mod = REFUSED[name]
    with pytest.raises(
        ModError, match=r"score_mod: found \w+ over the score at .*score is one number \(0-d\)"
    ) as caught:
        trace(mod, "score")
    assert f"test_score_reductions.py:{mod.__code__.co_firstlineno}," in str(caught.value)
    assert any(fix in str(caught.value) for fix in FIXES.values())


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_reductions_are_accepted(name: str) -> None:
    trace(ACCEPTED[name], "score")


def test_compiled_code_names_the_place_of_the_mod() -> None:
    def centered(score, b, h, q_idx, kv_idx):
        return score - score.mean()

    call = torch.compile(lambda q: flex_attention(q, q, q, centered), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"centered: found mean over the score at .*test_score_reductions.py:\d+, "):
        call(torch.randn(1, 2, 16, 16))


def test_the_message_names_the_operator_the_line_and_the_fix() -> None:
    def normalized(score, b, h, q_idx, kv_idx):
        shifted = score - TABLE[h, 0]
        return torch.softmax(shifted, dim=-1)

    with pytest.raises(ModError) as caught:
        trace(normalized, "score")
    text = str(caught.value)
    assert text.startswith("score_mod normalized: found softmax over the score at ")
    assert f":{normalized.__code__.co_firstlineno + 2}, expected" in text
    assert text.endswith(
        "flex_attention applies the softmax over the keys itself: return the score before the softmax."
    )
