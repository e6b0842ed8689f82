"""Time variants of flexattn next to each other: checkouts, each in a process of its own, which take turns on the GPU.

`python -m benchmarks.variants before=../before after=. --works natten_2d_tiles,causal --rounds 9`

All processes start and compile at the same time. Then each workload is timed in rounds: every variant once, in an order
that rotates. Workloads come from this checkout, flexattn and its templates from those that are named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

import flexattn
from benchmarks.harness import Config, Result, environment, one_line, table, write_json
from benchmarks.peers import PEERS
from benchmarks.works import CPU_WORKS, WORKS, make_inputs
from flexattn.tuning.search import sample

HERE = Path(__file__).parent.parent
DTYPES = ("bfloat16", "float16", "float32")
# Runs before any import of a process: `benchmarks` is found here and flexattn in the checkout of the variant.
START = """
import importlib.util, sys
from pathlib import Path
here, checkout = Path(sys.argv[1]), sys.argv[2]
spec = importlib.util.spec_from_file_location("benchmarks", here / "benchmarks/__init__.py")
sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
sys.path.insert(0, checkout)
from benchmarks.variants import serve
serve(checkout, sys.argv[3])
"""


@dataclass(frozen=True)
class Settings:
    """What all variants run."""

    works: tuple[str, ...]
    directions: tuple[str, ...]
    device: str
    dtype: str
    launches: int  # in one sample
    length: int  # 0: that of the workload
    head_dim: int  # likewise
    deviation: float  # of the scores, relative to those of normal inputs


class Variant:
    """The process of a variant."""

    def __init__(self, name: str, checkout: Path, settings: Settings) -> None:
        self.name = name
        command = [sys.executable, "-c", START, str(HERE), str(checkout), json.dumps(asdict(settings))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> dict[str, str]:
        """Wait until everything is compiled. Return a note for each workload that failed."""
        return self._answer()

    def milliseconds(self, work: str, direction: str) -> float:
        """Take one sample."""
        asked = self._pipe(self.process.stdin)
        asked.write(json.dumps([work, direction]) + "\n")
        asked.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._pipe(self.process.stdin).close()
        self.process.wait()

    def _answer(self) -> Any:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended with {self.process.wait()}")
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def serve(checkout: str, text: str) -> None:
    """Prepare the workloads, then take the samples that stdin asks for, and print their milliseconds."""
    if Path(flexattn.__file__).resolve().parent.parent != Path(checkout):
        raise SystemExit(f"flexattn of {checkout} is not imported, but {flexattn.__file__}")
    answers, sys.stdout = sys.stdout, sys.stderr
    given = json.loads(text)
    settings = Settings(**{**given, "works": tuple(given["works"]), "directions": tuple(given["directions"])})
    runs, notes = _runs(settings)
    print(json.dumps(notes), file=answers, flush=True)
    for line in sys.stdin:
        run = runs[tuple(json.loads(line))]
        print(json.dumps(sample(run, settings.launches, torch.device(settings.device))), file=answers, flush=True)


def _runs(settings: Settings) -> tuple[dict[tuple[str, ...], Callable[[], object]], dict[str, str]]:
    """Return what to time by workload and direction, called twice, and notes of what failed."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    runs: dict[tuple[str, ...], Callable[[], object]] = {}
    notes: dict[str, str] = {}
    for name in settings.works:
        try:
            work = (WORKS | CPU_WORKS)[name]
            dims = {"head_dim": settings.head_dim, "value_dim": 0} if settings.head_dim else {}
            work = replace(work, length=settings.length or work.length, **dims)
            inputs = make_inputs(work, device, dtype)
            inputs.query.data *= settings.deviation
            mods = work.mods(work, device)
            attend = PEERS["flexattn"](work, mods, device)
            leaves = (*inputs.qkv, *mods.learnable)
            if "forward" in settings.directions:
                runs[name, "forward"] = lambda a=attend, x=inputs: a(*x.qkv)
            if "backward" in settings.directions:
                out = attend(*inputs.qkv)
                runs[name, "backward"] = lambda out=out, leaves=leaves, x=inputs: torch.autograd.grad(
                    out, leaves, x.d_out, retain_graph=True
                )
            for direction in settings.directions:
                for _ in range(2):
                    runs[name, direction]()
        except Exception as error:  # a failing workload must not lose the others
            notes[name] = one_line(error)
    return runs, notes


