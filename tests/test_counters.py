"""flexattn.counters and the logger: what a process traced, compiled and fell back to."""

from __future__ import annotations

import doctest
import itertools
import logging
import warnings

import pytest
import torch

import flexattn
from flexattn import counters, flex_attention
from flexattn.errors import RetraceWarning
from flexattn.process import events

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
    assert (counters().traces, counters().guard_hits, counters().failed_guards) == (1, 2, 0)
    state["kind"] = "other"
    flex_attention(X, X, X, mod)
    assert (counters().traces, counters().failed_guards) == (2, 1)


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
