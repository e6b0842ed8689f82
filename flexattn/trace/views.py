"""views: the table of views, gathers and operators that are unrolled along a dimension."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from flexattn.graph.builder import Expr
from flexattn.graph.nodes import wide
from flexattn.graph.operators import where
from flexattn.trace.elements import Elements, Index, along, element_at, put, shape_of
from flexattn.trace.elementwise import _detach
from flexattn.trace.operator_calls import Refused, UnknownOperator, concrete, operator_name


def _same(elements: Elements, node: fx.Node, index: Index, source: fx.Node) -> Expr:
    return elements.at(source, index)


def _expand(elements: Elements, node: fx.Node, index: Index, source: fx.Node, size: Any) -> Expr:
    return elements.at(source, elements.broadcast(index, shape_of(source)))


def _select_view(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, at: Any) -> Expr:
    dim = dim % len(shape_of(source))
    return elements.at(source, (*index[:dim], elements.position(at), *index[dim:]))


def _slice(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int = 0, start: Any = None, end: Any = None,
    step: Any = 1,
) -> Expr:  # fmt: skip
    dim = dim % len(index)
    size = shape_of(source)[dim]
    start = concrete(start or 0)
    if start < 0:
        start = max(start + concrete(size), 0)
    i = elements.wrapped(index[dim], shape_of(node)[dim])
    return elements.at(source, put(index, dim, i * concrete(step) + elements.position(start)))


def _unsqueeze(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int) -> Expr:
    dim = dim % len(index)
    return elements.at(source, (*index[:dim], *index[dim + 1 :]))


def _permute(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dims: Sequence[int]) -> Expr:
    order = [d % len(index) for d in dims]
    return elements.at(source, tuple(index[order.index(d)] for d in range(len(index))))


def _transpose(elements: Elements, node: fx.Node, index: Index, source: fx.Node, x: int = 0, y: int = -1) -> Expr:
    swapped = list(index)
    if index:
        swapped[x], swapped[y] = swapped[y], swapped[x]
    return elements.at(source, tuple(swapped))


def _view(elements: Elements, node: fx.Node, index: Index, source: fx.Node, shape: Any = None) -> Expr:
    """Reshape: the element at the same linear position. Each dimension of size > 1 costs a division."""
    new, old = list(shape_of(node)), list(shape_of(source))
    zero = elements.position(0)
    pairs = [(i, n) for i, n in zip(index, new, strict=True) if not (isinstance(n, int) and n == 1)]
    wanted = [n for n in old if not (isinstance(n, int) and n == 1)]
    if [str(n) for _, n in pairs] == [str(n) for n in wanted]:
        moved = iter(i for i, _ in pairs)
        return elements.at(source, tuple(zero if isinstance(n, int) and n == 1 else next(moved) for n in old))
    linear = zero
    for i, n in pairs:
        linear = linear * concrete(n) + elements.wrapped(i, n)
    found: list[Expr] = []
    for n in reversed(old):
        n = concrete(n)
        found.append(linear.apply("mod", n) if n > 1 else zero)
        linear = linear.apply("floordiv", n) if n > 1 else linear
    return elements.at(source, tuple(reversed(found)))


def _bitcast(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dtype: torch.dtype) -> Expr:
    if source.meta["val"].dtype == dtype:
        return elements.at(source, index)
    raise Refused(
        node,
        f"that reinterprets a {source.meta['val'].dtype} as {dtype}. Do this before the call, on captured tensors",
    )


def _flip(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dims: Sequence[int]) -> Expr:
    flipped = list(index)
    for dim in dims:
        size = shape_of(node)[dim]
        flipped[dim] = elements.position(size) - 1 - elements.wrapped(index[dim], size)
    return elements.at(source, tuple(flipped))


def _roll(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> Expr:
    if not dims:
        raise UnknownOperator(node, "without dims. Pass dims")
    rolled = index
    for shift, dim in zip(shifts, dims, strict=True):
        size = concrete(shape_of(node)[dim])
        i = elements.wrapped(rolled[dim % len(index)], size) - elements.position(shift)
        rolled = put(rolled, dim % len(index), i.apply("mod", elements.position(size)))
    return elements.at(source, rolled)


def _cat(elements: Elements, node: fx.Node, index: Index, parts: Sequence[fx.Node], dim: int = 0) -> Expr:
    dim, dtype = dim % len(index), wide(node.meta["val"].dtype)
    i = elements.wrapped(index[dim], shape_of(node)[dim])
    parts = [p for p in parts if len(shape_of(p)) == len(index)]  # an empty 1-D tensor is ignored
    sizes = [concrete(shape_of(p)[dim]) for p in parts]
    starts = [0, *itertools.accumulate(sizes)]
    chosen = [(p, n, at) for p, n, at in zip(parts, sizes, starts, strict=False) if n]
    if isinstance(i.constant, int):
        chosen = [(p, n, at) for p, n, at in chosen if at <= i.constant < at + n] or chosen[-1:]
    elements.short(node, len(chosen))
    result = None
    for part, size, start in reversed(chosen):
        inside = i - start
        if len(chosen) > 1:  # parts that are not selected are read too, so keep the index in range
            inside = inside.apply("maximum", 0).apply("minimum", size - 1)
        value = elements.cast(elements.at(part, put(index, dim, inside)), dtype)
        result = value if result is None else where(i < start + size, value, result)
    assert result is not None
    return result


def _stack(elements: Elements, node: fx.Node, index: Index, parts: Sequence[fx.Node], dim: int = 0) -> Expr:
    dim, dtype = dim % len(index), wide(node.meta["val"].dtype)
    i = elements.wrapped(index[dim], shape_of(node)[dim])
    inner = (*index[:dim], *index[dim + 1 :])
    return element_at(i, [elements.cast(elements.at(part, inner), dtype) for part in parts])


def _padded(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, pad: Sequence[Any], value: Any = 0
) -> Expr:
    """constant_pad_nd: `pad` is (before, after) of the last dimension, then of the second to last, and so on."""
    dtype = wide(node.meta["val"].dtype)
    moved, inside = list(index), elements.builder.const(True, torch.bool)
    for n, before in enumerate(pad[::2]):
        dim = len(index) - 1 - n
        size = shape_of(source)[dim]
        i = elements.wrapped(index[dim], shape_of(node)[dim]) - elements.position(before)
        last = elements.position(size) - 1
        inside = inside.apply("and", i >= 0).apply("and", i <= last)
        moved[dim] = i.apply("maximum", 0).apply("minimum", last)
    filling = elements.scalar(value, dtype)
    return where(inside, elements.cast(elements.at(source, tuple(moved)), dtype), filling)


def _gathered(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, chosen: Sequence[fx.Node | None]
) -> Expr:
    """aten.index: index tensors broadcast. Their dimensions stay in place if adjacent, else they come first."""
    places = [d for d, c in enumerate(chosen) if c is not None]
    if any(c.meta["val"].dtype in (torch.bool, torch.uint8) for c in chosen if c is not None):
        raise Refused(node, "by a boolean tensor, whose result has no fixed size. Use torch.where")
    width = max(c.meta["val"].ndim for c in chosen if c is not None)
    front = 0 if places[-1] - places[0] + 1 != len(places) else places[0]
    advanced, rest = index[front : front + width], iter((*index[:front], *index[front + width :]))
    full: list[Expr] = []
    for d in range(len(shape_of(source))):
        if d in places:
            full.append(elements.operand(chosen[d], advanced, None))
        else:
            full.append(next(rest))
    return elements.gathered(source, tuple(full), places)


def _index_select(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, chosen: fx.Node) -> Expr:
    if not index:
        return elements.at(source, ())
    dim = dim % len(index)
    i = elements.at(chosen, (index[dim],) if shape_of(chosen) else ())
    return elements.gathered(source, put(index, dim, i), (dim,))


def _gather(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, chosen: fx.Node) -> Expr:
    i = elements.at(chosen, index)
    if not shape_of(source):
        return elements.at(source, ())
    dim = dim % len(index)
    return elements.gathered(source, put(index, dim, i), (dim,))


def _embedding(
    elements: Elements, node: fx.Node, index: Index, table: fx.Node, rows: fx.Node, padding: Any = -1
) -> Expr:
    """A row of a table. The row at `padding` receives no gradient."""
    row = elements.at(rows, index[:-1])
    value = elements.gathered(table, (row, index[-1]), (0,))
    return value if concrete(padding) == -1 else where(row.apply("eq", concrete(padding)), _detach(value), value)


def _arange(
    elements: Elements, node: fx.Node, index: Index, first: Any, end: Any = None, step: Any = 1,
    dtype: torch.dtype | None = None,
) -> Expr:  # fmt: skip
    computed = wide(node.meta["val"].dtype)
    i = elements.wrapped(index[0], shape_of(node)[0]).cast(computed)
    return i * elements.scalar(step, computed) + elements.scalar(0 if end is None else first, computed)


def _contraction(elements: Elements, node: fx.Node, index: Index, x: fx.Node, y: fx.Node) -> Expr:
    """dot, mv, mm and bmm over a short dimension, unrolled."""
    count = elements.short(node, shape_of(x)[-1])
    batch = index[:1] if operator_name(node) == "bmm" else ()
    left = index[: len(shape_of(x)) - 1]
    right = index[len(index) - len(shape_of(y)) + 1 + len(batch) :] if len(shape_of(y)) > 1 + len(batch) else ()
    dtype = wide(node.meta["val"].dtype)
    total = elements.builder.const(0, dtype)
    for k in map(elements.position, range(count)):
        a, b = elements.at(x, (*left, k)), elements.at(y, (*batch, k, *right))
        total = total + elements.cast(a, dtype) * elements.cast(b, dtype)
    return total


def _cumulated(op: str) -> Callable[..., Expr]:
    def compute(
        elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, dtype: torch.dtype | None = None
    ) -> Expr:
        computed = wide(node.meta["val"].dtype)
        if not index:
            return elements.cast(elements.at(source, ()), computed)
        dim = dim % len(index)
        values = [elements.cast(v, computed) for v in along(elements, node, source, dim, index)]
        totals = itertools.accumulate(values, lambda x, y: x.apply(op, y))
        return element_at(elements.wrapped(index[dim], len(values)), list(totals))

    return compute


def _split(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, sizes: Any, dim: int = 0
) -> Expr:
    dim = dim % len(index)
    start = which * concrete(sizes) if not isinstance(sizes, (list, tuple)) else sum(map(concrete, sizes[:which]))
    size = node.meta["val"][which].shape[dim]
    return elements.at(source, put(index, dim, elements.wrapped(index[dim], size) + start))


def _unbound(elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int = 0) -> Expr:
    dim = dim % len(shape_of(source))
    return elements.at(source, (*index[:dim], elements.position(which), *index[dim:]))


def _diagonal(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Expr:
    rank = len(shape_of(source))
    i = elements.wrapped(index[-1], shape_of(node)[-1])
    along = {dim1 % rank: i + max(-offset, 0), dim2 % rank: i + max(offset, 0)}
    rest = iter(index[:-1])
    return elements.at(source, tuple(along[d] if d in along else next(rest) for d in range(rank)))


def _unfolded(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, size: int, step: int) -> Expr:
    dim = dim % len(shape_of(source))
    window = elements.wrapped(index[dim], shape_of(node)[dim])
    return elements.at(source, put(index[:-1], dim, window * step + elements.wrapped(index[-1], size)))


VIEWS: dict[str, Callable[..., Expr]] = {
    "alias": _same, "clone": _same, "lift_fresh_copy": _same,
    "expand": _expand, "select": _select_view, "slice": _slice, "unsqueeze": _unsqueeze, "permute": _permute,
    "transpose": _transpose, "t": _transpose, "view": _view, "_unsafe_view": _view,
    "view.dtype": _bitcast, "squeeze": _view, "flip": _flip, "roll": _roll, "cat": _cat, "stack": _stack,
    "constant_pad_nd": _padded, "index": _gathered, "_unsafe_index": _gathered,
    "index_select": _index_select, "gather": _gather, "embedding": _embedding, "arange": _arange,
    "dot": _contraction, "mv": _contraction, "mm": _contraction, "bmm": _contraction,
    "cumsum": _cumulated("add"), "cumprod": _cumulated("mul"), "diagonal": _diagonal, "unfold": _unfolded,
}  # fmt: skip
# Operators with several results: `compute(elements, node, index, which, *arguments)`.
PARTS: dict[str, Callable[..., Expr]] = {
    "split": _split, "split_with_sizes": _split, "unsafe_split": _split, "unsafe_split_with_sizes": _split,
    "unbind": _unbound,
}  # fmt: skip
