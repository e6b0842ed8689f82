"""analyze: what can be proved about a mod before it runs, one-sided: a fact that is not stated may still hold.

Integer expressions are taken apart as sums `c1 * x1 + c2 * x2 + ... + c0` of the nodes that are no sums themselves:
shift invariance and the row bounds `low(q) <= kv < high(q)` come from these. sympy writes the canonical expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from flexattn.graph.bound import never_wraps, nonnegative, ranges
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation
from flexattn.process.forks import cached_property

_ORDER = ("score", "b", "h", "q_idx", "kv_idx", "grad")
_MOST_WRITTEN = 60  # operations in one expression
_MOST_INTERVALS = 4  # in a union of row bounds; a kernel would not gain from more
_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True)
class Sum:
    """An integer as a sum of constant multiples of nodes."""

    terms: tuple[tuple[int, int], ...] = ()  # (node, factor), by node, no factor 0
    constant: int = 0

    def plus(self, other: Sum, factor: int = 1) -> Sum:
        factors = dict(self.terms)
        for node, f in other.terms:
            factors[node] = factors.get(node, 0) + f * factor
        return Sum(tuple(sorted((n, f) for n, f in factors.items() if f)), self.constant + other.constant * factor)

    def times(self, factor: int) -> Sum:
        return Sum().plus(self, factor)

    def factor(self, node: int | None) -> int:
        return next((factor for n, factor in self.terms if n == node), 0)

    def without(self, node: int | None) -> Sum:
        return replace(self, terms=tuple(t for t in self.terms if t[0] != node))


@dataclass(frozen=True)
class Interval:
    """Keys max(low) <= kv_idx < min(high) of a row. `exact`: these all attend; otherwise only some of them may."""

    low: tuple[Sum, ...] = ()
    high: tuple[Sum, ...] = ()
    exact: bool = True


@dataclass(frozen=True)
class LoadFacts:
    """One read of a captured tensor."""

    node: int
    text: str  # table[h, q_idx - kv_idx], canonical
    reads: tuple[str, ...]  # the inputs that the index is computed from
    nonnegative: tuple[bool, ...]  # for each axis: the index never wraps around from the end
    range: tuple[Any, Any] | None  # least and greatest value by dtype, None for floats


@dataclass(frozen=True)
class ModFacts:
    """What holds for every call of a mod: all b, h, q_idx, kv_idx in [0, INDEX_LIMIT), captured values and numbers."""

    graph: ModGraph
    result: str  # canonical expression
    reads: tuple[str, ...]
    shift_invariant: bool  # q_idx and kv_idx matter only through q_idx - kv_idx
    loads: tuple[LoadFacts, ...]
    rows: tuple[Interval, ...] | None  # masks: the keys of a row lie in the union of these; None: no bounds are known
    key: str | None  # masks: "q_idx" or "0": that key of each row attends, if it exists and `key_condition` holds
    key_condition: ModGraph | None  # over numbers alone; None: always
    assumes: tuple[str, ...]  # integer sums that must not wrap around for `shift_invariant` and `rows` to hold

    def rows_have_a_key(self, numbers: Sequence[int | float], Q: int, KV: int) -> bool:
        """Tell whether every row surely has a key that attends, for these numbers and lengths."""
        if self.key is None or (KV < Q if self.key == "q_idx" else KV < 1):
            return False
        if self.key_condition is None:
            return True
        zero = torch.zeros((), dtype=torch.int32)
        (holds,) = self.key_condition.evaluate(dict.fromkeys(self.key_condition.inputs, zero), (), numbers)
        return bool(holds)

    def __repr__(self) -> str:
        return _print(self)


@lru_cache(256)
def analyze(graph: ModGraph) -> ModFacts:
    """Return the facts of a mod; they depend on its graph alone."""
    sums = _Sums(graph)
    texts = [str(e) for e in expressions(graph)]
    output = graph.output
    mask = graph.nodes[output].dtype == torch.bool
    positive = nonnegative(graph)
    loads = tuple(
        LoadFacts(i, texts[i], _ordered(graph.dependence[i]), tuple(positive[a] for a in load.args), _limits(graph, i))
        for i, load in graph.loads.items()
    )
    rows = _rows(sums, output) if mask else None
    invariant = sums.invariant(output)
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
        assumes=tuple(f"{texts[i]} in {str(graph.nodes[i].dtype).removeprefix('torch.')}" for i in sums.assumed),
    )


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=_ORDER.index))


def _limits(graph: ModGraph, i: int) -> tuple[Any, Any] | None:
    return None if graph.nodes[i].dtype.is_floating_point else ranges(graph)[i]


class _Sums:
    """The sum that each integer node of a graph is."""

    def __init__(self, graph: ModGraph) -> None:
        self.graph = graph
        self.kv = next((i for i in range(len(graph.nodes)) if graph.is_input(i, "kv_idx")), None)
        self.safe = never_wraps(graph)
        self.sums = self._all()
        self._assumed: set[int] = set()

    @property
    def assumed(self) -> tuple[int, ...]:
        return tuple(sorted(self._assumed))

    def _all(self) -> list[Sum]:
        sums: list[Sum] = []
        for i, node in enumerate(self.graph.nodes):
            parts = [sums[a] for a in node.args]
            itself = Sum(((i, 1),))
            match node:
                case _ if node.dtype.is_floating_point or node.dtype == torch.bool:
                    sums.append(itself)
                case Const(value):
                    sums.append(Sum((), int(value)))
                case Operation("add"):
                    sums.append(parts[0].plus(parts[1]))
                case Operation("sub"):
                    sums.append(parts[0].plus(parts[1], -1))
                case Operation("neg"):
                    sums.append(parts[0].times(-1))
                case Operation("mul") if not parts[0].terms or not parts[1].terms:
                    factor, other = (parts[0], parts[1]) if not parts[0].terms else (parts[1], parts[0])
                    sums.append(other.times(factor.constant))
                case Operation("cast") if self._is_integer(node.args[0]) and self.safe[i]:
                    sums.append(parts[0])
                case _:
                    sums.append(itself)
        return sums

    def _is_integer(self, i: int) -> bool:
        dtype = self.graph.nodes[i].dtype
        return not dtype.is_floating_point and dtype != torch.bool

    def of(self, i: int) -> Sum:
        """Return the sum of node i, and note the sums below it that may wrap around."""
        pending = [i]
        while pending:
            node = pending.pop()
            if self.graph.nodes[node].op in ("add", "sub", "neg", "mul", "cast") and self.sums[node] != Sum(
                ((node, 1),)
            ):
                if not self.safe[node]:
                    self._assumed.add(node)
                pending += self.graph.nodes[node].args
        return self.sums[i]

    def compared(self, i: int) -> Sum | None:
        """Return left - right of a comparison of integers."""
        left, right = self.graph.nodes[i].args
        if not self._is_integer(left):
            return None
        return self.of(left).plus(self.of(right), -1)

    def invariant(self, i: int) -> bool:
        """Tell whether node i reads q_idx and kv_idx only through q_idx - kv_idx, and note which sums that rests on."""
        if not self._invariants[i]:
            return False
        pending, seen = [i], {i}
        while pending:
            node = pending.pop()
            sums = self._summed(node)
            for total in sums:
                self.of(total)
            read = [n for t in sums for n, _ in self.sums[t].terms] if sums else self.graph.nodes[node].args
            pending += set(read) - seen
            seen.update(read)
        return True

    @cached_property
    def _invariants(self) -> list[bool]:
        found: list[bool] = []
        for i, node in enumerate(self.graph.nodes):
            if not self.graph.dependence[i] & {"q_idx", "kv_idx"}:
                found.append(True)
            elif node.op == "input":
                found.append(False)
            elif sums := self._summed(i):
                total = self.sums[sums[0]]
                total = total.plus(self.sums[sums[1]], -1) if len(sums) > 1 else total
                inputs = [f for n, f in total.terms if self.graph.is_input(n, "q_idx", "kv_idx")]
                found.append(not sum(inputs) and all(found[n] for n, _ in total.terms if not self._is_input(n)))
            else:
                found.append(all(found[a] for a in node.args))
        return found

    def _summed(self, i: int) -> tuple[int, ...]:
        """Return the sums that stand for node i: itself, or the two sides of a comparison of integers."""
        node = self.graph.nodes[i]
        if not self.graph.dependence[i] & {"q_idx", "kv_idx"}:
            return ()
        if node.op in _NEGATED and self._is_integer(node.args[0]):
            return node.args
        return (i,) if self._is_integer(i) and self.sums[i] != Sum(((i, 1),)) else ()

    def _is_input(self, i: int) -> bool:
        return isinstance(self.graph.nodes[i], Input)


def _rows(sums: _Sums, output: int) -> tuple[Interval, ...] | None:
    """Return intervals whose union holds every key of a row, or None where they are many or one bounds nothing."""
    union = _union(sums, output, True)
    return union if all(x.low or x.high or x.exact for x in union) and len(union) <= _MOST_INTERVALS else None


def _union(sums: _Sums, i: int, wanted: bool) -> tuple[Interval, ...]:
    """Return the keys for which node i is `wanted` as a union of intervals that may hold more than these."""
    pending, asked = [(i, wanted)], {(i, wanted)}
    while pending:
        node, want = pending.pop()
        if sums.graph.nodes[node].op in ("and", "or", "not"):
            other = want != (sums.graph.nodes[node].op == "not")
            new = {(a, other) for a in sums.graph.nodes[node].args} - asked
            asked |= new
            pending += new
    found: dict[tuple[int, bool], tuple[Interval, ...]] = {}
    for node, want in sorted(asked):
        found[node, want] = _union_of(sums, node, want, found)
    return found[i, wanted]


def _union_of(
    sums: _Sums, i: int, wanted: bool, found: dict[tuple[int, bool], tuple[Interval, ...]]
) -> tuple[Interval, ...]:
    node = sums.graph.nodes[i]
    both = "and" if wanted else "or"
    match node:
        case Const(value):
            return (Interval(),) if bool(value) == wanted else ()
        case Operation("not"):
            return found[node.args[0], not wanted]
        case Operation("and" | "or") if node.op == both:
            left, right = (found[a, wanted] for a in node.args)
            if len(left) * len(right) > _MOST_INTERVALS**2:
                return (Interval(exact=False),)
            return tuple(
                Interval(_distinct(x.low + y.low), _distinct(x.high + y.high), x.exact and y.exact)
                for x in left
                for y in right
            )
        case Operation("and" | "or"):
            either = tuple(dict.fromkeys(x for a in node.args for x in found[a, wanted]))
            return either if len(either) <= _MOST_INTERVALS**2 else (Interval(exact=False),)
        case Operation(op) if op in _NEGATED:
            return (_compare(sums, i, op if wanted else _NEGATED[op]),)
    return (Interval(exact=False),)


def _distinct(items: tuple[Sum, ...]) -> tuple[Sum, ...]:
    return tuple(dict.fromkeys(items))


def _compare(sums: _Sums, i: int, op: str) -> Interval:
    """Solve a comparison for kv_idx, where it stands with a factor of 1 or -1, perhaps inside of one abs."""
    difference = sums.compared(i)
    if difference is None or op == "ne":
        return Interval(exact=False)
    if op in ("lt", "gt"):  # of integers: a < b is a <= b - 1
        difference, op = difference.plus(Sum((), 1 if op == "lt" else -1)), {"lt": "le", "gt": "ge"}[op]
    parts = [difference] if op == "le" else [difference.times(-1)]
    parts = [difference, difference.times(-1)] if op == "eq" else parts
    solved = [_solve(sums, expanded) for part in parts for expanded in _without_abs(sums, part)]
    return Interval(
        tuple(s for side, s in solved if side == "low"),
        tuple(s for side, s in solved if side == "high"),
        all(side is not None for side, _ in solved),
    )


def _without_abs(sums: _Sums, total: Sum) -> list[Sum]:
    """Replace abs(x) + rest <= 0 by x + rest <= 0 and -x + rest <= 0."""
    for node, factor in total.terms:
        if sums.graph.nodes[node].op == "abs" and factor == 1 and "kv_idx" in sums.graph.dependence[node]:
            inner = sums.of(sums.graph.nodes[node].args[0])
            return [total.without(node).plus(inner, sign) for sign in (1, -1)]
    return [total]


def _solve(sums: _Sums, total: Sum) -> tuple[str | None, Sum]:
    """Solve total <= 0 for kv_idx: ("low", s) for kv_idx >= s, ("high", s) for kv_idx < s."""
    factor, rest = total.factor(sums.kv), total.without(sums.kv)
    if factor not in (1, -1) or any("kv_idx" in sums.graph.dependence[n] for n, _ in rest.terms):
        return None, total
    return ("low", rest) if factor == -1 else ("high", rest.times(-1).plus(Sum((), 1)))


def _key_of_each_row(graph: ModGraph) -> tuple[str | None, ModGraph | None]:
    """Return a key that attends in every row, with the condition on numbers under which it does."""
    for key in ("q_idx", "0"):
        at_key = _at_key(graph, key)
        low, _ = ranges(at_key)[at_key.output]
        if low:
            return key, None
        if not any(isinstance(n, (Load, Input)) for n in at_key.nodes):
            return (key, at_key) if any(isinstance(n, NumberRef) for n in at_key.nodes) else (None, None)
    return None, None


def _at_key(graph: ModGraph, key: str) -> ModGraph:
    """Return the mask with kv_idx replaced; what then compares an integer with itself is decided."""

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
    """Return a sympy expression of each node, sums and products expanded and sorted: for reading and comparing.

    They are of integers and reals: neither wrap-around nor rounding is in them.
    """
    import sympy

    found: list[Any] = []
    sizes: list[int] = []
    for i, node in enumerate(graph.nodes):
        sizes.append(1 + sum(sizes[a] for a in node.args))
        try:
            if sizes[i] > _MOST_WRITTEN:
                raise ValueError("too long to read, and quadratic in all")
            found.append(_expression(sympy, graph, i, [found[a] for a in node.args]))
        except (TypeError, ValueError, ZeroDivisionError):  # sympy declines: the node stands for itself
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
        case op if op in _NEGATED:
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

    def text(total: Sum) -> str:
        return str(sum(f * texts[n] for n, f in total.terms) + total.constant)

    def one_of(name: str, sums: tuple[Sum, ...]) -> str:
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
