"""Training steps with a new mask and another length each: memory, traces, graphs and kernels must not grow.

`python -m benchmarks.steps --steps 10000 --compiled`
"""

from __future__ import annotations

import argparse
import gc
import warnings
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo

import flexattn
from flexattn import create_block_mask, flex_attention, mods

HEADS, DIM, BLOCK = 2, 16, 16


class Attention(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(HEADS, device=device))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx).abs()

    def forward(self, q, k, v, mask):
        return flex_attention(q, k, v, self.score_mod, mask)


def resident():
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is read
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--compiled", action="store_true", help="the module is compiled, with dynamic shapes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    module = Attention(options.device)
    backend = "inductor" if options.device == "cuda" else "aot_eager"
    call = torch.compile(module, fullgraph=True, backend=backend, dynamic=True) if options.compiled else module
    generator = torch.Generator().manual_seed(0)
    shown = {100, 1_000, options.steps, *range(2_000, options.steps, 2_000)}
    for step in range(1, options.steps + 1):
        length = BLOCK * int(torch.randint(2, 8, (1,), generator=generator))
        ids = (torch.rand(length, generator=generator) < 0.05).cumsum(0).to(options.device)
        mask = create_block_mask(mods.document_causal(ids), None, None, length, length, BLOCK_SIZE=BLOCK)
        shape = (1, HEADS, length, DIM)
        x = [torch.randn(shape, generator=generator).to(options.device).requires_grad_() for _ in range(3)]
        call(*x, mask).sum().backward()
        module.slopes.grad = None
        if step in shown:
            gc.collect()
            found = flexattn.counters()
            device = torch.cuda.memory_allocated() / 2**20 if options.device == "cuda" else 0.0
            print(
                f"{step:6} steps: {resident():.0f} MiB, device {device:.1f} MiB, {tensors()} tensors, {found.traces} "
                f"traces, {dynamo['stats']['unique_graphs']} graphs, {found.kernels_compiled} kernels compiled",
                flush=True,
            )


if __name__ == "__main__":
    main()