def measure(variants: Sequence[Variant], settings: Settings, rounds: int) -> list[Result]:
    """Time all workloads. The order of the variants rotates, because the first one of a round meets a cooler GPU."""
    failed: dict[str, str] = {}
    for variant in variants:
        failed |= {work: f"error: {variant.name}: {note}" for work, note in variant.wait().items()}
    results = []
    for work in settings.works:
        for direction in settings.directions:
            configs = {variant: Config(work, variant.name, direction) for variant in variants}
            if work in failed:
                results += [Result(config, note=failed[work]) for config in configs.values()]
                continue
            samples: dict[Variant, list[float]] = {variant: [] for variant in variants}
            for i in range(rounds):
                for variant in (*variants[i % len(variants) :], *variants[: i % len(variants)]):
                    samples[variant].append(variant.milliseconds(work, direction))
            results += [Result(configs[variant], tuple(samples[variant])) for variant in variants]
    return results


def results_table(results: Sequence[Result]) -> str:
    """Return one line per figure: microseconds, range, and time relative to the first variant."""
    first: dict[tuple[str, str], Result] = {}
    rows = []
    for result in results:
        at = result.config
        base = first.setdefault((at.work, at.direction), result)
        if not result.milliseconds:
            rows.append([at.work, at.direction, at.peer, result.note, "", ""])
            continue
        # The median of ratios within a round, which the clock of the GPU affects alike.
        ratio = statistics.median(a / b for a, b in zip(result.milliseconds, base.milliseconds, strict=True))
        low, high = min(result.milliseconds), max(result.milliseconds)
        rows.append(
            [at.work, at.direction, at.peer, f"{result.median * 1e3:.1f}", f"{low * 1e3:.1f} to {high * 1e3:.1f}",
             f"{ratio:.3f}"]
        )  # fmt: skip
    return table(["work", "direction", "variant", "us", "range", "relative"], rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("variants", nargs="+", metavar="NAME=CHECKOUT", help="the first is what others are compared to")
    parser.add_argument("--works", required=True, help="comma-separated, of benchmarks.works")
    parser.add_argument("--directions", default="forward")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=12, help="calls in one sample")
    parser.add_argument("--length", type=int, default=0, help="tokens instead of those of the workloads")
    parser.add_argument("--head-dim", type=int, default=0, help="instead of those of the workloads")
    parser.add_argument("--deviation", type=float, default=1.0, help="multiplies the scores")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(argv)
    checkouts: dict[str, Path] = {}
    for text in options.variants:
        name, is_pair, path = text.partition("=")
        checkouts[name] = Path(path).resolve()
        if not is_pair or not (checkouts[name] / "flexattn/__init__.py").is_file():
            raise SystemExit(f"{text}: expected NAME=CHECKOUT, a folder that contains flexattn/ and templates/")
    settings = Settings(
        works=tuple(options.works.split(",")),
        directions=tuple(options.directions.split(",")),
        device=options.device,
        dtype=options.dtype,
        launches=options.launches,
        length=options.length,
        head_dim=options.head_dim,
        deviation=options.deviation,
    )
    for flag, names, known in (
        ("--works", settings.works, [*WORKS, *CPU_WORKS]),
        ("--directions", settings.directions, ["forward", "backward"]),
    ):
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"{flag}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    with ExitStack() as stack:
        variants = [Variant(name, checkout, settings) for name, checkout in checkouts.items()]
        for variant in variants:
            stack.callback(variant.close)
        results = measure(variants, settings, options.rounds)
    where = environment(torch.device(options.device))
    print(f"{where}\n\n{results_table(results)}")
    write_json(options.json, {"environment": asdict(where), "results": [result.record() for result in results]})
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
