"""repeated_calls: a call of flex_attention of a known kind. It is not checked, posed or planned again.

The first call of a kind goes through all stages (api.py). If its kernels depend only on its CallKind, it leaves a
RepeatedCall. A later call of this kind makes its allocations and launches its kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flexattn.block_mask import BlockMask
from flexattn.call.call import Call
from flexattn.call.layout import Layout, LayoutArguments
from flexattn.call.pose import mask_of
from flexattn.call.problem import Problem
from flexattn.call.varlen.arguments import PackedArguments, batch_of_rows, rows_of_batch
from flexattn.compile.arguments import Part
from flexattn.engines import triton
from flexattn.engines.autograd import AttentionFunction, explain_change, gradients, tensors_of, with_tensors
from flexattn.engines.call_kind import CallKind, Key, is_quiet, keep_packed, kind_of, trace_settings
from flexattn.engines.mask_state import NOTHING, MaskState, reads_of
from flexattn.engines.triton import KnownBackward, KnownForward
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen
from flexattn.runtime.known import KnownKernels, Pointer
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember
from flexattn.torch_state.transforms import is_legacy_batchedtensor, refuse_batched
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import count_hits

Result = tuple[Tensor, Tensor, Tensor | None]


@frozen
class RepeatedCall:
    """A kind of call, and its kernels."""

    forward: KnownForward
    problem: Problem  # without tensors
    score_captures: int  # number of the tensors that score_mod captures
    learns: bool  # a backward may follow
    shapes: tuple[torch.Size, ...]  # of what is saved for the backward
    of_rows: bool = False  # query, key, value and out are [rows, H, D], and lse is [H, rows]
    backwards: dict[Key, KnownBackward] = field(default_factory=dict)

    def __call__(self, kind: CallKind) -> Result:
        """Compute out, lse and, if requested, row maxima."""
        if self.learns:  # `keep` keeps no call that learns and has a layout
            return _apply(self, kind.masked, *kind.tensors)
        query, key, value, *captures = kind.tensors
        if kind.layout is None:
            parts = self.parts(self.forward.kernels, captures, kind.masked)
        else:
            parts = _parts_with_layout(self.forward.kernels, captures[: self.score_captures], kind, kind.layout)
        return self.forward(query, key, value, parts)

    def for_rows(self) -> RepeatedCall:
        """Return the same call for tensors [rows, H, D]."""
        *of_tensors, of_out, of_lse = self.shapes
        wide = [torch.Size((s[2], s[1], s[3])) for s in (*of_tensors[:3], of_out)]
        shapes = (*wide[:3], *of_tensors[3:], wide[3], of_lse[1:])
        return replace(self, forward=self.forward.for_rows(), shapes=shapes, of_rows=True, backwards={})

    def parts(self, kernels: KnownKernels, captures: Sequence[Tensor], masked: MaskState | None) -> list[Pointer]:
        """Return the pointers to what kernels read of a problem without a layout."""
        found: list[Pointer] = []
        for part in kernels.parts:
            if part == "score":
                found += map(kernels.pointer, captures[: self.score_captures])
            else:
                assert masked is not None
                found += masked.pointers(part)
        return found

    def problem_of(self, masked: MaskState | None) -> Problem:
        """Return the problem with a mask, and still without other tensors."""
        if masked is None:
            return self.problem
        return self.problem.with_fields(block_mask=masked.blocks, mask=masked.bound, equal_runs=masked.equal_runs)


def _parts_with_layout(
    kernels: KnownKernels, captures: Sequence[Tensor], kind: CallKind, layout: Layout
) -> list[Pointer]:
    """Return the pointers to what kernels read of a problem with a layout."""
    found: list[Pointer] = []
    part: Part
    for part in kernels.parts:
        match part:
            case "score":
                found += map(kernels.pointer, captures)
            case "mask":
                found += map(kernels.pointer, kind.of_mask)
            case "kv_runs":
                assert kind.masked is not None
                found += kind.masked.pointers(part)
            case _:
                found.append(kernels.pointer(getattr(layout, part)))
    return found


_calls: OrderedDict[Key, RepeatedCall] = OrderedDict()
CACHES.append(_calls)


def repeated(*arguments: Any) -> Result | None:
    """Compute a call of a known kind, with the arguments of `Call`. Return None if its kind is not known."""
    kind = kind_of(*arguments)
    if kind is None:
        return None
    call = _calls.get(kind.key)
    if call is None:
        return None
    count_hits((kind.score is not None) + (kind.masked is not None))
    return call(kind)


def keep(arguments: Sequence[Any], problem: Problem) -> None:
    """Keep the call that was just computed as this problem, if later calls of its kind can repeat it."""
    if not is_quiet() or problem.batch_invariant or problem.sink is not None or problem.dropout is not None:
        return
    blocks = problem.block_mask
    if settings().debug or (blocks is not None and not _keep_mask(blocks, arguments, problem)):
        return
    kind, forward = kind_of(*arguments), triton.known_forward(problem)
    if kind is None or forward is None or kind.key in _calls:
        return
    tensors, score_captures = tensors_of(problem), 0
    if problem.score is not None:
        score_captures = len(problem.score.captures)
        # `complete` may have given the mod another graph (read_tables_by_distance, pair_axes_last).
        if problem.score.graph is not kind.score:
            return
    if any(t.device != problem.query.device or t.is_neg() for t in kind.tensors):
        return
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if learns and problem.layout is not None:
        return
    without = with_tensors(problem, [NOTHING] * len(tensors)).with_fields(block_mask=None, mask=None, equal_runs=())
    shapes = (*[t.shape for t in tensors], torch.Size(forward.out[0]), torch.Size(forward.lse[0]))
    remember(_calls, kind.key, RepeatedCall(forward, without, score_captures, learns, shapes))


def keep_rows(rows: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Keep a call of packed sequences also for the arguments `rows`, whose tensors are [rows, H, D].

    It needs no views, which autograd would record: 8 of them take more host time than the attention.
    """
    kind, of_rows = kind_of(*arguments), kind_of(*rows)
    known = None if kind is None else _calls.get(kind.key)
    if known is not None and of_rows is not None and of_rows.key not in _calls:
        remember(_calls, of_rows.key, known.for_rows())


