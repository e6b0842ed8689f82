"""operators: flexattn::forward and flexattn::backward, the operators that graphs contain.

They are low-level (`Library.define`): an operator of `torch.library.custom_op` with an autograd formula takes 60 us of
host time per call. The derivative is in attention.py, outside of them. Arguments, besides query, key and value:

    captures   the tensors of score_mod, then those of mask_mod
    lists      the tensors of the mask (`block_mask/prepared.py`)
    sink       [B or 1, Hq or 1]
    seed       of dropout, int64 [1]
    ints       the integers among the numbers of score_mod, then of mask_mod
    floats     the other numbers, as float64 tensors on the CPU: a graph would specialize on a Python float
    spec       everything else (spec.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.prepared import Origin
from flexattn.call.dropout import Dropout
from flexattn.call.pose import complete
from flexattn.call.problem import Problem
from flexattn.call.sinks import constant_sink
from flexattn.call.validate import check_scale
from flexattn.engines import triton
from flexattn.engines.autograd import without_autocast
from flexattn.engines.choice import engine_of, lse_dtype_of
from flexattn.engines.watched import is_watched
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import narrowed
from flexattn.torch_compile.lists import equal_runs_of, mask_of_lists
from flexattn.torch_compile.repeated_operators import Arguments, find, keep, key_of, memory_form
from flexattn.torch_compile.spec import loads

NAMESPACE = "flexattn"
OPS = torch.ops.flexattn
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor[] lists, Tensor? sink, Tensor? seed, "
    "SymInt[] ints, Tensor[] floats, float? scale, str spec"
)
_FORWARD = f"({_ARGUMENTS}) -> Tensor[]"
_BACKWARD = f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_ARGUMENTS}, bool[] needs) -> Tensor[]"
_EXACT = torch.Tag.needs_exact_strides  # the strides of the results follow from those of query
# A CUDA graph would record the value of a float as a constant.
_UNSAFE = torch.Tag.cudagraph_unsafe
for _suffix, _tags in (("", (_EXACT,)), (".floats", (_EXACT, _UNSAFE))):
    _LIBRARY.define(f"forward{_suffix}{_FORWARD}", tags=_tags)
    _LIBRARY.define(f"backward{_suffix}{_BACKWARD}", tags=_tags)

Gradient = tuple[bool, ...]


def forward(
    query: Tensor, key: Tensor, value: Tensor, captures: list[Tensor], lists: list[Tensor], sink: Tensor | None,
    seed: Tensor | None, ints: list[int], floats: list[Tensor], scale: float | None, spec: str,
) -> list[Tensor]:  # fmt: skip
    """Return out, lse in the dtype of `lse_dtype_of` and, if requested, the row maxima."""
    given = Arguments(query, key, value, captures, lists, sink, seed, ints, floats, scale, spec)
    kind = None if is_watched() else key_of(given)
    known = None if kind is None else find(given, kind)
    if known is not None:
        out, lse, largest = known[0].run(query, key, value, known[1])
        return [out, lse] if largest is None else [out, lse, largest]
    problem = _problem(*given, gradient=False)
    engine = engine_of(problem)
    out, lse, largest = without_autocast(problem, engine.forward, problem)
    if kind is not None and engine is triton:
        keep(given, kind, problem, triton.known_forward(problem))
    found = [_laid_out(out, query), lse.to(lse_dtype_of(query, problem.options))]
    return found if largest is None else [*found, largest]


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    captures: list[Tensor], lists: list[Tensor], sink: Tensor | None, seed: Tensor | None, ints: list[int],
    floats: list[Tensor], scale: float | None, spec: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients requested in `needs`, for query, key, value, captures and sink."""
    arguments = Arguments(query, key, value, captures, lists, sink, seed, ints, floats, scale, spec)
    kind = None if is_watched() else key_of(arguments, d_lse is None, *needs, memory_form(d_out), memory_form(out))
    known = None if kind is None else find(arguments, kind)
    if known is not None:
        wanted = needs[0], needs[1], needs[2], False
        (dq, dk, dv, of_score, _), _ = known[0].run(
            query, key, value, captures, known[1], out, lse, d_out, d_lse, wanted
        )
        return [gradient for gradient in (dq, dk, dv, *of_score) if gradient is not None]
    of_captures = needs[3 : 3 + len(captures)]
    with torch.enable_grad():
        given = [c.detach().requires_grad_(need) for c, need in zip(captures, of_captures, strict=True)]
        problem = _problem(query, key, value, given, lists, sink, seed, ints, floats, scale, spec, gradient=True)
    of_sink = sink is not None and needs[-1]
    engine = engine_of(problem)
    with torch.no_grad():
        inputs = problem, out, lse, d_out, d_lse, (needs[0], needs[1], needs[2], of_sink)
        dq, dk, dv, computed, d_sink = without_autocast(problem, engine.backward, *inputs)
    found = [dq, dk, dv, *_of_given(given, problem.score, computed)]
    has_all = all((gradient is not None) == need for gradient, need in zip(found, needs, strict=False))
    if kind is not None and engine is triton and has_all:
        wanted = needs[0], needs[1], needs[2], False
        keep(arguments, kind, problem, triton.known_backward(problem, out, d_out, d_lse is not None, wanted))
    if sink is not None:
        found.append(d_sink)
    every = (query, key, value, *captures, *(() if sink is None else (sink,)))
    like = [x for x, need in zip(every, needs, strict=True) if need]
    computed = [gradient for gradient, need in zip(found, needs, strict=True) if need]
    wanted = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if gradient is None else gradient
        for gradient, x in zip(computed, like, strict=True)
    ]
    heads = sum(needs[:3])
    laid_out = [_laid_out(gradient, x) for gradient, x in zip(wanted[:heads], like[:heads], strict=True)]
    return [*laid_out, *(gradient.contiguous() for gradient in wanted[heads:])]


