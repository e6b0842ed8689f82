"""row_bounds: a mask_mod as two comparisons for each place, where what attends in a row of scores is an interval.

Causal, sliding, prefix-LM and document masks are such; of other masks the conjuncts that are. What bounds a row is
computed once for it, in whatever operations the user wrote; for each place of a thread two comparisons with a constant
are left (the columns of a thread are `near` + `offset`). Written out, a causal document mask takes six.
"""

from __future__ import annotations

from flexattn.compile.lower import Dialect, Writer, mod_parameters
from flexattn.compile.mod_plan import ModPlan
from flexattn.graph.bound import never_wraps

_FAR = 2**30  # beyond all lengths, and no sum of two wraps around
_MOST_NESTED = 12  # operations that are looked into
_FLIPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}

Interval = tuple[str | None, str | None]  # texts of the first column and of that behind the last; None: no bound


def lower_row_bounds(mod: ModPlan, function: str, dialect: Dialect, *, limited: bool, rows: bool) -> str:
    """Return the text of a mask_mod that takes its columns as `near` and `offset`.

    `limited`: it also takes `limit`, which columns are below. `rows`: it takes `row`, the rows that attend at all.
    """
    output = mod.graph.outputs[0]
    assert output is not None
    writer = _RowBounds(mod, dialect)
    low, high, rest = writer.conjunction(output)
    if limited:
        high = writer.combined("minimum", high, "limit")
    if rows and low is not None:
        low = writer.assign(f"tl.where(row, {low}, {_FAR})")
    elif rows:
        high = writer.assign(f"tl.where(row, {_FAR if high is None else high}, {-_FAR})")
    texts = [] if high is None else [f"(offset < {high} - near)"]
    texts += [] if low is None else [f"(offset >= {low} - near)"]
    parameters = ["near", "offset", *(["limit"] if limited else []), *(["row"] if rows else []), "live"]
    return writer.function(
        function, [*mod_parameters(mod.graph), *parameters], [f"return {' & '.join([*texts, *rest])}"]
    )


class _RowBounds(Writer):
    """Writes a mask, with the intervals of its rows apart."""

    def __init__(self, mod: ModPlan, dialect: Dialect) -> None:
        super().__init__(mod, dialect)
        self.safe = never_wraps(mod.graph)

    def conjunction(self, position: int, depth: int = 0) -> tuple[str | None, str | None, list[str]]:
        """Return the bounds of a row, and the conditions that are no interval."""
        node = self.graph.nodes[position]
        interval = self._interval(position, depth)
        if interval is not None:
            return *interval, []
        if node.op != "and" or depth == _MOST_NESTED:
            return None, None, [self.value(position)]
        x, y = (self.conjunction(a, depth + 1) for a in node.args)
        return *self._both(x[:2], y[:2]), [*x[2], *y[2]]

    def _interval(self, position: int, depth: int) -> Interval | None:
        node = self.graph.nodes[position]
        if not self._has_column(position):
            return None, self.assign(f"tl.where({self.value(position)}, {_FAR}, {-_FAR})")
        if node.op in _FLIPPED:
            return self._compared(node.op, *node.args)
        if node.op not in ("and", "or", "not") or depth == _MOST_NESTED:
            return None
        found = [self._interval(a, depth + 1) for a in node.args]
        if any(x is None for x in found):
            return None
        x, y = (found[0] or (None, None)), (found[-1] or (None, None))
        if node.op == "and":
            return self._both(x, y)
        if node.op == "not":
            return (x[1], x[0]) if None in x else None
        for side, function in ((0, "minimum"), (1, "maximum")):  # bounds on one side alone: the wider one
            if x[1 - side] is None and y[1 - side] is None:
                if x[side] is None or y[side] is None:
                    return None, None
                wider = self.assign(f"tl.{function}({x[side]}, {y[side]})")
                return (wider, None) if side == 0 else (None, wider)
        return None

    def _both(self, x: Interval, y: Interval) -> Interval:
        """Return what two intervals have in common."""
        return self.combined("maximum", x[0], y[0]), self.combined("minimum", x[1], y[1])

    def combined(self, function: str, x: str | None, y: str | None) -> str | None:
        """Return the minimum or maximum of two bounds, one of which may not exist."""
        return x if y is None else y if x is None else self.assign(f"tl.{function}({x}, {y})")

    def _compared(self, op: str, x: int, y: int) -> Interval | None:
        """Return the interval of `x op y`, two sums of which one has the column once."""
        left, right = self._terms(x), self._terms(y)
        if left is None or right is None or left[0] - right[0] not in (1, -1):
            return None
        factor = left[0] - right[0]
        # factor * column + rest op 0, so column op -rest, or the other way round.
        rest = [*left[1], *((-sign, node) for sign, node in right[1])]
        op = op if factor == 1 else _FLIPPED[op]
        text = " ".join(
            f"{'-' if sign * factor > 0 else '+'} tl.cast({self.value(node)}, tl.int64)" for sign, node in rest
        )
        one = {"ge": "", "gt": " + 1", "le": " + 1", "lt": ""}[op]
        total = f"tl.cast(0, tl.int64) {text}{one}"
        bound = self.assign(f"tl.minimum(tl.maximum({total}, {-_FAR}), {_FAR}).to(tl.int32)")
        return (bound, None) if op in ("ge", "gt") else (None, bound)

    def _terms(self, position: int, depth: int = 0) -> tuple[int, list[tuple[int, int]]] | None:
        """Return (how often the column is in a sum of integers, other terms with their signs), exact in any width."""
        node = self.graph.nodes[position]
        if not self._has_column(position):
            return (0, [(1, position)]) if not node.dtype.is_floating_point else None
        if node.op == "input":
            return 1, []
        if node.op not in ("add", "sub", "neg", "cast") or node.dtype.is_floating_point or not self.safe[position]:
            return None
        if depth == _MOST_NESTED:
            return None
        signs = (1, -1) if node.op == "sub" else (-1,) if node.op == "neg" else (1, 1)
        factor, rest = 0, []
        for sign, argument in zip(signs, node.args, strict=False):
            part = self._terms(argument, depth + 1)
            if part is None:
                return None
            factor += sign * part[0]
            rest += [(sign * s, n) for s, n in part[1]]
        return factor, rest

    def _has_column(self, position: int) -> bool:
        return self.dialect.columns in self.graph.dependence[position]
