"""arguments: checks that several arguments share."""

from __future__ import annotations

import operator
from numbers import Integral, Real

from torch import Tensor

from flexattn.errors import ArgumentError, DtypeError, message


def as_float(argument: str, value: object, expected: str, fix: str) -> float:
    """Return a number (int, float, Fraction, numpy scalar) as a float. Bools and strings are rejected."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(message(argument, f"a {type(value).__name__}", expected, fix))
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(message(argument, "a number beyond float64", "one of at most 1e308", fix)) from None


def as_int(value: object) -> int | None:
    """Return a whole number (int, numpy integer) as an int; None for bools and all else."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else operator.index(value)


def fix_of_int(name: str, value: object, fix: str) -> str:
    """Return the fix for an argument that is no int. Tensors are not read: on a GPU the host would wait for them."""
    return f"Pass int({name})." if isinstance(value, Tensor) and value.dim() == 0 else fix
