"""operators: the table of scalar operations: what each computes in torch, its Triton text, derivative and bound.

A row is everything that flexattn knows about an operation. `tests/test_operators.py` checks every row. Rules for
derivatives and bounds receive `Expr` objects and use their operators, so this module imports nothing from the package.

Triton texts use `{0}`, `{1}`... for operands, `{kind}` for int, float or double, and only what both Triton and Gluon
support. Every generated file imports `tl` and `libdevice`. A derivative rule `grad(g, out, *operands)` returns one
value (or None) per operand. A bound rule takes one (low, high) pair per operand and returns the pair of the result, or
None if it can prove nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.process.frozen_class import frozen

Rule = Callable[..., Any]


@frozen
class Op:
    """One scalar operation. The module's docstring describes the fields."""

    torch: Callable[..., Tensor]
    triton: str
    grad: Rule | None = None  # None: piecewise constant, or not differentiable (integers and booleans)
    bound: Rule | None = None
    result: str = "same"  # dtype of the result: "same" (as the operands) or "bool"
    exact_triton: str | None = None  # replaces `triton` in masks and with EXACT


def where(condition: Any, x: Any, y: Any) -> Any:
    """Append where(condition, x, y). One of x and y may be a literal."""
    expr = x if hasattr(x, "builder") else y
    return expr.builder.apply("where", condition, expr.builder.like(x, expr), expr.builder.like(y, expr))


def maximum(x: Any, y: Any) -> Any:
    return x.apply("maximum", y)


def minimum(x: Any, y: Any) -> Any:
    return x.apply("minimum", y)


# Bounds. `bound_pairs.py` defines the meaning of a pair. It also keeps integers in range, widens functions that are not
# correctly rounded, and handles operands that may be NaN, except for comparisons and `where`, whose rules handle NaN.

_INT64 = (-(2**63), 2**63 - 1)  # the result of a rule for integers that knows nothing
_INF = float("inf")


def _anything(expr: Any) -> tuple[Any, Any]:
    low, high = (-_INF, _INF) if expr.dtype.is_floating_point else _INT64
    return expr.builder.like(low, expr), expr.builder.like(high, expr)


def _rising(name: str) -> Rule:
    return lambda a: (a[0].apply(name), a[1].apply(name))


def _falling(name: str) -> Rule:
    return lambda a: (a[1].apply(name), a[0].apply(name))


def _within(low: float, high: float) -> Rule:
    """Bound a function by its range, for finite operands. An infinite operand gives NaN."""

    def rule(*pairs: Any) -> tuple[Any, Any]:
        finite = _all(*((x[0] > -_INF) for x in pairs), *((x[1] < _INF) for x in pairs))
        like = pairs[0][0].builder.like
        return where(finite, like(low, pairs[0][0]), -_INF), where(finite, like(high, pairs[0][0]), _INF)

    return rule


def _all(first: Any, *others: Any) -> Any:
    for other in others:
        first = first.apply("and", other)
    return first


