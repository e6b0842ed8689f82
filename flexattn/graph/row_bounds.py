"""row_bounds: the columns that a row of scores attends to, as bounds low <= column < high.

Integer comparisons are solved for the column (kv_idx, or q_idx). There are two results:

- `row_bounds`: an interval, and conditions that are not intervals, as a tree over the `and`, `or` and `not` of the
  mask. A kernel computes the interval once per row.
- `row_union`: a union of intervals that contains all columns that attend. `explain` prints it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from flexattn.graph.linear import COMPARISONS, Linear, is_integer, linear_forms, may_wrap
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, NumberRef, Operation
from flexattn.graph.ranges import never_wraps
from flexattn.process.frozen_class import frozen

_MOST_NESTED = 12  # nesting depth of operations in an interval
_MOST_INTERVALS = 4  # in a union; more are not printed
_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


@frozen
class Solved:
    """A comparison solved for the column: column >= bound ("low") or column < bound ("high")."""

    side: Literal["low", "high"]
    bound: Linear


@frozen
class WholeRows:
    """All columns of the rows for which a node is true. The node does not depend on the column."""

    node: int


@frozen
class Complement:
    """The columns on the other side of a bound."""

    of: RowInterval


@frozen
class Both:
    """The intersection of two intervals."""

    x: RowInterval
    y: RowInterval


@frozen
class Either:
    """The union of two intervals that are bounded only on the same side."""

    x: RowInterval
    y: RowInterval


@frozen
class Condition:
    """The columns for which a node is true, if these are not an interval. It is evaluated per (q, kv) pair."""

    node: int


RowInterval = Solved | WholeRows | Complement | Both | Either | Condition


@lru_cache(512)
def row_bounds(graph: ModGraph, column: str) -> RowInterval:
    """Return a mask as intervals of its rows. Conjuncts that are not intervals are Conditions."""
    return _conjunction(graph, column, graph.output, 0)


def _conjunction(graph: ModGraph, column: str, position: int, depth: int) -> RowInterval:
    interval = _interval(graph, column, position, depth)
    if interval is not None:
        return interval
    node = graph.nodes[position]
    if node.op != "and" or depth == _MOST_NESTED:
        return Condition(position)
    return Both(*(_conjunction(graph, column, a, depth + 1) for a in node.args))


def _interval(graph: ModGraph, column: str, position: int, depth: int) -> RowInterval | None:
    """Return a node as an interval without conditions, None if it is not one."""
    node = graph.nodes[position]
    if column not in graph.dependence[position]:
        return WholeRows(position)
    if node.op in ("lt", "le", "gt", "ge"):
        forms = linear_forms(graph, frozenset((column,)))
        left, right = (forms[a] for a in node.args)
        if not (is_integer(graph, node.args[0]) and left.exact and right.exact):
            return None
        (total,) = _totals(node.op, left.plus(right, -1))
        solved = [_solve(graph, column, part) for part in _both_signs(graph, total, column)]
        known = [part for part in solved if part is not None]
        return None if len(known) < len(solved) else known[0] if len(known) == 1 else Both(*known)
    if node.op not in ("and", "or", "not") or depth == _MOST_NESTED:
        return None
    found = [_interval(graph, column, a, depth + 1) for a in node.args]
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        return None
    if node.op == "and":
        return Both(*known)
    if node.op == "not":
        return Complement(*known) if len(bounded_sides(known[0])) < 2 else None
    return Either(*known) if len(set().union(*map(bounded_sides, known))) < 2 else None


def _both_signs(graph: ModGraph, total: Linear, column: str) -> list[Linear]:
    """Return sums that are all at most 0 if and only if `total` is, one for each sign of an abs of the column."""
    n = _abs_of(graph, total, column)
    if n is None or not never_wraps(graph)[n]:
        return [total]
    parts = _without_abs(total, n, linear_forms(graph, frozenset((column,)))[graph.nodes[n].args[0]])
    return parts if all(part.exact for part in parts) else [total]


def _abs_of(graph: ModGraph, total: Linear, column: str) -> int | None:
    """Return the node of an abs that depends on the column and is a term of a sum, with a factor of 1."""
    terms = (n for n, factor in total.terms if factor == 1 and graph.nodes[n].op == "abs")
    return next((n for n in terms if column in graph.dependence[n]), None)


def _without_abs(total: Linear, n: int, inner: Linear) -> list[Linear]:
    """Replace abs(x) + rest <= 0 by x + rest <= 0 and -x + rest <= 0. `n`: the node of the abs, `inner`: x."""
    return [total.without(n).plus(inner, sign) for sign in (1, -1)]


def bounded_sides(interval: RowInterval) -> frozenset[str]:
    """Return the sides on which an interval has a bound."""
    match interval:
        case Solved(side):
            return frozenset((side,))
        case WholeRows():
            return frozenset(("high",))
        case Complement(of):
            return frozenset({"low": "high", "high": "low"}[side] for side in bounded_sides(of))
        case Both(x, y):
            return bounded_sides(x) | bounded_sides(y)
        case Either(x, y):
            return bounded_sides(x) & bounded_sides(y)
        case Condition():
            return frozenset()


def conditions_of(interval: RowInterval) -> tuple[int, ...]:
    """Return the nodes of the Conditions. They are conjuncts of the mask, so only intersections contain them."""
    match interval:
        case Condition(node):
            return (node,)
        case Both(x, y):
            return conditions_of(x) + conditions_of(y)
    return ()


def end_nodes(interval: RowInterval) -> tuple[int, ...]:
    """Return the nodes that the bounds of an interval are computed from."""
    match interval:
        case Solved(_, bound):
            return tuple(node for node, _ in bound.terms)
        case WholeRows(node):
            return (node,)
        case Complement(of):
            return end_nodes(of)
        case Both(x, y) | Either(x, y):
            return end_nodes(x) + end_nodes(y)
        case Condition():
            return ()


def is_interval(interval: RowInterval) -> bool:
    """Return whether there are no conditions: each row attends to exactly the keys between its bounds."""
    match interval:
        case Condition():
            return False
        case Complement(of):
            return is_interval(of)
        case Both(x, y) | Either(x, y):
            return is_interval(x) and is_interval(y)
    return True


def nodes_of(interval: RowInterval) -> frozenset[int]:
    """Return the nodes that the ends of an interval are computed from."""
    match interval:
        case Condition():
            return frozenset()
        case Solved(_, bound):
            return frozenset(node for node, _ in bound.terms)
        case WholeRows(node):
            return frozenset((node,))
        case Complement(of):
            return nodes_of(of)
        case Both(x, y) | Either(x, y):
            return nodes_of(x) | nodes_of(y)


def moves_with_queries(graph: ModGraph, interval: RowInterval) -> bool:
    """Return whether each end of an interval is the same for all queries, or increases by one from query to query.

    Rows may also be empty, which adds no keys to those of their neighbors.
    """
    match interval:
        case WholeRows():
            return True
        case Both(x, y):
            return moves_with_queries(graph, x) and moves_with_queries(graph, y)
    return _ends_move(graph, interval)


def _ends_move(graph: ModGraph, interval: RowInterval) -> bool:
    match interval:
        case Solved(_, bound):
            terms = _expanded(linear_forms(graph), bound).terms
            own = [factor for node, factor in terms if graph.is_input(node, "q_idx")]
            others = [node for node, _ in terms if not graph.is_input(node, "q_idx")]
            return sum(own) in (0, 1) and not any("q_idx" in graph.dependence[node] for node in others)
        case WholeRows(node):
            return "q_idx" not in graph.dependence[node]
        case Complement(of):
            return _ends_move(graph, of)
        case Both(x, y) | Either(x, y):
            return _ends_move(graph, x) and _ends_move(graph, y)
    return False


def _expanded(forms: tuple[Linear, ...], sum_: Linear) -> Linear:
    """Return a sum of nodes with each node as its own sum."""
    total = Linear((), sum_.constant)
    for node, factor in sum_.terms:
        total = total.plus(forms[node], factor)
    return total


def longest_row(graph: ModGraph, numbers: tuple[int | float, ...]) -> int | None:
    """Return a bound of the columns kv_idx of a row from its first to its last, as of a window; None: no bound."""
    forms = linear_forms(graph)
    lows, highs = (_bounds_of(row_bounds(graph, "kv_idx"), side) for side in ("low", "high"))
    lengths = [_value(graph, forms, high.plus(low, -1), numbers) for low in lows for high in highs]
    return min((max(n, 0) for n in lengths if n is not None), default=None)


def _bounds_of(interval: RowInterval, side: str) -> tuple[Linear, ...]:
    """Return bounds of one side that each column of an interval satisfies."""
    match interval:
        case Solved(of, bound) if of == side:
            return (bound,)
        case Both(x, y):
            return _bounds_of(x, side) + _bounds_of(y, side)
    return ()


def _value(graph: ModGraph, forms: tuple[Linear, ...], sum_: Linear, numbers: tuple[int | float, ...]) -> int | None:
    """Return the value of a sum of nodes; None if it depends on more than the mod's numbers."""
    total = _expanded(forms, sum_)
    value = total.constant
    for position, factor in total.terms:
        node = graph.nodes[position]
        if node.op == "cast":  # of a number that was narrowed to int32, which its value fits
            node = graph.nodes[node.args[0]]
        number = numbers[node.position] if isinstance(node, NumberRef) else None
        if not isinstance(number, int):
            return None
        value += factor * number
    return value


