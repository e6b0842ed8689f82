"""Trace: a score_mod or mask_mod in Python -> BoundMod. Its ModGraph is cached.

A trace runs the mod on 0-d tensors (`recording`), and again if the run shows that an assumption was wrong. The FX
graph is then split (`scalarize`). Operations on captured tensors alone form a *prologue* that torch runs at each call,
under autograd. The rest becomes scalar expressions.

What the run read becomes a guard (`follow`). At each call, the guards of traces for the mod's code (`memo`) read the
same locations again. If one passes, it returns this call's tensors and numbers. Otherwise the mod is retraced.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.errors import ModError, RetraceWarning, UnsupportedError, message, mod_in_messages
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.frozen import FrozenMod
from flexattn.graph.nodes import MASK_INPUTS, SCORE_INPUTS
from flexattn.mods.kinds import call_of_factory
from flexattn.process.events import debug, is_logging
from flexattn.process.forks import Lock
from flexattn.process.places import place
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.transforms import outside
from flexattn.trace import memo
from flexattn.trace.failed_guard import reason_of
from flexattn.trace.follow import ReadLog, guard_of
from flexattn.trace.follow.libraries import frames_of_ours, is_ours
from flexattn.trace.interception import explain_operator
from flexattn.trace.operator_calls import Refused, UnknownOperator
from flexattn.trace.recording import Decompositions, Leaf, record_body, record_run
from flexattn.trace.registered import meaning_of, registrations
from flexattn.trace.scalar_tape import NotScalar
from flexattn.trace.scalarize import Kind, RecordedGraph, Traced, scalarize
from flexattn.trace.score_reductions import refuse_score_reductions

Mod = Callable[..., Any]

_lock = Lock()
_stats = {"traces": 0, "hits": 0}
_failed_guards: dict[str, int] = {}  # mod and reason -> number of traces
_MOST_REASONS = 1000
_retraced: dict[tuple[str, str], int] = {}  # (location, reason) -> number of retraces
_warned: set[tuple[str, str]] = set()  # those of them that a RetraceWarning has told
_MOST_RETRACED = 1000


def stats() -> dict[str, int]:
    """Return how many calls traced, and how many used a cached trace."""
    return dict(_stats)


def retraced() -> dict[str, int]:
    """Return how often mods were traced at each call, by the place of the mod and the reason."""
    return {f"{location}: {reason}" if location else reason: n for (location, reason), n in _retraced.items()}


def failed_guards() -> dict[str, int]:
    """Return how often a mod with a trace was traced again, by the mod and what differed."""
    return dict(_failed_guards)


def _count_failed_guard(reason: str) -> None:
    debug("trace", f"again, because a guard failed: {reason}")
    if reason not in _failed_guards and len(_failed_guards) >= _MOST_REASONS:
        reason = "other reasons"
    _failed_guards[reason] = _failed_guards.get(reason, 0) + 1


def variant_of(kind: Kind, score_dtype: torch.dtype) -> tuple[object, ...]:
    """Return what distinguishes traces of one mod."""
    return kind, score_dtype, torch.get_default_dtype(), registrations()


def trace(mod: Mod, kind: Kind, score_dtype: torch.dtype = torch.float32) -> BoundMod:
    """Return `mod` as a graph, with the captured tensors and numbers of this call.

    Gradients are those of the recorded operations; `detach` and `torch.no_grad` stop them. A mask_mod has no gradient.
    A `torch.autograd.Function` in a score_mod is rejected, because its own backward would not be used.
    """
    if type(mod) is FrozenMod and kind == "mask":
        return mod.bound
    variant = variant_of(kind, score_dtype)
    known = recall(mod, variant)
    if known is not None:
        (_, traced, _), found = known
        count_hits(1)
        return traced.bind(*found, guarded=True)
    with _lock, torch.inference_mode(False), outside():
        known_before = memo.find(mod, variant)
        reason = reason_of(known_before[0], mod) if known_before else ""
        traced, record = _trace_anew(mod, kind, score_dtype)
        _stats["traces"] += 1
        if reason:
            _count_failed_guard(f"{kind}_mod {traced.graph.name} ({traced.graph.location}): {reason}")
        if not record.reason:
            guard, source = guard_of(record, traced.conditions)
            memo.keep(mod, variant, memo.GuardedTrace(guard, traced, source))
        if is_logging():
            how = f"traced at each call: {record.reason}" if record.reason else "kept"
            debug("trace", f"{kind}_mod {traced.graph.location} ({how})\n{traced.graph}")
    if record.reason:
        _warn(kind, traced, record)
    return traced.bind(record.tensors, record.numbers, guarded=not record.reason)


def recall(
    mod: Mod, variant: tuple[object, ...]
) -> tuple[memo.GuardedTrace, tuple[Sequence[Tensor], Sequence[int | float]]] | None:
    """Return the trace of a mod whose guard passes, with the tensors and numbers that the mod reads now."""
    for known in memo.find(mod, variant):
        found = known.guard(mod)
        if found is not None:
            return known, found
    return None


def count_hits(count: int) -> None:
    """Count calls that used a cached trace."""
    _stats["hits"] += count


def _warn(kind: Kind, traced: Traced, record: ReadLog) -> None:
    """Warn once about a mod that is traced at each call. If it may only initialize something, skip its first call."""
    key = (traced.graph.location, record.reason)
    count = _retraced.get(key, 0) + 1
    if len(_retraced) < _MOST_RETRACED:
        _retraced[key] = count
    if key not in _warned and (count > 1 or not record.may_end):
        if len(_warned) < _MOST_RETRACED:
            _warned.add(key)
        called = mod_in_messages(kind, traced.graph.name)
        where = f" ({traced.graph.location})" if traced.graph.location else ""
        warnings.warn(
            f"{called}{where} is traced at each call: {record.reason}. Move it out of the mod: "
            f"compute it before the call, and let the mod capture a tensor or a number.",
            RetraceWarning,
            stacklevel=frames_of_ours(),
        )


def trace_symbolic(mod: Mod, kind: Kind, score_dtype: torch.dtype) -> tuple[Traced, ReadLog]:
    """Trace a mod whose captured tensors may be those of a graph, or may have no values. Nothing is cached.

    Modes that record a graph must not be active. The trace is then bound to the tensors and numbers of the record.
    """
    with _lock, torch.inference_mode(False), outside():
        return _trace_anew(mod, kind, score_dtype, symbolic=True)


@undisturbed("flexattn")
def _trace_anew(mod: Mod, kind: Kind, score_dtype: torch.dtype, symbolic: bool = False) -> tuple[Traced, ReadLog]:
    _check_kind(mod, kind)
    name = mod_name(mod, kind)
    called = mod_in_messages(kind, name)
    _check_call(mod, kind, name)
    reads: list[ReadLog] = []

    def run_mod(decompositions: Decompositions, scalar: bool) -> RecordedGraph:
        scalar = scalar and not symbolic
        recorded, read = record_run(mod, kind, called, score_dtype, decompositions, scalar, symbolic)
        reads.append(read)
        return recorded

    return _scalarized(run_mod, kind, name, score_dtype, location_of(mod)), reads[-1]


def trace_body(
    body: Mod, kind: Kind, leaves: Sequence[Leaf], name: str, location: str, score_dtype: torch.dtype = torch.float32
) -> Traced:
    """Trace `body(*scalars, *leaves)`, a mod whose captured tensors and numbers are arguments.

    Another tracer has already found them (torch.compile lifts what a mod captures), and guards what the mod read.
    """
    called = mod_in_messages(kind, name)
    with _lock, torch.inference_mode(False), outside():
        return _scalarized(
            lambda decompositions, _: record_body(body, kind, called, score_dtype, decompositions, leaves),
            kind, name, score_dtype, location,
        )  # fmt: skip


def _scalarized(
    run_mod: Callable[[Decompositions, bool], RecordedGraph],
    kind: Kind,
    name: str,
    score_dtype: torch.dtype,
    location: str,
) -> Traced:
    """Record, adding decompositions until every operator has a row in `aten.TABLES`.

    `run_mod(decompositions, scalar)`: with `scalar`, on a ScalarTape if the mod is scalar.
    """
    called = mod_in_messages(kind, name)
    decompositions: Decompositions = {}
    asked: UnknownOperator | None = None
    scalar = True
    while True:
        try:
            recorded = run_mod(decompositions, scalar)
            if not decompositions:
                refuse_score_reductions(recorded.graph, recorded.inputs, called, location)
            return scalarize(recorded, kind, name, score_dtype, location)
        except NotScalar:
            scalar = False
        except UnknownOperator as unknown:
            scalar = False  # decompositions need fake tensors
            target = unknown.node.target
            decomposition = None if isinstance(unknown, Refused) else _decomposition(target)
            if asked is None or not str(target).startswith("prims"):  # prims come from decompositions, not from users
                asked = unknown
            if decomposition is None or target in decompositions:
                what = explain_operator(unknown if unknown.reason else asked)
                raise UnsupportedError(f"{called}: found {what}") from None
            decompositions[target] = decomposition


def _decomposition(target: Any) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table
    from torch._refs import nn  # noqa: F401  (registers more decompositions)

    return meaning_of(target) or decomposition_table.get(target)


# Checks that do not run the mod.


def mod_name(mod: Mod, kind: Kind) -> str:
    """Return the name of the user's function, as an identifier."""
    inner = _function_of(mod)
    named = (type, functools._lru_cache_wrapper, torch.jit.ScriptFunction)
    has_name = inspect.isroutine(inner) or isinstance(inner, named) or is_ours(type(inner).__module__)
    name: Any = getattr(inner if has_name else type(inner), "__name__")  # noqa: B009
    return name if name.isidentifier() else f"{kind}_mod"


