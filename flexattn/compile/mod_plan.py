"""mod_plan: ModPlan, a mod's graph with the properties of its arguments that change the lowered text."""

from __future__ import annotations

import torch

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Argument, FromProblem, FromShapes
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.process.frozen_class import frozen

TRITON_DTYPE = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "int1",
}  # fmt: skip
TRITON_POINTER = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


@frozen
class CaptureLayout:
    """What generated code assumes about a captured tensor's memory. Sizes and strides are runtime values."""

    dense: bool  # the last stride is 1
    aligned: bool  # dense, and the other strides and the pointer are multiples of 16 bytes: loads are vectorized
    wide: bool  # offsets may exceed 2**31: addresses are int64


@frozen
class ModPlan:
    """A graph and everything about its runtime arguments that changes the generated text."""

    graph: ModGraph
    role: str  # "score" or "mask": the prefix of its arguments
    layouts: tuple[CaptureLayout, ...]
    numbers: tuple[str, ...]  # Triton types of the lifted numbers: i32, i64 or fp32
    # For the lengths of the call: nodes that are never negative, and loads that are in bounds everywhere in every tile.
    # Other indices get PyTorch's wrap-around of negative values, and other loads are masked.
    nonnegative: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()

    def arguments(self) -> tuple[Argument, ...]:
        """Return the runtime arguments: pointer, strides and sizes of each captured tensor, then the numbers."""
        found: list[Argument] = []
        for i, (capture, layout) in enumerate(zip(self.graph.captures, self.layouts, strict=True)):
            name, width = self.capture_name(i), "i64" if layout.wide else "i32"
            pointer = TRITON_POINTER[capture.dtype]
            found.append(Argument(f"{name}_ptr", pointer, self._tensor(i), layout.aligned and capture.ndim > 0))
            unit = layout_unit(capture.dtype) if layout.aligned else 1
            strides = capture.ndim - 1 if layout.dense else capture.ndim
            found += [Argument(f"{name}_stride{d}", width, self._stride(i, d, unit)) for d in range(max(strides, 0))]
            found += [Argument(f"{name}_size{d}", "i32", self._size(i, d)) for d in range(capture.ndim)]
        found += [Argument(self.number_name(i), kind, self._number(i)) for i, kind in enumerate(self.numbers)]
        return tuple(found)

    def bound(self, problem: Problem) -> BoundMod:
        """Return the mod of `problem` that this plan is for."""
        mod = problem.score if self.role == "score" else problem.mask
        assert mod is not None
        return mod

    def _tensor(self, i: int) -> FromProblem:
        return FromProblem("score" if self.role == "score" else "mask", i)

    def _stride(self, i: int, d: int, unit: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).captures[i].stride(d) // unit)

    def _size(self, i: int, d: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).captures[i].size(d))

    def _number(self, i: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).numbers[i])

    def signature(self) -> tuple[tuple[str, str], ...]:
        """Return (name, Triton type) of each runtime argument, in order."""
        return tuple((a.name, a.type) for a in self.arguments())

    def capture_name(self, position: int) -> str:
        return capture_name(self.role, self.graph, position)

    def number_name(self, position: int) -> str:
        return f"{self.role}_{_identifier(self.graph.numbers[position].name)}_{position}"

    def argument_names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.arguments())


# Argument names are unique for any names in the user's code. A number's name ends in its position. The names of a
# captured tensor's arguments end in its position and a word: ptr, stride0, size0.
def capture_name(role: str, graph: ModGraph, position: int) -> str:
    """Return the prefix of the argument names of a captured tensor."""
    return f"{role}_{_identifier(graph.captures[position].name)}_{position}"


def layout_unit(dtype: torch.dtype) -> int:
    """Return the number of elements in 16 bytes. Strides of aligned captures are passed in this unit."""
    return max(1, 16 // dtype.itemsize)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
