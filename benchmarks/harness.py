"""Interleaved timing: everything is warmed up first, then measured in rounds of random order; medians with ranges.

The clock of a GPU drops under load, so two programs are only comparable inside one process and one round.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.tuning.search import sample

Run = Callable[[], object]
Clock = Callable[[Run, int, torch.device], float]  # (what to run, number of runs, device) -> milliseconds per run

SLOW_MS = 500.0  # runs of at least this length need no further warmup


@dataclass(frozen=True)
class Environment:
    """Where and with which versions a table was measured."""

    device: str
    torch: str
    triton: str
    flexattn: str
    commit: str
    date: str
    label: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.device} | torch {self.torch} | triton {self.triton} | "
            f"flexattn {self.flexattn} at {self.commit} | {self.date}"
        )
        return f"{text} | {self.label}" if self.label else text


@dataclass(frozen=True)
class Config:
    """What one figure was measured for."""

    work: str
    peer: str
    direction: str


@dataclass(frozen=True)
class Result:
    """The samples of one Config, one per round, or a note why there are none (`n/a: ...`, `error: ...`)."""

    config: Config
    milliseconds: tuple[float, ...] = ()
    flops: float = 0.0  # of one run; 0 if floating-point operations do not apply
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether something failed, as opposed to a peer that does not support this workload."""
        return self.note.startswith("error")

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds) if self.milliseconds else math.nan

    @property
    def tflops(self) -> float:
        return self.flops / self.median / 1e9

    def record(self) -> dict[str, Any]:
        """Return the JSON record of this result."""
        record: dict[str, Any] = {**asdict(self.config), "note": self.note, "milliseconds": list(self.milliseconds)}
        if self.milliseconds:
            record |= {"median": self.median, "min": min(self.milliseconds), "max": max(self.milliseconds)}
            record |= {"flops": self.flops, "tflops": self.tflops} if self.flops else {}
        return record


def environment(device: torch.device, label: str = "") -> Environment:
    """Describe this process: device, versions, commit and date."""
    return Environment(
        device=device_name(device),
        torch=torch.__version__,
        triton=version_of("triton"),
        flexattn=version_of("flexattn").replace("none", "clone"),
        commit=git_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        label=label,
    )


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def version_of(package: str) -> str:
    """Return the version of an installed package, or `none`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def git_commit() -> str:
    """Return the commit of this clone, with `-dirty` if tracked files differ from it; `unknown` outside of a clone."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def synchronize(device: torch.device) -> None:
    """Wait for the device. Raises if an earlier kernel failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_sample(run: Run, launches: int, device: torch.device) -> float:
    """Return milliseconds of host time per run, without waiting for the device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(launches):
        run()
    elapsed = time.perf_counter() - start
    synchronize(device)
    return elapsed * 1e3 / launches


def launches_needed(run: Run, device: torch.device, sample_ms: float, clock: Clock, most: int) -> int:
    """Warm up `run` and return how many runs make a sample of at least `sample_ms`."""
    run()
    synchronize(device)
    once = clock(run, 1, device)
    if once > SLOW_MS:
        return 1
    steady = clock(run, max(1, min(20, math.ceil(sample_ms / max(once, 1e-3)))), device)
    return max(1, min(most, math.ceil(sample_ms / max(steady, 1e-3))))


def measure(
    runs: Mapping[Config, Run],
    device: torch.device,
    rounds: int,
    flops: Mapping[Config, float] | None = None,
    sample_ms: float = 5.0,
    seed: int = 0,
    clock: Clock = sample,
    most_launches: int = 2_000,
) -> dict[Config, Result]:
    """Time all `runs`, interleaved. A run that raises becomes a result with a note; the others continue."""
    launches: dict[Config, int] = {}
    samples: dict[Config, list[float]] = {config: [] for config in runs}
    notes: dict[Config, str] = {}

    def guarded(config: Config, step: Run) -> None:
        try:
            step()
        except Exception as error:  # a failing variant must not lose the others
            notes[config] = f"error: {one_line(error)}"

    def warm(config: Config) -> None:
        launches[config] = launches_needed(runs[config], device, sample_ms, clock, most_launches)

    for config in runs:
        guarded(config, lambda c=config: warm(c))
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        alive = [config for config in runs if config not in notes]
        shuffle(alive)
        for config in alive:
            guarded(config, lambda c=config: samples[c].append(clock(runs[c], launches[c], device)))
    work = flops or {}
    return {c: Result(c, tuple(samples[c]), work.get(c, 0.0), notes.get(c, "")) for c in runs}


def both_directions(attend: Callable[..., Tensor], inputs: Sequence[Tensor], d_out: Tensor) -> dict[str, Run]:
    """Return the forward, and the forward and backward, of attention as functions to time."""

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> object:
        return torch.autograd.grad(attend(*inputs), inputs, d_out)

    return {"forward": forward, "forward and backward": both}


def in_graph(run: Run) -> Run:
    """Return the replay of a CUDA graph of a run: its time on the device. It is captured when it is first called."""

    @functools.cache
    def graph() -> torch.cuda.CUDAGraph:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        return captured

    return lambda: graph().replay()


def one_line(error: BaseException, width: int = 160) -> str:
    """Return the type of an error and the first non-empty line of its text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:width].rstrip(": ")


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean, nan for an empty sequence."""
    return statistics.geometric_mean(values) if values else math.nan


def absent(peers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a line about requested peers that no row is of, "" if all have one. Rows are [work, peer, ...]."""
    missing = sorted(set(peers) - {row[1] for row in rows})
    return f"\nNot installed, or without any of these works: {', '.join(missing)}\n" if missing else ""


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as text in aligned columns, numbers right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(headers)), "  ".join("-" * w for w in widths), *(line(row) for row in cells)])


def _is_number(cell: str) -> bool:
    return not cell or cell.lstrip("-")[:1].isdigit()


def write_json(path: str | None, record: Mapping[str, Any]) -> None:
    """Write `record` to `path`, if given, creating its folders. Non-finite numbers become null."""
    if path is None:
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
