"""ALiBi (Press et al., 2022): a penalty that grows with the distance, at a different rate per head."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.mods.arguments import check_tensor, checked_int, per_head
from flexattn.mods.kinds import ScoreMod, named


def alibi(slopes: int | Tensor) -> ScoreMod:
    """Add `slope * (kv_idx - q_idx)`, with slopes [H], or with 2 ** (-8 * (h + 1) / H) for an int H (number of heads).

    >>> import torch
    >>> i = torch.arange(3)
    >>> alibi(8)(torch.zeros(3, 3), i, i[0], i[:, None], i)[2].tolist()
    [-1.0, -0.5, 0.0]
    """
    if isinstance(slopes, Tensor):
        check_tensor("slopes", slopes, "[H]", "Give one slope for each query head.")

        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * (kv_idx - q_idx)

        return per_head(named(mod, "alibi"), "slopes", slopes, "[H]")

    heads = checked_int("slopes", slopes, 1, "Pass the number of query heads, or a tensor of slopes.")

    def standard(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.exp2(-8.0 * (h + 1) / heads) * (kv_idx - q_idx)

    if type(heads) is int:
        standard.heads = heads  # type: ignore[attr-defined]  # calls compare it with query
    return named(standard, "alibi", heads)
