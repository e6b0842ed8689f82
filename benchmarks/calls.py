"""Many different calls from an empty cache directory. Nothing may be built twice, and every result is checked.

`python -m benchmarks.calls --calls 1000 --device cuda`, or smaller `--device interpreter` on any machine. Lengths,
batch sizes, scales, closures, captured tensors and numbers are new in each call. Three things must hold: the cache
directory contains exactly the kernels that `explain` lists; none is built after the first call of each kind; a second
process builds nothing. With `--builders N`, N processes first make a call of each kind concurrently in the same
empty directory. This takes one minute instead of many on a machine with enough cores, and tests the locks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexattn
from benchmarks.harness import environment, table, write_json
from flexattn import reference
from flexattn.runtime.build import digest, stats

SETTLED = 100  # calls after which nothing new may be built
LAYOUTS = ("contiguous", "transposed", "unaligned")
Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Scale:
    """Sizes of the calls on a device."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    heads: tuple[int, int]  # of queries, of keys
    longest: int
    largest_batch: int
    kernel_options: dict[str, Any]


SCALES = {
    "cuda": Scale(torch.device("cuda"), (torch.bfloat16, torch.float16), (64, 128), (4, 2), 4096, 8, {}),
    "interpreter": Scale(
        torch.device("cpu"), (torch.float32, torch.float16), (16, 32), (2, 1), 48, 2, {"BACKEND": "TRITON"}
    ),
}


@dataclass(frozen=True)
class Kind:
    """The properties of a call that a set of kernels may depend on. Everything else is drawn anew."""

    mod: str  # one of MODS
    dtype: torch.dtype
    dim: int
    layout: str  # one of LAYOUTS
    even: bool  # lengths are multiples of 16, so that rows of captured tables are aligned


@dataclass(frozen=True)
class Call:
    """One call with fresh tensors."""

    kind: Kind
    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, D]
    d_out: Tensor  # [B, Hq, M, D]
    scale: float
    score_mod: Mod
    mask_mod: Mod
    learnable: tuple[Tensor, ...]  # [B, Hq, ...]


@dataclass(frozen=True)
class Report:
    """Observations of one process."""

    calls: int
    kinds: int
    entries: tuple[str, ...]  # in the cache directory at the end
    unlisted: tuple[str, ...]  # entries that `explain` does not list
    missing: tuple[str, ...]  # listed kernels that do not exist
    last_built_at: int  # call, counted from 1, that added the last entry
    stats: dict[str, int]
    wrong: tuple[str, ...]
    worst: float  # largest error relative to the tolerance
    seconds: float


def alibi_causal(draw: random.Random, b: int, h: int, m: int, n: int, device: torch.device) -> tuple[Mod, Mod, Any]:
    slopes, steepness, shift = torch.rand(h, device=device), draw.uniform(0.01, 0.2), max(0, n - m)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + steepness * slopes[h] * (kv_idx - q_idx)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + shift >= kv_idx

    return alibi, causal, ()


def softcap_window(draw: random.Random, b: int, h: int, m: int, n: int, device: torch.device) -> tuple[Mod, Mod, Any]:
    cap, window = draw.uniform(2.0, 50.0), draw.randint(1, n)

    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    def sliding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return softcap, sliding, ()


def bias_document(draw: random.Random, b: int, h: int, m: int, n: int, device: torch.device) -> tuple[Mod, Mod, Any]:
    table = torch.randn(b, h, n, device=device).requires_grad_()
    documents = torch.randint(0, 3, (max(m, n),), device=device, dtype=torch.int32).sort().values

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[b, h, kv_idx]

    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return documents[q_idx] == documents[kv_idx]

    return bias, document, (table,)


MODS = {"alibi_causal": alibi_causal, "softcap_window": softcap_window, "bias_document": bias_document}


def kinds_of(scale: Scale, mods: Sequence[str]) -> tuple[Kind, ...]:
    """Return every kind of call. Lengths that are multiples of 16 matter only to mods that capture a table."""
    every = itertools.product(mods, scale.dtypes, scale.dims, LAYOUTS, (False, True))
    return tuple(kind for kind in itertools.starmap(Kind, every) if kind.mod == "bias_document" or not kind.even)


def order_of_kinds(kinds: Sequence[Kind], calls: int, draw: random.Random) -> list[Kind]:
    """Return a kind for each call: first each kind once in random order, then random ones."""
    order = draw.sample(list(kinds), len(kinds))
    return (order + [draw.choice(kinds) for _ in range(calls)])[:calls]


