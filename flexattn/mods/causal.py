"""Causal masks: a query attends to itself and to earlier keys."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.kinds import MaskMod, named


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Attend to keys up to and including the query's own position; both sequences start at position 0.

    It is a mask_mod itself: pass it without calling it, `create_block_mask(causal, ...)`.

    >>> import torch
    >>> i = torch.arange(3)
    >>> causal(i, i, i[:, None], i).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return q_idx >= kv_idx


def causal_lower_right(q_len: int, kv_len: int) -> MaskMod:
    """Causal with the ends of both sequences aligned: the last query attends to every key, as in decoding with a cache.

    >>> import torch
    >>> i = torch.arange(4)
    >>> causal_lower_right(2, 4)(i, i, i[:2, None], i).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    offset = kv_len - q_len

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return named(mask, "causal_lower_right", q_len, kv_len)
