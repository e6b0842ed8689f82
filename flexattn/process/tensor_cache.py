"""tensor_cache: caches tensors returned by functions, like functools.lru_cache but limited by bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import Tensor

from flexattn.process.forks import Lock

_MOST = 256  # results of one function
T = TypeVar("T", Tensor, Tensor | None)


def kept(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache the tensors that a function returns, up to `most` bytes in total. The least recently used are evicted."""

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        found: dict[tuple[object, ...], tuple[T, int]] = {}
        lock = Lock()

        @wraps(make)
        def cached(*key: object) -> T:
            with lock:
                if key in found:
                    found[key] = result = found.pop(key)
                    return result[0]
            made = make(*key)
            with lock:
                found[key] = (made, 0 if made is None else made.nbytes)
                while len(found) > _MOST or sum(size for _, size in found.values()) > most:
                    del found[next(iter(found))]
            return made

        return cached

    return decorate
