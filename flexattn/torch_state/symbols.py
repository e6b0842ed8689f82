"""Symbols: sizes and numbers of graphs, which stand for any value."""

from __future__ import annotations

from typing import Any

import torch


def example(number: Any) -> int | float:
    """Return a number, or the number that a symbol had when its graph was made. It is not guarded."""
    found = number.node.hint if isinstance(number, (torch.SymInt, torch.SymFloat)) else number
    return float(found) if isinstance(number, torch.SymFloat) else found