def make_call(kind: Kind, scale: Scale, draw: random.Random) -> Call:
    """Draw lengths, batch size, scale, tensors, numbers and closures."""
    batch, (heads, kv_heads) = draw.randint(1, scale.largest_batch), scale.heads
    m, n = _length(kind, scale, draw), _length(kind, scale, draw)
    score_mod, mask_mod, learnable = MODS[kind.mod](draw, batch, heads, m, n, scale.device)
    query, key, value = (_tensor(kind, scale, batch, h, x) for h, x in ((heads, m), (kv_heads, n), (kv_heads, n)))
    d_out = torch.randn(batch, heads, m, kind.dim, device=scale.device, dtype=kind.dtype)
    factor = draw.uniform(0.5, 1.5) / math.sqrt(kind.dim)
    return Call(kind, query, key, value, d_out, factor, score_mod, mask_mod, learnable)


def _length(kind: Kind, scale: Scale, draw: random.Random) -> int:
    """Draw short lengths as often as long ones."""
    drawn = round(math.exp(draw.uniform(0.0, math.log(scale.longest))))
    if kind.even:
        return max(16, drawn // 16 * 16)
    return min(drawn | 1, scale.longest - 1) if kind.mod == "bias_document" else drawn


def _tensor(kind: Kind, scale: Scale, batch: int, heads: int, length: int) -> Tensor:
    extra = 1 if kind.layout == "unaligned" else 0
    sizes = (batch, length, heads) if kind.layout == "transposed" else (batch, heads, length)
    drawn = torch.randn(*sizes, kind.dim + extra, device=scale.device, dtype=kind.dtype)[..., extra:]
    return (drawn.transpose(1, 2) if kind.layout == "transposed" else drawn).requires_grad_()


def run(call: Call, scale: Scale) -> dict[str, Tensor]:
    """Return flexattn's results: out and every gradient."""
    m, n = call.query.size(2), call.key.size(2)
    block_mask = flexattn.create_block_mask(call.mask_mod, None, None, m, n, device=scale.device)
    out = flexattn.flex_attention(
        call.query, call.key, call.value, call.score_mod, block_mask, call.scale, enable_gqa=True,
        kernel_options=scale.kernel_options,
    )  # fmt: skip
    leaves = (call.query, call.key, call.value, *call.learnable)
    return _named(out, torch.autograd.grad(out, leaves, call.d_out))


def listed(call: Call, scale: Scale) -> set[str]:
    """Return the digests of the kernels that `explain` lists for a call: forward, delta, dQ, dK/dV, mask kernels."""
    m, n = call.query.size(2), call.key.size(2)
    block_mask = flexattn.create_block_mask(call.mask_mod, None, None, m, n, device=scale.device)
    explanation: Any = flexattn.explain(
        call.query, call.key, call.value, call.score_mod, block_mask, call.scale, enable_gqa=True,
        kernel_options=scale.kernel_options,
    )  # fmt: skip
    pairs = zip(explanation.plans, explanation.sources, strict=True)
    found = {digest(source, plan.target) for plan, source in pairs}
    return found | {digest(source, explanation.plans[0].target) for source in explanation.mask_sources}


def _named(out: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    names = ("dq", "dk", "dv", "d_table")
    return {"out": out.detach(), **dict(zip(names, grads, strict=False))}


def excess(call: Call, results: dict[str, Tensor], draw: random.Random) -> dict[str, float]:
    """Return each result's error relative to the tolerance, on one key head of one sequence and its queries.

    The tolerance is 2x the rmse and 4x the largest error of a dense computation in the same dtype, at least 4 ulp and
    1e-5. This detects wrong kernels and stale values; the tests check accuracy with tighter bounds.
    """
    b, kv_head = draw.randrange(call.query.size(0)), draw.randrange(call.key.size(1))
    truth_dtype = torch.float64 if call.query.size(2) * call.key.size(2) < 1 << 18 else torch.float32
    truth, dense = _dense(call, b, kv_head, truth_dtype), _dense(call, b, kv_head, None)
    group = call.query.size(1) // call.key.size(1)
    floor = max(4 * torch.finfo(call.query.dtype).eps, 1e-5)
    sizes = sizes_of_terms(call, b, kv_head * group)
    found = {}
    for name, result in results.items():
        exact = truth[name].double()
        heads = slice(kv_head, kv_head + 1) if name in ("dk", "dv") else slice(kv_head * group, (kv_head + 1) * group)
        error, usual = (result[b, heads].double() - exact).abs(), (dense[name].double() - exact).abs()
        least = sizes.get(name, (0.0, 0.0))
        rmse = max(2 * _rms(usual), floor * max(_rms(exact), least[0]))
        largest = max(4 * float(usual.max()), floor * max(float(exact.abs().max()), least[1]))
        parts = (_part(_rms(error), rmse), _part(float(error.max()), largest))
        found[name] = math.inf if any(math.isnan(x) for x in parts) else max(parts)
    return found


def sizes_of_terms(call: Call, b: int, h: int) -> dict[str, tuple[float, float]]:
    """Return the rms and the maximum size of the terms of a gradient. If only one key attends, the terms cancel and
    only rounding errors remain. If few queries attend, few keys have them.
    """
    m, n, device = call.query.size(2), call.key.size(2), call.query.device
    b_idx, h_idx = torch.tensor(b, device=device), torch.tensor(h, device=device)
    queries, keys = torch.arange(m, device=device)[:, None], torch.arange(n, device=device)
    live = call.mask_mod(b_idx, h_idx, queries, keys).expand(m, n)
    count = live.sum(-1, keepdim=True)
    squares = torch.where(live, 1.0 / count.clamp(min=1).square(), 0.0)  # of probabilities, if all in a row are equal
    of_query, of_key = (call.kind.dim * squares.sum(axis) for axis in (1, 0))
    sizes = {"dq": (of_query, call.scale), "dk": (of_key, call.scale), "d_table": (of_key, 1.0)}
    return {
        name: (factor * math.sqrt(float(x.mean())), factor * math.sqrt(float(x.max())))
        for name, (x, factor) in sizes.items()
    }


def _part(error: float, allowed: float) -> float:
    return 0.0 if error == 0 else error / allowed if allowed else math.inf


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _dense(call: Call, b: int, kv_head: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the reference results for one key head of one sequence. Mods see the indices of the whole call."""
    group = call.query.size(1) // call.key.size(1)
    first = kv_head * group
    sliced = (call.query[b : b + 1, first : first + group], *(x[b : b + 1, kv_head : kv_head + 1] for x in
              (call.key, call.value)))  # fmt: skip
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in sliced]

    def score_mod(score: Tensor, b_idx: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return call.score_mod(score, b_idx + b, h + first, q_idx, kv_idx)

    def mask_mod(b_idx: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return call.mask_mod(b_idx + b, h + first, q_idx, kv_idx)

    out, _ = reference.attention(*leaves, score_mod, mask_mod, scale=call.scale, dtype=dtype)
    d_out = call.d_out[b : b + 1, first : first + group].to(out.dtype)
    grads = torch.autograd.grad(out, (*leaves, *call.learnable), d_out)
    found = {name: x[0] for name, x in _named(out, grads).items() if name != "d_table"}
    return found | ({"d_table": grads[3][b, first : first + group]} if call.learnable else {})


def entries(folder: Path) -> set[str]:
    """Return the digests of the kernels in a cache directory."""
    return {path.parent.name for path in folder.glob("*/manifest.json")}


def _named_entries(folder: Path, digests: set[str]) -> list[str]:
    """Return the names of the kernels with these digests, and the digests."""
    return [f"{next((folder / d).glob('*.py'), folder).stem} {d}" for d in digests]


def work(
    calls: int, scale: Scale, mods: Sequence[str], folder: Path, seed: int, part: tuple[int, int] = (0, 1)
) -> Report:
    """Make and check the calls in this process. Return the report; `part` (i, n) is every n-th call from i."""
    draw, started = random.Random(seed), time.monotonic()
    torch.manual_seed(seed)
    kinds = kinds_of(scale, mods)
    there, known, wrong = entries(folder), set(), []
    last_built_at, worst = 0, 0.0
    for number, kind in list(enumerate(order_of_kinds(kinds, calls, draw), 1))[part[0] :: part[1]]:
        call = make_call(kind, scale, draw)
        parts = excess(call, run(call, scale), draw)
        name = max(parts, key=parts.__getitem__)
        worst = max(worst, parts[name])
        if parts[name] > 1.0:
            sizes = f"{tuple(call.query.shape)} x {tuple(call.key.shape)}"
            wrong.append(f"call {number}: {name} at {parts[name]:.1f} of what is allowed, {kind}, {sizes}")
        if number <= SETTLED or number % 10 == 0:
            known |= listed(call, scale)
        now = entries(folder)
        last_built_at = number if now - there else last_built_at
        there |= now
        if number % 100 == 0:
            print(f"{number} calls, {len(there)} kernels, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return Report(
        calls, len(kinds), tuple(sorted(there)), tuple(sorted(_named_entries(folder, there - known))),
        tuple(sorted(known - there)),
        last_built_at, stats(), tuple(wrong), worst, time.monotonic() - started,
    )  # fmt: skip


def elsewhere(options: argparse.Namespace, calls: int, seed: int, folder: Path, parts: int = 1) -> list[dict[str, Any]]:
    """Return the Reports of separate processes that use `folder` as their cache and share the calls."""
    environ = os.environ | {"FLEXATTN_CACHE_DIR": str(folder)}
    if options.device == "interpreter":
        environ["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "benchmarks.calls", "--worker", str(folder), "--calls", str(calls)]
    command += ["--device", options.device, "--seed", str(seed), "--mods", options.mods]
    root = Path(__file__).parent.parent
    running = [
        subprocess.Popen([*command, "--part", f"{i}/{parts}"], env=environ, cwd=root, stdout=subprocess.PIPE, text=True)
        for i in range(parts)
    ]
    outputs = [process.communicate()[0] for process in running]
    if codes := [process.returncode for process in running if process.returncode]:
        raise SystemExit(f"a process with calls ended with exit code {codes[0]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def failures(first: dict[str, Any], second: dict[str, Any], settled: int) -> list[str]:
    """Return the requirements that do not hold."""
    built_again = sorted(set(second["entries"]) - set(first["entries"]))
    claims = {
        "wrong results": first["wrong"] + second["wrong"],
        "in the folder, but not listed by explain": first["unlisted"],
        "listed by explain, but not in the folder": first["missing"],
        "compiled by the second process": built_again or ["?"] * second["stats"]["compiles"],
        f"kernels built after call {settled}": [first["last_built_at"]] if first["last_built_at"] > settled else [],
        "no kernels at all": [] if first["entries"] else ["?"],
    }
    return [f"{what}: {len(found)}, as {found[0]}" for what, found in claims.items() if found]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", choices=SCALES, default="cuda" if torch.cuda.is_available() else "interpreter")
    parser.add_argument("--mods", default=",".join(MODS), help="comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help="make the calls in this process (internal)")
    parser.add_argument("--part", default="0/1", help="which of the calls the worker makes (internal)")
    parser.add_argument("--builders", type=int, default=0, help="processes that make each kind of call first")
    parser.add_argument("--label", default="", help="text to keep with the results")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the calls in one process and each kind again in a second; print the reports; return 1 if a check fails."""
    options = parse(argv)
    scale, mods = SCALES[options.device], options.mods.split(",")
    if options.worker:
        index, parts = (int(x) for x in options.part.split("/"))
        report = work(options.calls, scale, mods, options.worker, options.seed, (index, parts))
        print(json.dumps(asdict(report)))
        return 0
    kinds = len(kinds_of(scale, mods))
    if options.calls < kinds:
        raise SystemExit(f"--calls: found {options.calls}, expected at least {kinds}, one of each kind")
    with tempfile.TemporaryDirectory() as folder:
        builders = (
            elsewhere(options, kinds, options.seed + 2, Path(folder), options.builders) if options.builders else []
        )
        (first,) = elsewhere(options, options.calls, options.seed, Path(folder))
        (second,) = elsewhere(options, kinds, options.seed + 1, Path(folder))
    settled = max(kinds, min(SETTLED, options.calls // 2))
    broken = failures(first, second, settled)
    broken += [f"wrong results of a builder: {line}" for b in builders for line in b["wrong"]]
    where = environment(scale.device, options.label)
    rows = [
        [name, r["calls"], r["kinds"], len(r["entries"]), r["last_built_at"], *r["stats"].values(), len(r["wrong"]),
         f"{r['worst']:.2f}", f"{r['seconds']:.0f}"]
        for name, r in (*(("builder", b) for b in builders), ("first", first), ("second", second))
    ]  # fmt: skip
    headers = ["process", "calls", "kinds", "kernels", "last built at", *first["stats"], "wrong", "worst/allowed", "s"]
    print(f"{where}\n\n{table(headers, rows)}\n")
    print("\n".join(f"FAILED {line}" for line in broken) or "all hold: nothing built twice, every result right")
    short = [{**r, "entries": len(r["entries"])} for r in (*builders, first, second)]
    record = {"builders": short[:-2], "first": short[-2], "second": short[-1], "failed": broken}
    write_json(options.json, {"environment": asdict(where), **record})
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
