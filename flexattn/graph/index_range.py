"""index_range: between which values the index expressions of a mod lie, for the lengths and numbers of one call.

Plain interval arithmetic on Python integers, for what indices are made of; anything else is unknown. It costs
microseconds, so a plan can say for each load whether it needs PyTorch's wrap-around of negative indices, or a guard.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Node, NumberRef

Range = tuple[int, int] | None  # inclusive; None where nothing is known


@lru_cache(4096)
def index_ranges(
    graph: ModGraph, numbers: tuple[int | float, ...], extents: tuple[int, int, int, int]
) -> tuple[Range, ...]:
    """Return the range of each node for b, h, q_idx, kv_idx from 0 to below `extents`; None for what is no integer."""
    highest: dict[str, int] = dict(zip(("b", "h", "q_idx", "kv_idx"), extents, strict=True))
    found: list[Range] = []
    for node in graph.nodes:
        value = _range(node, [found[a] for a in node.args], numbers, highest)
        found.append(value if value is not None and _holds(node.dtype, *value) else None)
    return tuple(found)


def _range(node: Node, args: list[Range], numbers: tuple[int | float, ...], extents: dict[str, int]) -> Range:
    match node:
        case Input(name) if name in extents:
            return 0, max(0, extents[name] - 1)
        case NumberRef(position):
            value = numbers[position]
            return (value, value) if isinstance(value, int) else None
        case Const(value):
            return (value, value) if isinstance(value, int) else None
    known = [a for a in args if a is not None]
    if len(known) < len(args) or not args or node.dtype.is_floating_point:
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
    """Tell whether `dtype` is an integer type that has all these values: others wrap around."""
    if dtype == torch.bool or dtype.is_floating_point:
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= low and high <= limits.max
