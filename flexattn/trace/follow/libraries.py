"""Which modules are libraries. Their functions and classes are treated as constants, without a guard.

C functions of a library whose result depends only on their arguments are pure. Others may read state, or the outside.
"""

from __future__ import annotations

import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

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
_PURE_MODULES = frozenset(("math", "cmath", "_operator", "_bisect", "_struct", "itertools", "_functools"))
# Modules whose C classes have pure constructors and methods. The results of those of `decimal` depend on its context.
_PURE_CLASSES = _PURE_MODULES | {
    "builtins", "operator", "functools", "collections", "types", "array", "datetime", "numpy", "torch", "torch._C",
}  # fmt: skip
_OF_THE_TIME_ZONE = frozenset(("timestamp", "astimezone", "strftime", "__format__"))  # methods of datetime's classes
# Functions of numpy that are pure, as its ufuncs are.
_OF_NUMPY = """
    all allclose amax amin any arange argmax argmin argsort around array array_equal asarray average broadcast_to
    can_cast clip concatenate count_nonzero cross cumprod cumsum diag diff digitize dot eye full geomspace identity
    inner interp isclose iscomplex isin isreal isscalar linspace logspace max mean median min nan_to_num nanmax nanmean
    nanmin nansum ndim nonzero ones outer percentile polyval prod promote_types ptp quantile ravel real repeat reshape
    result_type round searchsorted shape sinc size sort stack std sum take tile trace transpose tri tril triu unique var
    where zeros
"""
_PURE_OF_NUMPY = {id(function): function for function in map(vars(np).get, _OF_NUMPY.split())}


@lru_cache(4096)
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, torch, or torch's dependencies."""
    return module is not None and module != "__main__" and module.partition(".")[0] in _PACKAGES


def is_library_class(cls: type) -> bool:
    """Return whether a class belongs to Python or a library. A class from a nameless exec() claims to be builtin."""
    return not cls.__flags__ & HEAP_TYPE or (cls.__module__ != "builtins" and is_library(cls.__module__))


def is_pure_of_numpy(function: Any) -> bool:
    """Return whether a function of numpy is pure. A ufunc made by np.frompyfunc has loops of objects only."""
    if isinstance(function, np.ufunc):
        return not all("O" in loop for loop in function.types)
    return id(function) in _PURE_OF_NUMPY


def is_pure_function(function: types.BuiltinFunctionType) -> bool:
    """Return whether a C function of a module is pure."""
    return (function.__module__ or getattr(function.__self__, "__name__", "")) in _PURE_MODULES


def has_pure_classmethods(cls: Any) -> bool:
    """Return whether classmethods are pure: dict.fromkeys, int.from_bytes..., but not datetime.now."""
    return isinstance(cls, type) and is_library_class(cls) and cls.__module__ in {*_PURE_MODULES, "builtins"}


def is_pure_class(cls: type) -> bool:
    """Return whether the constructor of a C class is pure."""
    return is_library_class(cls) and cls.__module__ in _PURE_CLASSES


def is_pure_method(method: Any) -> bool:
    """Return whether a method of a C class is pure."""
    cls = method.__objclass__
    return is_pure_class(cls) and not (cls.__module__ == "datetime" and method.__name__ in _OF_THE_TIME_ZONE)


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
