"""forks: what a forked child must not inherit from the other threads of its parent.

Those threads do not exist in the child: a lock that one of them held would stay held for ever, and what one of them had
changed for a moment would stay changed. All locks of the package are made here.
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
    """A reentrant lock. A forked child finds it free, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Make a lock that a thread of the parent held free. In a forked child only."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_changes: list[tuple[int, Callable[[], None]]] = []  # with the threads that made them


@contextlib.contextmanager
def temporary(undo: Callable[[], None]) -> Iterator[None]:
    """Undo a change of this process when the block ends, and in a child that another thread forks before that."""
    change = (threading.get_ident(), undo)
    _changes.append(change)
    try:
        yield
    finally:
        _changes.remove(change)
        undo()


def in_child(action: Callable[[], None]) -> None:
    """Call `action` in each child that this process forks from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


class cached_property(Generic[T]):
    """functools' without a lock: Python 3.11 holds one while the value is computed. Threads may compute it twice."""

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
