"""Attention over a sequence that is sharded over the GPUs of this machine, next to one GPU.

`python -m benchmarks.context_parallel --ranks 2 --json results.json`

Each rank first computes the whole sequence alone. Times are device times of a rank from a barrier of the GPUs on, after
a pause in which the host launches the kernels: in a training step, it runs ahead too. A run takes as long as its
slowest rank. The efficiency is the time of one GPU over the number of ranks times the time of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

import flexattn
from benchmarks.harness import environment
from benchmarks.works import document_lengths
from flexattn import create_block_mask, mods
from flexattn.distributed import create_cp_plan, flex_attention

WORKS = ("causal", "documents", "sliding")
WINDOW = 4096
DOCUMENTS = 24
PAUSE = 8_000_000  # cycles, about 4 ms


def mask_of(name: str, length: int, device: torch.device, documents: int = DOCUMENTS) -> Callable[..., Any]:
    if name == "causal":
        return mods.causal
    if name == "sliding":
        return mods.sliding_window(WINDOW)
    lengths = torch.tensor(document_lengths(length, documents, seed=0), device=device)
    return mods.document_causal(torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths).int())


def pairs_of(mask_mod: Callable[..., Any], length: int, device: torch.device) -> int:
    return create_block_mask(mask_mod, None, None, length, length, device=device).pairs().useful


def timed(run: Callable[[], object], rounds: int, mesh: Any) -> list[float]:
    """Return milliseconds of each round."""
    found, started = [], torch.zeros(1, device="cuda")
    for turn in range(rounds + 2):
        dist.barrier(mesh.get_group())
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE)
        dist.all_reduce(started, group=mesh.get_group())  # pauses differ by 0.2 ms, because clocks do
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            found.append(begin.elapsed_time(end))
    return found


def passes(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    d_out = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return attend(*tensors)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)}


def work(rank: int, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks, device_id=device)
    mesh = init_device_mesh("cuda", (options.ranks,), mesh_dim_names=("cp",))
    S, Hq, Hkv, D = options.length, options.heads, options.kv_heads, options.head_dim
    for name in options.works.split(","):
        mod = mask_of(name, S, device)
        generator = torch.Generator(device).manual_seed(0)
        whole = [
            torch.randn(1, h, S, D, device=device, dtype=torch.bfloat16, generator=generator) for h in (Hq, Hkv, Hkv)
        ]
        mask = create_block_mask(mod, None, None, S, S, device=device)
        flops = {"forward": 4 * D * Hq * pairs_of(mod, S, device)}
        flops["backward"] = flops["forward"] * 5 // 2

        def alone(q: Tensor, k: Tensor, v: Tensor, mask: Any = mask) -> Tensor:
            return flexattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

        single = {n: timed(run, options.rounds, mesh) for n, run in passes(alone, whole).items()}
        with torch.no_grad():
            expected = alone(*whole)
        report(name, "one GPU", single, flops, None, options)
        for scheme in options.schemes.split(","):
            plan = create_cp_plan(mod, None, None, S, S, mesh, scheme=scheme)
            local = [plan.shard(x, 2).contiguous() for x in whole]

            def attend(q: Tensor, k: Tensor, v: Tensor, plan: Any = plan) -> Tensor:
                return flex_attention(q, k, v, enable_gqa=True, plan=plan)

            with torch.no_grad():
                error = (attend(*local) - plan.shard(expected, 2)).abs().max()
            dist.all_reduce(error, dist.ReduceOp.MAX)
            torch.cuda.reset_peak_memory_stats()
            many = {n: timed(run, options.rounds, mesh) for n, run in passes(attend, local).items()}
            if rank == 0:
                print(f"{plan}\n    largest difference {float(error):.1e}, "
                      f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)  # fmt: skip
            report(name, scheme, many, flops, single, options)
    if rank == 0 and options.json:
        record = {"environment": environment(device), "arguments": vars(options) | {"json": None}, "results": RESULTS}
        Path(options.json).write_text(json.dumps(record, default=str))
    dist.destroy_process_group()


RESULTS: list[dict[str, Any]] = []


def report(
    name: str, scheme: str, times: dict[str, list[float]], flops: dict[str, int], single: dict[str, list[float]] | None,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    every: list[Any] = [None] * options.ranks
    dist.all_gather_object(every, (times, single))
    if dist.get_rank():
        return
    for direction in times:
        ranks = [[t[direction][i] for t, _ in every] for i in range(options.rounds)]
        if single is None:
            median = statistics.median(t for round_ in ranks for t in round_)
            line = f"{flops[direction] / median / 1e9:.0f} TFLOP/s"
        else:
            median = statistics.median(map(max, ranks))
            alone = statistics.median(t for _, one in every for t in one[direction])
            middle = [statistics.median(t[direction]) for t, _ in every]
            efficiency = alone / (options.ranks * median)
            by_rank = " ".join(f"{t:.1f}" for t in middle)
            line = f"{flops[direction] / median / 1e9:.0f} TFLOP/s, efficiency {efficiency:.3f}, ranks {by_rank}"
            RESULTS.append({
                "work": name, "scheme": scheme, "direction": direction, "milliseconds": ranks, "alone": alone,
                "efficiency": efficiency,
            })  # fmt: skip
        print(f"{name:10} {scheme:8} {direction:9} {median:9.2f} ms  {line}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--length", type=int, default=262_144)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--schemes", default="gather,ring,heads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29_531)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.ranks > torch.cuda.device_count():
        print(f"found {torch.cuda.device_count()} GPUs, expected at least {max(2, options.ranks)}", file=sys.stderr)
        return 1
    spawn(work, (options,), options.ranks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
