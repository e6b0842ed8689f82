"""capture_axes: copy captured tensors so that the axis that varies over (q, kv) pairs is the last one.

With `bias[cells[q_idx, kv_idx], h]`, the loads of a program are H elements apart. Each load, and each atomic add to the
gradient, uses its own cache line. With `bias[h, cells[...]]`, adjacent elements share one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.dependence import PAIR_INDICES, varies_per_pair
from flexattn.graph.mod_graph import ModGraph

_LARGEST = 2**24  # elements of a tensor that is copied


def pair_axes_last(bound: BoundMod) -> BoundMod:
    """Return the mod with captured tensors copied if this makes its loads more contiguous."""
    orders = tuple([
        (i, order) for i, order in _orders(bound.graph) if _is_worth_a_copy(bound.captures[i], order)
    ])  # fmt: skip
    if not orders:
        return bound
    captures = list(bound.captures)
    for i, order in orders:
        captures[i] = captures[i].permute(order).contiguous()
    return replace(bound, graph=_reordered(bound.graph, orders), captures=tuple(captures))


def _is_worth_a_copy(tensor: Tensor, order: tuple[int, ...]) -> bool:
    return tensor.stride(order[-1]) > 1 and 0 < tensor.numel() <= _LARGEST


@lru_cache(512)
def _orders(graph: ModGraph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return captures with a new order of axes: those that are constant in a program first, then those that vary.

    Captures without loads per (q, kv) pair, or whose loads vary along different axes, are left out.
    """
    found: dict[int, set[tuple[int, ...]]] = {}
    at_each = set[int]()
    for n, load in graph.loads.items():
        order = sorted(range(len(load.args)), key=lambda axis: bool(graph.dependence[load.args[axis]] & PAIR_INDICES))
        found.setdefault(load.capture, set()).add(tuple(order))
        at_each |= {load.capture} if varies_per_pair(graph, n) else set()
    return tuple(
        (i, order) for i, orders in found.items() for order in orders
        if len(orders) == 1 and i in at_each and order != tuple(sorted(order))
    )  # fmt: skip


@lru_cache(256)
def _reordered(graph: ModGraph, orders: tuple[tuple[int, tuple[int, ...]], ...]) -> ModGraph:
    """Return the graph that reads captures with reordered axes."""
    order_of = dict(orders)

    def reordered(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        load = graph.loads.get(i)
        if load is None or load.capture not in order_of:
            return None
        return builder.load(load.capture, load.dtype, [made[load.args[axis]] for axis in order_of[load.capture]])

    names = (f"{c.name}_pairs_last" if i in order_of else c.name for i, c in enumerate(graph.captures))
    captures = tuple(replace(c, name=name) for c, name in zip(graph.captures, names, strict=True))
    return rewrite(graph, reordered, captures=captures)
