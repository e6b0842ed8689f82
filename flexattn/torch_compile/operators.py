"""operators: flexattn::forward and flexattn::backward, the operators that graphs contain.

They are low-level (`Library.define`): an operator of `torch.library.custom_op` with an autograd formula takes 60 us of
host time per call. The derivative is in attention.py, outside of them. Arguments, besides query, key and value:

    captures   the tensors of score_mod, then those of mask_mod
    lists      the tensors of the mask (`block_mask/prepared.py`)
    layout     the tensors of a layout (call/layout.py), or the results of pack_rows and list_rows (sequences.py)
    sink       [B or 1, Hq or 1]
    seed       of dropout, int64 [1]
    ints       the integers among the numbers of score_mod, then of mask_mod. Then, with a layout, the lengths of the
               mask; or, with packed sequences, the length of the longest
    floats     the other numbers, as float64 tensors on the CPU: a graph would specialize on a Python float
    spec       everything else (spec.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.prepared import Origin
from flexattn.call.dropout import Dropout
from flexattn.call.layout import check_layout, check_positions
from flexattn.call.memory_order import dense_strides, order_in_memory
from flexattn.call.pose import at_rows, complete, in_layout
from flexattn.call.problem import Problem
from flexattn.call.sinks import constant_sink
from flexattn.call.validate import check_scale
from flexattn.call.varlen.block_lists import mask_of_flat
from flexattn.call.varlen.packing import Packing
from flexattn.engines import triton
from flexattn.engines.autograd import run_engine
from flexattn.engines.choice import engine_of, form_for, lse_dtype_of
from flexattn.engines.watched import is_watched
from flexattn.torch_compile.inductor import lower_to_functions
from flexattn.torch_compile.lists import equal_runs_of, mask_of_lists
from flexattn.torch_compile.repeated_operators import Key, SequenceTensors, find, keep, kind_of
from flexattn.torch_compile.sequence_form import SequenceForm
from flexattn.torch_compile.spec import bound_to, loads

NAMESPACE = "flexattn"
OPS = torch.ops.flexattn
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor[] lists, Tensor[] layout, Tensor? sink, "
    "Tensor? seed, SymInt[] ints, Tensor[] floats, float? scale, str spec"
)
_FORWARD_SCHEMA = f"({_ARGUMENTS}) -> Tensor[]"
_BACKWARD_SCHEMA = f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_ARGUMENTS}, bool[] needs) -> Tensor[]"
_EXACT = torch.Tag.needs_exact_strides  # the strides of the results follow from those of query
# A CUDA graph would record the value of a float as a constant.
_UNSAFE = torch.Tag.cudagraph_unsafe
for _suffix, _tags in (("", (_EXACT,)), (".floats", (_EXACT, _UNSAFE))):
    LIBRARY.define(f"forward{_suffix}{_FORWARD_SCHEMA}", tags=_tags)
    LIBRARY.define(f"backward{_suffix}{_BACKWARD_SCHEMA}", tags=_tags)
_function_modes = torch._C._len_torch_function_stack


def with_lists(arguments: tuple[Any, ...], captures: int = 3) -> Sequence[Any]:
    """Return the arguments of an operator whose captures are at a position. AOTInductor passes empty lists as None."""
    places = captures, captures + 1, captures + 2, captures + 5, captures + 6  # captures, lists, layout, ints, floats
    if all(arguments[i] is not None for i in places):
        return arguments
    return [[] if x is None and i in places else x for i, x in enumerate(arguments)]


def forward(*arguments: Any) -> list[Tensor]:
    """Compute flexattn::forward without torch's dispatcher, for code of Inductor."""
    if _function_modes() or is_watched():  # they shall see the operator, and not apply inside of it
        return (OPS.forward.floats if arguments[9] else OPS.forward.default)(*arguments)
    return _repeated_forward(*arguments)


