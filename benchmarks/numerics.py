"""Errors relative to float64: of flexattn, of a dense computation in the same dtype, and of PyTorch's SDPA.

`python -m benchmarks.numerics --device cpu` prints markdown tables. Both error figures, rms and maximum, are relative
to the root mean square of the exact result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flexattn
from benchmarks.harness import environment, one_line, write_json
from benchmarks.works import WORKS, Inputs, Mod, Mods, Work, make_inputs
from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention
from flexattn.machine.target import target_of
from flexattn.reference import attention
from flexattn.runtime.compile_processes import build_apart

NAMES, EVERYONE = ("out", "lse", "dq", "dk", "dv"), ("flexattn", "dense", "sdpa")
OF = {"causal": "causal_d128", "softcap": "softcap", "alibi": "alibi", "documents": "documents_16k"}
COMPILE_SECONDS = 120.0
HEADS = 2


@dataclass(frozen=True)
class Engine:
    """The engine and dtype of a computation; `products` is the precision of float32 products."""

    name: str
    dtype: torch.dtype
    options: tuple[tuple[str, object], ...] = ()
    products: str = ""

    def __str__(self) -> str:
        return f"{self.products or str(self.dtype).removeprefix('torch.')}, {self.name}"


_TRITON, _HOPPER = (("BACKEND", "TRITON"),), (("BACKEND", "HOPPER"),)
_HALVES = (torch.float16, torch.bfloat16)
ENGINES = {
    "cpu": tuple(Engine("cpu", dtype) for dtype in (torch.float64, torch.float32, *_HALVES)),
    # Without bfloat16, which the interpreter computes wrong. Its products are those of numpy.
    "interpreter": tuple(Engine("triton, interpreted", dtype, _TRITON) for dtype in (torch.float32, torch.float16)),
    "cuda": (
        Engine("triton", torch.float32, (*_TRITON, ("FLOAT32_PRECISION", "ieee"))),
        Engine("triton", torch.float32, (*_TRITON, ("FLOAT32_PRECISION", "tf32")), "tf32"),
        *(Engine("triton", dtype, _TRITON) for dtype in _HALVES),
        *(Engine("hopper", dtype, _HOPPER) for dtype in _HALVES),
    ),
}

Results = tuple[Tensor | None, ...]  # as NAMES


@dataclass(frozen=True)
class Errors:
    """Errors of one result, relative to the root mean square of the exact result."""

    rmse: float
    largest: float


@dataclass(frozen=True)
class Row:
    """The errors of one workload on one engine, by implementation and result."""

    work: str
    length: int
    engine: str
    errors: dict[str, dict[str, Errors]]  # by implementation, by result
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A workload with its tensors on one engine."""

    name: str
    work: Work
    engine: Engine
    mods: Mods
    inputs: Inputs

    @property
    def block_mask(self) -> BlockMask:
        length, device = self.work.length, self.inputs.query.device
        return create_block_mask(self.mods.mask_mod, None, None, length, length, device=device)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=list(ENGINES), help="interpreter: TRITON_INTERPRET=1")
    parser.add_argument("--works", default=",".join(OF))
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--invariant", action="store_true", help='with kernel_options={"BATCH_INVARIANT": True}')
    parser.add_argument(
        "--precompile", type=int, default=max(1, min(14, len(os.sched_getaffinity(0)) - 1)), metavar="N"
    )
    parser.add_argument("--label", default="", help="text to keep with the results")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return every workload at every length on every engine of the device."""
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    extra = (("BATCH_INVARIANT", True),) if options.invariant else ()
    cases = []
    for name in options.works.split(","):
        for length in map(int, options.lengths.split(",")):
            work = replace(WORKS[OF[name]], batch=1, heads=HEADS, length=length, head_dim=options.head_dim)
            for engine in ENGINES[options.device]:
                if engine.name == "hopper" and torch.cuda.get_device_capability()[0] != 9:
                    continue
                engine = replace(engine, options=(*engine.options, *extra))
                inputs = make_inputs(work, device, engine.dtype)
                if engine.dtype == torch.float64:  # not drawn in float32, which would make products exact
                    inputs = replace(inputs, **{n: _wide(getattr(inputs, n)) for n in ("query", "key", "value")})
                cases.append(Case(name, work, engine, work.mods(work, device), inputs))
    return cases


def _wide(x: Tensor) -> Tensor:
    return (x.detach() / 3.0).requires_grad_()


def precompile(cases: Sequence[Case], processes: int) -> None:
    """Compile the kernels of all cases in parallel. Failures are reported where the kernel is called."""
    sources = []
    for case in cases:
        with contextlib.suppress(flexattn.FlexAttentionError):
            made = flexattn.explain(
                *case.inputs.qkv, case.mods.score_mod, case.block_mask, kernel_options=dict(case.engine.options)
            )
            sources += made.sources
    build_apart(sources, target_of(torch.device("cuda")), processes, COMPILE_SECONDS)


def ours(case: Case) -> Results:
    leaves = _leaves(case.inputs)
    out, aux = flex_attention(
        *leaves, case.mods.score_mod, case.block_mask, kernel_options=dict(case.engine.options),
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return _with_gradients(out, aux.lse, leaves, case.inputs.d_out)


def dense(case: Case, dtype: torch.dtype | None) -> Results:
    """Compute head by head, so that only one [S, S] tensor of each step is in memory."""
    heads = [_dense_head(case, head, dtype) for head in range(case.work.heads)]
    return tuple(torch.cat([h[i] for h in heads], 1) for i in range(len(NAMES)))


def _dense_head(case: Case, head: int, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    part = slice(head, head + 1)
    leaves = [x.detach()[:, part].to(dtype or x.dtype).requires_grad_() for x in case.inputs.qkv]
    out, lse = attention(*leaves, _of_head(case.mods.score_mod, head), case.mods.mask_mod, dtype=dtype)
    return _with_gradients(out, lse, leaves, case.inputs.d_out[:, part])


def _of_head(score_mod: Mod | None, head: int) -> Mod | None:
    if score_mod is None:
        return None
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h + head, q_idx, kv_idx)


def sdpa(case: Case) -> Results | None:
    """Return PyTorch's results, or None if it does not support the workload. It does not return lse."""
    if case.name not in ("causal", "documents"):
        return None
    leaves, mask = _leaves(case.inputs), None
    if case.name == "documents" and case.mods.mask_mod is not None:
        places = torch.arange(case.work.length, device=leaves[0].device)
        zero = torch.zeros((), dtype=torch.int32, device=leaves[0].device)
        mask = case.mods.mask_mod(zero, zero, places[:, None], places[None, :])
    out = scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=mask is None)
    return _with_gradients(out, None, leaves, case.inputs.d_out)


