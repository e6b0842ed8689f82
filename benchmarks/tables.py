"""Gradients of captured tables: `python -m benchmarks.tables` compares the backward with and without them.

T5 buckets ([32, H], an expensive index of the distance) and Swin tables ([cells, H], whose index comes from
a tensor [S, S]). Each is measured with a fixed table, with its gradient, and with its gradient under deterministic
algorithms. The last is also run `--repeats` times, and every bit of every gradient must be the same. The exit code is 1
if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic as deterministic_settings

from benchmarks.harness import Config, Run, environment, measure, table, write_json
from benchmarks.works import swin_cells
from flexattn import flex_attention, mods

FIXED, LEARNED, DETERMINISTIC = "table fixed", "gradient", "gradient, deterministic"


def t5(length: int, heads: int, device: torch.device) -> tuple[Tensor, Callable[[Tensor], Any]]:
    return torch.randn(32, heads, device=device), mods.t5_bias


def swin(length: int, heads: int, device: torch.device) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """One window of nearly `length` patches, in a row as in Swin Transformer (Liu et al., arXiv:2103.14030)."""
    index, entries = swin_cells(length, device)

    def mod_of(bias: Tensor) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score + bias[index[q_idx, kv_idx], h]

    return torch.randn(entries, heads, device=device), mod_of


TABLES = {"t5": t5, "swin": swin}


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms, without the filling of uninitialized memory that they include."""
    memory: Any = deterministic_settings
    before, fills = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills


def backward(tensors: Sequence[Tensor], mod: Any, captured: Sequence[Tensor], exactly: bool) -> Callable[[], Any]:
    """Return a function that runs the backward of one forward."""
    query, key, value = tensors
    with deterministic(exactly):
        out = flex_attention(query, key, value, mod)
    d_out = torch.randn_like(out)

    def run() -> tuple[Tensor, ...]:
        with deterministic(exactly):
            return torch.autograd.grad(out, (*tensors, *captured), d_out, retain_graph=True)

    return run


def differing(run: Callable[[], tuple[Tensor, ...]], repeats: int) -> int:
    """Return how many further runs differ from the first in any bit of any gradient."""
    first = run()
    return sum(any(not torch.equal(a, b) for a, b in zip(first, run(), strict=True)) for _ in range(repeats - 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times, and whether runs are reproducible."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="", help="B,H,S,D")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    default = "8,32,2048,64" if on_gpu else "1,2,128,16"
    B, H, S, D = (int(n) for n in (options.shape or default).split(","))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tensors = [torch.randn(B, H, S, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    runs: dict[Config, Run] = {}
    differ: dict[str, int] = {}
    for name, make in TABLES.items():
        values, mod_of = make(S, H, device)
        learned = values.clone().requires_grad_()
        kinds = {
            FIXED: backward(tensors, mod_of(values), (), False),
            LEARNED: backward(tensors, mod_of(learned), (learned,), False),
            DETERMINISTIC: backward(tensors, mod_of(learned), (learned,), True),
        }
        differ[name] = differing(kinds[DETERMINISTIC], options.repeats)
        runs |= {Config(name, kind, "backward"): run for kind, run in kinds.items()}
    results = measure(runs, device, options.rounds)
    rows = [
        [c.work, c.peer, f"{r.median:.3f}", f"{min(r.milliseconds):.3f}..{max(r.milliseconds):.3f}",
         f"{r.median / results[Config(c.work, FIXED, c.direction)].median:.2f}x"]
        if r.milliseconds else [c.work, c.peer, r.note, "", ""]
        for c, r in results.items()
    ]  # fmt: skip
    where = environment(device)
    print(f"{where}\n{B}x{H}x{S} D{D}, {dtype}, {options.rounds} rounds, medians\n")
    print(table(["table", "backward with", "ms", "min..max", "of fixed"], rows))
    for name, count in differ.items():
        print(f"{name}: {count} of {options.repeats} deterministic runs differ from the first")
    record = {"shape": [B, H, S, D], "results": [r.record() for r in results.values()], "differing": differ}
    write_json(options.json, {"environment": asdict(where), "repeats": options.repeats, **record})
    return 1 if any(differ.values()) or any(r.failed for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
