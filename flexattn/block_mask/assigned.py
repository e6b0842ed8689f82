"""assigned: attributes of a mask that are read like any other, and whose assignment calls a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assigned_by(assign: Callable[[Any, Any], None]) -> Any:
    """Return a class attribute; `assign(instance, value)` is called when one is assigned to an instance.

    The value itself is in the instance's `__dict__`. A property would cost each known call two Python calls.
    """
    return _Assigned(assign)


class _Assigned:
    """A data descriptor without `__get__`. Python looks for the value of such an attribute in the instance."""

    def __init__(self, assign: Callable[[Any, Any], None]) -> None:
        self._assign = assign

    def __set__(self, instance: Any, value: Any) -> None:
        self._assign(instance, value)
