"""heads: ranks exchange tokens for heads, so that each computes all tokens of some heads (Ulysses).

Source: Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from flexattn.api import AuxOutput, flex_attention
from flexattn.block_mask import BlockMask
from flexattn.distributed.chunks import Span, length_of
from flexattn.distributed.parts import Options
from flexattn.distributed.plan import BLOCK, ContextPlan, kept
from flexattn.mask_build.create import create_block_mask
from flexattn.mods.at_heads import at_heads
from flexattn.trace.trace import trace


def attend_by_heads(
    plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, AuxOutput]:
    """Return attention of this rank's queries [B, Hq, local, D]. `key` and `value` are its own keys."""
    per_rank = query.size(1) // plan.ranks
    first = plan.rank * per_rank
    q = _by_heads(plan, query)
    kv = _by_heads(plan, torch.cat([key, value], -1))  # one message has both
    score_mod: Callable[..., Any] | None = options.score_mod
    if score_mod is not None:
        score_mod = at_heads(score_mod, 0, first)
    mask = plan.mask
    if mask is not None and mask.H > 1:
        whole = mask
        mask = kept(plan, "mask of heads", lambda: _mask_of_heads(plan, whole, first, per_rank))
    sink = options.sink
    if isinstance(sink, Tensor):
        sink = sink.narrow(-1, first, per_rank)
    out, found = flex_attention(
        q, kv[..., : key.size(-1)], kv[..., key.size(-1) :], score_mod, mask, options.scale, options.enable_gqa,
        kernel_options=options.kernel_options, sink=sink, return_aux=options.aux,
        dropout_p=options.dropout_at(bh_offset=first, heads=query.size(1)),
    )  # fmt: skip
    lse, largest = (None if x is None else _by_tokens(plan, x[..., None])[..., 0] for x in found)
    return _by_tokens(plan, out), AuxOutput(lse, largest)


def _mask_of_heads(plan: ContextPlan, whole: BlockMask, first: int, count: int) -> BlockMask:
    whole.check_captures(trace(whole.mask_mod, "mask"))
    mod = at_heads(whole.mask_mod, 0, first)
    return create_block_mask(mod, plan.B, count, plan.length, plan.length, device=plan.device, BLOCK_SIZE=BLOCK)


def _by_heads(plan: ContextPlan, x: Tensor) -> Tensor:
    """Return all tokens of this rank's heads, [B, H / ranks, length, D], from all heads of its tokens."""
    B, H, local, D = x.shape
    ranks, lengths = plan.ranks, _lengths(plan)
    rows = x.view(B, ranks, H // ranks, local, D).permute(1, 3, 0, 2, 4)  # [ranks, local, B, H / ranks, D]
    found = _all_to_all(plan, rows.reshape(ranks * local, B, H // ranks, D), [local] * ranks, lengths)
    spans = _by_rank(plan)
    return _reordered(found, spans, sorted(spans)).permute(1, 2, 0, 3)


def _by_tokens(plan: ContextPlan, x: Tensor) -> Tensor:
    """Inverse of `_by_heads`."""
    B, per_rank, _, D = x.shape
    lengths = _lengths(plan)
    spans = _by_rank(plan)
    rows = _reordered(x.permute(2, 0, 1, 3), sorted(spans), spans)
    local = lengths[plan.rank]
    found = _all_to_all(plan, rows, lengths, [local] * plan.ranks)
    return (
        found.view(plan.ranks, local, B, per_rank, D).permute(2, 0, 3, 1, 4).reshape(B, plan.ranks * per_rank, local, D)
    )


def _lengths(plan: ContextPlan) -> list[int]:
    return [length_of(plan.tokens_of(rank)) for rank in range(plan.ranks)]


def _by_rank(plan: ContextPlan) -> list[Span]:
    return [span for rank in range(plan.ranks) for span in plan.tokens_of(rank)]


def _reordered(rows: Tensor, spans: Sequence[Span], wanted: Sequence[Span]) -> Tensor:
    """Return the rows of spans in another order of the spans."""
    parts = dict(zip(spans, rows.split([stop - start for start, stop in spans]), strict=True))
    return torch.cat([parts[span] for span in wanted])


def _all_to_all(plan: ContextPlan, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on. Return what all ranks sent here."""
    group = plan.device_mesh.get_group()
    return wait_tensor(all_to_all_single_autograd(rows.contiguous(), list(received), list(sent), group))
