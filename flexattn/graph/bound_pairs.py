"""bound_pairs: a pair (low, high) of expressions that bounds each node of a graph, by the rules of OPS.

The meaning of a pair (low, high):

- Integers are int64, whatever the dtype of the node. A pair that leaves the range of the node's dtype, where the mod
  would wrap around, becomes that whole range, so every pair lies inside the range of its dtype.
- Floats have the dtype of the node. (-inf, inf) means any value including NaN; every other pair excludes NaN. Sums,
  products, quotients, roundings and casts are correctly rounded in both torch and numpy, hence monotone. Their end
  points, computed in the same dtype by the same operation, contain every value without widening. Other functions are
  widened by more than the error of any supported device.
- Booleans are (surely true, maybe true).

`interval_bounds.py` writes the pairs for boxes of the inputs as a graph. `ranges.py` folds the pairs for all calls
to constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation, RangeLoad, Scalar
from flexattn.graph.operators import OPS

Pair = tuple[Expr, Expr]

_INF = float("inf")
_BOOLEAN_OPS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "where", "isnan", "isinf"}
# The rules of these operations handle NaN operands.
_NAN_AWARE = {"eq", "ne", "lt", "le", "gt", "ge", "where", "isnan", "isinf"}
# Correctly rounded or exact in both torch and numpy. At a point, their value is the bound. torch's sqrt is not.
_EXACT = {
    "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "floor", "ceil", "trunc", "round",
    "floordiv", "mod", "fmod", "bitand", "bitor", "bitxor", "bitnot", "shl", "shr",
}  # fmt: skip
# These operations may overflow int64. They are also computed in float64 to detect that.
_MAY_LEAVE_INT64 = {"add", "sub", "mul", "neg", "abs", "pow", "floordiv"}


def bound_nodes(
    graph: ModGraph,
    builder: Builder,
    leaf: Callable[[Input | NumberRef], Pair],
    load: Callable[[Load, list[Pair]], Pair],
    safe: tuple[bool, ...] | None,
) -> tuple[list[Pair], tuple[bool, ...]]:
    """Bound each node. Also return for which nodes the pair needs no check. `safe` nodes are not checked."""
    pairs: list[Pair] = []
    proved: list[bool] = []
    for i, node in enumerate(graph.nodes):
        args = [pairs[a] for a in node.args]
        checked = False
        match node:
            case Const(value):
                end = builder.const(value, language_of(node.dtype))
                pair = unknown_pair(builder, node.dtype) if value != value else (end, end)
            case Input() | NumberRef():
                pair = leaf(node)
            case Load():
                pair = load(node, args)
            case Operation("cast"):
                source = graph.nodes[node.args[0]].dtype
                pair = cast_pair(args[0], source, node.dtype)
                checked = _fits(args[0], node.dtype)
            case Operation():
                dtypes = [graph.nodes[a].dtype for a in node.args]
                pair, checked = _bound_operation(node, args, dtypes, safe is not None and safe[i])
            case RangeLoad():
                raise TypeError(f"{node}: a bounding graph cannot be bounded")
        pairs.append(pair)
        proved.append(checked)
    return pairs, tuple(proved)


def _bound_operation(node: Operation, args: list[Pair], dtypes: list[torch.dtype], safe: bool) -> tuple[Pair, bool]:
    builder = args[0][0].builder
    spec = OPS[node.op]
    unknown = unknown_pair(builder, node.dtype)
    if node.op not in _NAN_AWARE and any(map(_may_be_nan, args)):
        return unknown, False  # the rest would give the same, with more operations
    pair = spec.bound(*args) if spec.bound and (node.dtype != torch.bool or node.op in _BOOLEAN_OPS) else None
    if pair is None:
        return _at_points(node, args, dtypes, unknown), False
    if node.dtype == torch.bool:
        return pair, True
    if node.dtype.is_floating_point:
        if node.op not in _EXACT:
            pair = _widen(pair)
        if node.dtype in (torch.float16, torch.bfloat16):
            pair = cast_pair(pair, torch.float32, node.dtype)
        ok = pair[0] <= pair[1]
        if node.op not in _NAN_AWARE:
            for operand in args:
                ok = _both(ok, _known(operand))
    else:
        ok = _in_range(node, pair, args)
    if safe:
        return pair, True
    if ok.constant is True:
        # With infinite end points, a smaller box may compute inf - inf.
        return pair, not node.dtype.is_floating_point or all(math.isfinite(constant_of(e)) for e in pair)
    return (_where(ok, pair[0], unknown[0]), _where(ok, pair[1], unknown[1])), False


def _in_range(node: Operation, pair: Pair, args: list[Pair]) -> Expr:
    """Return whether the mod computes within the pair, without wrap-around in the node's dtype or in our int64."""
    limits = torch.iinfo(node.dtype)
    ok = _both(pair[0] >= limits.min, pair[1] <= limits.max)
    if node.op in _MAY_LEAVE_INT64 and (node.dtype == torch.int64 or node.op == "pow"):
        low, high = _rule(node.op)(*(tuple(e.cast(torch.float64) for e in a) for a in args))
        ok = _both(ok, _both(low >= -(2.0**62), high <= 2.0**62))
    return ok


