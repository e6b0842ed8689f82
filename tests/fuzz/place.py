"""Where mods are made: the device, the sizes of a call, and its random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """What a mod may depend on; tensors and numbers are drawn one after the other."""

    device: str
    B: int
    H: int
    M: int
    N: int
    generator: torch.Generator
    random: random.Random

    @property
    def longest(self) -> int:
        """The positions that an index of either side may have."""
        return max(self.M, self.N)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def documents(self, *shape: int) -> Tensor:
        """Return ids that ascend along the last axis."""
        return self.integers(max(2, shape[-1] // 20), *shape).sort().values.int()


def make_place(device: str, sizes: tuple[int, int, int, int], numbers: int, tensors: int) -> Place:
    """Return a place for sizes (B, H, M, N) and two seeds."""
    return Place(device, *sizes, torch.Generator().manual_seed(tensors), random.Random(numbers))
