"""Soft cap: limits scores smoothly (Gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.mods.kinds import ScoreMod, named


def softcap(cap: float) -> ScoreMod:
    """Return `cap * tanh(score / cap)`.

    >>> import torch
    >>> i = torch.arange(1)
    >>> softcap(20.0)(torch.tensor([0.0, 1000.0]), i, i, i, i).tolist()
    [0.0, 20.0]
    """

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return named(mod, f"softcap_{cap:g}".replace(".", "p").replace("-", "m").replace("+", ""))
