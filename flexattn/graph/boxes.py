"""boxes: Bounds, a bounding graph that numpy evaluates over many boxes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.graph.interval_bounds import BOX_INPUTS, EMPTY, FULL, UNKNOWN
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Const, Input, Load, NumberRef, Operation, RangeLoad
from flexattn.graph.operators import OPS
from flexattn.process.frozen_class import frozen

Values = Any  # a numpy array or scalar
_INF = float("inf")

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
DTYPES = frozenset(_DTYPES) | {torch.bfloat16}  # supported dtypes of nodes and captures
_FULL_RESOLUTION = 2**14  # elements; the tables of larger arrays are over granules
_LARGEST_TABLE = 2**22  # granules; a table of this many takes half a gigabyte


@frozen
class Bounds:
    """A bounding graph with the values of one call."""

    graph: ModGraph
    captures: tuple[Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
    granule: int = 128  # most boxes start and end at multiples of this
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
        """Return the class of a mask (EMPTY, FULL or UNKNOWN, uint8) in each box given by its ends."""
        sure, maybe = self(*ends)
        classes = np.where(sure, FULL, np.where(maybe, UNKNOWN, EMPTY)).astype(np.uint8)
        return np.broadcast_to(classes, np.broadcast_shapes(*(np.shape(e) for e in ends)))

    def _array(self, capture: int) -> np.ndarray:
        if capture not in self._arrays:
            tensor = self.captures[capture].detach()
            tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            # Tensor.numpy() would forbid to resize the user's storage for good. FSDP resizes those of parameters.
            self._arrays[capture] = np.from_dlpack(tensor.cpu())
        return self._arrays[capture]

    def _range(self, node: RangeLoad, ends: list[Values]) -> tuple[Values, Values]:
        """Return the minimum and maximum element of a capture over a box of indices.

        They are known only for boxes with more than one index along at most one axis.
        """
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

    A granule is a fixed number of elements. The table over granules is a sparse table: entry i of level k covers 2**k
    granules from i on, so two overlapping entries cover any range. If a range contains a NaN, both ends are NaN.
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
        """Return (minimum, maximum) of array[*leading, low..high]. Both ends are inclusive and in bounds."""
        first, last = low // self.granule, high // self.granule
        # frexp returns the exact number of bits. Every count is exact in float64.
        level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
        second = last - (1 << level.astype(np.int64)) + 1
        least, most = (
            reduce(table[level, *leading, first], table[level, *leading, second])
            for reduce, table in zip((np.minimum, np.maximum), self.levels, strict=True)
        )
        if self.granule == 1:
            return least, most
        # A single element is read exactly, for sampled points and for indices that are constant in the box.
        point = low == high
        element = self.array[*leading, low]
        return np.where(point, element, least), np.where(point, element, most)


@lru_cache(256)
def _last_uses(graph: ModGraph) -> tuple[tuple[int, ...], ...]:
    """For each node, the operands that no later node and no output reads. Their values can be freed."""
    last = {a: i for i, node in enumerate(graph.nodes) for a in node.args}
    uses: list[list[int]] = [[] for _ in graph.nodes]
    for a, i in last.items():
        if a not in graph.outputs:
            uses[i].append(a)
    return tuple(map(tuple, uses))


def _wrap(low: Values, high: Values, size: int) -> tuple[Values, Values, Values]:
    """Return a range of indices after PyTorch's wrap-around, and whether all of it is in bounds."""
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
    # Round to nearest even in the upper half of the bits. The result is still a float32.
    bits = np.asarray(value, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    return np.where(np.isfinite(value), rounded, value)


def _by_torch(op: str, args: list[Values]) -> Values:
    return OPS[op].torch(*(torch.from_numpy(np.array(a)) for a in np.broadcast_arrays(*args))).numpy()
