"""Packed sequences: forward, and forward with backward, next to the same work through a BlockMask and the peers.

`python -m benchmarks.varlen`. The time of flexattn's block mask includes building it, as lengths differ in each batch.
`--graph` also times forwards in a CUDA graph, without the host.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flexattn
from benchmarks.harness import Config, Run, absent, both_directions, environment, in_graph, measure, table, write_json
from benchmarks.works import document_lengths
from flexattn import mods

PEERS = ("flexattn", "flexattn_new", "flexattn_mask", "torch_varlen", "fa3", "sdpa_jagged")


@dataclass(frozen=True)
class Work:
    """Sequences of these lengths, causal."""

    lengths: tuple[int, ...]
    Hq: int = 16
    Hkv: int = 16
    D: int = 128

    @property
    def pairs(self) -> int:
        return sum(n * (n + 1) // 2 for n in self.lengths)


WORKS = {
    "12 documents, 16k": Work(document_lengths(16_384)),
    "64 x 256": Work((256,) * 64),
    "64 x 256, GQA": Work((256,) * 64, Hq=32, Hkv=8),
    "4 x 4096": Work((4096,) * 4),
    "512 of 8 to 120": Work(tuple(8 + 7 * i % 113 for i in range(512))),
}
QUICK = Work((40, 0, 17, 71), 2, 1, 16)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def offsets_of(work: Work, device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(work.lengths)], dtype=torch.int32, device=device)


def attends(work: Work, device: torch.device) -> dict[str, Attend]:
    """Return the peers, functions of rows [tokens, H, D]."""
    cu, most, gqa = offsets_of(work, device), max(work.lengths), work.Hq != work.Hkv
    variants = itertools.cycle([cu.clone() for _ in range(2)])

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        out = flexattn.varlen_attn(q, k, v, cu, cu, most, most, window_size=(-1, 0), enable_gqa=gqa)
        assert isinstance(out, Tensor)
        return out

    def new(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed(q, k, v, next(variants).add_(0))  # lengths of another batch: nothing is known of them

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask_mod = mods.document_causal(offsets=next(variants).add_(0))
        mask = flexattn.create_block_mask(mask_mod, None, None, len(q), len(q), device=device)
        out = flexattn.flex_attention(*_rows(q, k, v), None, mask, enable_gqa=gqa)
        return out.squeeze(0).transpose(0, 1)

    found: dict[str, Attend] = {"flexattn": partial(packed, cu=cu), "flexattn_new": new, "flexattn_mask": masked}
    for name, module, function in (
        ("torch_varlen", "torch.nn.attention.varlen", "varlen_attn"),
        ("fa3", "flash_attn_interface", "flash_attn_varlen_func"),
    ):
        try:
            peer: Any = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError):
            continue
        options: dict[str, Any] = (
            {"causal": True} if name == "fa3" else {"window_size": (-1, 0), **({"enable_gqa": True} if gqa else {})}
        )
        found[name] = partial(_varlen, peer, cu, most, options)
    if not gqa:
        found["sdpa_jagged"] = partial(_jagged, cu.long())
    return found


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _varlen(peer: Any, cu: Tensor, most: int, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return peer(q, k, v, cu, cu, most, most, **options)


def _jagged(offsets: Tensor, *rows: Tensor) -> Tensor:
    nested = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in rows)
    out: Any = torch.nn.functional.scaled_dot_product_attention(*nested, is_causal=True)
    return out.transpose(1, 2).values()


_CAPTURED = ("flexattn", "torch_varlen", "fa3")  # the host of the others waits for the device


def runs_of(work: Work, peers: list[str], device: torch.device, graph: bool) -> dict[tuple[str, str], Run]:
    """Return what to measure, by peer and direction."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = sum(work.lengths)
    q, k, v = (
        torch.randn(tokens, H, work.D, device=device, dtype=dtype, requires_grad=True)
        for H in (work.Hq, work.Hkv, work.Hkv)
    )
    d_out = torch.randn(tokens, work.Hq, work.D, device=device, dtype=dtype)
    found: dict[tuple[str, str], Run] = {}
    for peer, attend in attends(work, device).items():
        if peer in peers:
            for direction, run in both_directions(attend, (q, k, v), d_out).items():
                found[peer, direction] = run
            if graph and peer in _CAPTURED:
                found[peer, "forward, graph"] = in_graph(found[peer, "forward"])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.varlen", description=__doc__)
    parser.add_argument("--works", default=";".join(WORKS), help="names, joined by ;")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph", action="store_true", help="time forwards in a CUDA graph, too")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows, records, failed = [], [], False
    for name in options.works.split(";"):
        work = QUICK if options.quick else WORKS[name]
        runs = {
            Config(name, *key): run
            for key, run in runs_of(work, options.peers.split(","), device, options.graph).items()
        }
        flops = {c: 4.0 * work.D * work.Hq * work.pairs * (3.5 if "backward" in c.direction else 1.0) for c in runs}
        for config, result in measure(runs, device, options.rounds, flops).items():
            rows.append([
                name, config.peer, config.direction, f"{result.median * 1e3:.0f}", f"{result.tflops:.0f}", result.note
            ])  # fmt: skip
            records.append(result.record())
            failed = failed or (result.failed and config.peer.startswith("flexattn"))
    where = environment(device)
    print(f"{where}\n\n{table(['work', 'peer', 'direction', 'us', 'TFLOP/s', 'note'], rows)}")
    print(absent(options.peers.split(","), rows), end="")
    write_json(options.json, {"environment": asdict(where), "results": records})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
