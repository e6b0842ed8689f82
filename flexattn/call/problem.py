"""Problem: one call of flex_attention after validation, the form in which every engine receives it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.dropout import Dropout
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.mod_graph import ModGraph
from flexattn.options import option

Needs = tuple[bool, bool, bool, bool]  # which of query, key, value and the sink want a gradient


@dataclass(frozen=True)
class Problem:
    """What to compute: tensors, mods with their values, and the scale. `None` mods do nothing.

    A mask has both `block_mask` (its runs) and `mask` (its mod, for partial blocks; None where the mod is noop).
    """

    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B or 1, Hkv, N, D]
    value: Tensor  # [B or 1, Hkv, N, Dv]
    scale: float
    score: BoundMod | None = None
    mask: BoundMod | None = None
    block_mask: BlockMask | None = None
    score_grad: ModGraph | None = None  # gradient graph of `score`, where a backward may follow
    runs: tuple[EqualRuns, ...] = ()  # of what `mask` captures, where they are known
    options: tuple[tuple[str, object], ...] = ()  # validated kernel_options
    sink: Tensor | None = None  # [B or 1, Hq or 1] float32 (float64), natural logarithm of one more term of each sum
    dropout: Dropout | None = None
    max_scores: bool = False  # whether the forward returns the largest score of each row

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's results may depend on that row and what it attends to alone."""
        return option(self.options, "BATCH_INVARIANT") is True
