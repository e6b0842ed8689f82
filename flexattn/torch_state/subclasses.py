"""Plain tensors, whose memory contains their values with strides. Other tensors are rejected as arguments and captures.

A subclass with its own operations may have no memory (a fake tensor), part of the values (a DTensor), or encoded
values (a quantized tensor). A subclass that only adds Python methods is plain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flexattn.errors import UnsupportedError, message

PLAIN: frozenset[type] = frozenset((Tensor, Parameter))
_STRIDED = torch.strided
_DEFAULT_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)

# How to get a plain tensor, by class name, because most of these modules are imported only when used.
_FIXES = {
    "FakeTensor": "It has no values: call on tensors that do, outside of torch.export, make_fx and FakeTensorMode.",
    "FunctionalTensor": "It records a graph: call outside of torch.export and make_fx.",
    "DTensor": "Pass {0}.to_local() if it is sharded by batch or heads, else {0}.full_tensor().",
    "AsyncCollectiveTensor": "Wait for it: {0}.wait().",
    "MaskedTensor": "Pass {0}.to_tensor(0), and exclude keys with a mask_mod.",
    "UninitializedParameter": "Initialize it: {0}.materialize(shape), or run the module once.",
    "UninitializedBuffer": "Initialize it: {0}.materialize(shape), or run the module once.",
}
_NESTED = "Pad to one length, or pack the sequences and use mods.document."
_OTHER_FUNCTION = "Pass {0}.as_subclass(torch.Tensor) if its values are those of a plain tensor."
_OTHER_DISPATCH = "Convert it before the call with a method of its class ({0}.dequantize(), say)."


def is_plain(x: Tensor) -> bool:
    """Return whether `x` has its values in strided memory, and its operations are those of torch.Tensor."""
    return (type(x) in PLAIN or not _overrides(type(x))) and x.layout is _STRIDED and not x.is_nested


def has_no_values(x: Tensor) -> bool:
    """Return whether `x` stands for a tensor in a graph or in a computation of shapes."""
    return x.is_meta or (type(x) not in PLAIN and type(x).__name__ in ("FakeTensor", "FunctionalTensor"))


@lru_cache(256)
def _overrides(cls: Any) -> bool:
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    return _dispatches(cls) or function not in _DEFAULT_FUNCTIONS


def _dispatches(cls: Any) -> bool:
    return cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def check_plain(argument: str, x: Tensor, capture: str = "") -> None:
    """Raise UnsupportedError if `x` is not plain. It is an argument, or a tensor captured by a mod argument."""
    if is_plain(x):
        return
    found, fix = _about(x)
    found = f"the captured tensor {capture}, {found}" if capture else found
    raise UnsupportedError(message(argument, found, "a plain, dense tensor", fix.format(capture or argument)))


def _about(x: Tensor) -> tuple[str, str]:
    """Return a description of a tensor that is not plain, and the fix."""
    cls = type(x)
    if x.is_nested:
        return "a nested tensor", _NESTED
    if cls in PLAIN:
        return f"a tensor of layout {x.layout}", "Pass {0}.to_dense()."
    fix = _OTHER_DISPATCH if _dispatches(cls) else _OTHER_FUNCTION
    return f"a {cls.__module__}.{cls.__qualname__}", _FIXES.get(cls.__name__, fix)
