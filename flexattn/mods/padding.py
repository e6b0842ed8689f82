"""Padding: sequences of different lengths in one batch."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import check_tensor
from flexattn.mods.kinds import MaskMod, named


def padding(lengths: Tensor) -> MaskMod:
    """Attend to the first `lengths[b]` keys; `lengths` is an integer tensor [B]. Padding queries are not masked.

    >>> import torch
    >>> i = torch.arange(3)
    >>> padding(torch.tensor([1, 3]))(i[:2, None], i, i, i).int().tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    fix = "For a mask [B, S] whose padding is at the end write mask.sum(1), or read mask[b, kv_idx] in a mask_mod."
    check_tensor("lengths", lengths, "[B]", fix, integers=True)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return named(mask, "padding")


def queries_before(lengths: Tensor) -> MaskMod:
    """Return a mask whose first `lengths[b]` queries attend to all keys, and the others to none."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx < lengths[b]

    return named(mask, "queries_before")
