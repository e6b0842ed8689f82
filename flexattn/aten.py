"""The table from aten operators to scalar expressions, and the values of tensors of any rank, element by element.

A mod computes on 0-d tensors, but on the way it may hold small ones (`bias[b][h]`, a slice, a norm over 3 elements).
`Elements.at(node, index)` is the scalar that stands at `index` of what an FX node computes: views and gathers only
rewrite the index, elementwise operators recurse into their operands, small reductions are unrolled, and what depends
on captured tensors alone is a load.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.errors import UnsupportedError
from flexattn.graph import Builder, Expr, wide
from flexattn.ops import where

MOST_UNROLLED = 64

Index = tuple[Expr, ...]


class UnknownOperator(Exception):
    """No row of the tables computes this operator."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node.target))
        self.node = node


def is_symbol(value: object) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class Elements:
    """The scalars of an FX graph as expressions; `load` and `number` make the leaves."""

    def __init__(
        self, builder: Builder, load: Callable[[fx.Node, Index], Expr | None], number: Callable[[Any], Expr]
    ) -> None:
        self.builder = builder
        self.load = load
        self.number = number
        self._known: dict[tuple[Any, ...], Expr] = {}

    def at(self, node: fx.Node, index: Index) -> Expr:
        """Return the element of `node` at `index`, one expression for each dimension."""
        key = (node, *(i.index for i in index))
        if key not in self._known:
            found = self.load(node, index)
            self._known[key] = self._compute(node, index) if found is None else found
        return self._known[key]

    def _compute(self, node: fx.Node, index: Index) -> Expr:
        name = operator_name(node)
        if node.target is operator.getitem:  # one of several results: the operator is the one to decompose
            raise UnknownOperator(node.args[0])  # type: ignore[arg-type]
        if name in VIEWS:
            return VIEWS[name](self, node, index)
        if name in REDUCTIONS:
            return self._reduce(node, index, REDUCTIONS[name])
        if name in CREATION:
            return self.scalar(CREATION[name](node), wide(node.meta["val"].dtype))
        if name in ROWS:
            return self._row(node, index, ROWS[name])
        raise UnknownOperator(node)

    def _row(self, node: fx.Node, index: Index, row: Row) -> Expr:
        result = wide(node.meta["val"].dtype)
        dtype = {"result": result, "common": wide(common_dtype(node.args)), "bool": torch.bool, "own": None}[
            row.computes
        ]
        args = [self.operand(a, index, dtype, literal=row.literal_divisor and i == 1) for i, a in enumerate(node.args)]
        kwargs = {k: self.operand(a, index, dtype) for k, a in node.kwargs.items() if k not in _LAYOUT}
        out = row.compute(*args, **kwargs) if row.computes != "own" else row.compute(self, result, *args, **kwargs)
        return self.cast(out, result)

    def operand(self, arg: Any, index: Index, dtype: torch.dtype | None, literal: bool = False) -> Any:
        """Return an argument of an elementwise operator as an expression; None, strings and dtypes pass through."""
        if isinstance(arg, fx.Node) and isinstance(arg.meta["val"], Tensor):
            value = self.at(arg, self.broadcast(index, arg.meta["val"].shape))
            return value if dtype is None else self.cast(value, dtype)
        if isinstance(arg, fx.Node) or is_symbol(arg):
            symbol = arg.meta["val"] if isinstance(arg, fx.Node) else arg
            return self.scalar(concrete(symbol) if literal else symbol, dtype)
        if isinstance(arg, (bool, int, float)):
            return self.scalar(arg, dtype)
        return arg

    def scalar(self, value: Any, dtype: torch.dtype | None) -> Expr:
        """Return a Python number, or a symbolic one, as an expression."""
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        if is_symbol(value):
            found = self.number(value)
            return found if dtype is None else self.cast(found, dtype)
        kind = torch.bool if isinstance(value, bool) else torch.float64 if isinstance(value, float) else torch.int64
        return self.builder.const(value, dtype or kind)

    def position(self, value: Any) -> Expr:
        """Return a Python number as an index expression, int32 where it fits."""
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        fits = is_symbol(value) or -(2**31) <= value < 2**31
        return self.scalar(value, torch.int32 if fits else torch.int64)

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        return truth(x) if dtype == torch.bool else x.cast(dtype)

    def broadcast(self, index: Index, shape: Sequence[Any]) -> Index:
        """Return the index of an operand of `shape` for element `index` of the result."""
        kept = index[len(index) - len(shape) :]
        zero = self.builder.const(0, torch.int32)
        return tuple(zero if isinstance(s, int) and s == 1 else i for i, s in zip(kept, shape, strict=True))

    def wrapped(self, i: Expr, size: Any) -> Expr:
        """Return index `i` counted from the front: PyTorch counts negative ones from the end."""
        if isinstance(i.constant, int):
            return i if i.constant >= 0 else self.position(i.constant + concrete(size))
        return where(i < 0, i + self.position(size).cast(i.dtype), i)

    def _reduce(self, node: fx.Node, index: Index, reduction: Reduction) -> Expr:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape = source.meta["val"].shape
        dims, keep = reduction.dims(node)
        dims = sorted({d % max(len(shape), 1) for d in (dims if dims else range(len(shape)))})
        dims = [d for d in dims if d < len(shape)]
        sizes = [concrete(shape[d]) for d in dims]
        count = math.prod(sizes)
        if count > MOST_UNROLLED:
            raise UnsupportedError(_too_long(node, count))
        rest = iter(index if not keep else [i for d, i in enumerate(index) if d not in dims])
        outer = {d: next(rest) for d in range(len(shape)) if d not in dims}
        dtype = wide(node.meta["val"].dtype)
        values = []
        for inner in itertools.product(*(range(n) for n in sizes)):
            chosen = dict(zip(dims, map(self.position, inner), strict=True))
            value = self.at(source, tuple((outer | chosen)[d] for d in range(len(shape))))
            values.append(value if reduction.keeps_dtype else self.cast(value, dtype))
        return self.cast(reduction.combine(self, node, values, dtype), dtype)


