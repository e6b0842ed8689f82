"""`python -m tests.fuzz --state`: programs whose state changes between calls, against the mod as Python runs it then.

A program (`state_programs`) is written, imported and called. Then one place of its state (`state_leaves`) changes, and
it is called again. A mask that was built before must be rejected where the mod computes another one now.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import itertools
import math
import multiprocessing
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, flex_attention
from flexattn.errors import FlexAttentionError, MutationError, RetraceWarning
from flexattn.trace import memo
from flexattn.trace.trace import trace
from fuzz import state_leaves
from fuzz.state_programs import FORMS, FRAGMENTS, PLACEMENTS, WAYS, Program, program

STEPS = 6
LIMIT_S = 120
M, N, D = 3, 4, 2
PAIRS = [(i, j) for i in range(M) for j in range(N)]
SHOWN = 25  # of the most frequent reasons


@dataclass
class Outcome:
    """What a program showed."""

    number: int
    features: list[str]
    failure: str = ""
    steps: int = 0
    changed: int = 0  # steps after which Python computes something else
    changes: Counter[str] = field(default_factory=Counter)
    retraces: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    unsettled: int = 0  # steps that had to be compared twice
    dynamo: int = 0  # changes that Dynamo alone misses too, of compiled calls
    strict: int = 0  # masks that were rejected, though they are what they were
    without: frozenset[int] = frozenset()


class Difference(Exception):
    """Python and flexattn do not agree."""


class Hangs(BaseException):
    """A program does not end. Nobody catches it on the way."""


class PythonHangs(Hangs):
    """The mod itself does not end, as pow(2, 2**40)."""


# One program.


@contextlib.contextmanager
def imported(made: Program) -> Iterator[list[Any]]:
    """Write the modules of a program and import them; the main one is the last."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in made.modules.items():
            (Path(folder) / f"{name}.py").write_text(source)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield [importlib.import_module(name) for name in made.modules]
        finally:
            sys.path.remove(folder)
            for name in made.modules:
                sys.modules.pop(name, None)


def evaluated(run: Callable[[], Any]) -> Any:
    """Return a result, or the exception that it raised."""
    try:
        return run()
    except Exception as error:
        return error


def by_python(mod: Any, kind: str) -> Any:
    """Return what the mod gives for each pair, in float64, as Python runs it on real tensors."""
    found = []
    for i, j in PAIRS:
        place = [torch.tensor(x, dtype=torch.int64) for x in (0, 0, i, j)]
        score = [torch.tensor(0.5 * i - j)] if kind == "score" else []
        found.append(_result(mod(*score, *place)))
    return torch.stack(found).view(M, N)


def _result(value: Any) -> Tensor:
    """Return what a mod returned as a number."""
    if not isinstance(value, (bool, int, float, Tensor)) or (
        isinstance(value, Tensor) and (value.dim() or value.is_complex())
    ):
        raise TypeError("this is no result of a mod")
    return torch.as_tensor(value).detach().double()


def by_trace(mod: Any, kind: Any) -> Tensor:
    """Return the same by the traced mod."""
    bound = trace(mod, kind)
    rows = torch.tensor(PAIRS, dtype=torch.int64)
    place = [torch.zeros_like(rows[:, 0]), torch.zeros_like(rows[:, 0]), rows[:, 0], rows[:, 1]]
    score = [(0.5 * rows[:, 0] - rows[:, 1]).float()] if kind == "score" else []
    return bound(*score, *place).detach().double().expand(M * N).view(M, N)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, D, generator=generator, dtype=torch.float64) for length in (M, N, N)]


def attention(score: Tensor, value: Tensor) -> Tensor:
    """Return out and lse of scores, dense."""
    lse = score.logsumexp(-1, keepdim=True)
    p = torch.exp(score - torch.where(lse.isfinite(), lse, 0.0))
    return torch.cat((p @ value[0, 0], lse), -1)


def by_call(mod: Any) -> Tensor:
    """Return out and lse of flex_attention with a score_mod."""
    out, aux = flex_attention(*inputs(), score_mod=mod, scale=1.0, return_aux=AuxRequest(lse=True))
    return torch.cat((out[0, 0], aux.lse[0, 0, :, None]), -1)


def call_by_python(mod: Any) -> Tensor:
    """Return the same, with the mod as Python runs it."""
    query, key, value = inputs()
    scores = query[0, 0] @ key[0, 0].mT
    rows = []
    for i, j in PAIRS:
        rows.append(_result(mod(scores[i, j], *(torch.tensor(x, dtype=torch.int32) for x in (0, 0, i, j)))))
    return attention(torch.stack(rows).view(M, N), value)


