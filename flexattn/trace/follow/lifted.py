"""Lifted numbers: Python ints and floats of the user that become runtime arguments of kernels.

A lifted number is a number with a symbol of torch beside it. Arithmetic on lifted numbers gives lifted numbers: that on
ints is exact, and their symbols do it; that on floats and numbers of numpy is done again by the guard, since symbols
round differently. What depends on the value itself (a comparison, a format, a call of C code) leaves a guard in the
ShapeEnv of the symbol.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

Symbol = torch.SymInt | torch.SymFloat


class LiftedInt(int):
    """An int whose value is an argument of the kernel."""

    symbol: Symbol
    original: Any  # what the user holds: an int, or a number of numpy
    text: str  # the variable of the guard that has `original`; empty where only the symbol tells


class LiftedFloat(float):
    """A float whose value is an argument of the kernel."""

    symbol: Symbol
    original: Any
    text: str


LIFTED = (LiftedInt, LiftedFloat)

# Arithmetic on ints that symbols do. ShapeEnv has no symbolic form, or another meaning, for the others.
_SYMBOLIC: frozenset[Callable[..., Any]] = frozenset((
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
))  # fmt: skip


def is_liftable(value: Any) -> bool:
    """Tell whether a number can be a runtime argument: an int of 64 bits or a finite float.

    A zero that is a float stays a literal: a guard on the value of a symbol does not see its sign.
    """
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value) and value != 0


def lifted(value: int | float, symbol: Symbol, original: Any = None, text: str = "") -> Any:
    """Return `value` with its symbol."""
    number = LiftedFloat(value) if isinstance(value, float) else LiftedInt(value)
    number.symbol = symbol
    number.original = value if original is None else original
    number.text = text
    return number


def from_symbol(symbol: Any) -> Any:
    """Return a symbol that torch computed as a lifted number; a constant one as a plain number."""
    if isinstance(symbol, torch.SymBool):
        return bool(symbol)
    if symbol.node.expr.is_number:
        return int(symbol) if isinstance(symbol, torch.SymInt) else float(symbol)
    hint = symbol.node.hint
    return lifted(int(hint) if isinstance(symbol, torch.SymInt) else float(hint), symbol)


def symbolic(value: Any) -> Any:
    """Return what torch functions take for a value: the symbol of a lifted number, anything else as it is."""
    return value.symbol if isinstance(value, LIFTED) else value


def _operand(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else symbolic(value)


def literal(value: Any) -> Any:
    """Return a number as the user holds it, and guard its value."""
    if not isinstance(value, LIFTED):
        return value
    int(value.symbol) if isinstance(value, LiftedInt) else float(value.symbol)
    return value.original


def _number(value: Any) -> Any:
    """Return the plain int or float of a lifted number, without a guard."""
    return int(value) if isinstance(value, LiftedInt) else float(value) if isinstance(value, LiftedFloat) else value


def is_python_int(value: Any) -> bool:
    """Tell whether a number is an int of Python, not one of numpy."""
    return type(value.original if isinstance(value, LIFTED) else value) in (int, bool)


def calculate(function: Callable[..., Any], *operands: Any) -> Any:
    """Return `function` of ints, some of them lifted: as a lifted int where symbols can say it."""
    result = function(*map(_number, operands))
    if function in _SYMBOLIC and is_liftable(result):
        if function in (operator.floordiv, operator.mod):
            compare(operator.ne, operands[1], 0)  # what symbols simplify may hide a division by zero
        symbol: Any = function(*map(_operand, operands))
        if isinstance(symbol, torch.SymInt) and symbol.node.hint == result:
            return lifted(result, symbol)
    return function(*map(literal, operands))


def compare(function: Callable[..., bool], x: Any, y: Any) -> bool:
    """Return a comparison of numbers, some of them lifted, and guard its outcome."""
    wanted = function(_number(x), _number(y))
    if not isinstance(x, LIFTED) and not isinstance(y, LIFTED):
        return wanted
    found = function(_operand(x), _operand(y))
    if bool(found) is wanted:
        return wanted
    return function(literal(x), literal(y))