def _too_long(node: fx.Node, count: int) -> str:
    return (
        f"{operator_name(node)} over {count} elements inside of a mod: found a reduction that reads b, h, q_idx or "
        f"kv_idx, expected at most {MOST_UNROLLED} elements. Reduce the tensor before the call and index the result."
    )


def operator_name(node: fx.Node) -> str:
    """Return the name of an aten or prims operator without overload; in-place operators as those that return."""
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    space, _, name = name.rpartition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space in ("aten", "") else f"{space}.{name}"


def concrete(value: Any) -> Any:
    """Return a symbolic number as a Python number; the trace then holds for this value alone (a guard)."""
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    return int(value) if isinstance(value, torch.SymInt) else value


def common_dtype(args: Sequence[Any]) -> torch.dtype:
    """Return the dtype in which torch computes with these operands."""
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    stand_ins: list[Any] = [
        1.5 if isinstance(v, torch.SymFloat) else 1 if isinstance(v, torch.SymInt) else v
        for v in values
        if isinstance(v, (Tensor, int, float, torch.SymInt, torch.SymFloat))
    ]
    if len(stand_ins) < 2:
        return torch.as_tensor(stand_ins[0] if stand_ins else 0).dtype
    result = torch.result_type(stand_ins[0], stand_ins[1])
    for more in stand_ins[2:]:
        result = torch.promote_types(result, torch.result_type(stand_ins[0], more))
    return result


# Elementwise operators.


@dataclass(frozen=True)
class Row:
    """How to compute one elementwise operator.

    Operands are cast before `compute` sees them: to the dtype of the result, to the common dtype of the operands, or
    to bool. With "own" they keep theirs and `compute(elements, dtype of the result, *operands)` casts for itself.
    """

    compute: Callable[..., Expr]
    computes: str = "result"  # "result", "common", "bool" or "own"
    literal_divisor: bool = False  # the second operand, if a number, is never a runtime value


def truth(x: Expr) -> Expr:
    return x if x.dtype == torch.bool else x.apply("ne", 0)


def _unary(name: str) -> Row:
    return Row(lambda x: x.apply(name))


def _rounding(name: str) -> Row:
    return Row(lambda x, decimals=None: x.apply(name) if x.dtype.is_floating_point else x)


def _compare(name: str) -> Row:
    def compute(x: Expr, y: Expr) -> Expr:
        if x.dtype == torch.bool and name not in ("eq", "ne"):
            x, y = x.cast(torch.int32), y.cast(torch.int32)
        return x.apply(name, y)

    return Row(compute, "common")


