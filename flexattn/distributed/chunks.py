"""chunks: which blocks of a sequence each rank has, and which keys its queries need. Numbers only, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Span = tuple[int, int]  # half-open: the first element, and one past the last
PER_RANK = (1, 2, 4, 8, 16)  # chunks that a rank may have


def cut(blocks: int, parts: int) -> list[Span]:
    """Cut `blocks` into contiguous parts whose lengths differ by at most one. Some are empty if there are too few."""
    return [(i * blocks // parts, (i + 1) * blocks // parts) for i in range(parts)]


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal chunks to ranks, the same number to each, so that their sums of costs are close. Return chunks by rank.

    The most expensive chunk goes to the rank that has least (Graham's longest processing time first). Then the ranks
    that have most and least swap chunks. For a causal mask and two chunks per rank, rank r gets chunks r and
    2 * ranks - 1 - r.
    """
    each = len(costs) // ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    queue = [(0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(queue)
        found[rank].append(chunk)
        if len(found[rank]) < each:
            heapq.heappush(queue, (total + costs[chunk], rank))
    for _ in range(ranks):
        if not _swap(costs, found):
            break
    return [sorted(chunks) for chunks in found]


def _swap(costs: Sequence[int], dealt: list[list[int]]) -> bool:
    """Swap two chunks of the ranks that have most and least, if that makes them more equal by 0.1 % of the most."""
    totals = [sum(costs[chunk] for chunk in chunks) for chunks in dealt]
    most, least = (find(range(len(dealt)), key=totals.__getitem__) for find in (max, min))
    gap = totals[most] - totals[least]
    pairs = [(x, y) for x in dealt[most] for y in dealt[least] if costs[x] > costs[y]]
    if not pairs:
        return False
    x, y = min(pairs, key=lambda pair: abs(gap - 2 * (costs[pair[0]] - costs[pair[1]])))
    if gap - abs(gap - 2 * (costs[x] - costs[y])) < totals[most] / 1000:
        return False
    dealt[most][dealt[most].index(x)], dealt[least][dealt[least].index(y)] = y, x
    return True


def shares(rows: Sequence[int], ranks: int, per_rank: int) -> list[list[Span]]:
    """Return `per_rank` chunks for each rank, joined where they touch, for rows of blocks with these costs.

    With one chunk each, ranks follow each other in the sequence: neighbors need fewest keys of other ranks.
    """
    sums = [0]
    for cost in rows:
        sums.append(sums[-1] + cost)
    spans = cut(len(rows), ranks * per_rank)
    costs = [sums[stop] - sums[start] for start, stop in spans]
    dealt = [[rank] for rank in range(ranks)] if per_rank == 1 else deal(costs, ranks)
    return [joined(spans[i] for i in chunks) for chunks in dealt]


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
