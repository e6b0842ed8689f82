"""What a run of the fuzzer found, as tables and as JSON."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuzz.cases import Space
from fuzz.crew import Plan, Result
from fuzz.draw import features_in, features_of


def count_features(space: Space, results: Sequence[Result]) -> dict[str, int]:
    """Return how many cases have each feature that there is, the rarest first."""
    counts = collections.Counter(dict.fromkeys(features_in(space), 0))
    for result in results:
        counts.update(features_of(space, result.case))
    return dict(sorted(counts.items(), key=lambda item: item[1]))


@dataclass(frozen=True)
class EngineCount:
    """What became of the cases of one engine."""

    engine: str
    cases: int
    right: int
    failed: int
    refused: dict[str, int]  # by kind of error
    worst: float  # error as a part of what is allowed, of those that are right
    worst_at: str


def count_engine(engine: str, results: Sequence[Result]) -> EngineCount:
    verdicts = [(r.verdicts[engine], r.index) for r in results if engine in r.verdicts]
    worst, index = max(verdicts, key=lambda pair: pair[0].ratio)
    return EngineCount(
        engine, len(verdicts), sum(v.outcome == "right" for v, _ in verdicts), sum(v.failed for v, _ in verdicts),
        dict(collections.Counter(v.about for v, _ in verdicts if v.outcome == "refused")),
        worst.ratio, f"{worst.about} of case {index}",
    )  # fmt: skip


def command(plan: Plan, engine: str, case: str) -> str:
    """Return the command that runs one case in one engine."""
    engines = f" --engine {engine}" if engine in plan.space.engines else ""
    return f'python -m tests.fuzz --device {plan.name}{engines} --replay "{case}"'


def notes(plan: Plan, result: Result) -> list[str]:
    """Return the lines that tell of each failure or refusal of a case, and how to see the failure again."""
    lines = []
    for engine, verdict in result.verdicts.items():
        if verdict.outcome == "refused":
            lines.append(f"refused case {result.index} of seed {plan.seed}, engine {engine}: {verdict.text}")
        if not verdict.failed:
            continue
        shrunk = result.shrunk.get(engine, repr(result.case))
        lines += [
            f"FAILED case {result.index} of seed {plan.seed}, engine {engine}: {verdict.outcome}: {verdict.text}",
            f"  drawn:     {result.case}",
            f"  reproduce: {command(plan, engine, shrunk)}",
        ]
    return lines


def text(plan: Plan, results: Sequence[Result], seconds: float, where: object) -> str:
    """Return the tables."""
    features = count_features(plan.space, results)
    engines = [count_engine(e, results) for e in sorted({name for r in results for name in r.verdicts})]
    kernels = collections.Counter(name for r in results for name in set(r.kernels))
    rows = [f"{n:5}  {name}" for name, n in features.items()]
    third = -(-len(rows) // 3)
    columns = [rows[i : i + third] + [""] * (third - len(rows[i : i + third])) for i in (0, third, 2 * third)]
    lines = [f"{where}", f"seed {plan.seed}: {len(results)} cases in {seconds:.0f} s", "", "cases with each feature:"]
    lines += ["".join(f"{cell:<36}" for cell in line).rstrip() for line in zip(*columns, strict=True)]
    lines += ["", "cases with each kernel by default:"] * bool(kernels)
    lines += [f"{n:5}  {name}" for name, n in kernels.most_common()]
    lines += ["", f"{'engine':<16}{'cases':>7}{'right':>7}{'failed':>8}  {'worst/allowed':<44}refused"]
    for e in engines:
        refused = ", ".join(f"{n} {kind}" for kind, n in e.refused.items()) or "none"
        lines.append(
            f"{e.engine:<16}{e.cases:>7}{e.right:>7}{e.failed:>8}  {f'{e.worst:.2f} ({e.worst_at})':<44}{refused}"
        )
    return "\n".join(lines)


def write_json(path: str, plan: Plan, results: Sequence[Result], seconds: float, where: Any) -> None:
    """Write what `text` shows."""
    record = {
        "environment": asdict(where), "device": plan.name, "seed": plan.seed, "cases": len(results),
        "seconds": round(seconds, 1), "features": count_features(plan.space, results),
        "engines": [asdict(count_engine(e, results)) for e in sorted({name for r in results for name in r.verdicts})],
        "kernels": dict(collections.Counter(name for r in results for name in set(r.kernels))),
        "notes": [line for r in results for line in notes(plan, r)],
    }  # fmt: skip
    Path(path).write_text(json.dumps(record, indent=1))
