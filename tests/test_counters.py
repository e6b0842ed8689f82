"""flexattn.counters and the logger: what a process traced, compiled and fell back to."""

from __future__ import annotations

import doctest
import itertools
import logging
import warnings

import pytest
import torch

import flexattn
from flexattn import counters, create_block_mask, flex_attention, mods
from flexattn.errors import RetraceWarning
from flexattn.process import events
from flexattn.trace import memo
from flexattn.trace.failed_guard import reason_of
from flexattn.trace.trace import trace, variant_of

X = torch.randn(1, 2, 32, 16)


@pytest.fixture(autouse=True)
def zero():
    counters(reset=True)


def test_traces_and_guards():
    state = {"slope": 0.5}

    def mod(score, b, h, q_idx, kv_idx):
        return score * (2 if state.get("kind") else 1) + state["slope"]

    for _ in range(3):
        flex_attention(X, X, X, mod)
    assert (counters().traces, counters().guard_hits, counters().failed_guards) == (1, 2, {})
    state["kind"] = "other"
    flex_attention(X, X, X, mod)
    assert counters().traces == 2
    ((reason, times),) = counters().failed_guards.items()
    assert times == 1 and reason.startswith("score_mod mod (") and "state" in reason


def shifted(gain, table, flag):
    def mod(score, b, h, q_idx, kv_idx):
        return score * gain + table[h] + LIMIT if flag else score

    return mod


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scales, self.power = torch.nn.Parameter(torch.rand(2)), 2

    def mod(self, score, b, h, q_idx, kv_idx):
        return score * self.scales[h] if self.power > 1 else score


LIMIT = 3


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((2, torch.rand(4), True), "type(gain) is not float (gain is 2)"),
        ((0.5, torch.rand(4, 4), True), "table.shape has 2 elements"),
        ((0.5, torch.rand(4).half(), True), "not table.dtype is torch.float32 (table.dtype is torch.float16)"),
        ((0.5, torch.rand(1), True), "not table.shape[0] > 1 (table.shape[0] is 1)"),
        ((0.5, None, True), "not type(table) is Tensor (table is None)"),
        ((0.5, torch.rand(4), False), "flag is not True (flag is False)"),
    ],
)
def test_a_failed_guard_is_explained_in_the_users_names(others, reason):
    mod = shifted(0.5, torch.rand(4), True)
    trace(mod, "score")
    (known, *_) = memo.find(mod, variant_of("score", torch.float32))
    assert reason_of(known, shifted(*others)) == reason
    assert reason_of(known, mod) == "none that can be named", "it passes"


def test_a_failed_guard_of_a_module_or_a_global_is_explained(monkeypatch):
    module = Scaled()
    trace(module.mod, "score")
    (known, *_) = memo.find(module.mod, variant_of("score", torch.float32))
    module.scales.requires_grad_(False)
    assert reason_of(known, module.mod) == (
        "not self.scales.requires_grad is True (self.scales.requires_grad is False)"
    )
    del module.scales
    assert "'scales' in self._parameters is False" in reason_of(known, module.mod)
    mod = shifted(0.5, torch.rand(4), True)
    trace(mod, "score")
    (known, *_) = memo.find(mod, variant_of("score", torch.float32))
    monkeypatch.setitem(globals(), "LIMIT", "three")
    assert reason_of(known, mod) == "type(LIMIT) is not int (LIMIT is 'three')"


def test_mods_that_are_traced_at_each_call():
    count = itertools.count()

    def mod(score, b, h, q_idx, kv_idx):
        return score + next(count)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for _ in range(4):
            flex_attention(X, X, X, mod)
    ((reason, times),) = counters().retraced.items()
    assert times == 4 and "test_counters.py" in reason
    assert "retraced:\n" in str(counters()) and "traces: 4" in str(counters())


def test_fallbacks_are_counted_and_logged_once(caplog):
    with caplog.at_level(logging.INFO, "flexattn"):
        for _ in range(3):
            events.fallback("engine", "a reason")
    assert counters().fallbacks == {"engine: a reason": 3}
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("flexattn.fallback", "engine: a reason")]
    assert counters(reset=True).fallbacks and not counters().fallbacks


def test_a_graph_break_is_a_fallback():
    def mod(score, b, h, q_idx, kv_idx):
        torch._dynamo.graph_break()
        return score

    torch._dynamo.reset()
    torch.compile(lambda x: flex_attention(x, x, x, mod), backend="eager")(X)
    assert any(text.startswith("torch.compile: ") for text in counters().fallbacks)


def test_a_mask_that_is_not_prepared_is_a_fallback():
    torch._dynamo.reset()
    mask = create_block_mask(mods.causal, None, None, 32, 32, device="cpu")[:]
    compiled = torch.compile(lambda x: flex_attention(x, x, x, None, mask), backend="eager")
    for _ in range(2):  # it is prepared once
        compiled(X)
    assert counters().fallbacks == {"torch.compile: a call breaks the graph: block_mask is not prepared": 1}


def test_reasons_are_bounded(monkeypatch):
    monkeypatch.setattr(events, "_MOST_REASONS", 3)
    for i in range(10):
        events.fallback("engine", str(i))
    assert len(counters().fallbacks) == 4 and counters().fallbacks["other reasons"] == 7


def test_the_log_shows_traces(caplog):
    with caplog.at_level(logging.DEBUG, "flexattn"):
        flex_attention(X, X, X, lambda score, b, h, q_idx, kv_idx: score * 3.25)
    assert any(r.name == "flexattn.trace" and "score_mod" in r.getMessage() for r in caplog.records)


def test_nothing_is_configured():
    logger = logging.getLogger("flexattn")
    assert [type(h) for h in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET and logger.propagate


def test_the_example():
    (example,) = doctest.DocTestFinder().find(counters, "counters", globs={"flexattn": flexattn})
    results = doctest.DocTestRunner().run(example)
    assert results.failed == 0 and results.attempted >= 5


class Guarded:
    """An object whose repr fails."""

    def __init__(self, kind):
        self.kind = kind

    def __repr__(self):
        raise AttributeError("not initialized")


def test_the_reason_runs_no_code_of_the_user():
    config = Guarded("plain")

    def mod(score, b, h, q_idx, kv_idx):
        return score * 2 if config.kind == "plain" else score

    trace(mod, "score")
    (known, *_) = memo.find(mod, variant_of("score", torch.float32))
    config = Guarded(Guarded("nested"))
    assert "config.kind" in reason_of(known, mod)
    config = None
    assert "config" in reason_of(known, mod)
