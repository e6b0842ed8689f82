"""The table from aten operators to scalar expressions, and the values of tensors of any rank, element by element.

A mod computes on 0-d tensors, but on the way it may hold small ones (`bias[b][h]`, a slice, a norm over 3 elements).
`Elements.at(node, index)` is the scalar that stands at `index` of what an FX node computes: views and gathers only
rewrite the index, elementwise operators recurse into their operands, small reductions are unrolled, and what depends
on captured tensors alone is a load.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.nodes import wide
from flexattn.graph.operators import digamma, where

MOST_UNROLLED = 64
_MOST_NESTED = 40  # operators inside of each other before `Elements.value` starts from the innermost one

Index = tuple[Expr, ...]


class UnknownOperator(Exception):
    """No row of the tables computes this operator, or not with these arguments; `reason` says more where it can."""

    def __init__(self, node: fx.Node, reason: str = "") -> None:
        super().__init__(str(node.target))
        self.node = node
        self.reason = reason


class Refused(UnknownOperator):
    """As UnknownOperator, where no decomposition would help."""


class _TooDeep(Exception):
    """An element that has to be known before the one that was asked for: Python's stack is too short for both."""

    def __init__(self, node: fx.Node, index: Index) -> None:
        super().__init__()
        self.element = node, index


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
        self._depth = 0

    def value(self, node: fx.Node) -> Expr:
        """Return the only element of a 0-d node, however many operators stand in a row before it."""
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
        """Return the element of `node` at `index`, one expression for each dimension."""
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

    def _compute(self, node: fx.Node, index: Index) -> Expr:
        if node.target is operator.getitem:
            source, which = node.args
            assert isinstance(source, fx.Node)
            compute, (args, kwargs) = _entry(RESULTS, source), arguments(source)
            if compute is None:  # the operator that has several results is the one to decompose
                raise UnknownOperator(source, REASONS.get(operator_name(source), ""))
            _check_arguments(compute, source, self, source, index, which, *args, **kwargs)
            return compute(self, source, index, which, *args, **kwargs)
        args, kwargs = arguments(node)
        if (view := _entry(VIEWS, node)) is not None:
            _check_arguments(view, node, self, node, index, *args, **kwargs)
            return view(self, node, index, *args, **kwargs)
        if (reduction := _entry(REDUCTIONS, node)) is not None:
            _check_arguments(reduction.over, node, *args[1:], **kwargs)
            return self._reduce(node, index, reduction, args[0], reduction.over(*args[1:], **kwargs))
        if (created := _entry(CREATION, node)) is not None:
            _check_arguments(created, node, *args, **kwargs)
            return self.scalar(created(*args, **kwargs), wide(node.meta["val"].dtype))
        if (row := _entry(ROWS, node)) is not None:
            return self._row(node, index, row, args, kwargs)
        raise UnknownOperator(node, REASONS.get(operator_name(node), ""))

    def _row(self, node: fx.Node, index: Index, row: Row, args: list[Any], kwargs: dict[str, Any]) -> Expr:
        result = wide(node.meta["val"].dtype)
        dtype = {"result": result, "common": wide(common_dtype(args)), "bool": torch.bool, "own": None}[row.computes]
        extra = (self, result) if row.computes == "own" else ()
        _check_arguments(row.compute, node, *extra, *args, **kwargs)
        for value in (*args, *kwargs.values()):
            if type(value) is int and dtype is not None and not _holds(dtype, value):
                raise Refused(node, f"of {value} in {dtype}, which does not hold it. Convert the tensor by .long()")
        operands = [self.operand(a, index, dtype, literal=row.literal_divisor and i == 1) for i, a in enumerate(args)]
        named = {k: self.operand(a, index, dtype) for k, a in kwargs.items()}
        return self.cast(row.compute(*extra, *operands, **named), result)

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
        """Return index `i` counted from the front: PyTorch counts negative ones from the end."""
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


def operator_name(node: fx.Node) -> str:
    """Return the name of an aten or prims operator without overload; in-place operators as those that return."""
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    space, _, name = name.rpartition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space in ("aten", "") else f"{space}.{name}"


