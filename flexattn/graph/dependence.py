"""dependence: what nodes are computed from, such as loads whose index varies with both q_idx and kv_idx."""

from __future__ import annotations

from functools import lru_cache

from flexattn.graph.mod_graph import ModGraph

PAIR_INDICES = frozenset(("q_idx", "kv_idx"))


def varies_per_pair(graph: ModGraph, position: int) -> bool:
    """Return whether a node depends on both q_idx and kv_idx."""
    return graph.dependence[position] >= PAIR_INDICES


@lru_cache(512)
def loads_per_pair(graph: ModGraph) -> tuple[int, ...]:
    """Return the loads whose index depends on both q_idx and kv_idx."""
    return tuple(n for n in graph.loads if varies_per_pair(graph, n))


@lru_cache(512)
def after_loads_per_pair(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it is such a load or computed from one."""
    loads = frozenset(loads_per_pair(graph))
    found: list[bool] = []
    for n, node in enumerate(graph.nodes):
        found.append(n in loads or any(found[a] for a in node.args))
    return tuple(found)


def loads_by(graph: ModGraph, name: str) -> bool:
    """Return whether the index of any load depends on the input `name`."""
    return any(name in graph.dependence[n] for n in graph.loads)


def adds_to_score(graph: ModGraph, position: int) -> bool:
    """Return whether a node is the score plus a term that does not depend on the score."""
    node = graph.nodes[position]
    while node.op in ("add", "sub"):
        x, y = node.args
        if "score" not in graph.dependence[y]:
            position = x
        elif node.op == "add" and "score" not in graph.dependence[x]:
            position = y
        else:
            return False
        node = graph.nodes[position]
    return graph.is_input(position, "score")


def computed_from(graph: ModGraph, position: int) -> set[int]:
    """Return a node and all its transitive operands."""
    found = {position}
    for n in range(position, -1, -1):
        if n in found:
            found.update(graph.nodes[n].args)
    return found


@lru_cache(64)
def uses(graph: ModGraph) -> tuple[int, ...]:
    """For each node, the number of nodes that read it."""
    counts = [0] * len(graph.nodes)
    for node in graph.nodes:
        for a in set(node.args):
            counts[a] += 1
    return tuple(counts)
