"""Lifted numbers: the user's Python ints and floats that become runtime arguments of kernels.

A lifted number is a number with a torch symbol. Arithmetic on lifted numbers gives lifted numbers. Arithmetic on ints
is exact and done by the symbols. Arithmetic on floats and numpy numbers is repeated by the guard, because symbols round
differently. An operation that depends on the value itself (a comparison, a format, a call of C code) adds a guard to
the symbol's ShapeEnv.
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
    original: Any  # the user's object: an int, or a numpy number
    text: str  # the guard's variable that holds `original`; empty if only the symbol is known


class LiftedFloat(float):
    """A float whose value is an argument of the kernel."""

    symbol: Symbol
    original: Any
    text: str


LIFTED = (LiftedInt, LiftedFloat)

# Int arithmetic done by symbols. For other functions, ShapeEnv has no symbolic form, or another meaning.
_SYMBOLIC: frozenset[Callable[..., Any]] = frozenset((
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
))  # fmt: skip


def is_liftable(value: Any) -> bool:
    """Return whether a number can be a runtime argument: a 64-bit int or a finite float.

    A float zero stays a literal, because a guard on a symbol's value does not see its sign.
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
    """Return a symbol computed by torch as a lifted number; a constant symbol as a plain number."""
    if isinstance(symbol, torch.SymBool):
        return bool(symbol)
    if symbol.node.expr.is_number:
        return int(symbol) if isinstance(symbol, torch.SymInt) else float(symbol)
    hint = symbol.node.hint
    return lifted(int(hint) if isinstance(symbol, torch.SymInt) else float(hint), symbol)


def symbolic(value: Any) -> Any:
    """Return a value as torch functions take it: for a lifted number its symbol, otherwise the value itself."""
    return value.symbol if isinstance(value, LIFTED) else value


def _operand(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else symbolic(value)


def literal(value: Any) -> Any:
    """Return a number as the user's object, and guard its value."""
    if not isinstance(value, LIFTED):
        return value
    int(value.symbol) if isinstance(value, LiftedInt) else float(value.symbol)
    return value.original


def _number(value: Any) -> Any:
    """Return the plain int or float of a lifted number, without a guard."""
    return int(value) if isinstance(value, LiftedInt) else float(value) if isinstance(value, LiftedFloat) else value


def is_python_int(value: Any) -> bool:
    """Return whether a number is a Python int, not a numpy integer."""
    return type(value.original if isinstance(value, LIFTED) else value) in (int, bool)


def calculate(function: Callable[..., Any], *operands: Any) -> Any:
    """Return `function` of ints, some of them lifted. The result is lifted if symbols can express it."""
    result = function(*map(_number, operands))
    if function in _SYMBOLIC and is_liftable(result):
        if function in (operator.floordiv, operator.mod):
            compare(operator.ne, operands[1], 0)  # symbol simplification may hide a division by zero
        symbol: Any = function(*map(_operand, operands))
        if isinstance(symbol, torch.SymInt) and symbol.node.hint == result:
            return lifted(result, symbol)
    return function(*map(literal, operands))


def compare(function: Callable[..., bool], x: Any, y: Any) -> bool:
    """Return a comparison of numbers, some of them lifted, and guard its result."""
    wanted = function(_number(x), _number(y))
    if not isinstance(x, LIFTED) and not isinstance(y, LIFTED):
        return wanted
    found = function(_operand(x), _operand(y))
    if bool(found) is wanted:
        return wanted
    return function(literal(x), literal(y))