def _leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs.qkv]


def _with_gradients(out: Tensor, lse: Tensor | None, leaves: Sequence[Tensor], d_out: Tensor) -> Results:
    grads = torch.autograd.grad(out, leaves, d_out.to(out.dtype))
    return out.detach(), None if lse is None else lse.detach(), *grads


def errors_of(got: Results, exact: Results) -> dict[str, Errors]:
    found = {}
    for name, x, y in zip(NAMES, got, exact, strict=True):
        if x is not None and y is not None:
            error, size = (x.double() - y).abs(), float(y.square().mean().sqrt())
            found[name] = Errors(float(error.square().mean().sqrt()) / size, float(error.max()) / size)
    return found


@contextlib.contextmanager
def products_of(engine: Engine) -> Iterator[None]:
    """Set the precision of PyTorch's float32 products to that of the engine."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = engine.products == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measure(case: Case) -> Row:
    """Return the errors of a case, or a note with the reason if there are none."""
    row = Row(case.name, case.work.length, str(case.engine), {})
    everyone: tuple[Callable[[Case], Results | None], ...] = (ours, lambda case: dense(case, None), sdpa)
    try:
        exact = dense(case, torch.float64)
        with products_of(case.engine):
            for who, compute in zip(EVERYONE, everyone, strict=True):
                got = None if who == "dense" and case.engine.dtype == torch.float64 else compute(case)
                if got is not None:
                    row.errors[who] = errors_of(got, exact)
    except Exception as error:  # a failing case must not lose the others
        return replace(row, note=f"error: {one_line(error)}")
    return row


def markdown(rows: Sequence[Row], field: str) -> str:
    """Return a markdown table. Cells are flexattn / dense / SDPA, with a dash if one did not compute it."""
    lines = [f"| work, length | dtype, engine | {' | '.join(NAMES)} |", f"|{'---|' * (2 + len(NAMES))}"]
    for row in rows:
        cells = [row.note or _cell(row, name, field) for name in NAMES]
        lines.append(f"| {row.work} {row.length} | {row.engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row, name: str, field: str) -> str:
    found = [row.errors.get(who, {}).get(name) for who in EVERYONE]
    return " / ".join("-" if errors is None else f"{getattr(errors, field):.1e}" for errors in found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON file. Return 1 if anything failed."""
    options = parse(argv)
    device = torch.device("cuda" if options.device == "cuda" else "cpu")
    cases = make_cases(options)
    if device.type == "cuda":
        precompile(cases, options.precompile)
    rows = [measure(case) for case in cases]
    where = environment(device, options.label)
    print(f"{where}\nD {options.head_dim}, {HEADS} heads, flexattn / dense in the same dtype / SDPA\n")
    for title, field in (("Relative rmse", "rmse"), ("Largest error as a part of the result's rms", "largest")):
        print(f"{title}\n\n{markdown(rows, field)}\n")
    write_json(options.json, {"environment": asdict(where), "rows": [asdict(row) for row in rows]})
    failed = [f"{row.work} {row.length} {row.engine}: {row.note}" for row in rows if row.note]
    if failed:
        print(f"FAILED: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
