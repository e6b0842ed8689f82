"""Mods of some batches and heads, for tensors that are sharded over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexattn.mods.kinds import is_score_mod, named


def at_heads(mod: Callable[..., Any], b_offset: int, h_offset: int) -> Callable[..., Any]:
    """Return a mod whose batch 0 and head 0 are those of `mod` at these offsets. New offsets compile nothing.

    >>> import torch
    >>> third = at_heads(lambda b, h, q_idx, kv_idx: h == 3, 0, 2)
    >>> [bool(third(torch.tensor(0), torch.tensor(h), torch.tensor(0), torch.tensor(0))) for h in (0, 1)]
    [False, True]
    """
    name = getattr(mod, "__name__", "mod")

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(score, b + b_offset, h + h_offset, q_idx, kv_idx)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b + b_offset, h + h_offset, q_idx, kv_idx)

    return named(score, name) if is_score_mod(mod) else named(mask, name)
