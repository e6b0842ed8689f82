"""scaled_dot_product_attention: flexattn as its provider, next to direct calls and PyTorch's own backends.

`python -m benchmarks.sdpa` measures 16,384 tokens in sequences of each length, in one interleaved run. `provider` calls
scaled_dot_product_attention with flexattn active, `direct` calls flex_attention. The last table has the time of the
provider relative to a direct call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from benchmarks.harness import Config, Result, Run, both_directions, environment, measure, sample, table, write_json

TOKENS = 16_384
PEERS = ("direct", "provider", "flash", "cudnn")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Work:
    """One call: sequences of S tokens."""

    S: int
    causal: bool = True
    Hq: int = 16
    Hkv: int = 16
    D: int = 128
    dropout_p: float = 0.0
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        """The name in tables."""
        parts = [f"S {self.S}", "causal" if self.causal else "full"]
        parts += [f"{self.Hq} and {self.Hkv} heads"] if self.Hq != self.Hkv else []
        parts += [f"D {self.D}"] if self.D != 128 else []
        parts += [f"dropout {self.dropout_p}"] if self.dropout_p else []
        return ", ".join(parts)


WORKS = (
    *(Work(S, causal) for S in (512, 1024, 2048, 4096, 8192) for causal in (True, False)),
    Work(1024, Hkv=4), Work(4096, Hkv=4), Work(4096, D=64), Work(4096, dropout_p=0.1),
)  # fmt: skip
QUICK = (Work(32, Hq=2, Hkv=1, D=16, tokens=64),)


class Setting:
    """What to run, and what is active while it is timed. Activating takes longer than a call, so it is not timed."""

    def __init__(self, run: Run, active: Callable[[], AbstractContextManager[object]]) -> None:
        self.run, self.active = run, active

    def __call__(self) -> object:
        return self.run()


def clock(run: Run, launches: int, device: torch.device) -> float:
    """Return milliseconds per run."""
    with run.active() if isinstance(run, Setting) else nullcontext():
        return sample(run, launches, device)


def attends(work: Work, device: torch.device) -> dict[str, tuple[Attend, Callable[[], AbstractContextManager[object]]]]:
    """Return how each peer computes a call, and what is active then."""
    key = device.type.upper()
    mask = None
    if work.causal:
        mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, work.S, work.S, device=device)
    gqa = work.Hq != work.Hkv

    def direct(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flexattn.flex_attention(q, k, v, None, mask, enable_gqa=gqa, dropout_p=work.dropout_p)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, dropout_p=work.dropout_p, is_causal=work.causal, enable_gqa=gqa)

    def backend(choice: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
        return lambda: sdpa_kernel(choice)

    class Provider:
        """The flash backend, with flexattn as its provider."""

        def __enter__(self) -> None:
            self.handle, self.backend = flexattn.sdpa.activate(key), sdpa_kernel(SDPBackend.FLASH_ATTENTION)
            self.backend.__enter__()

        def __exit__(self, *error: object) -> None:
            self.backend.__exit__(None, None, None)
            self.handle.remove()

    return {
        "direct": (direct, nullcontext),
        "provider": (sdpa, Provider),
        "flash": (sdpa, backend(SDPBackend.FLASH_ATTENTION)),
        "cudnn": (sdpa, backend(SDPBackend.CUDNN_ATTENTION)),
    }


def runs_of(work: Work, peers: list[str], device: torch.device) -> dict[tuple[str, str], Run]:
    """Return what to measure, by peer and direction."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    B = work.tokens // work.S
    q, k, v, d_out = (
        torch.randn(B, H, work.S, work.D, device=device, dtype=dtype, requires_grad=True)
        for H in (work.Hq, work.Hkv, work.Hkv, work.Hq)
    )
    d_out = d_out.detach()
    found: dict[tuple[str, str], Run] = {}
    for peer, (attend, active) in attends(work, device).items():
        if peer in peers:
            for direction, run in both_directions(attend, (q, k, v), d_out).items():
                found[peer, direction] = Setting(run, active)
    return found


def ratio(results: dict[Config, Result], work: str, direction: str) -> str:
    """Return the time of the provider relative to a direct call: the median over rounds, which are interleaved."""
    provider, direct = (results[Config(work, peer, direction)] for peer in ("provider", "direct"))
    if provider.note or direct.note:
        return "n/a"
    return f"{statistics.median(a / b for a, b in zip(provider.milliseconds, direct.milliseconds, strict=True)):.3f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sdpa", description=__doc__)
    parser.add_argument("--works", default=";".join(w.name for w in WORKS), help="names, joined by ;")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one tiny call")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    device, peers = torch.device(options.device), options.peers.split(",")
    rows, ratios, records, failed = [], [], [], False
    named = {work.name: work for work in WORKS}
    for work in QUICK if options.quick else [named[name] for name in options.works.split(";")]:
        runs = {Config(work.name, *key): run for key, run in runs_of(work, peers, device).items()}
        results = measure(runs, device, options.rounds, clock=clock)
        for direction in ("forward", "forward and backward"):
            found = [results[Config(work.name, peer, direction)] for peer in peers]
            rows.append([work.name, direction, *(f"{r.median * 1e3:.0f}" if not r.note else r.note for r in found)])
            failed = failed or any(r.failed for r in found if r.config.peer in ("direct", "provider"))
            if {"direct", "provider"} <= set(peers):
                ratios.append([work.name, direction, ratio(results, work.name, direction)])
        records += [r.record() for r in results.values()]
    where = environment(device)
    print(f"{where}\n\n{table(['work', 'direction', *(f'{p}, us' for p in peers)], rows)}")
    if ratios:
        print(f"\n{table(['work', 'direction', 'provider / direct'], ratios)}")
    write_json(options.json, {"environment": asdict(where), "results": records})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
