"""Target: the device that kernels are compiled for, and its properties that the plan needs."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from flexattn.process.frozen_class import frozen

# Bytes of shared memory per program (CUDA C++ Programming Guide, technical specifications).
_SHARED_MEMORY = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376,
    121: 101376,
}  # fmt: skip
# The same for AMD GPUs, if it is not 64 KB (LDS of a workgroup, CDNA 4 instruction set architecture).
_LDS = {"gfx950": 163840}
_AMD_PRECISIONS = {"gfx942": ("ieee", "tf32")}  # its XF32; other AMD GPUs have none
# The units that Triton computes products with, by generation. Later generations use mma.
_MATRIX_UNITS = {7: "fma", 8: "mma", 9: "wgmma", 10: "tcgen05"}


@frozen
class Target:
    """Where a kernel runs. The interpreter has architecture 0."""

    backend: str  # "cuda" | "hip" | "interpreter"
    arch: int | str
    warp_size: int

    @property
    def is_hopper(self) -> bool:
        return self.backend == "cuda" and self.arch == 90

    @property
    def is_interpreter(self) -> bool:
        return self.backend == "interpreter"

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a plan may use."""
        if self.backend == "cuda":
            return _SHARED_MEMORY.get(int(self.arch), 101376)
        return _LDS.get(str(self.arch), 65536) if self.backend == "hip" else 1 << 30

    @property
    def matrix_units(self) -> str:
        """The best units that Triton computes products with: fma (none), mma, wgmma, tcgen05 or mfma."""
        if self.backend == "cuda":
            return _MATRIX_UNITS.get(int(self.arch) // 10, "mma")
        return "mfma" if self.backend == "hip" else "fma"

    @property
    def loads_ahead(self) -> bool:
        """Whether Triton prefetches tiles to shared memory."""
        return self.backend == "hip" or (self.backend == "cuda" and int(self.arch) >= 80)

    @property
    def loads_elements_ahead(self) -> bool:
        """Whether these loads may be narrower than 4 bytes."""
        return self.backend == "hip" and self.arch != "gfx942"

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions in which float32 products can be computed."""
        return _AMD_PRECISIONS.get(str(self.arch), ("ieee",)) if self.backend == "hip" else ("ieee", "tf32", "tf32x3")

    @property
    def pipelines_both_rows(self) -> bool:
        """Whether Triton prefetches both lse and delta, and not only one of them (its newer pipeliner)."""
        return self.backend == "cuda" and int(self.arch) >= 100

    def __str__(self) -> str:
        return {"cuda": f"sm_{self.arch}", "hip": str(self.arch)}.get(self.backend, self.backend)


NAMES = (*(f"sm_{arch}" for arch in _SHARED_MEMORY), "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")  # examples
_GENERATIONS = {"sm": range(7, 13), "gfx": range(9, 13)}  # architectures of later ones may differ in anything


def named(name: str) -> Target | None:
    """Return the target of an architecture named as in CUDA and HIP (sm_90, gfx942), or None.

    Architectures that are not in NAMES are accepted if their generation is known: sm_101 like sm_100.
    """
    if (match := re.fullmatch(r"sm_?(\d+)\d[af]?", name)) and int(match[1]) in _GENERATIONS["sm"]:
        return Target("cuda", int(re.sub(r"\D", "", name)), 32)
    if (match := re.fullmatch(r"gfx(\d+)[0-9a-f]{2}", name)) and int(match[1]) in _GENERATIONS["gfx"]:
        return Target("hip", name, 32 if int(match[1]) >= 10 else 64)  # RDNA has 32-lane waves
    return None


INTERPRETER = Target("interpreter", 0, 1)


@lru_cache(64)
def target_of(device: torch.device) -> Target:
    """Return the target of a device. A CPU means Triton's interpreter."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return named(name) or Target("hip", name, properties.warp_size)
    return Target("cuda", properties.major * 10 + properties.minor, 32)


@lru_cache(64)
def l2_bytes(device: torch.device) -> int:
    """Return the size of the device's L2 cache, which determines the order of work."""
    if device.type == "cpu":
        return 1 << 25
    return torch.cuda.get_device_properties(device).L2_cache_size


@lru_cache(64)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
