"""The fuzzer itself: what it draws, what it finds, and what it tells."""

from __future__ import annotations

import collections

import pytest
import torch
from fuzz.__main__ import case_from, claims, parse, plan_of
from fuzz.cases import SPACES, Case, Space
from fuzz.compare import ours, pose
from fuzz.crew import Result
from fuzz.draw import draw_case, features_in, features_of, kind_of
from fuzz.report import count_features, notes, text
from fuzz.serve import run_case, shrink_case

from flexattn.engines import cpu

CPU = SPACES["cpu"]


def results(space: Space, indices: range) -> list[Result]:
    drawn = [(i, draw_case(space, 0, i)) for i in indices]
    return [Result(i, case, run_case(space, case, list(space.engines))) for i, case in drawn]


def test_random_cases_are_right() -> None:
    plan = plan_of(parse(["--device", "cpu"]))
    found = results(CPU, range(15))
    assert [notes(plan, result) for result in found] == [[]] * 15
    shown = text(plan, found, 1.0, "here")
    assert "seed 0: 15 cases in 1 s" in shown and "gradient through lse" in shown and "cpu" in shown
    assert claims(plan, found, 0) == [] and "drawn less than 20 times: " in claims(plan, found, 20)[0]


@pytest.mark.parametrize("index", [3, 77, 1234])
def test_a_case_follows_from_its_number(index: int) -> None:
    case = draw_case(CPU, 5, index)
    assert case == draw_case(CPU, 5, index) == case_from(repr(case))
    one, other = (ours(pose(case, "cpu"), {}) for _ in range(2))
    assert all(x is None or torch.equal(x, other[name]) for name, x in one.items())
    assert case != draw_case(CPU, 6, index)


@pytest.mark.parametrize("name", SPACES)
def test_every_feature_is_drawn_twenty_times_in_four_hundred_cases(name: str) -> None:
    space = SPACES[name]
    cases = [draw_case(space, 0, i) for i in range(400)]
    counts = collections.Counter(dict.fromkeys(features_in(space), 0))
    counts.update(feature for case in cases for feature in features_of(space, case))
    assert min(counts.values()) >= 20, counts.most_common()[-5:]


def test_cases_of_one_kind_share_kernels() -> None:
    cuda = SPACES["cuda"]
    one, other = (draw_case(cuda, 0, i) for i in (7, 7 + cuda.kinds))
    assert kind_of(cuda, 7) == kind_of(cuda, 7 + cuda.kinds) != kind_of(cuda, 7 + 4 * cuda.kinds)
    same = ("scores", "masks", "dtype", "D", "Dv", "block", "layouts", "options", "numbers")
    assert all(getattr(one, name) == getattr(other, name) for name in same) and one != other


def test_an_error_is_found_and_made_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is wrong for more than one head and several keys: nothing else is left of the case."""
    forward = cpu.forward

    def wrong(problem):
        out, lse, largest = forward(problem)
        if problem.query.shape[1] > 1 and problem.key.shape[2] > 2:
            out = out + 0.5
        return out, lse, largest

    monkeypatch.setattr(cpu, "forward", wrong)
    index = next(i for i in range(99) if (c := draw_case(CPU, 0, i)).group > 1 and c.N > 9 and c.scores and c.masks)
    (result,) = results(CPU, range(index, index + 1))
    assert result.verdicts["cpu"].outcome == "wrong" and result.verdicts["cpu"].about == "out"
    small = shrink_case(CPU, result.case, "cpu", 60.0)
    assert small == Case(group=2, N=3, numbers=index, tensors=index)
    result.shrunk["cpu"] = repr(small)
    told = notes(plan_of(parse(["--device", "cpu"])), result)
    assert told[0].startswith(f"FAILED case {index} of seed 0, engine cpu: wrong: out: ")
    assert told[2] == f'  reproduce: python -m tests.fuzz --device cpu --engine cpu --replay "{small}"'


def test_exceptions_and_refusals_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_case(CPU, Case(options=(("BACKEND", "FLASH"),)), ["cpu"])["cpu"]
    assert (refused.outcome, refused.about, refused.failed) == ("refused", "UnsupportedError", False)
    monkeypatch.setattr(cpu, "forward", lambda problem: 1 / 0)
    broken = run_case(CPU, Case(), ["cpu"])["cpu"]
    assert (broken.outcome, broken.about, broken.failed) == ("broken", "ZeroDivisionError", True)


def test_counts_of_features() -> None:
    counts = count_features(CPU, [Result(0, Case(), {}), Result(1, Case(masks=("causal",), N=2), {})])
    assert counts["mask causal"] == 1 and counts["one query"] == 2 and counts["score alibi"] == 0
