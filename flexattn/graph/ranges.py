"""ranges: the range of values of each node of a graph.

`ranges`, `never_wraps` and `nonnegative` hold for all calls. They use the rules of OPS, once per graph, and take
milliseconds. `index_ranges` holds for one call, whose lengths and numbers are known. It uses interval arithmetic on
Python integers for the operations of indices; other nodes are unknown. It takes microseconds, so a plan can decide for
each load whether it needs PyTorch's wrap-around of negative indices, or a mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from flexattn.graph.bound_pairs import Pair, bound_nodes, cast_pair, constant_of, unknown_pair
from flexattn.graph.builder import Builder
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Const, Input, Load, Node, NumberRef

# Maximum length of an axis. q_idx plus a small constant, or 2 * q_idx, cannot overflow int32.
INDEX_LIMIT = 2**30


def nonnegative(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it is a number and never negative, given b, h, q_idx, kv_idx in [0, INDEX_LIMIT)."""
    return tuple(
        node.dtype != torch.bool and low >= 0 for node, (low, _) in zip(graph.nodes, ranges(graph), strict=True)
    )


def ranges(graph: ModGraph, bits: tuple[int, ...] = ()) -> tuple[tuple[Any, Any], ...]:
    """For each node, (low, high) over all b, h, q_idx, kv_idx in [0, INDEX_LIMIT), captured tensors and numbers.

    The n-th captured number, if an integer, is in [-2**bits[n], 2**bits[n]]. Without `bits`, those of the graph apply.
    """
    return _static(graph, bits)[0]


def never_wraps(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it surely does not wrap around, for the same inputs as `ranges`."""
    return _static(graph)[1]


@lru_cache(256)
def _static(graph: ModGraph, bits: tuple[int, ...] = ()) -> tuple[tuple[tuple[Any, Any], ...], tuple[bool, ...]]:
    """Bound every node with constant bounds of the inputs, so the rules fold. Also return which nodes need no check."""
    builder = Builder()
    bits = bits or tuple([n.bits for n in graph.numbers])

    def leaf(node: Input | NumberRef) -> Pair:
        match node:
            case Input(name) if name in MASK_INPUTS:
                return builder.const(0, torch.int64), builder.const(INDEX_LIMIT - 1, torch.int64)
            case NumberRef(position) if node.dtype == torch.int64 and bits[position] < 63:
                most = 1 << bits[position]
                return builder.const(-most, torch.int64), builder.const(most, torch.int64)
        return unknown_pair(builder, node.dtype)

    def load(node: Load, index: list[Pair]) -> Pair:
        capture = graph.captures[node.capture].dtype
        return cast_pair(unknown_pair(builder, capture), capture, node.dtype)

    pairs, safe = bound_nodes(graph, builder, leaf, load, None)
    return tuple((constant_of(low), constant_of(high)) for low, high in pairs), safe


Range = tuple[int, int] | None  # inclusive; None if unknown


@lru_cache(4096)
def index_ranges(
    graph: ModGraph, numbers: tuple[int | float, ...], extents: tuple[int, int, int, int]
) -> tuple[Range, ...]:
    """Return the range of each node for b, h, q_idx, kv_idx in [0, extent); None for nodes that are not integers."""
    highest: dict[str, int] = dict(zip(("b", "h", "q_idx", "kv_idx"), extents, strict=True))
    found: list[Range] = []
    for node in graph.nodes:
        args = [found[a] for a in node.args]
        value = _range(node, args) if args else _range_of_leaf(node, numbers, highest)
        found.append(value if value is not None and _holds(node.dtype, *value) else None)
    return tuple(found)


def _range_of_leaf(node: Node, numbers: tuple[int | float, ...], extents: dict[str, int]) -> Range:
    match node:
        case Input(name) if name in extents:
            return 0, max(0, extents[name] - 1)
        case NumberRef(position):
            value = numbers[position]
            return (value, value) if isinstance(value, int) else None
        case Const(value):
            return (value, value) if isinstance(value, int) else None
    return None


def _range(node: Node, args: list[Range]) -> Range:
    known = [a for a in args if a is not None]
    if len(known) < len(args) or node.dtype.is_floating_point:
        return None
    (low, high), (other_low, other_high) = known[0], known[-1]
    match node.op:
        case "cast" | "detach":
            return low, high
        case "add":
            return low + other_low, high + other_high
        case "sub":
            return low - other_high, high - other_low
        case "neg":
            return -high, -low
        case "abs":
            return max(0, low, -high), max(high, -low)
        case "mul":
            corners = [x * y for x in (low, high) for y in (other_low, other_high)]
            return min(corners), max(corners)
        case "maximum":
            return max(low, other_low), max(high, other_high)
        case "minimum":
            return min(low, other_low), min(high, other_high)
        case "floordiv" if other_low == other_high > 0:
            return low // other_low, high // other_low
        case "mod" if other_low == other_high > 0:
            return 0, other_low - 1
    return None


def _holds(dtype: torch.dtype, low: int, high: int) -> bool:
    """Return whether `dtype` is an integer type that can represent all these values, without wrap-around."""
    if dtype == torch.bool or dtype.is_floating_point:
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max
