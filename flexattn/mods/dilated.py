"""Dilated window: every n-th key before the query."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import checked_int
from flexattn.mods.kinds import MaskMod, named


def dilated(window: int, dilation: int) -> MaskMod:
    """Attend to `window` keys at distances 0, dilation, 2 * dilation... before the query.

    >>> import torch
    >>> i = torch.arange(5)
    >>> dilated(2, 2)(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    """
    window = checked_int("window", window, 1, "It counts keys, with the query's own.")
    dilation = checked_int("dilation", dilation, 1, "1 is a window without gaps.")
    reach = window * dilation

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % dilation == 0)

    return named(mask, "dilated", window, dilation)
