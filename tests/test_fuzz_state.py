"""The state fuzzer itself: its programs agree with Python, and it finds each kind of read that is not guarded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from fuzz import state
from fuzz.__main__ import parse
from fuzz.state_programs import FRAGMENTS, program

from flexattn.trace.follow.record import ReadLog


def test_programs_agree_with_python() -> None:
    found = [state.run_program(0, n) for n in range(12)]
    assert [state.notes(0, o) for o in found] == [[]] * 12
    assert sum(o.changed for o in found) > 12
    shown = state.text(found, 1.0)
    assert shown.startswith("12 programs, ") and "0 failures" in shown


def test_a_program_follows_from_its_number() -> None:
    assert program(5, 77) == program(5, 77) != program(5, 78)
    assert len(program(5, 77, frozenset([0])).fragments) == len(program(5, 77).fragments) - 1


def test_every_fragment_is_drawn_in_two_thousand_programs() -> None:
    drawn = [name for n in range(2000) for name in program(0, n).features]
    assert min(drawn.count(name) for name in state.all_features()) >= 20
    assert len(FRAGMENTS) >= 100


# Lines of the guard that are left out, and a program that finds that.
PLANTS = {
    "the code of functions": (r"__code__", 0),
    "the type of an object": (r"^if type\(\w+\) is not r\d+\(\)", 6),
    "numbers and strings": (r"^if type\(\w+\) is not c\d+ or \w+ !=", 133),
    "that a global is not set": (r"^if not \('\w+' not in v\d+\)", 10),
    "the order of bases": (r"__mro__", 7),
    "that a class has no such attribute": (r"not in v\d+\.__dict__", 187),
    "lengths": (r"^if not \(len\(v\d+\) ==", 4),
    "None and booleans": (r" is not (None|True|False): ", 203),
    "the keys of dicts": (r"^if not \(list\(", 39),
    "the dtypes of tensors": (r"\.dtype is ", 177),
    "which object it is": (r"^if \S+ is not v\d+: ", 3),
}


def first_failure(numbers: Iterable[int]) -> int | None:
    """Return the number of the first program that finds a difference."""
    return next((n for n in numbers if state.run_program(0, n).failure), None)


@pytest.fixture
def without_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return what makes guards that lack the lines of a pattern."""
    line = ReadLog._line

    def leave_out(pattern: str) -> None:
        def kept(self: ReadLog, text: str) -> None:
            if not (text.startswith("if ") and re.search(pattern, text)):
                line(self, text)

        monkeypatch.setattr(ReadLog, "_line", kept)

    yield leave_out


@pytest.mark.parametrize("name", PLANTS)
def test_a_read_that_is_not_guarded_is_found(name: str, without_lines: Any) -> None:
    pattern, known = PLANTS[name]
    without_lines(pattern)
    # A new fragment changes what the programs are. Then the first five hundred must find it, which takes a minute.
    assert first_failure((known, *range(500))) is not None


def test_a_guard_that_checks_nothing_is_found(without_lines: Any) -> None:
    without_lines("")
    assert first_failure(range(8)) is not None


def test_options() -> None:
    options = parse(["--state", "--cases", "3", "--without", "0,1", "--workers", "2"])
    assert options.state and options.cases == 3 and options.without == "0,1"
