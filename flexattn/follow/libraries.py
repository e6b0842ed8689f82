"""Which modules are libraries: their functions and classes are taken as they are, without a guard."""

from __future__ import annotations

import sys
from functools import lru_cache

_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "sympy", "functorch"}
_OURS = "flexattn"


@lru_cache(4096)
def is_library(module: str | None) -> bool:
    """Tell whether a module belongs to Python, torch, or what torch stands on."""
    return module is not None and module != "__main__" and module.partition(".")[0] in _PACKAGES


@lru_cache(4096)
def is_ours(module: str | None) -> bool:
    """Tell whether a module belongs to this package."""
    return module is not None and module.partition(".")[0] == _OURS
