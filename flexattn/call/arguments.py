"""arguments: checks that several arguments share."""

from __future__ import annotations

from numbers import Real

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
