"""bench: time flexattn next to PyTorch on this machine, over a few works.

Runs are interleaved; the medians are printed, and each result is compared with flexattn's. PyTorch's flex_attention is
compiled by torch.compile first, which takes a while, so it is left out on a CPU unless --peers names it. SDPA gets a
dense mask where it has no argument for it, and is left out where it has none. A clone has more in benchmarks/.

    python -m flexattn bench
    python -m flexattn bench --shape 4,16,8192,128 --works causal,alibi
    python -m flexattn bench --peers flexattn,sdpa,torch_flex --backward
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as upstream

from flexattn.api import flex_attention
from flexattn.command_line.arguments import device_of, dtype_of, positive
from flexattn.command_line.named_mod import Shape, add_shape
from flexattn.errors import ArgumentError, message
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.mods import alibi, causal, document, sliding_window, softcap
from flexattn.process.frozen_class import frozen
from flexattn.tuning.search import sample

NAME = "bench"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_ON_CPU = Shape(B=1, Hq=4, Hkv=4, M=2048, N=2048, D=64)
_ON_GPU = Shape(B=4, Hq=16, Hkv=16, M=8192, N=8192, D=128)
_SAMPLE_MS = 20.0  # of one sample, at least
_TOLERANCE = {torch.float32: 1e-3}  # of the largest element; 3e-2 for other dtypes
_DENSE_MOST = 2**31  # bytes of SDPA's dense mask


@frozen
class Work:
    """The mods of a call."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    is_causal: bool = False  # SDPA's own argument says the same


