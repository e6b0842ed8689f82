"""attention: the differentiable operation around the operators. In a traced graph only the operators appear.

Graphs of torch.export and make_fx may be run with gradients later: the operator itself is differentiated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from flexattn.call.layout import refuse_learned
from flexattn.call.wide_dtype import wide_dtype
from flexattn.errors import UnsupportedError, message
from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.operators import LIBRARY, OPS, with_lists
from flexattn.torch_compile.spec import loads
from flexattn.torch_state.transforms import refuse_in_graphs

Symbolic = Any  # an int or a float, or a symbol for one


@frozen
class Operands:
    """The arguments of flexattn::forward. `spec` and `scale` are constants of a graph."""

    query: Tensor
    key: Tensor
    value: Tensor
    captures: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    layout: tuple[Tensor, ...]
    sink: Tensor | None
    seed: Tensor | None
    ints: tuple[Symbolic, ...]
    floats: tuple[Tensor, ...]
    scale: float | None
    spec: str

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        sink = () if self.sink is None else (self.sink,)
        return (self.query, self.key, self.value, *self.captures, *sink)


def call_operators(operands: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse as the user sees it and, if requested, the row maxima."""
    refuse_in_graphs(*operands.differentiable)
    form = loads(operands.spec).sequences
    if form is not None:  # the operators check again, where autograd has hidden what requires a gradient
        for name, x in zip(form.names, operands.layout, strict=False):
            refuse_learned(name, x)
    out, lse, *largest = _Attention.apply(operands, *operands.differentiable)
    wide = wide_dtype(operands.query)
    return out, lse.to(wide), largest[0] if largest else None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, operands: Operands, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = _arguments(operands, tensors)
        overload = OPS.forward.floats if operands.floats else OPS.forward.default
        out, lse, *largest = overload(*arguments)
        ctx.mark_non_differentiable(*largest)
        seed = () if operands.seed is None else (operands.seed,)
        others = (*operands.lists, *operands.layout, *seed, *operands.floats)
        ctx.save_for_backward(out, lse, *tensors, *others)
        ctx.operands = _without_tensors(operands)
        ctx.set_materialize_grads(False)
        return out, lse, *largest

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # flexattn::backward has no derivative
            found = "a backward with create_graph=True of a call in a graph or a FlopCounterMode"
            fix = "Call it outside of compiled functions, make_fx and FlopCounterMode."
            raise UnsupportedError(message("flex_attention", found, "a backward without a graph", fix))
        out, lse, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if d_out is None and d_lse is None:
            return None, *(None for _ in needs)
        if d_out is None:
            d_out = out.new_zeros(()).expand(out.shape)
        counts: _Counts = ctx.operands
        operands, tensors = counts.restored(saved)
        overload = OPS.backward.floats if operands.floats else OPS.backward.default
        found = iter(overload(d_out, d_lse, out, lse, *_arguments(operands, tensors), list(needs)))
        return None, *(next(found) if need else None for need in needs)


@frozen
class _Counts:
    """Operands without their tensors, which are saved by autograd."""

    captures: int
    lists: int
    layout: int
    sink: bool
    seed: bool
    ints: tuple[Symbolic, ...]
    scale: float | None
    spec: str

    def restored(self, saved: Sequence[Tensor]) -> tuple[Operands, Sequence[Tensor]]:
        """Return the operands with the saved tensors, and those that are differentiable."""
        split = 3 + self.captures + self.sink
        tensors, rest = saved[:split], list(saved[split:])
        lists, rest = tuple(rest[: self.lists]), rest[self.lists :]
        layout, rest = tuple(rest[: self.layout]), rest[self.layout :]
        seed = rest.pop(0) if self.seed else None
        operands = Operands(
            tensors[0], tensors[1], tensors[2], tuple(tensors[3 : 3 + self.captures]), lists, layout,
            tensors[-1] if self.sink else None, seed, self.ints, tuple(rest), self.scale, self.spec,
        )  # fmt: skip
        return operands, tensors


def _without_tensors(operands: Operands) -> _Counts:
    return _Counts(
        len(operands.captures), len(operands.lists), len(operands.layout), operands.sink is not None,
        operands.seed is not None, operands.ints, operands.scale, operands.spec,
    )  # fmt: skip


def _arguments(operands: Operands, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the operator's arguments, with the tensors that autograd passed to the Function."""
    captures = list(tensors[3 : 3 + len(operands.captures)])
    sink = None if operands.sink is None else tensors[-1]
    return (
        *tensors[:3], captures, list(operands.lists), list(operands.layout), sink, operands.seed, list(operands.ints),
        list(operands.floats), operands.scale, operands.spec,
    )  # fmt: skip


def _differentiable(overload: Any) -> Any:
    """Return the autograd kernel of flexattn::forward."""

    def compute(*arguments: Any) -> list[Tensor]:
        given = with_lists(arguments)
        query, key, value, captures, lists, layout, sink, seed, ints, floats, scale, spec = given
        tensors = (query, key, value, *captures, *(() if sink is None else (sink,)))
        if _transforms() or forward_ad._current_level >= 0:
            _refuse_transforms(tensors)
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*given)
        operands = Operands(
            query, key, value, tuple(captures), tuple(lists), tuple(layout), sink, seed, tuple(ints), tuple(floats),
            scale, spec,
        )  # fmt: skip
        return list(_Attention.apply(operands, *tensors))

    return compute


_transforms = torch._C._are_functorch_transforms_active


def _refuse_transforms(tensors: Sequence[Tensor]) -> None:
    """Raise UnsupportedError for gradients and tangents of torch.func, and for tangents of forward mode.

    torch.func wraps all tensors, also those that are constants of a transform.
    """
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009
    kind = functorch.peek_interpreter_stack().key() if _transforms() else None
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if kind in (functorch.TransformType.Grad, functorch.TransformType.Jvp) and learns:
        refuses = True
    else:
        unpack: Any = getattr(torch, "_VF")._unpack_dual  # noqa: B009
        refuses = any(unpack(x, level=0)[1] is not None for x in tensors)
    if refuses:
        fix = "Transform a function that calls flex_attention itself."
        raise UnsupportedError(message("flexattn::forward", "a transform of torch.func around a graph", "none", fix))


for _name, _overload in (("forward", OPS.forward.default), ("forward.floats", OPS.forward.floats)):
    LIBRARY.impl(_name, _differentiable(_overload), "Autograd")