def backward(*arguments: Any) -> list[Tensor]:
    """Compute flexattn::backward without torch's dispatcher, for code of Inductor."""
    if _function_modes() or is_watched():
        return (OPS.backward.floats if arguments[13] else OPS.backward.default)(*arguments)
    return _repeated_backward(*arguments)


def _dispatched_forward(*arguments: Any) -> list[Tensor]:
    return _forward(*with_lists(arguments))


def _dispatched_backward(*arguments: Any) -> list[Tensor]:
    return _backward(*with_lists(arguments, captures=7))


def _forward(*arguments: Any) -> list[Tensor]:
    return _compute_forward(None, *arguments) if is_watched() else _repeated_forward(*arguments)


def _backward(*arguments: Any) -> list[Tensor]:
    return _compute_backward(None, *arguments) if is_watched() else _repeated_backward(*arguments)


def _repeated_forward(
    query: Tensor, key: Tensor, value: Tensor, captures: list[Tensor], lists: list[Tensor], layout: list[Tensor],
    sink: Tensor | None, seed: Tensor | None, ints: list[int], floats: list[Tensor], scale: float | None, spec: str,
) -> list[Tensor]:  # fmt: skip
    """Launch the kernels of an equal forward, if there was one."""
    kind, sequences = None, None
    if sink is None and seed is None:
        kind, sequences = kind_of((query, key, value), captures, lists, layout, ints, floats, scale, spec)
        known = None if kind is None else find(kind, captures, lists, sequences)
        if known is not None:
            run, parts = known
            out, lse, largest = run(query, key, value, parts)
            return [out, lse] if largest is None else [out, lse, largest]
    kept = None if kind is None else (kind, sequences)
    return _compute_forward(kept, query, key, value, captures, lists, layout, sink, seed, ints, floats, scale, spec)


def _repeated_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    captures: list[Tensor], lists: list[Tensor], layout: list[Tensor], sink: Tensor | None, seed: Tensor | None,
    ints: list[int], floats: list[Tensor], scale: float | None, spec: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Launch the kernels of an equal backward, if there was one."""
    kept = None
    if sink is None and seed is None and not (layout and loads(spec).is_layout):
        tensors = query, key, value, d_out, out
        kind, sequences = kind_of(tensors, captures, lists, layout, ints, floats, scale, spec)
        assert kind is not None
        kind += (d_lse is None, *needs)
        kept, known = (kind, sequences), find(kind, captures, lists, sequences)
        if known is not None:
            run, parts = known
            (dq, dk, dv, of_score, _), _ = run(query, key, value, captures, parts, out, lse, d_out, d_lse)
            return [gradient for gradient in (dq, dk, dv, *of_score) if gradient is not None]
    return _compute_backward(
        kept, d_out, d_lse, out, lse, query, key, value, captures, lists, layout, sink, seed, ints, floats, scale, spec,
        needs,
    )  # fmt: skip


Kept = tuple[Key, SequenceTensors | None] | None  # how to keep what was launched


def _compute_forward(kept: Kept, *arguments: Any) -> list[Tensor]:
    """Return out, lse in the dtype of `lse_dtype_of` and, if requested, the row maxima. Keep what was launched."""
    query, key, value, captures, lists, *_ = arguments
    problem = _problem(*arguments, gradient=False)
    engine = engine_of(problem)
    problem = form_for(engine, problem)
    out, lse, largest = run_engine("forward", problem, engine.forward, problem)
    if kept is not None and engine is triton:
        kind, sequences = kept
        keep((query, key, value, *captures), lists, kind, problem, triton.known_forward(problem), sequences)
    found = [_laid_out(out, query), lse.to(lse_dtype_of(query, problem.options))]
    return found if largest is None else [*found, largest]


def _compute_backward(
    kept: Kept, d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, captures: list[Tensor], lists: list[Tensor], layout: list[Tensor], sink: Tensor | None,
    seed: Tensor | None, ints: list[int], floats: list[Tensor], scale: float | None, spec: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients requested in `needs`, for query, key, value, captures and sink. Keep what was launched."""
    of_captures = needs[3 : 3 + len(captures)]
    with torch.enable_grad():
        stored = [x.detach().requires_grad_(need) for x, need in zip((key, value), needs[1:3], strict=True)]
        leaves = [c.detach().requires_grad_(need) for c, need in zip(captures, of_captures, strict=True)]
        tensors = query.detach().requires_grad_(), stored[0], stored[1]
        problem = _problem(*tensors, leaves, lists, layout, sink, seed, ints, floats, scale, spec, gradient=True)
        engine = engine_of(problem)
        problem = form_for(engine, problem)
    of_sink = sink is not None and needs[-1]
    with torch.no_grad():
        inputs = problem, out, lse, d_out, d_lse, (needs[0], needs[1], needs[2], of_sink)
        dq, dk, dv, computed, d_sink = run_engine("backward", problem, engine.backward, *inputs)
    read = problem.key, problem.value, *(() if problem.score is None else problem.score.captures)
    found = [dq, *_of_leaves([*stored, *leaves], read, (dk, dv, *computed))]
    has_all = all((gradient is not None) == need for gradient, need in zip(found, needs, strict=False))
    if kept is not None and engine is triton and has_all:
        kind, sequences = kept
        without_sink = needs[0], needs[1], needs[2], False
        known = triton.known_backward(problem, out, d_out, d_lse is not None, without_sink)
        keep((query, key, value, *captures), lists, kind, problem, known, sequences)
    if sink is not None:
        found.append(d_sink)
    every = (query, key, value, *captures, *(() if sink is None else (sink,)))
    like = [x for x, need in zip(every, needs, strict=True) if need]
    computed = [gradient for gradient, need in zip(found, needs, strict=True) if need]
    filled = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if gradient is None else gradient
        for gradient, x in zip(computed, like, strict=True)
    ]
    heads = sum(needs[:3])
    laid_out = [_laid_out(gradient, x) for gradient, x in zip(filled[:heads], like[:heads], strict=True)]
    return [*laid_out, *(gradient.contiguous() for gradient in filled[heads:])]


