"""equal_runs: replace x[q_idx] == x[kv_idx] in a mask by bounds of runs, if the captured tensor x is sorted.

Equal elements of x are then adjacent, and the comparison asks whether kv_idx is in the run of q_idx. This takes two
comparisons with bounds of the row, instead of a load per column. Document masks are of this kind. The indices may be
moved, as in a part of a sequence: x[q_idx + 256] == x[kv_idx + 128].
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.dependence import PAIR_INDICES
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Capture, Input, Load, Node
from flexattn.graph.ranges import index_ranges
from flexattn.process.frozen_class import frozen


@frozen
class EqualRuns:
    """The run of equal elements that contains each element of a captured tensor, along its last dimension."""

    capture: int  # position of the captured tensor
    places: Tensor  # int32 [2, *shape]: starts and ends

    @property
    def starts(self) -> Tensor:
        return self.places[0]

    @property
    def ends(self) -> Tensor:
        """The exclusive ends of the runs."""
        return self.places[1]


def captures_compared(graph: ModGraph) -> tuple[int, ...]:
    """Return the positions of the captured integer tensors x for which the graph compares x[q_idx] == x[kv_idx]."""
    return tuple(sorted({capture for capture, *_ in _comparisons(graph)}))


def usable(runs: tuple[EqualRuns, ...], bound: BoundMod, extents: tuple[int, int, int, int]) -> tuple[EqualRuns, ...]:
    """Return the runs of tensors whose compared indices are never negative, given the extents of b, h, q_idx, kv_idx.

    A negative index counts from the end of the tensor. Places in runs do not.
    """
    if not runs:
        return runs
    negative = _maybe_negative(bound.graph, bound.numbers, extents)
    return tuple([r for r in runs if r.capture not in negative])


@lru_cache(512)
def _maybe_negative(
    graph: ModGraph, numbers: tuple[int | float, ...], extents: tuple[int, int, int, int]
) -> frozenset[int]:
    """Return the captures of which a compared index may be negative."""
    ranges = index_ranges(graph, numbers, extents)
    return frozenset(
        capture
        for capture, _, *indices in _comparisons(graph)
        for between in (ranges[i] for i in indices)
        if between is None or between[0] < 0
    )


def with_runs(bound: BoundMod, runs: tuple[EqualRuns, ...], by_key: bool) -> BoundMod:
    """Return the mod with comparisons of an index with a run: the key's run if `by_key`, else the query's.

    The bounds of the runs are appended captures.
    """
    if not runs:
        return bound
    graph = graph_with_runs(bound.graph, tuple(r.capture for r in runs), by_key)
    return BoundMod(graph, (*bound.captures, *(t for r in runs for t in (r.starts, r.ends))), bound.numbers)


@lru_cache(512)
def graph_with_runs(graph: ModGraph, captures: tuple[int, ...], by_key: bool) -> ModGraph:
    """Return the graph of `with_runs` for runs in these captures."""
    first = len(graph.captures)
    about = [graph.captures[i] for i in captures]
    added = [Capture(f"{c.name}_{end}", torch.int32, c.ndim) for c in about for end in ("starts", "ends")]

    def in_run(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        capture, index, q_idx, kv_idx = _compared(graph, graph.nodes[i]) or (None, (), 0, 0)
        if capture not in captures:
            return None
        row, column = (made[n] for n in ((kv_idx, q_idx) if by_key else (q_idx, kv_idx)))
        at, position = [*(made[n] for n in index), row], first + 2 * captures.index(capture)
        start, end = (builder.load(position + side, torch.int32, at) for side in (0, 1))
        return (start <= column).apply("and", column < end)

    # The compared loads are kept, because the estimate of shared memory counts them.
    return rewrite(graph, in_run, captures=(*graph.captures, *added), keep_unused=True)


def _comparisons(graph: ModGraph) -> list[tuple[int, tuple[int, ...], int, int]]:
    return [found for node in graph.nodes if (found := _compared(graph, node))]


def _compared(graph: ModGraph, node: Node) -> tuple[int, tuple[int, ...], int, int] | None:
    """Match `x[..., q_idx] == x[..., kv_idx]`: return (capture, leading indices, query's index, key's index).

    Both indices may have something added that depends on neither q_idx nor kv_idx.
    """
    if node.op != "eq":
        return None
    x, y = (graph.nodes[a] for a in node.args)
    if not isinstance(x, Load) or not isinstance(y, Load):
        return None
    if x.capture != y.capture or x.args[:-1] != y.args[:-1] or not x.args:
        return None
    capture = x.capture
    names = {_moved_input(graph, n.args[-1]): n.args[-1] for n in (x, y)}
    integers = not graph.captures[capture].dtype.is_floating_point and graph.captures[capture].dtype != torch.bool
    if set(names) != {"q_idx", "kv_idx"} or not integers:
        return None
    if any(graph.dependence[a] & PAIR_INDICES for a in x.args[:-1]):
        return None
    return capture, x.args[:-1], names["q_idx"], names["kv_idx"]


def _moved_input(graph: ModGraph, i: int) -> str:
    """Return the name of the input that a node is, or is the sum of and something that depends on no pair; else ""."""
    node = graph.nodes[i]
    if isinstance(node, Input):
        return node.name
    if node.op != "add":
        return ""
    by_pair = [a for a in node.args if graph.dependence[a] & PAIR_INDICES]
    found = graph.nodes[by_pair[0]] if len(by_pair) == 1 else None
    return found.name if isinstance(found, Input) else ""
