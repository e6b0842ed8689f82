"""reductions: the table of reductions, unrolled over their elements."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from flexattn.graph.builder import Expr
from flexattn.graph.nodes import wide
from flexattn.graph.operators import where
from flexattn.trace.elements import ON_BOOLEANS, Elements, Index, Over, Reduction, put, shape_of, truth
from flexattn.trace.operator_calls import UnknownOperator, concrete


def _fold(name: str, start: Any = None) -> Callable[..., Expr]:
    def combine(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
        if not values:
            return elements.scalar(start, dtype)
        op = ON_BOOLEANS.get(name, name) if dtype == torch.bool else name
        return reduce(lambda x, y: x.apply(op, y), values)

    return combine


def _mean(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
    return _fold("add", 0.0)(elements, node, values, dtype) / float(len(values))


def _variance(
    elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype, correction: Any = None
) -> Expr:
    mean = _mean(elements, node, values, dtype)
    squares = [(v - mean) * (v - mean) for v in values]
    correction = 1 if correction is None else concrete(correction)
    return reduce(operator.add, squares) / float(max(len(values) - correction, 0))


def _deviation(
    elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype, correction: Any = None
) -> Expr:
    """The square root of the variance, with gradient 0 where that is 0."""
    variance = _variance(elements, node, values, dtype, correction)
    is_zero = variance.apply("eq", 0.0)
    return where(is_zero, 0.0, where(is_zero, 1.0, variance).apply("sqrt"))


def _all_or_any(name: str) -> Callable[..., Expr]:
    def combine(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
        return _fold(name, name == "and")(elements, node, [truth(v) for v in values], torch.bool)

    return combine


def _norm(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype, order: Any = 2) -> Expr:
    order = concrete(order)
    sizes = [v.apply("abs") for v in values]
    if order == math.inf:
        return reduce(lambda x, y: x.apply("maximum", y), sizes)
    if order == -math.inf:
        return reduce(lambda x, y: x.apply("minimum", y), sizes)
    if order == 1:
        return reduce(operator.add, sizes)
    if order == 0:
        return reduce(operator.add, [truth(v).cast(dtype) for v in values])
    if order != 2:
        raise UnknownOperator(node)
    total = reduce(operator.add, [v * v for v in values])
    zero = total.apply("eq", 0.0)  # torch's gradient at the zero vector is 0, while the gradient of sqrt is infinite
    return where(zero, 0.0, where(zero, 1.0, total).apply("sqrt"))


def _with_mean(
    spread: Callable[..., Expr], elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node,
    dim: Any = None, correction: Any = 1, keepdim: bool = False,
) -> Expr:  # fmt: skip
    rank, dtype = len(shape_of(source)), wide(node.meta["val"][which].dtype)
    dims = [dim] if isinstance(dim, int) else list(dim) if dim else list(range(rank))
    dims = sorted(d % max(rank, 1) for d in dims)
    full = list(index)
    if not keepdim:
        for d in dims:
            full.insert(d, elements.position(0))
    sizes = [concrete(shape_of(source)[d]) for d in dims]
    elements.short(node, math.prod(sizes))
    values = []
    for inner in itertools.product(*(map(elements.position, range(n)) for n in sizes)):
        at = tuple(full)
        for d, i in zip(dims, inner, strict=True):
            at = put(at, d, i)
        values.append(elements.cast(elements.at(source, at), dtype))
    return _mean(elements, node, values, dtype) if which else spread(elements, node, values, dtype, correction)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_fold("add", 0)), "mean": Reduction(_mean), "prod": Reduction(_fold("mul", 1)),
    "sum.default": Reduction(_fold("add", 0), lambda dtype=None: Over()),
    "mean.default": Reduction(_mean, lambda dtype=None: Over()),
    "prod.default": Reduction(_fold("mul", 1), lambda dtype=None: Over()),
    "amax": Reduction(_fold("maximum")), "amin": Reduction(_fold("minimum")),
    "max": Reduction(_fold("maximum"), lambda: Over()), "min": Reduction(_fold("minimum"), lambda: Over()),
    "any": Reduction(_all_or_any("or"), keeps_dtype=True), "all": Reduction(_all_or_any("and"), keeps_dtype=True),
    "std": Reduction(_deviation, lambda dim=None, correction=1, keepdim=False: Over(dim, keepdim, (correction,))),
    "var": Reduction(_variance, lambda dim=None, correction=1, keepdim=False: Over(dim, keepdim, (correction,))),
    "linalg_vector_norm": Reduction(
        _norm, lambda order=2, dim=None, keepdim=False, dtype=None: Over(dim, keepdim, (order,))
    ),
}  # fmt: skip
MOMENTS: dict[str, Callable[..., Expr]] = {  # two results
    "var_mean": partial(_with_mean, _variance), "std_mean": partial(_with_mean, _deviation),
}  # fmt: skip
