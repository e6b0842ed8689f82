"""Costs around the kernels: masks, host time of calls and inside compiled functions, guards, first call, recompiles.

`python -m benchmarks.overhead --parts masks,host`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexattn
from benchmarks import host_time
from benchmarks.harness import (
    Config,
    Result,
    Run,
    environment,
    synchronize,
    table,
    write_json,
)
from benchmarks.masks import (
    LARGE,
    TINY,
    MaskSettings,
    documents,
    failure,
    in_child,
    kernels_made,
    mask_builders,
    measure_masks,
)
from benchmarks.peers import PEERS, prepare_torch, torch_flex_module
from benchmarks.stubbed import stubbed
from benchmarks.works import make_inputs
from flexattn.block_mask.captures import survey
from flexattn.trace import memo
from flexattn.trace.trace import trace, variant_of

PARTS = ("masks", "host", "compiled", "stubbed", "guard", "first_call", "recompiles")
WITH_MODS = ("flexattn", "torch_flex", "torch_flex_eager")
KNOWN = (*WITH_MODS, "sdpa")
GPU_LENGTHS = "8192,32768,65536,131072,1048576"  # of masks
CPU_LENGTHS = "2048,8192,65536"


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    peers: tuple[str, ...]  # of `host` and `compiled`; other parts leave out those without mods
    device: torch.device
    dtype: torch.dtype
    rounds: int
    masks: MaskSettings
    length: int  # of the workloads whose host time and first call are measured
    lengths: tuple[int, ...]  # used by the recompile counter


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--peers", default=",".join(KNOWN))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mask-lengths", default="", help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="tiny lengths and two rounds")
    parser.add_argument("--first-call", metavar="PEER", help="make one first call here and print its times (internal)")
    parser.add_argument("--label", default="", help="text to keep with the results")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> Settings:
    """Convert the options to Settings."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    default = "64,128" if options.quick else GPU_LENGTHS if on_gpu else CPU_LENGTHS
    peers = tuple(options.peers.split(","))
    if unknown := set(peers) - set(KNOWN):
        raise SystemExit(f"--peers: unknown {', '.join(sorted(unknown))}; known are {', '.join(KNOWN)}")
    draw = random.Random(0)
    longest = 2048 if on_gpu else 128 if options.quick else 512
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rounds = 2 if options.quick else options.rounds
    masks = MaskSettings(
        peers=_with_mods(peers),
        device=device,
        dtype=dtype,
        rounds=rounds,
        lengths=tuple(int(x) for x in (options.mask_lengths or default).split(",")),
        churn=(5, 128) if options.quick else (200, 65_536),
        packed=LARGE if on_gpu and not options.quick else TINY,
    )
    return Settings(
        peers=peers,
        device=device,
        dtype=dtype,
        rounds=rounds,
        masks=masks,
        length=64 if options.quick else 256,
        lengths=tuple(draw.randint(17, longest) for _ in range(3 if options.quick else 8)),
    )


def _with_mods(peers: Sequence[str]) -> tuple[str, ...]:
    return tuple(peer for peer in peers if peer in WITH_MODS)


