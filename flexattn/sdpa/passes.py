"""passes: the forward and the backward of a call, without autograd, which PyTorch does around the operators.

A dense pass without dropout launches the kernels of an equal one. The first forward without dropout is a call of
flex_attention, and that of packed sequences one of varlen_attn. Other passes pose the problem and run the engine. The
posed problem of a dense call depends on sizes only and is cached. The engine caches the launches.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.api import attend_call, attend_rows
from flexattn.block_mask import BlockMask
from flexattn.block_mask.dense import all_partial
from flexattn.call.call import Call
from flexattn.call.dropout import Dropout
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.call.varlen.arguments import PackedArguments, batch_of_rows, rows_of_batch
from flexattn.engines import triton
from flexattn.engines.autograd import run_engine, tensors_of, with_tensors
from flexattn.engines.call_kind import is_quiet
from flexattn.engines.choice import engine_of, lse_dtype_of
from flexattn.engines.mask_state import NOTHING
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import band, causal, shifted
from flexattn.process.config import settings
from flexattn.process.events import fallback
from flexattn.runtime.known import Pointer
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember
from flexattn.torch_state.lasting import is_capturing, kept_for_graphs, lasting
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.subclasses import PLAIN

Window = tuple[int, int]
ALL = (-1, -1)  # the window of a call without one
_PROBLEMS = 256
_NEEDS = (True, True, True, False)  # query, key, value, and no sink


class Form(NamedTuple):
    """What a call computes, besides its tensors."""

    window: Window  # keys before and after the query's own; the last query and the last key are aligned; -1: all
    scale: float | None
    packed: PackedArguments | None  # None: query is [B, Hq, M, D], otherwise [T_q, Hq, D]
    options: tuple[tuple[str, object], ...] = ()  # kernel_options


class _Repeated(NamedTuple):
    """A pass whose launches are known."""

    run: Any  # a KnownForward or a KnownBackward
    parts: list[Pointer]
    mask: BlockMask | None  # it holds the block lists that `parts` points to


_passes: OrderedDict[tuple[object, ...], _Repeated] = OrderedDict()
CACHES.append(_passes)


def _kind(form: Form, *tensors: Tensor) -> tuple[object, ...]:
    """Return what the launches of a dense pass with query, key, value and, in a backward, out and d_out depend on."""
    _, key, value = tensors[:3]
    return (
        form, allows_tf32(), is_deterministic(), key.data_ptr() == value.data_ptr(),
        *[(t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.data_ptr() & 15) for t in tensors],
    )  # fmt: skip


def _may_repeat(form: Form, *tensors: Tensor) -> bool:
    """Whether nothing but the kind of a pass decides what it launches."""
    return form.scale != 0.0 and is_quiet() and PLAIN.issuperset(map(type, tensors))  # 0.0 == -0.0


def _repeated(form: Form, *tensors: Tensor) -> _Repeated | None:
    """Return the dense pass of this kind, unless it must not be launched directly."""
    known = _passes.get(_kind(form, *tensors)) if _may_repeat(form, *tensors) else None
    return None if known is None else kept_for_graphs(tensors[0].device, known)


def _may_keep(form: Form, *tensors: Tensor) -> bool:
    """Whether the launches of a pass may be kept. In a CUDA graph the mask may belong to the graph."""
    allowed = _may_repeat(form, *tensors) and not settings().debug and not is_capturing(tensors[0].device)
    return allowed and not any(t.is_neg() for t in tensors)


def _keep(form: Form, problem: Problem, run: Any, *tensors: Tensor) -> None:
    if run is not None and not problem.batch_invariant:
        pointers = list(run.kernels.pointers(problem))
        remember(_passes, _kind(form, *tensors), _Repeated(run, pointers, problem.block_mask))


def repeated_forward(query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor] | None:
    """Return out and lse of a dense forward, if one of this kind was computed before. It needs no further checks."""
    known = _repeated(form, query, key, value)
    return None if known is None else known.run(query, key, value, known.parts)[:2]


def repeated_backward(
    query: Tensor, key: Tensor, value: Tensor, form: Form, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return dq, dk and dv of a dense backward, if one of this kind was computed before."""
    if lse.dtype != torch.float32 or not lse.is_contiguous() or type(lse) not in PLAIN:
        return None
    if lse.shape != query.shape[:3] or lse.device != query.device:
        return None
    known = _repeated(form, query, key, value, out, d_out)
    return None if known is None else known.run(query, key, value, (), known.parts, out, lse, d_out, None)[0][:3]


