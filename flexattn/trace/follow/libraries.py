"""Which modules are libraries: their functions and classes are taken as they are, without a guard."""

from __future__ import annotations

import sys
from functools import lru_cache

_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "sympy", "functorch"}
_OURS = "flexattn"
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types without it are of C and cannot be changed


@lru_cache(4096)
def is_library(module: str | None) -> bool:
    """Tell whether a module belongs to Python, torch, or what torch stands on."""
    return module is not None and module != "__main__" and module.partition(".")[0] in _PACKAGES


def is_library_class(cls: type) -> bool:
    """Tell whether a class is Python's own or a library's. One of exec() without a name says that it is of builtins."""
    return not cls.__flags__ & HEAP_TYPE or (cls.__module__ != "builtins" and is_library(cls.__module__))


@lru_cache(4096)
def is_ours(module: str | None) -> bool:
    """Tell whether a module belongs to this package."""
    return module is not None and module.partition(".")[0] == _OURS
