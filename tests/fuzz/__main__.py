"""`python -m tests.fuzz --device cpu --seconds 600`: random calls of flex_attention against the dense reference.

Cases are drawn from (seed, number) alone. Each runs forward and backward in every engine of the device, and out, lse,
the largest scores and all gradients are compared with float64 by the rules of the tests. A case that fails is made
plainer, one field at a time, and printed as a command. On a GPU `--builders 15` compiles the kernels of the next cases.
`--state` runs programs whose state changes between calls instead.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.harness import environment
from fuzz import state
from fuzz.cases import SPACES, Case
from fuzz.crew import Plan, Result, all_numbers, work
from fuzz.draw import draw_case
from fuzz.report import count_features, notes, text, write_json
from fuzz.serve import on_card, run_case
from fuzz.state import Run
from fuzz.state_compiled import CompiledRun

MOST_REFUSED = 0.05  # of all cases: more say nothing of the engines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--device", choices=SPACES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after that")
    parser.add_argument("--cases", type=int, help="how many at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    parser.add_argument("--replay", metavar="CASE", help="run a case as it was printed, in this process")
    parser.add_argument("--engine", action="append", help="one of those of the device, several times for several")
    parser.add_argument("--workers", type=int, default=1, help="processes that run cases")
    parser.add_argument("--builders", type=int, default=0, help="processes that compile for them ahead (cuda)")
    parser.add_argument("--shrinks", type=int, default=10, help="how many failures are made plainer")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for each of these")
    parser.add_argument("--min-count", type=int, default=0, help="fail where a feature was drawn less often")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--state", action="store_true", help="what mods read changes between calls: see fuzz/state.py")
    parser.add_argument("--compiled", action="store_true", help="programs of --state in functions that are compiled")
    parser.add_argument("--without", default="", metavar="N,N", help="of a program of --state: fragments to leave out")
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> Plan:
    space = SPACES[options.device]
    engines = options.engine or list(space.engines)
    if unknown := set(engines) - set(space.engines):
        raise SystemExit(f"--engine: found {', '.join(unknown)}, expected some of {', '.join(space.engines)}")
    return Plan(
        options.device, space, engines, options.seed, all_numbers(options.cases), options.seconds, options.workers,
        options.builders, options.shrinks, options.shrink_seconds,
    )  # fmt: skip


def case_from(printed: str) -> Case:
    """Return the case that prints so."""
    call = ast.parse(printed, mode="eval").body
    assert isinstance(call, ast.Call), f"expected Case(...), found {printed}"
    return Case(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})


def replay(plan: Plan, case: Case) -> int:
    """Run one case in this process and tell of each engine."""
    print(case)
    with on_card(plan.space):
        verdicts = run_case(plan.space, case, plan.engines)
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict.outcome} {verdict.about} {verdict.ratio:.2f} {verdict.text}")
    return int(any(v.failed for v in verdicts.values()))


def claims(plan: Plan, results: Sequence[Result], min_count: int) -> list[str]:
    """Return what does not hold of a run."""
    rare = [name for name, n in count_features(plan.space, results).items() if n < min_count]
    verdicts = [v for r in results for v in r.verdicts.values()]
    failed, refused = (sum(bool(x) for x in found) for found in (
        [v.failed for v in verdicts], [v.outcome == "refused" for v in verdicts]))  # fmt: skip
    found = {
        f"{failed} failures": failed,
        f"{refused} refusals": refused > MOST_REFUSED * len(verdicts),
        f"drawn less than {min_count} times: {', '.join(rare)}": rare,
        "no case was run": not results,
    }
    return [claim for claim, holds in found.items() if holds]


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases and print what was found; return 1 where anything failed."""
    options = parse(argv)
    if options.state:
        return state.main(options, CompiledRun if options.compiled else Run)
    plan = plan_of(options)
    if options.device == "interpreter" and (options.replay or options.case is not None):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if options.replay:
        return replay(plan, case_from(options.replay))
    if options.case is not None:
        return replay(plan, draw_case(plan.space, plan.seed, options.case))
    started = time.monotonic()

    def tell(result: Result) -> None:
        for line in notes(plan, result):
            print(line, flush=True)

    results = work(plan, tell)
    seconds = time.monotonic() - started
    where = environment(torch.device(plan.space.device))
    print(text(plan, results, seconds, where))
    if options.json:
        write_json(options.json, plan, results, seconds, where)
    broken = claims(plan, results, options.min_count)
    print("\n" + ("\n".join(f"FAILED {claim}" for claim in broken) or "all hold"))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
