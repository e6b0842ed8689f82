"""memo: values are read at each call, kinds of values are the key, and what a method reaches is followed."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eager_comparison import M, N, Straight, check_score, traces, values
from torch import Tensor

from flexattn import flex_attention, mods
from flexattn.errors import RetraceWarning
from flexattn.graph import bound_mod
from flexattn.trace.trace import stats, trace

GLOBAL_GAIN = 1.5


def test_new_values_are_hits_and_never_stale() -> None:
    def make(table: Tensor, gain: float, shift: int) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s * gain + table[q + shift] * (2 * shift + 1)

        return mod

    check_score(make(values(M + 5), 0.5, 1))
    for size, gain, shift in ((M + 4, 2.5, 4), (400, -1.0, 0), (M + 1, 1.0, 1), (77, 0.0, -3)):
        mod = make(values(size), gain, shift)
        assert traces(lambda mod=mod: trace(mod, "score", torch.float64)) == 0
        check_score(mod)


def test_rebound_closure_and_global_are_read_anew() -> None:
    gain = 2.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * gain * GLOBAL_GAIN

    check_score(mod)
    gain = 3.0
    assert traces(lambda: check_score(mod)) == 0
    global GLOBAL_GAIN
    GLOBAL_GAIN = -0.25
    assert traces(lambda: check_score(mod)) == 0
    GLOBAL_GAIN = 1.5


def test_flags_strings_and_other_dtypes_are_other_mods() -> None:
    def make(flag: bool, word: str, table: Tensor) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s + table[q] if flag else s - 1
            return s * 2 if word == "twice" else s

        return mod

    for flag in (True, False):
        for word in ("once", "twice"):
            assert traces(lambda f=flag, w=word: check_score(make(f, w, values(N)))) == 1
            assert traces(lambda f=flag, w=word: check_score(make(f, w, values(N)))) == 0
    assert traces(lambda: check_score(make(True, "once", values(N).detach().float()))) == 1
    assert traces(lambda: check_score(make(True, "once", torch.arange(N)))) == 1


def test_decisions_on_numbers_are_guards() -> None:
    def make(cap: float, window: int) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if cap > 0:
                s = cap * torch.tanh(s / cap)
            for i in range(window):
                s = s + (q // (i + window)) * i
            return s

        return mod

    assert traces(lambda: check_score(make(2.0, 2))) == 1
    assert traces(lambda: check_score(make(3.0, 2))) == 0
    assert traces(lambda: check_score(make(-3.0, 2))) == 1
    assert traces(lambda: check_score(make(3.0, 4))) == 1
    assert traces(lambda: check_score(make(2.5, 2))) == 0


def test_same_and_different_tensors() -> None:
    def make(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s + x[q] * y[q]

    x, y = values(N), values(N) * 2
    assert len(check_score(make(x, x)).captures) == 1
    assert len(check_score(make(x, y)).captures) == 2


class _Layer(torch.nn.Module):
    """A layer whose forward calls attention with mods of its own, and does much that no mod does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(2))
        self.left = 3
        self.right = 5

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.table[h]

    def behind(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < self.left

    def ahead(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx - q_idx < self.right

    def forward(self, q: Tensor, closure: bool = False) -> Tensor:
        Straight.apply(getattr(self, "table"))  # noqa: B009  (out of reach of the mods)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self.table[h]

        return flex_attention(q, q, q, score_mod if closure else self.score_mod)


@pytest.mark.parametrize("closure", [False, True])
def test_a_layer_may_call_attention_with_its_own_method(closure: bool) -> None:
    layer, q = _Layer(), torch.randn(1, 2, 8, 4)
    layer(q, closure).sum().backward()
    assert layer.table.grad is not None
    before = stats()["traces"]
    layer(q, closure)
    _Layer()(q, closure)
    assert stats()["traces"] == before


def test_every_attribute_that_any_method_of_an_object_reads_is_watched() -> None:
    layer = _Layer()
    mod = mods.and_masks(layer.behind, layer.ahead)
    assert trace(mod, "mask").numbers == (3, 5)
    layer.left, layer.right = 4, 9
    before = stats()["traces"]
    assert trace(mod, "mask").numbers == (4, 9)
    assert stats()["traces"] == before


def test_what_a_method_reaches_through_an_operator_of_its_object_is_followed() -> None:
    class Table:
        def __init__(self) -> None:
            self.values = torch.ones(3)

        def __getitem__(self, index: Tensor) -> Tensor:
            return self.values[index]

        def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self[h]

    table, other = Table(), Table()
    assert trace(table.score_mod, "score").captures[0] is table.values
    before = stats()["traces"]
    assert trace(other.score_mod, "score").captures[0] is other.values
    assert stats()["traces"] == before


def test_attributes_by_computed_names_are_followed() -> None:
    class Hidden:
        gain = 2.0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * getattr(Hidden, "ga" + "in") + getattr(Hidden, "tab" + "le")[q]

    for gain in (2.0, 3.0):
        Hidden.gain, Hidden.table = gain, values(N)
        assert traces(lambda: check_score(mod, Hidden.table)) == (gain == 2.0)


def test_wrapped_functions_and_namespaces() -> None:
    gain = 2.0

    @functools.lru_cache
    def hidden(x: Tensor) -> Tensor:
        return x * gain

    check_score(lambda s, b, h, q, k: hidden(s))
    gain = 3.0
    check_score(lambda s, b, h, q, k: hidden(s))
    settings = SimpleNamespace(gain=1.0, table=values(N))
    for settings.gain in (4.0, 5.0):
        mod = lambda s, b, h, q, k: s * settings.gain + settings.table[q]  # noqa: E731
        assert check_score(mod, settings.table).numbers == (settings.gain,)


def test_a_long_list_is_placed_on_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, there = list(range(5000)), torch.device("meta")
    mod = lambda s, b, h, q, k: s + torch.tensor(numbers)[q]  # noqa: E731
    (first,) = trace(mod, "score").on(there).captures
    monkeypatch.setattr(bound_mod, "_literal_on", None)
    assert first.device == there and trace(mod, "score").on(there).captures[0] is first


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_callers_mode_is_not_part_of_the_trace(context: Callable[[], Any]) -> None:
    table = values(N)

    def make(unique: str) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: s * table[q] * len(unique)

    with context():
        bound = trace(make(str(context)), "score", torch.float64)
    assert "detach" not in repr(bound.graph)
    assert traces(lambda: check_score(make(str(context)), table)) == 0


def test_what_a_mod_changes_is_changed_as_by_python() -> None:
    class Bias:
        def __init__(self) -> None:
            self.tables, self.gain, self.calls = [values(N)], 2.0, 0

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            self.calls += 1
            return s + self.tables[0][q] * self.gain

    bias = Bias()
    table = bias.tables[0]
    with pytest.warns(RetraceWarning, match="changes the attribute 'calls' of a captured object of Bias") as caught:
        for calls in (1, 2, 3):
            trace(bias, "score")
            assert (bias.calls, bias.gain, len(bias.tables)) == (calls, 2.0, 1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert bias.tables[0] is table


def test_literals_of_many_kinds() -> None:
    class Mode(enum.Enum):
        ADD, SCALE = 1, 2

    def make(mode: Mode, kinds: frozenset[str], dtype: torch.dtype) -> Callable[..., Tensor]:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            s = s + q.to(dtype) if mode is Mode.ADD else s * 2
            return -s if "negative" in kinds else s

        return mod

    for mode in Mode:
        assert traces(lambda m=mode: check_score(make(m, frozenset(["negative"]), torch.float64))) == 1
        assert traces(lambda m=mode: check_score(make(m, frozenset(["negative"]), torch.float64))) == 0
