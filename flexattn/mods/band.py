"""Band: a query attends to the keys from a distance before it to a distance after it."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import checked_int
from flexattn.mods.combine import noop_mask
from flexattn.mods.kinds import MaskMod, named


def band(left: int, right: int) -> MaskMod:
    """Attend to `left` keys before the query's own, to its own, and to `right` keys after it. -1 means all.

    This is the window_size of flash attention. (-1, 0) is causal, (255, 0) a causal window of 256 keys.

    >>> import torch
    >>> i = torch.arange(4)
    >>> band(1, 0)(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    left = checked_int("left", left, -1, "-1 means all keys before the query.")
    right = checked_int("right", right, -1, "-1 means all keys after the query.")

    def before(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx <= left

    def after(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx - q_idx <= right

    def between(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    mask = (noop_mask if right < 0 else after) if left < 0 else before if right < 0 else between
    return named(mask, "band", left, right) if mask is not noop_mask else mask
