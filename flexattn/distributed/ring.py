"""ring: keys of one rank at a time arrive while products with those before run. Partial results merge by logsumexp.

The backward sends the keys again instead of keeping them, and computes each part with the lse and the output of the
whole row. The gradients of keys go back to their rank while the next part runs.

Source: Liu et al., Ring Attention with Blockwise Transformers (2023). Here ranks send directly to those that need their
keys, in the order of a ring, and only the keys that these need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from flexattn.api import AuxOutput
from flexattn.call.call import Call
from flexattn.call.pose import complete, pose, score_of
from flexattn.call.problem import Problem
from flexattn.call.wide_dtype import wide_dtype
from flexattn.distributed.chunks import Span, common, in_tokens, length_of, places
from flexattn.distributed.needs import query_blocks
from flexattn.distributed.parts import Options, mask_of_part
from flexattn.distributed.plan import BLOCK, Chunk, ContextPlan, kept
from flexattn.engines.autograd import Engine, run_engine, with_captures
from flexattn.engines.choice import engine_of
from flexattn.engines.mask_state import NOTHING
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.offsets import at_offsets
from flexattn.process.frozen_class import frozen

NO_KEYS = (0, 0)


@frozen
class Part:
    """Queries of a chunk, and keys of one rank that they need."""

    chunk: int
    queries: Span
    keys: Span
    rows: Span  # of the keys, among the rows that arrive from their rank
    is_first: bool  # of its chunk: it has all queries, and the sink


@frozen
class Step:
    """What a rank sends and receives in a step, and the parts that it then computes."""

    source: int
    target: int
    received: tuple[Span, ...]  # tokens
    sent: tuple[Span, ...]  # rows of its own tokens
    parts: tuple[Part, ...]


def steps_of(plan: ContextPlan) -> list[Step]:
    """Return the steps of this rank. In the first one it computes its own keys."""
    me, ranks = plan.rank, plan.ranks
    tokens = [plan.tokens_of(rank) for rank in range(ranks)]
    queries = [_queries(plan, chunk, tokens) for chunk in plan.chunks[me]]
    found = []
    for turn in range(ranks):
        source, target = (me - turn) % ranks, (me + turn) % ranks
        received = common(plan.needs_of(me), tokens[source])
        sent = [] if target == me else places(common(plan.needs_of(target), tokens[me]), tokens[me])
        parts = []
        for i, chunk in enumerate(plan.chunks[me]):
            keys = common(chunk.keys, tokens[source])
            if turn == 0 and not keys:
                parts.append(Part(i, chunk.tokens, NO_KEYS, NO_KEYS, True))  # its sink
            for j, span in enumerate(keys):
                (rows,) = places([span], received)
                is_first = turn == j == 0
                parts.append(Part(i, chunk.tokens if is_first else queries[i][span], span, rows, is_first))
        if turn == 0 and not plan.chunks[me]:
            parts.append(Part(0, NO_KEYS, NO_KEYS, NO_KEYS, True))
        found.append(Step(source, target, tuple(received), tuple(sent), tuple(parts)))
    return found


def _queries(plan: ContextPlan, chunk: Chunk, tokens: Sequence[Sequence[Span]]) -> dict[Span, Span]:
    """Return from the first to the last of a chunk's queries that need some of the keys, for those of each rank."""
    spans = [span for own in tokens for span in common(chunk.keys, own)]
    if plan.mask is None:
        return dict.fromkeys(spans, chunk.tokens)
    rows, *columns = ((start // BLOCK, -(-stop // BLOCK)) for start, stop in (chunk.tokens, *spans))
    found = in_tokens(query_blocks(plan.mask, rows, columns), BLOCK, plan.length)
    return {span: (start, min(stop, chunk.tokens[1])) for span, (start, stop) in zip(spans, found, strict=True)}


def attend_ring(
    plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, AuxOutput]:
    """Return attention of this rank's queries [B, Hq, local, D]. `key` and `value` are its own keys."""
    sink = options.sink if isinstance(options.sink, Tensor) else None
    score = None if options.score_mod is None else score_of(options.score_mod, query)
    captures = () if score is None else score.captures
    out, lse, largest = _Ring.apply(plan, options, score, query, key, value, sink, *captures)
    return out, AuxOutput(lse if options.aux.lse else None, largest if options.aux.max_scores else None)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, plan: ContextPlan, options: Options, score: BoundMod | None, query: Tensor, key: Tensor,
        value: Tensor, sink: Tensor | None, *captures: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        steps, own = kept(plan, "steps", lambda: steps_of(plan)), _packed(key, value)
        merged = [_Merged(i, steps) for i in range(len(plan.chunks[plan.rank]))] or [_Merged(0, steps)]
        for step, rows in _arriving(plan, steps, own):
            for part in step.parts:
                engine, problem = _problem(plan, options, part, query, rows, key.size(-1), sink, score, False)
                merged[part.chunk].add(part, *run_engine("forward", problem, engine.forward, problem))
        finished = [m.finish() for m in merged]
        out, lse = (torch.cat([x[i] for x in finished], 2) if len(finished) > 1 else finished[0][i] for i in range(2))
        ctx.plan, ctx.options, ctx.steps, ctx.D = plan, options, steps, key.size(-1)
        ctx.score = with_captures(score, [NOTHING] * len(captures))  # save_for_backward keeps them
        ctx.save_for_backward(query, key, value, out, lse, sink, *captures)
        ctx.set_materialize_grads(False)
        shown = lse.to(wide_dtype(query))
        largest = None
        if options.aux.max_scores:
            largest = torch.cat([m.largest for m in merged if m.largest is not None], 2)
            ctx.mark_non_differentiable(largest)
        return out, shown, largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse, sink, *captures = ctx.saved_tensors
        plan, options, needs_captures = ctx.plan, ctx.options, ctx.needs_input_grad[7:]
        leaves = [c.detach().requires_grad_(need) for c, need in zip(captures, needs_captures, strict=True)]
        score = with_captures(ctx.score, leaves)
        if d_out is None:
            d_out = torch.zeros_like(out)
        d_query = torch.zeros(query.shape, dtype=wide_dtype(query), device=query.device)
        own = _packed(key, value)
        d_own = torch.zeros(own.shape, dtype=wide_dtype(own), device=own.device)
        d_captures: list[Tensor | None] = [None] * len(leaves)
        returns = _Returns(plan, ctx.steps, d_own)
        for step, rows in _arriving(plan, ctx.steps, own):
            d_rows = torch.zeros(rows.shape, dtype=d_own.dtype, device=rows.device)
            for part in step.parts:
                engine, problem = _problem(plan, options, part, query, rows, ctx.D, sink, score, True)
                span = slice(*_rows_of(plan, part))
                inputs = out[:, :, span], lse[:, :, span].contiguous(), d_out[:, :, span]
                of_lse = None if d_lse is None else d_lse[:, :, span]
                needs = True, True, True, False
                dq, dk, dv, of_score, _ = run_engine(
                    "backward", problem, engine.backward, problem, *inputs, of_lse, needs
                )
                d_query[:, :, span] += dq
                at = slice(*part.rows)
                d_rows[at, ..., : ctx.D] += dk.permute(2, 0, 1, 3)
                d_rows[at, ..., ctx.D :] += dv.permute(2, 0, 1, 3)
                for i, gradient in enumerate(_of_leaves(leaves, problem.score, of_score)):
                    before = d_captures[i]
                    d_captures[i] = gradient if before is None else before if gradient is None else before + gradient
            returns.add(step, d_rows)
        returns.finish()
        d_key, d_value = (x.permute(1, 2, 0, 3) for x in (d_own[..., : ctx.D], d_own[..., ctx.D :]))
        return (
            None, None, None, d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype),
            None if sink is None else _of_sink(sink, out, lse, d_out, d_lse),
            *[g if need else None for g, need in zip(d_captures, needs_captures, strict=True)],
        )  # fmt: skip


def _of_leaves(
    leaves: Sequence[Tensor], score: BoundMod | None, gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the gradients of leaves, from those of the captures that engines read, which are computed from them."""
    wanted = [x for x in leaves if x.requires_grad]
    if score is None or not wanted:
        return [None] * len(leaves)
    pairs = zip(score.captures, gradients, strict=False)
    known = [(c, g) for c, g in pairs if g is not None and c.requires_grad]
    if not known:
        return [None] * len(leaves)
    roots, values = zip(*known, strict=True)
    found = iter(torch.autograd.grad(roots, wanted, values, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


def _of_sink(sink: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """Return the gradient of a sink, [Hq] or [B, Hq], from the results of whole rows."""
    wide = lse.dtype
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sink.to(wide)[..., None] - lse))  # [B, Hq, rows]
    change = -(out.to(wide) * d_out.to(wide)).sum(-1)
    change = change if d_lse is None else change + d_lse.to(wide)
    return (weight * change).sum(-1).sum_to_size(sink.shape).to(sink.dtype)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as rows, [local, B, Hkv, D + Dv], so that one message has both."""
    return torch.cat([key, value], -1).permute(2, 0, 1, 3).contiguous()


def _rows_of(plan: ContextPlan, part: Part) -> Span:
    """Return the rows of a part's queries among those of this rank."""
    if part.queries[0] == part.queries[1]:
        return 0, 0
    ((start, stop),) = places([part.queries], plan.tokens_of(plan.rank))
    return start, stop


def _problem(
    plan: ContextPlan, options: Options, part: Part, query: Tensor, rows: Tensor, D: int, sink: Tensor | None,
    score: BoundMod | None, learns: bool,
) -> tuple[Engine, Problem]:  # fmt: skip
    """Return the problem of a part, and its engine. If it learns, gradients of its tensors are computed by hand.

    `score` is the score_mod as it was when the forward was called.
    """
    start, stop = _rows_of(plan, part)
    q = query[:, :, start:stop].detach().requires_grad_(learns)
    kv = rows[part.rows[0] : part.rows[1]].permute(1, 2, 0, 3)
    k, v = (x.detach().requires_grad_(learns) for x in (kv[..., :D], kv[..., D:]))
    given = options.sink if sink is None else sink.detach().requires_grad_(learns)
    call = Call(
        q, k, v, None, mask_of_part(plan, part.queries, part.keys), options.scale, options.enable_gqa,
        options.kernel_options, given if part.is_first else None,
        options.dropout_at(part.queries[0], part.keys[0]), options.aux.max_scores,
    )  # fmt: skip
    with torch.set_grad_enabled(learns):
        problem = pose(call)
        if score is not None:
            moved = at_offsets(score, part.queries[0], part.keys[0])
            problem = complete(problem.with_fields(score=moved), learns)
    return engine_of(problem), problem


class _Merged:
    """The results of a chunk over the keys so far. Rows to which later parts add are kept in the precision of sums."""

    def __init__(self, chunk: int, steps: Sequence[Step]) -> None:
        parts = [part for step in steps for part in step.parts if part.chunk == chunk]
        first, *others = (part.queries for part in parts)
        self.start = first[0]
        self.later = min((x[0] for x in others), default=0), max((x[1] for x in others), default=0)  # tokens

    def add(self, part: Part, out: Tensor, lse: Tensor, largest: Tensor | None) -> None:
        if part.is_first:
            # Those of a chunk without keys are expanded.
            self.out, self.lse = out.contiguous(), lse.contiguous()
            self.largest = None if largest is None else largest.contiguous()
            start, stop = self.later
            self.wide = out[:, :, start - self.start : stop - self.start].to(lse.dtype)
            return
        start, stop = part.queries
        if self.largest is not None and largest is not None:
            rows = self.largest[:, :, start - self.start : stop - self.start]
            rows.copy_(torch.maximum(rows, largest))
        rows = self.lse[:, :, start - self.start : stop - self.start]
        wide = self.wide[:, :, start - self.later[0] : stop - self.later[0]]
        total = torch.logaddexp(rows, lse)
        before, now = (torch.where(x == -torch.inf, 0.0, torch.exp(x - total))[..., None] for x in (rows, lse))
        wide.mul_(before).add_(torch.where(now == 0, 0.0, now * out.to(lse.dtype)))
        rows.copy_(total)

    def finish(self) -> tuple[Tensor, Tensor]:
        if self.later == (0, 0):
            return self.out, self.lse
        start, stop = (token - self.start for token in self.later)
        if start == 0 and stop == self.out.size(2) and stop:
            return self.wide.to(self.out.dtype), self.lse
        self.out[:, :, start:stop] = self.wide
        return self.out, self.lse


def _arriving(plan: ContextPlan, steps: Sequence[Step], own: Tensor) -> Iterator[tuple[Step, Tensor]]:
    """Yield each step with the rows that arrived for it. The rows of the next step are under way meanwhile."""
    me, tokens = plan.rank, plan.tokens_of(plan.rank)
    under_way: tuple[Tensor, Callable[[], None]] | None = None
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        arrived = under_way
        under_way = None if following is None else _start(plan, following, own)
        if step.source == me:
            spans = places(step.received, tokens)
            yield step, torch.cat([own[start:stop] for start, stop in spans]) if spans else own[:0]
            continue
        assert arrived is not None
        rows, wait = arrived
        wait()
        yield step, rows


def _start(plan: ContextPlan, step: Step, own: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Send what the target of a step needs, and receive from its source."""
    rows = own.new_empty((length_of(step.received), *own.shape[1:]))
    sent = torch.cat([own[start:stop] for start, stop in step.sent]) if step.sent else None
    return rows, _transfer(plan, (step.target, sent), (step.source, rows))


def _transfer(plan: ContextPlan, sent: tuple[int, Tensor | None], received: tuple[int, Tensor]) -> Callable[[], None]:
    """Start to send and receive. Return a function that waits; on a GPU the stream waits, not the host."""
    group = plan.device_mesh.get_group()
    operations = []
    if sent[1] is not None and len(sent[1]):
        operations.append(dist.P2POp(dist.isend, sent[1], group=group, group_peer=sent[0]))
    if len(received[1]):
        operations.append(dist.P2POp(dist.irecv, received[1], group=group, group_peer=received[0]))
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


class _Returns:
    """Gradients of keys on their way back to their ranks. Those of a step travel while the next one is computed."""

    def __init__(self, plan: ContextPlan, steps: Sequence[Step], d_own: Tensor) -> None:
        self.plan, self.steps, self.d_own = plan, steps, d_own
        self.under_way: tuple[Step, Tensor, Tensor, Callable[[], None]] | None = None

    def add(self, step: Step, d_rows: Tensor) -> None:
        """Send the gradients of the rows that arrived in a step, and receive those of the rows that were sent."""
        if step.source == self.plan.rank:
            self._sum(places(step.received, self.plan.tokens_of(self.plan.rank)), d_rows)
            return
        self.finish()
        arriving = self.d_own.new_empty((length_of(step.sent), *self.d_own.shape[1:]))
        wait = _transfer(self.plan, (step.source, d_rows), (step.target, arriving))
        self.under_way = step, d_rows, arriving, wait

    def finish(self) -> None:
        """Add what is under way."""
        if self.under_way is not None:
            step, _, arriving, wait = self.under_way
            wait()
            self._sum(step.sent, arriving)
            self.under_way = None

    def _sum(self, spans: Sequence[Span], gradients: Tensor) -> None:
        at = 0
        for start, stop in spans:
            self.d_own[start:stop] += gradients[at : at + stop - start]
            at += stop - start