def milliseconds(run: Run, device: torch.device) -> float:
    """Return the time of one run, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def host(settings: Settings) -> list[Result]:
    """Time many calls on the host, without waiting for the device."""
    return host_time.calls(settings.peers, settings.length, settings.device, settings.dtype, settings.rounds)


def compiled(settings: Settings) -> list[Result]:
    """Time one more call in a compiled function on the host, and the operators that it contains."""
    given = settings.peers, settings.length, settings.device, settings.dtype, settings.rounds
    return [*host_time.compiled_calls(*given), *host_time.operator_calls(*given)]


def stubs(settings: Settings) -> list[Result]:
    """Time known calls with launches left out, on any machine."""
    return stubbed(settings.rounds, 5 if settings.length < 256 else 100)


def guarded_mods(device: torch.device) -> dict[str, tuple[Callable[..., Any], str]]:
    """Return the mods whose guards are timed, and their kinds."""
    slopes, scales, table = (torch.randn(n, device=device) for n in ((8,), (8,), (8, 8)))
    gain, shift = 0.5, 7

    def closure(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * gain + slopes[h] * scales[h] + table[h, b] + shift

    mods = flexattn.mods
    documents = mods.document(torch.arange(4096, device=device) // 100)
    composed = mods.and_masks(mods.causal, mods.or_masks(mods.sliding_window(64), mods.prefix_lm(3)), documents)
    return {
        "closure of 3 tensors, 2 numbers": (closure, "score"),
        "composed masks of flexattn.mods": (composed, "mask"),
        "causal": (mods.causal, "mask"),
    }


def guards(settings: Settings) -> list[Result]:
    """Time the check that a trace is still valid: the guard, and a search of everything that a mod reaches."""
    calls = 100 if settings.rounds < 10 else 10_000
    results = []
    for name, (mod, kind) in guarded_mods(settings.device).items():
        trace(mod, kind)
        (known, *_) = memo.find(mod, variant_of(kind, torch.float32))
        runs: dict[str, Run] = {
            "guard": lambda guard=known.guard, mod=mod: guard(mod),
            "walk (0.1.0 before guards)": lambda mod=mod: survey(mod),
            "guard and values": lambda mod=mod, kind=kind: trace(mod, kind),
        }
        taken: dict[str, list[float]] = {what: [] for what in runs}
        for _ in range(calls):
            for what, run in runs.items():
                start = time.perf_counter_ns()
                run()
                taken[what].append((time.perf_counter_ns() - start) / 1e6)
        for what, times in taken.items():
            medians = [statistics.median(times[i::10]) for i in range(10)]
            results.append(Result(Config(f"{name}: {what}", "flexattn", "each call"), tuple(medians)))
    return results


def first_call(settings: Settings) -> list[Result]:
    """Time the first call of a fresh process, with an empty cache and with the cache left by the first one."""
    results = []
    for peer in _with_mods(settings.peers):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("empty cache", "warm cache"):
                times = _first_call_elsewhere(peer, settings, Path(folder))
                results += [Result(Config(f"{state}: {step}", peer, "first call"), (ms,)) for step, ms in times.items()]
                if not times:
                    note = f"{'error' if peer == 'flexattn' else 'n/a'}: its process failed"
                    results.append(Result(Config(state, peer, "first call"), note=note))
    return results


def _first_call_elsewhere(peer: str, settings: Settings, folder: Path) -> Mapping[str, float]:
    caches = {"FLEXATTN_CACHE_DIR": "flexattn", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environ = {name: str(folder / sub) for name, sub in caches.items()}
    command = ["benchmarks.overhead", "--first-call", peer, "--device", str(settings.device)]
    return in_child([*command, "--quick"] if settings.length < 256 else command, environ) or {}


def first_call_here(peer: str, settings: Settings) -> dict[str, float]:
    """Build a mask and call forward and backward for the first time in this process."""
    work, mods = host_time.works(settings.length, settings.device)["alibi + documents"]
    inputs = make_inputs(work, settings.device, settings.dtype)
    times: dict[str, float] = {}
    found: dict[str, Any] = {}

    def step(name: str, run: Callable[[], Any]) -> None:
        times[name] = milliseconds(lambda: found.update({name: run()}), settings.device)

    step("mask", lambda: PEERS[peer](work, mods, settings.device))
    step("forward", lambda: found["mask"](*inputs.qkv))
    if found["forward"].requires_grad:
        step("backward", lambda: torch.autograd.grad(found["forward"], inputs.qkv, inputs.d_out))
    return times


@dataclass(frozen=True)
class Recompiles:
    """How often a peer compiled while lengths varied, and the milliseconds of each call."""

    peer: str
    lengths: tuple[int, ...]
    compiles: int
    milliseconds: tuple[float, ...]
    note: str = ""


def recompiles(settings: Settings) -> list[Recompiles]:
    """Call each peer with one length after the other, with a new mask and a new closure each time."""
    return [_recompiles(peer, settings) for peer in _with_mods(settings.peers) if peer != "torch_flex_eager"]


def _recompiles(peer: str, settings: Settings) -> Recompiles:
    torch._dynamo.reset()
    before, taken = _compiled(peer), []
    compiled = torch.compile(torch_flex_module().flex_attention)  # with torch's default choice of dynamic shapes
    builder = mask_builders([peer], settings.device)[peer]
    base, _ = host_time.works(settings.length, settings.device)["alibi + documents"]

    def call(length: int) -> None:
        work = replace(base, length=length)
        q, k, v = (x.detach() for x in make_inputs(work, settings.device, settings.dtype).qkv)
        alibi = base.mods(work, settings.device).score_mod
        block_mask = builder(documents(length, next(host_time.SEEDS), settings.device), length)
        (flexattn.flex_attention if peer == "flexattn" else compiled)(q, k, v, alibi, block_mask)

    try:
        for length in settings.lengths:
            taken.append(milliseconds(lambda n=length: call(n), settings.device))
    except Exception as error:
        return Recompiles(peer, settings.lengths, 0, tuple(taken), failure(peer, error))
    return Recompiles(peer, settings.lengths, _compiled(peer) - before, tuple(taken))


def _compiled(peer: str) -> int:
    """Return how many kernels (flexattn) or graphs (torch) this process has compiled so far."""
    if peer == "flexattn":
        return kernels_made()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def results_table(results: Sequence[Result]) -> str:
    """Return one line per measurement and peer."""
    rows = []
    for r in results:
        numbers = (r.note, "")
        if r.milliseconds:
            numbers = (f"{r.median:.4f}", f"{min(r.milliseconds):.4f}..{max(r.milliseconds):.4f}")
        rows.append([r.config.work, r.config.direction, r.config.peer, *numbers])
    return table(["what", "when", "peer", "ms", "min..max"], sorted(rows, key=lambda row: row[:2]))


def recompiles_table(found: Sequence[Recompiles]) -> str:
    """Return one line per peer: compiles, and the times of the first call and of the slowest later one."""
    rows = []
    for r in found:
        first, later = (r.milliseconds or (0.0,))[0], max(r.milliseconds[1:], default=0.0)
        rows.append([r.peer, len(r.lengths), r.compiles, f"{first:.1f}", f"{later:.1f}", r.note])
    return table(["varying lengths", "lengths", "compiles", "first ms", "slowest later ms", "note"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the selected parts, print the tables, write the JSON file. Return 1 if flexattn failed anywhere."""
    options = parse(argv)
    settings = settings_of(options)
    prepare_torch()
    if options.first_call:
        print(json.dumps(first_call_here(options.first_call, settings)))
        return 0
    parts = options.parts.split(",")
    masks = measure_masks(settings.masks) if "masks" in parts else None  # before other parts build masks
    results: list[Result] = []
    timed = {"first_call": first_call, "host": host, "compiled": compiled, "stubbed": stubs, "guard": guards}
    for name, part in timed.items():
        results += part(settings) if name in parts else []
    found = recompiles(settings) if "recompiles" in parts else []
    where = environment(settings.device, options.label)
    print(where)
    if masks:
        print(f"\n{masks}")
    if results:
        print(f"\n{results_table(results)}")
    if found:
        print(f"\n{recompiles_table(found)}")
    record = {
        "environment": asdict(where),
        "masks": masks.record() if masks else None,
        "results": [result.record() for result in results],
        "recompiles": [asdict(r) for r in found],
    }
    write_json(options.json, record)
    broken = any(r.failed for r in results) or any(r.note.startswith("error") for r in found)
    return 1 if broken or (masks is not None and masks.failed) else 0


if __name__ == "__main__":
    sys.exit(main())
