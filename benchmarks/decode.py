"""Decoding: few queries against long caches. GB/s of keys and values, interleaved with PyTorch's SDPA and torch flex.

`python -m benchmarks.decode`. `--options BLOCK_N=128,num_stages=4` passes kernel_options to flexattn. `--graph N`
replays one captured step of a paged cache N times, and counts what was compiled.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from benchmarks.harness import Config, absent, environment, measure, one_line, table, write_json
from benchmarks.peers import torch_flex_module
from flexattn import PagedKVCache, mods

Run = Callable[[], object]
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Work:
    """Sequences with a cache each. `mod` is one of MODS."""

    B: int
    N: int  # capacity
    M: int = 1
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    Dv: int = 128
    mod: str = "plain"
    form: Literal["rows", "lengths", "ragged"] = "rows"  # lengths: all N, on the device. ragged: 1 to N
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16  # of the cache

    @property
    def lengths(self) -> list[int]:
        if self.form != "ragged":
            return [self.N] * self.B
        return torch.linspace(self.M, self.N, self.B).int().tolist()

    @property
    def attended(self) -> int:
        """Keys that a step reads, of all sequences."""
        lengths = self.lengths
        return sum(min(n, WINDOW + self.M - 1) for n in lengths) if self.mod == "window" else sum(lengths)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return self.dtype.itemsize * self.Hkv * self.attended * (self.D + self.Dv)


WINDOW = 4096
LONG = Work(32, 16_384)
WORKS = {
    "32x16k": LONG,
    "1x128k": Work(1, 131_072),
    "32x16k, 4 queries": replace(LONG, M=4),
    "32x16k, 16 queries": replace(LONG, M=16),
    "32x16k, ALiBi": replace(LONG, mod="alibi"),
    "32x16k, softcap": replace(LONG, mod="softcap"),
    "32x4k": Work(32, 4096),  # what a window of 4k reads
    "32x16k, window 4k": replace(LONG, mod="window"),
    "32x16k, lengths": replace(LONG, form="lengths"),
    "32x16k, pages of 16": replace(LONG, form="lengths", page_size=16),
    "32x16k, pages of 128": replace(LONG, form="lengths", page_size=128),
    "32x16k, pages of 16, window 4k": replace(LONG, form="lengths", page_size=16, mod="window"),
    "32 x 1 to 32k": Work(32, 32_768, form="ragged"),
    "32 x 1 to 32k, pages of 16": Work(32, 32_768, form="ragged", page_size=16),
    "32x16k, float8": replace(LONG, dtype=FLOAT8),
    "32x16k, float8, pages of 128": replace(LONG, form="lengths", page_size=128, dtype=FLOAT8),
    "MLA 64x8k": Work(64, 8_192, Hq=128, Hkv=1, D=576, Dv=512),
    "8x2k": Work(8, 2_048),
    "1x8k": Work(1, 8_192),
}


def mods_of(work: Work) -> tuple[Any, Any]:
    """Return score_mod and mask_mod of a workload, in positions."""
    return {
        "plain": (None, None),
        "alibi": (mods.alibi(work.Hq), None),
        "softcap": (mods.softcap(30.0), None),
        "window": (None, mods.sliding_window(WINDOW)),
    }[work.mod]


@dataclass(frozen=True)
class Cache:
    """Keys and values of a workload [B, Hkv, N, D], and what flex_attention gets."""

    k: Tensor
    v: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]


def cache_of(work: Work, device: torch.device) -> Cache:
    """Return a cache with random tokens. Pages are in random order."""
    k, v = (torch.randn(work.B, work.Hkv, work.N, D, device=device, dtype=torch.bfloat16) for D in (work.D, work.Dv))
    if work.D > 256:  # of latent attention: values are the first columns of the keys
        v = k[..., : work.Dv]
    key, value, arguments = k, v, {}
    if work.form != "rows":
        arguments["seqused_k"] = torch.tensor(work.lengths, dtype=torch.int32, device=device)
    if work.page_size:
        columns = work.N // work.page_size
        table = torch.randperm(work.B * columns, device=device)
        arguments["block_table"] = table.view(work.B, columns).int()
        key, value = (_pages(x, table, work.page_size) for x in (k, v))
    if work.dtype == FLOAT8:
        key, value = (x.to(FLOAT8) for x in (key, value))
        arguments |= {name: torch.ones(work.Hkv, device=device) for name in ("k_descale", "v_descale")}
    return Cache(k, v, key, value, arguments)


def _pages(x: Tensor, table: Tensor, size: int) -> Tensor:
    """Return [pages, size, H, D], with page table[i] as the i-th of all sequences."""
    pages = x.new_empty(len(table), size, x.size(1), x.size(3))
    pages[table] = x.unflatten(2, (-1, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return pages


def runs_of(work: Work, options: dict[str, object], device: torch.device) -> dict[str, Run]:
    """Return the calls of each peer, on the same tensors."""
    q = torch.randn(work.B, work.Hq, work.M, work.D, device=device, dtype=torch.bfloat16)
    cache = cache_of(work, device)
    k, v, arguments = cache.k, cache.v, cache.arguments
    score_mod, mask_mod = mods_of(work)
    mask = None
    if mask_mod is not None:  # built once, for all positions
        mask = flexattn.create_block_mask(mask_mod, None, None, work.N, work.N, device=device)
    if score_mod is not None or mask_mod is not None:
        lengths = torch.tensor(work.lengths, dtype=torch.int32, device=device)
        arguments = {**arguments, "q_offsets": lengths - work.M}
    found: dict[str, Run] = {
        "flexattn": lambda: flexattn.flex_attention(
            q, cache.key, cache.value, score_mod, mask, enable_gqa=True, kernel_options=options, **arguments
        )
    }
    plain = work.mod == "plain" and work.dtype != FLOAT8
    if work.form == "rows" and work.dtype != FLOAT8:
        found["torch_flex"] = _torch_flex(work, q, k, v, score_mod, mask_mod)
    if plain and work.form == "rows":
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            found[f"sdpa_{name}"] = _sdpa(backend, q, k, v)
    if plain:
        found |= _fa3(q, cache)
    return found


def _torch_flex(work: Work, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> Run:
    torch_flex, last, mask = torch_flex_module(), work.N - work.M, None
    score_mod, mask_mod = (None if mod is None else mods.shifted(mod, last) for mod in (score_mod, mask_mod))
    if mask_mod is not None:
        mask = torch_flex.create_block_mask(mask_mod, None, None, work.M, work.N, device=q.device)
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod, mask, enable_gqa=True)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Run:
    def run() -> object:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def _fa3(q: Tensor, cache: Cache) -> dict[str, Run]:
    """Return FlashAttention-3 on the same cache, if it is installed with this function."""
    try:
        attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    except (ImportError, AttributeError):
        return {}
    query = q.transpose(1, 2).contiguous()
    lengths, pages = cache.arguments.get("seqused_k"), cache.arguments.get("block_table")
    if pages is not None:
        return {"fa3": lambda: attend(query, cache.key, cache.value, cache_seqlens=lengths, page_table=pages)}
    keys, values = (x.transpose(1, 2).contiguous() for x in (cache.k, cache.v))
    return {"fa3": lambda: attend(query, keys, values, cache_seqlens=lengths)}


def replay(work: Work, steps: int, device: torch.device) -> str:
    """Capture one step of a paged cache, with its append, replay it, and return a line about it."""
    cache = PagedKVCache(
        work.B, work.N, pages=work.B * work.N // 16, heads=work.Hkv, head_dim=work.D, device=device
    )  # fmt: skip
    mask = flexattn.create_block_mask(mods.sliding_window(WINDOW), None, None, work.N, work.N, device=device)
    prompt = torch.randn(work.B, work.Hkv, work.N - steps - 8, work.D, device=device, dtype=torch.bfloat16)
    cache.append(prompt, prompt)
    cache.reserve(steps + 8)
    q = torch.randn(work.B, work.Hq, 1, work.D, device=device, dtype=torch.bfloat16)
    token = torch.randn(work.B, work.Hkv, 1, work.D, device=device, dtype=torch.bfloat16)
    alibi = mods.alibi(work.Hq)

    def step() -> Tensor:
        cache.append(token, token)
        return flexattn.flex_attention(
            q, cache.key, cache.value, alibi, mask, enable_gqa=True, **cache.arguments()
        )  # fmt: skip

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    before = flexattn.counters()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    after = flexattn.counters()
    kernels, traces = after.kernels_compiled - before.kernels_compiled, after.traces - before.traces
    lengths = set(cache.synchronize())
    return (
        f"{steps} replays: {seconds / steps * 1e6:.1f} us each, {kernels} kernels compiled, {traces} traces, "
        f"lengths {lengths}, finite {bool(out.isfinite().all())}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--works", default=";".join(WORKS), help="names, joined by ;")
    parser.add_argument("--peers", default="flexattn,torch_flex,sdpa_cudnn,sdpa_flash,fa3")
    parser.add_argument("--options", default="", help="kernel_options of flexattn: NAME=integer, comma-separated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph", type=int, default=0, metavar="STEPS")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    given: dict[str, object] = {n: int(x) for n, x in (pair.split("=") for pair in options.options.split(",") if pair)}
    rows, records, failed = [], [], False
    for name in options.works.split(";"):
        work = WORKS[name]
        if options.quick:
            work = replace(work, B=2, N=max(256, work.page_size), Hq=4, Hkv=min(2, work.Hkv), D=16, Dv=16)
        peers = {p: r for p, r in runs_of(work, given, device).items() if p in options.peers.split(",")}
        runs: dict[Config, Run] = {}
        notes = {}
        for peer, run in peers.items():
            try:
                run()
                runs[Config(name, peer, "forward")] = run
            except Exception as error:
                notes[peer] = one_line(error)
                failed = failed or peer == "flexattn"
        for config, result in measure(runs, device, options.rounds).items():
            gigabytes = work.bytes / result.median / 1e6
            rows.append([name, config.peer, f"{result.median * 1e3:.1f}", f"{gigabytes:.0f}", result.note])
            records.append({**result.record(), "gigabytes_per_second": gigabytes})
        rows += [[name, peer, "", "", note] for peer, note in notes.items()]
    where = environment(device, options.options)
    print(f"{where}\n\n{table(['work', 'peer', 'us', 'GB/s of keys and values', 'note'], rows)}")
    print(absent(options.peers.split(","), rows), end="")
    if options.graph:
        print(replay(Work(32, 8192), options.graph, device))
    write_json(options.json, {"environment": asdict(where), "results": records})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
