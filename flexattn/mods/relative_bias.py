"""Relative bias: a learned bias for each head and distance."""

from __future__ import annotations

from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import check_tensor, described, per_head
from flexattn.mods.kinds import ScoreMod, named

_FORM = "[H, 2 * R + 1]"


def relative_bias(table: Tensor) -> ScoreMod:
    """Add `table[h, q_idx - kv_idx + R]`, with distances clamped to R. `table` [H, 2 * R + 1] may require a gradient.

    >>> import torch
    >>> i, table = torch.arange(4), torch.tensor([[-1.0, 0.0, 1.0]])
    >>> relative_bias(table)(torch.zeros(4, 4), i, i[0], i[:, None], i)[1].tolist()
    [1.0, 0.0, -1.0, -1.0]
    """
    fix = "Give each head biases for the distances -R to R, an odd number. If it is [2 * R + 1, H], pass table.T."
    check_tensor("table", table, _FORM, fix)
    if table.shape[1] % 2 == 0:
        raise ArgumentError(message("table", described(table), _FORM, fix))
    reach = table.shape[1] // 2

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]

    return per_head(named(mod, "relative_bias", reach), "table", table, _FORM)
