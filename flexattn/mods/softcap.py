"""Soft cap: limits scores smoothly (Gemma 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import check_number
from flexattn.mods.kinds import ScoreMod, named


def softcap(cap: float) -> ScoreMod:
    """Return `cap * tanh(score / cap)`.

    >>> import torch
    >>> i = torch.arange(1)
    >>> softcap(20.0)(torch.tensor([0.0, 1000.0]), i, i, i, i).tolist()
    [0.0, 20.0]
    """
    check_number("cap", cap, "Leave the mod out.")
    if not isinstance(cap, Tensor) and not 0 < abs(cap) < math.inf:
        fix = "0.0 means off in FlashAttention: leave the mod out." if cap == 0 else "Leave the mod out."
        raise ArgumentError(message("cap", cap, "a finite number other than 0", fix))

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return named(mod, "softcap", cap)
