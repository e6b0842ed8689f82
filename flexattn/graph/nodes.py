"""nodes: the nodes of a graph (typed leaves and operations on them), and its captures and numbers."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

import torch

from flexattn.process.frozen_class import frozen

SCORE_INPUTS = ("score", "b", "h", "q_idx", "kv_idx")
MASK_INPUTS = ("b", "h", "q_idx", "kv_idx")
GRAD_INPUTS = ("grad", *SCORE_INPUTS)

Scalar = float | int | bool

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Return the dtype's name in printed graphs: f32, bf16, i32, bool."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of `dtype` are computed in: float32 for 8-bit and 16-bit floats."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@frozen
class Input:
    """An input of the mod: score, b, h, q_idx, kv_idx, or grad. In a bounding graph, an end of a box."""

    op: ClassVar[str] = "input"
    args: ClassVar[tuple[int, ...]] = ()
    name: str
    dtype: torch.dtype


@frozen
class NumberRef:
    """A number of the user's code, by its position in `ModGraph.numbers`."""

    op: ClassVar[str] = "number"
    args: ClassVar[tuple[int, ...]] = ()
    position: int
    dtype: torch.dtype


@frozen(eq=False)
class Const:
    """A constant. Equality is by repr, so 0.0 != -0.0, 1 != True and nan == nan."""

    op: ClassVar[str] = "const"
    args: ClassVar[tuple[int, ...]] = ()
    value: Scalar
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and (repr(self.value), self.dtype) == (repr(other.value), other.dtype)

    def __hash__(self) -> int:
        return hash((self.value if self.value == self.value else None, self.dtype))  # hash(nan) differs by object


@frozen
class Load:
    """An element of a captured tensor. `args` are its index expressions, one per dimension."""

    op: ClassVar[str] = "load"
    capture: int  # position in ModGraph.captures
    args: tuple[int, ...]
    dtype: torch.dtype


@frozen
class RangeLoad:
    """The minimum or maximum element of a captured tensor over a box of indices. Only in bounding graphs."""

    op: Literal["range_min", "range_max"]
    capture: int
    args: tuple[int, ...]  # (low, high) of each index
    dtype: torch.dtype


@frozen
class Operation:
    """A scalar operation: `cast` or a key of OPS."""

    op: str
    args: tuple[int, ...]  # positions of earlier nodes
    dtype: torch.dtype


Node = Input | NumberRef | Const | Load | RangeLoad | Operation


@frozen
class Capture:
    """A tensor that the mod reads: its name in the user's code, dtype and rank. Sizes and strides may vary."""

    name: str
    dtype: torch.dtype
    ndim: int
    literal: bool = field(default=False, compare=False)  # the mod makes it from numbers, on the CPU
    line: str = field(default="", compare=False)  # the user's file:line that reads it, or several

    def __repr__(self) -> str:
        return f"{self.name}: {short_dtype(self.dtype)}[{', '.join(':' * self.ndim)}]"


@frozen
class Number:
    """A Python int or float in the user's code that is a runtime argument of the kernel."""

    name: str
    dtype: torch.dtype  # int64 for an int, float64 for a float
    bits: int = 63  # the graph is valid for ints in [-2**bits, 2**bits]

    def __repr__(self) -> str:
        return f"{self.name}: {'int' if self.dtype == torch.int64 else 'float'}"
