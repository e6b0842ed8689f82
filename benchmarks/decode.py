"""Decoding: few queries against long caches. GB/s of keys and values, interleaved with PyTorch's SDPA and torch flex.

`python -m benchmarks.decode`. `--options BLOCK_N=128,num_stages=4` passes kernel_options to flexattn.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from benchmarks.harness import Config, environment, measure, one_line, table, write_json
from benchmarks.peers import torch_flex_module
from flexattn import mods

Run = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Sequences with a cache each. `mod` is one of MODS."""

    B: int
    N: int
    M: int = 1
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 128
    mod: str = "plain"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, bfloat16."""
        return 2 * self.B * self.Hkv * self.N * (self.D + self.Dv)


WORKS = {
    "32x16k": Work(32, 16_384),
    "1x128k": Work(1, 131_072),
    "32x16k, 4 queries": Work(32, 16_384, 4),
    "32x16k, 16 queries": Work(32, 16_384, 16),
    "32x16k, ALiBi": Work(32, 16_384, mod="alibi"),
    "32x16k, softcap": Work(32, 16_384, mod="softcap"),
    "32x16k, window 4k": Work(32, 16_384, mod="window"),
    "8x2k": Work(8, 2_048),
    "1x8k": Work(1, 8_192),
}
WINDOW = 4096


def mods_of(work: Work) -> tuple[Any, Any]:
    """Return score_mod and mask_mod of a workload."""
    last = work.N - work.M
    return {
        "plain": (None, None),
        "alibi": (mods.shifted(mods.alibi(work.Hq), last), None),
        "softcap": (mods.softcap(30.0), None),
        "window": (None, mods.shifted(mods.sliding_window(WINDOW), last)),
    }[work.mod]


def runs_of(work: Work, options: dict[str, object], device: torch.device) -> dict[str, Run]:
    """Return the calls of each peer, on the same tensors."""
    q = torch.randn(work.B, work.Hq, work.M, work.D, device=device, dtype=torch.bfloat16)
    k = torch.randn(work.B, work.Hkv, work.N, work.D, device=device, dtype=torch.bfloat16)
    v = torch.randn(work.B, work.Hkv, work.N, work.Dv, device=device, dtype=torch.bfloat16)
    score_mod, mask_mod = mods_of(work)
    mask = torch_mask = None
    torch_flex = torch_flex_module()
    if mask_mod is not None:
        mask = flexattn.create_block_mask(mask_mod, None, None, work.M, work.N, device=device)
        torch_mask = torch_flex.create_block_mask(mask_mod, None, None, work.M, work.N, device=device)
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    found: dict[str, Run] = {
        "flexattn": lambda: flexattn.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, kernel_options=options),
        "torch_flex": lambda: compiled(q, k, v, score_mod, torch_mask, enable_gqa=True),
    }
    if work.mod != "plain":
        return found

    def sdpa(backend: SDPBackend) -> Run:
        def run() -> object:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return run

    found |= {"sdpa_cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "sdpa_flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    try:
        fa3 = importlib.import_module("flash_attn_interface")
        query, keys, values = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        found["fa3"] = lambda: fa3.flash_attn_with_kvcache(query, keys, values)
    except ImportError:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--works", default=";".join(WORKS), help="names, joined by ;")
    parser.add_argument("--peers", default="flexattn,torch_flex,sdpa_cudnn,sdpa_flash,fa3")
    parser.add_argument("--options", default="", help="kernel_options of flexattn: NAME=integer, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    device = torch.device("cuda")
    given: dict[str, object] = {n: int(x) for n, x in (pair.split("=") for pair in options.options.split(",") if pair)}
    names = options.works.split(";")
    rows, records = [], []
    for name in names:
        work = WORKS[name]
        peers = {p: r for p, r in runs_of(work, given, device).items() if p in options.peers.split(",")}
        runs: dict[Config, Run] = {}
        notes = {}
        for peer, run in peers.items():
            try:
                run()
                runs[Config(name, peer, "forward")] = run
            except Exception as error:
                notes[peer] = one_line(error)
        for config, result in measure(runs, device, options.rounds).items():
            gigabytes = work.bytes / result.median / 1e6
            rows.append([name, config.peer, f"{result.median * 1e3:.1f}", f"{gigabytes:.0f}", result.note])
            records.append({**result.record(), "gigabytes_per_second": gigabytes})
        rows += [[name, peer, "", "", note] for peer, note in notes.items()]
    where = environment(device, options.options)
    print(f"{where}\n\n{table(['work', 'peer', 'us', 'GB/s of keys and values', 'note'], rows)}")
    write_json(options.json, {"environment": asdict(where), "results": records})


if __name__ == "__main__":
    main()
