"""row_bounds: the text of a mask_mod as two comparisons for each place, where a row attends to an interval.

Causal, sliding, prefix-LM and document masks are such; of other masks the conjuncts that are (`graph/row_bounds.py`
decides). What bounds a row is computed once for it, in whatever operations the user wrote; for each place of a thread
two comparisons with a constant are left (the columns of a thread are `near` + `offset`). Written out, a causal document
mask takes six.
"""

from __future__ import annotations

from flexattn.compile.lower import Dialect, Writer, mod_parameters
from flexattn.compile.mod_plan import ModPlan
from flexattn.graph.row_bounds import (
    Both,
    Complement,
    Condition,
    Either,
    RowInterval,
    Solved,
    WholeRows,
    bounded_sides,
    row_bounds,
)  # fmt: skip

_FAR = 2**30  # beyond all lengths, and no sum of two wraps around

Ends = tuple[str | None, str | None]  # texts of the first column and of that behind the last; None: no bound


def lower_row_bounds(mod: ModPlan, function: str, dialect: Dialect, *, limited: bool, rows: bool) -> str:
    """Return the text of a mask_mod that takes its columns as `near` and `offset`.

    `limited`: it also takes `limit`, which columns are below. `rows`: it takes `row`, the rows that attend at all.
    """
    writer = _RowBounds(mod, dialect)
    low, high = writer.ends(row_bounds(mod.graph, dialect.columns))
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
        function, [*mod_parameters(mod.graph), *parameters], [f"return {' & '.join([*texts, *writer.conditions])}"]
    )


class _RowBounds(Writer):
    """Writes the intervals of a mask's rows, with the conditions that are none apart."""

    def __init__(self, mod: ModPlan, dialect: Dialect) -> None:
        super().__init__(mod, dialect)
        self.conditions: list[str] = []

    def ends(self, interval: RowInterval) -> Ends:
        """Write the ends of an interval."""
        match interval:
            case Solved(side):
                bound = self._bound(interval)
                return (bound, None) if side == "low" else (None, bound)
            case WholeRows(node):
                return None, self.assign(f"tl.where({self.value(node)}, {_FAR}, {-_FAR})")
            case Condition(node):
                self.conditions.append(self.value(node))
                return None, None
            case Complement(of):
                low, high = self.ends(of)
                return high, low
            case Both(x, y):
                (low, high), (other_low, other_high) = self.ends(x), self.ends(y)
                return self.combined("maximum", low, other_low), self.combined("minimum", high, other_high)
            case Either(x, y) if not bounded_sides(interval):
                return None, None
            case Either(x, y):
                (low, high), (other_low, other_high) = self.ends(x), self.ends(y)
                return self.combined("minimum", low, other_low), self.combined("maximum", high, other_high)

    def combined(self, function: str, x: str | None, y: str | None) -> str | None:
        """Return the minimum or maximum of two bounds, one of which may not exist."""
        return x if y is None else y if x is None else self.assign(f"tl.{function}({x}, {y})")

    def _bound(self, solved: Solved) -> str:
        """Write a bound, in any width of its terms."""
        terms = [
            f" {'+' if factor > 0 else '-'} tl.cast({self.value(n)}, tl.int64)"
            for n, factor in solved.bound.terms for _ in range(abs(factor))
        ]  # fmt: skip
        total = f"tl.cast(0, tl.int64){''.join(terms)}{f' + {solved.bound.constant}' if solved.bound.constant else ''}"
        return self.assign(f"tl.minimum(tl.maximum({total}, {-_FAR}), {_FAR}).to(tl.int32)")
