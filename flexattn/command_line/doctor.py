"""doctor: print versions, the GPU, which engines work here and why not, and the kernel cache.

Each engine computes one small call with its backward, which is compared with plain torch. On a GPU this may compile.

    python -m flexattn doctor
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flexattn
from flexattn import reference
from flexattn.api import flex_attention
from flexattn.command_line.kernel_cache import kept, shared_line
from flexattn.machine import triton_versions
from flexattn.machine.target import target_of
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import alibi, causal
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen

NAME = "doctor"
_LENGTH = 256
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@frozen
class Check:
    """An engine, and a small call that it computes."""

    engine: str
    device: Callable[[], str]
    dtype: torch.dtype
    backend: str  # kernel_options["BACKEND"]
    absent: Callable[[], str]  # why this machine has no such engine; "": it has


@frozen
class Finding:
    """What a check found."""

    engine: str
    text: str
    failed: bool = False


def _no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    built = torch.version.cuda or torch.version.hip
    return "torch finds no GPU" if built else f"torch finds no GPU; torch {torch.__version__} is built without CUDA"


def _no_triton() -> str:
    try:
        interpreting = triton_versions.is_interpreting()
    except ImportError:
        return "Triton is not installed"
    hint = ". TRITON_INTERPRET=1 runs its kernels on a CPU, slowly"
    return "" if interpreting else (reason + hint if (reason := _no_gpu()) else "")


def _no_hopper() -> str:
    if reason := _no_gpu() or _no_triton():
        return reason
    if not (target := target_of(torch.device("cuda"))).is_hopper:
        return f"the GPU is {target}, not sm_90"
    return "" if triton_versions.has_gluon() else f"Triton {triton_versions.version()} is not known to compile Gluon"


def _gpu() -> str:
    return "cuda"


def _gpu_or_interpreter() -> str:
    return "cpu" if triton_versions.is_interpreting() else "cuda"


CHECKS = (
    Check("cpu", lambda: "cpu", torch.float32, "AUTO", lambda: ""),
    Check("triton", _gpu_or_interpreter, torch.float16, "TRITON", _no_triton),
    Check("triton, Hopper kernels", _gpu, torch.bfloat16, "HOPPER", _no_hopper),
    Check("gpu_float64", _gpu, torch.float64, "AUTO", _no_gpu),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """doctor has no arguments."""


def run(chosen: argparse.Namespace) -> int:
    """Print what was found. Return 1 if an engine of this machine does not work, or if no kernels can be kept."""
    cache, keeps = kept()
    for name, text in (*versions(), *hardware(), ("cache", cache), *shared(), *variables()):
        print(f"{name:<12}{text}")
    print("engines")
    findings = [examine(check) for check in CHECKS]
    for finding in findings:
        print(f"  {finding.engine:<24}{finding.text}")
    return int(not keeps or any(finding.failed for finding in findings))


def versions() -> list[tuple[str, str]]:
    """Return what is installed, by name."""
    try:
        triton = triton_versions.version()
    except ImportError:
        triton = "not installed: no kernels on a GPU"
    return [
        ("flexattn", f"{flexattn.__version__} in {Path(flexattn.__file__).parent}"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("triton", triton),
    ]


def hardware() -> list[tuple[str, str]]:
    """Return the GPUs and the C compiler."""
    gpus = [
        f"{torch.cuda.get_device_name(i)}, {target_of(torch.device('cuda', i))}, "
        f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    names = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    compiler = next(filter(None, (shutil.which(name) for name in names if name)), None)
    return [
        *(("gpu", text) for text in gpus or [_no_gpu()]),
        ("C compiler", compiler or "none: Triton needs one to launch kernels"),
    ]


def shared() -> list[tuple[str, str]]:
    """Return the shared cache directory, if there is one."""
    folder = settings().shared_cache_dir
    return [] if folder is None else [("shared", shared_line(folder))]


def variables() -> list[tuple[str, str]]:
    """Return the environment variables of flexattn that are set."""
    found = sorted(pair for pair in os.environ.items() if pair[0].startswith(("FLEXATTN_", "TRITON_INTERPRET")))
    return [("variable", f"{name}={value}") for name, value in found]


def examine(check: Check) -> Finding:
    """Compute the call of a check and compare it with plain torch."""
    if reason := check.absent():
        return Finding(check.engine, f"no: {reason}")
    start = time.perf_counter()
    try:
        error = error_of(check)
    except Exception as failure:  # whatever is wrong with a machine is what the user asks for
        first = next((line for line in str(failure).splitlines() if line.strip()), "no message")
        return Finding(check.engine, f"FAILS: {type(failure).__name__}: {first}", failed=True)
    seconds = time.perf_counter() - start
    if not error <= _TOLERANCE[check.dtype]:
        return Finding(check.engine, f"WRONG: largest error {error:.1e} against plain torch", failed=True)
    return Finding(check.engine, f"works: largest error {error:.1e} in {str(check.dtype)[6:]}, {seconds:.1f} s")


def error_of(check: Check) -> float:
    """Return the largest error of the output and the gradients of a small call."""
    device, length = check.device(), _LENGTH if check.device() == "cuda" else 64
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, length, 64, generator=generator).to(device, check.dtype) for _ in range(3)]
    d_out = torch.randn(1, 2, length, 64, generator=generator).to(device, check.dtype)
    mask = create_block_mask(causal, None, None, length, length, device=device)
    score_mod = alibi(2)
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = flex_attention(q, k, v, score_mod, mask, kernel_options={"BACKEND": check.backend})
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), d_out))
    query, key, value = (x.double().requires_grad_() for x in inputs)
    expected, _ = reference.attention(query, key, value, score_mod, causal)
    wanted = (expected.detach(), *torch.autograd.grad(expected, (query, key, value), d_out.double()))
    return max(float((x.double() - y).abs().max()) for x, y in zip(found, wanted, strict=True))
