"""torch.func's transforms and forward mode: whether one is active, how to leave it, and operations that compose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch._functorch.pyfunctorch import (
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.autograd import Function, forward_ad
from torch.func import vjp

from flexattn.errors import UnsupportedError, message

Operation = Callable[..., tuple[Tensor, ...]]

outside = temporarily_clear_interpreter_stack  # a context in which new tensors belong to no transform


def is_transforming() -> bool:
    """Return whether tensors may carry more than `requires_grad` shows: tangents, or torch.func levels."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def refuse_random_vmap(name: str) -> None:
    """Reject random numbers that differ between the entries of torch.vmap, which are computed with one seed."""
    levels = retrieve_all_functorch_interpreters() if get_interpreter_stack() else ()
    for level in levels:
        if isinstance(level, VmapInterpreter) and level.randomness() != "same":
            found = f"a call inside of torch.vmap with randomness={level.randomness()!r}"
            fix = "Write randomness='same', or use the batch dim of query instead of torch.vmap."
            raise UnsupportedError(message(name, found, "randomness='same'", fix))


def refuse_functionalize() -> None:
    """Reject torch.func.functionalize, for which torch has no rule of a Function."""
    if any(level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ()):
        fix = "Leave it out: flex_attention changes nothing in place."
        found = "a call inside of torch.func.functionalize"
        raise UnsupportedError(message("flex_attention", found, "another transform of torch.func", fix))


def refuse_in_graphs(*tensors: Tensor) -> None:
    """Reject torch.func's transforms and forward mode around a call that is recorded in a graph."""
    refuses = torch._C._are_functorch_transforms_active()
    if not refuses and forward_ad._current_level >= 0:
        refuses = any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if refuses:
        found, fix = "a transform of torch.func or forward mode inside of", "Transform the call without recording it."
        where = "make_fx, torch.export, torch.func.linearize or a compiled function"
        raise UnsupportedError(message("flex_attention", f"{found} {where}", "a call without one", fix))


def tangent_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return rule(ctx, saved tensors, directions) as the `jvp` of a Function that may run inside of a transform.

    torch disables forward mode during `jvp` for every transform, so outer transforms would treat the result as a
    constant. So forward mode is enabled again, and the tangents that the rule must not see are removed.
    """

    @wraps(rule)
    def jvp(ctx: Any, *directions: Tensor | None) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            return rule(ctx, saved, *directions)

    return jvp


def transforms() -> int:
    """Return how many transforms are active."""
    return len(get_interpreter_stack() or ())


def is_transformed(value: object) -> bool:
    """Return whether a value is a tensor inside of a transform."""
    return isinstance(value, Tensor) and is_functorch_wrapped_tensor(value)


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside all levels of torch.func."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Tensor) -> bool:
    """Return whether torch.func.vmap gives the tensor a different value for each entry."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def refuse_batched(*grads: Tensor | None) -> None:
    """Reject a backward on a batch of gradients (is_grads_batched), which a Function does not support."""
    for gradient in grads:
        if gradient is not None and is_legacy_batchedtensor(gradient):
            fix = "Use torch.func.jacrev, jacfwd or hessian, or leave out vectorize=True and check_batched_grad=True."
            found = "a backward with is_grads_batched=True"
            raise UnsupportedError(message("flex_attention", found, "one gradient at a time, or torch.func.vmap", fix))


def one_by_one(function: type[Function], batch_size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Implement the `vmap` of a Function by applying it to one batch entry after the other."""
    if batch_size == 0:
        fix = "Skip the call for an empty batch."
        raise UnsupportedError(message("torch.vmap", "a batch of 0 around flex_attention", "at least one entry", fix))
    entries = [
        function.apply(*(_entry(x, d, i) for x, d in zip(args, in_dims, strict=True))) for i in range(batch_size)
    ]
    outputs = [None if parts[0] is None else torch.stack(parts) for parts in zip(*entries, strict=True)]
    return tuple(outputs), tuple(None if x is None else 0 for x in outputs)


def _entry(x: Any, dim: Any, i: int) -> Any:
    return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x


def recomputed(operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return operation(*tensors), saving only `tensors`. Each derivative, of any order, recomputes it."""
    return _Recomputed.apply(operation, *tensors)


class _Recomputed(Function):
    @staticmethod
    def forward(operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        return operation(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operation = inputs[0]
        tensors = inputs[1:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[1:]) if need)
        found = iter(recomputed(_pullback(ctx.operation, wanted, len(grads)), *grads, *ctx.saved_tensors))
        return None, *(next(found) if need else None for need in ctx.needs_input_grad[1:])

    @staticmethod
    @tangent_rule
    def jvp(ctx: Any, tensors: Sequence[Tensor], _: None, *directions: Tensor | None) -> tuple[Tensor, ...]:
        moved = tuple(i for i, t in enumerate(directions) if t is not None and tensors[i].is_floating_point())
        return recomputed(_push(ctx.operation, moved), *(directions[i] for i in moved), *tensors)  # type: ignore[arg-type]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_Recomputed, info.batch_size, in_dims, args)


def _pullback(operation: Operation, wanted: tuple[int, ...], outputs: int) -> Operation:
    """Return a function of (gradients of the outputs, tensors) that gives the gradients of the tensors `wanted`."""

    def pulled(*args: Tensor) -> tuple[Tensor, ...]:
        grads, tensors = args[:outputs], args[outputs:]
        return vjp(_of(operation, tensors, wanted), *(tensors[i] for i in wanted))[1](grads)

    return pulled


def _push(operation: Operation, moved: tuple[int, ...]) -> Operation:
    """Return a function of (directions of the tensors `moved`, tensors) that gives the derivatives of the outputs.

    It is a gradient of the gradient, which is linear in the output gradient, because forward mode cannot be nested.
    """

    def pushed(*args: Tensor) -> tuple[Tensor, ...]:
        directions, tensors = args[: len(moved)], args[len(moved) :]
        found = vjp(_of(operation, tensors, moved), *(tensors[i] for i in moved))
        return vjp(lambda *grads: found[1](grads), *(torch.zeros_like(x) for x in found[0]))[1](directions)

    return pushed


def _of(operation: Operation, tensors: tuple[Tensor, ...], places: tuple[int, ...]) -> Operation:
    """Return the operation as a function of only the tensors at `places`."""

    def of(*chosen: Tensor) -> tuple[Tensor, ...]:
        every = list(tensors)
        for i, x in zip(places, chosen, strict=True):
            every[i] = x
        return operation(*every)

    return of