def by_mask(mask: Any) -> Tensor:
    """Return out and lse of flex_attention with a mask that was built before."""
    out, aux = flex_attention(*inputs(), block_mask=mask, scale=1.0, return_aux=AuxRequest(lse=True))
    return torch.cat((out[0, 0], aux.lse[0, 0, :, None]), -1)


def masked(dense: Tensor) -> Tensor:
    query, key, value = inputs()
    return attention(torch.where(dense.bool(), query[0, 0] @ key[0, 0].mT, -math.inf), value)


class Run:
    """A program that runs."""

    def __init__(self, made: Program, modules: list[Any], draw: random.Random, outcome: Outcome) -> None:
        self.made, self.modules, self.draw, self.outcome = made, modules, draw, outcome
        self.mod = modules[-1].mod

    def python(self) -> Any:
        try:
            if self.made.way == "call":
                return evaluated(lambda: call_by_python(self.mod))
            return evaluated(lambda: by_python(self.mod, self.made.kind))
        except Hangs:
            raise PythonHangs from None

    def ours(self) -> Any:
        if self.made.way == "call":
            return evaluated(lambda: by_call(self.mod))
        return evaluated(lambda: by_trace(self.mod, self.made.kind))

    def exact(self) -> Tensor:
        """Return what the mod gives for each pair, as Python runs it now."""
        return by_python(self.mod, self.made.kind)

    def using(self, mask: Any) -> Any:
        """Call with a mask that was built before."""
        return evaluated(lambda: by_mask(mask))

    def compare(self) -> Any:
        """Raise Difference unless both agree; return what Python found."""
        try:
            return self._compare_once(self.draw.random() < 0.5)
        except Difference:  # unless it is that the mod itself changes what it reads: then both see that now
            self.outcome.unsettled += 1
            return self._compare_once(True)

    def _compare_once(self, first: bool) -> Any:
        if first:
            python, ours = self.python(), self.ours()
        else:
            ours, python = self.ours(), self.python()
        if isinstance(python, Exception):
            if not isinstance(ours, Exception):
                raise Difference(f"Python raises {python!r}; flexattn gives {ours.tolist()}")
            return python
        self.agree(python, ours)
        return python

    def agree(self, python: Tensor, ours: Any) -> None:
        if isinstance(ours, FlexAttentionError) and " raised " not in str(ours):
            self.outcome.refusals.append(_without_names(str(ours)))
        elif isinstance(ours, Exception):
            raise Difference(f"flexattn raises {type(ours).__name__}: {ours}; Python gives {python.tolist()}")
        elif not self._same(python, ours):
            raise Difference(f"Python gives {python.tolist()}, flexattn {ours.tolist()}")

    def _same(self, python: Tensor, ours: Tensor) -> bool:
        if self.made.way == "trace":  # float32 scores, which the result is rounded to
            return torch.equal(python.float().nan_to_num(nan=1e20), ours.float().nan_to_num(nan=1e20))
        return not (python.abs() < 1e6).all() or torch.allclose(python, ours, rtol=1e-6, atol=1e-6)

    def build(self) -> tuple[Any, Any]:
        """Build a mask; return it with what Python computes at that moment."""
        dense = self.python()
        mask = evaluated(lambda: create_block_mask(self.mod, 1, 1, M, N, device="cpu", BLOCK_SIZE=2))
        if isinstance(dense, Exception) and not isinstance(mask, Exception):
            raise Difference(f"Python raises {dense!r}; flexattn builds a mask")
        return mask, dense

    def compare_mask(self, mask: Any, before: Tensor) -> None:
        """Raise Difference unless a mask that was built before is used right now, or rejected where it has to be."""
        now, ours = self.python(), self.using(mask)
        if isinstance(now, Exception):
            if not isinstance(ours, Exception):
                raise Difference(f"Python raises {now!r}; flexattn uses the mask that was built before")
        elif not torch.equal(now, before):
            if not isinstance(ours, FlexAttentionError):
                raise Difference(f"the mask was {before.tolist()}, is {now.tolist()}, and is used: {ours}")
        elif isinstance(ours, MutationError):
            self.outcome.strict += 1
        else:
            self.agree_mask(now, ours)

    def agree_mask(self, now: Tensor, ours: Any) -> None:
        expected = masked(now)
        if isinstance(ours, FlexAttentionError):
            self.outcome.refusals.append(_without_names(str(ours)))
        elif isinstance(ours, Exception) or not torch.allclose(expected, ours, equal_nan=True):
            raise Difference(f"expected {expected.tolist()}, found {ours}")

    def change(self) -> tuple[state_leaves.Place, Callable[[], None]] | None:
        """Change one place."""
        sources = "".join(self.made.modules.values())
        values = state_leaves.walk([self.mod, *self.modules])
        places = state_leaves.places(values, sources)
        if self.made.way == "build":  # torch's version counters do not see that, nor do masks that were built before
            places = [p for p in places if p.kind != "data of a tensor"]
        kinds = sorted({p.kind for p in places})
        pool = state_leaves.pool_of(values, self.draw)
        for _ in range(20):
            wanted = self.draw.choice(kinds) if self.draw.random() < 0.5 else ""
            place = self.draw.choice([p for p in places if not wanted or p.kind == wanted])
            try:
                undo = place.change(pool)
            except Exception:  # Python does not allow it
                continue
            return place, undo
        return None

    def step(self, before: Any) -> tuple[Any, bool]:
        """Change one place and compare; return what Python gives then, and whether the change was undone."""
        mask = None
        if self.made.way == "build":
            mask, before = self.build()
        found = self.change()
        if found is None:
            return before, False
        place, undo = found
        self.outcome.changes[place.kind] += 1
        self.outcome.steps += 1
        try:
            if self.made.way == "build" and not isinstance(mask, Exception):
                self.compare_mask(mask, before)
            now = self.compare()
        except Difference as difference:
            raise Difference(f"after a change of the {place.kind} {place.where}: {difference}") from None
        if isinstance(now, Exception) or not isinstance(before, Tensor) or not torch.equal(now, before):
            self.outcome.changed += 1
        if isinstance(now, Exception) or self.draw.random() < 0.25:
            try:
                undo()
            except Exception as error:  # what the mod did since then is in the way
                return error, True
            try:
                return self.compare(), True
            except Difference as difference:
                raise Difference(f"after the {place.kind} {place.where} was changed back: {difference}") from None
        return now, False

    def all_steps(self) -> None:
        before = self.compare()
        if isinstance(before, Exception):
            raise Difference(f"the program itself raises {before!r}") from before
        for _ in range(STEPS):
            before, _ = self.step(before)
            if isinstance(before, Exception):  # what was undone was not all
                return


