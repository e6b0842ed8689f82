"""frozen: FrozenMod, a mask_mod with the values that it captured when its mask was pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import FormatError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture, Input, short_dtype
from flexattn.graph.serialize import dumps, loads
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen

Shift = int | Tensor | None


@frozen(eq=False, repr=False)
class FrozenMod:
    """A mask_mod that evaluates a graph on tensors and numbers of its own.

    A mask that is loaded from a pickle has one. Changes to what the original mask_mod captures are not seen.
    """

    graph: ModGraph
    captures: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]

    @property
    def __name__(self) -> str:
        return f"frozen {self.graph.name}"

    @cached_property
    def bound(self) -> BoundMod:
        names = tuple(c.name for c in self.graph.captures)
        return BoundMod(self.graph, self.captures, self.numbers, self.captures, names)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether the pairs attend. The arguments broadcast."""
        # Dynamo cannot trace `on`. It has nothing to do: a mask in a graph is on the device of its call.
        bound = self.bound if torch.compiler.is_dynamo_compiling() else self.bound.on(b.device)
        return bound(b, h, q_idx, kv_idx)

    def with_captures(self, captures: Sequence[Tensor]) -> FrozenMod:
        """Return the mod with other tensors."""
        return FrozenMod(self.graph, tuple(captures), self.numbers)

    def sliced(self, b: Shift, h: Shift, q: Shift, block: int) -> FrozenMod:
        """Return the mod of a slice of a mask. A shift is an offset or a tensor of positions, of blocks for `q`."""
        shifts, captures, tensors = {"b": b, "h": h, "q_idx": q}, list(self.graph.captures), list(self.captures)
        for name, shift in shifts.items():
            if isinstance(shift, Tensor):
                captures.append(Capture(_unused_name(f"{name}_of_slice", captures), shift.dtype, 1))
                tensors.append(shift)

        def shifted(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
            node = self.graph.nodes[i]
            shift = shifts.get(node.name) if isinstance(node, Input) else None
            if not isinstance(node, Input) or shift is None:
                return None
            index = builder.input(node.name, node.dtype)
            if not isinstance(shift, Tensor):
                return index + shift
            position = next(place for place, tensor in enumerate(tensors) if tensor is shift)
            if node.name != "q_idx":
                return builder.load(position, shift.dtype, [index])
            return builder.load(position, shift.dtype, [index.apply("floordiv", block)]) * block + index.apply(
                "mod", block
            )

        return FrozenMod(rewrite(self.graph, shifted, captures=tuple(captures)), tuple(tensors), self.numbers)

    def __repr__(self) -> str:
        return f"<frozen mask_mod: its captured values do not change>\n{self.graph}"

    def __deepcopy__(self, memo: dict[int, object]) -> FrozenMod:
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return text, tensors and numbers."""
        return {"graph": dumps(self.graph), "captures": tuple(map(compact, self.captures)), "numbers": self.numbers}

    def __setstate__(self, state: dict[str, object]) -> None:
        graph, captures, numbers = (state.get(name) for name in ("graph", "captures", "numbers"))
        if type(graph) is not str or type(captures) is not tuple or type(numbers) is not tuple:
            raise invalid("mask_mod")
        made = loads(graph)
        if made.inputs != MASK_INPUTS or len(made.outputs) != 1 or made.nodes[made.output].dtype != torch.bool:
            raise invalid("mask_mod")
        if len(captures) != len(made.captures) or len(numbers) != len(made.numbers):
            raise invalid("mask_mod")
        for about, tensor in zip(made.captures, captures, strict=True):
            if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.dim()) != (about.dtype, about.ndim):
                expected = f"{short_dtype(about.dtype)} with {about.ndim} dims"
                raise FormatError(
                    message(f"captured tensor {about.name}", "another kind", expected, "Pickle it again.")
                )
        for about, number in zip(made.numbers, numbers, strict=True):
            if type(number) is not (int if about.dtype == torch.int64 else float):
                raise invalid("mask_mod")
            if type(number) is int and abs(number) > 1 << about.bits:
                raise invalid("mask_mod")
        captures = tuple([t.resolve_neg() for t in captures])
        self.__dict__.update(graph=made, captures=captures, numbers=numbers)


def _unused_name(name: str, captures: Sequence[Capture]) -> str:
    taken = {c.name for c in captures}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(len(captures)))) if n not in taken)


def freeze(bound: BoundMod) -> FrozenMod:
    """Return a mod with these values."""
    return FrozenMod(bound.graph, tuple(map(compact, bound.captures)), bound.numbers)


def thawed(state: Any) -> FrozenMod:
    """Return the mod of `FrozenMod.__getstate__`."""
    if not isinstance(state, dict):
        raise invalid("mask_mod")
    mod = FrozenMod.__new__(FrozenMod)
    mod.__setstate__(state)
    return mod


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor without history whose pickle is not larger than its elements."""
    tensor = tensor.detach()
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def invalid(what: str) -> FormatError:
    """Return the error for a pickle of a mask with an invalid part."""
    return FormatError(message("BlockMask", f"a pickle with an invalid {what}", "an unchanged one", "Pickle it again."))
