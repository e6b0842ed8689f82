"""What surrounds the kernels: mask building, host time per call, first call, recompiles.

`python -m benchmarks.overhead --parts masks,host`
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
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
from benchmarks.harness import (
    Config,
    Result,
    Run,
    environment,
    host_sample,
    measure,
    one_line,
    synchronize,
    table,
    write_json,
)
from benchmarks.peers import PEERS, prepare_torch, torch_flex_module
from benchmarks.works import WORKS, Mods, Work, causal_mask, document_lengths, make_inputs
from flexattn.build import stats

PARTS = ("masks", "host", "first_call", "recompiles")
KNOWN = ("flexattn", "torch_flex", "torch_flex_eager")
MOST_LAUNCHES = 100  # between two waits for the device: its queue must never be full
_SEEDS = itertools.count()  # of document masks, no two of which are alike


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    peers: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    rounds: int
    mask_lengths: tuple[int, ...]
    length: int  # of the works whose host time and first call are measured
    lengths: tuple[int, ...]  # that the recompile counter goes through


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
    """Return the options as what they mean."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    default = "64,128" if options.quick else "8192,65536,131072" if on_gpu else "2048,8192"
    peers = tuple(options.peers.split(","))
    if unknown := set(peers) - set(KNOWN):
        raise SystemExit(f"--peers: unknown {', '.join(sorted(unknown))}; known are {', '.join(KNOWN)}")
    draw = random.Random(0)
    longest = 2048 if on_gpu else 128 if options.quick else 512
    return Settings(
        peers=peers,
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        rounds=2 if options.quick else options.rounds,
        mask_lengths=tuple(int(x) for x in (options.mask_lengths or default).split(",")),
        length=64 if options.quick else 256,
        lengths=tuple(draw.randint(17, longest) for _ in range(3 if options.quick else 8)),
    )


def causal(length: int, device: torch.device) -> Callable[..., Tensor]:
    """Return a causal mask_mod as a new closure."""
    first = 0

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return causal_mask(b, h, q_idx, kv_idx + first)

    return mask


def document(length: int, device: torch.device) -> Callable[..., Tensor]:
    """Return a mask_mod of ragged documents as a new closure over a new tensor."""
    lengths = torch.tensor(document_lengths(length, seed=next(_SEEDS)))
    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths).to(device)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return mask


def mask_builders(settings: Settings) -> dict[str, Callable[[Callable[..., Tensor], int], object]]:
    """Return, for each peer, a function of (mask_mod, length) that builds a BlockMask."""
    device = settings.device
    create = torch_flex_module().create_block_mask
    compiled = torch.compile(create)
    known: dict[str, Callable[..., object]] = {
        "flexattn": flexattn.create_block_mask,
        "torch_flex": compiled,
        "torch_flex_eager": create,
    }
    return {
        peer: lambda mask, length, build=known[peer]: build(mask, None, None, length, length, device=device)
        for peer in settings.peers
    }


def masks(settings: Settings) -> list[Result]:
    """Time building: the first time of a kind and length, again with the same mod, and with a new closure each time."""
    results = []
    for length in settings.mask_lengths:
        for kind in (causal, document):
            for peer, build in mask_builders(settings).items():
                results += _mask_times(settings, f"{kind.__name__} mask {length}", kind, length, peer, build)
    return results


def _mask_times(
    settings: Settings,
    work: str,
    kind: Callable[[int, torch.device], Callable[..., Tensor]],
    length: int,
    peer: str,
    build: Callable[[Callable[..., Tensor], int], object],
) -> list[Result]:
    """Time one kind, length and peer; what does not fit into memory is noted and the rest left out."""
    same = kind(length, settings.device)
    fresh = [kind(length, settings.device) for _ in range(settings.rounds)]
    steps = {"first": [same], "repeated": [same] * settings.rounds, "new closure": fresh}
    results = []
    try:
        for step, mods in steps.items():
            taken = tuple(milliseconds(lambda m=mod: build(m, length), settings.device) for mod in mods)
            results.append(Result(Config(work, peer, step), taken))
    except Exception as error:
        failed = "error" if peer == "flexattn" else "n/a"
        results.append(Result(Config(work, peer, "first"), note=f"{failed}: {one_line(error)}"))
    return results


