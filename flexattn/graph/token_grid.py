"""token_grid: the grid whose coordinates a mask_mod computes from positions, as neighborhood attention does."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const

_MOST_DIMS = 3


@lru_cache(512)
def token_grid(graph: ModGraph, tokens: int) -> tuple[int, ...] | None:
    """Return the shape of a grid of 2 or 3 dims with this many tokens in row-major order, None if there is none.

    A mask_mod compares coordinates in a grid of width 128 if it computes `q_idx // 128`, `q_idx % 128` and the same of
    kv_idx. With three dims, it also divides by the product of the last two. `graph` has its numbers as constants.
    """
    of_queries, of_keys = (_divisors(graph, name) for name in ("q_idx", "kv_idx"))
    if of_queries != of_keys:
        return None
    quotients, remainders = of_queries
    strides = sorted(quotients)
    if tokens < 1 or not 1 <= len(strides) < _MOST_DIMS or strides[0] not in remainders:
        return None
    sizes = [tokens, *reversed(strides), 1]
    if any(small < 1 or large % small or large == small for large, small in pairwise(sizes)):
        return None
    return tuple(large // small for large, small in pairwise(sizes))


def _divisors(graph: ModGraph, name: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the constants by which a mod divides an index, or a remainder of it; and those of these remainders."""
    from_index: set[int] = set()  # the index, and its remainders
    quotients: set[int] = set()
    remainders: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if graph.is_input(position, name) or (node.op == "cast" and node.args[0] in from_index):
            from_index.add(position)
        elif node.op in ("floordiv", "mod") and node.args[0] in from_index:
            divisor = graph.nodes[node.args[1]]
            if not isinstance(divisor, Const) or type(divisor.value) is not int:
                continue
            if node.op == "mod":
                from_index.add(position)
                remainders.add(divisor.value)
            else:
                quotients.add(divisor.value)
    return frozenset(quotients), frozenset(remainders)
