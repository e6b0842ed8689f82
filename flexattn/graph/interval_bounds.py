"""bound: ModGraph over (b, h, q_idx, kv_idx) -> graph of lower and upper bounds over boxes. Bounds may be loose.

The bounding graph reads `b_lo, b_hi, h_lo, h_hi, q_lo, q_hi, kv_lo, kv_hi` (inclusive) and returns (low, high) of each
output. For a mask, `low` means true everywhere in the box (FULL), and `not high` means false everywhere (EMPTY).
`bound_pairs.py` defines the meaning of a pair (low, high).

A load becomes `range_min` and `range_max` nodes, whose operands are (low, high) of each index. The evaluator returns
the minimum and maximum element, or the whole range of the dtype if it does not know them (`boxes.RangeTable`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.graph.bound_pairs import Pair, bound_nodes, language_of, unknown_pair, without_nan
from flexattn.graph.builder import Builder
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Input, Load, NumberRef, RangeLoad
from flexattn.graph.ranges import never_wraps

BOX_INPUTS = ("b_lo", "b_hi", "h_lo", "h_hi", "q_lo", "q_hi", "kv_lo", "kv_hi")
EMPTY, FULL, UNKNOWN, PARTIAL = range(4)  # classes of a mask in a box

_ENDS = {"b": ("b_lo", "b_hi"), "h": ("h_lo", "h_hi"), "q_idx": ("q_lo", "q_hi"), "kv_idx": ("kv_lo", "kv_hi")}


@lru_cache(256)
def bound(graph: ModGraph) -> ModGraph:
    """Return the graph of (low, high) of each output of `graph` over a box of its inputs."""
    safe = never_wraps(graph)
    builder = Builder()

    def leaf(node: Input | NumberRef) -> Pair:
        if isinstance(node, NumberRef):
            value = builder.number(node.position, node.dtype)
            return without_nan(value, value) if node.dtype.is_floating_point else (value, value)
        if node.name in _ENDS:
            low, high = _ENDS[node.name]
            return builder.input(low, torch.int64), builder.input(high, torch.int64)
        return unknown_pair(builder, node.dtype)

    def load(node: Load, index: list[Pair]) -> Pair:
        language = language_of(node.dtype)
        ends = tuple(e.index for pair in index for e in pair)
        if not index:
            value = builder.load(node.capture, language, ())
            return without_nan(value, value) if language.is_floating_point else (value, value)
        low = builder.add(RangeLoad("range_min", node.capture, ends, language))
        high = builder.add(RangeLoad("range_max", node.capture, ends, language))
        return without_nan(low, high) if language.is_floating_point else (low, high)

    pairs, _ = bound_nodes(graph, builder, leaf, load, safe)
    outputs = [e for o in graph.outputs for e in ((None, None) if o is None else pairs[o])]
    return builder.build(
        f"bound_{graph.name}", BOX_INPUTS, graph.captures, graph.numbers, outputs, location=graph.location
    )