def _totals(op: str, difference: Linear) -> list[Linear]:
    """Return the sums that are at most 0 if and only if `difference op 0` holds."""
    if op in ("lt", "gt"):  # for integers, a < b is a <= b - 1
        difference = difference.plus(Linear((), 1 if op == "lt" else -1))
    negated = difference.times(-1)
    return [difference, negated] if op == "eq" else [difference] if op in ("lt", "le") else [negated]


def _solve(graph: ModGraph, column: str, total: Linear) -> Solved | None:
    """Solve total <= 0 for the column. Return None unless the column occurs once, with a factor of 1 or -1."""
    own = next((n for n, _ in total.terms if graph.is_input(n, column)), None)
    factor, rest = total.factor(own), total.without(own)
    if factor not in (1, -1) or any(column in graph.dependence[n] for n, _ in rest.terms):
        return None
    return Solved("low", rest) if factor == -1 else Solved("high", rest.times(-1).plus(Linear((), 1)))


@frozen
class Interval:
    """Keys max(low) <= kv_idx < min(high) of a row. If `exact`, the row attends to all of them, otherwise to some."""

    low: tuple[Linear, ...] = ()
    high: tuple[Linear, ...] = ()
    exact: bool = True


def row_union(graph: ModGraph) -> tuple[tuple[Interval, ...] | None, set[int]]:
    """Return intervals whose union contains all keys of a row, and the sums that must not wrap around for that.

    The union is None if there are too many intervals, or if one is unbounded and not exact.
    """
    assumed = set[int]()
    asked = _asked(graph)
    found: dict[tuple[int, bool], tuple[Interval, ...]] = {}
    for node, wanted in asked:
        found[node, wanted] = _union_of(graph, node, wanted, found, assumed)
    union = found[graph.output, True]
    known = all(x.low or x.high or x.exact for x in union) and len(union) <= _MOST_INTERVALS
    return union if known else None, assumed


