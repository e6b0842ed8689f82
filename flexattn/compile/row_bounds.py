"""row_bounds: the text of a mask_mod as two comparisons per (q, kv) pair, if each row attends to an interval.

This applies to causal, sliding-window, prefix-LM and document masks, and to the conjuncts of other masks that are
intervals (`graph/row_bounds.py`). The bounds are computed once per row, in the operations that the user wrote. Each
pair then takes two comparisons with a constant, because the columns of a thread are `near` + `offset`. A causal
document mask would otherwise take six.

forward_split takes the bounds themselves: it reads the keys between them, instead of the keys in block lists.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexattn.compile.lower import Dialect, Writer, mod_parameters
from flexattn.compile.mod_plan import ModPlan
from flexattn.graph.dependence import computed_from
from flexattn.graph.row_bounds import (
    Both,
    Complement,
    Condition,
    Either,
    RowInterval,
    Solved,
    WholeRows,
    bounded_sides,
    conditions_of,
    end_nodes,
    row_bounds,
)  # fmt: skip

_FAR = 2**30  # above all lengths; a sum of two does not overflow
_WIDEST = 2**61  # of the int64 terms of a bound together, and of its constant: their sum is below 2**63

Ends = tuple[str | None, str | None]  # texts of the first column and of the last + 1; None: no bound


def lower_row_bounds(mod: ModPlan, function: str, dialect: Dialect, *, limited: bool, rows: bool) -> str:
    """Return the text of a mask_mod that takes its columns as `near` and `offset`.

    With `limited` it takes `limit`, which all columns are below. With `rows` it takes `row`: which rows attend at all.
    """
    writer = _RowBounds(mod, dialect)
    interval = row_bounds(mod.graph, dialect.columns)
    low, high = writer.ends(interval)
    conditions = [writer.value(node) for node in conditions_of(interval)]
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
        function, [*mod_parameters(mod.graph), *parameters], [f"return {' & '.join([*texts, *conditions])}"]
    )


def lower_row_interval(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a function of (b, h, row) that returns the bounds of each row: `low <= column < high`.

    Either bound may be a number instead of a block. Conditions besides intervals are left out.
    """
    writer = _RowBounds(mod, dialect)
    low, high = writer.ends(row_bounds(mod.graph, dialect.columns))
    result = f"return {0 if low is None else low}, {_FAR if high is None else high}"
    row = "q_idx" if dialect.columns == "kv_idx" else "kv_idx"
    return writer.function(function, ["b", "h", row], [result])


def lower_with_ends(mod: ModPlan, dialect: Dialect) -> tuple[str, str]:
    """Return the texts of `row_ends`, and of a mask_mod that takes the ends of its rows, `row_ends_of(mod)`.

    The rows are queries. Kernels call `row_ends` once for each tile of queries, before its products, so that no
    product waits for what it loads.
    """
    interval, of_rows = row_bounds(mod.graph, "kv_idx"), replace(dialect, columns="kv_idx")
    ends, pairs = _RowBounds(mod, of_rows), Writer(mod, dialect)
    low, high = ends.ends(interval)
    high = ends.combined("minimum", high, "limit")
    names = row_ends_of(mod)
    found = ", ".join(str(text) for text in (low, high) if text is not None)
    before = ends.function("row_ends", ["b", "h", "q_idx", "limit"], [f"return {found}"])
    if dialect.columns == "kv_idx":
        texts = ["(offset < high - near)", *(["(offset >= low - near)"] if "low" in names else [])]
    else:
        texts = ["(kv_idx < high)", *(["(kv_idx >= low)"] if "low" in names else [])]
    texts += [pairs.value(node) for node in conditions_of(interval)]
    parameters = [*mod_parameters(mod.graph), "near", "offset", *names, "live"]
    return before, pairs.function("mask_mod", parameters, [f"return {' & '.join(texts)}"])


def row_ends_of(mod: ModPlan) -> tuple[str, ...]:
    """Return which ends `row_ends` returns. All keys are below a limit, so there is always a high end."""
    return ("low", "high") if "low" in bounded_sides(row_bounds(mod.graph, "kv_idx")) else ("high",)


def streamed_ends_of(mod: ModPlan) -> tuple[str, ...]:
    """Return `row_ends_of(mod)` if the ends are loaded for each query, else nothing.

    For kernels that own keys and stream queries. A thread has scores of 16 queries. Instead of loading the ends of all
    of them, it loads those of one query and exchanges them: a backward of packed sequences takes 904 us instead of 993
    (12 documents of 16k tokens, 16 heads, D 128, H200).
    """
    graph = mod.graph
    loads = {node for end in end_nodes(row_bounds(graph, "kv_idx")) for node in computed_from(graph, end)}
    by_query = (i for i in loads & graph.loads.keys() if "q_idx" in graph.dependence[i])
    return row_ends_of(mod) if next(by_query, None) is not None else ()


class _RowBounds(Writer):
    """Writes the intervals of a mask's rows. Conditions that are not intervals have no ends."""

    def ends(self, interval: RowInterval) -> Ends:
        """Write the ends of an interval."""
        match interval:
            case Solved(side):
                bound = self._bound(interval)
                return (bound, None) if side == "low" else (None, bound)
            case WholeRows(node):
                return None, self.assign(f"tl.where({self.value(node)}, {_FAR}, {-_FAR})")
            case Condition():
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
        """Return the minimum or maximum of two bounds. None means no bound."""
        return x if y is None else y if x is None else self.assign(f"tl.{function}({x}, {y})")

    def _bound(self, solved: Solved) -> str:
        """Write a bound. It is summed in int64 and clamped. Terms are clamped first, so that no sum overflows."""
        wide = [abs(f) for n, f in solved.bound.terms if self.graph.nodes[n].dtype == torch.int64]
        most = _WIDEST // max(1, sum(wide))
        terms = [
            f" {'+' if factor > 0 else '-'} {self._term(n, most)}"
            for n, factor in solved.bound.terms for _ in range(abs(factor))
        ]  # fmt: skip
        constant = min(max(solved.bound.constant, -_WIDEST), _WIDEST)
        total = f"tl.cast(0, tl.int64){''.join(terms)}{f' + {constant}' if constant else ''}"
        return self.assign(f"tl.minimum(tl.maximum({total}, {-_FAR}), {_FAR}).to(tl.int32)")

    def _term(self, position: int, most: int) -> str:
        term = f"tl.cast({self.value(position)}, tl.int64)"
        if self.graph.nodes[position].dtype != torch.int64:
            return term
        return f"tl.minimum(tl.maximum({term}, {-most}), {most})"
