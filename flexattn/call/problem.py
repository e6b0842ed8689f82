"""problem: Problem, one call of flex_attention after validation. It is the input of every engine."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from flexattn.block_mask import BlockMask, InTiles
from flexattn.call.dropout import Dropout
from flexattn.call.layout import Layout
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.mod_graph import ModGraph
from flexattn.options import option
from flexattn.process.frozen_class import frozen

requires_grad = attrgetter("requires_grad")  # for map()
# Which of query, key, value and the sink require a gradient. `score_grad.sites` shows which captured tensors do.
Needs = tuple[bool, bool, bool, bool]
# Of query, key, value, each tensor that score_mod captures, and the sink; None if not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...], Tensor | None]


@frozen
class Problem:
    """What to compute: tensors, mods with their values, and the scale. A mod is None if it does nothing.

    `block_mask` lists which blocks attend. `mask` is its mod, applied in partial blocks; None if it is always true.
    """

    query: Tensor  # [B, Hq, M, D]
    key: Tensor  # [B or 1, Hkv, N, D]; with a block_table [pages, Hkv, page_size, D]
    value: Tensor  # [B or 1, Hkv, N, Dv]; with a block_table [pages, Hkv, page_size, Dv]
    scale: float
    score: BoundMod | None = None
    mask: BoundMod | None = None
    block_mask: BlockMask | None = None
    # Gradient graph of `score`, if a backward may follow. Its sites are loads of captures that require gradients.
    score_grad: ModGraph | None = None
    equal_runs: tuple[EqualRuns, ...] = ()  # of sorted tensors that `mask` captures, if known
    options: tuple[tuple[str, object], ...] = ()  # validated kernel_options
    sink: Tensor | None = None  # [B or 1, Hq or 1] float32 (float64), log of an additional term of each softmax sum
    dropout: Dropout | None = None
    max_scores: bool = False  # whether the forward returns the largest score of each row
    # Kernels compute the tokens of a grid tile by tile, with the lists of `block_mask.in_tiles`. All tensors are
    # row-major. Only the Triton engine makes such problems.
    in_tiles: bool = False
    # Which keys each sequence uses, their pages, and the row of the mask of its first query. The mods read positions.
    layout: Layout | None = None

    def with_fields(self, **changes: Any) -> Problem:
        """Return a copy with other fields, as dataclasses.replace does in 0.6 instead of 3.4 us."""
        made = object.__new__(Problem)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def N(self) -> int:
        """The length of key; with a layout, the most keys of a sequence."""
        return self.key.size(2) if self.layout is None else self.layout.capacity

    @property
    def tiles(self) -> InTiles:
        """The mask in the order of tiles."""
        assert self.block_mask is not None and self.block_mask.in_tiles is not None
        return self.block_mask.in_tiles

    @property
    def _blocks_read(self) -> BlockMask | None:
        """The mask whose lists and bits kernels read."""
        return self.tiles.mask if self.in_tiles else self.block_mask

    @property
    def has_bits(self) -> bool:
        """Whether kernels may read the bits of partial blocks instead of evaluating `mask`."""
        blocks = self._blocks_read
        return blocks is not None and blocks.bits is not None and self.mask is not None and self.layout is None

    @property
    def skips_halves(self) -> bool:
        """Whether kernels that read bits also skip the empty halves of blocks."""
        blocks = self._blocks_read
        return self.has_bits and blocks is not None and blocks.skips_halves

    @property
    def is_paged(self) -> bool:
        return self.layout is not None and self.layout.page_size > 0

    @property
    def values_in_keys(self) -> bool:
        """Whether value is the first columns of key, as in latent attention: kernels may read both at once."""
        k, v = self.key, self.value
        return (
            v.size(3) < k.size(3) and v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.dtype == k.dtype
        )

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's results must depend only on that row and what it attends to."""
        return bool(self.options) and option(self.options, "BATCH_INVARIANT") is True
