"""The plainest case that still fails: one field at a time is made simpler, for as long as that helps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.cases import Case

KEPT = ("numbers", "tensors")  # seeds are no simpler than others


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """Return a case that fails too and of which no simpler one that was tried does."""
    until = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for simpler in simpler_cases(case):
            if time.monotonic() > until:
                return case
            if fails(simpler):
                case, found = simpler, True
                break
    return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield the case with one field as in the plainest one, then with one field a step nearer to that."""
    changed = [f for f in fields(case) if f.name not in KEPT and getattr(case, f.name) != f.default]
    for f in changed:
        yield replace(case, **{f.name: f.default})
    for f in changed:
        for value in _nearer(getattr(case, f.name), f.default):
            yield replace(case, **{f.name: value})


def _nearer(value: Any, default: Any) -> Iterator[Any]:
    """Yield values between: tuples that lack one element or have one of the default's, smaller numbers."""
    if isinstance(value, bool) or not isinstance(value, int | tuple):
        return
    if isinstance(value, int):
        smaller = (1, 2, 3, 4, 8, value // 2, value - 1)
        yield from (x for x in dict.fromkeys(smaller) if 0 < x < value and x != default)
    elif len(value) == len(default):
        together = (value[:i] + default[i : i + 1] + value[i + 1 :] for i in range(len(value)))
        yield from (x for x in together if x not in (value, default))
    elif len(value) > 1:
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
