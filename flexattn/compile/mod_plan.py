"""ModPlan: a mod's graph with what its arguments look like, which together decide the text of its lowered function."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Argument, FromProblem, FromShapes
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph

TRITON_DTYPE = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "int1",
}  # fmt: skip
TRITON_POINTER = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class CaptureLayout:
    """What generated code assumes of a captured tensor's memory; sizes and strides themselves are runtime values."""

    dense: bool  # the last stride is 1
    aligned: bool  # dense, and the other strides and the pointer are multiples of 16 bytes: loads are vectorised
    wide: bool  # offsets may pass 2**31: addresses are int64


@dataclass(frozen=True)
class ModPlan:
    """A graph with everything of its runtime arguments that changes the generated text."""

    graph: ModGraph
    role: str  # "score" or "mask": the prefix of its arguments
    layouts: tuple[CaptureLayout, ...]
    numbers: tuple[str, ...]  # Triton types of the lifted numbers: i32, i64 or fp32
    # For the lengths of the call: nodes that are never negative, and loads that are inside of their tensor at any place
    # of any tile. Without that knowledge an index is wrapped as PyTorch does, and a load guarded.
    nonnegative: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()

    def arguments(self) -> tuple[Argument, ...]:
        """Return the runtime arguments: of each captured tensor its pointer, strides and sizes, then the numbers."""
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
        """Return the mod of a problem that this is the plan of."""
        mod = problem.score if self.role == "score" else problem.mask
        assert mod is not None
        return mod

    def _tensor(self, i: int) -> FromProblem:
        return FromProblem(lambda problem: self.bound(problem).captures[i].detach())

    def _stride(self, i: int, d: int, unit: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).captures[i].stride(d) // unit)

    def _size(self, i: int, d: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).captures[i].size(d))

    def _number(self, i: int) -> FromShapes:
        return FromShapes(lambda problem, _: self.bound(problem).numbers[i])

    def signature(self) -> tuple[tuple[str, str], ...]:
        """Return (name, Triton type) of each runtime argument, in order."""
        return tuple((a.name, a.type) for a in self.arguments())

    # No two arguments have the same name, whatever the user's names are: the part after the last underscore is the
    # position in a number's name, and a word (ptr, stride0, size0) in the names of a captured tensor's arguments, where
    # what stands before that word ends with the position.
    def capture_name(self, position: int) -> str:
        return f"{self.role}_{_identifier(self.graph.captures[position].name)}_{position}"

    def number_name(self, position: int) -> str:
        return f"{self.role}_{_identifier(self.graph.numbers[position].name)}_{position}"

    def argument_names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.arguments())


def layout_unit(dtype: torch.dtype) -> int:
    """Return the elements in 16 bytes: strides of aligned captures come in this unit, so that loads are vectorised."""
    return max(1, 16 // dtype.itemsize)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
