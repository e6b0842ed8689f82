"""Prefix LM: every query attends to a prefix, and causally to the rest."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import check_tensor, checked_int
from flexattn.mods.kinds import MaskMod, named


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Attend to the first `prefix` keys (an int, or an integer tensor [B]) and causally to the rest.

    >>> import torch
    >>> i = torch.arange(3)
    >>> prefix_lm(2)(i, i, i[:, None], i).int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    if isinstance(prefix, Tensor):
        check_tensor("prefix", prefix, "[B]", "Give the length of the prefix of each sequence.", integers=True)

        def ragged(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

        return named(ragged, "prefix_lm")

    prefix = checked_int("prefix", prefix, 0, "0 is causal.")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < prefix) | (q_idx >= kv_idx)

    return named(mask, "prefix_lm", prefix)
