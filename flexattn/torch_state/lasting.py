"""lasting: tensors that outlive the call in which they are made, though a CUDA graph may own the memory of the call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from flexattn.torch_state.modes import is_recording

P = ParamSpec("P")
R = TypeVar("R")
Made = TypeVar("Made", covariant=True)


class Cached(Protocol[Made]):
    """A function whose results are cached."""

    cache_clear: Callable[[], None]

    def __call__(self, *args: Any) -> Made: ...


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is captured. What is computed then belongs to the graph and must not be cached."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_in_graphs: dict[int, object] = {}  # by id


def kept_for_graphs(device: torch.device, cached: R) -> R:
    """Return what a cache found. In a capture, it stays in memory until the process ends, though the cache evicts it.

    Replays read its memory, and nothing tells when the last graph that does is gone.
    """
    if is_capturing(device):
        _in_graphs[id(cached)] = cached
    return cached


def lasting(device: torch.device, make: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose tensors on a device are cached, and wait for them.

    It runs in a thread of its own. In the run before a capture, torch.compile lets a thread allocate in the memory of
    its CUDA graph, where nothing may stay. Modes of torch do not apply in the other thread either.
    """
    if device.type != "cuda":
        return make(*args, **kwargs)

    def made() -> R:
        with torch.cuda.device(device):
            result = make(*args, **kwargs)
            torch.cuda.current_stream().synchronize()
            return result

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(made).result()


def cached_on_device(make: Callable[..., R], most: int = 64) -> Cached[R]:
    """Cache what a function of hashable arguments makes on a device, which is the last one; `most` results are kept.

    Nothing is cached in a capture, whose memory is the graph's, or in a mode that records a graph, whose tensors have
    no values.
    """

    @lru_cache(most)
    def cached(*args: Any) -> R:
        return lasting(args[-1], make, *args)

    @wraps(make)
    def called(*args: Any) -> R:
        return make(*args) if is_capturing(args[-1]) or is_recording() else cached(*args)

    result = cast(Cached[R], called)
    result.cache_clear = cached.cache_clear
    return result
