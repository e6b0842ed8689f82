"""A compiled transformer block like Llama's with each attention inside: time and peak memory.

`python -m benchmarks.block --length 8192`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from benchmarks.harness import Config, environment, measure, synchronize, table, write_json
from benchmarks.peers import torch_flex_module
from flexattn import mods

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [B, H, length, D]


class Block(nn.Module):
    """RMSNorm, attention with rotary embedding and grouped heads, RMSNorm, SwiGLU."""

    def __init__(self, attend: Attend, length: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.attend, self.heads, self.kv_heads, self.head_dim = attend, heads, kv_heads, head_dim
        self.norm, self.norm_mlp = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        frequencies = 5e5 ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(length)[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos", angles.cos())  # [length, D]
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:  # [B, length, width]
        normed = self.norm(x)
        q, k = self.rotated(self.q(normed), self.heads), self.rotated(self.k(normed), self.kv_heads)
        attended = self.attend(q, k, self.split(self.v(normed), self.kv_heads))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, self.head_dim)).transpose(1, 2)  # [B, H, length, D]

    def rotated(self, x: Tensor, heads: int) -> Tensor:
        x = self.split(x, heads)
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-high, low], dim=-1) * self.sin


def attentions(length: int, device: torch.device) -> dict[str, Attend]:
    """Return causal attention by name."""
    mask = flexattn.create_block_mask(mods.causal, None, None, length, length, device=device)
    torch_flex = torch_flex_module()
    torch_mask = torch_flex.create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, length, length, device=device
    )

    def sdpa(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return attend

    return {
        "flexattn": lambda q, k, v: flexattn.flex_attention(q, k, v, None, mask, enable_gqa=True),
        "sdpa_cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa_flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "torch_flex": lambda q, k, v: torch_flex.flex_attention(q, k, v, None, torch_mask, enable_gqa=True),
    }


def peak(run: Callable[[], object], device: torch.device) -> float:
    """Return the memory in MiB that a run adds to what was allocated before."""
    run()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def runs_of(block: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    compiled: Any = torch.compile(block, fullgraph=True)

    def forward() -> object:
        with torch.no_grad():
            return compiled(x)

    def step() -> None:
        compiled(x).backward(x)
        for parameter in block.parameters():
            parameter.grad = None
        x.grad = None

    return {"forward": forward, "training step": step}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block", description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--peers", default="flexattn,sdpa_cudnn,sdpa_flash,torch_flex")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    x = torch.randn(1, options.length, 4096, device=device, dtype=dtype).requires_grad_()
    runs: dict[Config, Callable[[], object]] = {}
    found = attentions(options.length, device)
    for peer in options.peers.split(","):
        torch.manual_seed(0)
        block = Block(found[peer], options.length, 32, 8, 128, 14336).to(device, dtype)
        for direction, run in runs_of(block, x).items():
            runs[Config("block", peer, direction)] = run
    peaks = {config: peak(run, device) for config, run in runs.items()}
    results = measure(runs, device, options.rounds, sample_ms=20.0)
    rows, first = [], options.peers.split(",")[0]
    for config, result in results.items():
        base = results[Config("block", first, config.direction)]
        ratio, memory = result.median / base.median, peaks[config] / peaks[base.config]
        rows.append([
            config.peer, config.direction, f"{result.median:.3f}", f"{ratio:.3f}", f"{peaks[config]:.1f}",
            f"{memory:.3f}", result.note,
        ])  # fmt: skip
    where = environment(device)
    headers = ["attention", "direction", "ms", f"/ {first}", "peak MiB", f"/ {first}", "note"]
    print(f"{where}\n\n{table(headers, rows)}")
    records = [{**r.record(), "peak_mib": peaks[c]} for c, r in results.items()]
    write_json(options.json, {"environment": asdict(where), "results": records})


if __name__ == "__main__":
    main()
