"""Compiles on CPUs what tests/test_gpu.py runs: `python kernel_warmup.py ARCH PART PARTS`, several at once.

The very calls of the tests are made on CPU tensors with launches left out, and nothing that comes of them is compared:
Python runs with -O. What is missed here is compiled in the test.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import kernel_checks
import torch
from emulation import kernels_loaded_by
from kernel_cases import CASES, Setting, results
from kernel_checks import CHECKS
from kernel_ops import check_row, rows

import flexattn
from flexattn import api
from flexattn.machine.target import Target
from flexattn.runtime import launch

SIZE = {"size": 7, "block": 4}
EXACT = (("EXACT", True),)
BF16 = Setting("cuda", torch.bfloat16, **SIZE)
FP16 = Setting("cuda", torch.float16, **SIZE, options=EXACT)
FP32 = Setting("cuda", torch.float32, **SIZE, options=(*EXACT, ("FLOAT32_PRECISION", "ieee")))
TF32 = Setting("cuda", torch.float32, **SIZE, options=(*EXACT, ("FLOAT32_PRECISION", "tf32")))
# Every case in bfloat16, but scores without a mask in float16; some in the others.
_SOME = (
    "plain",
    "score-relative",
    "score-softcap",
    "score-views",
    "mask_alone-document",
    "mask-per_head",
    "layout-window",
)
_FEW = (*_SOME, "dims-1x1", "dims-72x16", "dims-192x128", "block-100", "lists", "scale-0.7-None", "scale0.0-alibi")
RUNS: list[tuple[str, Setting]] = [
    *((name, FP16 if name.startswith("unmasked") else BF16) for name in CASES),
    *((name, FP16) for name in CASES if name.startswith(("dims", *_FEW))),
    *((name, FP32) for name in CASES if name.startswith(_FEW)),
    *((name, TF32) for name in CASES if name.startswith(_SOME)),
]


def warm_up(arch: int, processes: int) -> None:
    """Run this file `processes` times, each on its part."""
    command = [sys.executable, "-O", __file__, str(arch)]
    path = os.pathsep.join(filter(None, (str(Path(flexattn.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen([*command, str(part), str(processes)], env=environment, stdout=subprocess.DEVNULL)
        for part in range(processes)
    ]
    for process in started:
        process.wait()


@contextlib.contextmanager
def compiling_only(arch: int) -> Iterator[None]:
    """Let every launch on CPU tensors compile for `arch` and do nothing."""
    target = Target("cuda", arch, 32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels_loaded_by(lambda request, files: lambda programs, stream, arguments: None))
        for owner, name, value in (
            (launch, "target_of", lambda device: target),
            (api.triton, "target_of", lambda device: target),
            (launch.Launch, "__call__", lambda self, problem, tensors: None),
            (api, "engine_of", lambda problem: api.triton),
            (kernel_checks, "check", lambda call, loose=False: results(call, "ours")),
            (kernel_checks, "assert_near", lambda *a: None),
            (torch.testing, "assert_close", lambda *a, **k: None),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        yield


def main(arch: int, part: int, parts: int) -> None:
    torch.set_num_threads(1)
    jobs = [
        *(("case", run) for run in RUNS),
        *(("row", row) for row in rows()),
        *(("check", (check, at)) for check in CHECKS for at in (BF16, FP16)),
    ]
    with compiling_only(arch):
        for kind, job in jobs[part::parts]:
            with contextlib.suppress(Exception):
                if kind == "case":
                    name, at = job
                    results(CASES[name](_on_cpu(at)), "ours")
                elif kind == "row":
                    check_row(*job, "cpu")
                else:
                    run_check, at = job
                    run_check(_on_cpu(at))


def _on_cpu(at: Setting) -> Setting:
    return Setting("cpu", at.dtype, at.size, at.block, at.options)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
