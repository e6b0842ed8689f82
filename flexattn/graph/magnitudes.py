"""magnitudes: the largest absolute values of nodes, for factors of gradients and for integer sums exact in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Node, NumberRef, Operation
from flexattn.graph.ranges import index_ranges

_LARGEST_FACTOR = 2.0**24
# The largest absolute value of a result, given those of its operands.
_SIZES: dict[str, Callable[..., float]] = {
    "neg": lambda x: x, "abs": lambda x: x, "cast": lambda x: x, "detach": lambda x: x,
    "add": lambda x, y: x + y, "sub": lambda x, y: x + y, "mul": lambda x, y: x * y,
    "maximum": max, "minimum": max, "where": max,
}  # fmt: skip
_AT_MOST_ONE = frozenset(("tanh", "sin", "cos", "erf"))

# Integers up to this size are exact in float32. Sums of a few lengths below FLOAT_INDEX_LIMIT are, too.
_EXACT_FLOAT32 = 1 << 24
FLOAT_INDEX_LIMIT = 1 << 22
_MOST_SUMMED = 16  # nested integer operations that are computed in float32


@lru_cache(512)
def gradient_factors(
    graph: ModGraph, numbers: tuple[int | float, ...], extents: tuple[int, int, int, int]
) -> tuple[float | None, ...]:
    """For each site of a gradient graph, the largest |contribution| for `grad` = 1; None if unknown."""
    ranges = index_ranges(graph, numbers, extents)
    sizes: list[float | None] = []
    for node, between in zip(graph.nodes, ranges, strict=True):
        size = float(max(map(abs, between))) if between else _size(graph, node, [sizes[a] for a in node.args], numbers)
        sizes.append(size if size is not None and size <= _LARGEST_FACTOR else None)
    return tuple(None if o is None else sizes[o] for o in graph.outputs[1:])


def _size(graph: ModGraph, node: Node, args: list[float | None], numbers: tuple[int | float, ...]) -> float | None:
    """Return the largest absolute value of a node for |grad| <= 1, given those of its operands."""
    match node:
        case Input(name):
            return 1.0 if name == "grad" else None
        case NumberRef(position):
            return abs(float(numbers[position]))
        case Const(value):
            return abs(float(value))
        case Operation("div") if args[0] is not None and args[1] and _is_number(graph, node.args[1]):
            return args[0] / args[1]
        case Operation("cast") if graph.nodes[node.args[0]].dtype == torch.bool:
            return 1.0
        case Operation("where"):
            args = args[1:]
    if node.op in _AT_MOST_ONE:
        return 1.0
    if node.op not in _SIZES or None in args:
        return None
    return _SIZES[node.op](*args)


def _is_number(graph: ModGraph, position: int) -> bool:
    node = graph.nodes[position]
    return isinstance(node, (Const, NumberRef)) or (node.op == "cast" and _is_number(graph, node.args[0]))


@lru_cache(64)
def exact_in_float32(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it is a short sum of indices below FLOAT_INDEX_LIMIT, which is exact in float32."""
    found: list[tuple[int, int] | None] = []  # (bound, operations)
    for node in graph.nodes:
        parts = [found[a] for a in node.args]
        known = [p for p in parts if p is not None]
        size = None
        match node:
            case Input("q_idx" | "kv_idx"):
                size = FLOAT_INDEX_LIMIT, 0
            case Const(value) if node.dtype != torch.bool and not node.dtype.is_floating_point:
                size = abs(int(value)), 0
            case Operation("add" | "sub" | "neg" | "abs" | "maximum" | "minimum") if len(known) == len(parts):
                size = sum(b for b, _ in known), 1 + max(n for _, n in known)
        found.append(size if size is not None and size[0] <= _EXACT_FLOAT32 and size[1] <= _MOST_SUMMED else None)
    return tuple(f is not None and f[0] > 0 for f in found)
