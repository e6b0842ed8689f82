"""Forward and backward of flexattn and its peers: `python -m benchmarks.attention --peers torch_flex,sdpa_cudnn`.

Every workload is checked against a peer (or the dense reference) before it is timed, and its peak memory is measured.
A workload that fails becomes a row with the reason. The others are still measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from benchmarks.harness import (
    Config,
    Result,
    Run,
    environment,
    geometric_mean,
    measure,
    one_line,
    synchronize,
    table,
    write_json,
)
from benchmarks.peers import PEERS, Attend, NotApplicable, prepare_torch
from benchmarks.works import (
    CPU_WORKS,
    WORKS,
    Inputs,
    Mods,
    Work,
    count_pairs,
    forward_flops,
    make_inputs,
)
from flexattn import reference

DIRECTIONS = ("forward", "backward")
BACKWARD_FLOPS = 2.5  # relative to the forward: five products instead of two
WITHOUT_MOD = "without_score_mod"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 3e-3}  # relative rmse; float32 may mean tf32
MEMORY_ALLOWANCE = 16 * 2**20  # bytes, plus one float32 per row, and on Hopper one per element of query with padding
PADDED_TO = 128
REFERENCE_PAIRS = {"cuda": 1 << 30, "cpu": 1 << 26}  # for one head, in float32 and several copies
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    subject: str
    peers: tuple[str, ...]  # without the subject
    works: tuple[Work, ...]
    directions: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    sample_ms: float
    check: str
    seed: int

    @property
    def everyone(self) -> tuple[str, ...]:
        return (self.subject, *self.peers)


@dataclass(frozen=True)
class Check:
    """Errors of the subject relative to another implementation at the measured size, and its extra memory."""

    work: str
    against: str
    errors: Mapping[str, float] = field(default_factory=dict)  # relative rmse of out, dq, dk, dv and captured gradients
    extra_bytes: int | None = None
    allowed_bytes: int | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.note)


@dataclass(frozen=True)
class Case:
    """A workload with its tensors and the peers that support it, called once and ready to be timed."""

    work: Work
    inputs: Inputs
    mods: Mods
    runs: Mapping[Config, Run]
    notes: Mapping[Config, str]
    check: Check | None
    flops: float  # of the forward pass


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--peers", default="torch_flex", help=f"comma-separated, of {', '.join(PEERS)}; or none")
    parser.add_argument("--subject", default="flexattn", choices=PEERS, help="who is compared with the peers")
    parser.add_argument(
        "--works",
        default="all",
        help=f"all; native, which libraries without mods compute; or some of {', '.join(WORKS | CPU_WORKS)}",
    )
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on a CPU float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sample-ms", type=float, default=5.0, help="shortest time of one sample")
    parser.add_argument("--check", choices=("peer", "reference", "none"), default="peer")
    parser.add_argument("--precompile", type=int, default=0, metavar="N", help="fill the caches from N processes first")
    parser.add_argument("--precompile-seconds", type=float, default=240.0, help="limit of one such process")
    parser.add_argument(
        "--warm-only", action="store_true", help="call everything once and stop (what --precompile runs)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and two rounds: does it run at all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="text to keep with the results")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> Settings:
    """Convert the options to Settings. Unknown names end the program."""
    device = torch.device(options.device)
    known = {**WORKS, **CPU_WORKS}
    every = CPU_WORKS if device.type == "cpu" and not options.quick else WORKS
    sets = {"all": list(every), "native": [name for name, work in every.items() if work.native(work) is not None]}
    names = sets.get(options.works) or _names(options.works, known, "--works")
    works = [known[name] for name in names]
    if options.quick:
        works = [work.shrunk(1024 if device.type == "cuda" else 96) for work in works]
    peers = [] if options.peers == "none" else _names(options.peers, PEERS, "--peers")
    return Settings(
        subject=options.subject,
        peers=tuple(peer for peer in peers if peer != options.subject),
        works=tuple(works),
        directions=tuple(_names(options.directions, DIRECTIONS, "--directions")),
        device=device,
        dtype=DTYPES[options.dtype or ("float32" if device.type == "cpu" else "bfloat16")],
        rounds=2 if options.quick else options.rounds,
        sample_ms=0.1 if options.quick else options.sample_ms,
        check=options.check,
        seed=options.seed,
    )


def _names(text: str, known: Sequence[str] | Mapping[str, object], flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{flag}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def prepare(work: Work, settings: Settings) -> Case:
    """Create inputs, call every peer once in each direction (which compiles), compare results, measure memory."""
    inputs = make_inputs(work, settings.device, settings.dtype, settings.seed)
    mods = work.mods(work, settings.device)
    runs: dict[Config, Run] = {}
    notes: dict[Config, str] = {}
    outcomes: dict[str, dict[str, Tensor]] = {}
    for peer, attend in _attends(work, mods, settings, notes):
        leaves = (*inputs.qkv, *(() if peer == WITHOUT_MOD else mods.learnable))
        try:
            outcomes[peer] = first_call(work.name, peer, attend, inputs, leaves, settings, runs, notes)
        except Exception as error:
            own = peer in (settings.subject, WITHOUT_MOD)
            note = f"error: {one_line(error)}" if own else f"n/a: {one_line(error)}"
            notes |= {Config(work.name, peer, d): note for d in settings.directions}
    synchronize(settings.device)
    check = None
    if settings.check != "none" and settings.subject in outcomes:
        check = compare(work, inputs, mods, outcomes, settings)
        check = with_memory(check, work, inputs, mods, settings)
    pairs = count_pairs(mods.mask_mod, work.length, settings.device)
    return Case(work, inputs, mods, runs, notes, check, forward_flops(work, pairs))


def _attends(work: Work, mods: Mods, settings: Settings, notes: dict[Config, str]) -> Iterator[tuple[str, Attend]]:
    """Yield each peer with its function. If the mod has a gradient, also yield the subject without the mod."""
    wanted = [(peer, PEERS[peer], mods) for peer in settings.everyone]
    if mods.learnable:
        wanted.append((WITHOUT_MOD, PEERS[settings.subject], Mods(mask_mod=mods.mask_mod)))
    for peer, make, its_mods in wanted:
        try:
            attend = make(work, its_mods, settings.device)
        except NotApplicable as reason:
            notes |= {Config(work.name, peer, d): f"n/a: {reason}" for d in settings.directions}
        except Exception as error:
            kind = "n/a" if peer in settings.peers else "error"
            notes |= {Config(work.name, peer, d): f"{kind}: {one_line(error)}" for d in settings.directions}
        else:
            yield peer, attend


def first_call(
    work: str,
    peer: str,
    attend: Attend,
    inputs: Inputs,
    leaves: tuple[Tensor, ...],
    settings: Settings,
    runs: dict[Config, Run],
    notes: dict[Config, str],
) -> dict[str, Tensor]:
    """Call a peer in each direction, add the functions to time to `runs`, and return its results by name."""
    out = attend(*inputs.qkv)
    outcome = {"out": out.detach()}
    if "forward" in settings.directions:
        runs[Config(work, peer, "forward")] = lambda: attend(*inputs.qkv)
    backward = Config(work, peer, "backward")
    if "backward" not in settings.directions:
        return outcome
    if not out.requires_grad:
        notes[backward] = "n/a: forward only on this device"
        return outcome
    try:
        grads = torch.autograd.grad(out, leaves, inputs.d_out, retain_graph=True)
    except Exception as error:
        notes[backward] = f"{'n/a' if peer in settings.peers else 'error'}: {one_line(error)}"
        return outcome
    runs[backward] = lambda: torch.autograd.grad(out, leaves, inputs.d_out, retain_graph=True)
    return outcome | dict(zip(gradient_names(len(leaves)), grads, strict=True))


def gradient_names(leaves: int) -> tuple[str, ...]:
    """Return names for the gradients of query, key, value and captured tensors."""
    return ("dq", "dk", "dv", *(f"d_capture{i}" for i in range(leaves - 3)))


def compare(
    work: Work, inputs: Inputs, mods: Mods, outcomes: dict[str, dict[str, Tensor]], settings: Settings
) -> Check:
    """Compare the subject with the first peer that has all of its results, otherwise with the dense reference.

    If the reference would be too large, compare only results that a peer also has.
    """
    ours = outcomes[settings.subject]
    able = [peer for peer in settings.peers if peer in outcomes]
    complete = [peer for peer in able if outcomes[peer].keys() >= ours.keys()]
    dense = work.length**2 <= REFERENCE_PAIRS[settings.device.type]
    if settings.check == "peer" and (complete or (not dense and able)):
        against = (complete or able)[0]
        theirs = outcomes[against]
        ours = {name: ours[name] for name in ours if name in theirs}
    elif not dense:
        return Check(work.name, "nothing: too large for the reference")
    else:
        against, theirs = "reference, head 0", reference_of(work, inputs, mods, backward="dq" in ours)
        ours = {name: first_heads(name, result, work) for name, result in ours.items()}
    errors = {name: relative_rmse(ours[name], theirs[name]) for name in ours}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    right = errors[worst] <= TOLERANCE[settings.dtype]  # False for nan
    note = "" if right else f"error: {worst} is {errors[worst]:.1e} from {against}"
    return Check(work.name, against, errors, note=note)


def reference_of(work: Work, inputs: Inputs, mods: Mods, backward: bool) -> dict[str, Tensor]:
    """Return the float32 reference results for key head 0 and its queries, sequence by sequence."""
    group = work.heads // work.hkv
    parts: list[dict[str, Tensor]] = []
    for b in range(work.batch):
        leaves = [x.detach()[b : b + 1, :heads].float().requires_grad_() for x, heads in
                  zip(inputs.qkv, (group, 1, 1), strict=True)]  # fmt: skip
        out, _ = reference.attention(*leaves, mods.score_mod, mods.mask_mod, dtype=torch.float32)
        part = {"out": out.detach()}
        if backward:
            d_out = inputs.d_out[b : b + 1, :group].float()
            grads = torch.autograd.grad(out, (*leaves, *mods.learnable), d_out)
            part |= dict(zip(gradient_names(len(grads)), grads, strict=True))
        parts.append(part)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if "capture" not in name}
    captured = {name: sum(part[name] for part in parts)[:group] for name in parts[0] if "capture" in name}
    return {**joined, **captured}


def first_heads(name: str, result: Tensor, work: Work) -> Tensor:
    """Return the part of a result that belongs to key head 0 and its queries."""
    group = work.heads // work.hkv
    if "capture" in name:
        return result[:group]
    return result[:, : 1 if name in ("dk", "dv") else group]


def relative_rmse(ours: Tensor, theirs: Tensor) -> float:
    """Return |ours - theirs| / |theirs|."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def with_memory(check: Check, work: Work, inputs: Inputs, mods: Mods, settings: Settings) -> Check:
    """Add the peak memory of forward and backward beyond inputs, out, lse, d_out and gradients."""
    if settings.device.type != "cuda" or "dq" not in check.errors:
        return check
    attend = PEERS[settings.subject](work, mods, settings.device)
    leaves = (*inputs.qkv, *mods.learnable)
    torch.autograd.grad(attend(*inputs.qkv), leaves, inputs.d_out)
    gc.collect()
    synchronize(settings.device)
    torch.cuda.reset_peak_memory_stats(settings.device)
    before = torch.cuda.memory_allocated(settings.device)
    out = attend(*inputs.qkv)
    grads = torch.autograd.grad(out, leaves, inputs.d_out)
    synchronize(settings.device)
    peak = torch.cuda.max_memory_allocated(settings.device) - before
    rows = 4 * work.batch * work.heads * work.length  # bytes of one float32 per row
    extra = peak - rows - sum(x.nbytes for x in (out, *grads))
    sums_dq = torch.cuda.get_device_capability(settings.device)[0] == 9
    padded = -(-work.length // PADDED_TO) * PADDED_TO + PADDED_TO  # rows of each sum of dq
    of_dq = 4 * work.batch * work.heads * padded * work.head_dim if sums_dq else 0
    allowed = MEMORY_ALLOWANCE + rows + of_dq
    note = check.note or ("" if extra <= allowed else f"error: {extra / 2**20:.0f} MiB of extra memory")
    return replace(check, extra_bytes=extra, allowed_bytes=allowed, note=note)


def precompile(settings: Settings, options: argparse.Namespace) -> dict[str, str]:
    """Run each workload once in its own process, to fill the disk caches. Return notes on failed workloads."""
    waiting, notes = list(settings.works), {}
    running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], float]] = {}
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < options.precompile:
            work = waiting.pop(0)
            log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when its process has ended)
            running[work.name] = (_warm_process(work.name, options, environ, log), log, time.monotonic())
        time.sleep(0.1)
        for name, (process, log, started) in list(running.items()):
            late = time.monotonic() - started > options.precompile_seconds
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if late:
                notes[name] = f"error: still warming up after {options.precompile_seconds:.0f} s"
            elif process.returncode:
                notes[name] = f"error: exit {process.returncode} while warming up: {last_line(log)}"
            progress(f"warmed {name}: {notes.get(name, 'ok')}, {time.monotonic() - started:.0f} s")
            log.close()
            del running[name]
    return notes


