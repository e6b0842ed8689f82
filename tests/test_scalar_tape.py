"""scalar_tape: a mod that computes with scalars is recorded as make_fx records it; other mods are left to make_fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import mods
from flexattn.errors import ModError
from flexattn.trace import trace as trace_module
from flexattn.trace.follow import guard_of
from flexattn.trace.recording import record_run
from flexattn.trace.scalar_tape import NotScalar
from flexattn.trace.scalarize import Traced, scalarize
from flexattn.trace.trace import location_of, mod_name, trace

TABLE = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
EMPTY, GAIN, IDS = torch.zeros(0), torch.tensor(0.5), torch.arange(9) // 2
CAP, WINDOW = 3.0, 7

SCORES: dict[str, Callable[..., Any]] = {
    "the score": lambda s, b, h, q, k: s,
    "a number": lambda s, b, h, q, k: CAP,
    "softcap": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "integers": lambda s, b, h, q, k: s + (q - k) // 2 + (q % 3) * WINDOW,
    "gather": lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(0, 8)],
    "gather of a row": lambda s, b, h, q, k: s + TABLE[h][q % 9],
    "gather of a gather": lambda s, b, h, q, k: s + TABLE[h, IDS[q]],
    "0-d captures": lambda s, b, h, q, k: s * GAIN.exp() + torch.sigmoid(GAIN),
    "0-d prologue": lambda s, b, h, q, k: s * torch.where(GAIN > 0, GAIN, 1.5) + GAIN * CAP,
    "where": lambda s, b, h, q, k: torch.where((q >= k) & ~(b == 1), s, -float("inf")),
    "dtypes": lambda s, b, h, q, k: (s.to(torch.float16) + (q - k).to(s.dtype)).double() * q.float(),
    "created": lambda s, b, h, q, k: s + torch.zeros(()) + torch.ones_like(s) + torch.tensor([1.0, 2.0][1]),
    "no grad": lambda s, b, h, q, k: s + (s * 2).detach(),
    "named": lambda s, b, h, q, k: torch.sigmoid(s) + torch.pow(s, 2) + torch.add(s, q, alpha=2),
}  # fmt: skip
MASKS: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "window": lambda b, h, q, k: (q - k < WINDOW) & (k <= q),
    "documents": mods.document_causal(IDS),
    "numbers of both": mods.and_masks(mods.sliding_window(5), mods.prefix_lm(3)),
    "a divisor, which stays a literal": mods.strided(5),
    "divisor and product": mods.dilated(3, 4),
    "per head": lambda b, h, q, k: TABLE[h, q] > 0,
}
# Arithmetic and decisions on numbers. The texts differ from sympy's, not their values.
NUMBERS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda s, b, h, q, k: s + (WINDOW - 1) * (q % 3) + (-WINDOW * 2 + 5 // WINDOW - 9 % WINDOW) * q,
    "reuse": lambda s, b, h, q, k: s + (WINDOW + 1) * q - (WINDOW + 1) * k + GAIN * (WINDOW * WINDOW),
    "decisions": lambda s, b, h, q, k: (s if WINDOW > 3 and CAP <= 3.5 else -s) * (2 if WINDOW - 1 == 6 else 3),
    "a number by its value": lambda s, b, h, q, k: s * [1.0, 2.0, 3.0][WINDOW - 6] + q // WINDOW,
    "natten": mods.natten_2d(4, 6, (3, 5)),
}  # fmt: skip
# What depends on sizes, devices, or more than one element; what draws or changes something.
OTHERS: dict[str, Callable[..., Any]] = {
    "a size": lambda s, b, h, q, k: s + TABLE[h % TABLE.shape[0], q],
    "a length": lambda s, b, h, q, k: s + len(TABLE),
    "from the end": lambda s, b, h, q, k: s + TABLE[-1, q],
    "a table in the prologue": lambda s, b, h, q, k: s + torch.sigmoid(TABLE)[h, q],
    "a sum": lambda s, b, h, q, k: s + TABLE.sum(),
    "arithmetic of torch on numbers": lambda s, b, h, q, k: s * torch.sym_sqrt(WINDOW),
    "a device": lambda s, b, h, q, k: s + torch.zeros((), device=s.device),
    "in place": lambda s, b, h, q, k: (s * 2).add_(1),
    "a vector": lambda s, b, h, q, k: s + torch.arange(4)[h % 4],
}


def recorded(mod: Any, kind: Any, scalar: bool) -> tuple[Traced, str]:
    """Return the trace of a mod and the source of its guard."""
    name = mod_name(mod, kind)
    found, record = record_run(mod, kind, name, torch.float32, {}, scalar)
    traced = scalarize(found, kind, name, torch.float32, location_of(mod))
    return traced, guard_of(record, traced.conditions)[1]


@pytest.mark.parametrize(("kind", "name"), [*(("score", n) for n in SCORES), *(("mask", n) for n in MASKS)])
def test_the_tape_records_what_make_fx_records(kind: str, name: str) -> None:
    mod = (SCORES if kind == "score" else MASKS)[name]
    (tape, guard), (fakes, other_guard) = (recorded(mod, kind, scalar) for scalar in (True, False))
    assert repr(tape.graph) == repr(fakes.graph)
    assert tape.graph == fakes.graph
    assert (tape.picks, tape.conditions, tape.tensor_names) == (fakes.picks, fakes.conditions, fakes.tensor_names)
    assert guard == other_guard
    _, record = record_run(mod, kind, "mod", torch.float32, {}, True)
    values = [traced.bind(record.tensors, record.numbers, True) for traced in (tape, fakes)]
    assert values[0].numbers == values[1].numbers
    torch.testing.assert_close(values[0].captures, values[1].captures, rtol=0, atol=0)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("window", [2, 3, 4, 7, 8, -5])
def test_arithmetic_on_numbers_has_the_values_and_conditions_of_make_fx(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "mask" if name == "natten" else "score"
    monkeypatch.setitem(globals(), "WINDOW", window)
    found = [_run_guard(NUMBERS[name], kind, scalar) for scalar in (True, False)]
    assert found[0] == found[1]


def _run_guard(mod: Any, kind: Any, scalar: bool) -> Any:
    """Return what a trace made with WINDOW = 7 gives now: None, or values of the graph at some positions."""
    now, globals()["WINDOW"] = WINDOW, 7
    name = mod_name(mod, kind)
    recording, record = record_run(mod, kind, name, torch.float32, {}, scalar)
    traced = scalarize(recording, kind, name, torch.float32, location_of(mod))
    guard, _ = guard_of(record, traced.conditions)
    globals()["WINDOW"] = now
    read = guard(mod)
    if read is None:
        return None
    bound, at = traced.bind(*read, guarded=True), torch.arange(24)
    inputs = (torch.ones(()),) if kind == "score" else ()
    return bound(*inputs, torch.tensor(0), torch.tensor(0), at[:, None], at).tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_the_tape_leaves_other_mods_to_make_fx(name: str) -> None:
    with pytest.raises(NotScalar):
        recorded(OTHERS[name], "score", True)


def test_a_mod_that_changes_something_runs_once() -> None:
    calls: list[int] = []

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        calls.append(1)
        return s * 2

    with pytest.warns(match="traced at each call"):
        trace(mod, "score")
    assert calls == [1]


def test_an_error_is_that_of_make_fx() -> None:
    with pytest.raises(ModError, match=r"test_scalar_tape\.py:\d+: found 3 indices into the captured tensor `TABLE`"):
        trace(lambda s, b, h, q, k: s + TABLE[h, q, k], "score")


def test_a_mod_of_scalars_uses_no_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise AssertionError("fake tensors were made")

    monkeypatch.setattr(trace_module.memo, "find", lambda mod, variant: ())
    monkeypatch.setattr("flexattn.trace.recording._fakes", fails)
    assert trace(SCORES["softcap"], "score").numbers == (CAP,)
    with pytest.raises(AssertionError, match="fake tensors"):
        trace(OTHERS["a size"], "score")
