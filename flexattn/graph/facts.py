"""facts: ModGraph -> ModFacts, what can be proved about a mod before it runs. A fact that is not stated may still hold.

ModFacts collects the results of `linear.py`, `row_bounds.py` and `interval_bounds.py` for printing.
sympy is used only for printing: it sorts and expands sums, so equal expressions have equal text.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.linear import (
    COMPARISONS,
    Linear,
    compared_or_summed,
    linear_forms,
    may_wrap,
    shift_invariant,
)  # fmt: skip
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation
from flexattn.graph.ranges import nonnegative, ranges
from flexattn.graph.row_bounds import Interval, row_union
from flexattn.process.frozen_class import frozen

_ORDER = ("score", "b", "h", "q_idx", "kv_idx", "grad")
_MOST_WRITTEN = 60  # operations in one printed expression


@frozen
class LoadFacts:
    """One read of a captured tensor."""

    node: int
    text: str  # table[h, q_idx - kv_idx], canonical
    reads: tuple[str, ...]  # the inputs that the index depends on
    nonnegative: tuple[bool, ...]  # for each axis: the index is never negative


@frozen
class ModFacts:
    """Facts that hold for every call of a mod: all b, h, q_idx, kv_idx in [0, INDEX_LIMIT), captures and numbers."""

    graph: ModGraph
    result: str  # canonical expression
    reads: tuple[str, ...]
    shift_invariant: bool  # depends on q_idx and kv_idx only through q_idx - kv_idx
    loads: tuple[LoadFacts, ...]
    rows: tuple[Interval, ...] | None  # masks: the keys of a row are in the union of these; None: no known bounds
    key: str | None  # masks: each row attends to this key ("q_idx" or "0") if it exists and `key_condition` holds
    key_condition: ModGraph | None  # a function of numbers only; None: always true
    assumes: tuple[str, ...]  # `shift_invariant` and `rows` hold if these integer sums do not wrap around

    def __repr__(self) -> str:
        return _print(self)


@lru_cache(256)
def analyze(graph: ModGraph) -> ModFacts:
    """Return the facts of a mod. They depend only on its graph."""
    texts = [str(e) for e in expressions(graph)]
    output = graph.output
    mask = graph.nodes[output].dtype == torch.bool
    positive = nonnegative(graph)
    loads = tuple(
        LoadFacts(i, texts[i], _ordered(graph.dependence[i]), tuple(positive[a] for a in load.args))
        for i, load in graph.loads.items()
    )
    rows, assumed = row_union(graph) if mask else (None, set[int]())
    invariant = shift_invariant(graph, assuming_exact=True)[output]
    assumed |= _assumed_by_shift(graph, output) if invariant else set()
    key, condition = _key_of_each_row(graph) if mask else (None, None)
    return ModFacts(
        graph=graph,
        result=texts[output],
        reads=_ordered(graph.dependence[output]),
        shift_invariant=invariant,
        loads=loads,
        rows=rows,
        key=key,
        key_condition=condition,
        assumes=tuple(f"{texts[i]} in {str(graph.nodes[i].dtype).removeprefix('torch.')}" for i in sorted(assumed)),
    )


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_ORDER.index))


def _assumed_by_shift(graph: ModGraph, output: int) -> set[int]:
    """Return the sums that may wrap around and that the proof of shift invariance relies on."""
    assumed, pending, seen = set[int](), [output], {output}
    while pending:
        node = pending.pop()
        sums = compared_or_summed(graph, node)
        assumed |= {n for total in sums for n in may_wrap(graph, total)}
        read = [n for t in sums for n, _ in linear_forms(graph)[t].terms] if sums else graph.nodes[node].args
        pending += set(read) - seen
        seen.update(read)
    return assumed


def _key_of_each_row(graph: ModGraph) -> tuple[str | None, ModGraph | None]:
    """Return a key that every row attends to, and the condition on numbers for that."""
    for key in ("q_idx", "0"):
        at_key = _at_key(graph, key)
        low, _ = ranges(at_key)[at_key.output]
        if low:
            return key, None
        if not any(isinstance(n, (Load, Input)) for n in at_key.nodes):
            return (key, at_key) if any(isinstance(n, NumberRef) for n in at_key.nodes) else (None, None)
    return None, None


def _at_key(graph: ModGraph, key: str) -> ModGraph:
    """Return the mask with kv_idx replaced by `key`. Comparisons of an integer with itself are folded."""

    def at_key(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        node = graph.nodes[i]
        args = [made[a] for a in node.args]
        same = len(args) == 2 and args[0].index == args[1].index and not args[0].dtype.is_floating_point
        match node:
            case Input("kv_idx"):
                return builder.input("q_idx", node.dtype) if key == "q_idx" else builder.const(0, node.dtype)
            case Operation("eq" | "le" | "ge" | "ne" | "lt" | "gt") if same:
                return builder.const(node.op in ("eq", "le", "ge"), torch.bool)
            case Operation("sub") if same:
                return builder.const(0, node.dtype)
            case Operation("cast"):
                return args[0].cast(node.dtype)
            case Operation(op):
                return builder.apply(op, *args)
        return None

    return rewrite(graph, at_key)


def expressions(graph: ModGraph) -> tuple[Any, ...]:
    """Return a sympy expression for each node, with sums and products expanded and sorted, for printing.

    The expressions are over integers and reals. They do not model wrap-around or rounding.
    """
    import sympy

    found: list[Any] = []
    sizes: list[int] = []
    for i, node in enumerate(graph.nodes):
        sizes.append(1 + sum(sizes[a] for a in node.args))
        try:
            if sizes[i] > _MOST_WRITTEN:
                raise ValueError("too long to read, and takes quadratic time")
            found.append(_expression(sympy, graph, i, [found[a] for a in node.args]))
        except (TypeError, ValueError, ZeroDivisionError):  # no sympy expression: use a symbol
            found.append(sympy.Symbol(f"t{i}"))
            sizes[i] = 1
    return tuple(found)


def _expression(sympy: Any, graph: ModGraph, i: int, args: list[Any]) -> Any:
    node = graph.nodes[i]
    integer = not node.dtype.is_floating_point and node.dtype != torch.bool
    match node:
        case Input(name):
            return sympy.Symbol(name, **({"integer": True, "nonnegative": True} if integer else {"real": True}))
        case NumberRef(position):
            return sympy.Symbol(graph.numbers[position].name, integer=True if integer else None)
        case Const(value):
            return sympy.sympify(value)
        case Load(capture):
            name = graph.captures[capture].name
            text = f"{name}[{', '.join(map(str, args))}]" if args else name
            return sympy.Symbol(text, **({} if node.dtype == torch.bool else {"integer": integer or None}))
    match node.op:
        case "cast" if graph.nodes[node.args[0]].dtype.is_floating_point == node.dtype.is_floating_point:
            return args[0]
        case "add" | "sub" | "mul" | "neg":
            x, y = args if len(args) == 2 else (args[0], None)
            return sympy.expand(
                {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "neg": lambda: -x}[node.op]()
            )
        case "floordiv" if integer:
            return sympy.floor(args[0] / args[1])
        case "mod" if integer:
            return sympy.Mod(*args)
        case "abs" | "maximum" | "minimum":
            return {"abs": sympy.Abs, "maximum": sympy.Max, "minimum": sympy.Min}[node.op](*args)
        case op if op in COMPARISONS:
            relation = {"lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "eq": sympy.Eq, "ne": sympy.Ne}[
                op
            ]
            return relation(*args)
        case "and" | "or" | "not" | "xor":
            return {"and": sympy.And, "or": sympy.Or, "not": sympy.Not, "xor": sympy.Xor}[node.op](*args)
    name = node.op if node.op != "cast" else str(node.dtype).removeprefix("torch.")
    if node.dtype == torch.bool:
        return sympy.Symbol(f"{name}({', '.join(map(str, args))})")
    return sympy.Function(name)(*args)


def _print(facts: ModFacts) -> str:
    graph = facts.graph
    texts = expressions(graph)
    mask = facts.graph.nodes[graph.output].dtype == torch.bool

    def text(total: Linear) -> str:
        return str(sum(f * texts[n] for n, f in total.terms) + total.constant)

    def one_of(name: str, sums: tuple[Linear, ...]) -> str:
        return text(sums[0]) if len(sums) == 1 else f"{name}({', '.join(map(text, sums))})"

    lines = [
        ("keep" if mask else "gives", facts.result),
        ("reads", ", ".join(facts.reads) or "nothing"),
    ]
    if facts.shift_invariant and {"q_idx", "kv_idx"} <= set(facts.reads):
        lines.append(("shift", "only q_idx - kv_idx matters"))
    if facts.rows == ():
        lines.append(("rows", "no key attends"))
    for interval in facts.rows or ():
        low = f"{one_of('max', interval.low)} <= " if interval.low else ""
        high = f" < {one_of('min', interval.high)}" if interval.high else ""
        lines.append(("rows", f"{low}kv_idx{high}{'' if interval.exact else ', some of them'}"))
    if facts.key is not None:
        where = "wherever q_idx < KV_LEN" if facts.key == "q_idx" else "always"
        condition = "" if facts.key_condition is None else f", if {expressions(facts.key_condition)[-1]}"
        lines.append(("has key", f"kv_idx = {facts.key}, {where}{condition}"))
    for load in facts.loads:
        wraps = "" if all(load.nonnegative) else ", index may be negative"
        lines.append(("load", f"{load.text} by {', '.join(load.reads) or 'nothing'}{wraps}"))
    lines += [("assumes", f"no wrap-around of {x}") for x in facts.assumes]
    return "\n".join([f"ModFacts({graph.name})", *(f"    {name:<8}{value}" for name, value in lines)])
