"""Temperature: scales the sharpness of attention."""

from __future__ import annotations

from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import check_number, check_tensor, per_head
from flexattn.mods.kinds import ScoreMod, named


def temperature(value: float | Tensor) -> ScoreMod:
    """Divide scores by a temperature: a number, or a tensor [H], which may require a gradient.

    >>> import torch
    >>> i = torch.arange(1)
    >>> temperature(2.0)(torch.tensor([1.0, 3.0]), i, i, i, i).tolist()
    [0.5, 1.5]
    """
    if isinstance(value, Tensor):
        check_tensor("value", value, "[H]", "Give one temperature for each query head, or a number for all.")

        def for_each_head(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score / value[h]

        return per_head(named(for_each_head, "temperature"), "value", value, "[H]")

    check_number("value", value, "Leave the mod out, for a temperature of 1.")
    if value == 0:
        raise ArgumentError(message("value", value, "a number other than 0", "Scores are divided by it."))

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score / value

    return named(mod, "temperature")
