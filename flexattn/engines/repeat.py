"""repeat: a call of flex_attention of a known kind. It is not checked, posed or planned again.

The first call of a kind goes through all stages (api.py). If its kernels depend only on what `find_call` compares, it
leaves a RepeatedCall. A later call with an equal key makes its allocations and launches its kernels. The guards of its
mods run at each call, so no value is stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from flexattn.block_mask import BlockMask
from flexattn.call.layout import Layout, LayoutArguments
from flexattn.call.packed import Packed, PackedArguments, packed_mask, packed_score
from flexattn.call.pose import autocast, mask_of
from flexattn.call.positions import at_positions, mask_at_positions
from flexattn.call.problem import Problem
from flexattn.compile.arguments import PARTS, Part
from flexattn.engines import triton
from flexattn.engines.autograd import AttentionFunction, gradients, tensors_of, unpack, with_captures, with_tensors
from flexattn.engines.triton import KnownBackward, KnownForward
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.frozen import FrozenMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen
from flexattn.runtime.known import Pointer, pointers_of
from flexattn.runtime.launch import CACHES, allows_tf32, is_deterministic, remember
from flexattn.torch_state.subclasses import PLAIN
from flexattn.torch_state.transforms import refuse_batched
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.follow import Guard
from flexattn.trace.registered import registrations
from flexattn.trace.trace import count_hits, recall

Result = tuple[Tensor, Tensor, Tensor | None]
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


def _is_quiet() -> bool:
    """Return whether no mode, transform or profiler is active that may see a call."""
    return not (
        _function_modes()
        or _dispatch_modes()
        or _transforms()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


class KnownMask:
    """What calls need of a mask whose mod reads the same tensors, versions and numbers as before. The mask keeps it."""

    __slots__ = ("addresses", "bound", "captures", "kind", "kv_runs", "parts", "reads", "runs", "versions")

    def __init__(self, mask: BlockMask, reads: _Reads | None, problem: Problem) -> None:
        bound, runs = problem.mask, problem.equal_runs
        self.kv_runs, self.reads = mask.kv_runs, reads
        tensors = () if reads is None else reads.tensors
        self.versions = [t._version for t in tensors]
        self.addresses = [t.data_ptr() for t in tensors]
        self.bound, self.runs = bound, runs
        self.captures = () if bound is None else bound.captures
        # The pointers to each part of a problem that is a part of the mask. Those of q_runs are made when asked for.
        on_gpu = problem.query.is_cuda
        self.parts: dict[Part, list[Pointer]] = {"kv_runs": pointers_of(PARTS["kv_runs"](problem), on_gpu)}
        if bound is not None:
            self.parts["mask"] = pointers_of(PARTS["mask"](problem), on_gpu)
        kind = (
            mask.B, mask.H, mask.full_overhangs, mask.is_built, mask.q_runs is None, mask.device,
            None if bound is None else (bound.graph, bound.numbers, *map(_memory_form, bound.captures)),
            *[(r.capture, r.places.shape, r.places.stride(), r.places.data_ptr() & 15) for r in runs],
        )  # fmt: skip
        self.kind = _kinds.get(kind)
        if self.kind is None:
            self.kind = _MaskKind()
            remember(_kinds, kind, self.kind)

    def holds(self, mask: BlockMask, default: tuple[object, ...]) -> bool:
        """Return whether the mask, and what its mod reads, are as they were."""
        assert self.reads is not None
        guard, before, known, numbers = self.reads
        found = guard(mask._mask_mod) if before == default and mask.kv_runs is self.kv_runs else None
        if found is None or found[1] != numbers:
            return False
        for now, tensor, version, address in zip(found[0], known, self.versions, self.addresses, strict=True):
            if now is not tensor or now._version != version or now.data_ptr() != address:
                return False
        return True

    def pointers(self, part: Part, mask: BlockMask) -> list[Pointer]:
        """Return the pointers to a part."""
        found = self.parts.get(part)
        if found is None:
            assert part == "q_runs" and mask.q_runs is not None
            tensors = mask.q_runs.tensors
            found = self.parts[part] = pointers_of(tensors, tensors[0].is_cuda)
        return found


class _MaskKind:
    """Stands for all masks with which calls run the same kernels on the same layouts."""


_kinds: OrderedDict[tuple[object, ...], _MaskKind] = OrderedDict()


class _Reads(NamedTuple):
    """What a mask_mod reads, and its guard, which finds it."""

    guard: Guard
    default: tuple[object, ...]  # the settings under which it was traced
    tensors: Sequence[Tensor]
    numbers: Sequence[int | float]


def _memory_form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.data_ptr() & 15, t.is_neg()


_SCALES = frozenset((float, type(None)))
_Masked = tuple[BlockMask, KnownMask]


class _Found(NamedTuple):
    """The kind of a call and its tensors."""

    key: tuple[object, ...]
    tensors: tuple[Tensor, ...]  # query, key, value, the captures of score_mod and those of mask_mod
    score: ModGraph | None
    masked: _Masked | None
    layout: Layout | None = None  # what engines read of it
    of_mask: tuple[Tensor, ...] = ()  # with a layout: the tensors of the mask


@frozen
class RepeatedCall:
    """A kind of call, and its kernels."""

    forward: KnownForward
    problem: Problem  # without tensors
    scored: int  # number of the tensors that score_mod captures
    learns: bool  # a backward may follow
    shapes: tuple[torch.Size, ...]  # of what is saved for the backward
    backwards: dict[tuple[object, ...], KnownBackward] = field(default_factory=dict)

    def __call__(self, found: _Found) -> Result:
        """Compute out, lse and, if requested, row maxima."""
        if self.learns:
            return _RepeatedAttention.apply(self, found.masked, *found.tensors)
        return self.run(found.tensors, found.masked, found)

    def run(self, tensors: Sequence[Tensor], masked: _Masked | None, found: _Found | None = None) -> Result:
        """Run the forward. `found` is needed if the call has a layout."""
        query, key, value = tensors[:3]
        captures, names = tensors[3 : 3 + self.scored], self.forward.kernels.parts
        if found is None or found.layout is None:
            parts = _parts(names, query, captures, masked)
        else:
            parts = _parts_at(names, captures, found, found.layout)
        return self.forward(query, key, value, parts)

    def problem_of(self, masked: _Masked | None) -> Problem:
        """Return the problem with a mask, and still without other tensors."""
        if masked is None:
            return self.problem
        mask, state = masked
        return self.problem.with_fields(block_mask=mask, mask=state.bound, equal_runs=state.runs)


def _parts(names: Sequence[Part], query: Tensor, captures: Sequence[Tensor], masked: _Masked | None) -> list[Pointer]:
    """Return the pointers to parts of a problem."""
    found: list[Pointer] = []
    for part in names:
        if part == "score":
            found += pointers_of(captures, query.is_cuda)
        else:
            assert masked is not None
            mask, state = masked
            found += state.pointers(part, mask)
    return found


def _parts_at(names: Sequence[Part], captures: Sequence[Tensor], found: _Found, layout: Layout) -> list[Pointer]:
    """Return the pointers to parts of a problem with a layout."""
    pointers: list[Pointer] = []
    on_gpu = found.tensors[0].is_cuda
    for part in names:
        match part:
            case "score":
                pointers += pointers_of(captures, on_gpu)
            case "mask":
                pointers += pointers_of(found.of_mask, on_gpu)
            case "kv_runs":
                assert found.masked is not None
                mask, state = found.masked
                pointers += state.pointers(part, mask)
            case _:
                pointers += pointers_of((getattr(layout, part),), on_gpu)
    return pointers


_calls: OrderedDict[tuple[object, ...], RepeatedCall] = OrderedDict()
CACHES.extend((_calls, _kinds))


def repeated(*arguments: Any) -> Result | None:
    """Compute a call of a known kind, with the arguments of `Call`. Return None if its kind is not known."""
    found = find_call(*arguments)
    if found is None:
        return None
    call = _calls.get(found.key)
    if call is None:
        return None
    count_hits((arguments[3] is not None) + (found.masked is not None))
    return call(found)


def find_call(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: Any,
    kernel_options: Any, sink: Any, dropout_p: Any, max_scores: bool, layout: Any = None,
) -> _Found | None:  # fmt: skip
    """Return the kind of a call; None if it may depend on more than is compared here."""
    if sink is not None or dropout_p or not _is_quiet():
        return None
    state = packed = at = None
    is_packed = type(layout) is PackedArguments
    if layout is not None and not is_packed:
        at = _layout_of(layout)
        if at is None:
            return None
    if block_mask is not None:
        state = getattr(block_mask, "_known", None)
        if state is None:
            return None
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN and type(scale) in _SCALES):
        return None
    if type(enable_gqa) is not bool or type(max_scores) is not bool or scale == 0.0:  # 0.0 == -0.0
        return None
    if is_packed:
        packed = Packed.without_lengths(layout, query, key)
        if packed is None:
            return None
    default = torch.get_default_dtype(), registrations()
    try:
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = autocast(query, key, value)
        options = frozenset([(name, type(x), x) for name, x in kernel_options.items()]) if kernel_options else None
        place = (
            query.shape, query.stride(), query.dtype, query.device, query.data_ptr() & 15, query.requires_grad,
            key.shape, key.stride(), key.dtype, key.device, key.data_ptr() & 15, key.requires_grad,
            value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15, value.requires_grad,
            key.data_ptr() == value.data_ptr(),
            scale, enable_gqa, max_scores, default, options, torch.is_grad_enabled(), allows_tf32(), is_deterministic(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):  # a tensor without strides, an unknown option: the stages name it
        return None
    captures: tuple[Tensor, ...] = ()
    graph = None
    if score_mod is not None:
        known = recall(score_mod, ("score", torch.float32, *default))
        if known is None:
            return None
        (_, traced, _), read = known
        captures, numbers = traced.values(*read)
        graph = traced.graph_of(numbers)
        if packed is not None:
            bound = packed_score(BoundMod(graph, tuple(captures), tuple(numbers)), packed.packing)
            graph, captures = bound.graph, bound.captures
        elif at is not None:
            bound = at_positions(BoundMod(graph, tuple(captures), tuple(numbers)), at)
            graph, captures = bound.graph, bound.captures
        values = tuple(map(repr, numbers)) if 0.0 in numbers else numbers  # 0.0 == -0.0
        place += (traced, values, *map(_memory_form, captures), *[t.requires_grad for t in captures])
    if at is not None:
        assert type(layout) is LayoutArguments
        forms = [None if t is None else (_memory_form(t), t.dtype, t.device) for t in _tensors_of(layout)]
        place += (layout.kv_layout, *forms)
    if packed is not None:
        assert type(layout) is PackedArguments
        found = _packed_blocks(packed, layout, (query, key, value, *captures), default)
        if found is None:
            return None
        of_mask, block_mask, state = found
        place += ("packed", state.kind, block_mask.seq_lengths, max_scores)
        return _Found(place, (query, key, value, *captures, *of_mask), graph, (block_mask, state))
    if block_mask is None or state is None:
        layout = None if at is None else at.read_by_engines(query, None)
        return _Found(place, (query, key, value, *captures), graph, None, layout)
    sizes = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    if type(sizes[0]) is not tuple or type(sizes[1]) is not tuple or not state.holds(block_mask, default):
        return None
    place += (state.kind, *sizes)
    if at is None:
        return _Found(place, (query, key, value, *captures, *state.captures), graph, (block_mask, state))
    mask, runs = mask_at_positions(state.bound, state.runs, at)
    tensors = () if mask is None else mask.captures
    of_mask = (*tensors, *[bounds for r in runs for bounds in (r.starts, r.ends)])
    layout = at.read_by_engines(query, sizes[0])
    return _Found(place, (query, key, value, *captures, *tensors), graph, (block_mask, state), layout, of_mask)


def _tensors_of(layout: LayoutArguments) -> tuple[Tensor | None, ...]:
    return (*layout[:4], *layout[5:])


def _layout_of(layout: LayoutArguments) -> Layout | None:
    """Return the layout without checks; None if a tensor is not as kernels read it, or there is a ring buffer."""
    if layout.kv_positions is not None:
        return None
    for t in _tensors_of(layout):
        if t is not None and (type(t) not in PLAIN or not t.is_contiguous() or t.dtype not in _LAYOUT_DTYPES):
            return None
    return Layout(
        layout.seqused_k, layout.q_offsets, None, layout.block_table, layout.k_descale, layout.v_descale
    )  # fmt: skip


_LAYOUT_DTYPES = frozenset((torch.int32, torch.float32))


def _packed_blocks(
    packed: Packed, given: PackedArguments, tensors: Sequence[Tensor], default: tuple[object, ...]
) -> tuple[tuple[Tensor, ...], BlockMask, KnownMask] | None:
    """Return what the mask of a packed call captures, its block lists, and what calls need of them."""
    bound = None
    if given.mask_mod is not None:
        known = recall(given.mask_mod, ("mask", torch.float32, *default))
        if known is None:
            return None
        captures, numbers = known[0].traced.values(*known[1])
        bound = BoundMod(known[0].traced.graph_of(numbers), tuple(captures), tuple(numbers))
    mask = packed_mask(bound, packed.packing, packed.window)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    query, key, value = tensors[:3]
    blocks = packed.blocks_of(mask, (query.size(2), key.size(2)), query.size(1), learns)
    if blocks._known is None:
        return (
            mask.captures,
            blocks,
            _keep_packed(blocks, Problem(query, key, value, 1.0, mask=mask, block_mask=blocks)),
        )
    return mask.captures, blocks, blocks._known


def _keep_packed(mask: BlockMask, problem: Problem) -> KnownMask:
    """Keep what calls need of the mask of packed sequences. Its lists are found by the tensors they were computed from.

    They are kept for as long as these live, so they must not keep these.
    """
    state = mask._known = KnownMask(mask, None, problem)
    state.bound, state.captures = with_captures(state.bound, [_NOTHING] * len(state.captures)), ()
    return state


def _guard_of(mod: Any, default: tuple[object, ...]) -> Guard | None:
    """Return the guard of a mask_mod, if its trace is known and its captures are the user's own tensors."""
    if type(mod) is FrozenMod:
        return lambda other: (mod.captures, mod.numbers) if other is mod else None
    known = recall(mod, ("mask", torch.float32, *default))
    return None if known is None or known[0].traced.picks is None else known[0].guard


