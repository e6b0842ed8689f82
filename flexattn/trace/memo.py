"""Memo: the traces of this process, by the code of the traced mod.

It keeps no user object alive, except code objects and objects that cannot be referenced weakly. Guards hold weak
references, and keys are ids. A reused id is harmless, because the guard decides.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from flexattn.trace.follow import Guard
from flexattn.trace.scalarize import Traced

_MOST_KEYS = 512
_MOST_TRACES = 64  # per key; the newest is tried first


class GuardedTrace(NamedTuple):
    """A trace and its guard."""

    guard: Guard
    traced: Traced
    source: str  # source code of the guard


_known: OrderedDict[tuple[Any, ...], list[GuardedTrace]] = OrderedDict()
_same_code: dict[types.CodeType, int] = {}  # code object -> id of the first equal code object


def find(mod: Any, variant: tuple[Any, ...]) -> Sequence[GuardedTrace]:
    """Return the traces whose guards may pass for a mod."""
    root = mod.__code__ if type(mod) is types.FunctionType else _root(mod)
    found = _known.get((id(root), *variant))
    if found is None and isinstance(root, types.CodeType) and root in _same_code:  # the same source, executed again
        found = _known.get((_same_code[root], *variant))
    return found or ()


def keep(mod: Any, variant: tuple[Any, ...], known: GuardedTrace) -> None:
    """Store a trace for mods with the same code."""
    root = _root(mod)
    key = id(root)
    if isinstance(root, types.CodeType):
        if len(_same_code) >= _MOST_KEYS:
            _same_code.clear()
        key = _same_code.setdefault(root, key)
    traces = _known.setdefault((key, *variant), [])
    traces.insert(0, known)
    del traces[_MOST_TRACES:]
    while len(_known) > _MOST_KEYS:
        _known.popitem(last=False)


def clear() -> None:
    """Remove all traces."""
    _known.clear()
    _same_code.clear()


def _root(mod: Any) -> object:
    """Return the code object that runs first when a mod is called, or the mod's class."""
    while type(mod) is functools.partial:
        mod = mod.func
    mod = mod.__func__ if type(mod) is types.MethodType else mod
    return mod.__code__ if type(mod) is types.FunctionType else type(mod)
