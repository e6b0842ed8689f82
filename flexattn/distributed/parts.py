"""parts: attention of chunks of queries over spans of keys, whose mods see positions in the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.api import AuxOutput, AuxRequest, flex_attention
from flexattn.block_mask import BlockMask
from flexattn.call.dropout import Dropout
from flexattn.distributed.chunks import Span
from flexattn.distributed.plan import BLOCK, Chunk, ContextPlan, kept
from flexattn.mask_build.create import create_block_mask
from flexattn.merge import merge_attention
from flexattn.mods.shifted import shifted
from flexattn.process.frozen_class import frozen
from flexattn.trace.trace import trace

Mod = Callable[..., Any]


@frozen
class Options:
    """The arguments of a call that do not depend on the scheme."""

    score_mod: Mod | None
    scale: float | None
    enable_gqa: bool
    kernel_options: Any
    sink: Any
    aux: AuxRequest
    dropout: Dropout | None = None  # of the whole call

    def dropout_at(self, q_offset: int = 0, kv_offset: int = 0, bh_offset: int = 0, heads: int = 0) -> Any:
        """Return what a part of the call passes as dropout_p, so that it drops the weights of the whole call."""
        if self.dropout is None:
            return 0.0
        whole = self.dropout
        return Dropout(
            whole.drop_below, whole.seed, whole.q_offset + q_offset, whole.kv_offset + kv_offset,
            whole.bh_offset + bh_offset, whole.heads or heads,
        )  # fmt: skip


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, row maxima


def mask_of_part(plan: ContextPlan, queries: Span, keys: Span) -> BlockMask | None:
    """Return the mask of some queries and keys of the plan, which keeps it."""
    whole = plan.mask
    if whole is None:
        return None
    return kept(plan, (queries, keys), lambda: _mask(plan, whole, queries, keys))


def _mask(plan: ContextPlan, whole: BlockMask, queries: Span, keys: Span) -> BlockMask:
    # What its mask_mod reads may have changed since the plan was made. Later calls check the part's own mask.
    whole.check_captures(trace(whole.mask_mod, "mask"))
    sizes = queries[1] - queries[0], keys[1] - keys[0]
    mod = moved(whole.mask_mod, queries[0], keys[0])
    return create_block_mask(mod, plan.B, plan.H, *sizes, device=plan.device, BLOCK_SIZE=BLOCK)


def moved(mod: Mod, q_offset: int, kv_offset: int) -> Mod:
    """Return a mod of positions in a part. New offsets compile nothing."""
    return shifted(mod, q_offset, kv_offset) if q_offset or kv_offset else mod


def part(
    plan: ContextPlan, queries: Span, keys: Span, query: Tensor, key: Tensor, value: Tensor, options: Options,
    aux: AuxRequest, with_sink: bool,
) -> Results:  # fmt: skip
    """Return attention of some queries over some keys; their tensors are [B, H, tokens, D]."""
    score_mod = options.score_mod
    if score_mod is not None:
        score_mod = moved(score_mod, queries[0], keys[0])
    out, found = flex_attention(
        query, key, value, score_mod, mask_of_part(plan, queries, keys), options.scale, options.enable_gqa,
        kernel_options=options.kernel_options, sink=options.sink if with_sink else None, return_aux=aux,
        dropout_p=options.dropout_at(queries[0], keys[0]),
    )  # fmt: skip
    return out, found.lse, found.max_scores


def chunk_over_keys(
    plan: ContextPlan, chunk: Chunk, query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], options: Options
) -> Results:
    """Return attention of a chunk over its spans of keys, merged by logsumexp. `keys` has keys and values of each."""
    aux = options.aux if len(keys) == 1 else AuxRequest(lse=True, max_scores=options.aux.max_scores)
    found = [
        part(plan, chunk.tokens, span, query, k, v, options, aux, with_sink=i == 0)
        for i, (span, (k, v)) in enumerate(zip(chunk.keys, keys, strict=True))
    ]
    if len(found) == 1:
        return found[0]
    outs, lses, largest = zip(*found, strict=True)
    out, lse = merge_attention(outs, lses)
    return out, lse, torch.stack(largest).amax(0) if options.aux.max_scores else None


def joined_rows(found: Sequence[Results], options: Options) -> tuple[Tensor, AuxOutput]:
    """Return the results of several chunks as those of a rank."""
    outs, lses, largest = zip(*found, strict=True)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return out, AuxOutput(
        torch.cat(lses, 2) if options.aux.lse else None, torch.cat(largest, 2) if options.aux.max_scores else None
    )
