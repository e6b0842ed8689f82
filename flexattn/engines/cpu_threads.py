"""Distributes work over Python threads, in each of which torch uses one core.

A tile takes about ten operations of less than a millisecond. If torch splits each of them over cores, each ends with a
barrier, and on a busy machine the barriers take ten times as long as the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

from flexattn.process.forks import Lock, in_child

T = TypeVar("T")


def in_threads(count: int, work: Callable[[int], T], single: bool = False) -> list[T]:
    """Return [work(0), ..., work(count - 1)], computed in parallel without autograd.

    A single item runs in this thread, where torch may use several cores per operation, unless `single` requires one
    core: how an operation is split over cores affects the last bits.
    """
    if count == 1 and not (single and torch.get_num_threads() > 1):
        return [work(0)]
    inference = torch.is_inference_mode_enabled()

    def quietly(i: int) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return work(i)

    futures = [_pool(count).submit(quietly, i) for i in range(count)]
    return [future.result() for future in futures]


class Queue(Iterable[T]):
    """An iterator shared by several threads."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = Lock()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            yield item


@lru_cache(4)
def _pool(count: int) -> ThreadPoolExecutor:
    """Return threads with one core each. The caller and future threads keep their number of cores."""
    wanted = torch.get_num_threads()
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first call takes the global number, so it must precede the next line
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "flexattn")
    for _ in range(count):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(wanted)
    return pool


in_child(_pool.cache_clear)  # threads do not survive a fork
