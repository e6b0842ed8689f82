"""tensor_forms: numbers that stand for the forms of a call's tensors, in the keys of known calls.

A form is everything that kernels depend on, except the values and the addresses. Tensors of a recent form are
recognized by one call of Dynamo's guards, which are in C++. For three tensors this takes a third of the time of a tuple
of their properties (1.2 and 3.5 us on an EPYC core), and a number is hashed and compared faster in the key.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.runtime.launch import CACHES, remember

_private: Any = torch._C
_guards = getattr(_private._dynamo.guards, "TensorGuards", None)
_ALIGNMENT = 15  # addresses are compared modulo 16 bytes
_RECENT = 4  # forms that are tried in turn

Check = Callable[..., bool]
_numbers: OrderedDict[tuple[object, ...], tuple[int, Check | None]] = OrderedDict()
CACHES.append(_numbers)
# By the number of tensors. The classes are kept, because guards compare their addresses.
_recent: dict[int, tuple[tuple[int, Check, tuple[type, ...]], ...]] = {}
_count = itertools.count()  # a number is never used again


def recalled(*tensors: Any) -> int | None:
    """Return the number of the form of some tensors; None if it is not recent.

    A form is recent only if all its tensors begin at multiples of 16 bytes. The guards also compare classes, and what
    modes, transforms and autocast do with operations on the tensors. Raises AttributeError if one is not a tensor.
    """
    for t in tensors:
        if t.is_nested:  # the guards of torch 2.11 and 2.13 abort the process
            return None
    for number, check, _ in _recent.get(len(tensors), ()):
        if check(*tensors):
            addresses = 0
            for t in tensors:
                addresses |= t.data_ptr()
            return None if addresses & _ALIGNMENT else number
    return None


def number_of(*tensors: Tensor) -> int:
    """Return the number of the form of some tensors with strides, at most one for each form."""
    found = recalled(*tensors)
    return learned(*tensors) if found is None else found


def learned(*tensors: Tensor) -> int:
    """Return the same from their properties, and make their form a recent one."""
    forms = tuple(map(_form_of, tensors))
    number, check = _numbers.get(forms) or (next(_count), None)
    if _guards is None or any(t.data_ptr() & _ALIGNMENT for t in tensors):
        remember(_numbers, forms, (number, None))
        return number
    if check is None or not check(*tensors):  # guards also compare what they saw of the thread's modes
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        check = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    remember(_numbers, forms, (number, check))
    others = [entry for entry in _recent.get(len(tensors), ()) if entry[0] != number]
    _recent[len(tensors)] = ((number, check, tuple(map(type, tensors))), *others[: _RECENT - 1])
    return number


def _form_of(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & _ALIGNMENT, t.requires_grad, t.is_neg()
