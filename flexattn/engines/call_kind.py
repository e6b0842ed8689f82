"""call_kind: the kind of a call of flex_attention. Calls of one kind run the same kernels on other addresses.

`kind_of` runs in each call, so it is written for little host time: few functions, and no loops except
over kernel_options, captures and numbers. The guards of the mods run here, so no value is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from flexattn.block_mask import BlockMask
from flexattn.call.layout import Layout, LayoutArguments
from flexattn.call.pose import autocast
from flexattn.call.positions import at_positions, mask_at_positions
from flexattn.call.problem import Problem
from flexattn.call.varlen.arguments import Packed, PackedArguments, batch_of_rows, rows_in
from flexattn.call.varlen.mods import packed_score
from flexattn.engines.mask_state import MaskState, TraceSettings, memory_form
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.runtime.launch import allows_tf32, is_deterministic
from flexattn.runtime.tensor_forms import key_of, learned, recalled
from flexattn.torch_state.subclasses import PLAIN
from flexattn.trace.registered import registrations
from flexattn.trace.trace import recall

Key = tuple[object, ...]
_SCALES = frozenset((float, type(None)))
_LAYOUT_DTYPES = frozenset((torch.int32, torch.float32))
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_autocasts: Any = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_transforms = torch._C._are_functorch_transforms_active


class CallKind(NamedTuple):
    """The kind of a call, and its tensors."""

    key: Key
    tensors: tuple[Tensor, ...]  # query, key, value, the captures of score_mod and those of mask_mod
    score: ModGraph | None
    masked: MaskState | None
    layout: Layout | None = None  # what engines read of it
    of_mask: tuple[Tensor, ...] = ()  # with a layout: the tensors of the mask


def is_quiet() -> bool:
    """Return whether no mode, transform or profiler is active that may see a call."""
    return not (
        _function_modes()
        or _dispatch_modes()
        or _transforms()
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


def trace_settings() -> TraceSettings:
    """Return what traces depend on besides the mod (trace.variant_of)."""
    return torch.get_default_dtype(), registrations()


def kind_of(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: Any,
    kernel_options: Any, sink: Any, dropout_p: Any, max_scores: bool, layout: Any = None,
) -> CallKind | None:  # fmt: skip
    """Return the kind of a call with the arguments of `Call`; None if it may depend on more than is compared here."""
    if sink is not None or dropout_p or not is_quiet():
        return None
    state = None
    if block_mask is not None:
        state = getattr(block_mask, "_state", None)
        if state is None:
            return None
    if type(scale) not in _SCALES or scale == 0.0:  # 0.0 == -0.0
        return None
    if type(enable_gqa) is not bool or type(max_scores) is not bool:
        return None
    settings = trace_settings()
    captured: tuple[Tensor, ...] = ()
    graph, score, of_mod = None, None, ()
    if score_mod is not None:
        known = recall(score_mod, ("score", torch.float32, *settings))
        if known is None:
            return None
        (_, traced, _), read = known
        captures, numbers = traced.values(*read)
        graph = traced.graph_of(numbers)
        of_mod = (traced, tuple(map(repr, numbers)) if 0.0 in numbers else numbers)  # 0.0 == -0.0
        if layout is None:
            captured = captures
        else:
            score = BoundMod(graph, captures, numbers)
    try:
        casts = _autocasts()
        form = None if casts else recalled(query, key, value, *captured)
        if form is None:
            plain = _plain(query, key, value)
            if plain is None:
                return None
            query, key, value = plain
            form = (key_of if casts else learned)(query, key, value, *captured)
        options = frozenset([(name, type(x), x) for name, x in kernel_options.items()]) if kernel_options else None
        call_key: Key = (
            form, key.data_ptr() == value.data_ptr(), scale, enable_gqa, max_scores, settings, options,
            torch.is_grad_enabled(), allows_tf32(), is_deterministic(), *of_mod,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):  # a tensor without strides, an unknown option: the stages name it
        return None
    tensors = (query, key, value, *captured)
    if layout is not None:
        of_call = call_key, tensors, score
        if type(layout) is PackedArguments:
            return _packed_kind(*of_call, layout, settings)
        return _kind_with_layout(*of_call, layout, block_mask, settings)
    if block_mask is None or state is None:
        return CallKind(call_key, tensors, graph, None)
    if not _has_fixed_sizes(block_mask) or not state.holds(block_mask, settings):
        return None
    call_key += (state.kind, block_mask.seq_lengths, block_mask.BLOCK_SIZE)
    return CallKind(call_key, tensors + state.captures, graph, state)


def _plain(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return query, key and value as a call in an autocast region reads them. None if the engine copies them."""
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():  # kernels read memory
        return None
    return autocast(query, key, value)  # type: ignore[return-value]