def _function_of(mod: Mod) -> Any:
    """Return the function that partials finally call. No attributes of other objects are read: they may be computed."""
    inner: Any = mod
    while isinstance(inner, functools.partial):
        inner = inner.func
    return inner.__func__ if inspect.ismethod(inner) else inner


def location_of(mod: Mod) -> str:
    """Return the place of the code of a mod, or an empty string if it is not written in Python."""
    inner = _function_of(mod)
    inner = type(inner).forward if isinstance(inner, torch.nn.Module) else inner
    inner = inner if inspect.isfunction(inner) else getattr(type(inner), "__call__", None)  # noqa: B004
    code = getattr(inner, "__code__", None)
    return place(code.co_filename, code.co_firstlineno) if code is not None else ""


def _check_kind(mod: Mod, kind: Kind) -> None:
    """Raise for an object that is no mod."""
    if isinstance(mod, upstream.BlockMask):
        raise block_mask_as_mod(kind)
    inputs = ", ".join(SCORE_INPUTS if kind == "score" else MASK_INPUTS)
    if isinstance(mod, Tensor):
        found = f"a tensor, {str(mod.dtype).removeprefix('torch.')} {list(mod.shape)}"
        read = f"bias[{', '.join(MASK_INPUTS[-mod.dim() :])}]" if 0 < mod.dim() <= 4 else "bias[q_idx, kv_idx]"
        fix = f"Read it in a function: lambda {inputs}: {'score + ' if kind == 'score' else ''}{read}."
        if kind == "mask":
            fix = fix.replace("bias", "keep")
    elif isinstance(mod, type):
        found, fix = f"the class {mod.__name__}", f"Pass an instance: {mod.__name__}(...)."
    elif not callable(mod):
        name = type(mod).__name__
        found, fix = f"{'an' if name[0] in 'aeiou' else 'a'} {name}", "Pass a function."
    else:
        return
    raise ModError(message(f"{kind}_mod", found, f"a callable {kind}_mod({inputs})", fix))


