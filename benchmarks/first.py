"""The first calls of a process, by stage: imports, mask, forward, backward, with kernels on disk and without.

`python -m benchmarks.first`. Each line is a fresh process that imports only torch and flexattn. torch's own first
backward with a given gradient imports sympy (0.3 s and more, in any program); it is timed on its own, before the mask.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STAGES = ("import torch", "device", "import flexattn", "torch's backward", "mask", "forward", "backward")
CALLS = STAGES[4:]
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "triton")

# Runs in the fresh process. It must not import this package, whose modules import Dynamo.
PROGRAM = """
import json, sys, time
device, length, seen = sys.argv[1], int(sys.argv[2]), {}

def stage(name, run):
    start = time.perf_counter()
    found = run()
    if "torch" in sys.modules and device == "cuda" and name != "import torch":
        sys.modules["torch"].cuda.synchronize()
    seen[name] = time.perf_counter() - start
    return found

def import_torch():
    global torch
    import torch

def import_flexattn():
    global flexattn
    import flexattn

def inputs():
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, d_out = (torch.randn(1, 4, length, 64, dtype=dtype, device=device) for _ in range(4))
    ids = torch.arange(length, dtype=torch.int32, device=device) // 50
    return [x.requires_grad_() for x in (q, k, v)], d_out, ids, torch.rand(4, device=device)

stage("import torch", import_torch)
(q, k, v), d_out, ids, slopes = stage("device", inputs)
stage("import flexattn", import_flexattn)
before = set(sys.modules)
stage("torch's backward", lambda: torch.autograd.grad(q * 2, q, d_out))
of_torch = set(sys.modules) - before
documents = lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])
alibi = lambda score, b, h, q, k: score - slopes[h] * (q - k)
mask = stage("mask", lambda: flexattn.create_block_mask(documents, None, None, length, length, device=device))
out = stage("forward", lambda: flexattn.flex_attention(q, k, v, alibi, mask))
stage("backward", lambda: torch.autograd.grad(out, (q, k, v), d_out))
from flexattn.runtime import build, compile_workers
found = {"stages": seen, "imported": sorted(set(sys.modules) - before - of_torch), "kernels": build.stats(),
         "workers": compile_workers.started()}
print(json.dumps(found))
"""


def first_calls(device: str, length: int, folder: str) -> dict[str, Any]:
    """Return the seconds of each stage of one fresh process, and what it imported, compiled and started."""
    environment = {**os.environ, "FLEXATTN_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/own"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, str(length)], env=environment, cwd=Path(__file__).parent.parent,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the medians of the stages of some processes."""
    times = {stage: statistics.median(run["stages"][stage] for run in runs) for stage in STAGES}
    calls = statistics.median(sum(run["stages"][stage] for stage in CALLS) for run in runs)
    heavy = [module for module in HEAVY if any(module in run["imported"] for run in runs)]
    text = "  ".join(f"{stage} {seconds:.3f}" for stage, seconds in times.items())
    compiles = runs[-1]["kernels"]["compiles"]
    return (
        f"{name}: {text}  | mask + forward + backward {calls:.3f} s, kernels compiled {compiles}, "
        f"processes started {runs[-1]['workers']}, imported {', '.join(heavy) or 'nothing heavy'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line for empty caches and one for full ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    cold, warm = [], []
    for _ in range(max(1, options.rounds // 2)):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_calls(options.device, options.length, folder))
            warm += [first_calls(options.device, options.length, folder) for _ in range(2)]
    print(line("empty cache", cold))
    print(line("full cache", warm))
    return 0


if __name__ == "__main__":
    sys.exit(main())
