"""elements: the values of the tensors of an FX graph as scalar expressions, element by element.

A mod computes on 0-d tensors, but may use small tensors on the way (`bias[b][h]`, a slice, a norm over 3 elements).
`Elements.at(node, index)` is the scalar at `index` of an FX node's result. Views and gathers only rewrite the index.
Elementwise operators recurse into their operands. Small reductions are unrolled. Values that depend on captured tensors
alone are loads.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.nodes import wide
from flexattn.graph.operators import where
from flexattn.process.frozen_class import frozen
from flexattn.trace.operator_calls import (
    Refused,
    UnknownOperator,
    arguments,
    check_arguments,
    common_dtype,
    concrete,
    entry,
    is_symbol,
    meta_of,
    operator_name,
)

MOST_UNROLLED = 64
_MOST_NESTED = 40  # nesting depth of operators at which `Elements.value` starts from the innermost one
Index = tuple[Expr, ...]


class _TooDeep(Exception):
    """An element that must be computed before the requested one, because the recursion is too deep for both."""

    def __init__(self, node: fx.Node, index: Index) -> None:
        super().__init__()
        self.element = node, index


@frozen
class Row:
    """How to compute one elementwise operator.

    Operands are first cast: to the dtype of the result, to the common dtype of the operands, or to bool. With "own"
    they keep their dtypes, and `compute(elements, dtype of the result, *operands)` casts them itself.
    """

    compute: Callable[..., Expr]
    computes: str = "result"  # "result", "common", "bool" or "own"
    literal_divisor: bool = False  # if the second operand is a number, it is a literal, never a runtime value


@frozen
class Over:
    """Arguments of a reduction: dimensions (None or empty: all), keepdim, and others."""

    dims: Any = None
    keep: bool = False
    options: tuple[Any, ...] = ()


@frozen
class Reduction:
    """`combine(elements, node, values, dtype, *options)` reduces the unrolled elements.

    `over` takes the operator's parameters after the source.
    """

    combine: Callable[..., Expr]
    over: Callable[..., Over] = lambda dim=None, keepdim=False, dtype=None: Over(dim, keepdim)
    keeps_dtype: bool = False


@frozen
class Tables:
    """The functions that compute an element of an operator's result, by the operator's name (`aten.py`)."""

    rows: dict[str, Row]  # elementwise
    creation: dict[str, Callable[..., Any]]  # the value of tensors filled with one value
    views: dict[str, Callable[..., Expr]]  # compute(elements, node, index, *arguments)
    results: dict[str, Callable[..., Expr]]  # several results: compute(elements, node, index, which, *arguments)
    reductions: dict[str, Reduction]
    reasons: dict[str, str]  # why an operator has no row


class Elements:
    """The scalars of an FX graph as expressions; `load` and `number` create the leaves.

    `inside(node, dimension, index, value)` returns the index so that it is checked when the mod runs. `value()` is the
    element at the index as it is.
    """

    def __init__(
        self, tables: Tables, builder: Builder, load: Callable[[fx.Node, Index], Expr | None],
        number: Callable[[Any], Expr], inside: Callable[[fx.Node, int, Expr, Callable[[], Expr]], Expr],
    ) -> None:  # fmt: skip
        self.tables = tables
        self.builder = builder
        self.load = load
        self.number = number
        self.inside = inside
        self._known: dict[tuple[Any, ...], Expr] = {}
        self._depth = 0

    def value(self, node: fx.Node) -> Expr:
        """Return the only element of a 0-d node, for any depth of the graph."""
        pending: list[tuple[fx.Node, Index]] = [(node, ())]
        while True:
            try:
                found = self.at(*pending[-1])
            except _TooDeep as inner:
                pending.append(inner.element)
                continue
            pending.pop()
            if not pending:
                return found

    def at(self, node: fx.Node, index: Index) -> Expr:
        """Return the element of `node` at `index`, which has one expression per dimension."""
        key = (node, *(i.index for i in index))
        if key not in self._known:
            if self._depth == _MOST_NESTED:
                raise _TooDeep(node, index)
            self._depth += 1
            try:
                found = self.load(node, index)
                self._known[key] = self._compute(node, index) if found is None else found
            finally:
                self._depth -= 1
        return self._known[key]

    def gathered(self, node: fx.Node, index: Index, dims: Sequence[int]) -> Expr:
        """Return `at(node, index)`, where the indices in `dims` are tensors of the mod and may be out of range."""
        inside = tuple(
            self.inside(node, d, i, lambda: self.at(node, index)) if d in dims else i for d, i in enumerate(index)
        )
        value = self.at(node, inside)
        for checked, i in zip(inside, index, strict=True):
            if checked.index != i.index and checked.node not in self.builder.needed(value):  # all elements are equal
                value = where(checked < 0, 1 if value.constant == 0 else 0, value)
        return value

    def _compute(self, node: fx.Node, index: Index) -> Expr:
        if node.target is operator.getitem:
            source, which = node.args
            assert isinstance(source, fx.Node)
            compute, (args, kwargs) = entry(self.tables.results, source), arguments(source)
            if compute is None:  # an operator with several results is decomposed as a whole
                raise UnknownOperator(source, self.tables.reasons.get(operator_name(source), ""))
            check_arguments(compute, source, self, source, index, which, *args, **kwargs)
            return compute(self, source, index, which, *args, **kwargs)
        args, kwargs = arguments(node)
        if (view := entry(self.tables.views, node)) is not None:
            check_arguments(view, node, self, node, index, *args, **kwargs)
            return view(self, node, index, *args, **kwargs)
        if (reduction := entry(self.tables.reductions, node)) is not None:
            check_arguments(reduction.over, node, *args[1:], **kwargs)
            return self._reduce(node, index, reduction, args[0], reduction.over(*args[1:], **kwargs))
        if (created := entry(self.tables.creation, node)) is not None:
            check_arguments(created, node, *args, **kwargs)
            return self.scalar(created(*args, **kwargs), wide(node.meta["val"].dtype))
        if (row := entry(self.tables.rows, node)) is not None:
            return self._row(node, index, row, args, kwargs)
        raise UnknownOperator(node, self.tables.reasons.get(operator_name(node), ""))

    def _row(self, node: fx.Node, index: Index, row: Row, args: list[Any], kwargs: dict[str, Any]) -> Expr:
        result = wide(node.meta["val"].dtype)
        dtype = {"result": result, "common": wide(common_dtype(args)), "bool": torch.bool, "own": None}[row.computes]
        extra = (self, result) if row.computes == "own" else ()
        check_arguments(row.compute, node, *extra, *args, **kwargs)
        if row.literal_divisor and not isinstance(meta_of(args[1]), Tensor):
            args = [args[0], concrete(args[1]), *args[2:]]
        for value in (*args, *kwargs.values()):
            if type(value) is int and dtype is not None and not _holds(dtype, value):
                raise Refused(node, f"of {value} in {dtype}, which cannot hold it. Convert the tensor with .long()")
        operands = [self.operand(a, index, dtype) for a in args]
        named = {k: self.operand(a, index, dtype) for k, a in kwargs.items()}
        return self.cast(row.compute(*extra, *operands, **named), result)

    def operand(self, arg: Any, index: Index, dtype: torch.dtype | None) -> Any:
        """Return an argument of an elementwise operator as an expression; None, strings and dtypes are unchanged."""
        if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], Tensor):
            value = self.at(arg, self.broadcast(index, arg.meta["val"].shape))
            return value if dtype is None else self.cast(value, dtype)
        if isinstance(arg, (fx.Node, bool, int, float)) or is_symbol(arg):
            return self.scalar(arg, dtype)
        return arg

    def scalar(self, value: Any, dtype: torch.dtype | None) -> Expr:
        """Return a Python number or a symbolic number as an expression."""
        value = meta_of(value)
        if is_symbol(value):
            found = self.number(value)
            return found if dtype is None else self.cast(found, dtype)
        kind = torch.bool if isinstance(value, bool) else torch.float64 if isinstance(value, float) else torch.int64
        return self.builder.const(value, dtype or kind)

    def position(self, value: Any) -> Expr:
        """Return a Python number as an index expression."""
        return self.scalar(value, torch.int64)

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        return truth(x) if dtype == torch.bool else x.cast(dtype)

    def broadcast(self, index: Index, shape: Sequence[Any]) -> Index:
        """Return the index of an operand of `shape` for element `index` of the result."""
        kept = index[len(index) - len(shape) :]
        zero = self.position(0)
        return tuple(zero if isinstance(s, int) and s == 1 else i for i, s in zip(kept, shape, strict=True))

    def wrapped(self, i: Expr, size: Any) -> Expr:
        """Return index `i` with negative values counted from the end, as in PyTorch."""
        if isinstance(i.constant, int):
            return i if i.constant >= 0 else self.position(i.constant + concrete(size))
        i = i.cast(torch.int64)
        return where(i < 0, i + self.position(size), i)

    def short(self, node: fx.Node, size: Any, most: int = MOST_UNROLLED) -> int:
        """Return a size over which `node` is unrolled."""
        count = concrete(size)
        if count > most:
            raise Refused(
                node,
                f"over {count} elements that depend on b, h, q_idx, kv_idx or the score, where at most {most} can be "
                f"unrolled. Compute it before the call and index the result",
            )
        return count

    def _reduce(self, node: fx.Node, index: Index, reduction: Reduction, source: fx.Node, over: Over) -> Expr:
        shape = source.meta["val"].shape
        dims, keep = over.dims, over.keep
        dims = (dims,) if isinstance(dims, int) else dims
        dims = sorted({d % max(len(shape), 1) for d in (dims if dims else range(len(shape)))})
        dims = [d for d in dims if d < len(shape)]
        sizes = [concrete(shape[d]) for d in dims]
        self.short(node, math.prod(sizes))
        rest = iter(index if not keep else [i for d, i in enumerate(index) if d not in dims])
        outer = {d: next(rest) for d in range(len(shape)) if d not in dims}
        dtype = wide(node.meta["val"].dtype)
        values = []
        for inner in itertools.product(*(range(n) for n in sizes)):
            chosen = dict(zip(dims, map(self.position, inner), strict=True))
            value = self.at(source, tuple((outer | chosen)[d] for d in range(len(shape))))
            values.append(value if reduction.keeps_dtype else self.cast(value, dtype))
        return self.cast(reduction.combine(self, node, values, dtype, *over.options), dtype)


def _holds(dtype: torch.dtype, value: int) -> bool:
    """Return whether the dtype can represent this number without wrap-around."""
    if dtype.is_floating_point or dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def truth(x: Expr) -> Expr:
    return x if x.dtype == torch.bool else x.apply("ne", 0)


ON_BOOLEANS = {"maximum": "or", "minimum": "and"}


def shape_of(node: Any) -> Any:
    return node.meta["val"].shape


def put(index: Index, dim: int, i: Expr) -> Index:
    return (*index[:dim], i, *index[dim + 1 :])


def along(
    elements: Elements, node: fx.Node, source: fx.Node, dim: int, index: Index, most: int = MOST_UNROLLED
) -> list[Expr]:
    """Return the elements of `source` along a short dimension, at `index` in the other dimensions."""
    if not shape_of(source):
        return [elements.at(source, ())]
    count = elements.short(node, shape_of(source)[dim], most)
    return [elements.at(source, put(index, dim, elements.position(k))) for k in range(count)]


def element_at(i: Expr, values: Sequence[Expr]) -> Expr:
    """Return values[i] for an index in range."""
    if isinstance(i.constant, int):
        return values[i.constant]
    result = values[-1]
    for position in reversed(range(len(values) - 1)):
        result = where(i > position, result, values[position])
    return result