def keep(arguments: Sequence[Any], problem: Problem) -> None:
    """Keep the call that was just computed as this problem, if later calls of its kind can repeat it."""
    if not _is_quiet() or problem.batch_invariant or problem.sink is not None or problem.dropout is not None:
        return
    mask = problem.block_mask
    if settings().debug or (mask is not None and not _keep_mask(mask, arguments, problem)):
        return
    found, forward = find_call(*arguments), triton.known_forward(problem)
    if found is None or forward is None or found.key in _calls:
        return
    tensors, scored = tensors_of(problem), 0
    if problem.score is not None:
        scored = len(problem.score.captures)
        # Captured tensors may have been replaced by tables, which other graphs read, or copied.
        if problem.score.graph is not found.score:
            return
    if any(t.device != problem.query.device or t.is_neg() for t in found.tensors):
        return
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if learns and problem.layout is not None:
        return
    without = with_tensors(problem, [_NOTHING] * len(tensors)).with_fields(block_mask=None, mask=None, equal_runs=())
    shapes = (*[t.shape for t in tensors], torch.Size(forward.out[0]), torch.Size(forward.lse[0]))
    remember(_calls, found.key, RepeatedCall(forward, without, scored, learns, shapes))


_NOTHING = torch.empty(0, device="cpu")