def _of_leaves(
    leaves: list[Tensor], tensors: Sequence[Tensor], computed: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of key, value and captures from those of the tensors that kernels read.

    `complete` may have replaced a capture by a copy, or by a table by distance (graph/tables_by_distance.py), and
    `form_for` pages by the keys that are gathered from them.
    """
    found: list[Tensor | None] = [None] * len(leaves)
    roots, gradients = [], []
    for read, gradient in zip(tensors, computed, strict=True):
        if gradient is None:
            continue
        index = next((i for i, c in enumerate(leaves) if c is read), None)
        if index is not None:
            found[index] = gradient
        elif read.requires_grad:
            roots.append(read)
            gradients.append(gradient)
    if roots:
        inputs = [i for i, c in enumerate(leaves) if c.requires_grad]
        through = torch.autograd.grad(roots, [leaves[i] for i in inputs], gradients, allow_unused=True)
        for i, gradient in zip(inputs, through, strict=True):
            before = found[i]
            found[i] = gradient if before is None else before if gradient is None else before + gradient
    return found


def _problem(
    query: Tensor, key: Tensor, value: Tensor, captures: list[Tensor], lists: list[Tensor], layout: list[Tensor],
    sink: Tensor | None, seed: Tensor | None, ints: Sequence[int], floats: Sequence[Tensor], scale: float | None,
    spec: str, gradient: bool,
) -> Problem:  # fmt: skip
    """Return the problem that the arguments of an operator describe."""
    parsed = loads(spec)
    integers = iter(ints)
    numbers = integers, (x.item() for x in floats)
    split = 0 if parsed.score is None else len(parsed.score.captures)
    score = bound_to(parsed.score, captures[:split], *numbers)
    mask = bound_to(parsed.mask, [c.detach() if c.requires_grad else c for c in captures[split:]], *numbers)
    lengths, sequences = tuple(integers), parsed.sequences
    blocks, equal_runs = None, ()
    if parsed.form is not None:
        M, N = lengths or (query.shape[2], key.shape[2])
        blocks = mask_of_lists(lists, parsed.form, query, M, N, mask)
        Origin.of(lists[0]).check(mask)
        if mask is not None:
            equal_runs = equal_runs_of(lists, parsed.form, mask)
    if parsed.sink is not None:
        sink = constant_sink(parsed.sink, query)
    dropout = None if seed is None or parsed.drop_below is None else Dropout(parsed.drop_below, seed)
    if parsed.has_scale:
        scale = floats[-1].item()
    scale = check_scale(scale, query.shape[3])
    problem = Problem(
        query, key, value, scale, score, mask, blocks, None, equal_runs, parsed.options, sink, dropout,
        parsed.max_scores,
    )  # fmt: skip
    if sequences is not None:
        problem = _in_sequences(problem, sequences, layout, lengths)
    return complete(problem, gradient)


def _in_sequences(problem: Problem, form: SequenceForm, tensors: Sequence[Tensor], lengths: tuple[int, ...]) -> Problem:
    """Return the problem with a layout, or with packed sequences."""
    query, key, blocks = problem.query, problem.key, problem.block_mask
    T_q, T_k = query.shape[2], key.shape[2]
    if form.window is not None:
        columns, *lists = tensors
        rows = at_rows(problem, Packing.of_columns(columns, T_q), form.window)
        return rows.with_fields(block_mask=mask_of_flat(lists, (T_q, T_k), lengths[0], query.shape[1]))
    layout = check_layout(form.layout_of(tensors), query, key)
    if blocks is not None:
        check_positions(blocks.seq_lengths, layout, T_q)
    return in_layout(problem, layout, form.by_hand and blocks is not None and not blocks.is_built)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with its dims in the order of `like` in memory, as the fake kernels promise."""
    expected = dense_strides(tensor.shape, like.stride())
    if tensor.stride() == expected or tensor.numel() == 0:
        return tensor
    return tensor.new_empty_strided(tensor.shape, expected).copy_(tensor)


# Fake kernels.


def _fake_like(tensor: Tensor, width: int) -> Tensor:
    """Return [B, H, rows, width] with the dims of `tensor` in memory order, the last dim innermost."""
    order, shape = order_in_memory(tensor.stride()), tensor.shape
    empty = tensor.new_empty([*(shape[d] for d in order), width])
    return empty.permute([*(order.index(d) for d in range(3)), 3])


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> list[Tensor]:
    lower_to_functions(_OVERLOADS)  # Inductor, if there is one, runs a fake kernel before it lowers the operator
    spec = loads(str(rest[-1]))
    lse = query.new_empty(query.shape[:3], dtype=lse_dtype_of(query, spec.options))
    found = [_fake_like(query, value.shape[3]), lse]
    return [*found, query.new_empty(query.shape[:3], dtype=torch.float32)] if spec.max_scores else found


def _fake_backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> list[Tensor]:
    lower_to_functions(_OVERLOADS)
    query, key, value, captures, _, _, sink, *_, needs = rest
    found = [_fake_like(x, x.shape[3]) for x, need in zip((query, key, value), needs, strict=False) if need]
    others = (*captures, *(() if sink is None else (sink,)))
    return [*found, *(x.new_empty(x.shape) for x, need in zip(others, needs[3:], strict=True) if need)]


_KERNELS = ("forward", _dispatched_forward, _fake_forward), ("backward", _dispatched_backward, _fake_backward)
for _suffix in ("", ".floats"):
    for _name, _kernel, _fake in _KERNELS:
        for _key in ("CPU", "CUDA"):
            LIBRARY.impl(f"{_name}{_suffix}", _kernel, _key)
        torch.library.register_fake(f"{NAMESPACE}::{_name}{_suffix}", _fake, lib=LIBRARY)

_OVERLOADS = (OPS.forward.default, OPS.forward.floats, OPS.backward.default, OPS.backward.floats)
