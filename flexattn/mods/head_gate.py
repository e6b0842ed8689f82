"""Head gate: each head learns a factor for its scores."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.mods.arguments import check_tensor, per_head
from flexattn.mods.kinds import ScoreMod, named


def head_gate(gate: Tensor) -> ScoreMod:
    """Multiply scores by `sigmoid(gate[h])`. `gate` [H] may require a gradient.

    >>> import torch
    >>> i = torch.arange(1)
    >>> head_gate(torch.zeros(1))(torch.tensor([1.0, 3.0]), i, i, i, i).tolist()
    [0.5, 1.5]
    """
    check_tensor("gate", gate, "[H]", "Give one number for each query head.")

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.sigmoid(gate)[h]

    return per_head(named(mod, "head_gate"), "gate", gate, "[H]")
