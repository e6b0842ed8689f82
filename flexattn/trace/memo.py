"""Memo: the traces of this process, by the code of the mod that was traced.

No user's object is kept alive by it: guards hold weak references, and the key is an id, which need not be right, since
the guard decides.
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
_MOST_TRACES = 64  # of one key; the one that was made last is tried first


class Known(NamedTuple):
    """A trace, and the guard that tells where it holds."""

    guard: Guard
    traced: Traced
    source: str  # of the guard


_known: OrderedDict[tuple[Any, ...], list[Known]] = OrderedDict()
_same_code: dict[types.CodeType, int] = {}  # id of the first code object that was equal to it


def find(mod: Any, variant: tuple[Any, ...]) -> Sequence[Known]:
    """Return the traces that may hold for a mod."""
    root = _root(mod)
    found = _known.get((id(root), *variant))
    if found is None and isinstance(root, types.CodeType) and root in _same_code:  # the same source, run again
        found = _known.get((_same_code[root], *variant))
    return found or ()


def keep(mod: Any, variant: tuple[Any, ...], known: Known) -> None:
    """Keep a trace for mods of the same code."""
    root = _root(mod)
    place = id(root)
    if isinstance(root, types.CodeType):
        if len(_same_code) >= _MOST_KEYS:
            _same_code.clear()
        place = _same_code.setdefault(root, place)
    traces = _known.setdefault((place, *variant), [])
    traces.insert(0, known)
    del traces[_MOST_TRACES:]
    while len(_known) > _MOST_KEYS:
        _known.popitem(last=False)


def clear() -> None:
    """Forget all traces."""
    _known.clear()
    _same_code.clear()


def _root(mod: Any) -> object:
    """Return the code that a mod runs first, or its class."""
    while type(mod) is functools.partial:
        mod = mod.func
    mod = mod.__func__ if type(mod) is types.MethodType else mod
    return mod.__code__ if type(mod) is types.FunctionType else type(mod)
