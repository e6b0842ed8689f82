"""assigned: attributes of a mask whose assignment calls a function or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexattn.errors import MaskError, message
from flexattn.torch_state.modes import unstored


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


class computed(property):
    """A property with a tensor that is computed on each access."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__(unstored(compute))

    def __set__(self, instance: Any, value: Any) -> None:
        name = getattr(self.fget, "__name__", "a list")
        found, expected = "an assignment", "none, because it is computed from the mask's runs on each access"
        fix = "Make another mask with BlockMask.from_kv_blocks(...)."
        raise MaskError(message(f"BlockMask.{name}", found, expected, fix))
