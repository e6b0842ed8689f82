"""forks: state that a forked child must not inherit from other threads of its parent.

These threads do not exist in the child. A lock that one of them held would never be released, and a temporary change
that one of them made would never be undone. All locks of the package are created here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Lock:
    """A reentrant lock. It is free in a forked child, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Release a lock that another thread of the parent held. Call only in a forked child."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_changes: list[tuple[int, Callable[[], None]]] = []  # the thread that made each change, and how to undo it


@contextlib.contextmanager
def temporary(undo: Callable[[], None]) -> Iterator[None]:
    """Undo a change of this process at the end of the block, and in a child that another thread forks before that."""
    change = (threading.get_ident(), undo)
    _changes.append(change)
    try:
        yield
    finally:
        _changes.remove(change)
        undo()


def in_child(action: Callable[[], None]) -> None:
    """Call `action` in every child that this process forks from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


class cached_property(Generic[T]):
    """functools.cached_property without a lock: Python 3.11 holds one during the computation. Threads may repeat it."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.make(instance)
        return value


def _forked() -> None:
    for lock in _locks:
        lock.renew()
    for change in reversed(_changes):
        thread, undo = change
        if thread != threading.get_ident():
            _changes.remove(change)
            undo()


in_child(_forked)
