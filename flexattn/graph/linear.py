"""linear: integer nodes as sums `c1 * x1 + c2 * x2 + ... + c0` of nodes that are not sums themselves.

An int32 or int64 sum is equal to this modulo 2**32 or 2**64. Possible wrap-around is recorded (`exact`, `may_wrap`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flexattn.graph.dependence import PAIR_INDICES
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Operation
from flexattn.graph.ranges import never_wraps
from flexattn.process.frozen_class import frozen

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_SUMS = ("add", "sub", "neg", "mul", "cast")
_LONGEST = 64  # terms; longer sums are not expanded, because a chain of sums takes quadratic time
_MOST_TERMS = 16  # in the index of a load


@frozen
class Linear:
    """An integer as a sum of constant multiples of nodes."""

    terms: tuple[tuple[int, int], ...] = ()  # (node, factor) in the order of the mod, no factor 0
    constant: int = 0
    exact: bool = True  # no sum in it may wrap around

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        factors = dict(self.terms)
        for node, f in other.terms:
            factors[node] = factors.get(node, 0) + f * factor
        terms = tuple((n, f) for n, f in factors.items() if f)
        return Linear(terms, self.constant + other.constant * factor, self.exact and other.exact)

    def times(self, factor: int) -> Linear:
        return Linear(exact=self.exact).plus(self, factor)

    def factor(self, node: int | None) -> int:
        return next((factor for n, factor in self.terms if n == node), 0)

    def without(self, node: int | None) -> Linear:
        return replace(self, terms=tuple(t for t in self.terms if t[0] != node))

    def sorted(self) -> Linear:
        """Return the sum with its terms sorted by node, so that equal sums compare equal."""
        return replace(self, terms=tuple(sorted(self.terms)))


def is_integer(graph: ModGraph, position: int) -> bool:
    dtype = graph.nodes[position].dtype
    return not dtype.is_floating_point and dtype != torch.bool


@lru_cache(512)
def linear_forms(graph: ModGraph, moving: frozenset[str] | None = None) -> tuple[Linear, ...]:
    """Return each node as a sum of multiples of other nodes, or of itself if it is not a sum.

    With `moving` (names of inputs), nodes that depend on none of these are not expanded.
    """
    safe = never_wraps(graph)
    found: list[Linear] = []
    for i, node in enumerate(graph.nodes):
        parts = [found[a] for a in node.args]
        form = None
        fixed = moving is not None and not graph.dependence[i] & moving
        match node:
            case _ if fixed or not is_integer(graph, i):
                pass
            case Const(value):
                form = Linear((), int(value))
            case Operation("add"):
                form = parts[0].plus(parts[1])
            case Operation("sub"):
                form = parts[0].plus(parts[1], -1)
            case Operation("neg"):
                form = parts[0].times(-1)
            case Operation("mul") if not parts[0].terms or not parts[1].terms:
                factor, other = (parts[0], parts[1]) if not parts[0].terms else (parts[1], parts[0])
                form = replace(other.times(factor.constant), exact=other.exact and factor.exact)
            case Operation("cast") if is_integer(graph, node.args[0]) and (safe[i] or _casts_index(graph, i)):
                form = parts[0]
        if form is None or len(form.terms) > _LONGEST:
            form = Linear(((i, 1),))
        elif node.args and not safe[i]:
            form = replace(form, exact=False)
        found.append(form)
    return tuple(found)


def _casts_index(graph: ModGraph, position: int) -> bool:
    """Return whether a cast is expanded even if it may wrap around: a cast of q_idx or kv_idx to int32 or int64."""
    return graph.nodes[position].dtype in (torch.int32, torch.int64) and bool(graph.dependence[position] & PAIR_INDICES)


def is_sum(graph: ModGraph, position: int) -> bool:
    """Return whether a node is expanded into terms."""
    return graph.nodes[position].op in _SUMS and linear_forms(graph)[position].terms != ((position, 1),)


def may_wrap(graph: ModGraph, position: int) -> set[int]:
    """Return the sums in the linear form of a node that may wrap around."""
    safe, found, pending = never_wraps(graph), set[int](), [position]
    while pending:
        node = pending.pop()
        if is_sum(graph, node):
            found |= set() if safe[node] else {node}
            pending += graph.nodes[node].args
    return found


@frozen
class Affine:
    """An index as q * q_idx + kv * kv_idx + the sum of multiples of nodes that depend on neither."""

    q: int
    kv: int
    rest: tuple[tuple[int, int], ...]  # (node, factor)


@lru_cache(1024)
def affine(graph: ModGraph, position: int) -> Affine | None:
    """Return a node as an Affine, None if it is not linear in q_idx and kv_idx, or too long."""
    form = linear_forms(graph, PAIR_INDICES)[position]
    q, kv = (sum(f for n, f in form.terms if graph.is_input(n, name)) for name in ("q_idx", "kv_idx"))
    rest = tuple((n, f) for n, f in form.terms if not graph.is_input(n, *PAIR_INDICES))
    known = not any(graph.dependence[n] & PAIR_INDICES for n, _ in rest)
    return Affine(q, kv, rest) if known and len(rest) <= _MOST_TERMS else None


@lru_cache(512)
def shift_invariant(graph: ModGraph, assuming_exact: bool = False) -> tuple[bool, ...]:
    """For each node, whether adding the same number to q_idx and kv_idx does not change it, as in q_idx - kv_idx.

    This holds for sums that wrap around too, but not for comparisons of such sums. These count as invariant only with
    `assuming_exact`.
    """
    forms = linear_forms(graph)
    found: list[bool] = []
    for i, node in enumerate(graph.nodes):
        sums = compared_or_summed(graph, i)
        if not graph.dependence[i] & PAIR_INDICES:
            found.append(True)
        elif not node.args:
            found.append(False)
        elif not sums or not (assuming_exact or len(sums) == 1 or all(forms[s].exact for s in sums)):
            found.append(all(found[a] for a in node.args))
        else:
            total = forms[sums[0]] if len(sums) == 1 else forms[sums[0]].plus(forms[sums[1]], -1)
            growth = sum(f for n, f in total.terms if graph.is_input(n, *PAIR_INDICES))
            others = (n for n, _ in total.terms if not graph.is_input(n, *PAIR_INDICES))
            found.append(not growth and all(found[n] for n in others))
    return tuple(found)


def compared_or_summed(graph: ModGraph, position: int) -> tuple[int, ...]:
    """Return the sums of a node: the node itself, or the two sides of an integer comparison."""
    node = graph.nodes[position]
    if not graph.dependence[position] & PAIR_INDICES:
        return ()
    if node.op in COMPARISONS and is_integer(graph, node.args[0]):
        return node.args
    return (position,) if is_integer(graph, position) and is_sum(graph, position) else ()
