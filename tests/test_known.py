"""Known calls: what they cost, in counts, and that they compute what the first call of their kind computes.

Speed is not measured here: `python -m benchmarks.overhead --parts stubbed` does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import flexattn
from benchmarks.stubbed import Unlaunched, calls, launches_left_out
from flexattn import api
from flexattn.engines import repeated_calls, triton
from flexattn.runtime import launch

pytest.importorskip("triton")
PACKAGE = str(Path(flexattn.__file__).parent)
# Functions of torch that allocate, as the profiler of Python names them.
ALLOCATING = frozenset((
    "empty", "empty_strided", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "ones", "full", "tensor",
    "clone", "contiguous", "_empty_strided_cpu",
))  # fmt: skip
# Functions that complete the arguments of kernels for a new set of addresses. On a CPU addresses differ by chance.
COMPLETING = frozenset((
    ("launch.py", "descriptor"), ("launch.py", "__init__"), ("launch.py", "data_ptr"), ("known.py", "filled"),
    ("known.py", "expanded"), ("known.py", "<listcomp>"),
))  # fmt: skip
# By call: calls of Python functions of flexattn, allocations, and launches of a known call, at most.
BOUNDS = {
    "plain, forward": (15, 2, 1),
    "causal, forward": (19, 2, 1),
    "alibi + causal, forward": (26, 2, 1),
    "alibi + documents, forward": (27, 2, 1),
    "plain, forward + backward": (28, 6, 4),
    "causal, forward + backward": (33, 6, 4),
    "alibi + causal, forward + backward": (41, 6, 4),
    "alibi + documents, forward + backward": (43, 6, 4),
}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Callable[[], object]]]:
    with launches_left_out():
        yield calls()


def counted(run: Callable[[], object]) -> tuple[int, Counter[str]]:
    """Return how many functions of flexattn a run calls, and how often it calls each function of C."""
    functions, builtins = 0, Counter[str]()

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal functions
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            functions += (Path(code.co_filename).name, code.co_name) not in COMPLETING
        elif event == "c_call":
            builtins[function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return functions, builtins


@pytest.mark.parametrize("name", BOUNDS)
def test_what_a_known_call_costs(runs: dict[str, Callable[[], object]], name: str) -> None:
    run = runs[name]
    for _ in range(3):  # all stages; the repeated forward; the repeated backward
        run()
    before = Unlaunched.launches
    run()
    launches = Unlaunched.launches - before
    # The fewest of several, because garbage may be collected in between.
    functions, builtins = min((counted(run) for _ in range(10)), key=lambda found: found[0])
    allocations = sum(count for function, count in builtins.items() if function in ALLOCATING)
    assert not builtins.keys() & {"zero_", "zeros", "new_zeros", "fill_"}, "on a GPU each is a launch"
    assert functions > 10 and allocations, "the profiler saw the call"
    found = (functions, allocations, launches)
    assert all(a <= b for a, b in zip(found, BOUNDS[name], strict=True)), found


def test_a_known_call_plans_nothing(runs: dict[str, Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> None:
    for run in runs.values():
        for _ in range(3):
            run()
    stages = (
        (api, "pose"), (api, "attention"), (triton, "forward"), (triton, "backward"), (launch, "launch_of"),
        (launch, "plan_best_form"),
    )  # fmt: skip
    for owner, name in stages:
        monkeypatch.setattr(owner, name, None)
    for run in runs.values():
        run()


def test_known_calls_are_forgotten_with_their_launches(runs: dict[str, Callable[[], object]]) -> None:
    runs["plain, forward + backward"]()
    assert repeated_calls._calls and triton._forwards and triton._backwards
    launch.forget_launches()
    assert not repeated_calls._calls and not triton._forwards and not triton._backwards