def _rule(op: str) -> Callable[..., Pair]:
    rule = OPS[op].bound
    assert rule is not None
    return rule


def _at_points(node: Operation, args: list[Pair], dtypes: list[torch.dtype], unknown: Pair) -> Pair:
    """Bound an operation without a rule: by its value if all operands are single values, otherwise by `unknown`."""
    if node.op not in _EXACT or node.dtype in (torch.float16, torch.bfloat16):
        return unknown
    point = args[0][0].apply("eq", args[0][1])
    for low, high in args[1:]:
        point = _both(point, low.apply("eq", high))
    operands = [a[0].cast(dtype) for a, dtype in zip(args, dtypes, strict=True)]
    if node.op in ("floordiv", "mod", "fmod"):
        operands[1] = _where(operands[1].apply("ne", 0), operands[1], operands[1].builder.like(1, operands[1]))
        point = _both(point, args[1][0].apply("ne", 0))
    value = operands[0].apply(node.op, *operands[1:]).cast(language_of(node.dtype))
    if node.dtype.is_floating_point:
        point = _both(point, value.apply("eq", value))
    return _where(point, value, unknown[0]), _where(point, value, unknown[1])


def cast_pair(pair: Pair, source: torch.dtype, target: torch.dtype) -> Pair:
    low, high = pair
    builder = low.builder
    unknown = unknown_pair(builder, target)
    if source == target:
        return pair
    if target == torch.bool:
        zero = builder.const(0, low.dtype)
        return _rule("ne")(pair, (zero, zero))
    language = language_of(target)
    if target.is_floating_point:
        low, high = low.cast(language), high.cast(language)
        if target in (torch.float16, torch.bfloat16):
            low, high = low.cast(target).cast(language), high.cast(target).cast(language)
        return low, high
    if source == torch.bool:
        return low.cast(language), high.cast(language)
    limits = torch.iinfo(target)
    if source.is_floating_point:
        ok = _both(low >= float(limits.min), high < float(limits.max + 1))
        low, high = (_where(ok, e, builder.const(0, e.dtype)).cast(language) for e in pair)
    else:
        inner = torch.iinfo(source)
        if limits.min <= inner.min and inner.max <= limits.max:
            return pair
        ok = _both(low >= limits.min, high <= limits.max)
    return _where(ok, low, unknown[0]), _where(ok, high, unknown[1])


def _fits(pair: Pair, dtype: torch.dtype) -> bool:
    """Return whether a pair of integer constants is within the range of an integer dtype."""
    low, high = pair[0].constant, pair[1].constant
    if not (type(low) is int and type(high) is int) or dtype.is_floating_point or dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def language_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which bounds of `dtype` values are computed."""
    if dtype == torch.bool or dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def unknown_pair(builder: Builder, dtype: torch.dtype) -> Pair:
    """Return the pair that contains all values of the dtype."""
    if dtype == torch.bool:
        low, high = False, True
    elif dtype.is_floating_point:
        low, high = -_INF, _INF
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    language = language_of(dtype)
    return builder.const(low, language), builder.const(high, language)


def _may_be_nan(pair: Pair) -> bool:
    """Return whether a float pair is the constant (-inf, inf)."""
    return pair[0].constant == -_INF and pair[1].constant == _INF


def _known(pair: Pair) -> Expr:
    """Return whether a pair excludes NaN. Booleans and integers always do."""
    if not pair[0].dtype.is_floating_point:
        return pair[0].builder.const(True, torch.bool)
    return (pair[0] > -_INF).apply("or", pair[1] < _INF)


def without_nan(low: Expr, high: Expr) -> Pair:
    ok = low <= high
    return _where(ok, low, low.builder.like(-_INF, low)), _where(ok, high, low.builder.like(_INF, high))


def _widen(pair: Pair) -> Pair:
    """Widen a pair by more than the error of any implementation (tanh.approx.f32: 2^-11 relative).

    An end point that overflows to infinity here may stay finite on another device.
    """
    relative, tiny = (2.0**-10, 2.0**-120) if pair[0].dtype == torch.float32 else (2.0**-40, 2.0**-1000)
    largest = torch.finfo(pair[0].dtype).max * (1 - relative)
    low, high = pair
    low = (low * (1 - relative)).apply("minimum", low * (1 + relative)).apply("minimum", largest)
    high = (high * (1 - relative)).apply("maximum", high * (1 + relative)).apply("maximum", -largest)
    return low - tiny, high + tiny


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    return condition.apply("where", x, y)


def _both(x: Expr, y: Expr) -> Expr:
    return x.apply("and", y)


def constant_of(end: Expr) -> Scalar:
    assert end.constant is not None
    return end.constant
