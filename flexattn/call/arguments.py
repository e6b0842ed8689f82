"""arguments: what several arguments are checked for."""

from __future__ import annotations

from numbers import Real

from flexattn.errors import ArgumentError, DtypeError, message


def as_float(argument: str, value: object, expected: str, mend: str) -> float:
    """Return a number (an int, a float, a Fraction, one of numpy's) as a float; bools and strings are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(message(argument, f"a {type(value).__name__}", expected, mend))
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(message(argument, "a number beyond float64", "one of at most 1e308", mend)) from None