def _without_names(text: str) -> str:
    return re.sub(r"(\w)_\d\w*", r"\1", " ".join("..." if "fuzzed" in w or "/" in w else w for w in text.split()))[:200]


def run_program(
    seed: int, number: int, without: frozenset[int] = frozenset(), make: Callable[..., Run] = Run
) -> Outcome:
    """Run one program in this process."""
    made = program(seed, number, without)
    outcome = Outcome(number, made.features, without=without)
    memo.clear()
    with warnings.catch_warnings(record=True) as caught, _limited(LIMIT_S):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RetraceWarning)
        try:
            with imported(made) as modules:
                make(made, modules, random.Random(f"steps {seed} {number}"), outcome).all_steps()
        except Difference as difference:
            outcome.failure = str(difference)
        except PythonHangs:
            pass
        except (Exception, Hangs) as error:
            outcome.failure = f"{type(error).__name__}: {error}"
        finally:
            torch.nn.modules.module._global_forward_hooks.clear()
    texts = [str(w.message) for w in caught if issubclass(w.category, RetraceWarning)]
    outcome.retraces = [_without_names(t.partition("each call: ")[2].partition(". Take")[0]) for t in texts]
    return outcome


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs(f"it runs for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def shrunk(seed: int, outcome: Outcome, make: Callable[..., Run] = Run) -> Outcome:
    """Return a failure of fewer fragments, where there is one."""
    count = len(program(seed, outcome.number).fragments)
    for dropped in (i for i in range(count) if i not in outcome.without):
        if len(outcome.without) + 1 < count:
            found = run_program(seed, outcome.number, outcome.without | {dropped}, make)
            if found.failure and "the program itself" not in found.failure:
                return shrunk(seed, found, make)
    return outcome


# Many.


def run_and_shrink(seed: int, number: int, make: Callable[..., Run] = Run) -> Outcome:
    outcome = run_program(seed, number, make=make)
    return shrunk(seed, outcome, make) if outcome.failure else outcome


def _start() -> None:
    torch.set_num_threads(1)


def run_all(
    options: argparse.Namespace, tell: Callable[[Outcome], None], make: Callable[..., Run] = Run
) -> list[Outcome]:
    """Run programs until there are enough, or time is up."""
    until = time.monotonic() + options.seconds
    numbers = iter(itertools.count() if options.cases is None else range(options.cases))
    found: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    while time.monotonic() < until and (some := list(itertools.islice(numbers, 400))):
        with ProcessPoolExecutor(options.workers, context, _start) as pool:  # a new one, so that memory stays bounded
            pending = {pool.submit(_run_until, until, options.seed, n, make): n for n in some}
            for done in as_completed(pending):
                outcome = _outcome(done, options.seed, pending[done])
                if outcome is not None:
                    found.append(outcome)
                    tell(outcome)
    return found


def _run_until(until: float, seed: int, number: int, make: Callable[..., Run]) -> Outcome | None:
    return run_and_shrink(seed, number, make) if time.monotonic() < until else None


def _outcome(done: Future[Outcome | None], seed: int, number: int) -> Outcome | None:
    try:
        return done.result()
    except BrokenProcessPool:
        return Outcome(number, program(seed, number).features, "the process ended, in this program or another one")


def notes(seed: int, outcome: Outcome) -> list[str]:
    """Return what is told of one program."""
    if not outcome.failure:
        return []
    without = f" --without {','.join(map(str, sorted(outcome.without)))}" if outcome.without else ""
    return [
        f"FAILED program {outcome.number}: {outcome.failure}",
        f"  of {', '.join(program(seed, outcome.number, outcome.without).features)}",
        f"  reproduce: python -m tests.fuzz --state --seed {seed} --case {outcome.number}{without}",
    ]


def all_features() -> list[str]:
    """Return all that programs are drawn from."""
    ways = [f"{kind}: {way}" for kind, found in WAYS.items() for way in dict.fromkeys(found)]
    return [*FRAGMENTS, *PLACEMENTS, *(f"mod: {form}" for form in FORMS), *ways]


def text(outcomes: list[Outcome], seconds: float) -> str:
    """Return the summary of a run."""
    features = collections.Counter(dict.fromkeys(all_features(), 0))
    changes, retraces, refusals, examples = Counter[str](), Counter[str](), Counter[str](), dict[str, int]()
    for outcome in outcomes:
        features.update(outcome.features)
        changes.update(outcome.changes)
        for counts, reasons in ((retraces, outcome.retraces), (refusals, outcome.refusals)):
            counts.update(set(reasons))
            examples.update(dict.fromkeys(reasons, outcome.number))
    steps, changed = sum(o.steps for o in outcomes), sum(o.changed for o in outcomes)
    lines = [
        f"{len(outcomes)} programs, {steps} changes ({changed} of what Python computes) in {seconds:.0f} s",
        f"{sum(bool(o.failure) for o in outcomes)} failures",
        f"{sum(o.strict for o in outcomes)} masks rejected that are as they were",
        f"Dynamo misses {sum(o.dynamo for o in outcomes)} changes, in {sum(o.dynamo > 0 for o in outcomes)} programs",
        f"least drawn: {', '.join(f'{name} ({n})' for name, n in features.most_common()[-5:])}",
        "changes: " + ", ".join(f"{name} {n}" for name, n in changes.most_common()),
        f"{sum(bool(o.retraces) for o in outcomes)} programs traced at each call at some time:",
        *(f"  {n:5} {reason} (program {examples[reason]})" for reason, n in retraces.most_common(SHOWN)),
        f"{sum(bool(o.refusals) for o in outcomes)} programs refused at some time:",
        *(f"  {n:5} {reason} (program {examples[reason]})" for reason, n in refusals.most_common(SHOWN)),
    ]
    return "\n".join(lines)


def main(options: argparse.Namespace, make: Callable[..., Run] = Run) -> int:
    """Run programs and print what was found; return 1 where anything failed."""
    if options.case is not None:
        without = frozenset(int(n) for n in options.without.split(",") if n)
        for source in program(options.seed, options.case, without).modules.values():
            print(source)
        outcome = run_program(options.seed, options.case, without, make)
        print("\n".join(notes(options.seed, outcome)) or "no difference")
        return int(bool(outcome.failure))
    started = time.monotonic()
    outcomes = run_all(
        options, lambda o: print("\n".join(notes(options.seed, o)), end="\n" * bool(o.failure), flush=True), make
    )
    print(text(outcomes, time.monotonic() - started))
    return int(any(o.failure for o in outcomes) or not outcomes)
