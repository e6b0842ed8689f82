"""Symbols: sizes and numbers of graphs, which stand for any value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexattn.errors import UnsupportedError, message

_OF_DATA = 1009  # a prime, so that the mod of an example is not simplified because something divides it


def example(number: Any) -> int | float:
    """Return a number, or the number that a symbol had when its graph was made. It is not guarded.

    A symbol that depends on the values of tensors (`x.nonzero()`, `n.item()`) had none. Any number stands for it.
    """
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number
    found = number.node.hint
    if found is None:
        expression = number.node.expr
        found = expression.subs(dict.fromkeys(expression.free_symbols, _OF_DATA))
    return float(found) if isinstance(number, torch.SymFloat) else int(found)


@contextmanager
def valued(what: str) -> Iterator[None]:
    """Let the values of symbols be read, which guards them. Raise UnsupportedError for one that depends on data."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__name__.startswith("GuardOnDataDependent"):
            raise
        found, fix = "a number or size that depends on the values of tensors", "Compute it before the compiled function"
        fix += " (torch.compile makes tensors of NumPy's scalars: write float(x) there)"
        fix += ", or let the mod capture the tensor instead of its .item()."
        raise UnsupportedError(message(what, found, "one whose value is known when a graph is made", fix)) from None