def _has_fixed_sizes(blocks: BlockMask) -> bool:
    """Return whether the sizes of a mask are tuples, and not lists that the user set."""
    return type(blocks.seq_lengths) is tuple and type(blocks.BLOCK_SIZE) is tuple


def _key_of_captures(captures: Sequence[Tensor]) -> Key:
    return (*map(memory_form, captures), *[t.requires_grad for t in captures])


def _kind_with_layout(
    key: Key, tensors: tuple[Tensor, ...], score: BoundMod | None, given: LayoutArguments, blocks: BlockMask | None,
    settings: TraceSettings,
) -> CallKind | None:  # fmt: skip
    """Return the kind of a call with seqused_k, q_offsets or pages. `tensors` are query, key and value."""
    layout = _layout_of(given)
    if layout is None or type(given.kv_layout) is not str:
        return None
    graph = None
    if score is not None:
        score = at_positions(score, layout)
        graph, tensors = score.graph, tensors + score.captures
        key += _key_of_captures(score.captures)
    forms = [None if t is None else (memory_form(t), t.dtype, t.device) for t in given.tensors]
    key += (given.kv_layout, *forms)
    if blocks is None:
        return CallKind(key, tensors, graph, None, layout.read_by_engines(tensors[0], None))
    state = blocks._state
    assert state is not None  # kind_of
    if not _has_fixed_sizes(blocks) or not state.holds(blocks, settings):
        return None
    key += (state.kind, blocks.seq_lengths, blocks.BLOCK_SIZE)
    mask, equal_runs = mask_at_positions(state.bound, state.equal_runs, layout)
    captures = () if mask is None else mask.captures
    of_mask = (*captures, *[bounds for r in equal_runs for bounds in (r.starts, r.ends)])
    layout = layout.read_by_engines(tensors[0], blocks.seq_lengths)
    return CallKind(key, tensors + captures, graph, state, layout, of_mask)


def _layout_of(given: LayoutArguments) -> Layout | None:
    """Return the layout without checks; None if a tensor is not as kernels read it, or there is a ring buffer.

    Only its tensors are read: the sizes are those of the kept kernels.
    """
    if given.kv_positions is not None or given.mask_mod is not None:
        return None
    for t in given.tensors:
        if t is not None and (type(t) not in PLAIN or not t.is_contiguous() or t.dtype not in _LAYOUT_DTYPES):
            return None
    return Layout(given.seqused_k, given.q_offsets, None, given.block_table, given.k_descale, given.v_descale)


def _packed_kind(
    key: Key, tensors: tuple[Tensor, ...], score: BoundMod | None, given: PackedArguments, settings: TraceSettings
) -> CallKind | None:
    """Return the kind of a call with packed sequences. `tensors` are query, key and value, [rows, H, D] or a batch."""
    query, other = tensors[:2]
    packed = Packed.recalled(given, query, other)
    if packed is None:
        return None
    graph, bound = None, None
    if score is not None:
        score = packed_score(score, packed.packing)
        graph, tensors = score.graph, tensors + score.captures
        key += _key_of_captures(score.captures)
    if given.mask_mod is not None:
        known = recall(given.mask_mod, ("mask", torch.float32, *settings))
        if known is None:
            return None
        captures, numbers = known[0].traced.values(*known[1])
        bound = BoundMod(known[0].traced.graph_of(numbers), captures, numbers)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    mask, blocks = packed.masked(bound, (rows_in(query), rows_in(other)), query.size(1), learns)
    if blocks._state is None:
        batch = [batch_of_rows(x) if x.dim() == 3 else x for x in tensors[:3]]
        keep_packed(blocks, Problem(*batch, scale=1.0, mask=mask, block_mask=blocks))
    state = blocks._state
    assert state is not None
    key += ("packed", state.kind, blocks.seq_lengths, blocks.reach)
    return CallKind(key, tensors + mask.captures, graph, state)


def keep_packed(blocks: BlockMask, problem: Problem) -> None:
    """Keep what calls need of the block lists of packed sequences."""
    blocks._state = MaskState(blocks, None, problem)
