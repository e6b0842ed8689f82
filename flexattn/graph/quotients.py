"""quotients: `(x + 128 * y) // 128` is `y + x // 128` and `(x + 128 * y) % 128` is `x % 128`, with tighter bounds.

The order of `TiledGrid` computes a row-major position from coordinates, and a mask of a grid computes these coordinates
from the position again. Bounds of the position alone do not bound its column.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.linear import is_sum, linear_forms
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import specialized
from flexattn.graph.nodes import Const

_MOST_TERMS = 8  # of a dividend
_MOST_NESTED = 4  # a quotient becomes a sum, which another may divide


def split_for_bounds(mod: BoundMod) -> ModGraph:
    """Return the graph of a mod to bound: with its numbers as constants and split, if it divides a sum with a product.

    Other graphs are returned as they are, so that one graph of bounds serves all numbers.
    """
    if not _divides_sums(mod.graph):
        return mod.graph
    return split(specialized(mod.graph, mod.numbers))


@lru_cache(512)
def _divides_sums(graph: ModGraph) -> bool:
    dividends = {_without_casts(graph, n.args[0]) for n in graph.nodes if n.op in ("floordiv", "mod")}
    sums = {d for d in dividends if graph.nodes[d].op in ("add", "sub")}
    return any(graph.nodes[_without_casts(graph, a)].op == "mul" for d in sums for a in graph.nodes[d].args)


def _without_casts(graph: ModGraph, position: int) -> int:
    while graph.nodes[position].op == "cast":
        position = graph.nodes[position].args[0]
    return position


@lru_cache(512)
def split(graph: ModGraph) -> ModGraph:
    """Return a graph whose quotients and remainders of integers have no multiple of their divisor in the dividend."""
    for _ in range(_MOST_NESTED):
        graph, before = _split_once(graph), graph
        if graph == before:
            break
    return graph


def _split_once(graph: ModGraph) -> ModGraph:

    def apart(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        node = graph.nodes[i]
        if node.op not in ("floordiv", "mod") or not is_sum(graph, node.args[0]):
            return None
        divisor, form = graph.nodes[node.args[1]], linear_forms(graph)[node.args[0]]
        if not isinstance(divisor, Const) or type(divisor.value) is not int or divisor.value < 1:
            return None
        n = divisor.value
        multiples = [(x, factor // n) for x, factor in form.terms if factor % n == 0]
        if not multiples or not form.exact or len(form.terms) > _MOST_TERMS:
            return None

        def total(terms: list[tuple[int, int]], constant: int) -> Expr:
            found = builder.const(constant, torch.int64)
            for x, factor in terms:
                found = found + made[x].cast(torch.int64) * factor
            return found

        rest = total([(x, factor) for x, factor in form.terms if factor % n], form.constant)
        found = rest.apply(node.op, n)
        return (found if node.op == "mod" else found + total(multiples, 0)).cast(node.dtype)

    return rewrite(graph, apart)