def forward(query: Tensor, key: Tensor, value: Tensor, form: Form, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
    """Return out, like query, and lse: [B, Hq, M], or [Hq, T_q] of packed sequences."""
    if dropout is not None:
        return _forward_with_dropout(query, key, value, form, dropout)
    call = call_of(query, key, value, form)
    if form.packed is not None:
        return attend_rows(call)
    found = attend_call(call)
    if _may_keep(form, query, key, value):
        problem = _posed(query, key, value, form, None)
        if engine_of(problem) is triton:
            _keep(form, problem, triton.known_forward(problem), query, key, value)
    return found[:2]


@undisturbed("scaled_dot_product_attention")
def _forward_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, form: Form, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    problem = _posed(query, key, value, form, dropout)
    engine = engine_of(problem)
    out, lse, _ = run_engine("forward", problem, engine.forward, problem)
    return (out, lse) if form.packed is None else (rows_of_batch(out), lse.squeeze(0))


@undisturbed("backward of scaled_dot_product_attention")
def backward(
    query: Tensor, key: Tensor, value: Tensor, form: Form, dropout: Dropout | None, out: Tensor, lse: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv from what `forward` returned."""
    problem = _posed(query, key, value, form, dropout)
    if form.packed is not None:
        out, lse, d_out = batch_of_rows(out), lse[None], batch_of_rows(d_out)
    lse = lse.to(lse_dtype_of(query, form.options)).contiguous()
    engine = engine_of(problem)
    dq, dk, dv, _, _ = run_engine("backward", problem, engine.backward, problem, out, lse, d_out, None, _NEEDS)
    dense = dropout is None and form.packed is None
    if dense and engine is triton and _may_keep(form, query, key, value, out, d_out):
        known = triton.known_backward(problem, out, d_out, False, _NEEDS)
        _keep(form, problem, known, query, key, value, out, d_out)
    assert dq is not None and dk is not None and dv is not None
    return (dq, dk, dv) if form.packed is None else (rows_of_batch(dq), rows_of_batch(dk), rows_of_batch(dv))


def call_of(query: Tensor, key: Tensor, value: Tensor, form: Form) -> Call:
    """Return the call of flex_attention. Of packed sequences its tensors are [rows, H, D], as `attend_rows` takes."""
    mask = mask_for(query, key, form.window) if form.packed is None else None
    options = dict(form.options) or None
    return Call(query, key, value, None, mask, form.scale, True, options, None, 0.0, False, form.packed)


def _posed(query: Tensor, key: Tensor, value: Tensor, form: Form, dropout: Dropout | None) -> Problem:
    """Return the problem, with what a backward needs."""
    if form.packed is not None:
        problem = _pose(batch_of_rows(query), batch_of_rows(key), batch_of_rows(value), form)
    elif is_capturing(query.device):
        problem = _pose(query, key, value, form)
    else:
        sizes = query.shape, key.shape, value.shape, query.dtype, query.device
        problem = with_tensors(_problem_of_sizes(*sizes, form), (query, key, value))
    return problem if dropout is None else problem.with_fields(dropout=dropout)


@lru_cache(_PROBLEMS)
def _problem_of_sizes(
    query: torch.Size, key: torch.Size, value: torch.Size, dtype: torch.dtype, device: torch.device, form: Form
) -> Problem:
    """Return the problem of a dense call without its tensors. One element stands for each of them."""
    one = torch.empty((), dtype=dtype, device=device)
    problem = _pose(one.expand(query), one.expand(key), one.expand(value), form)
    assert len(tensors_of(problem)) == 3  # masks of windows capture no tensors
    return with_tensors(problem, [NOTHING] * 3)


def _pose(query: Tensor, key: Tensor, value: Tensor, form: Form) -> Problem:
    with torch.inference_mode(False), torch.enable_grad():
        leaf: Any = torch.empty((), dtype=query.dtype, device=query.device, requires_grad=True)
        posed = pose(call_of(leaf.expand(query.shape), key, value, form))
    return posed.with_fields(query=query)


_masks: OrderedDict[tuple[object, ...], BlockMask] = OrderedDict()
CACHES.append(_masks)


def mask_for(query: Tensor, key: Tensor, window: Window) -> BlockMask | None:
    """Return the mask of a window over query [B, Hq, M, D] and key [B, Hkv, N, D]; None if all keys are in it."""
    M, N = query.shape[2], key.shape[2]
    left, right = window
    window = -1 if left >= N - 1 else left, -1 if right >= M - 1 else right
    if window == ALL or 0 in (M, N):
        return None
    sizes = window, M, N, query.device
    mask = _masks.get(sizes)
    if mask is not None:
        return kept_for_graphs(query.device, mask)
    if is_capturing(query.device):
        fallback("sdpa in a CUDA graph", "no block is skipped: call once with these lengths before the capture")
        return _mask_without_lists(*sizes)
    mask = lasting(query.device, _built, *sizes)
    remember(_masks, sizes, mask)
    return mask


def _mod_of(window: Window, M: int, N: int) -> Any:
    mod = causal if window == (-1, 0) else band(*window)
    return mod if M == N else shifted(mod, N - M)


def _built(window: Window, M: int, N: int, device: torch.device) -> BlockMask:
    return create_block_mask(_mod_of(window, M, N), None, None, M, N, device=device)


def _mask_without_lists(window: Window, M: int, N: int, device: torch.device) -> BlockMask:
    """Return the mask with all blocks partial. Making it waits for nothing."""
    listed = all_partial(M, N, device)
    return BlockMask.from_runs(
        listed.kv_runs, listed.q_runs, 1, 1, listed.seq_lengths, listed.BLOCK_SIZE, _mod_of(window, M, N),
        full_overhangs=False,
    )  # fmt: skip
