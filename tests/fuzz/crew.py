"""The processes that build and run cases, fed one case at a time, so that one that hangs or dies takes one case along.

Cases come to those that run them as soon as their kernels are built, or without builders as they are counted.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.cases import Case, Space
from fuzz.draw import draw_case
from fuzz.judge import Verdict

START_S, BUILD_S = 300.0, 300.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plan:
    """What a run of the fuzzer is asked to do."""

    name: str  # of the space
    space: Space
    engines: list[str]
    seed: int
    cases: Iterable[int]
    seconds: float
    workers: int
    builders: int
    shrinks: int  # so many failures are shrunk
    shrink_s: float


@dataclass
class Result:
    """What became of one case."""

    index: int
    case: Case
    verdicts: dict[str, Verdict]
    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0
    shrunk: dict[str, str] = field(default_factory=dict)  # by engine


class Servant:
    """One process of serve.py, started again where it has ended."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.process: subprocess.Popen[str] | None = None

    def ask(self, do: str, index: int, engines: list[str], limit_s: float) -> dict[str, Any] | str:
        """Return the answer, or what became of the process instead."""
        process = self._running()
        if process is None:
            return "does not start"
        request = {"do": do, "seed": self.plan.seed, "index": index, "engines": engines, "seconds": self.plan.shrink_s}
        with _limit(process, limit_s) as late:
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                line = process.stdout.readline() if process.stdout else ""
            except BrokenPipeError:
                line = ""
        if not line or (answer := json.loads(line))["ends"]:
            self.stop()
        if line:
            return answer
        return f"took more than {limit_s:.0f} s" if late.is_set() else f"ended with exit code {process.returncode}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _running(self) -> subprocess.Popen[str] | None:
        """Return the process once it is ready, a new one where there is none."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.serve", self.plan.name], cwd=ROOT, env=_environment(self.plan.name),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )  # fmt: skip
            with _limit(self.process, START_S):
                if not (self.process.stdout and self.process.stdout.readline()):
                    self.stop()
        return self.process


def _environment(name: str) -> dict[str, str]:
    interpreter = {"TRITON_INTERPRET": "1"} if name == "interpreter" else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **interpreter}


class _limit:
    """Ends a process that takes too long; its stacks go to stderr first."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.process, self.late = process, threading.Event()
        self.timer = threading.Timer(seconds, self._end)

    def __enter__(self) -> threading.Event:
        self.timer.start()
        return self.late

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def _end(self) -> None:
        self.late.set()
        self.process.send_signal(signal.SIGABRT)
        time.sleep(5)
        self.process.kill()


def work(plan: Plan, tell: Callable[[Result], None]) -> list[Result]:
    """Run cases until time or cases are over, and tell of each."""
    until, results, lock = time.monotonic() + plan.seconds, [], threading.Lock()
    numbers: Iterator[int] = iter(plan.cases)
    ready: queue.Queue[int | None] = queue.Queue()
    servants = [Servant(plan) for _ in range(plan.workers + plan.builders)]

    def next_number() -> int | None:
        with lock:
            return next(numbers, None) if time.monotonic() < until else None

    def build(servant: Servant) -> None:
        while (index := next_number()) is not None:
            servant.ask("build", index, plan.engines, BUILD_S)
            ready.put(index)

    def run(servant: Servant) -> None:
        while (index := _take(ready, until) if plan.builders else next_number()) is not None:
            result = run_one(plan, servant, index, may_shrink=sum(bool(r.shrunk) for r in results) < plan.shrinks)
            with lock:
                results.append(result)
                tell(result)

    with ThreadPoolExecutor(len(servants)) as threads:
        building = [threads.submit(build, s) for s in servants[plan.workers :]]
        running = [threads.submit(run, s) for s in servants[: plan.workers]]
        threading.Thread(target=_end_of_queue, args=(building, ready, plan.workers), daemon=True).start()
        try:
            for future in running:
                future.result()
        finally:
            for servant in servants:
                servant.stop()
    return results


def _end_of_queue(building: list[Any], ready: queue.Queue[int | None], workers: int) -> None:
    """Tell those who wait that nothing more will be built."""
    for future in building:
        future.result()
    for _ in range(workers):
        ready.put(None)


def _take(ready: queue.Queue[int | None], until: float) -> int | None:
    try:
        return ready.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        return None


def run_one(plan: Plan, servant: Servant, index: int, may_shrink: bool) -> Result:
    """Run one case; where it fails, look for a plainer one that does."""
    space, case = plan.space, draw_case(plan.space, plan.seed, index)
    limit_s = space.limit_s * (1 if plan.builders or not space.kinds else 3)  # of which the most is for compiling
    answer = servant.ask("run", index, plan.engines, limit_s)
    if isinstance(answer, str):
        return Result(index, case, {"+".join(plan.engines): Verdict("broken", "process", answer)})
    verdicts = {name: Verdict(**found) for name, found in answer["verdicts"].items()}
    result = Result(index, case, verdicts, answer["kernels"], answer["seconds"])
    may_shrink = may_shrink and not answer["ends"]  # what fails once would fail for ever
    for name in (name for name, verdict in verdicts.items() if verdict.failed and may_shrink):
        found = servant.ask("shrink", index, [name], plan.shrink_s + space.limit_s)
        result.shrunk[name] = repr(case) if isinstance(found, str) else found["shrunk"]
    return result


def all_numbers(limit: int | None) -> Iterable[int]:
    return itertools.count() if limit is None else range(limit)
