"""recorded: a call inside of a mode that records a graph (make_fx, torch.export) or gives tensors without values.

The mods are traced from Python, outside of the mode, and the operators are called inside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flexattn.block_mask import BlockMask
from flexattn.call.call import Call, Mod
from flexattn.call.layout import LayoutArguments, paged
from flexattn.call.pose import autocast
from flexattn.call.ready_heads import check_heads, heads_of
from flexattn.call.validate import check_mask_reads
from flexattn.call.wide_dtype import wide_dtype
from flexattn.errors import DtypeError, UnsupportedError, message, mod_in_messages
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.narrow import specialized
from flexattn.torch_compile.attention import call_operators
from flexattn.torch_compile.call_arguments import CallArguments, check_given, operands_of, option_texts
from flexattn.torch_compile.graph_break import as_prepared
from flexattn.torch_compile.sequence_form import described
from flexattn.torch_compile.subgraph import bind
from flexattn.torch_state.modes import is_recording, outside_of_modes
from flexattn.torch_state.subclasses import has_no_values
from flexattn.torch_state.symbols import valued
from flexattn.trace.interception import Interception
from flexattn.trace.scalarize import Kind
from flexattn.trace.trace import trace_symbolic


def recorded_call(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse and the row maxima of a call, which are tensors of the graph or have no values."""
    if any(type(mode) is Interception for mode in _get_current_function_mode_stack()):
        fix = "Call it before, and let the mod capture its result."
        raise UnsupportedError(message("flex_attention", "a call inside of a mod", "a call outside of mods", fix))
    query, key, value = autocast(call.query, call.key, call.value)
    if isinstance(call.layout, LayoutArguments):
        key, value = paged(key, value, call.layout)
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not isinstance(value, Tensor):
        raise DtypeError(message("query, key, value", "other objects", "tensors", "Pass tensors."))
    if not is_recording() and not all(map(has_no_values, (query, key, value))):
        fix = "Pass three tensors without values, or call inside of FakeTensorMode."
        found = "tensors with and without values"
        raise UnsupportedError(message("query, key, value", found, "three of one kind", fix))
    mask = _mask(call.block_mask)
    seed = None
    if call.dropout_p != 0.0:
        seed = torch.ops.aten.random.default(torch.empty(1, dtype=torch.int64, device=query.device))
    sink, number = (call.sink, None) if isinstance(call.sink, Tensor) else (None, call.sink)
    ready = None if mask is None else mask._prepared
    mask_mod = mask.mask_mod if mask is not None else None if call.layout is None else call.layout.mask_mod
    layout, lengths, sequences = described(call.layout, isinstance(call.block_mask, BlockMask))
    given = CallArguments(
        query, key, value, () if ready is None else tuple(map(_in_the_mode, ready.tensors)),
        () if mask is None else (*mask.seq_lengths, mask.B, mask.H), None if ready is None else ready.text,
        call.scale, call.enable_gqa, option_texts(call.kernel_options), sink, number, call.dropout_p, seed,
        call.max_scores, tuple(map(_in_the_mode, layout)), lengths, sequences,
    )  # fmt: skip
    check_given(given)
    check_heads(*heads_of(call.score_mod), *query.shape[1:3])
    wide = wide_dtype(query)
    score = None if call.score_mod is None else _bound(call.score_mod, "score", wide)
    keep = None if mask_mod is None else _bound(mask_mod, "mask", torch.float32)
    if mask is not None and mask is not call.block_mask and keep is not None:  # of PyTorch, and converted
        check_mask_reads(mask.B, mask.H, keep, query, by_hand=False)
    return call_operators(operands_of(given, score, keep))


def _mask(block_mask: Any) -> BlockMask | None:
    if block_mask is None:
        return None
    with outside_of_modes():
        return as_prepared(block_mask)


def _bound(mod: Mod, kind: Kind, score_dtype: torch.dtype) -> BoundMod:
    """Trace a mod, and bind it to the tensors that it captures."""
    with outside_of_modes():
        traced, record = trace_symbolic(mod, kind, score_dtype)
        if record.computes_from_sizes:
            sizes = [*record.numbers, *(n for t in record.tensors for n in t.shape)]
            _fix_sizes(sizes, mod_in_messages(kind, traced.graph.name))
    bound = bind(traced, [_in_the_mode(t) for t in record.tensors], record.numbers)
    if not all(type(n) in (int, float) for n in bound.numbers):
        return bound
    with outside_of_modes():
        literal = specialized(bound.graph, bound.numbers)
    return BoundMod(literal, bound.captures)


def _fix_sizes(sizes: Sequence[Any], mod: str) -> None:
    """Guard dynamic sizes from which a mod computed numbers: those are constants of the graph."""
    dynamic = [n for n in sizes if isinstance(n, (torch.SymInt, torch.SymFloat)) and not n.node.expr.is_number]
    if dynamic and not torch.compiler.is_exporting():  # make_fx checks no guards
        found, expected = "a number computed from a dynamic size (n ** 0.5, n / 2)", "integer arithmetic with sizes"
        fix = "Use tracing_mode='real', or torch.export."
        raise UnsupportedError(message(mod, found, expected, fix))
    with valued(mod):
        for size in dynamic:
            float(size)


def _in_the_mode(tensor: Tensor) -> Tensor:
    """Return a tensor that an active FakeTensorMode accepts. Most of these modes reject tensors with values."""
    if has_no_values(tensor):
        return tensor
    modes: list[Any] = [m for m in _get_current_dispatch_mode_stack() if type(m).__name__ == "FakeTensorMode"]
    strict = next((m for m in modes if not m.allow_non_fake_inputs), None)
    return tensor if strict is None else strict.from_tensor(tensor, static_shapes=True)