def _keep_mask(mask: BlockMask, arguments: Sequence[Any], problem: Problem) -> bool:
    """Keep what calls need of a mask. Return whether there is something to keep."""
    given = arguments[4]
    if type(arguments[-1]) is PackedArguments:
        if mask._known is None:
            _keep_packed(mask, problem)
        return True
    if mask is not given or (mask._record is not None and mask._record.mod is not mask._mask_mod):
        return False
    default = torch.get_default_dtype(), registrations()
    if mask._known is not None and mask._known.holds(mask, default):
        return True
    guard = _guard_of(mask._mask_mod, default)
    found = None if guard is None else guard(mask._mask_mod)
    if guard is None or found is None:
        return False
    tensors, numbers = found
    if problem.layout is not None:
        if not mask.is_built or type(arguments[-1]) is not LayoutArguments:
            return False
        problem = problem.with_fields(mask=mask_of(mask, problem.query), equal_runs=mask.equal_runs(), layout=None)
    if any(isinstance(n, float) and n == 0.0 for n in numbers):  # 0.0 == -0.0
        return False
    if any(t.is_inference() or t.is_neg() or t.device != mask.device for t in tensors):
        return False
    mask._known = KnownMask(mask, _Reads(guard, default, tensors, numbers), problem)
    return True


