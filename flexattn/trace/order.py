"""order: the tables of operators that compare elements: min and max along a dimension, sort, searchsorted, median."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from flexattn.graph.builder import Expr
from flexattn.graph.nodes import wide
from flexattn.graph.operators import where
from flexattn.trace.elements import MOST_UNROLLED, Elements, Index, along, element_at, shape_of
from flexattn.trace.operator_calls import UnknownOperator, common_dtype, concrete

_MOST_SORTED = 16  # sorting compares all pairs of elements


def _comes_first(x: Expr, y: Expr, op: str) -> Expr:
    """Return whether x comes before y in the order of `op` ("gt" or "lt"). NaN is larger than any number."""
    before = x.apply(op, y)
    if not x.dtype.is_floating_point:
        return before
    greater, smaller = (x, y) if op == "gt" else (y, x)
    return before.apply("or", greater.apply("isnan").apply("and", smaller.apply("isnan").apply("not")))


def _ordered(x: Expr) -> Expr:
    """Return a value that comparisons accept: booleans as integers."""
    return x.cast(torch.int32) if x.dtype == torch.bool else x


def _extreme_along(values: list[Expr], op: str) -> tuple[Expr, Expr]:
    """Return the first extreme and its position. NaN is an extreme of both kinds."""
    best, place = values[0], values[0].builder.const(0, torch.int64)
    for k, value in enumerate(values[1:], 1):
        x, y = _ordered(value), _ordered(best)
        better = x.apply(op, y)
        if x.dtype.is_floating_point:
            better = better.apply("or", x.apply("isnan")).apply("and", y.apply("isnan").apply("not"))
        best, place = where(better, value, best), where(better, k, place)
    return best, place


def _row_of(
    elements: Elements, node: fx.Node, source: fx.Node, dim: int, keepdim: bool, index: Index,
    most: int = MOST_UNROLLED,
) -> list[Expr]:  # fmt: skip
    """Return the elements that are reduced to the result at `index`; `dim` may have been removed from the index."""
    rank = len(shape_of(source))
    dim = dim % max(rank, 1)
    full = index if keepdim or not rank else (*index[:dim], elements.position(0), *index[dim:])
    return along(elements, node, source, dim, full, most)


def _extremes(op: str) -> Callable[..., Expr]:
    def compute(
        elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int, keepdim: bool = False
    ) -> Expr:
        return _extreme_along(_row_of(elements, node, source, dim, keepdim, index), op)[which]

    return compute


def _arg_extreme(op: str) -> Callable[..., Expr]:
    def compute(
        elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int | None = None, keepdim: bool = False
    ) -> Expr:
        if dim is not None:
            return _extreme_along(_row_of(elements, node, source, dim, keepdim, index), op)[1]
        sizes = [concrete(n) for n in shape_of(source)]
        elements.short(node, math.prod(sizes))
        places = itertools.product(*(map(elements.position, range(n)) for n in sizes))
        return _extreme_along([elements.at(source, place) for place in places], op)[1]

    return compute


def _both_extremes(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int | None = None,
    keepdim: bool = False,
) -> Expr:  # fmt: skip
    if dim is None:
        raise UnknownOperator(node, "without dim. Write x.amin() and x.amax()")
    return _extreme_along(_row_of(elements, node, source, dim, keepdim, index), ("lt", "gt")[which])[0]


def _nth(values: list[Expr], n: Expr, descending: bool, which: int) -> Expr:
    """Return the n-th of the sorted values, or its original position. The sort is stable."""
    op = "gt" if descending else "lt"
    keys = [_ordered(v) for v in values]
    found = values if which == 0 else [v.builder.const(k, torch.int64) for k, v in enumerate(values)]
    result = found[-1]
    for j, key in reversed(list(enumerate(keys[:-1]))):
        rank = key.builder.const(0, torch.int64)
        for k, other in enumerate(keys):
            if k != j:  # an earlier element comes first unless key comes before it
                first = _comes_first(key, other, op).apply("not") if k < j else _comes_first(other, key, op)
                rank = rank + first.cast(torch.int64)
        result = where(rank.apply("eq", n), found[j], result)
    return result


def _sorted(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int = -1,
    descending: bool = False, stable: bool | None = None,
) -> Expr:  # fmt: skip
    values = _row_of(elements, node, source, dim, True, index, _MOST_SORTED)
    n = elements.wrapped(index[dim], len(values)) if index else elements.position(0)
    return _nth(values, n, descending, which)


def _top(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, k: Any, dim: int = -1,
    largest: bool = True, sorted: bool = True,
) -> Expr:  # fmt: skip
    return _sorted(elements, node, index, which, source, dim, largest)


def _kth(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, k: Any, dim: int = -1,
    keepdim: bool = False,
) -> Expr:  # fmt: skip
    values = _row_of(elements, node, source, dim, keepdim, index, _MOST_SORTED)
    return _nth(values, elements.position(k) - 1, False, which)


def _searchsorted(
    elements: Elements, node: fx.Node, index: Index, table: fx.Node, values: Any, out_int32: bool = False,
    right: bool = False, side: str | None = None, sorter: fx.Node | None = None,
) -> Expr:  # fmt: skip
    """The position of a value in a sorted table, by bisection. Leading dimensions of the table match the values."""
    shape = shape_of(table)
    leading = index[: len(shape) - 1]
    value = elements.operand(values, index, None)
    dtype = wide(common_dtype([table, values]))
    value = elements.cast(value, dtype)
    after = right or side == "right"
    steps = 0
    while not shape[-1] < 2**steps:  # for a symbolic size, one guard per power of two
        steps += 1
    size, found = elements.position(shape[-1]), elements.position(0)
    for step in reversed([2**k for k in range(steps)]):
        last = (found + step).apply("minimum", size) - 1
        at = last if sorter is None else elements.at(sorter, (*leading, last))
        entry = elements.cast(elements.at(table, (*leading, at)), dtype)
        beyond = _comes_first(value, entry, "lt").apply("not") if after else _comes_first(entry, value, "lt")
        found = where(beyond.apply("and", found + step <= size), found + step, found)
    return found


def _bucketize(
    elements: Elements, node: fx.Node, index: Index, values: Any, table: fx.Node, out_int32: bool = False,
    right: bool = False,
) -> Expr:  # fmt: skip
    return _searchsorted(elements, node, index, table, values, right=right)


def _running(op: str) -> Callable[..., Expr]:
    def compute(elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int) -> Expr:
        if not index:
            return elements.at(source, ()) if which == 0 else elements.position(0)
        dim = dim % len(index)
        values = along(elements, node, source, dim, index, _MOST_SORTED)
        found = [_latest_extreme(values[: k + 1], op)[which] for k in range(len(values))]
        return element_at(elements.wrapped(index[dim], len(values)), found)

    return compute


def _latest_extreme(values: list[Expr], op: str) -> tuple[Expr, Expr]:
    """Like _extreme_along, but returns the last of equal values, and of NaNs."""
    best, place = values[0], values[0].builder.const(0, torch.int64)
    for k, value in enumerate(values[1:], 1):
        x, y = _ordered(value), _ordered(best)
        kept = y.apply(op, x)
        if x.dtype.is_floating_point:
            kept = kept.apply("or", y.apply("isnan")).apply("and", x.apply("isnan").apply("not"))
        best, place = where(kept, best, value), where(kept, place, k)
    return best, place


def _median(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int, keepdim: bool = False
) -> Expr:
    return _middle(_row_of(elements, node, source, dim, keepdim, index, _MOST_SORTED), which)


def _median_of_all(elements: Elements, node: fx.Node, index: Index, source: fx.Node) -> Expr:
    sizes = [concrete(n) for n in shape_of(source)]
    elements.short(node, math.prod(sizes), _MOST_SORTED)
    places = itertools.product(*(map(elements.position, range(n)) for n in sizes))
    return _middle([elements.at(source, place) for place in places], 0)


def _middle(values: list[Expr], which: int) -> Expr:
    """Return the lower median or its position; if a value is NaN, that value."""
    middle = _nth(values, values[0].builder.const((len(values) - 1) // 2, torch.int64), False, which)
    if values[0].dtype.is_floating_point:
        for k, value in reversed(list(enumerate(values))):
            middle = where(value.apply("isnan"), value if which == 0 else middle.builder.const(k, torch.int64), middle)
    return middle


PLACES_IN_ORDER: dict[str, Callable[..., Expr]] = {
    "median.default": _median_of_all, "argmax": _arg_extreme("gt"), "argmin": _arg_extreme("lt"),
    "searchsorted": _searchsorted, "bucketize": _bucketize,
}  # fmt: skip
# Operators with several results: `compute(elements, node, index, which, *arguments)`.
ORDERED: dict[str, Callable[..., Expr]] = {
    "max.dim": _extremes("gt"), "min.dim": _extremes("lt"), "aminmax": _both_extremes, "sort": _sorted,
    "sort.stable": lambda elements, node, index, which, source, stable=None, dim=-1, descending=False: _sorted(
        elements, node, index, which, source, dim, descending
    ),
    "cummax": _running("gt"), "cummin": _running("lt"), "median.dim": _median, "topk": _top, "kthvalue": _kth,
}  # fmt: skip
