"""Parameters of which the loop while writing runs some: the others are marked slow, and `make full` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Return parameters for `parametrize`; those for which `quick` is false are marked slow."""
    return [value if quick(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