class _RepeatedAttention(AttentionFunction):
    """Attention of a known kind. Its backward is known from the second one on."""

    @staticmethod
    def forward(ctx: Any, call: RepeatedCall, masked: _Masked | None, *tensors: Tensor) -> Result:  # type: ignore[override]
        out, lse, largest = call.run(tensors, masked)
        ctx.call, ctx.masked = call, masked
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    @uncompiled
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        call: RepeatedCall = ctx.call
        refuse_batched(d_out, d_lse)
        needs, key = ctx.needs_input_grad, None
        # Once: a checkpoint does not allow it twice.
        saved = unpack(ctx, lambda: call.problem_of(ctx.masked), call.shapes)
        if d_out is not None and not torch.is_grad_enabled() and _is_quiet():
            key = needs, d_out.stride(), d_out.data_ptr() & 15, d_lse is None, allows_tf32(), is_deterministic()
            known = call.backwards.get(key)
            if known is not None:
                return _gradients(known, saved, call.scored, ctx.masked, d_out, d_lse, needs)
        problem = call.problem_of(ctx.masked)
        found: Sequence[Tensor | None] = gradients(triton, problem, needs[2:], d_out, d_lse, saved)
        if key is not None and d_out is not None:
            of_call, wanted = with_tensors(problem, saved[:-2]), (*needs[2:5], False)
            known = triton.known_backward(of_call, saved[-2], d_out, d_lse is not None, wanted)
            if known is not None:
                call.backwards[key] = known
        return None, None, *found


def _gradients(
    known: KnownBackward, saved: tuple[Tensor, ...], scored: int, masked: _Masked | None, d_out: Tensor,
    d_lse: Tensor | None, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    query, key, value = saved[:3]
    captures, out, lse = saved[3 : 3 + scored], saved[-2], saved[-1]
    parts = _parts(known.kernels.parts, query, captures, masked)
    wanted = needs[2], needs[3], needs[4], False
    (dq, dk, dv, captured, _), _ = known(query, key, value, captures, parts, out, lse, d_out, d_lse, wanted)
    if captures:
        captured = tuple([g if need else None for g, need in zip(captured, needs[5:], strict=False)])
    of_mask = (None,) * (len(needs) - 5 - scored)
    return None, None, dq, dk, dv, *captured, *of_mask
