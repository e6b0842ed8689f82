"""offsets: a mod of a part of a sequence, as a graph. Its index 0 is that of the mod at an offset."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import narrowed
from flexattn.graph.nodes import Input, Number

_OFFSETS = ("q_idx", "kv_idx")


def at_offsets(bound: BoundMod, q_offset: int, kv_offset: int) -> BoundMod:
    """Return the mod whose query 0 and key 0 are those of `bound` at these offsets. They are numbers of the graph."""
    graph = _with_offsets(bound.wide or bound.graph)
    numbers = (*bound.numbers, q_offset, kv_offset)
    return BoundMod(narrowed(graph, numbers), bound.captures, numbers, wide=graph)


@lru_cache(512)
def _with_offsets(graph: ModGraph) -> ModGraph:
    first = len(graph.numbers)

    def moved(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        node = graph.nodes[i]
        if not isinstance(node, Input) or node.name not in _OFFSETS:
            return None
        offset = builder.number(first + _OFFSETS.index(node.name), torch.int64)
        return builder.input(node.name, node.dtype) + offset.cast(node.dtype)

    added = [Number(f"{name}_offset", torch.int64) for name in _OFFSETS]
    return rewrite(graph, moved, numbers=(*graph.numbers, *added))