def _asked(graph: ModGraph) -> list[tuple[int, bool]]:
    """Return the nodes under `and`, `or` and `not` of a mask, with the truth value for which keys are collected."""
    pending, asked = [(graph.output, True)], {(graph.output, True)}
    while pending:
        position, wanted = pending.pop()
        node = graph.nodes[position]
        if node.op in ("and", "or", "not"):
            new = {(a, wanted != (node.op == "not")) for a in node.args} - asked
            asked |= new
            pending += new
    return sorted(asked)


def _union_of(
    graph: ModGraph, i: int, wanted: bool, found: dict[tuple[int, bool], tuple[Interval, ...]], assumed: set[int]
) -> tuple[Interval, ...]:
    """Return a union of intervals that contains the keys for which node i is `wanted`. It may contain more."""
    node = graph.nodes[i]
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
        case Operation(op) if op in COMPARISONS and is_integer(graph, node.args[0]):
            assumed |= {n for a in node.args for n in may_wrap(graph, a)}
            return (_compare(graph, i, op if wanted else _NEGATED[op], assumed),)
    return (Interval(exact=False),)


def _distinct(items: tuple[Linear, ...]) -> tuple[Linear, ...]:
    return tuple(dict.fromkeys(items))


def _compare(graph: ModGraph, i: int, op: str, assumed: set[int]) -> Interval:
    """Solve a comparison for kv_idx, which may be inside an abs."""
    if op == "ne":
        return Interval(exact=False)
    left, right = (linear_forms(graph)[a] for a in graph.nodes[i].args)
    totals = [x for total in _totals(op, left.plus(right, -1)) for x in _assuming_exact(graph, total, assumed)]
    solved = [_solve(graph, "kv_idx", total) for total in totals]
    low, high = (
        tuple(s.bound.sorted() for s in solved if s is not None and s.side == side) for side in ("low", "high")
    )
    return Interval(low, high, None not in solved)


def _assuming_exact(graph: ModGraph, total: Linear, assumed: set[int]) -> list[Linear]:
    """Return a sum without an abs of kv_idx, and add the sums in it that must not wrap around to `assumed`."""
    n = _abs_of(graph, total, "kv_idx")
    if n is None:
        return [total]
    x = graph.nodes[n].args[0]
    assumed |= may_wrap(graph, x)
    return _without_abs(total, n, linear_forms(graph)[x])