def _of_given(given: list[Tensor], score: BoundMod | None, computed: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the given captures from those of the captures that kernels read.

    `complete` may have replaced a capture by a copy, or by a table by distance (graph/tables_by_distance.py).
    """
    found: list[Tensor | None] = [None] * len(given)
    roots, gradients = [], []
    for read, gradient in zip(() if score is None else score.captures, computed, strict=True):
        if gradient is None:
            continue
        place = next((i for i, c in enumerate(given) if c is read), None)
        if place is not None:
            found[place] = gradient
        elif read.requires_grad:
            roots.append(read)
            gradients.append(gradient)
    if roots:
        inputs = [i for i, c in enumerate(given) if c.requires_grad]
        through = torch.autograd.grad(roots, [given[i] for i in inputs], gradients, allow_unused=True)
        for i, gradient in zip(inputs, through, strict=True):
            before = found[i]
            found[i] = gradient if before is None else before if gradient is None else before + gradient
    return found


def _problem(
    query: Tensor, key: Tensor, value: Tensor, captures: list[Tensor], lists: list[Tensor], sink: Tensor | None,
    seed: Tensor | None, ints: Sequence[int], floats: Sequence[Tensor], scale: float | None, text: str, gradient: bool,
) -> Problem:  # fmt: skip
    """Return the problem that the arguments of an operator describe."""
    spec = loads(text)
    numbers = iter(ints), (x.item() for x in floats)
    split = 0 if spec.score is None else len(spec.score.captures)
    score = _bound(spec.score, captures[:split], *numbers)
    mask = _bound(spec.mask, [c.detach() if c.requires_grad else c for c in captures[split:]], *numbers)
    blocks, runs = None, ()
    if spec.form is not None:
        blocks = mask_of_lists(lists, spec.form, query, key)
        if mask is not None:
            Origin.of(lists[0]).check(mask)
            runs = equal_runs_of(lists, spec.form, mask)
    if spec.sink is not None:
        sink = constant_sink(spec.sink, query)
    dropout = None if seed is None or spec.drop_below is None else Dropout(spec.drop_below, seed)
    if spec.has_scale:
        scale = floats[-1].item()
    scale = check_scale(scale, query.shape[3])
    problem = Problem(
        query, key, value, scale, score, mask, blocks, None, runs, spec.options, sink, dropout, spec.max_scores
    )
    return complete(problem, gradient)


def _bound(
    graph: ModGraph | None, captures: Sequence[Tensor], ints: Iterator[int], floats: Iterator[float]
) -> BoundMod | None:
    if graph is None:
        return None
    numbers = tuple([next(floats if n.dtype == torch.float64 else ints) for n in graph.numbers])
    return BoundMod(narrowed(graph, numbers) if numbers else graph, tuple(captures), numbers, wide=graph)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with its dims in the order of `like` in memory, as the fake kernels promise."""
    expected = _strides(tensor.shape, like.stride())
    if tensor.stride() == expected or tensor.numel() == 0:
        return tensor
    return tensor.new_empty_strided(tensor.shape, expected).copy_(tensor)


@lru_cache(4096)
def _strides(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense [B, H, rows, width] whose first three dims are in the order of other strides."""
    strides, step = [0, 0, 0, 1], shape[3]
    for d in reversed(_order(like)):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def _order(strides: Sequence[int]) -> list[int]:
    """Return the first three dims from the outermost to the innermost in memory, as engines lay out their results."""
    return [0, 1, 2] if 0 in strides[:3] else sorted(range(3), key=lambda d: -strides[d])


# Fake kernels.


def _fake_like(tensor: Tensor, width: int) -> Tensor:
    """Return [B, H, rows, width] with the dims of `tensor` in memory order, the last dim innermost."""
    order, shape = _order(tensor.stride()), tensor.shape
    empty = tensor.new_empty([*(shape[d] for d in order), width])
    return empty.permute([*(order.index(d) for d in range(3)), 3])


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> list[Tensor]:
    spec = loads(str(rest[-1]))
    lse = query.new_empty(query.shape[:3], dtype=lse_dtype_of(query, spec.options))
    found = [_fake_like(query, value.shape[3]), lse]
    return [*found, query.new_empty(query.shape[:3], dtype=torch.float32)] if spec.max_scores else found


def _fake_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> list[Tensor]:
    query, key, value, captures, _, sink, *_, needs = rest
    found = [_fake_like(x, x.shape[3]) for x, need in zip((query, key, value), needs, strict=False) if need]
    others = (*captures, *(() if sink is None else (sink,)))
    return [*found, *(x.new_empty(x.shape) for x, need in zip(others, needs[3:], strict=True) if need)]


for _suffix in ("", ".floats"):
    for _name, _kernel, _fake in (("forward", forward, _fake_forward), ("backward", backward, _fake_backward)):
        for _key in ("CPU", "CUDA"):
            _LIBRARY.impl(f"{_name}{_suffix}", _kernel, _key)
        torch.library.register_fake(f"{NAMESPACE}::{_name}{_suffix}", _fake, lib=_LIBRARY)
