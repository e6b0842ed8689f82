"""bound: a graph over (b, h, q_idx, kv_idx) to a graph of lower and upper values over boxes of them, one-sided.

The bounding graph reads `b_lo, b_hi, h_lo, h_hi, q_lo, q_hi, kv_lo, kv_hi` (inclusive) and returns (low, high) of each
output. Of a mask, `low` is "surely true everywhere in the box" (FULL), `not high` "surely false everywhere" (EMPTY).

What a pair (low, high) means:

- Integers are int64, whatever the dtype of the node. A pair that leaves the range of the node's dtype, where the mod
  would wrap around, becomes that whole range, so every pair lies inside the range of its dtype.
- Floats have the dtype of the node. (-inf, inf) says "anything, NaN too"; every other pair says "not NaN". Sums,
  products, quotients, roundings and casts are correctly rounded in torch and numpy alike, hence monotone, so end points
  that are computed in the same dtype by the same operation contain every value without widening.
  Other functions are widened by more than any of our devices err.
- Booleans are (surely, maybe).

A load becomes `range_min` and `range_max` nodes, whose operands are (low, high) of each index; the evaluator gives the
least and the greatest element, or the whole range of the dtype where it does not know (see `RangeTable`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation, RangeLoad, Scalar
from flexattn.graph.operators import OPS

Pair = tuple[Expr, Expr]
Values = Any  # a numpy array or scalar

# No axis is longer: q_idx + a small constant, or 2 * q_idx, then cannot leave int32.
INDEX_LIMIT = 2**30

BOX_INPUTS = ("b_lo", "b_hi", "h_lo", "h_hi", "q_lo", "q_hi", "kv_lo", "kv_hi")
EMPTY, FULL, UNKNOWN, PARTIAL = range(4)

_ENDS = {"b": ("b_lo", "b_hi"), "h": ("h_lo", "h_hi"), "q_idx": ("q_lo", "q_hi"), "kv_idx": ("kv_lo", "kv_hi")}
_INF = float("inf")
_BOOLEAN_OPS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "where", "isnan", "isinf"}
# These say themselves what becomes of a NaN.
_NAN_AWARE = {"eq", "ne", "lt", "le", "gt", "ge", "where", "isnan", "isinf"}
# Correctly rounded, or exact, in torch and numpy alike: at a point their value is the bound. (torch's sqrt is not.)
_EXACT = {
    "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "floor", "ceil", "trunc", "round",
    "floordiv", "mod", "fmod", "bitand", "bitor", "bitxor", "bitnot", "shl", "shr",
}  # fmt: skip
# An int64 operation that may leave int64 is computed again in float64, to see whether it does.
_MAY_LEAVE_INT64 = {"add", "sub", "mul", "neg", "abs", "pow", "floordiv"}


@lru_cache(256)
def bound(graph: ModGraph) -> ModGraph:
    """Return the graph of (low, high) of each output of `graph` over a box of its inputs."""
    safe = _static(graph)[1]
    builder = Builder()

    def leaf(node: Input | NumberRef) -> Pair:
        if isinstance(node, NumberRef):
            value = builder.number(node.position, node.dtype)
            return _without_nan(value, value) if node.dtype.is_floating_point else (value, value)
        if node.name in _ENDS:
            low, high = _ENDS[node.name]
            return builder.input(low, torch.int64), builder.input(high, torch.int64)
        return _unknown(builder, node.dtype)

    def load(node: Load, index: list[Pair]) -> Pair:
        language = _language(node.dtype)
        ends = tuple(e.index for pair in index for e in pair)
        if not index:
            value = builder.load(node.capture, language, ())
            return _without_nan(value, value) if language.is_floating_point else (value, value)
        low = builder.add(RangeLoad("range_min", node.capture, ends, language))
        high = builder.add(RangeLoad("range_max", node.capture, ends, language))
        return _without_nan(low, high) if language.is_floating_point else (low, high)

    pairs, _ = _bound_nodes(graph, builder, leaf, load, safe)
    outputs = [e for o in graph.outputs for e in ((None, None) if o is None else pairs[o])]
    return builder.build(
        f"bound_{graph.name}", BOX_INPUTS, graph.captures, graph.numbers, outputs, location=graph.location
    )


def nonnegative(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it is a number that is never negative, given b, h, q_idx, kv_idx in [0, INDEX_LIMIT)."""
    return tuple(
        node.dtype != torch.bool and low >= 0 for node, (low, _) in zip(graph.nodes, ranges(graph), strict=True)
    )


