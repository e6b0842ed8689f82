"""Tiles of the Triton kernels, measured on this GPU: `python -m benchmarks.tune --dims 64,192:128 --kinds none,adds`.

Each case is a causal call of one head dim, dtype and kind of score_mod, tuned by `flexattn.tune`. The results are
printed. `--write` stores them in the package's table, `--remember` in this machine's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import flexattn
from benchmarks.attention import DTYPES
from benchmarks.harness import environment, one_line, table, write_json
from benchmarks.works import WORKS, Work, make_inputs
from flexattn.compile.tile_choice import MEASURED, with_measured
from flexattn.machine.triton_versions import is_interpreting
from flexattn.tuning.report import KernelTuning, Trial, Tuning
from flexattn.tuning.search import TUNED

# The workload whose mods represent a kind of score_mod. Unaligned rows are those of wider tensors.
KINDS = {
    "none": "causal_d128",
    "transforms": "softcap",
    "adds": "alibi",
    "gathers": "relative_bias",
    "unaligned": "causal_d128",
}


@dataclass(frozen=True)
class Case:
    """The subject of one tuning."""

    work: Work
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"{self.work.shape} {self.dtype} {self.kind}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--dims", default="64,128,192:128,256", help="comma-separated D, or D:Dv")
    parser.add_argument("--dtypes", default="bfloat16", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--kinds", default="none", help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--kernels", default=",".join(TUNED))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: the interpreter")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precompile", type=int, default=8, metavar="N", help="compile in N processes side by side")
    parser.add_argument("--precompile-seconds", type=float, default=240.0, help="limit of that for each case")
    parser.add_argument("--write", action="store_true", help="put the best tiles into the package's table")
    parser.add_argument("--remember", action="store_true", help="put them into this machine's table")
    parser.add_argument("--quick", action="store_true", help="a tiny shape and one round: does it run at all")
    parser.add_argument("--label", default="", help="text to keep with the results")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the cases selected by the options. Unknown names end the program."""
    cases = []
    for dims in options.dims.split(","):
        D, _, Dv = dims.partition(":")
        for dtype in _names(options.dtypes, DTYPES, "--dtypes"):
            for kind in _names(options.kinds, KINDS, "--kinds"):
                sizes = {"batch": options.batch, "heads": options.heads, "length": options.length}
                work = replace(WORKS[KINDS[kind]], head_dim=int(D), value_dim=int(Dv or D), **sizes)
                small = {"batch": 1, "heads": 1, "length": 32} if options.quick else {}
                cases.append(Case(replace(work, **small), dtype, kind))
    return cases


def _names(text: str, known: Sequence[str] | Mapping[str, object], flag: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{flag}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def tune(case: Case, options: argparse.Namespace) -> Tuning:
    """Tune the kernels of one case."""
    device, work = torch.device(options.device), case.work
    kernels = _names(options.kernels, TUNED, "--kernels")
    inputs = make_inputs(work, device, DTYPES[case.dtype], grad=any(kernel != "forward" for kernel in kernels))
    query, key, value = (_unaligned(x) if case.kind == "unaligned" else x for x in inputs.qkv)
    mods = work.mods(work, device)
    mask = flexattn.create_block_mask(mods.mask_mod, None, None, work.length, work.length, device=device)
    return flexattn.tune(
        query, key, value, mods.score_mod, mask,
        kernel_options={"BACKEND": "TRITON"}, kernels=kernels, seconds=options.precompile_seconds,
        processes=options.precompile, rounds=1 if options.quick else options.rounds, remember=options.remember,
    )  # fmt: skip


def _unaligned(x: Tensor) -> Tensor:
    """Return the tensor with its rows one element further apart."""
    return torch.nn.functional.pad(x.detach(), (0, 1))[..., :-1].requires_grad_(x.requires_grad)


def summary(tunings: Sequence[KernelTuning]) -> str:
    """Return one line per kernel: the current tile and the best one."""
    rows = []
    for t in tunings:
        dims = f"{t.key.D}/{t.key.Dv}" if t.key.Dv != t.key.D else f"{t.key.D}"
        what = [t.key.kernel, t.key.dtype, dims, t.key.kind]
        rows.append([*what, *_columns(t.trials[0]), *_columns(t.best), f"{t.gain:.2f}x"])
    headers = ["kernel", "dtype", "D", "kind", "in use", "ms", "min..max", "best", "ms", "min..max", "gain"]
    return table(headers, rows)


def _columns(trial: Trial) -> tuple[str, str, str]:
    return str(trial.tile), f"{trial.median:.3f}", f"{min(trial.milliseconds):.3f}..{max(trial.milliseconds):.3f}"


def tune_all(cases: Sequence[Case], run: Callable[[Case], Tuning]) -> tuple[list[Tuning], dict[str, str]]:
    """Tune every case and print the measurements. A failing case becomes a note; the others continue."""
    tunings, notes = [], {}
    for case in cases:
        try:
            tunings.append(run(case))
        except Exception as error:
            notes[str(case)] = f"error: {one_line(error)}"
        print(f"{case}: {notes.get(str(case)) or tunings[-1]}\n", flush=True)
    return tunings, notes


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, print, and write as requested. Return 1 if a case failed."""
    options = parse(argv)
    cases = cases_of(options)
    device = torch.device(options.device)
    if device.type == "cpu" and options.write:
        raise SystemExit("--write: what the interpreter takes says nothing of a GPU")
    if device.type == "cpu" and not is_interpreting():  # must be set before Triton is imported
        command = [sys.executable, "-m", "benchmarks.tune", *(sys.argv[1:] if argv is None else argv)]
        environ = {**os.environ, "TRITON_INTERPRET": "1"}
        return subprocess.run(command, env=environ, cwd=Path(__file__).parent.parent, check=False).returncode
    where = environment(device, options.label)
    print(f"{where}\n", flush=True)
    tunings, notes = tune_all(cases, lambda case: tune(case, options))
    kernels = [kernel for tuning in tunings for kernel in tuning.kernels]
    print(summary(kernels))
    record = {"environment": asdict(where), "tunings": [asdict(kernel) for kernel in kernels], "notes": notes}
    write_json(options.json, record)
    if options.write:
        MEASURED.write_text(with_measured(row for tuning in tunings for row in tuning.rows()))
        print(f"\nwritten to {MEASURED}")
    if notes:
        print(f"\nFAILED: {'; '.join(f'{case}: {note}' for case, note in notes.items())}")
    return 1 if notes else 0


if __name__ == "__main__":
    sys.exit(main())
