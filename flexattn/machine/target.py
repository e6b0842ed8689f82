"""Target: the machine that kernels are compiled for, and what the plan must know of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

# Bytes of shared memory that one program can have (CUDA C++ Programming Guide, technical specifications).
_SHARED_MEMORY = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376,
    121: 101376,
}  # fmt: skip
# The same of AMD's, where it is not 64 KB (the LDS of a workgroup, CDNA 4 instruction set architecture).
_LDS = {"gfx950": 163840}
_AMD_PRECISIONS = {"gfx942": ("ieee", "tf32")}  # its XF32; other cards have none
# What Triton computes products with, by generation; all later ones have those of warps.
_MATRIX_UNITS = {7: "fma", 8: "mma", 9: "wgmma", 10: "tcgen05"}


@dataclass(frozen=True)
class Target:
    """Where a kernel runs: the interpreter's architecture is 0."""

    backend: str  # "cuda" | "hip" | "interpreter"
    arch: int | str
    warp_size: int

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a plan may use."""
        if self.backend == "cuda":
            return _SHARED_MEMORY.get(int(self.arch), 101376)
        return _LDS.get(str(self.arch), 65536) if self.backend == "hip" else 1 << 30

    @property
    def matrix_units(self) -> str:
        """What Triton computes products with, at best: fma (none), mma, wgmma, tcgen05 or mfma."""
        if self.backend == "cuda":
            return _MATRIX_UNITS.get(int(self.arch) // 10, "mma")
        return "mfma" if self.backend == "hip" else "fma"

    @property
    def loads_ahead(self) -> bool:
        """Whether Triton loads tiles to shared memory some steps ahead."""
        return self.backend == "hip" or (self.backend == "cuda" and int(self.arch) >= 80)

    @property
    def loads_elements_ahead(self) -> bool:
        """Whether those loads may have less than 4 bytes each."""
        return self.backend == "hip" and self.arch != "gfx942"

    @property
    def precisions(self) -> tuple[str, ...]:
        """What float32 products may be computed in."""
        return _AMD_PRECISIONS.get(str(self.arch), ("ieee",)) if self.backend == "hip" else ("ieee", "tf32", "tf32x3")

    @property
    def pipelines_both_rows(self) -> bool:
        """Whether Triton loads both lse and delta ahead, and not only one of them: its newer pipeliner."""
        return self.backend == "cuda" and int(self.arch) >= 100

    def __str__(self) -> str:
        return {"cuda": f"sm_{self.arch}", "hip": str(self.arch)}.get(self.backend, self.backend)


def named(name: str) -> Target | None:
    """Return the target of an architecture as CUDA and HIP write it (sm_90, gfx942), None where it is none."""
    if match := re.fullmatch(r"sm_?(\d+)a?", name):
        return Target("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx(\d+)[0-9a-f]{2}", name):
        return Target("hip", name, 32 if int(match[1]) >= 10 else 64)  # RDNA has waves of 32
    return None


INTERPRETER = Target("interpreter", 0, 1)


@lru_cache(64)
def target_of(device: torch.device) -> Target:
    """Return the target of a device: a CPU stands for Triton's interpreter."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return named(name) or Target("hip", name, properties.warp_size)
    return Target("cuda", properties.major * 10 + properties.minor, 32)


@lru_cache(64)
def l2_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache, for the order of work."""
    if device.type == "cpu":
        return 1 << 25
    return torch.cuda.get_device_properties(device).L2_cache_size


@lru_cache(64)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