def block_mask_as_mod(kind: Kind) -> ModError:
    """Return the error for a BlockMask that is given as a mod."""
    inputs = ", ".join(SCORE_INPUTS if kind == "score" else MASK_INPUTS)
    fix = (
        "Pass it as block_mask." if kind == "score" else "Pass its mask_mod, block_mask.mask_mod, or it as block_mask."
    )
    return ModError(message(f"{kind}_mod", "a BlockMask", f"a callable {kind}_mod({inputs})", fix))


def _check_call(mod: Mod, kind: Kind, name: str) -> None:
    """Raise unless `mod` accepts the positional arguments of its kind."""
    inputs, others = (SCORE_INPUTS, MASK_INPUTS) if kind == "score" else (MASK_INPUTS, SCORE_INPUTS)
    wanted = f"{kind}_mod({', '.join(inputs)})"
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    where = f" at {location_of(mod)}" if location_of(mod) else ""
    names = tuple(signature.parameters)
    if names != inputs and sorted(names) == sorted(inputs):
        found, fix = f"{name}{signature}{where}", "Arguments are passed by position: reorder the parameters."
        raise ModError(message(f"{kind}_mod", found, f"the order {', '.join(inputs)}", fix))
    if _binds(signature, len(inputs)):
        return
    fix = f"Give it {len(inputs)} positional parameters."
    if (call := call_of_factory(mod)) is not None:
        fix = f"Call it: {call}."
    if _binds(signature, len(others)):
        fix = (
            "It looks like a mask_mod: pass it as block_mask=create_block_mask(mask_mod, ...), or as mask_mod= to "
            "show, explain and varlen_attn."
            if kind == "score"
            else "It looks like a score_mod: pass it as score_mod=."
        )
    raise ModError(f"{kind}_mod: found {name}{signature}{where}, expected a callable {wanted}. {fix}")


def _binds(signature: inspect.Signature, count: int) -> bool:
    """Return whether `count` positional arguments fit: all parameters without default, or *args."""
    required = [p for p in signature.parameters.values() if p.default is p.empty]
    if any(p.kind is p.KEYWORD_ONLY for p in required):
        return False
    positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in required)
    return positional == count or (variadic and positional < count)
