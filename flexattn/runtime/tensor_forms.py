"""tensor_forms: numbers that stand for the forms of a call's tensors, in the keys of known calls.

A form is everything that kernels depend on, except the values and the addresses. Tensors of a recent form are
recognized by one call of Dynamo's guards, which are in C++. For three tensors this takes a third of the time of a tuple
of their properties (1.2 and 3.5 us on an EPYC core), and a number is hashed and compared faster in the key.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.process.events import fallback
from flexattn.runtime.launch import CACHES, remember

_private: Any = torch._C
_guards: Any = getattr(_private._dynamo.guards, "TensorGuards", None)
_ALIGNMENT = 15  # addresses are compared modulo 16 bytes
_MOST_SHAPES, _MOST_OF_SHAPES = 1024, 4

Check = Callable[..., bool]
Key = (
    int | tuple["Key", tuple[int, ...]]
)  # a number; of tensors that are given twice, that of the others and the places


class _Form(NamedTuple):
    number: int
    check: Check
    classes: tuple[type, ...]  # kept, because guards compare their addresses


_numbers: OrderedDict[tuple[object, ...], tuple[int, Check | None]] = OrderedDict()
CACHES.append(_numbers)
_last: dict[int, _Form] = {}  # by the number of tensors
_by_shapes: dict[tuple[object, ...], tuple[_Form, ...]] = {}  # the same, and the shapes of the first two
_count = itertools.count()  # a number is never used again


def recalled(*tensors: Any) -> Key | None:
    """Return the number of the form of some tensors; None if they are of no form that guards recognize here.

    They recognize tensors that begin at multiples of 16 bytes. They also compare classes, and what modes, transforms
    and autocast do with operations on the tensors. Raises AttributeError if one is not a tensor.
    """
    for t in tensors:
        if t.is_nested:  # the guards of torch 2.11 and 2.13 abort the process
            return None
    count = len(tensors)
    if count > 2 and (tensors[0] is tensors[1] or tensors[1] is tensors[2]):
        distinct, places = _distinct(tensors)
        found = recalled(*distinct)
        return None if found is None else (found, places)
    form = _last.get(count)
    if form is None or not form.check(*tensors):
        for form in _by_shapes.get((count, *[t.shape for t in tensors[:2]]), ()):
            if form.check(*tensors):
                _last[count] = form
                break
        else:
            return None
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return None if addresses & _ALIGNMENT else form.number


def number_of(*tensors: Tensor) -> Key:
    """Return the number of the form of some tensors with strides. Each form has one number."""
    found = recalled(*tensors)
    return learned(*tensors) if found is None else found


def learned(*tensors: Tensor) -> Key:
    """Return the same from their properties, and let guards recognize their form."""
    distinct, places = _distinct(tensors)
    if len(distinct) < len(tensors):  # guards recognize no tensor that is given twice
        return learned(*distinct), places
    forms = tuple(map(_form_of, tensors))
    number, check = _numbers.get(forms) or (next(_count), None)
    is_aligned = not any(t.data_ptr() & _ALIGNMENT for t in tensors)
    if is_aligned and (check is None or not check(*tensors)):
        check = _check_of(tensors)  # anew for other modes, which guards compare too
    if check is not None:
        _keep(_Form(number, check, tuple(map(type, tensors))), tensors)
    remember(_numbers, forms, (number, check))
    return number


def _distinct(tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors without repetitions, and where each of `tensors` is given first."""
    ids = list(map(id, tensors))
    places = tuple(map(ids.index, ids))
    return [t for i, t in enumerate(tensors) if places[i] == i], places


def _keep(form: _Form, tensors: tuple[Tensor, ...]) -> None:
    shapes = (len(tensors), *[t.shape for t in tensors[:2]])
    others = [other for other in _by_shapes.get(shapes, ()) if other.number != form.number]
    if shapes not in _by_shapes and len(_by_shapes) >= _MOST_SHAPES:
        _by_shapes.clear()
    _by_shapes[shapes] = form, *others[: _MOST_OF_SHAPES - 1]
    _last[len(tensors)] = form


def _check_of(tensors: tuple[Tensor, ...]) -> Check | None:
    """Return a function that recognizes tensors of the form of these."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError) as error:  # another version of torch, or None
        fallback("known calls", f"tensors are compared in Python, because torch changed its guards: {error}")
        return None


def _form_of(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & _ALIGNMENT, t.requires_grad, t.is_neg()