def _documents(shape: Shape, device: torch.device) -> Work:
    return Work(mask_mod=document(torch.arange(shape.N, device=device) * 8 // shape.N))


WORKS: dict[str, Callable[[Shape, torch.device], Work]] = {
    "full": lambda shape, device: Work(),
    "causal": lambda shape, device: Work(mask_mod=causal, is_causal=shape.M == shape.N),
    "window": lambda shape, device: Work(mask_mod=sliding_window(shape.N // 8)),
    "documents": _documents,
    "alibi": lambda shape, device: Work(alibi(shape.Hq), causal),
    "softcap": lambda shape, device: Work(softcap(30.0), causal),
}


class NotApplicable(Exception):
    """A peer does not compute this work."""


def _flexattn(work: Work, shape: Shape, device: torch.device) -> Attend:
    mask = None
    if work.mask_mod is not None:
        mask = create_block_mask(work.mask_mod, None, None, shape.M, shape.N, device=device)
    grouped = shape.Hq != shape.Hkv
    return lambda q, k, v: flex_attention(q, k, v, work.score_mod, mask, enable_gqa=grouped)


def _torch_flex(work: Work, shape: Shape, device: torch.device) -> Attend:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled = torch.compile(upstream.flex_attention, dynamic=False)
    mask = None
    if work.mask_mod is not None:
        mask = upstream.create_block_mask(work.mask_mod, None, None, shape.M, shape.N, device=str(device))
    return lambda q, k, v: compiled(q, k, v, work.score_mod, mask, enable_gqa=shape.Hq != shape.Hkv)


def _sdpa(work: Work, shape: Shape, device: torch.device) -> Attend:
    if work.score_mod is not None:
        raise NotApplicable("SDPA has no score_mod")
    dense = None
    if work.mask_mod is not None and not work.is_causal:
        if shape.M * shape.N > _DENSE_MOST:
            raise NotApplicable("SDPA's dense mask would be too large")
        dense = create_mask(work.mask_mod, 1, 1, shape.M, shape.N, device=device)
    grouped = shape.Hq != shape.Hkv
    return lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, is_causal=work.is_causal, enable_gqa=grouped
    )


PEERS: dict[str, Callable[[Work, Shape, torch.device], Attend]] = {
    "flexattn": _flexattn, "sdpa": _sdpa, "torch_flex": _torch_flex,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what bench takes."""
    add_shape(parser, None)
    parser.add_argument("--works", default=",".join(WORKS), help=f"a list of {', '.join(WORKS)}")
    parser.add_argument("--peers", help=f"a list of {', '.join(PEERS)}")
    parser.add_argument("--dtype", type=dtype_of, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", type=device_of, help="default: cuda if there is a GPU")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--rounds", type=positive, default=5, help="samples of each run (default: 5)")


def run(chosen: argparse.Namespace) -> int:
    """Print a line for each work. Return 1 if a peer's result differs from flexattn's, or if flexattn fails."""
    device = chosen.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    shape = chosen.shape or (_ON_GPU if on_gpu else _ON_CPU)
    dtype = chosen.dtype or (torch.bfloat16 if on_gpu else torch.float32)
    peers = _chosen("peers", chosen.peers or ("flexattn,sdpa,torch_flex" if on_gpu else "flexattn,sdpa"), PEERS)
    works = _chosen("works", chosen.works, WORKS)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    what = "forward and backward" if chosen.backward else "forward"
    print(f"{name}; torch {torch.__version__}; {shape}, {str(dtype)[6:]}; {what}, median of {chosen.rounds}, ms")
    print("In parentheses: how many times as fast flexattn is.")
    print("  ".join([f"{'':10}", *(f"{peer:>22}" for peer in peers)]))
    failed = False
    for work in works:
        cells = cells_of(WORKS[work](shape, device), peers, shape, dtype, device, chosen.backward, chosen.rounds)
        failed |= any(cell.startswith(("error", "WRONG")) for cell in cells)
        print("  ".join([f"{work:10}", *(f"{cell:>22}" for cell in cells)]), flush=True)
    return int(failed)


def _chosen(argument: str, text: str, table: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in table:
            fix = f"Write --{argument} {','.join(table)}, or a part of it."
            raise ArgumentError(message(argument, repr(name), f"one of {', '.join(table)}", fix))
    return names


def cells_of(
    work: Work, peers: list[str], shape: Shape, dtype: torch.dtype, device: torch.device, backward: bool, rounds: int
) -> list[str]:
    """Return what is printed of each peer: its time, and how many times flexattn is as fast."""
    inputs = _inputs(shape, dtype, device, backward)
    d_out = torch.ones(shape.B, shape.Hq, shape.M, shape.D, dtype=dtype, device=device)
    exact = _flexattn(work, shape, device)(*inputs).detach()
    runs: dict[str, Callable[[], object]] = {}
    notes: dict[str, str] = {}
    for peer in peers:
        try:
            attend = PEERS[peer](work, shape, device)
            notes |= {} if (note := _difference(attend(*inputs).detach(), exact)) is None else {peer: note}
            runs[peer] = _timed(attend, inputs, d_out, backward)
            runs[peer]()
        except (NotApplicable, NotImplementedError) as reason:
            notes[peer] = f"n/a: {str(reason).splitlines()[0][:60]}"
        except Exception as error:  # a peer that fails must not lose the others
            notes[peer] = f"error: {type(error).__name__}"
    runs = {peer: run for peer, run in runs.items() if peer not in notes}
    launches = {peer: max(1, int(_SAMPLE_MS / max(sample(run, 1, device), 1e-3))) for peer, run in runs.items()}
    times: dict[str, list[float]] = {peer: [] for peer in runs}
    for _ in range(rounds):
        for peer, timed in runs.items():
            times[peer].append(sample(timed, launches[peer], device))
    medians = {peer: statistics.median(found) for peer, found in times.items()}
    own = medians.get("flexattn")
    return [
        notes[peer] if peer in notes else _cell(medians[peer], None if peer == "flexattn" else own) for peer in peers
    ]


def _cell(milliseconds: float, own: float | None) -> str:
    return f"{milliseconds:.2f}" + ("" if own is None else f" ({milliseconds / own:.2f}x)")


def _inputs(shape: Shape, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Tensor]:
    heads = ((shape.Hq, shape.M), (shape.Hkv, shape.N), (shape.Hkv, shape.N))
    made = [torch.randn(shape.B, h, length, shape.D, dtype=dtype, device=device) for h, length in heads]
    return [x.requires_grad_(backward) for x in made]


def _timed(attend: Attend, inputs: list[Tensor], d_out: Tensor, backward: bool) -> Callable[[], object]:
    if backward:
        return lambda: torch.autograd.grad(attend(*inputs), inputs, d_out)

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    return forward


def _difference(found: Tensor, exact: Tensor) -> str | None:
    """Return a note if two results differ by more than rounding."""
    allowed = _TOLERANCE.get(found.dtype, 3e-2) * float(exact.abs().max())
    error = float((found - exact).abs().max())
    return None if error <= allowed else f"WRONG: differs by {error:.1e}"
