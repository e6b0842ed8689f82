"""narrow: compute the integers of a traced mod in int32 if it can represent all their values.

A mod is traced with int64 indices, as torch runs it. GPUs compute int32 faster, and ordinary masks (q_idx - kv_idx,
q_idx // 128, windows) never need more. Which nodes need int64 follows from their ranges (`ranges.py`) and from the
magnitudes of the captured numbers. A graph is valid for all numbers of the same magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from flexattn.errors import ModError, message
from flexattn.graph.builder import Builder, Expr, in_order_of_use, rewrite
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation
from flexattn.graph.ranges import ranges

# Magnitudes of captured integers, in bits. Sums of lengths and a few small numbers fit in int32.
_SMALL, _MEDIUM, _LARGE = 24, 30, 63
_INT32 = torch.iinfo(torch.int32)


def narrowed(graph: ModGraph, numbers: Sequence[int | float]) -> ModGraph:
    """Return `graph` with its integers in int32 if that is sufficient for these numbers."""
    for position, low, high in _limits(graph):
        if not low <= numbers[position] <= high:
            raise _does_not_fit(graph, position, numbers[position], low, high)
    bits = tuple([_LARGE if type(n) is float else _magnitude(n) for n in numbers])
    return _narrowed(graph, bits, graph.location)  # equal graphs may have different locations


def specialized(graph: ModGraph, numbers: tuple[int | float, ...]) -> ModGraph:
    """Return a graph as it would be if its numbers were literals in the user's code, without names.

    Its nodes are in the order of their use: where a trace makes a constant depends on whether it is a literal.
    """
    return _specialized(graph, numbers, repr(numbers))


@lru_cache(512)
def _specialized(graph: ModGraph, numbers: tuple[int | float, ...], text: str) -> ModGraph:
    # `text` distinguishes 0.0 from -0.0
    def literal(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        node = graph.nodes[i]
        return builder.const(numbers[node.position], node.dtype) if isinstance(node, NumberRef) else None

    without_numbers = replace(rewrite(graph, literal), numbers=())
    return in_order_of_use(_narrowed(without_numbers, (), ""))


def _magnitude(number: int | float) -> int:
    return _SMALL if -(1 << _SMALL) <= number <= 1 << _SMALL else _MEDIUM if abs(number) <= 1 << _MEDIUM else _LARGE


@lru_cache(512)
def _limits(graph: ModGraph) -> tuple[tuple[int, int, int], ...]:
    """Return (position, min, max) of the captured integers: the range of the dtypes that they are used in."""
    found: dict[int, tuple[int, int]] = {}
    for node in graph.nodes:
        source = graph.nodes[node.args[0]] if node.op == "cast" else node
        if isinstance(source, NumberRef) and source.dtype == torch.int64:
            position = source.position
            whole = not node.dtype.is_floating_point and node.dtype != torch.bool
            limits = torch.iinfo(node.dtype if whole else torch.int64)
            low, high = found.get(position, (limits.min, limits.max))
            found[position] = max(low, limits.min), min(high, limits.max)
    return tuple((position, low, high) for position, (low, high) in found.items())


def _does_not_fit(graph: ModGraph, position: int, value: int | float, low: int, high: int) -> ModError:
    fix = "Convert the tensor that it is combined with by .long(), or leave the number out."
    name = f"captured number `{graph.numbers[position].name}` of {graph.name}"
    return ModError(message(name, value, f"{low} to {high}, the range of the dtype it is computed in", fix))


@lru_cache(512)
def _narrowed(graph: ModGraph, bits: tuple[int, ...], location: str) -> ModGraph:
    found = ranges(graph, bits)

    def narrow(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        dtype, (low, high) = graph.nodes[i].dtype, found[i]
        fits = dtype == torch.int64 and _INT32.min <= low and high <= _INT32.max
        return _narrow(builder, graph, i, made, torch.int32 if fits else dtype)

    numbers = tuple([replace(n, bits=b) for n, b in zip(graph.numbers, bits, strict=True)])
    return replace(rewrite(graph, narrow), numbers=numbers, location=location)


def _narrow(builder: Builder, graph: ModGraph, i: int, made: list[Expr], dtype: torch.dtype) -> Expr | None:
    """Append node i, whose result fits in `dtype`. An int64 operand may have become int32."""
    node = graph.nodes[i]
    args = [made[a] for a in node.args]
    match node:
        case Const(value):
            return builder.const(value, dtype)
        case NumberRef(position):
            return builder.number(position, node.dtype).cast(dtype)
        case Input() | Load():
            return None
        case Operation("cast"):
            return args[0].cast(dtype)
    before = [graph.nodes[a].dtype for a in node.args]
    wide = [x for x, d in zip(args, before, strict=True) if d == torch.int64]
    fits = dtype != torch.int64 and all(x.dtype == torch.int32 for x in wide)
    computed = torch.int32 if fits else torch.int64
    operands = [x.cast(computed) if d == torch.int64 else x for x, d in zip(args, before, strict=True)]
    return builder.apply(node.op, *operands)
