"""tensor_forms: keys of the forms of a call's tensors, as parts of the keys of known calls.

A form is everything that kernels depend on, except the values and the addresses. Tensors of a known form are
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
from flexattn.torch_state.subclasses import PLAIN

_private: Any = torch._C
_guards: Any = getattr(_private._dynamo.guards, "TensorGuards", None)
_ALIGNMENT = 15  # addresses are compared modulo 16 bytes
_MOST_SHAPES, _MOST_OF_SHAPES = 4096, 16

# A number: the form of different tensors at multiples of 16 bytes. Else also the addresses modulo 16 bytes, or where
# tensors that are given twice are given first.
FormKey = int | tuple["FormKey", tuple[int, ...]]


class _Known(NamedTuple):
    number: int
    check: Callable[..., bool]


_numbers: OrderedDict[tuple[object, ...], int] = OrderedDict()
_by_shapes: OrderedDict[tuple[object, ...], tuple[_Known, ...]] = OrderedDict()
_last: dict[int, _Known] = {}  # by the number of tensors
CACHES += [_numbers, _by_shapes, _last]
_count = itertools.count()  # a number is never used again


def recalled(*tensors: Any) -> FormKey | None:
    """Return the key of the form of some tensors; None if no guards recognize them here.

    They recognize plain tensors that are not negated. They also compare classes, and what modes, transforms and
    autocast do with operations on the tensors.
    """
    for t in tensors:
        if type(t) not in PLAIN or t.is_nested:  # with nested ones, the guards of torch 2.11 and 2.13 abort the process
            return None
    count = len(tensors)
    if count > 2 and (tensors[0] is tensors[1] or tensors[1] is tensors[2]):
        return _recalled_twice(tensors)
    known = _last.get(count)
    if known is None or not known.check(*tensors):
        known = _found(tensors)
        if known is None:
            return _recalled_twice(tensors)
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return _with_addresses(known.number, tensors) if addresses & _ALIGNMENT else known.number


def key_of(*tensors: Tensor) -> FormKey:
    """Return the key of the form of some tensors with strides. Equal forms have equal keys."""
    found = recalled(*tensors)
    return learned(*tensors) if found is None else found


def learned(*tensors: Tensor) -> FormKey:
    """Return the same from their properties, and let guards recognize their form."""
    distinct, places = _distinct(tensors)
    if len(distinct) < len(tensors):  # guards recognize no tensor that is given twice
        return learned(*distinct), places
    forms = tuple(map(_form_of, tensors))
    number = _numbers.get(forms)
    if number is None:
        number = next(_count)
        remember(_numbers, forms, number)
    if all(type(t) in PLAIN and not t.is_neg() for t in tensors):
        check = _check_of(tensors)
        if check is not None:
            _keep(_Known(number, check), tensors)
    return _with_addresses(number, tensors)


def _recalled_twice(tensors: tuple[Tensor, ...]) -> FormKey | None:
    """Return the key of tensors of which some are given twice; None if none is."""
    distinct, places = _distinct(tensors)
    found = recalled(*distinct) if len(distinct) < len(tensors) else None
    return None if found is None else (found, places)


def _distinct(tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the tensors without repetitions, and where each of `tensors` is given first."""
    ids = list(map(id, tensors))
    places = tuple(map(ids.index, ids))
    return [t for i, t in enumerate(tensors) if places[i] == i], places


def _with_addresses(number: int, tensors: tuple[Tensor, ...]) -> FormKey:
    offsets = tuple([t.data_ptr() & _ALIGNMENT for t in tensors])
    return (number, offsets) if any(offsets) else number


def _found(tensors: tuple[Tensor, ...]) -> _Known | None:
    """Return the known form of some tensors among all of their shapes, and let it be the last."""
    shapes = tuple([t.shape for t in tensors])
    for known in _by_shapes.get(shapes, ()):
        if known.check(*tensors):
            _last[len(tensors)] = known
            try:  # noqa: SIM105 (suppress takes 0.3 us)
                _by_shapes.move_to_end(shapes)
            except KeyError:  # another thread has dropped it
                pass
            return known
    return None


def _keep(known: _Known, tensors: tuple[Tensor, ...]) -> None:
    shapes = tuple([t.shape for t in tensors])
    _by_shapes[shapes] = known, *_by_shapes.get(shapes, ())[: _MOST_OF_SHAPES - 1]
    if len(_by_shapes) > _MOST_SHAPES:
        _by_shapes.popitem(last=False)
    _last[len(tensors)] = known


def _check_of(tensors: tuple[Tensor, ...]) -> Callable[..., bool] | None:
    """Return a function that recognizes tensors of the form of these."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        return _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, RuntimeError) as error:  # another version of torch, or None
        fallback("known calls", f"tensors are compared in Python, because torch changed its guards: {error}")
        return None


def _form_of(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg()
