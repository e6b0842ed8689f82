"""Target: the machine that kernels are compiled for, and what the plan must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Bytes of shared memory that one program can have (CUDA C++ Programming Guide, technical specifications).
_SHARED_MEMORY = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376,
    121: 101376,
}  # fmt: skip


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
        return 65536 if self.backend == "hip" else 1 << 30

    def __str__(self) -> str:
        return {"cuda": f"sm_{self.arch}", "hip": str(self.arch)}.get(self.backend, self.backend)


INTERPRETER = Target("interpreter", 0, 1)


@lru_cache(64)
def target_of(device: torch.device) -> Target:
    """Return the target of a device: a CPU stands for Triton's interpreter."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], 64)
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