def last_line(log: IO[bytes], width: int = 160) -> str:
    """Return the last line of a process's output, where Python prints the final error."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:width] if lines else ""


def _warm_process(
    work: str, options: argparse.Namespace, environ: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.attention", "--warm-only", "--check", "none", "--works", work]
    for flag in ("subject", "peers", "directions", "device", "dtype"):
        value = getattr(options, flag)
        command += [f"--{flag}", value] if value else []
    command += ["--quick"] if options.quick else []
    return subprocess.Popen(
        command,
        env=environ,
        cwd=Path(__file__).parent.parent,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a late process is ended together with its children
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def lost(settings: Settings) -> bool:
    """Return whether the device rejects further work, as after an illegal address."""
    try:
        synchronize(settings.device)
    except Exception:
        return True
    return False


def prepare_all(settings: Settings, notes: Mapping[str, str]) -> tuple[list[Case], list[Result]]:
    """Prepare the workloads in order. Return those that can be timed, and results with the reason for others."""
    cases: list[Case] = []
    broken: list[Result] = []
    gone = False
    for work in settings.works:
        started = time.monotonic()
        note = "error: the device was lost before" if gone else notes.get(work.name, "")
        if not note:
            try:
                cases.append(prepare(work, settings))
            except Exception as error:
                note, gone = f"error: {one_line(error)}", lost(settings)
        if note:
            broken += [Result(Config(work.name, settings.subject, d), note=note) for d in settings.directions]
        progress(f"{work.name}: {note or 'ready'}, {time.monotonic() - started:.1f} s")
    return cases, broken


def time_all(cases: Sequence[Case], settings: Settings) -> list[Result]:
    """Time everything that is ready, interleaved. Return the results, and the notes for the rest."""
    runs = {config: run for case in cases for config, run in case.runs.items()}
    flops = {
        config: case.flops * (BACKWARD_FLOPS if config.direction == "backward" else 1.0)
        for case in cases
        for config in case.runs
    }
    noted = [Result(config, note=note) for case in cases for config, note in case.notes.items()]
    timed = measure(runs, settings.device, settings.rounds, flops, settings.sample_ms, settings.seed)
    return [*timed.values(), *noted]


def order(results: Sequence[Result], settings: Settings) -> list[Result]:
    """Sort by workload and direction, the subject before its peers."""
    works = [work.name for work in settings.works]
    peers = [settings.subject, WITHOUT_MOD, *settings.peers]
    return sorted(
        results,
        key=lambda r: (works.index(r.config.work), DIRECTIONS.index(r.config.direction), peers.index(r.config.peer)),
    )


def ratios(results: Sequence[Result], subject: str, peer: str) -> dict[Config, float]:
    """Return the speedup of the subject over `peer`, for every workload and direction that both have."""
    ours = {(r.config.work, r.config.direction): r.median for r in results if r.config.peer == subject}
    found = {}
    for r in results:
        mine = ours.get((r.config.work, r.config.direction), math.nan)
        if r.config.peer == peer and r.milliseconds and not math.isnan(mine):
            found[r.config] = r.median / mine
    return found


def results_table(results: Sequence[Result], settings: Settings) -> str:
    """Return one line per workload, direction and peer."""
    shapes = {work.name: work.shape for work in settings.works}
    others = (WITHOUT_MOD, *settings.peers)
    speed = {c: x for peer in others for c, x in ratios(results, settings.subject, peer).items()}
    rows = []
    for r in results:
        c = r.config
        if r.milliseconds:
            low, high = min(r.milliseconds), max(r.milliseconds)
            ratio = f"{speed[c]:.2f}x" if c in speed else ""
            numbers = (f"{r.median:.3f}", f"{low:.3f}..{high:.3f}", f"{r.tflops:.1f}", ratio)
            rows.append([c.work, shapes[c.work], c.direction, c.peer, *numbers])
    return table(
        ["work", "B x H x S, D", "direction", "peer", "ms", "min..max", "TFLOP/s", f"{settings.subject} is"], rows
    )


def notes_list(results: Sequence[Result]) -> list[str]:
    """Return what was not measured and why, with workloads grouped by reason."""
    works: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        if r.note:
            works.setdefault((r.config.peer, r.config.direction, r.note), []).append(r.config.work)
    directions: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (peer, direction, note), names in works.items():
        directions.setdefault((peer, note, tuple(names)), []).append(direction)
    return [
        f"{peer} {' and '.join(which)}: {note} ({', '.join(names)})"
        for (peer, note, names), which in directions.items()
    ]


def checks_table(checks: Sequence[Check]) -> str:
    """Return one line per workload: errors relative to the other implementation, and memory."""
    rows = []
    for check in checks:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in check.errors.items())
        memory = ""
        if check.extra_bytes is not None and check.allowed_bytes is not None:
            memory = f"{check.extra_bytes / 2**20:.1f} of {check.allowed_bytes / 2**20:.1f}"
        rows.append([check.work, check.against, errors, memory, check.note])
    return table(["work", "against", "relative rmse", "extra MiB of allowed", "note"], rows)


def summary(results: Sequence[Result], settings: Settings) -> list[str]:
    """Return the geometric mean speedups over each peer, and where the subject is slower."""
    lines = []
    for peer in settings.peers:
        found = ratios(results, settings.subject, peer)
        by = {d: [x for c, x in found.items() if c.direction == d] for d in settings.directions}
        if not found:
            lines.append(f"over {peer}: nothing to compare")
            continue
        means = ", ".join(f"{d} {geometric_mean(x):.3f}x of {len(x)} works" for d, x in by.items() if x)
        lines.append(f"geometric mean over {peer}: {geometric_mean(list(found.values())):.3f}x ({means})")
        slow = [f"{c.work} {c.direction} {x:.2f}x" for c, x in found.items() if x < 1.0]
        lines.append(f"  slower than {peer}: {', '.join(slow) or 'none'}")
    lines += best_peers(results, settings)
    for config, ratio in ratios(results, settings.subject, WITHOUT_MOD).items():
        lines.append(f"{config.work} {config.direction}: {1 / ratio:.2f}x of the time without its score_mod")
    return lines


def best_peers(results: Sequence[Result], settings: Settings) -> list[str]:
    """Return the speedups over the fastest peer of each workload that libraries without mods can compute."""
    native = {work.name for work in settings.works if work.native(work) is not None}
    lines = []
    for direction in settings.directions if len(settings.peers) > 1 else ():
        best: dict[str, tuple[float, str]] = {}
        for peer in settings.peers:
            for config, ratio in ratios(results, settings.subject, peer).items():
                if config.direction == direction and config.work in native:
                    best[config.work] = min(best.get(config.work, (math.inf, "")), (ratio, peer))
        if best:
            each = ", ".join(f"{work} {ratio:.3f} ({peer})" for work, (ratio, peer) in best.items())
            mean = geometric_mean([ratio for ratio, _ in best.values()])
            lines.append(f"{direction} over the best peer of {len(best)} works: {mean:.3f}x\n  {each}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON file. Return 1 if anything of the subject failed."""
    options = parse(argv)
    settings = settings_of(options)
    if options.precompile:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # already compiled: no need for a process pool
    prepare_torch()
    notes = precompile(settings, options) if options.precompile else {}
    cases, broken = prepare_all(settings, notes)
    if options.warm_only:
        synchronize(settings.device)
        return 0
    results = order([*time_all(cases, settings), *broken], settings)
    checks = [case.check for case in cases if case.check is not None]
    where = environment(settings.device, options.label)
    print(f"{where}\n{settings.dtype}, {settings.rounds} rounds, medians\n")
    print(results_table(results, settings))
    print("\n".join(["", *notes_list(results)]))
    if checks:
        print(f"\n{checks_table(checks)}")
    print("\n".join(["", *summary(results, settings)]))
    record = {
        "environment": asdict(where),
        "dtype": str(settings.dtype),
        "rounds": settings.rounds,
        "shapes": {work.name: work.shape for work in settings.works},
        "results": [result.record() for result in results],
        "checks": [asdict(check) for check in checks],
        "geometric_mean": {
            peer: geometric_mean(list(ratios(results, settings.subject, peer).values())) for peer in settings.peers
        },
    }
    write_json(options.json, record)
    failed = [str(r.config) for r in results if r.failed] + [f"{c.work}: {c.note}" for c in checks if c.failed]
    if failed:
        print(f"\nFAILED: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
