"""arguments: Argument, one runtime argument of a kernel, and where a launch gets its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from flexattn.call.problem import Problem

Tensors = Mapping[str, Tensor]  # by their names in the templates: q, k, v, o, do, dq, dk, dv, lse_ptr, ...
NO_ARRAYS: Tensors = {}


@dataclass(frozen=True)
class FromShapes:
    """A number that is the same for all launches with the same shapes, strides and numbers."""

    value: Callable[[Problem, Tensors], int | float]


@dataclass(frozen=True)
class FromTensors:
    """A tensor or array that the engine passes under this name."""

    name: str


@dataclass(frozen=True)
class FromProblem:
    """A tensor of the problem: a block list of the mask, a captured tensor, or the dropout seed."""

    tensor: Callable[[Problem], Tensor]


@dataclass(frozen=True)
class DescriptorOf:
    """A TMA descriptor of a tensor that the engine passes under this name."""

    name: str
    block: tuple[int, ...]  # shape of a tile


@dataclass(frozen=True)
class TileCounter:
    """An int32 counter, 0 at each launch, from which persistent programs take tile indices."""


@dataclass(frozen=True)
class Argument:
    """One runtime argument of a kernel: its name in the template, its Triton type and the source of its value."""

    name: str
    type: str  # in Triton's notation: i32, fp32, *bf16, tensordesc<...>
    source: FromShapes | FromTensors | FromProblem | DescriptorOf | TileCounter
    divisible: bool = False  # the pointer is a multiple of 16 bytes

    @property
    def is_descriptor(self) -> bool:
        return isinstance(self.source, DescriptorOf)
