"""tensor_cache: caches tensors returned by functions, like functools.lru_cache but limited by bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from flexattn.errors import UnsupportedError, message
from flexattn.process.forks import Lock
from flexattn.torch_state.lasting import is_capturing, kept_for_graphs, lasting
from flexattn.torch_state.modes import is_recording

_MOST = 256  # results of one function
T = TypeVar("T", Tensor, Tensor | None)


def kept(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache what a function of hashable arguments makes on a device, which is the last one.

    The tensors take up to `most` bytes in total. The least recently used are evicted, but stay in memory if a CUDA
    graph reads them. The function may wait for the device, so it raises UnsupportedError in a capture.
    """

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        found: dict[tuple[object, ...], tuple[T, int]] = {}
        lock = Lock()

        @wraps(make)
        def cached(*key: object) -> T:
            device: Any = key[-1]
            if is_recording():  # its tensors have no values
                return make(*key)
            with lock:
                if key in found:
                    found[key] = result = found.pop(key)
                    return kept_for_graphs(device, result[0])
            if is_capturing(device):
                what = "a first call, which copies constants of a mod"
                fix = "Make one such call before the capture."
                raise UnsupportedError(message("CUDA graph", what, "constants that are on the GPU already", fix))
            made = lasting(device, make, *key)
            with lock:
                found[key] = (made, 0 if made is None else made.nbytes)
                while len(found) > _MOST or sum(size for _, size in found.values()) > most:
                    del found[next(iter(found))]
            return made

        return cached

    return decorate
