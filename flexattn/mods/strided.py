"""Strided: the pattern of the Sparse Transformer (Child et al., 2019)."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import checked_int
from flexattn.mods.kinds import MaskMod, named


def strided(stride: int) -> MaskMod:
    """Attend causally to the last `stride` keys and to every stride-th key before them.

    >>> import torch
    >>> i = torch.arange(5)
    >>> strided(2)(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 1, 1]]
    """
    stride = checked_int("stride", stride, 1, "1 attends to every key before the query.")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < stride) | (distance % stride == 0))

    return named(mask, "strided", stride)
