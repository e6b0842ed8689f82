"""transfer: what a rank sends, and where it puts what arrives, if keys are gathered. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from flexattn.distributed.chunks import Span, common, length_of, places, union
from flexattn.distributed.plan import Chunk, ContextPlan
from flexattn.process.frozen_class import frozen

EMPTY = (0, 0)
Copy = tuple[int, int, int]  # from this row, to this row, how many


@frozen
class Source:
    """The rows of a span of keys."""

    is_own: bool  # rows of this rank's keys, else gathered rows
    rows: Span


@frozen
class Sum:
    """Rows whose gradients are sums of the same tensors' rows."""

    rows: Span
    spans: tuple[tuple[int, Span], ...]  # of the gradients of which spans, which rows
    returned: tuple[Span, ...]  # rows of the gradients that other ranks return


@frozen
class Transfer:
    """What a rank sends and receives for its spans of keys, and for their gradients.

    Spans of own keys are not copied. Other spans are gathered: from own rows, and from rows that arrive.
    """

    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank
    spans: tuple[Source, ...]
    own: int  # rows
    gathered: int  # rows
    to_send: tuple[Copy, ...]  # from own rows
    local: tuple[Copy, ...]  # from own to gathered rows
    arrived: tuple[Copy, ...]  # from rows that arrive to gathered rows
    gradients_of_arrived: tuple[Sum, ...]
    gradients_of_own: tuple[Sum, ...]


def calls_of(plan: ContextPlan) -> list[Chunk]:
    """Return the chunks of this rank: at least one, and each has at least one span of keys, which may be empty."""
    chunks = plan.chunks[plan.rank] or (Chunk(EMPTY, ()),)
    return [Chunk(chunk.tokens, chunk.keys or (EMPTY,)) for chunk in chunks]


def transfer_of(plan: ContextPlan) -> Transfer:
    """Return the transfer of this rank, for the spans of its calls."""
    me, tokens = plan.rank, [plan.tokens_of(rank) for rank in range(plan.ranks)]
    own, others = tokens[me], [rank for rank in range(plan.ranks) if rank != me]
    spans = [span for chunk in calls_of(plan) for span in chunk.keys]
    is_own = [length_of(common([span], own)) == span[1] - span[0] for span in spans]
    gathered = union([span] for span, local in zip(spans, is_own, strict=True) if not local)
    sources = [
        Source(local, EMPTY if span == EMPTY else places([span], own if local else gathered)[0])
        for span, local in zip(spans, is_own, strict=True)
    ]
    outgoing = [common(plan.needs_of(rank), own) if rank != me else [] for rank in range(plan.ranks)]
    sent = [span for spans in outgoing for span in spans]  # a token once for each rank that needs it
    mine, arriving = common(gathered, own), [span for rank in others for span in common(gathered, tokens[rank])]
    to_send = _copies(places(sent, own), _in_turn(sent))
    local = _copies(places(mine, own), places(mine, gathered))
    arrived = _copies(_in_turn(arriving), places(arriving, gathered))
    return Transfer(
        sent=tuple(map(length_of, outgoing)),
        received=tuple(plan.received(me)),
        spans=tuple(sources),
        own=length_of(own),
        gathered=length_of(gathered),
        to_send=tuple(to_send),
        local=tuple(local),
        arrived=tuple(arrived),
        gradients_of_arrived=_sums(length_of(arriving), _of_gathered(sources, arrived), []),
        gradients_of_own=_sums(
            length_of(own),
            _of_own(sources) + _of_gathered(sources, local),
            to_send,
        ),
    )


def _in_turn(spans: Sequence[Span]) -> list[Span]:
    """Return the rows of spans that follow each other."""
    return list(pairwise(accumulate((stop - start for start, stop in spans), initial=0)))


def _copies(rows: Sequence[Span], to: Sequence[Span]) -> list[Copy]:
    return [(start, at, stop - start) for (start, stop), (at, _) in zip(rows, to, strict=True)]


def _of_own(sources: Sequence[Source]) -> list[tuple[int, Copy]]:
    return [(i, (x.rows[0], 0, x.rows[1] - x.rows[0])) for i, x in enumerate(sources) if x.is_own]


def _of_gathered(sources: Sequence[Source], copies: Sequence[Copy]) -> list[tuple[int, Copy]]:
    """Return the copies that end in each gathered span, to rows of the span."""
    return [
        (i, (row + start - at, start - source.rows[0], stop - start))
        for i, source in enumerate(sources)
        if not source.is_own
        for row, at, count in copies
        for start, stop in common([source.rows], [(at, at + count)])
    ]


def _sums(rows: int, spans: Sequence[tuple[int, Copy]], others: Sequence[Copy]) -> tuple[Sum, ...]:
    """Return what is added to rows: the gradients of what they were copied to. Cut them where that changes."""
    edges = {0, rows}
    for row, _, count in (*(copy for _, copy in spans), *others):
        edges |= {row, row + count}
    found = []
    for start, stop in pairwise(sorted(edges)):
        of_spans = [(i, _copied(copy, (start, stop))) for i, copy in spans]
        of_others = [_copied(copy, (start, stop)) for copy in others]
        found.append(
            Sum(
                (start, stop),
                tuple((i, span) for i, span in of_spans if span is not None),
                tuple(span for span in of_others if span is not None),
            )
        )
    return tuple(found)


def _copied(copy: Copy, rows: Span) -> Span | None:
    """Return where rows were copied to, None if they were not."""
    row, at, count = copy
    if rows[0] < row or row + count < rows[1]:
        return None
    return rows[0] + at - row, rows[1] + at - row
