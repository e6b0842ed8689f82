"""elementwise: the tables of elementwise operators and of operators that fill a tensor with one value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexattn.graph.builder import Expr
from flexattn.graph.operators import digamma, where
from flexattn.trace.elements import ON_BOOLEANS, Elements, Row, truth


def _unary(name: str) -> Row:
    return Row(lambda x: x.apply(name))


def _rounding(name: str) -> Row:
    return Row(lambda x: x.apply(name) if x.dtype.is_floating_point else x)


def _round_decimals(x: Expr, decimals: Expr | None = None) -> Expr:
    """round(x, decimals=n) as in torch: scale by a power of ten, round, scale back."""
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
    if x.dtype == torch.uint8:  # Triton's interpreter does not support ~ for it
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
    """x ** y: small integer powers are products, 2 ** y is exp2, everything else is pow."""
    exponent = y.constant
    x = elements.cast(x, dtype)
    if isinstance(exponent, (int, float)) and math.isfinite(exponent):
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
    """Convert as written by the user: a half dtype rounds, although the value is then held in float32."""
    return x if to is None else elements.cast(elements.cast(x, to), dtype)


def _clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """clamp with torch's gradient at the ends. Integers have no gradient, and min and max have tighter bounds."""
    if not x.dtype.is_floating_point:
        x = x if low is None else x.apply("maximum", low)
        return x if high is None else x.apply("minimum", high)
    if low is not None:
        # Where both bounds are equal, a score below them has no gradient.
        bound = low if high is None else where(low < high, low, _detach(low))
        x = where((x < low).apply("or", low.apply("isnan")), bound, x)
    if high is not None:
        x = where((x > high).apply("or", high.apply("isnan")), high, x)
    return x


def _extreme(name: str) -> Row:
    on_bool = ON_BOOLEANS[name]
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


def _sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x), with value 1 and gradient 0 at 0."""
    at_zero = x.apply("eq", 0.0)
    angle = where(at_zero, 1.0, x) * math.pi
    return where(at_zero, 1.0, angle.apply("sin") / angle)


def _extreme_but_nan(name: str, wins: str) -> Row:
    """fmax and fmin: NaN only if both are. Of equal operands, the first has the gradient."""

    def compute(x: Expr, y: Expr) -> Expr:
        if not x.dtype.is_floating_point:
            return _extreme(name).compute(x, y)
        return where(x.apply(wins, y).apply("or", y.apply("isnan")), x, y)

    return Row(compute)


def _times_log(function: str, pole: float) -> Row:
    """x * log(y): 0 where x is, also at the pole of the logarithm."""

    def compute(x: Expr, y: Expr) -> Expr:
        is_limit = x.apply("eq", 0.0).apply("and", (y <= pole).apply("or", y.apply("eq", math.inf)))
        return where(is_limit, 0.0, x * where(is_limit, 1.0, y).apply(function))

    return Row(compute)


def _hardtanh(x: Expr, low: Any = -1.0, high: Any = 1.0) -> Expr:
    return where(x <= low, low, where(x >= high, high, x))


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
    "sinc": Row(_sinc),
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"),
    "fmax": _extreme_but_nan("maximum", "ge"), "fmin": _extreme_but_nan("minimum", "le"),
    "clamp": Row(_clamp), "clamp_min": Row(_clamp), "clamp_max": Row(lambda x, high: _clamp(x, None, high)),
    "relu": Row(lambda x: where(x <= 0, 0, x)), "hardtanh": Row(_hardtanh),
    "hardsigmoid": Row(lambda x: _hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    "hardswish": Row(lambda x: where(x <= -3, 0, where(x >= 3, x, x * (x + 3.0) / 6.0))),
    "xlogy": _times_log("log", 0.0), "special_xlog1py": _times_log("log1p", -1.0),
    "nan_to_num": Row(_nan_to_num, "own"),
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
# Operators that create a tensor filled with one value: the value.
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