def _keep_mask(blocks: BlockMask, arguments: Sequence[Any], problem: Problem) -> bool:
    """Keep what calls need of a mask. Return whether there is something to keep."""
    call = Call(*arguments)
    layout = call.layout
    if type(layout) is PackedArguments:
        if blocks._state is None:
            keep_packed(blocks, problem)
        return True
    if blocks is not call.block_mask or (blocks._record is not None and blocks._record.mod is not blocks._mask_mod):
        return False
    now = trace_settings()
    if blocks._state is not None and blocks._state.holds(blocks, now):
        return True
    if problem.layout is not None:
        if not blocks.is_built or type(layout) is not LayoutArguments:
            return False
        mask = mask_of(blocks, problem.query)
        problem = problem.with_fields(mask=mask, equal_runs=blocks.equal_runs(), layout=None)
    reads = reads_of(blocks, now)
    if reads is None:
        return False
    blocks._state = MaskState(blocks, reads, problem)
    return True


class _RepeatedAttention(AttentionFunction):
    """Attention of a known kind.

    Its first backward runs through `gradients` and the engine, which caches a KnownBackward. Later backwards launch
    that one here. A backward with a tensor that must be copied first, such as the expanded d_out of
    `out.sum().backward()`, always runs through `gradients`; the engine then launches its own cached KnownBackward.
    """

    @staticmethod
    def forward(ctx: Any, call: RepeatedCall, masked: MaskState | None, *tensors: Tensor) -> Result:  # type: ignore[override]
        query, key, value, *captures = tensors
        out, lse, largest = call.forward(query, key, value, call.parts(call.forward.kernels, captures, masked))
        ctx.call = call, masked, _saved_tensors_hooks(False) is not None
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    @uncompiled
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        call: RepeatedCall
        call, masked, is_hooked = ctx.call
        if d_lse is not None or (d_out is not None and is_legacy_batchedtensor(d_out)):
            refuse_batched(d_out, d_lse)
        needs, key = ctx.needs_input_grad, None
        try:  # saved tensors are read once: under a checkpoint a second read raises
            saved = ctx.saved_tensors
        except RuntimeError as error:
            explain_change(error, call.problem_of(masked), call.shapes)
            raise
        if d_out is not None and not torch.is_grad_enabled() and is_quiet() and not d_out.is_neg():
            # Hooks of saved tensors (save_on_cpu, checkpoints) may return tensors with other strides.
            forms = tuple([(t.stride(), t.data_ptr() & 15, t.dtype, t.is_neg()) for t in saved]) if is_hooked else ()
            key = needs, d_out.stride(), d_out.data_ptr() & 15, d_lse is None, allows_tf32(), is_deterministic(), forms
            known = call.backwards.get(key)
            if known is not None:
                return _gradients(known, call, saved, masked, d_out, d_lse, needs)
        problem = call.problem_of(masked)
        if call.of_rows:
            *tensors, out, lse = saved
            saved = (*map(batch_of_rows, tensors[:3]), *tensors[3:], batch_of_rows(out), lse[None])
            d_out = None if d_out is None else batch_of_rows(d_out)
            d_lse = None if d_lse is None else d_lse[None]
        found: Sequence[Tensor | None] = gradients(triton, problem, needs[2:], d_out, d_lse, saved)
        if key is not None and d_out is not None:
            of_call, wanted = with_tensors(problem, saved[:-2]), (*needs[2:5], False)
            known = triton.known_backward(of_call, saved[-2], d_out, d_lse is not None, wanted)
            if known is not None:
                call.backwards[key] = known.for_rows() if call.of_rows else known
        if call.of_rows:
            found = (*[None if x is None else rows_of_batch(x) for x in found[:3]], *found[3:])
        return None, None, *found


_private: Any = torch._C
_saved_tensors_hooks = _private._autograd._top_saved_tensors_default_hooks  # of the current thread, None without
# The apply of Function's base class, which calls _RepeatedAttention.forward. Function.apply would first unwrap
# functorch's tensors; kind_of refuses calls with them.
_apply: Any = getattr(super(Function, _RepeatedAttention), "apply")  # noqa: B009
# The class of `ctx`. Autograd calls its `apply`, which would only look for a vjp in place of the backward.
_context: Any = getattr(_RepeatedAttention, "_backward_cls", None)
if _context is not None:
    _context.apply = _RepeatedAttention.backward


def _gradients(
    known: KnownBackward, call: RepeatedCall, saved: tuple[Tensor, ...], masked: MaskState | None, d_out: Tensor,
    d_lse: Tensor | None, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    query, key, value, *captures, out, lse = saved
    parts = call.parts(known.kernels, captures, masked)
    (dq, dk, dv, of_score, _), _ = known(query, key, value, captures, parts, out, lse, d_out, d_lse)
    if not known.learned:
        return None, None, dq, dk, dv, *(None,) * (len(needs) - 5)
    of_score = tuple([g if need else None for g, need in zip(of_score, needs[5:], strict=False)])
    of_mask = (None,) * (len(needs) - 5 - call.score_captures)
    return None, None, dq, dk, dv, *of_score, *of_mask
