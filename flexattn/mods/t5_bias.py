"""T5's relative bias (Raffel et al., 2020): a learned bias for each head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import check_tensor, described, per_head
from flexattn.mods.kinds import ScoreMod, named


def t5_bias(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Add `table[bucket, h]`, table [buckets, H]. Small distances have their own buckets, larger ones logarithmic ones.

    Bidirectional tables use one half for keys before the query, one for keys after it. `table` may require a gradient.

    >>> import torch
    >>> i, table = torch.arange(4), torch.arange(8.0)[:, None]
    >>> t5_bias(table, bidirectional=False)(torch.zeros(4, 4), i, i[0], i[:, None], i)[3].tolist()
    [3.0, 2.0, 1.0, 0.0]
    """
    check_tensor("table", table, "[buckets, H]", "Give each bucket of distances a bias for each query head.")
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        found = f"{described(table)} with max_distance={max_distance}"
        expected = "[buckets, H] and more distances than buckets / 2"
        raise ArgumentError(message("table", found, expected, "Enlarge max_distance, or use fewer buckets."))
    span = math.log(max_distance / exact)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        before = q_idx - kv_idx
        distance = before.abs() if bidirectional else before.clamp(min=0)
        # The value is used only for distances >= `exact`. Clamping to 1 keeps the logarithm finite.
        far = exact + (torch.log(distance.clamp(min=1) / exact) / span * (buckets - exact)).to(torch.int32)
        bucket = torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + torch.where(before < 0, buckets, 0)
        return score + table[bucket, h]

    name = "t5_bias" if bidirectional else "t5_bias_causal"
    return per_head(named(mod, name), "table", table, "[buckets, H]")