def _corners(a: Any, b: Any, f: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Bound a function that is monotone in each operand by its values at the four corners of the box.

    If the second operand is a positive constant, products, quotients and shifts increase with the first.
    """
    if b[0].index == b[1].index and b[0].constant is not None and b[0].constant > 0:
        return f(a[0], b[0]), f(a[1], b[0])
    values = [f(x, y) for x in _ends(a) for y in _ends(b)]
    low = high = values[0]
    for value in values[1:]:
        low, high = minimum(low, value), maximum(high, value)
    return low, high


def _ends(a: Any) -> tuple[Any, ...]:
    return (a[0],) if a[0].index == a[1].index else a


def _bound_abs(a: Any) -> tuple[Any, Any]:
    low, high = a
    return maximum(maximum(low, -high), 0), maximum(high, -low)


def _bound_even(name: str) -> Rule:
    """Bound an even function that is increasing for positive operands."""
    return lambda a: _rising(name)(_bound_abs(a))


def _bound_compare(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Bound a comparison: `low` is true if it surely holds, `high` if it may hold.

    An operand that may be NaN is (-inf, inf). No comparison with it except "not equal" is surely true: `<` by itself,
    `<=` because infinite end points are excluded.
    """
    (al, ah), (bl, bh) = a, b
    match name:
        case "lt":
            return ah < bl, al < bh
        case "le":
            sure = ah <= bl
            return (_all(sure, ah < _INF, bl > -_INF) if al.dtype.is_floating_point else sure), al <= bh
        case "gt" | "ge":
            return _bound_compare({"gt": "lt", "ge": "le"}[name], b, a)
    same = _all(al.apply("eq", ah), bl.apply("eq", bh), al.apply("eq", bl))
    if name == "eq":
        return same, _all(al <= bh, bl <= ah)
    return (ah < bl).apply("or", bh < al), same.apply("not")


def _gradient_of_atan2(g: Any, o: Any, y: Any, x: Any) -> tuple[Any, Any]:
    """Return gradients of y and x, which are 0 where both are."""
    squares = x * x + y * y
    factor = where(squares.apply("eq", 0.0), 0.0, 1.0 / squares)
    return g * x * factor, -g * y * factor


def _bound_where(c: Any, a: Any, b: Any) -> tuple[Any, Any]:
    (sure, may), (al, ah), (bl, bh) = c, a, b
    boolean = al.dtype == torch.bool
    least = al.apply("and", bl) if boolean else minimum(al, bl)
    most = ah.apply("or", bh) if boolean else maximum(ah, bh)
    return where(sure, al, where(may, least, bl)), where(sure, ah, where(may, most, bh))


def _bound_mul(a: Any, b: Any) -> tuple[Any, Any]:
    if a[0].index == b[0].index and a[1].index == b[1].index:
        low, high = _bound_abs(a)
        return low * low, high * high
    return _corners(b, a, operator.mul) if a[0].constant is not None else _corners(a, b, operator.mul)


def _without_zero(b: Any) -> tuple[Any, Any]:
    """Return whether a divisor surely is not zero, and the divisor with end points that are safe to divide by.

    An integer divisor of -1 is excluded too, because dividing the smallest integer by it traps.
    """
    safe = (b[0] > 0).apply("or", b[1] < (0 if b[0].dtype.is_floating_point else -1))
    return safe, (where(safe, b[0], 1), where(safe, b[1], 1))


def _bound_div(a: Any, b: Any) -> tuple[Any, Any]:
    safe, divisor = _without_zero(b)
    low, high = _corners(a, divisor, operator.truediv)
    return where(safe, low, -_INF), where(safe, high, _INF)


def _bound_floordiv(a: Any, b: Any) -> tuple[Any, Any]:
    """Bound a quotient rounded down. Float bounds are widened, because torch computes it from a remainder."""
    safe, divisor = _without_zero(b)
    unknown = _anything(a[0])
    low, high = _corners(a, divisor, lambda x, y: x.apply("floordiv", y))
    if a[0].dtype.is_floating_point:
        low, high = low - low.apply("abs") * 2.0**-20 - 1.0, high + high.apply("abs") * 2.0**-20 + 1.0
    return where(safe, low, unknown[0]), where(safe, high, unknown[1])


def _bound_mod(a: Any, b: Any) -> tuple[Any, Any]:
    """Bound a remainder with the sign of the divisor: exactly within one period, otherwise by the whole period."""
    unknown = _anything(a[0])
    if a[0].dtype.is_floating_point:
        return _float_period(a, b, minimum(b[0], 0.0), maximum(b[1], 0.0))
    safe, divisor = _without_zero(b)
    quotients = [x.apply("floordiv", divisor[0]) for x in a]
    one_period = _all(b[0].apply("eq", b[1]), quotients[0].apply("eq", quotients[1]))
    low, high = minimum(divisor[0] + 1, 0), maximum(divisor[1] - 1, 0)
    low = where(one_period, a[0].apply("mod", divisor[0]), low)
    high = where(one_period, a[1].apply("mod", divisor[0]), high)
    return where(safe, low, unknown[0]), where(safe, high, unknown[1])


def _bound_fmod(a: Any, b: Any) -> tuple[Any, Any]:
    """Bound a remainder that has the sign of the dividend and is no larger than either operand."""
    most = minimum(_bound_abs(a)[1], _bound_abs(b)[1])
    low, high = where(a[0] < 0, -most, 0), where(a[1] > 0, most, 0)
    if a[0].dtype.is_floating_point:
        return _float_period(a, b, low, high)
    unknown = _anything(a[0])
    safe = _all(_without_zero(b)[0], a[0] > _INT64[0], b[0] > _INT64[0])  # abs(smallest integer) overflows
    return where(safe, low, unknown[0]), where(safe, high, unknown[1])


def _float_period(a: Any, b: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Return (low, high) if a remainder cannot be NaN: finite operands, nonzero divisor.

    The vector instructions of torch's fmod also give NaN for huge quotients.
    """
    safe = _all(_without_zero(b)[0], b[0] > -_INF, b[1] < _INF, _bound_abs(a)[1] < _bound_abs(b)[0] * 1e15)
    return where(safe, low, -_INF), where(safe, high, _INF)


def _bound_pow(x: Any, y: Any) -> tuple[Any, Any] | None:
    """Bound powers with a small constant integer exponent as repeated products."""
    power = y[0].constant
    if power != y[1].constant or power not in (1, 2, 3, 4):
        return None
    low, high = x if power % 2 else _bound_abs(x)
    ends = low, high
    for _ in range(int(power) - 1):
        low, high = low * ends[0], high * ends[1]
    return low, high


def _bound_shl(a: Any, b: Any) -> tuple[Any, Any]:
    safe = _all(b[0] >= 0, b[1] <= 31, a[0] >= -(2**31), a[1] < 2**31)  # then the result fits in int64
    count = tuple(where(safe, x, 0) for x in b)
    low, high = _corners(a, count, lambda x, y: x.apply("shl", y))
    return where(safe, low, _INT64[0]), where(safe, high, _INT64[1])


def _bound_shr(a: Any, b: Any) -> tuple[Any, Any]:
    """Bound a right shift. Counts of 32 and more are unbounded, because backends may differ."""
    safe = _all(b[0] >= 0, b[1] <= 31)
    count = tuple(where(safe, x, 0) for x in b)
    low, high = _corners(a, count, lambda x, y: x.apply("shr", y))
    return where(safe, low, _INT64[0]), where(safe, high, _INT64[1])


def _bits(a: Any) -> tuple[Any, Any]:
    """Return the bits that are set in every value between a[0] and a[1], and the bits that may be set.

    The bits above the highest one in which the end points differ are the same for all values.
    """
    if a[0].index == a[1].index:
        return a
    differ = a[0].apply("bitxor", a[1])
    for shift in (1, 2, 4, 8, 16, 32):
        differ = differ.apply("bitor", differ.apply("shr", shift))
    return a[0].apply("bitand", differ.apply("bitnot")), a[0].apply("bitor", differ)


def _from_bits(must: Any, may: Any) -> tuple[Any, Any]:
    """Return the smallest and largest number with these bits. If the sign bit may be set, the smallest has it."""
    open_sign = _all(may < 0, must >= 0)
    return where(open_sign, must.apply("bitor", _INT64[0]), must), where(open_sign, may.apply("bitand", _INT64[1]), may)


def _bound_bits(name: str) -> Rule:
    def rule(a: Any, b: Any) -> tuple[Any, Any]:
        (a_must, a_may), (b_must, b_may) = _bits(a), _bits(b)
        if name != "bitxor":
            return _from_bits(a_must.apply(name, b_must), a_may.apply(name, b_may))
        both_ways = [
            x.apply("bitand", y.apply("bitnot"))
            for x, y in ((a_must, b_may), (b_must, a_may), (a_may, b_must), (b_may, a_must))
        ]
        return _from_bits(both_ways[0].apply("bitor", both_ways[1]), both_ways[2].apply("bitor", both_ways[3]))

    return rule


def _bound_rsqrt(a: Any) -> tuple[Any, Any]:
    positive = a[0] > 0  # rsqrt(-0.0) is -inf
    low, high = _falling("rsqrt")(tuple(where(positive, x, 1) for x in a))
    return where(positive, low, -_INF), where(positive, high, _INF)


def _bound_isnan(a: Any) -> tuple[Any, Any]:
    return a[0].builder.const(False, torch.bool), _all(a[0].apply("eq", -_INF), a[1].apply("eq", _INF))


def _bound_isinf(a: Any) -> tuple[Any, Any]:
    low, high = a[0].apply("eq", -_INF), a[1].apply("eq", _INF)
    return a[0].apply("eq", _INF).apply("or", a[1].apply("eq", -_INF)), low.apply("or", high)


def _bound_copysign(a: Any, b: Any) -> tuple[Any, Any]:
    most = _bound_abs(a)[1]
    return -most, most


def _grad_pow(g: Any, out: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """d(x**y), as in torch: d/dx is 0 at y == 0, and d/dy is 0 at x == 0 for y >= 0."""
    zero_power = y.apply("eq", 0.0)
    dx = where(zero_power, 0.0, g * y * x.apply("pow", where(zero_power, 1.0, y - 1.0)))
    at_zero = x.apply("eq", 0.0).apply("and", y >= 0.0)
    dy = None if y.constant is not None else where(at_zero, 0.0, g * out * where(at_zero, 1.0, x).apply("log"))
    return dx, dy


def _half_on_ties(g: Any, x: Any, y: Any, wins: str) -> tuple[Any, Any]:
    """Split the gradient of min and max as torch does: half to each side of a tie."""
    tie = x.apply("eq", y)
    return (
        where(tie, g * 0.5, where(x.apply(wins, y), g, 0.0)),
        where(tie, g * 0.5, where(y.apply(wins, x), g, 0.0)),
    )


def digamma(x: Any) -> Any:
    """The derivative of lgamma: six steps of the recurrence, then the asymptotic series; reflection below 1/2."""
    reflected = x < 0.5
    z = where(reflected, 1.0 - x, x)
    total = z * 0.0
    for _ in range(6):
        total, z = total + 1.0 / z, z + 1.0
    w = 1.0 / (z * z)
    series = w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w * (1 / 132 - w * (691 / 32760))))))
    value = z.apply("log") - 0.5 / z - series - total
    return where(reflected, value - math.pi / (x * math.pi).apply("tan"), value)


def _unary(name: str, triton: str, grad: Rule | None, **extra: Any) -> Op:
    return Op(getattr(torch, name), triton, grad, **extra)


_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)
# tanh.approx.f32 has a relative error of at most 2^-11 (PTX ISA, tanh). The exact one is libdevice's, within 2 ulp.
_FAST_TANH = "fast_tanh({0})"

OPS: dict[str, Op] = {
    # arithmetic
    "add": Op(torch.add, "{0} + {1}", lambda g, o, x, y: (g, g), lambda a, b: (a[0] + b[0], a[1] + b[1])),
    "sub": Op(torch.sub, "{0} - {1}", lambda g, o, x, y: (g, -g), lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "mul": Op(torch.mul, "{0} * {1}", lambda g, o, x, y: (g * y, g * x), _bound_mul),
    "div": Op(torch.div, "{0} / {1}", lambda g, o, x, y: (g / y, -g * o / y), _bound_div,
        exact_triton="tl.div_rn({0}, {1})"),
    "floordiv": Op(torch.floor_divide, "floor_div_{kind}({0}, {1})", None, _bound_floordiv),
    "mod": Op(
        torch.remainder, "floor_mod_{kind}({0}, {1})", lambda g, o, x, y: (g, -g * x.apply("floordiv", y)), _bound_mod
    ),
    "fmod": Op(torch.fmod, "trunc_mod_{kind}({0}, {1})", lambda g, o, x, y: (g, -g * (x - o) / y), _bound_fmod),
    "neg": Op(torch.neg, "-{0}", lambda g, o, x: (-g,), lambda a: (-a[1], -a[0])),
    "abs": Op(
        torch.abs, "tl.abs({0})", lambda g, o, x: (where(x > 0.0, g, where(x < 0.0, -g, 0.0)),), _bound_abs
    ),
    "pow": Op(torch.pow, "libdevice.pow({0}, {1})", _grad_pow, _bound_pow),
    "maximum": Op(
        torch.maximum, "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        lambda g, o, x, y: _half_on_ties(g, x, y, "gt"), lambda a, b: (maximum(a[0], b[0]), maximum(a[1], b[1])),
    ),
    "minimum": Op(
        torch.minimum, "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        lambda g, o, x, y: _half_on_ties(g, x, y, "lt"), lambda a, b: (minimum(a[0], b[0]), minimum(a[1], b[1])),
    ),
    # comparisons
    "eq": Op(torch.eq, "{0} == {1}", None, lambda a, b: _bound_compare("eq", a, b), "bool"),
    "ne": Op(torch.ne, "{0} != {1}", None, lambda a, b: _bound_compare("ne", a, b), "bool"),
    "lt": Op(torch.lt, "{0} < {1}", None, lambda a, b: _bound_compare("lt", a, b), "bool"),
    "le": Op(torch.le, "{0} <= {1}", None, lambda a, b: _bound_compare("le", a, b), "bool"),
    "gt": Op(torch.gt, "{0} > {1}", None, lambda a, b: _bound_compare("gt", a, b), "bool"),
    "ge": Op(torch.ge, "{0} >= {1}", None, lambda a, b: _bound_compare("ge", a, b), "bool"),
    "isnan": Op(torch.isnan, "{0} != {0}", None, _bound_isnan, "bool"),
    "isinf": Op(torch.isinf, 'tl.abs({0}) == float("inf")', None, _bound_isinf, "bool"),
    # booleans
    "and": Op(
        torch.logical_and, "{0} & {1}", None,
        lambda a, b: (a[0].apply("and", b[0]), a[1].apply("and", b[1])), "bool",
    ),
    "or": Op(
        torch.logical_or, "{0} | {1}", None, lambda a, b: (a[0].apply("or", b[0]), a[1].apply("or", b[1])), "bool"
    ),
    "xor": Op(
        torch.logical_xor, "{0} ^ {1}", None,
        lambda a, b: (
            a[0].apply("and", b[1].apply("not")).apply("or", b[0].apply("and", a[1].apply("not"))),
            a[1].apply("and", b[0].apply("not")).apply("or", b[1].apply("and", a[0].apply("not"))),
        ), "bool",
    ),
    "not": Op(torch.logical_not, "~{0}", None, lambda a: (a[1].apply("not"), a[0].apply("not")), "bool"),
    "where": Op(
        torch.where, "tl.where({0}, {1}, {2})",
        lambda g, o, c, x, y: (None, where(c, g, 0.0), where(c, 0.0, g)), _bound_where,
    ),
    # integers
    "bitand": Op(torch.bitwise_and, "{0} & {1}", None, _bound_bits("bitand")),
    "bitor": Op(torch.bitwise_or, "{0} | {1}", None, _bound_bits("bitor")),
    "bitxor": Op(torch.bitwise_xor, "{0} ^ {1}", None, _bound_bits("bitxor")),
    "bitnot": Op(torch.bitwise_not, "~{0}", None, lambda a: (a[1].apply("bitnot"), a[0].apply("bitnot"))),
    "shl": Op(torch.bitwise_left_shift, "{0} << {1}", None, _bound_shl),
    "shr": Op(torch.bitwise_right_shift, "{0} >> {1}", None, _bound_shr),
    # rounding
    "floor": _unary("floor", "libdevice.floor({0})", None, bound=_rising("floor")),
    "ceil": _unary("ceil", "libdevice.ceil({0})", None, bound=_rising("ceil")),
    "trunc": _unary("trunc", "libdevice.trunc({0})", None, bound=_rising("trunc")),
    "round": _unary("round", "libdevice.nearbyint({0})", None, bound=_rising("round")),
    # exponentials and logarithms
    "exp": _unary(
        "exp", "tl.exp({0})", lambda g, o, x: (g * o,), bound=_rising("exp"), exact_triton="libdevice.exp({0})"
    ),
    "exp2": _unary("exp2", "tl.exp2({0})", lambda g, o, x: (g * o * math.log(2.0),), bound=_rising("exp2")),
    "expm1": _unary("expm1", "libdevice.expm1({0})", lambda g, o, x: (g * (o + 1.0),), bound=_rising("expm1")),
    "log": _unary("log", "tl.log({0})", lambda g, o, x: (g / x,), bound=_rising("log")),
    "log2": _unary("log2", "tl.log2({0})", lambda g, o, x: (g / (x * math.log(2.0)),), bound=_rising("log2")),
    "log10": _unary(
        "log10", "libdevice.log10({0})", lambda g, o, x: (g / (x * math.log(10.0)),), bound=_rising("log10")
    ),
    "log1p": _unary("log1p", "libdevice.log1p({0})", lambda g, o, x: (g / (x + 1.0),), bound=_rising("log1p")),
    "sqrt": _unary(
        "sqrt", "tl.sqrt({0})", lambda g, o, x: (g * 0.5 / o,), bound=_rising("sqrt"), exact_triton="tl.sqrt_rn({0})"
    ),
    "rsqrt": _unary("rsqrt", "tl.rsqrt({0})", lambda g, o, x: (g * -0.5 * o * o * o,), bound=_bound_rsqrt),
    # trigonometry
    "sin": _unary("sin", "tl.sin({0})", lambda g, o, x: (g * x.apply("cos"),), bound=_within(-1.0, 1.0)),
    "cos": _unary("cos", "tl.cos({0})", lambda g, o, x: (-g * x.apply("sin"),), bound=_within(-1.0, 1.0)),
    "tan": _unary("tan", "libdevice.tan({0})", lambda g, o, x: (g * (o * o + 1.0),)),
    "asin": _unary(
        "asin", "libdevice.asin({0})", lambda g, o, x: (g * (1.0 - x * x).apply("rsqrt"),),
        bound=_rising("asin"),
    ),
    "acos": _unary(
        "acos", "libdevice.acos({0})", lambda g, o, x: (-g * (1.0 - x * x).apply("rsqrt"),),
        bound=_falling("acos"),
    ),
    "atan": _unary("atan", "libdevice.atan({0})", lambda g, o, x: (g / (x * x + 1.0),), bound=_rising("atan")),
    "atan2": Op(
        torch.atan2, "libdevice.atan2({0}, {1})",
        _gradient_of_atan2, bound=_within(-math.pi, math.pi),
    ),
    "sinh": _unary("sinh", "libdevice.sinh({0})", lambda g, o, x: (g * x.apply("cosh"),), bound=_rising("sinh")),
    "cosh": _unary("cosh", "libdevice.cosh({0})", lambda g, o, x: (g * x.apply("sinh"),), bound=_bound_even("cosh")),
    "tanh": _unary(
        "tanh", _FAST_TANH, lambda g, o, x: (g * (1.0 - o * o),), bound=_rising("tanh"),
        exact_triton="libdevice.tanh({0})",
    ),
    "asinh": _unary(
        "asinh", "libdevice.asinh({0})", lambda g, o, x: (g * (x * x + 1.0).apply("rsqrt"),), bound=_rising("asinh")
    ),
    "acosh": _unary(
        "acosh", "libdevice.acosh({0})", lambda g, o, x: (g * (x * x - 1.0).apply("rsqrt"),),
        bound=_rising("acosh"),
    ),
    "atanh": _unary("atanh", "libdevice.atanh({0})", lambda g, o, x: (g / (1.0 - x * x),), bound=_rising("atanh")),
    # others
    "detach": Op(Tensor.detach, "{0}", lambda g, o, x: (None,), lambda a: a),
    "sigmoid": _unary(
        "sigmoid", "(1.0 / (1.0 + tl.exp(-{0})))", lambda g, o, x: (g * o * (1.0 - o),), bound=_rising("sigmoid"),
        exact_triton="tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
    ),
    "erf": _unary(
        "erf", "tl.erf({0})", lambda g, o, x: (g * _TWO_OVER_SQRT_PI * (-x * x).apply("exp"),), bound=_rising("erf")
    ),
    "erfc": _unary(
        "erfc", "libdevice.erfc({0})", lambda g, o, x: (g * -_TWO_OVER_SQRT_PI * (-x * x).apply("exp"),),
        bound=_falling("erfc"),
    ),
    "erfcx": Op(
        torch.special.erfcx, "libdevice.erfcx({0})", lambda g, o, x: (g * (2.0 * x * o - _TWO_OVER_SQRT_PI),),
        bound=_falling("erfcx"),
    ),
    "erfinv": _unary(
        "erfinv", "libdevice.erfinv({0})", lambda g, o, x: (g / _TWO_OVER_SQRT_PI * (o * o).apply("exp"),),
        bound=_rising("erfinv"),
    ),
    "lgamma": _unary("lgamma", "libdevice.lgamma({0})", lambda g, o, x: (g * digamma(x),)),
    "copysign": Op(
        torch.copysign, "libdevice.copysign({0}, {1})",
        lambda g, o, x, y: (where(x.apply("eq", 0.0), 0.0, g * o / where(x.apply("eq", 0.0), 1.0, x)), None),
        bound=_bound_copysign,
    ),
}  # fmt: skip


def identity_of(op: str, args: tuple[Any, ...]) -> Any:
    """Return what `op(*args)` simplifies to (an operand or a Python constant), or None.

    The rules hold for every value. For example, x * 0 is not simplified for floats, because inf * 0 is not 0.
    """
    values = [a.constant for a in args]
    match op:
        case "add":
            if values[1] == 0:
                return args[0]
            if values[0] == 0:
                return args[1]
        case "sub" | "shl" | "shr" if values[1] == 0:
            return args[0]
        case "mul":
            if values[1] == 1:
                return args[0]
            if values[0] == 1:
                return args[1]
            if not args[0].dtype.is_floating_point and 0 in (values[0], values[1]):
                return 0
        case "div" if values[1] == 1:
            return args[0]
        case "and":
            for value, other in ((values[0], args[1]), (values[1], args[0])):
                if value is not None:
                    return other if value else False
        case "or":
            for value, other in ((values[0], args[1]), (values[1], args[0])):
                if value is not None:
                    return True if value else other
        case "where":
            if values[0] is not None:
                return args[1] if values[0] else args[2]
            if args[1].index == args[2].index:
                return args[1]
        case "neg" if args[0].node.op == "neg":
            return type(args[0])(args[0].builder, args[0].node.args[0])
        case "not" if args[0].node.op == "not":
            return type(args[0])(args[0].builder, args[0].node.args[0])
    return None
