"""chunks: which blocks of a sequence each rank has, and which keys its queries need. Numbers only, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Span = tuple[int, int]  # half-open: the first element, and one past the last
MOST_CHUNKS = 16  # for each rank
_BALANCED = 1.01  # longest over mean: below, more chunks are not worth their calls


def cut(blocks: int, parts: int) -> list[Span]:
    """Cut `blocks` into contiguous parts whose lengths differ by at most one. Some are empty if there are too few."""
    return [(i * blocks // parts, (i + 1) * blocks // parts) for i in range(parts)]


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal chunks to ranks, the same number to each, so that their sums of costs are close. Return chunks by rank.

    The most expensive chunk goes to the rank that has least (Graham's longest processing time first). For a causal mask
    and two chunks per rank, rank r gets chunks r and 2 * ranks - 1 - r.
    """
    each = len(costs) // ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    queue = [(0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(queue)
        found[rank].append(chunk)
        if len(found[rank]) < each:
            heapq.heappush(queue, (total + costs[chunk], rank))
    return [sorted(chunks) for chunks in found]


def balance(rows: Sequence[int], ranks: int, per_rank: int | None = None) -> list[list[Span]]:
    """Return the chunks of each rank, ascending, for rows of blocks with these costs.

    Without `per_rank`, a rank has as few chunks as balance the ranks within 1 %, at most MOST_CHUNKS.
    """
    sums = [0]
    for cost in rows:
        sums.append(sums[-1] + cost)
    best: tuple[float, list[list[Span]]] | None = None
    for each in _candidates(per_rank):
        spans = cut(len(rows), ranks * each)
        costs = [sums[stop] - sums[start] for start, stop in spans]
        owned = [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
        for dealt in (owned, deal(costs, ranks)):  # neighbors, if they are balanced: they need fewest keys
            longest = max(sum(costs[i] for i in chunks) for chunks in dealt)
            uneven = longest * ranks / max(1, sums[-1])
            found = [joined(spans[i] for i in chunks) for chunks in dealt]
            if best is None or uneven < best[0] - 1e-9:
                best = uneven, found
            if uneven <= _BALANCED:
                return found
    assert best is not None
    return best[1]


def _candidates(per_rank: int | None) -> list[int]:
    return [per_rank] if per_rank is not None else [n for n in (1, 2, 4, 8, 16) if n <= MOST_CHUNKS]


def joined(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Join ascending spans that touch or are at most `gap` apart, and drop empty ones."""
    found: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and start - found[-1][1] <= gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def union(groups: Iterable[Iterable[Span]]) -> list[Span]:
    """Return the elements of all groups as ascending disjoint spans."""
    return joined(sorted(span for group in groups for span in group))


def common(x: Sequence[Span], y: Sequence[Span]) -> list[Span]:
    """Return the elements that two lists of ascending disjoint spans share."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in x for b in y)
    return [(start, stop) for start, stop in pairs if start < stop]


def in_tokens(blocks: Iterable[Span], size: int, length: int) -> list[Span]:
    """Return spans of blocks as spans of tokens of a sequence."""
    return [(start * size, min(stop * size, length)) for start, stop in blocks]


def length_of(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def places(spans: Sequence[Span], of: Sequence[Span]) -> list[Span]:
    """Return where spans are among the elements of `of`, which contains each of them in one of its spans."""
    found, before = [], 0
    starts = []
    for start, stop in of:
        starts.append((start, stop, before))
        before += stop - start
    for start, stop in spans:
        first, _, at = next(s for s in starts if s[0] <= start and stop <= s[1])
        found.append((at + start - first, at + stop - first))
    return found