def ranges(graph: ModGraph, bits: tuple[int, ...] = ()) -> tuple[tuple[Any, Any], ...]:
    """For each node, (low, high) over all b, h, q_idx, kv_idx in [0, INDEX_LIMIT), captured tensors and numbers.

    Where `bits` is given, integer n of the captured numbers lies in [-2**bits[n], 2**bits[n]].
    """
    return _static(graph, bits)[0]


def never_wraps(graph: ModGraph) -> tuple[bool, ...]:
    """For each node, whether it surely is what exact integer arithmetic gives, for the same inputs as `ranges`."""
    return _static(graph)[1]


@lru_cache(256)
def _static(graph: ModGraph, bits: tuple[int, ...] = ()) -> tuple[tuple[tuple[Any, Any], ...], tuple[bool, ...]]:
    """Bound every node with constants for inputs: the rules fold away. Also tell which nodes need no check."""
    builder = Builder()

    def leaf(node: Input | NumberRef) -> Pair:
        match node:
            case Input(name) if name in _ENDS:
                return builder.const(0, torch.int64), builder.const(INDEX_LIMIT - 1, torch.int64)
            case NumberRef(position) if bits and node.dtype == torch.int64 and bits[position] < 63:
                most = 1 << bits[position]
                return builder.const(-most, torch.int64), builder.const(most, torch.int64)
        return _unknown(builder, node.dtype)

    def load(node: Load, index: list[Pair]) -> Pair:
        capture = graph.captures[node.capture].dtype
        return _cast(_unknown(builder, capture), capture, node.dtype)

    pairs, safe = _bound_nodes(graph, builder, leaf, load, None)
    return tuple((_constant(low), _constant(high)) for low, high in pairs), safe


def _constant(end: Expr) -> Scalar:
    assert end.constant is not None
    return end.constant


def _bound_nodes(
    graph: ModGraph,
    builder: Builder,
    leaf: Callable[[Input | NumberRef], Pair],
    load: Callable[[Load, list[Pair]], Pair],
    safe: tuple[bool, ...] | None,
) -> tuple[list[Pair], tuple[bool, ...]]:
    """Bound each node; where `safe` says so without the check that its pair still is one."""
    pairs: list[Pair] = []
    proved: list[bool] = []
    for i, node in enumerate(graph.nodes):
        args = [pairs[a] for a in node.args]
        checked = False
        match node:
            case Const(value):
                end = builder.const(value, _language(node.dtype))
                pair = _unknown(builder, node.dtype) if value != value else (end, end)
            case Input() | NumberRef():
                pair = leaf(node)
            case Load():
                pair = load(node, args)
            case Operation("cast"):
                source = graph.nodes[node.args[0]].dtype
                pair = _cast(args[0], source, node.dtype)
                checked = _fits(args[0], node.dtype)
            case Operation():
                dtypes = [graph.nodes[a].dtype for a in node.args]
                pair, checked = _bound_operation(node, args, dtypes, safe is not None and safe[i])
            case RangeLoad():
                raise TypeError(f"{node}: a bounding graph has no bounds of its own")
        pairs.append(pair)
        proved.append(checked)
    return pairs, tuple(proved)


def _bound_operation(node: Operation, args: list[Pair], dtypes: list[torch.dtype], safe: bool) -> tuple[Pair, bool]:
    builder = args[0][0].builder
    spec = OPS[node.op]
    unknown = _unknown(builder, node.dtype)
    if node.op not in _NAN_AWARE and any(map(_may_be_nan, args)):
        return unknown, False  # as what follows would find, with many operations
    pair = spec.bound(*args) if spec.bound and (node.dtype != torch.bool or node.op in _BOOLEAN_OPS) else None
    if pair is None:
        return _at_points(node, args, dtypes, unknown), False
    if node.dtype == torch.bool:
        return pair, True
    if node.dtype.is_floating_point:
        if node.op not in _EXACT:
            pair = _widen(pair)
        if node.dtype in (torch.float16, torch.bfloat16):
            pair = _cast(pair, torch.float32, node.dtype)
        ok = pair[0] <= pair[1]
        if node.op not in _NAN_AWARE:
            for operand in args:
                ok = _both(ok, _known(operand))
    else:
        ok = _in_range(node, pair, args)
    if safe:
        return pair, True
    if ok.constant is True:
        # From infinite end points a smaller box can come to inf - inf.
        return pair, not node.dtype.is_floating_point or all(math.isfinite(_constant(e)) for e in pair)
    return (_where(ok, pair[0], unknown[0]), _where(ok, pair[1], unknown[1])), False


