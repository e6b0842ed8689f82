"""Sliding window: a query attends to the keys near it."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import checked_int
from flexattn.mods.kinds import MaskMod, named


def sliding_window(window: int, causal: bool = True) -> MaskMod:
    """Attend to the last `window` keys, including the query's own; with causal=False, also to as many after it.

    >>> import torch
    >>> i = torch.arange(4)
    >>> sliding_window(2)(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    window = checked_int("window", window, 1, "For all keys write mods.band(-1, 0), or leave the mask out.")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    def both_sides(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < window

    return named(mask if causal else both_sides, "sliding_window", window, *(() if causal else ("both_sides",)))
