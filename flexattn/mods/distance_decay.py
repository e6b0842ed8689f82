"""Distance decay: scores decrease with the distance, symmetrically in both directions."""

from __future__ import annotations

from torch import Tensor

from flexattn.mods.arguments import check_number, check_tensor, per_head
from flexattn.mods.kinds import ScoreMod, named


def distance_decay(rate: float | Tensor) -> ScoreMod:
    """Subtract `rate * |q_idx - kv_idx|`. `rate` is a number or a tensor [H], which may require a gradient.

    >>> import torch
    >>> i = torch.arange(3)
    >>> distance_decay(0.5)(torch.zeros(3, 3), i, i, i[:, None], i)[1].tolist()
    [-0.5, 0.0, -0.5]
    """
    if isinstance(rate, Tensor):
        check_tensor("rate", rate, "[H]", "Give one rate for each query head, or a number for all.")

        def for_each_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - rate[h] * (q_idx - kv_idx).abs()

        return per_head(named(for_each_head, "distance_decay"), "rate", rate, "[H]")

    check_number("rate", rate, "Leave the mod out, for a rate of 0.")

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - rate * (q_idx - kv_idx).abs()

    return named(mod, "distance_decay")
