"""gathered: a rank receives all keys that its queries need, then computes each of its chunks."""

from __future__ import annotations

from torch import Tensor

from flexattn.api import AuxOutput
from flexattn.distributed.chunks import Span, common, length_of, places
from flexattn.distributed.exchange import Piece, all_to_all, assemble, dependent_on, packed
from flexattn.distributed.parts import Options, chunk_over_keys, joined_rows
from flexattn.distributed.plan import ContextPlan, kept
from flexattn.process.frozen_class import frozen


def attend_gathered(
    plan: ContextPlan, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, AuxOutput]:
    """Return attention of this rank's queries [B, Hq, local, D]. `key` and `value` are its own keys."""
    D, needs, chunks = key.size(-1), plan.needs_of(plan.rank), plan.chunks[plan.rank]
    rows = gather_rows(plan, key, value, needs)  # [needed keys, B, Hkv, D + Dv]
    keys, values = (x.permute(1, 2, 0, 3) for x in (rows[..., :D], rows[..., D:]))

    def take(span: Span) -> tuple[Tensor, Tensor]:
        if span[0] == span[1]:
            return keys[:, :, :0], values[:, :, :0]
        ((start, stop),) = places([span], needs)
        if stop - start == keys.size(2):
            return keys, values
        return keys[:, :, start:stop], values[:, :, start:stop]

    queries = query.split([stop - start for start, stop in plan.tokens_of(plan.rank)], 2)
    found = [
        chunk_over_keys(plan, chunk.tokens, chunk.keys, q, take, options)
        for chunk, q in zip(chunks, queries, strict=True)
    ]
    if not chunks:
        found = [chunk_over_keys(plan, (0, 0), (), query, take, options)]
    out, aux = joined_rows(found, options)
    return dependent_on(rows, out), aux


@frozen
class Transfer:
    """What a rank sends and receives, and how the rows that it needs are assembled from those and its own."""

    sent: tuple[Piece, ...]  # of its own rows, for rank 0, then for rank 1 and so on
    counts: tuple[int, ...]  # rows for each rank
    pieces: tuple[Piece, ...]  # source 0: rows that arrived, source 1: its own


def gather_rows(plan: ContextPlan, key: Tensor, value: Tensor, needs: list[Span]) -> Tensor:
    """Return the packed rows of needed tokens, in their order, from the keys and values that each rank has."""
    transfer = kept(plan, "transfer", lambda: _transfer(plan, needs))
    own = packed(key, value)
    arrived = own[:0]
    if plan.most_received:
        received = plan.received(plan.rank)
        outgoing = assemble(transfer.sent, own)
        arrived = all_to_all(outgoing, transfer.counts, received, plan.device_mesh.get_group())
    return assemble(transfer.pieces, arrived, own)


def _transfer(plan: ContextPlan, needs: list[Span]) -> Transfer:
    me, tokens = plan.rank, [plan.tokens_of(rank) for rank in range(plan.ranks)]
    others = [rank for rank in range(plan.ranks) if rank != me]
    sent = {rank: places(common(plan.needs_of(rank), tokens[me]), tokens[me]) for rank in others}
    mine = common(needs, tokens[me])
    found: list[tuple[int, Piece]] = [  # with the first token
        (start, (1, *rows)) for (start, _), rows in zip(mine, places(mine, tokens[me]), strict=True)
    ]
    at = 0
    for rank in others:
        for start, stop in common(needs, tokens[rank]):
            found.append((start, (0, at, at + stop - start)))
            at += stop - start
    return Transfer(
        tuple([(0, *span) for spans in sent.values() for span in spans]),
        tuple([length_of(sent.get(rank, ())) for rank in range(plan.ranks)]),
        tuple([piece for _, piece in sorted(found)]),
    )