def _entry(table: dict[str, Any], node: fx.Node) -> Any:
    """Return the row of an operator: one for this overload alone, or one for all that have no row of their own."""
    name = operator_name(node)
    overload = getattr(node.target, "_overloadname", "")
    return table.get(f"{name}.{overload}", table.get(name))


def has_row(node: fx.Node) -> bool:
    """Tell whether the element of a node can be computed from those of its operands."""
    return any(_entry(table, node) is not None for table in (ROWS, CREATION, VIEWS))


def arguments(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Return what an operator was given, positional as far as its schema allows, without what equals the default.

    Where a result is stored says nothing of its elements: layout, device and the like are left out.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return list(node.args), dict(node.kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    needed = 0
    for i, argument in enumerate(target._schema.arguments):
        default = argument.default_value
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
        given = not argument.has_default_value() or type(value) is not type(default) or value != default
        if not argument.kwarg_only:
            positional.append(value)
            needed = len(positional) if given else needed
        elif given and argument.name not in _LAYOUT:
            named[argument.name] = value
    return positional[:needed], named


def _check_arguments(compute: Callable[..., Any], node: fx.Node, *args: Any, **kwargs: Any) -> None:
    """Raise unless a row has a parameter for everything that the operator was given: nothing is ignored."""
    try:
        _signature(compute).bind(*args, **kwargs)
    except TypeError as error:
        raise UnknownOperator(node, f"with arguments that have no rule: {error}") from None


@lru_cache(1024)
def _signature(compute: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(compute)


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


_ON_BOOLEANS = {"maximum": "or", "minimum": "and"}


def _holds(dtype: torch.dtype, value: int) -> bool:
    """Tell whether torch computes with this number, and not with what is left of it in a narrow integer dtype."""
    if dtype.is_floating_point or dtype == torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def truth(x: Expr) -> Expr:
    return x if x.dtype == torch.bool else x.apply("ne", 0)


def _unary(name: str) -> Row:
    return Row(lambda x: x.apply(name))


def _rounding(name: str) -> Row:
    return Row(lambda x: x.apply(name) if x.dtype.is_floating_point else x)


def _round_decimals(x: Expr, decimals: Expr | None = None) -> Expr:
    """round(x, decimals=n) as torch computes it: scaled by a power of ten, rounded, scaled back."""
    places = 0 if decimals is None or decimals.constant is None else decimals.constant
    if not x.dtype.is_floating_point or places == 0:
        return x.apply("round") if x.dtype.is_floating_point else x
    scale = 10.0 ** abs(float(places))
    return (x * scale).apply("round") / scale if float(places) > 0 else (x / scale).apply("round") * scale


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


def _bitwise_not(x: Expr) -> Expr:
    if x.dtype == torch.uint8:  # Triton's interpreter has no ~ of it
        return x.apply("bitxor", 255)
    return x.apply("not" if x.dtype == torch.bool else "bitnot")


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
    if x.constant == -1:
        return 1 - y.cast(dtype).apply("bitand", 1) * 2
    return x.apply("pow", y.cast(dtype))


def _multiplied(x: Expr, times: int) -> Expr:
    if times == 0:
        return x.builder.const(1, x.dtype)
    half = _multiplied(x, times // 2) if times > 1 else None
    if half is None:
        return x
    return half * half * x if times % 2 else half * half


def _select(elements: Elements, dtype: torch.dtype, condition: Expr, x: Any, y: Any) -> Expr:
    return where(truth(condition), elements.cast(x, dtype), elements.cast(y, dtype))


def _converted(elements: Elements, dtype: torch.dtype, x: Expr, to: torch.dtype | None = None) -> Expr:
    """Convert as the user wrote it: to a half type it rounds, though the value goes on in float32."""
    return x if to is None else elements.cast(elements.cast(x, to), dtype)


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """clamp, whose gradient passes at the ends; integers need none and keep the tighter bound of min and max."""
    if low is not None:
        x = where(x < low, low, x) if x.dtype.is_floating_point else x.apply("maximum", low)
    if high is not None:
        x = where(x > high, high, x) if x.dtype.is_floating_point else x.apply("minimum", high)
    return x


def _extreme(name: str) -> Row:
    on_bool = _ON_BOOLEANS[name]
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
    "reciprocal": Row(lambda x: 1.0 / x), "hypot": Row(_hypot),
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"),
    "fmax": Row(lambda x, y: where(x.apply("isnan"), y, where(y.apply("isnan"), x, x.apply("maximum", y)))),
    "fmin": Row(lambda x, y: where(x.apply("isnan"), y, where(y.apply("isnan"), x, x.apply("minimum", y)))),
    "clamp": Row(_clamp), "clamp_min": Row(_clamp), "clamp_max": Row(lambda x, high: _clamp(x, None, high)),
    "relu": Row(lambda x: where(x <= 0, 0, x)), "nan_to_num": Row(_nan_to_num, "own"),
    "eq": _compare("eq"), "ne": _compare("ne"), "lt": _compare("lt"), "le": _compare("le"), "gt": _compare("gt"),
    "ge": _compare("ge"),
    "isnan": Row(lambda x: x.apply("isnan"), "common"), "isinf": Row(lambda x: x.apply("isinf"), "common"),
    "isposinf": Row(lambda x: x.apply("eq", math.inf), "common"),
    "isneginf": Row(lambda x: x.apply("eq", -math.inf), "common"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"), "bitwise_not": Row(_bitwise_not),
    "bitwise_and": _logical("and", "bitand"), "bitwise_or": _logical("or", "bitor"),
    "bitwise_xor": _logical("xor", "bitxor"),

    "bitwise_left_shift": Row(lambda x, y: x.apply("shl", y)), "__lshift__": Row(lambda x, y: x.apply("shl", y)),
    "bitwise_right_shift": Row(lambda x, y: x.apply("shr", y)), "__rshift__": Row(lambda x, y: x.apply("shr", y)),
    "where": Row(_select, "own"), "masked_fill": Row(lambda e, d, x, c, y: _select(e, d, c, y, x), "own"),
    "_to_copy": Row(lambda e, d, x, dtype=None: _converted(e, d, x, dtype), "own"),
    "prims.convert_element_type": Row(_converted, "own"), "detach": Row(_detach),
    "copy": Row(lambda x, y: y),
    "signbit": Row(_signbit, "common"),
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "trunc": _rounding("trunc"), "round": _rounding("round"),
    "round.decimals": Row(_round_decimals),
    "frac": Row(lambda x: x - x.apply("trunc")),
    "special_erfcx": Row(lambda x: x.apply("erfcx")), "digamma": Row(digamma),
    "special_ndtri": Row(lambda x: (x * 2.0 - 1.0).apply("erfinv") * math.sqrt(2.0)),
    "atan2": Row(lambda y, x: y.apply("atan2", x)), "copysign": Row(lambda x, y: x.apply("copysign", y)),
    **{name: _unary(name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc",
        "lgamma", "erfinv",
    )},
}  # fmt: skip

_LAYOUT = frozenset(("layout", "device", "pin_memory", "memory_format", "non_blocking"))

# Operators that make a tensor of one value: the value.
CREATION: dict[str, Callable[..., Any]] = {
    "scalar_tensor": lambda value, dtype=None: value,
    "full": lambda size, value, dtype=None: value,
    "full_like": lambda x, value, dtype=None: value,
    "new_full": lambda x, size, value, dtype=None: value,
    **{name: lambda x, dtype=None: 0 for name in ("zeros", "zeros_like", "empty", "empty_like")},
    **{name: lambda x, dtype=None: 1 for name in ("ones", "ones_like")},
    **{name: lambda x, size, dtype=None: 0 for name in ("new_zeros", "new_empty")},
    "new_ones": lambda x, size, dtype=None: 1,
}  # fmt: skip


# Views and gathers: element `index` of the result is one element of the source.


def _shape(node: Any) -> Any:
    return node.meta["val"].shape


def _put(index: Index, dim: int, i: Expr) -> Index:
    return (*index[:dim], i, *index[dim + 1 :])


def _same(elements: Elements, node: fx.Node, index: Index, source: fx.Node) -> Expr:
    return elements.at(source, index)


def _expand(elements: Elements, node: fx.Node, index: Index, source: fx.Node, size: Any) -> Expr:
    return elements.at(source, elements.broadcast(index, _shape(source)))


def _select_view(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, at: Any) -> Expr:
    dim = dim % len(_shape(source))
    return elements.at(source, (*index[:dim], elements.position(at), *index[dim:]))


def _slice(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int = 0, start: Any = None, end: Any = None,
    step: Any = 1,
) -> Expr:  # fmt: skip
    dim = dim % len(index)
    size = _shape(source)[dim]
    start = concrete(start or 0)
    if start < 0:
        start = max(start + concrete(size), 0)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    return elements.at(source, _put(index, dim, i * concrete(step) + elements.position(start)))


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
    """Reshape: the same linear position. Dimensions of size 1 cost nothing, the rest a division each."""
    new, old = list(_shape(node)), list(_shape(source))
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
        f"that reads the bits of a {source.meta['val'].dtype} as {dtype}. Do so with captured tensors, before the call",
    )


def _flip(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dims: Sequence[int]) -> Expr:
    flipped = list(index)
    for dim in dims:
        size = _shape(node)[dim]
        flipped[dim] = elements.position(size) - 1 - elements.wrapped(index[dim], size)
    return elements.at(source, tuple(flipped))


def _roll(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> Expr:
    if not dims:
        raise UnknownOperator(node, "without dims. Name the dimension")
    rolled = index
    for shift, dim in zip(shifts, dims, strict=True):
        size = concrete(_shape(node)[dim])
        i = elements.wrapped(rolled[dim % len(index)], size) - elements.position(shift)
        rolled = _put(rolled, dim % len(index), i.apply("mod", elements.position(size)))
    return elements.at(source, rolled)


def _cat(elements: Elements, node: fx.Node, index: Index, parts: Sequence[fx.Node], dim: int = 0) -> Expr:
    dim, dtype = dim % len(index), wide(node.meta["val"].dtype)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    parts = [p for p in parts if len(_shape(p)) == len(index)]  # an empty 1-D tensor counts for nothing
    sizes = [concrete(_shape(p)[dim]) for p in parts]
    starts = [0, *itertools.accumulate(sizes)]
    chosen = [(p, n, at) for p, n, at in zip(parts, sizes, starts, strict=False) if n]
    if isinstance(i.constant, int):
        chosen = [(p, n, at) for p, n, at in chosen if at <= i.constant < at + n] or chosen[-1:]
    elements.short(node, len(chosen))
    result = None
    for part, size, start in reversed(chosen):
        inside = i - start
        if len(chosen) > 1:  # the parts that are not chosen are read too, somewhere inside of them
            inside = inside.apply("maximum", 0).apply("minimum", size - 1)
        value = elements.cast(elements.at(part, _put(index, dim, inside)), dtype)
        result = value if result is None else where(i < start + size, value, result)
    assert result is not None
    return result


def _stack(elements: Elements, node: fx.Node, index: Index, parts: Sequence[fx.Node], dim: int = 0) -> Expr:
    dim, dtype = dim % len(index), wide(node.meta["val"].dtype)
    i = elements.wrapped(index[dim], _shape(node)[dim])
    inner = (*index[:dim], *index[dim + 1 :])
    return _chosen(i, [elements.cast(elements.at(part, inner), dtype) for part in parts])


def _chosen(i: Expr, values: Sequence[Expr]) -> Expr:
    """Return values[i] for an index inside of the list."""
    if isinstance(i.constant, int):
        return values[i.constant]
    result = values[-1]
    for position in reversed(range(len(values) - 1)):
        result = where(i > position, result, values[position])
    return result


def _padded(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, pad: Sequence[Any], value: Any = 0
) -> Expr:
    """constant_pad_nd: (before, after) of the last dimension, then of the one before it."""
    dtype = wide(node.meta["val"].dtype)
    moved, inside = list(index), elements.builder.const(True, torch.bool)
    for n, before in enumerate(pad[::2]):
        dim = len(index) - 1 - n
        size = _shape(source)[dim]
        i = elements.wrapped(index[dim], _shape(node)[dim]) - elements.position(before)
        last = elements.position(size) - 1
        inside = inside.apply("and", i >= 0).apply("and", i <= last)
        moved[dim] = i.apply("maximum", 0).apply("minimum", last)
    filling = elements.scalar(value, dtype)
    return where(inside, elements.cast(elements.at(source, tuple(moved)), dtype), filling)


def _gathered(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, chosen: Sequence[fx.Node | None]
) -> Expr:
    """aten.index: index tensors broadcast; their dimensions stand where they stood if adjacent, else in front."""
    places = [d for d, c in enumerate(chosen) if c is not None]
    if any(c.meta["val"].dtype in (torch.bool, torch.uint8) for c in chosen if c is not None):
        raise Refused(node, "by a tensor of booleans, whose result has no fixed size. Use torch.where")
    width = max(c.meta["val"].ndim for c in chosen if c is not None)
    front = 0 if places[-1] - places[0] + 1 != len(places) else places[0]
    advanced, rest = index[front : front + width], iter((*index[:front], *index[front + width :]))
    full: list[Expr] = []
    for d in range(len(_shape(source))):
        if d in places:
            full.append(elements.operand(chosen[d], advanced, None))
        else:
            full.append(next(rest))
    return elements.at(source, tuple(full))


def _index_select(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, chosen: fx.Node) -> Expr:
    if not index:
        return elements.at(source, ())
    dim = dim % len(index)
    return elements.at(source, _put(index, dim, elements.at(chosen, (index[dim],) if _shape(chosen) else ())))


def _gather(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, chosen: fx.Node) -> Expr:
    i = elements.at(chosen, index)
    return elements.at(source, _put(index, dim % len(index), i) if _shape(source) else ())


def _embedding(
    elements: Elements, node: fx.Node, index: Index, table: fx.Node, rows: fx.Node, padding: Any = -1
) -> Expr:
    """A row of a table; no gradient flows to the row at `padding`."""
    row = elements.at(rows, index[:-1])
    value = elements.at(table, (row, index[-1]))
    return value if concrete(padding) == -1 else where(row.apply("eq", concrete(padding)), _detach(value), value)


def _arange(
    elements: Elements, node: fx.Node, index: Index, first: Any, end: Any = None, step: Any = 1,
    dtype: torch.dtype | None = None,
) -> Expr:  # fmt: skip
    computed = wide(node.meta["val"].dtype)
    i = elements.wrapped(index[0], _shape(node)[0]).cast(computed)
    return i * elements.scalar(step, computed) + elements.scalar(0 if end is None else first, computed)


def _contraction(elements: Elements, node: fx.Node, index: Index, x: fx.Node, y: fx.Node) -> Expr:
    """dot, mv, mm and bmm over a short dimension, unrolled."""
    count = elements.short(node, _shape(x)[-1])
    batch = index[:1] if operator_name(node) == "bmm" else ()
    left = index[: len(_shape(x)) - 1]
    right = index[len(index) - len(_shape(y)) + 1 + len(batch) :] if len(_shape(y)) > 1 + len(batch) else ()
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
        values = [elements.cast(v, computed) for v in _along(elements, node, source, dim, index)]
        totals = itertools.accumulate(values, lambda x, y: x.apply(op, y))
        return _chosen(elements.wrapped(index[dim], len(values)), list(totals))

    return compute


def _along(
    elements: Elements, node: fx.Node, source: fx.Node, dim: int, index: Index, most: int = MOST_UNROLLED
) -> list[Expr]:
    """Return the elements of `source` along a short dimension, at `index` in the others."""
    if not _shape(source):
        return [elements.at(source, ())]
    count = elements.short(node, _shape(source)[dim], most)
    return [elements.at(source, _put(index, dim, elements.position(k))) for k in range(count)]


# What stands at which place: extremes along a dimension, sorted rows, and places in a sorted table.

_MOST_SORTED = 16  # sorting compares each element with each


def _comes_first(x: Expr, y: Expr, op: str) -> Expr:
    """Tell whether x stands before y where `op` ("gt" or "lt") orders them; a NaN counts as larger than any number."""
    before = x.apply(op, y)
    if not x.dtype.is_floating_point:
        return before
    greater, smaller = (x, y) if op == "gt" else (y, x)
    return before.apply("or", greater.apply("isnan").apply("and", smaller.apply("isnan").apply("not")))


def _ordered(x: Expr) -> Expr:
    """Return a value that comparisons take: booleans as integers."""
    return x.cast(torch.int32) if x.dtype == torch.bool else x


def _extreme_along(values: list[Expr], op: str) -> tuple[Expr, Expr]:
    """Return the first extreme and its place; a NaN is the extreme of either kind."""
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
    """Return the elements that a result at `index`, which has `dim` or has lost it, is made from."""
    rank = len(_shape(source))
    dim = dim % max(rank, 1)
    full = index if keepdim or not rank else (*index[:dim], elements.position(0), *index[dim:])
    return _along(elements, node, source, dim, full, most)


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
        sizes = [concrete(n) for n in _shape(source)]
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
    """Return the n-th of the sorted values, or its place among the unsorted; equal ones stay in their order."""
    op = "gt" if descending else "lt"
    keys = [_ordered(v) for v in values]
    found = values if which == 0 else [v.builder.const(k, torch.int64) for k, v in enumerate(values)]
    result = found[-1]
    for j, key in reversed(list(enumerate(keys[:-1]))):
        rank = key.builder.const(0, torch.int64)
        for k, other in enumerate(keys):
            if k != j:  # one that stands earlier comes first unless key comes before it
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
    """The place of a value in a sorted table, halving what is left of it; the table has 1-D rows like the values."""
    shape = _shape(table)
    leading = index[: len(shape) - 1]
    value = elements.operand(values, index, None)
    dtype = wide(common_dtype([table, values]))
    value = elements.cast(value, dtype)
    after = right or side == "right"
    steps = 0
    while not shape[-1] < 2**steps:  # of a symbolic size, a guard for each power of two
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


def _split(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, sizes: Any, dim: int = 0
) -> Expr:
    dim = dim % len(index)
    start = which * concrete(sizes) if not isinstance(sizes, (list, tuple)) else sum(map(concrete, sizes[:which]))
    size = node.meta["val"][which].shape[dim]
    return elements.at(source, _put(index, dim, elements.wrapped(index[dim], size) + start))


def _unbound(elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int = 0) -> Expr:
    dim = dim % len(_shape(source))
    return elements.at(source, (*index[:dim], elements.position(which), *index[dim:]))


def _running(op: str) -> Callable[..., Expr]:
    def compute(elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int) -> Expr:
        if not index:
            return elements.at(source, ()) if which == 0 else elements.position(0)
        dim = dim % len(index)
        values = _along(elements, node, source, dim, index, _MOST_SORTED)
        found = [_latest_extreme(values[: k + 1], op)[which] for k in range(len(values))]
        return _chosen(elements.wrapped(index[dim], len(values)), found)

    return compute


def _latest_extreme(values: list[Expr], op: str) -> tuple[Expr, Expr]:
    """As _extreme_along, with the last of equal values, and of NaNs."""
    best, place = values[0], values[0].builder.const(0, torch.int64)
    for k, value in enumerate(values[1:], 1):
        x, y = _ordered(value), _ordered(best)
        kept = y.apply(op, x)
        if x.dtype.is_floating_point:
            kept = kept.apply("or", y.apply("isnan")).apply("and", x.apply("isnan").apply("not"))
        best, place = where(kept, best, value), where(kept, place, k)
    return best, place


def _variance_and_mean(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: Any = None, correction: Any = 1,
    keepdim: bool = False,
) -> Expr:  # fmt: skip
    rank, dtype = len(_shape(source)), wide(node.meta["val"][which].dtype)
    dims = [dim] if isinstance(dim, int) else list(dim) if dim else list(range(rank))
    dims = sorted(d % max(rank, 1) for d in dims)
    full = list(index)
    if not keepdim:
        for d in dims:
            full.insert(d, elements.position(0))
    sizes = [concrete(_shape(source)[d]) for d in dims]
    elements.short(node, math.prod(sizes))
    values = []
    for inner in itertools.product(*(map(elements.position, range(n)) for n in sizes)):
        at = tuple(full)
        for d, i in zip(dims, inner, strict=True):
            at = _put(at, d, i)
        values.append(elements.cast(elements.at(source, at), dtype))
    return _mean(elements, node, values, dtype) if which else _variance(elements, node, values, dtype, correction)


def _median(
    elements: Elements, node: fx.Node, index: Index, which: int, source: fx.Node, dim: int, keepdim: bool = False
) -> Expr:
    return _middle(_row_of(elements, node, source, dim, keepdim, index, _MOST_SORTED), which)


def _median_of_all(elements: Elements, node: fx.Node, index: Index, source: fx.Node) -> Expr:
    sizes = [concrete(n) for n in _shape(source)]
    elements.short(node, math.prod(sizes), _MOST_SORTED)
    places = itertools.product(*(map(elements.position, range(n)) for n in sizes))
    return _middle([elements.at(source, place) for place in places], 0)


def _middle(values: list[Expr], which: int) -> Expr:
    """Return the lower median or its place; of values of which one is NaN, that one."""
    middle = _nth(values, values[0].builder.const((len(values) - 1) // 2, torch.int64), False, which)
    if values[0].dtype.is_floating_point:
        for k, value in reversed(list(enumerate(values))):
            middle = where(value.apply("isnan"), value if which == 0 else middle.builder.const(k, torch.int64), middle)
    return middle


def _diagonal(
    elements: Elements, node: fx.Node, index: Index, source: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Expr:
    rank = len(_shape(source))
    i = elements.wrapped(index[-1], _shape(node)[-1])
    along = {dim1 % rank: i + max(-offset, 0), dim2 % rank: i + max(offset, 0)}
    rest = iter(index[:-1])
    return elements.at(source, tuple(along[d] if d in along else next(rest) for d in range(rank)))


def _unfolded(elements: Elements, node: fx.Node, index: Index, source: fx.Node, dim: int, size: int, step: int) -> Expr:
    dim = dim % len(_shape(source))
    window = elements.wrapped(index[dim], _shape(node)[dim])
    return elements.at(source, _put(index[:-1], dim, window * step + elements.wrapped(index[-1], size)))


# Operators with several results: `compute(elements, node, index, which, *arguments)`.
RESULTS: dict[str, Callable[..., Expr]] = {
    "max.dim": _extremes("gt"), "min.dim": _extremes("lt"), "aminmax": _both_extremes, "sort": _sorted,
    "sort.stable": lambda elements, node, index, which, source, stable=None, dim=-1, descending=False: _sorted(
        elements, node, index, which, source, dim, descending
    ),
    "cummax": _running("gt"), "cummin": _running("lt"), "var_mean": _variance_and_mean, "median.dim": _median,
    "topk": _top, "kthvalue": _kth, "split": _split, "split_with_sizes": _split, "unsafe_split": _split,
    "unsafe_split_with_sizes": _split, "unbind": _unbound,
}  # fmt: skip

# Operators without a row, for a reason.
_WRITES = "that writes at some places of a tensor. Write torch.where(torch.arange(n) == i, new, old)"
_LOOPS = "that takes as many steps as its values say. Compute a table before the call and index it"
_TABLE = "that no kernel can compute. Compute a table before the call and index it"
_COMPLEX = "of complex numbers, which kernels do not have. Write the real and imaginary parts"
REASONS: dict[str, str] = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_put", "index_add", "index_copy"), _WRITES),
    **dict.fromkeys(("gcd", "lcm", "polygamma", "special_zeta", "igamma", "igammac"), _LOOPS),
    **dict.fromkeys(("i0", "special_i0e", "special_i1", "special_i1e", "nextafter", "frexp", "mode"), _TABLE),
    **dict.fromkeys(("_linalg_det", "_cdist_forward", "convolution", "avg_pool2d", "logcumsumexp"), _TABLE),
    **dict.fromkeys(("complex", "view_as_real", "view_as_complex", "real", "imag", "angle", "polar"), _COMPLEX),
}  # fmt: skip

VIEWS: dict[str, Callable[..., Expr]] = {
    "alias": _same, "clone": _same, "lift_fresh_copy": _same,
    "expand": _expand, "select": _select_view, "slice": _slice, "unsqueeze": _unsqueeze, "permute": _permute,
    "transpose": _transpose, "t": _transpose, "view": _view, "_unsafe_view": _view,
    "view.dtype": _bitcast, "squeeze": _view, "flip": _flip, "roll": _roll, "cat": _cat, "stack": _stack,
    "constant_pad_nd": _padded, "index": _gathered, "_unsafe_index": _gathered,
    "index_select": _index_select, "gather": _gather, "embedding": _embedding, "arange": _arange,
    "dot": _contraction, "mv": _contraction, "mm": _contraction, "bmm": _contraction,
    "cumsum": _cumulated("add"), "cumprod": _cumulated("mul"), "diagonal": _diagonal, "unfold": _unfolded,
    "median.default": _median_of_all, "argmax": _arg_extreme("gt"), "argmin": _arg_extreme("lt"),
    "searchsorted": _searchsorted, "bucketize": _bucketize,
}  # fmt: skip


# Reductions, unrolled.


@dataclass(frozen=True)
class Over:
    """What a reduction was asked: the dimensions (None or empty: all), whether they stay with size 1, the rest."""

    dims: Any = None
    keep: bool = False
    options: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """`combine(elements, node, values, dtype, *options)` of the unrolled elements.

    `over` has the parameters of the operator after the source.
    """

    combine: Callable[..., Expr]
    over: Callable[..., Over] = lambda dim=None, keepdim=False, dtype=None: Over(dim, keepdim)
    keeps_dtype: bool = False


def _fold(name: str, start: Any = None) -> Callable[..., Expr]:
    def combine(elements: Elements, node: fx.Node, values: list[Expr], dtype: torch.dtype) -> Expr:
        if not values:
            return elements.scalar(start, dtype)
        op = _ON_BOOLEANS.get(name, name) if dtype == torch.bool else name
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
    zero = total.apply("eq", 0.0)  # torch's gradient at the zero vector is 0, that of sqrt is infinite
    return where(zero, 0.0, where(zero, 1.0, total).apply("sqrt"))


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_fold("add", 0)), "mean": Reduction(_mean), "prod": Reduction(_fold("mul", 1)),
    "sum.default": Reduction(_fold("add", 0), lambda dtype=None: Over()),
    "mean.default": Reduction(_mean, lambda dtype=None: Over()),
    "prod.default": Reduction(_fold("mul", 1), lambda dtype=None: Over()),
    "amax": Reduction(_fold("maximum")), "amin": Reduction(_fold("minimum")),
    "max": Reduction(_fold("maximum"), lambda: Over()), "min": Reduction(_fold("minimum"), lambda: Over()),
    "any": Reduction(_all_or_any("or"), keeps_dtype=True), "all": Reduction(_all_or_any("and"), keeps_dtype=True),
    "var": Reduction(_variance, lambda dim=None, correction=1, keepdim=False: Over(dim, keepdim, (correction,))),
    "linalg_vector_norm": Reduction(
        _norm, lambda order=2, dim=None, keepdim=False, dtype=None: Over(dim, keepdim, (order,))
    ),
}  # fmt: skip
