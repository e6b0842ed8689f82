"""pair_cost: how many instructions a kernel executes to evaluate a mask_mod for one (query, key) pair."""

from __future__ import annotations

from functools import lru_cache

from flexattn.graph.dependence import PAIR_INDICES, computed_from
from flexattn.graph.equal_runs import graph_with_runs
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.row_bounds import conditions_of, row_bounds

_FREE = frozenset({"input", "number", "const", "cast", "detach"})
_COSTS = {"load": 8, "floordiv": 6, "mod": 6, "fmod": 6, "div": 6, "sqrt": 6, "pow": 16}  # other operations: 1


@lru_cache(512)
def pair_cost(graph: ModGraph, runs: tuple[int, ...] = ()) -> int:
    """Return an estimate of the instructions per pair of a mask_mod.

    `runs`: the captures in which runs of equal elements are known. Intervals of keys are left out, because their ends
    are computed once per query. What depends on the key alone counts half: a thread has two queries of each key
    (`hopper_forward`).
    """
    if runs:
        graph = graph_with_runs(graph, runs, by_key=False)
    conditions = conditions_of(row_bounds(graph, "kv_idx"))
    nodes = {n for condition in conditions for n in computed_from(graph, condition)}
    halves = 0
    for n in nodes:
        node, reads = graph.nodes[n], graph.dependence[n]
        if node.op not in _FREE and "kv_idx" in reads:
            halves += _COSTS.get(node.op, 1) * (2 if reads >= PAIR_INDICES else 1)
    return halves // 2
