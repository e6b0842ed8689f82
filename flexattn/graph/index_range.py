"""index_range: between which values the index expressions of a mod lie, for the lengths and numbers of one call.

Plain interval arithmetic on Python integers, for what indices are made of; anything else is unknown. It costs
microseconds, so a plan can say for each load whether it needs PyTorch's wrap-around of negative indices, or a guard.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Affine:
    """An index as q * q_idx + kv * kv_idx + the sum of nodes, each with its sign, that depend on neither."""

    q: int
    kv: int
    rest: tuple[tuple[int, int], ...]  # (sign, node)


_MOST_TERMS = 16  # of a sum


def affine(graph: ModGraph, position: int) -> Affine | None:
    """Return a node as a sum of indices, None if anything but adding and subtracting is done to q_idx and kv_idx."""
    return _sums(graph)[position]


@lru_cache(512)
def _sums(graph: ModGraph) -> tuple[Affine | None, ...]:
    found: list[Affine | None] = []
    for position, node in enumerate(graph.nodes):
        total = _sum(graph, position, [found[a] for a in node.args])
        found.append(total if total is None or len(total.rest) <= _MOST_TERMS else None)
    return tuple(found)


def _sum(graph: ModGraph, position: int, parts: list[Affine | None]) -> Affine | None:
    node = graph.nodes[position]
    if not graph.dependence[position] & {"q_idx", "kv_idx"}:
        return Affine(0, 0, ((1, position),))
    if isinstance(node, Input):
        return Affine(int(node.name == "q_idx"), int(node.name == "kv_idx"), ())
    if node.op not in ("add", "sub", "neg", "cast") or node.dtype not in (torch.int32, torch.int64):
        return None
    signs = (1, -1) if node.op == "sub" else (-1,) if node.op == "neg" else (1, 1)
    q, kv, rest = 0, 0, ()
    for sign, part in zip(signs, parts, strict=False):
        if part is None:
            return None
        q, kv = q + sign * part.q, kv + sign * part.kv
        rest += tuple((sign * s, n) for s, n in part.rest)
    return Affine(q, kv, rest)


@lru_cache(512)
def shift_invariant(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it stays the same when q_idx and kv_idx grow by one number, as q_idx - kv_idx does."""
    growth: list[int | None] = []  # by how much a node grows when both grow by one, None where it is no constant
    for node in graph.nodes:
        args = [growth[a] for a in node.args]
        if isinstance(node, Input):
            growth.append(1 if node.name in ("q_idx", "kv_idx") else 0 if node.name in ("b", "h") else None)
        elif None in args:
            growth.append(None)
        elif not any(args):
            growth.append(0)
        elif node.op in ("add", "sub", "neg", "cast") and node.dtype in (torch.int32, torch.int64):
            signs = (1, -1) if node.op == "sub" else (-1,) if node.op == "neg" else (1, 1)
            growth.append(sum(s * a for s, a in zip(signs, args, strict=False) if a is not None))
        else:
            growth.append(None)
    return tuple(g == 0 for g in growth)
