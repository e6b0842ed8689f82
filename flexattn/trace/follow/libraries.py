"""Which modules are libraries. Their functions and classes are treated as constants, without a guard."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

_PACKAGES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "sympy", "functorch"}
_OURS = "flexattn"
_FOLDER = str(Path(__file__).parents[2] / "x")[:-1]  # with the separator
# The modules of the package that define mods (test_follow.py), or what mods may read of a mask. Functions of the others
# run without a guard.
OUR_MODS = (
    "flexattn.mods", "flexattn.layout", "flexattn.block_mask.slices", "flexattn.block_mask.mask",
    "flexattn.integrations",
)  # fmt: skip
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types without it are static C types and cannot be changed


@lru_cache(4096)
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, torch, or torch's dependencies."""
    return module is not None and module != "__main__" and module.partition(".")[0] in _PACKAGES


def is_library_class(cls: type) -> bool:
    """Return whether a class belongs to Python or a library. A class from a nameless exec() claims to be builtin."""
    return not cls.__flags__ & HEAP_TYPE or (cls.__module__ != "builtins" and is_library(cls.__module__))


@lru_cache(4096)
def is_ours(module: str | None) -> bool:
    """Return whether a module belongs to this package."""
    return module is not None and module.partition(".")[0] == _OURS


def frames_of_ours() -> int:
    """Return the number of frames of this package between the caller and the user's call, for warnings.warn."""
    frame, count = sys._getframe(1), 1
    # A function of torch that runs our code (install_as_torch_flex) has the globals of torch's module.
    while frame is not None and (
        is_ours(frame.f_globals.get("__name__")) or frame.f_code.co_filename.startswith(_FOLDER)
    ):
        frame, count = frame.f_back, count + 1
    return count
