"""The types of the two kinds of mods, and names for mods made by factories."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q_idx, kv_idx) -> bool
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, q_idx, kv_idx) -> score

Mod = TypeVar("Mod", MaskMod, ScoreMod)


def named(mod: Mod, name: str) -> Mod:
    """Give a closure a descriptive name, which graphs, masks and kernels show."""
    mod.__name__ = mod.__qualname__ = name
    return mod