def milliseconds(run: Run, device: torch.device) -> float:
    """Return the time of one run with all that the device does for it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def host_works(settings: Settings) -> dict[str, tuple[Work, Mods]]:
    """Return small works: no captures; numbers only; captured tensors in both mods."""
    work = replace(WORKS["alibi"], batch=1, heads=4, length=settings.length, head_dim=64)
    alibi = work.mods(work, settings.device).score_mod
    return {
        "plain": (work, Mods()),
        "causal": (work, Mods(mask_mod=causal_mask)),
        "alibi + documents": (work, Mods(alibi, document(work.length, settings.device))),
    }


def host(settings: Settings) -> list[Result]:
    """Time calls on the host alone, many of them without waiting for the device."""
    runs: dict[Config, Run] = {}
    notes: list[Result] = []
    for name, (work, mods) in host_works(settings).items():
        inputs = make_inputs(work, settings.device, settings.dtype)
        for peer in settings.peers:
            config = Config(f"call, {name}", peer, "forward")
            try:
                attend = PEERS[peer](work, mods, settings.device)
                trains = attend(*inputs.qkv).requires_grad
            except Exception as error:
                notes.append(Result(config, note=f"{'error' if peer == 'flexattn' else 'n/a'}: {one_line(error)}"))
                continue

            def forward(attend: Any = attend, inputs: Any = inputs) -> Tensor:
                return attend(*inputs.qkv)

            def both(forward: Any = forward, inputs: Any = inputs) -> object:
                return torch.autograd.grad(forward(), inputs.qkv, inputs.d_out)

            runs[config] = forward
            if trains:
                runs[replace(config, direction="forward + backward")] = both
    clock = {"clock": host_sample, "most_launches": MOST_LAUNCHES}
    return [*measure(runs, settings.device, settings.rounds, **clock).values(), *notes]  # type: ignore[arg-type]


def first_call(settings: Settings) -> list[Result]:
    """Time the first call of a fresh process, with empty cache folders and with those that the first one left."""
    results = []
    for peer in settings.peers:
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
    environ = os.environ | {name: str(folder / sub) for name, sub in caches.items()}
    command = [sys.executable, "-m", "benchmarks.overhead", "--first-call", peer, "--device", str(settings.device)]
    command += ["--quick"] if settings.length < 256 else []
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def first_call_here(peer: str, settings: Settings) -> dict[str, float]:
    """Build a mask and call forward and backward for the first time in this process."""
    work, mods = host_works(settings)["alibi + documents"]
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
    """Call each peer with one length after the other, a new mask and a new closure each time."""
    return [_recompiles(peer, settings) for peer in settings.peers if peer != "torch_flex_eager"]


def _recompiles(peer: str, settings: Settings) -> Recompiles:
    torch._dynamo.reset()
    before, taken = _compiled(peer), []
    compiled = torch.compile(torch_flex_module().flex_attention)  # dynamic shapes as torch chooses them by default
    builder = mask_builders(replace(settings, peers=(peer,)))[peer]
    base, _ = host_works(settings)["alibi + documents"]

    def call(length: int) -> None:
        work = replace(base, length=length)
        q, k, v = (x.detach() for x in make_inputs(work, settings.device, settings.dtype).qkv)
        alibi = base.mods(work, settings.device).score_mod
        block_mask = builder(document(length, settings.device), length)
        (flexattn.flex_attention if peer == "flexattn" else compiled)(q, k, v, alibi, block_mask)

    try:
        for length in settings.lengths:
            taken.append(milliseconds(lambda n=length: call(n), settings.device))
    except Exception as error:
        kind = "error" if peer == "flexattn" else "n/a"
        return Recompiles(peer, settings.lengths, 0, tuple(taken), f"{kind}: {one_line(error)}")
    return Recompiles(peer, settings.lengths, _compiled(peer) - before, tuple(taken))


def _compiled(peer: str) -> int:
    """Return how many kernels (flexattn) or graphs (torch) this process has compiled so far."""
    if peer == "flexattn":
        counts = stats()
        return counts["compiles"] + counts["disk_hits"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def results_table(results: Sequence[Result]) -> str:
    """Return one line for each measured thing and peer."""
    rows = []
    for r in results:
        numbers = (r.note, "")
        if r.milliseconds:
            numbers = (f"{r.median:.4f}", f"{min(r.milliseconds):.4f}..{max(r.milliseconds):.4f}")
        rows.append([r.config.work, r.config.direction, r.config.peer, *numbers])
    return table(["what", "when", "peer", "ms", "min..max"], sorted(rows, key=lambda row: row[:2]))


def recompiles_table(found: Sequence[Recompiles]) -> str:
    """Return one line for each peer: compiles, and the time of the first call and of the slowest later one."""
    rows = []
    for r in found:
        first, later = (r.milliseconds or (0.0,))[0], max(r.milliseconds[1:], default=0.0)
        rows.append([r.peer, len(r.lengths), r.compiles, f"{first:.1f}", f"{later:.1f}", r.note])
    return table(["varying lengths", "lengths", "compiles", "first ms", "slowest later ms", "note"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen parts, print the tables, write the JSON file; return 1 if flexattn failed at anything."""
    options = parse(argv)
    settings = settings_of(options)
    prepare_torch()
    if options.first_call:
        print(json.dumps(first_call_here(options.first_call, settings)))
        return 0
    parts = options.parts.split(",")
    results: list[Result] = []
    for name, part in (("first_call", first_call), ("masks", masks), ("host", host)):
        results += part(settings) if name in parts else []
    found = recompiles(settings) if "recompiles" in parts else []
    where = environment(settings.device, options.label)
    print(where)
    if results:
        print(f"\n{results_table(results)}")
    if found:
        print(f"\n{recompiles_table(found)}")
    record = {
        "environment": asdict(where),
        "results": [result.record() for result in results],
        "recompiles": [asdict(r) for r in found],
    }
    write_json(options.json, record)
    return 1 if any(r.failed for r in results) or any(r.note.startswith("error") for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
