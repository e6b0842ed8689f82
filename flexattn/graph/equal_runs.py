"""equal_runs: replace x[q_idx] == x[kv_idx] in a mask by bounds of runs, if the captured tensor x is sorted.

Equal elements of x are then adjacent, and the comparison asks whether kv_idx is in the run of q_idx. This takes two
comparisons with bounds of the row, instead of a load per column. Document masks are of this kind.
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
    return tuple(sorted({found[0] for node in graph.nodes if (found := _compared(graph, node))}))


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


def _compared(graph: ModGraph, node: Node) -> tuple[int, tuple[int, ...], int, int] | None:
    """Match `x[..., q_idx] == x[..., kv_idx]`: return (capture, leading indices, node of q_idx, node of kv_idx)."""
    if node.op != "eq":
        return None
    x, y = (graph.nodes[a] for a in node.args)
    if not isinstance(x, Load) or not isinstance(y, Load):
        return None
    if x.capture != y.capture or x.args[:-1] != y.args[:-1] or not x.args:
        return None
    capture = x.capture
    last = ((n.args[-1], graph.nodes[n.args[-1]]) for n in (x, y))
    names = {node.name: n for n, node in last if isinstance(node, Input)}
    integers = not graph.captures[capture].dtype.is_floating_point and graph.captures[capture].dtype != torch.bool
    if set(names) != {"q_idx", "kv_idx"} or not integers:
        return None
    if any(graph.dependence[a] & PAIR_INDICES for a in x.args[:-1]):
        return None
    return capture, x.args[:-1], names["q_idx"], names["kv_idx"]
