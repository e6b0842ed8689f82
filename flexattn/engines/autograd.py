"""The single differentiable operation: attention over (query, key, value, captured tensors), run by an engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp

from flexattn.call.problem import Gradients, Needs, Problem, requires_grad
from flexattn.call.wide_dtype import wide_dtype
from flexattn.engines.second_order import tangents
from flexattn.engines.watched import Direction, is_watched, watched
from flexattn.errors import MutationError
from flexattn.graph.bound_mod import BoundMod
from flexattn.process.config import settings
from flexattn.process.events import debug
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.transforms import (
    is_transforming,
    one_by_one,
    refuse_batched,
    refuse_functionalize,
    tangent_rule,
)
from flexattn.torch_state.uncompiled import uncompiled


class Engine(Protocol):
    """Runs a problem: a module of `engines/`."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return out, lse (float32, or float64 if the engine computes it) and, if requested, the row maxima."""
        ...

    def backward(
        self,
        problem: Problem,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        needs: Needs,
    ) -> Gradients:
        """Return dq, dk, dv, the gradients of tensors captured by score_mod, and that of a sink that requires one."""
        ...


def attention(engine: Engine, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse and max_scores, recorded for a backward if any tensor of the problem requires a gradient."""
    if settings().debug:
        mods = tuple(m.graph.name for m in (problem.score, problem.mask) if m is not None)
        _tell(getattr(engine, "__name__", type(engine).__name__), problem.query.dtype, mods)
    if is_transforming():
        refuse_functionalize()
        return _TransformedAttention.apply(engine, problem, *tensors_of(problem))[:3]
    tensors = tensors_of(problem)
    if _requires_gradient(tensors):
        return AttentionFunction.apply(engine, problem, *tensors)
    out, lse, max_scores = run_engine("forward", problem, engine.forward, problem)
    return out, _shown(lse, problem), max_scores


@lru_cache(256)
def _tell(engine: str, dtype: torch.dtype, mods: tuple[str, ...]) -> None:
    """Log once which engine runs."""
    debug("call", f"engine {engine}, {dtype}, mods: {', '.join(mods) or 'none'}")


def _shown(lse: Tensor, problem: Problem) -> Tensor:
    """Return lse in the dtype that the user sees. The backward keeps the engine's lse."""
    dtype = wide_dtype(problem.query)
    return lse if lse.dtype == dtype else lse.to(dtype)


def wants_gradient(problem: Problem) -> bool:
    """Return whether a backward may follow."""
    return _requires_gradient(tensors_of(problem))


def _requires_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(map(requires_grad, tensors))


class AttentionFunction(Function):
    """Saves tensors with `save_for_backward`, so in-place changes before the backward raise, and hooks see them."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, max_scores = _run(engine, problem)
        shown = _shown(lse, problem)
        _keep(ctx, engine, problem, tensors, out, lse)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        return out, shown, max_scores

    @staticmethod
    @uncompiled
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        refuse_batched(d_out, d_lse)
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            explain_change(error, ctx.problem, ctx.shapes)
            raise
        return None, None, *gradients(ctx.engine, ctx.problem, ctx.needs_input_grad[2:], d_out, d_lse, saved)


def gradients(
    engine: Engine, problem: Problem, needs: tuple[bool, ...], d_out: Tensor | None, d_lse: Tensor | None,
    saved: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return one gradient, or None, per tensor of the problem. `saved` are these tensors, out and lse."""
    *tensors, out, lse = saved
    if d_out is None and d_lse is None:
        return (None,) * len(needs)
    if d_out is None:
        d_out = out.new_zeros(()).expand(out.shape)
    problem = with_tensors(problem, tensors)
    if torch.is_grad_enabled() or is_transforming():
        return _AttentionGradient.apply(engine, problem, needs, d_out, d_lse, out, lse, *tensors)
    return _gradients(engine, problem, needs, d_out, d_lse, out, lse)


_NOTHING = torch.empty(0, device="cpu")  # in the place of tensors that save_for_backward keeps


def _run(engine: Engine, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    return run_engine("forward", problem, partial(_forward_unviewed, engine), problem)


def _forward_unviewed(engine: Engine, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    out, lse, max_scores = engine.forward(problem)
    if out._is_view():  # with permuted dimensions; autograd would not let the user change it in-place
        own: Any = out.new_empty(0)
        out = own.set_(out)
    return out, lse, max_scores


def _keep(ctx: Any, engine: Engine, problem: Problem, tensors: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
    """Save in `ctx` what the backward reads."""
    ctx.engine = engine
    if problem.block_mask is not None:  # its lists may be assigned before the backward
        problem = problem.with_fields(block_mask=copy.copy(problem.block_mask))
    ctx.problem = with_tensors(problem, (_NOTHING,) * len(tensors))  # save_for_backward keeps tensors
    ctx.save_for_backward(*tensors, out, lse)
    ctx.shapes = [x.shape for x in (*tensors, out, lse)]
    ctx.set_materialize_grads(False)


class _TransformedAttention(AttentionFunction):
    """The same operation in the form that torch.func and forward mode require, with more host overhead.

    Everything saved for the backward must be a result, so the engine's lse is one if it differs from the user's.
    """

    @staticmethod
    def forward(engine: Engine, problem: Problem, *tensors: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        problem = with_tensors(problem, tensors)
        out, lse, max_scores = _run(engine, problem)
        shown = _shown(lse, problem)
        return out, shown, max_scores, None if shown is lse else lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        engine, problem, *tensors = inputs
        out, shown, max_scores, lse = output
        _keep(ctx, engine, problem, tensors, out, shown if lse is None else lse)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(x for x in (max_scores, lse) if x is not None))

    @staticmethod
    @tangent_rule
    def jvp(
        ctx: Any, saved: Sequence[Tensor], _: None, __: None, *directions: Tensor | None
    ) -> Sequence[Tensor | None]:
        problem = with_tensors(ctx.problem, saved)
        return *tangents(problem, _along(problem, directions)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_TransformedAttention, info.batch_size, in_dims, args)


class _AttentionGradient(Function):
    """The backward as a separate operation, linear in d_out and d_lse. Its derivatives come from `tangents`."""

    @staticmethod
    def forward(
        engine: Engine, problem: Problem, needs: tuple[bool, ...], d_out: Tensor, d_lse: Tensor | None, out: Tensor,
        lse: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        return _gradients(engine, with_tensors(problem, tensors), needs, d_out, d_lse, out, lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.engine, problem, ctx.needs = inputs[:3]
        tensors = inputs[3:]
        ctx.problem = with_tensors(problem, (_NOTHING,) * len(ctx.needs))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *directions: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched(*directions)
        d_out, d_lse, _, _, *tensors = ctx.saved_tensors
        problem = with_tensors(ctx.problem, tensors)
        needs = ctx.needs_input_grad[7:]
        tangent_out_lse, gradients = _second(problem, _along(problem, directions), needs, d_out, d_lse)
        return (
            None,
            None,
            None,
            tangent_out_lse[0],
            None if d_lse is None else tangent_out_lse[1].to(d_lse.dtype),
            None,
            None,
            *gradients,
        )

    @staticmethod
    @tangent_rule
    def jvp(ctx: Any, saved: Sequence[Tensor], *args: Tensor | None) -> Sequence[Tensor | None]:
        _, _, _, tangent_d_out, tangent_d_lse, _, _, *directions = args
        d_out, d_lse, out, lse, *tensors = saved
        problem = with_tensors(ctx.problem, tensors)
        _, found = _second(problem, _along(problem, directions), ctx.needs, d_out, d_lse)
        if tangent_d_out is None and tangent_d_lse is None:
            return found
        if tangent_d_out is None:
            tangent_d_out = torch.zeros_like(d_out)
        linear = _AttentionGradient.apply(
            ctx.engine, problem, ctx.needs, tangent_d_out, tangent_d_lse, out, lse, *tensors
        )
        return tuple(b if a is None else a if b is None else a + b for a, b in zip(found, linear, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_AttentionGradient, info.batch_size, in_dims, args)


@undisturbed("backward of flex_attention")
def _second(
    problem: Problem, directions: Problem, needs: tuple[bool, ...], d_out: Tensor, d_lse: Tensor | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    """Return the tangents of out and lse, and the gradients of <tangents, (d_out, d_lse)> for the needed tensors."""
    tensors = tensors_of(problem)

    def tangent_out_lse(*chosen: Tensor) -> tuple[Tensor, Tensor]:
        given = iter(chosen)
        every = [next(given) if need else x for x, need in zip(tensors, needs, strict=True)]
        return tangents(with_tensors(problem, every), directions)

    if not any(needs):
        return tangent_out_lse(), (None,) * len(needs)
    found = vjp(tangent_out_lse, *(x for x, need in zip(tensors, needs, strict=True) if need))
    lse = found[0][1]
    gradients = iter(found[1]((d_out, torch.zeros_like(lse) if d_lse is None else d_lse.to(lse.dtype))))
    return found[0], tuple(next(gradients) if need else None for need in needs)


def _along(problem: Problem, directions: Sequence[Tensor | None]) -> Problem:
    """Return the problem with its tensors replaced by directions, 0 where a direction is None."""
    pairs = zip(tensors_of(problem), directions, strict=True)
    return with_tensors(problem, [x.new_zeros(()).expand(x.shape) if d is None else d for x, d in pairs])


@undisturbed("backward of flex_attention")
def _gradients(
    engine: Engine, problem: Problem, needs: tuple[bool, ...], d_out: Tensor, d_lse: Tensor | None, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return one gradient, or None, per tensor of the problem."""
    q, k, v = needs[:3]
    of_sink = problem.sink is not None and needs[-1]
    dq, dk, dv, captured, d_sink = run_engine(
        "backward", problem, engine.backward, problem, out, lse, d_out, d_lse, (q, k, v, of_sink)
    )
    sink = () if problem.sink is None else (d_sink,)
    of_mask = (None,) * (len(needs) - 3 - len(captured) - len(sink))
    grads = (dq, dk, dv, *captured, *of_mask, *sink)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def tensors_of(problem: Problem) -> tuple[Tensor, ...]:
    """Return query, key, value, the captures of score_mod and those of mask_mod, the layout's tensors, and the sink."""
    score = () if problem.score is None else problem.score.captures
    mask = () if problem.mask is None else problem.mask.captures
    layout = () if problem.layout is None else problem.layout.tensors
    sink = () if problem.sink is None else (problem.sink,)
    return problem.query, problem.key, problem.value, *score, *mask, *layout, *sink


def with_tensors(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """Return the problem with other tensors, in the order of `tensors_of`."""
    query, key, value, *rest = tensors
    sink = None if problem.sink is None else rest.pop()
    layout = problem.layout
    if layout is not None:
        split = len(rest) - len(layout.tensors)
        rest, layout = rest[:split], layout.with_tensors(rest[split:])
    split = 0 if problem.score is None else len(problem.score.captures)
    score, mask = with_captures(problem.score, rest[:split]), with_captures(problem.mask, rest[split:])
    return problem.with_fields(query=query, key=key, value=value, score=score, mask=mask, sink=sink, layout=layout)


def with_captures(bound: BoundMod | None, captures: Sequence[Tensor]) -> BoundMod | None:
    return None if bound is None else BoundMod(bound.graph, tuple(captures), bound.numbers)


def run_engine(direction: Direction, problem: Problem, function: Callable[..., Any], *args: Any) -> Any:
    """Run an engine's function without autocast, and as one operation if a profiler or a mode watches.

    The inputs already have their dtypes, and engines accumulate in float32.
    """
    if is_watched():
        function, args = watched, (direction, problem, function, *args)
    kind = problem.query.device.type
    if not torch.is_autocast_enabled(kind):
        return function(*args)
    with torch.autocast(kind, enabled=False):
        return function(*args)


def explain_change(error: RuntimeError, problem: Problem, shapes: Sequence[torch.Size]) -> None:
    """Raise an error that names the tensors that may be the one that was changed in-place, if that is the error."""
    found = re.search(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]", str(error))
    if found is None:
        return
    shape = tuple(int(size) for size in found[1].split(",") if size.strip())
    names = [name for name, other in zip(_names(problem), shapes, strict=True) if other == shape]
    fix = "Change it after the backward, or pass a clone."
    expected = "the values that the forward saw"
    *others, last = names
    which = f"one of {', '.join(others)} and {last}" if others else last
    raise MutationError(f"{which} (shape {shape}) was changed in place, expected {expected}. {fix}") from error


def _names(problem: Problem) -> tuple[str, ...]:
    """Return the names of the tensors saved for the backward, in order."""
    mods = [m for m in (problem.score, problem.mask) if m is not None]
    sink = () if problem.sink is None else ("sink",)
    captures = [c.name for m in mods for c in m.graph.captures]
    layout = () if problem.layout is None else problem.layout.names
    return "query", "key", "value", *captures, *layout, *sink, "the output", "lse"