def _logical(on_bool: str, on_integers: str | None = None) -> Row:
    if on_integers is None:
        return Row(lambda *operands: operands[0].apply(on_bool, *operands[1:]), "bool")
    return Row(lambda x, *y: x.apply(on_bool if x.dtype == torch.bool else on_integers, *y))


def _add(x: Expr, y: Expr, alpha: Expr | None = None) -> Expr:
    if x.dtype == torch.bool:
        return x.apply("or", y)
    return x + (y if alpha is None else y * alpha)


def _sub(x: Expr, y: Expr, alpha: Expr | None = None) -> Expr:
    return x - (y if alpha is None else y * alpha)


def _mul(x: Expr, y: Expr) -> Expr:
    return x.apply("and" if x.dtype == torch.bool else "mul", y)


def _div(x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return x.apply("floordiv", y)
    if x.dtype.is_floating_point:
        return (x / y).apply("trunc")
    return (x - x.apply("fmod", y)).apply("floordiv", y)


def power(elements: Elements, dtype: torch.dtype, x: Expr, y: Expr) -> Expr:
    """x ** y: small integer powers multiply, 2 ** y is exp2, the rest is pow."""
    exponent = y.constant
    x = elements.cast(x, dtype)
    if isinstance(exponent, (int, float)):
        if exponent == int(exponent) and 0 <= abs(exponent) <= 32:
            whole = _multiplied(x, abs(int(exponent)))
            return whole if exponent >= 0 else 1.0 / whole
        if exponent in (0.5, -0.5):
            return x.apply("sqrt" if exponent > 0 else "rsqrt")
    if dtype.is_floating_point:
        return y.cast(dtype).apply("exp2") if x.constant == 2 else x.apply("pow", y.cast(dtype))
    if x.constant == 2:
        return where(y < 0, 0, elements.builder.const(1, dtype).apply("shl", y.cast(dtype)))
    return x.cast(torch.float64).apply("pow", y.cast(torch.float64)).cast(dtype)


def _multiplied(x: Expr, times: int) -> Expr:
    if times == 0:
        return x.builder.const(1, x.dtype)
    half = _multiplied(x, times // 2) if times > 1 else None
    if half is None:
        return x
    return half * half * x if times % 2 else half * half


def _select(elements: Elements, dtype: torch.dtype, condition: Expr, x: Any, y: Any) -> Expr:
    return where(truth(condition), elements.cast(x, dtype), elements.cast(y, dtype))


def _converted(elements: Elements, dtype: torch.dtype, x: Expr, to: torch.dtype | None = None, **_: Any) -> Expr:
    """Convert as the user wrote it: to a half type it rounds, though the value goes on in float32."""
    if to is None:
        return x
    return elements.cast(elements.cast(x, to), dtype)


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """clamp, whose gradient passes at the ends; integers need none and keep the tighter bound of min and max."""
    if low is not None:
        x = where(x < low, low, x) if x.dtype.is_floating_point else x.apply("maximum", low)
    if high is not None:
        x = where(x > high, high, x) if x.dtype.is_floating_point else x.apply("minimum", high)
    return x


def _extreme(name: str) -> Row:
    on_bool = "or" if name == "maximum" else "and"
    return Row(lambda x, y: x.apply(on_bool if x.dtype == torch.bool else name, y))


def _abs(x: Expr) -> Expr:
    return x.apply("abs")


def _sign(x: Expr) -> Expr:
    zero = x.builder.const(0, x.dtype)
    return where(x > 0, zero + 1, where(x < 0, zero - 1, zero))


def _signbit(x: Expr) -> Expr:
    if not x.dtype.is_floating_point:
        return x < 0
    return (x < 0).apply("or", x.apply("eq", 0.0).apply("and", 1.0 / x < 0))


def _detach(x: Expr) -> Expr:
    return x.apply("detach") if x.dtype.is_floating_point else x


def _hypot(x: Expr, y: Expr) -> Expr:
    return (x * x + y * y).apply("sqrt")


def _nan_to_num(
    elements: Elements, dtype: torch.dtype, x: Expr, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Expr:
    limits = torch.finfo(dtype)
    top = limits.max if posinf is None else elements.cast(posinf, dtype)
    bottom = limits.min if neginf is None else elements.cast(neginf, dtype)
    fill = 0.0 if nan is None else elements.cast(nan, dtype)
    x = where(x.apply("eq", math.inf), top, where(x.apply("eq", -math.inf), bottom, x))
    return where(x.apply("isnan"), fill, x)


ROWS: dict[str, Row] = {
    "add": Row(_add), "sub": Row(_sub), "mul": Row(_mul), "div": Row(_div, literal_divisor=False),
    "rsub": Row(lambda x, y, alpha=None: _sub(y, x, alpha)),
    "floor_divide": Row(lambda x, y: x.apply("floordiv", y), literal_divisor=True),
    "remainder": Row(lambda x, y: x.apply("mod", y), literal_divisor=True),
    "fmod": Row(lambda x, y: x.apply("fmod", y), literal_divisor=True),
    "neg": _unary("neg"), "abs": Row(_abs), "pow": Row(power, "own"), "sign": Row(_sign), "sgn": Row(_sign),
    "reciprocal": Row(lambda x: 1.0 / x), "square": Row(lambda x: x * x), "hypot": Row(_hypot),
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"),
    "fmax": Row(lambda x, y: where(x.apply("isnan"), y, where(y.apply("isnan"), x, x.apply("maximum", y)))),
    "fmin": Row(lambda x, y: where(x.apply("isnan"), y, where(y.apply("isnan"), x, x.apply("minimum", y)))),
    "clamp": Row(_clamp), "clamp_min": Row(_clamp), "clamp_max": Row(lambda x, high: _clamp(x, None, high)),
    "relu": Row(lambda x: where(x <= 0, 0, x)), "nan_to_num": Row(_nan_to_num, "own"),
    "eq": _compare("eq"), "ne": _compare("ne"), "lt": _compare("lt"), "le": _compare("le"), "gt": _compare("gt"),
    "ge": _compare("ge"),
    "isnan": Row(lambda x: x.apply("isnan"), "common"), "isinf": Row(lambda x: x.apply("isinf"), "common"),
    "isfinite": Row(lambda x: x.apply("isnan").apply("or", x.apply("isinf")).apply("not"), "common"),
    "isposinf": Row(lambda x: x.apply("eq", math.inf), "common"),
    "isneginf": Row(lambda x: x.apply("eq", -math.inf), "common"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _logical("and", "bitand"), "bitwise_or": _logical("or", "bitor"),
    "bitwise_xor": _logical("xor", "bitxor"), "bitwise_not": _logical("not", "bitnot"),
    "__and__": _logical("and", "bitand"), "__or__": _logical("or", "bitor"), "__xor__": _logical("xor", "bitxor"),
    "bitwise_left_shift": Row(lambda x, y: x.apply("shl", y)), "__lshift__": Row(lambda x, y: x.apply("shl", y)),
    "bitwise_right_shift": Row(lambda x, y: x.apply("shr", y)), "__rshift__": Row(lambda x, y: x.apply("shr", y)),
    "where": Row(_select, "own"), "masked_fill": Row(lambda e, d, x, c, y: _select(e, d, c, y, x), "own"),
    "_to_copy": Row(lambda e, d, x, dtype=None, **_: _converted(e, d, x, dtype), "own"),
    "prims.convert_element_type": Row(lambda e, d, x, dtype: e.cast(x, d), "own"), "detach": Row(_detach),
    "copy": Row(lambda x, y: y),
    "signbit": Row(_signbit, "common"),
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "trunc": _rounding("trunc"), "round": _rounding("round"),
    "frac": Row(lambda x: x - x.apply("trunc")),
    "atan2": Row(lambda y, x: y.apply("atan2", x)), "copysign": Row(lambda x, y: x.apply("copysign", y)),
    **{name: _unary(name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc",
    )},
}  # fmt: skip

_LAYOUT = frozenset(("layout", "device", "pin_memory", "memory_format", "non_blocking"))

# Operators that make a tensor of one value: the value.
CREATION: dict[str, Callable[[fx.Node], Any]] = {
    "scalar_tensor": lambda node: node.args[0],
    "full": lambda node: node.args[1], "full_like": lambda node: node.args[1], "new_full": lambda node: node.args[2],
    "zeros": lambda node: 0, "zeros_like": lambda node: 0, "new_zeros": lambda node: 0,
    "ones": lambda node: 1, "ones_like": lambda node: 1, "new_ones": lambda node: 1,
    "empty": lambda node: 0, "empty_like": lambda node: 0, "new_empty": lambda node: 0,
}  # fmt: skip


# Views and gathers: element `index` of the result is one element of the source.


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _shape(node: Any) -> Any:
    return node.meta["val"].shape


def _same(elements: Elements, node: fx.Node, index: Index) -> Expr:
    return elements.at(node.args[0], index)  # type: ignore[arg-type]


def _expand(elements: Elements, node: fx.Node, index: Index) -> Expr:
    return elements.at(node.args[0], elements.broadcast(index, _shape(node.args[0])))  # type: ignore[arg-type]


def _select_view(elements: Elements, node: fx.Node, index: Index) -> Expr:
    source, dim, at = node.args
    dim = dim % len(_shape(source))  # type: ignore[operator]
    chosen = elements.position(at)
    return elements.at(source, (*index[:dim], chosen, *index[dim:]))  # type: ignore[arg-type]


def _slice(elements: Elements, node: fx.Node, index: Index) -> Expr:
    source, dim = node.args[0], _argument(node, 1, "dim", 0) % len(index)
    start, step = _argument(node, 2, "start") or 0, _argument(node, 4, "step", 1)
    size = _shape(source)[dim]
    start = concrete(start)
    if start < 0:
        start = max(start + concrete(size), 0)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    moved = i * concrete(step) + elements.position(start).cast(i.dtype)
    return elements.at(source, (*index[:dim], moved, *index[dim + 1 :]))  # type: ignore[arg-type]


def _unsqueeze(elements: Elements, node: fx.Node, index: Index) -> Expr:
    dim = node.args[1] % len(index)  # type: ignore[operator]
    return elements.at(node.args[0], (*index[:dim], *index[dim + 1 :]))  # type: ignore[arg-type]


def _permute(elements: Elements, node: fx.Node, index: Index) -> Expr:
    order = [d % len(index) for d in node.args[1]]  # type: ignore[union-attr]
    return elements.at(node.args[0], tuple(index[order.index(d)] for d in range(len(index))))  # type: ignore[arg-type]


def _transpose(elements: Elements, node: fx.Node, index: Index) -> Expr:
    swapped = list(index)
    x, y = (node.args[1], node.args[2]) if len(node.args) > 1 else (0, len(index) - 1)
    if index:
        swapped[x], swapped[y] = swapped[y], swapped[x]  # type: ignore[index]
    return elements.at(node.args[0], tuple(swapped))  # type: ignore[arg-type]


def _view(elements: Elements, node: fx.Node, index: Index) -> Expr:
    """Reshape: the same linear position. Dimensions of size 1 cost nothing, the rest a division each."""
    source = node.args[0]
    new, old = list(_shape(node)), list(_shape(source))
    zero = elements.builder.const(0, torch.int32)
    pairs = [(i, n) for i, n in zip(index, new, strict=True) if not (isinstance(n, int) and n == 1)]
    wanted = [n for n in old if not (isinstance(n, int) and n == 1)]
    if [str(n) for _, n in pairs] == [str(n) for n in wanted]:
        moved = iter(i for i, _ in pairs)
        return elements.at(source, tuple(zero if isinstance(n, int) and n == 1 else next(moved) for n in old))  # type: ignore[arg-type]
    linear = zero
    for i, n in pairs:
        linear = linear * concrete(n) + elements.wrapped(i, n).cast(linear.dtype)
    found: list[Expr] = []
    for n in reversed(old):
        n = concrete(n)
        found.append(linear.apply("mod", n) if n > 1 else zero)
        linear = linear.apply("floordiv", n) if n > 1 else linear
    return elements.at(source, tuple(reversed(found)))  # type: ignore[arg-type]


def _flip(elements: Elements, node: fx.Node, index: Index) -> Expr:
    flipped = list(index)
    for dim in node.args[1]:  # type: ignore[union-attr]
        size = _shape(node)[dim]
        i = elements.wrapped(index[dim], size)
        flipped[dim] = elements.position(size).cast(i.dtype) - 1 - i
    return elements.at(node.args[0], tuple(flipped))  # type: ignore[arg-type]


def _cat(elements: Elements, node: fx.Node, index: Index) -> Expr:
    parts, dim = node.args[0], _argument(node, 1, "dim", 0) % len(index)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    result, start = None, sum(concrete(_shape(p)[dim]) for p in parts)  # type: ignore[union-attr]
    if start > MOST_UNROLLED and i.constant is None:
        raise UnknownOperator(node)
    for part in reversed(parts):  # type: ignore[arg-type]
        start -= concrete(_shape(part)[dim])
        value = elements.at(part, (*index[:dim], i - start, *index[dim + 1 :]))
        value = elements.cast(value, wide(node.meta["val"].dtype))
        result = value if result is None else where(i >= start, result, value)
    assert result is not None
    return result


def _stack(elements: Elements, node: fx.Node, index: Index) -> Expr:
    parts: Any = node.args[0]
    dim = _argument(node, 1, "dim", 0) % len(index)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    result = None
    for position, part in reversed(list(enumerate(parts))):
        value = elements.cast(elements.at(part, (*index[:dim], *index[dim + 1 :])), wide(node.meta["val"].dtype))
        result = value if result is None else where(i > position, result, value)
    assert result is not None
    return result


def _gathered(elements: Elements, node: fx.Node, index: Index) -> Expr:
    """aten.index: index tensors broadcast; their dimensions stand where they stood if adjacent, else in front."""
    source, chosen = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    places = [d for d, c in enumerate(chosen) if c is not None]
    if any(c.meta["val"].dtype in (torch.bool, torch.uint8) for c in chosen if c is not None):
        raise UnsupportedError(
            "indexing with a bool tensor inside of a mod: found a mask, expected integers. Use torch.where instead."
        )
    width = max(chosen[d].meta["val"].ndim for d in places)
    front = 0 if places[-1] - places[0] + 1 != len(places) else places[0]
    advanced, rest = index[front : front + width], iter((*index[:front], *index[front + width :]))
    full: list[Expr] = []
    for d in range(len(_shape(source))):
        if d in places:
            full.append(elements.operand(chosen[d], advanced, None))
        else:
            full.append(next(rest))
    return elements.at(source, tuple(full))  # type: ignore[arg-type]


def _index_select(elements: Elements, node: fx.Node, index: Index) -> Expr:
    source, dim, chosen = node.args
    if not index:
        return elements.at(source, ())  # type: ignore[arg-type]
    dim = dim % len(index)  # type: ignore[operator]
    i = elements.at(chosen, (index[dim],) if _shape(chosen) else ())  # type: ignore[arg-type]
    return elements.at(source, (*index[:dim], i, *index[dim + 1 :]))  # type: ignore[arg-type]


def _gather(elements: Elements, node: fx.Node, index: Index) -> Expr:
    source, dim, chosen = node.args[:3]
    i = elements.at(chosen, index)  # type: ignore[arg-type]
    dim = dim % max(len(index), 1)  # type: ignore[operator]
    return elements.at(source, (*index[:dim], i, *index[dim + 1 :]) if _shape(source) else ())  # type: ignore[arg-type]


def _embedding(elements: Elements, node: fx.Node, index: Index) -> Expr:
    row = elements.at(node.args[1], index[:-1])  # type: ignore[arg-type]
    return elements.at(node.args[0], (row, index[-1]))  # type: ignore[arg-type]


def _arange(elements: Elements, node: fx.Node, index: Index) -> Expr:
    start, step = (0, 1) if len(node.args) == 1 else (node.args[0], _argument(node, 2, "step", 1))
    dtype = wide(node.meta["val"].dtype)
    i = elements.wrapped(index[0], _shape(node)[0]).cast(dtype)
    return i * elements.scalar(step, dtype) + elements.scalar(start, dtype)


def _contraction(elements: Elements, node: fx.Node, index: Index) -> Expr:
    """dot, mv, mm and bmm over a short dimension, unrolled."""
    x, y = node.args[:2]
    count = concrete(_shape(x)[-1])
    if count > MOST_UNROLLED:
        raise UnsupportedError(_too_long(node, count))
    batch = index[:1] if operator_name(node) == "bmm" else ()
    left = index[: len(_shape(x)) - 1]
    right = index[len(index) - len(_shape(y)) + 1 + len(batch) :] if len(_shape(y)) > 1 + len(batch) else ()
    dtype = wide(node.meta["val"].dtype)
    total = elements.builder.const(0, dtype)
    for k in map(elements.position, range(count)):
        a, b = elements.at(x, (*left, k)), elements.at(y, (*batch, k, *right))  # type: ignore[arg-type]
        total = total + elements.cast(a, dtype) * elements.cast(b, dtype)
    return total


def _cumulated(elements: Elements, node: fx.Node, index: Index) -> Expr:
    source, dim = node.args[0], _argument(node, 1, "dim", 0) % max(len(index), 1)
    if not index:
        return elements.at(source, ())  # type: ignore[arg-type]
    count, dtype = concrete(_shape(node)[dim]), wide(node.meta["val"].dtype)
    if count > MOST_UNROLLED:
        raise UnsupportedError(_too_long(node, count))
    i = elements.wrapped(index[dim], count)
    total = elements.builder.const(0, dtype)
    for k in range(count):
        value = elements.at(source, (*index[:dim], elements.position(k), *index[dim + 1 :]))  # type: ignore[arg-type]
        total = total + where(i >= k, elements.cast(value, dtype), 0)
    return total


VIEWS: dict[str, Callable[[Elements, fx.Node, Index], Expr]] = {
    "alias": _same, "clone": _same, "contiguous": _same, "lift_fresh": _same, "lift_fresh_copy": _same,
    "expand": _expand, "select": _select_view, "slice": _slice, "unsqueeze": _unsqueeze, "permute": _permute,
    "transpose": _transpose, "t": _transpose, "view": _view, "_unsafe_view": _view, "reshape": _view,
    "squeeze": _view, "flip": _flip, "cat": _cat, "stack": _stack, "index": _gathered, "_unsafe_index": _gathered,
    "index_select": _index_select, "gather": _gather, "embedding": _embedding, "arange": _arange,
    "dot": _contraction, "mv": _contraction, "mm": _contraction, "bmm": _contraction,
    "cumsum": _cumulated,
}  # fmt: skip


# Reductions, unrolled.


@dataclass(frozen=True)
class Reduction:
    """`combine(elements, node, values, dtype)` of the unrolled elements; `dims(node)` says over which dimensions."""

    combine: Callable[[Elements, fx.Node, list[Expr], torch.dtype], Expr]
    dims: Callable[[fx.Node], tuple[Any, bool]]
    keeps_dtype: bool = False


def _dims_at(position: int) -> Callable[[fx.Node], tuple[Any, bool]]:
    def dims(node: fx.Node) -> tuple[Any, bool]:
        found = _argument(node, position, "dim")
        found = [found] if isinstance(found, int) else found
        return found, bool(_argument(node, position + 1, "keepdim", False))

    return dims


def _fold(name: str, start: Any = None) -> Callable[..., Expr]:
    def combine(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
        if not values:
            return elements.scalar(start, dtype)
        return reduce(lambda x, y: x.apply(name, y), values)

    return combine


def _mean(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
    return _fold("add", 0.0)(elements, node, values, dtype) / float(len(values))


def _variance(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
    mean = _mean(elements, node, values, dtype)
    squares = [(v - mean) * (v - mean) for v in values]
    correction = concrete(_argument(node, 2, "correction", 1))
    return reduce(operator.add, squares) / float(max(len(values) - (1 if correction is None else correction), 0))


def _all_or_any(name: str) -> Callable[..., Expr]:
    def combine(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
        return _fold(name, name == "and")(elements, node, [truth(v) for v in values], torch.bool)

    return combine


def _norm(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
    order = concrete(_argument(node, 1, "ord", 2))
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
    zero = total.apply("eq", 0.0)  # torch's gradient at the zero vector is 0, that of sqrt is infinite
    return where(zero, 0.0, where(zero, 1.0, total).apply("sqrt"))


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_fold("add", 0), _dims_at(1)), "mean": Reduction(_mean, _dims_at(1)),
    "prod": Reduction(_fold("mul", 1), _dims_at(1)), "amax": Reduction(_fold("maximum"), _dims_at(1)),
    "amin": Reduction(_fold("minimum"), _dims_at(1)), "max": Reduction(_fold("maximum"), lambda node: (None, False)),
    "min": Reduction(_fold("minimum"), lambda node: (None, False)),
    "any": Reduction(_all_or_any("or"), _dims_at(1), True), "all": Reduction(_all_or_any("and"), _dims_at(1), True),
    "var": Reduction(
        _variance, lambda node: (_argument(node, 1, "dim"), bool(_argument(node, 3, "keepdim", False)))
    ),
    "linalg_vector_norm": Reduction(_norm, _dims_at(2)),
}  # fmt: skip
