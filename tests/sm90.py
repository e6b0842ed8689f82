"""What an sm_90 binary is made of, found without a GPU: ptxas' own report and a count of the machine instructions.

`warnings` holds ptxas' C75xx lines (wgmma serialised, setmaxnreg ignored), which Triton hides and which cost half the
speed. A good Hopper kernel has none, spills nothing, and has HGMMA instructions.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from flexattn.compile.kernel_source import KernelSource
from flexattn.machine import triton_versions
from flexattn.machine.target import Target
from flexattn.runtime.build import Kernel, build

SM90 = Target("cuda", 90, 32)
INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA",  # warpgroup matrix product
    "HMMA": r"\bHMMA",  # warp matrix product
    "EX2": r"\bMUFU\.EX2",
    "TANH": r"\bMUFU\.TANH",
    "I2F": r"\bI2F",
    "BAR": r"\bBAR\.S",
    "LDGSTS": r"\bLDGSTS",  # asynchronous copy to shared memory
    "UTMALDG": r"\bUTMALDG",  # TMA load
    "LDL": r"\bLDL",  # spilled registers, read
    "STL": r"\bSTL",  # and written
}


@dataclass(frozen=True)
class Report:
    registers: int  # per thread
    spill_bytes: int  # stores and loads
    shared_bytes: int
    warnings: tuple[str, ...]
    sass: dict[str, int]  # how often each of INSTRUCTIONS occurs
    sass_text: str = field(repr=False)


def report(kernel: Kernel | KernelSource, target: Target = SM90) -> Report:
    """Say what the assembler made of a kernel, which is built for sm_90 first if it is a source."""
    log = ""
    if isinstance(kernel, KernelSource):
        kernel, log = _build(kernel, target)
    log = log or _assemble(kernel)
    sass = _run("cuobjdump", "-sass", str(kernel.path.with_suffix(".cubin"))).stdout
    return Report(
        registers=max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        shared_bytes=kernel.shared,
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(r"C75\d\d", line)),
        sass={name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()},
        sass_text=sass,
    )


def _build(source: KernelSource, target: Target) -> tuple[Kernel, str]:
    """Build a kernel; return also what ptxas said, "" where it was built before."""
    from triton import knobs

    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        kernel = build(source, target)
    return kernel, printed.getvalue()


def _assemble(kernel: Kernel) -> str:
    architecture = f"sm_{kernel.target.arch}" + ("a" if int(kernel.target.arch) >= 90 else "")
    return _run(
        "ptxas", "-v", f"--gpu-name={architecture}", str(kernel.path.with_suffix(".ptx")), "-o", "/dev/null"
    ).stderr


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([triton_versions.nvidia_tool(tool), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{Path(tool).name}: {done.stderr[-2000:]}"
    return done