def _in_range(node: Operation, pair: Pair, args: list[Pair]) -> Expr:
    """Tell whether the pair is what the mod computes, without wrap-around in the node's dtype or in our int64."""
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
    """Bound an operation that has no rule: by its value where all operands are single values, else not at all."""
    if node.op not in _EXACT or node.dtype in (torch.float16, torch.bfloat16):
        return unknown
    point = args[0][0].apply("eq", args[0][1])
    for low, high in args[1:]:
        point = _both(point, low.apply("eq", high))
    operands = [a[0].cast(dtype) for a, dtype in zip(args, dtypes, strict=True)]
    if node.op in ("floordiv", "mod", "fmod"):
        operands[1] = _where(operands[1].apply("ne", 0), operands[1], operands[1].builder.like(1, operands[1]))
        point = _both(point, args[1][0].apply("ne", 0))
    value = operands[0].apply(node.op, *operands[1:]).cast(_language(node.dtype))
    if node.dtype.is_floating_point:
        point = _both(point, value.apply("eq", value))
    return _where(point, value, unknown[0]), _where(point, value, unknown[1])


def _cast(pair: Pair, source: torch.dtype, target: torch.dtype) -> Pair:
    low, high = pair
    builder = low.builder
    unknown = _unknown(builder, target)
    if source == target:
        return pair
    if target == torch.bool:
        zero = builder.const(0, low.dtype)
        return _rule("ne")(pair, (zero, zero))
    language = _language(target)
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
    """Tell whether a pair of integer constants lies inside of an integer dtype."""
    low, high = pair[0].constant, pair[1].constant
    if not (type(low) is int and type(high) is int) or dtype.is_floating_point or dtype == torch.bool:
        return False
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def _language(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are bounded."""
    if dtype == torch.bool or dtype in (torch.float32, torch.float64):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _unknown(builder: Builder, dtype: torch.dtype) -> Pair:
    """Return the pair that says nothing: a bool that may be either, any number of the dtype."""
    if dtype == torch.bool:
        low, high = False, True
    elif dtype.is_floating_point:
        low, high = -_INF, _INF
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    language = _language(dtype)
    return builder.const(low, language), builder.const(high, language)


def _may_be_nan(pair: Pair) -> bool:
    """Tell whether nothing at all is known of a float before the graph runs."""
    return pair[0].constant == -_INF and pair[1].constant == _INF


def _known(pair: Pair) -> Expr:
    """Tell whether a pair of floats excludes NaN; booleans and integers always do."""
    if not pair[0].dtype.is_floating_point:
        return pair[0].builder.const(True, torch.bool)
    return (pair[0] > -_INF).apply("or", pair[1] < _INF)


def _without_nan(low: Expr, high: Expr) -> Pair:
    ok = low <= high
    return _where(ok, low, low.builder.like(-_INF, low)), _where(ok, high, low.builder.like(_INF, high))


def _widen(pair: Pair) -> Pair:
    """Move the end points apart by more than the error of any implementation (tanh.approx.f32: 2^-11 relative).

    One that overflows to infinity here may stay just below elsewhere.
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


# The numpy evaluator.

_NUMPY: dict[str, Callable[..., Values]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "neg": np.negative, "abs": np.abs, "maximum": np.maximum, "minimum": np.minimum,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not, "where": np.where,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor, "bitnot": np.bitwise_not,
    "shl": np.left_shift, "shr": np.right_shift, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "round": np.rint, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "tanh": np.tanh,
}  # fmt: skip
_DTYPES = {
    torch.bool: np.bool_, torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.int8: np.int8,
    torch.uint8: np.uint8, torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64,
}  # fmt: skip
DTYPES = frozenset(_DTYPES) | {torch.bfloat16}  # what nodes and captures may have
_FULL_RESOLUTION = 2**14  # smaller arrays have tables of their elements, larger ones of granules
_LARGEST_TABLE = 2**22  # granules; a table of this many takes half a gigabyte


@dataclass(frozen=True)
class Bounds:
    """A bounding graph with the values of this call, evaluated by numpy over many boxes at once."""

    graph: ModGraph
    captures: tuple[Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
    granule: int = 128  # boxes mostly begin and end at multiples of this
    _arrays: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    _tables: dict[tuple[int, int], RangeTable] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, *ends: Values) -> tuple[Values, ...]:
        """Evaluate on the eight ends of boxes (int64 arrays or scalars that broadcast) in the order of BOX_INPUTS."""
        inputs: dict[str, Values] = dict(zip(BOX_INPUTS, ends, strict=True))
        values: list[Values] = []
        last = _last_uses(self.graph)
        found: dict[tuple[int, tuple[int, ...]], tuple[Values, Values]] = {}
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                args = [values[a] for a in node.args]
                match node:
                    case Input(name):
                        value = inputs[name]
                    case NumberRef(position):
                        value = _DTYPES[node.dtype](self.numbers[position])
                    case Const(constant):
                        value = _DTYPES[node.dtype](constant)
                    case Load(capture):
                        value = self._array(capture)[()].astype(_DTYPES[node.dtype])
                    case RangeLoad(op, capture):
                        key = (capture, node.args)
                        if key not in found:
                            found[key] = self._range(node, args)
                        value = found[key][op == "range_max"]
                    case Operation("cast"):
                        value = _cast_numpy(args[0], node.dtype)
                    case Operation(op):
                        value = _NUMPY[op](*args) if op in _NUMPY else _by_torch(op, args)
                values.append(value)
                for a in last[len(values) - 1]:
                    values[a] = None
        return tuple(values[o] for o in self.graph.outputs if o is not None)

    def classify(self, *ends: Values) -> np.ndarray:
        """Return EMPTY, FULL or UNKNOWN of a mask for each box given by its ends, uint8."""
        sure, maybe = self(*ends)
        classes = np.where(sure, FULL, np.where(maybe, UNKNOWN, EMPTY)).astype(np.uint8)
        return np.broadcast_to(classes, np.broadcast_shapes(*(np.shape(e) for e in ends)))

    def _array(self, capture: int) -> np.ndarray:
        if capture not in self._arrays:
            tensor = self.captures[capture].detach()
            tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            self._arrays[capture] = tensor.cpu().numpy()
        return self._arrays[capture]

    def _range(self, node: RangeLoad, ends: list[Values]) -> tuple[Values, Values]:
        """Return the least and greatest element of a capture over a box of indices, which may differ in one axis."""
        array = self._array(node.capture)
        index = [_wrap(low, high, size) for low, high, size in zip(ends[::2], ends[1::2], array.shape, strict=True)]
        axes = [i for i, (low, high, _) in enumerate(index) if not np.array_equal(low, high)]
        known = np.logical_and.reduce(np.broadcast_arrays(*(ok for _, _, ok in index)))
        axis = axes[-1] if axes else array.ndim - 1
        for i in axes[:-1]:
            known = known & (index[i][0] == index[i][1])
        too_large = len(axes) > 0 and array.size > _LARGEST_TABLE * self.granule
        if too_large or array.size == 0 or not known.any():
            known = np.False_
            low = high = _DTYPES[node.dtype](0)
        elif not axes:
            low = high = array[tuple(low for low, _, _ in index)]
        else:
            table = self._table(node.capture, axis)
            low, high = table([low for i, (low, _, _) in enumerate(index) if i != axis], *index[axis][:2])
        least, most = _limits(array.dtype)
        dtype = _DTYPES[node.dtype]
        return np.where(known, low, least).astype(dtype), np.where(known, high, most).astype(dtype)

    def _table(self, capture: int, axis: int) -> RangeTable:
        if (capture, axis) not in self._tables:
            array = np.moveaxis(self._array(capture), axis, -1)
            self._tables[capture, axis] = RangeTable(array, 1 if array.size <= _FULL_RESOLUTION else self.granule)
        return self._tables[capture, axis]


class RangeTable:
    """Minima and maxima of an array over ranges of its last axis, rounded outward to granules.

    A granule is a fixed number of elements; over the granules stands a sparse table: level k holds the minimum of
    2**k granules from each place on, so that two overlapping entries cover any range. A NaN makes both ends NaN.
    """

    def __init__(self, array: np.ndarray, granule: int) -> None:  # array: [..., n]
        self.array = array
        self.granule = granule
        self.levels = [self._build(np.minimum), self._build(np.maximum)]  # each [levels, ..., granules]

    def _build(self, smaller: np.ufunc) -> np.ndarray:
        n, g = self.array.shape[-1], self.granule
        whole = n // g * g
        level = self.array
        if g > 1:
            body = smaller.reduce(self.array[..., :whole].reshape(*self.array.shape[:-1], whole // g, g), axis=-1)
            tail = smaller.reduce(self.array[..., whole:], axis=-1, keepdims=True) if whole < n else body[..., :0]
            level = np.concatenate([body, tail], axis=-1)
        levels = [level]
        width = 1
        while 2 * width <= level.shape[-1]:
            level = level.copy()
            level[..., :-width] = smaller(level[..., :-width], level[..., width:])
            levels.append(level)
            width *= 2
        return np.stack(levels)

    def __call__(self, leading: list[Values], low: Values, high: Values) -> tuple[Values, Values]:
        """Return (least, greatest) of array[*leading, low..high], both inclusive and inside of the array."""
        first, last = low // self.granule, high // self.granule
        # frexp gives the number of bits, exactly; a float64 holds every count.
        level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
        second = last - (1 << level.astype(np.int64)) + 1
        least, most = (
            reduce(table[level, *leading, first], table[level, *leading, second])
            for reduce, table in zip((np.minimum, np.maximum), self.levels, strict=True)
        )
        if self.granule == 1:
            return least, most
        # A single element is known exactly: sampled points, and indices that are the same for the whole box.
        point = low == high
        element = self.array[*leading, low]
        return np.where(point, element, least), np.where(point, element, most)


def classify_boxes(
    bounded: ModGraph, captures: Sequence[Tensor], numbers: Sequence[int | float], boxes: np.ndarray
) -> np.ndarray:
    """Return EMPTY, FULL or UNKNOWN for each box of a mask: boxes int [n, 8] in the order of BOX_INPUTS, uint8 [n]."""
    return Bounds(bounded, tuple(captures), tuple(numbers)).classify(*np.asarray(boxes, np.int64).T)


@lru_cache(256)
def _last_uses(graph: ModGraph) -> tuple[tuple[int, ...], ...]:
    """For each node, those operands that no later node and no output reads: their values can go."""
    last = {a: i for i, node in enumerate(graph.nodes) for a in node.args}
    uses: list[list[int]] = [[] for _ in graph.nodes]
    for a, i in last.items():
        if a not in graph.outputs:
            uses[i].append(a)
    return tuple(map(tuple, uses))


def _wrap(low: Values, high: Values, size: int) -> tuple[Values, Values, Values]:
    """Return a range of indices after PyTorch's wrap-around, and whether all of it is inside of the axis."""
    low, high = np.asarray(low), np.asarray(high)
    ok = (low >= -size) & (high < size)
    if low.min(initial=0) < 0:
        below, mixed = high < 0, (low < 0) & (high >= 0)
        low = np.where(mixed, 0, np.where(below, low + size, low))
        high = np.where(mixed, size - 1, np.where(below, high + size, high))
    return low.clip(0, max(size - 1, 0)), high.clip(0, max(size - 1, 0)), ok


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    if dtype == np.bool_:
        return False, True
    if np.issubdtype(dtype, np.floating):
        return -_INF, _INF
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _cast_numpy(value: Values, dtype: torch.dtype) -> Values:
    if dtype != torch.bfloat16:
        return np.asarray(value).astype(_DTYPES[dtype])
    # Round to nearest even in the upper half of the float's bits; what stays a float32 prints and computes as one.
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    return np.where(np.isfinite(value), rounded, value)


def _by_torch(op: str, args: list[Values]) -> Values:
    return OPS[op].torch(*(torch.from_numpy(np.array(a)) for a in np.broadcast_arrays(*args))).numpy()
