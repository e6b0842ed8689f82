"""counters: what this process traced, compiled and fell back to."""

from __future__ import annotations

from typing import Any

from flexattn.machine.cache_size import items
from flexattn.machine.kernel_store import open_store
from flexattn.process import events
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen
from flexattn.runtime import build
from flexattn.trace import trace


@frozen
class Counters:
    """Counts of this process. Print it to read it."""

    traces: int  # runs of mods by the tracer
    guard_hits: int  # calls that used a cached trace
    failed_guards: dict[str, int]  # traces of mods that had a trace, by the mod and what it reads that differs
    retraced: dict[str, int]  # traces of mods that are traced at each call, by the place of the mod and the reason
    kernels_compiled: int
    kernels_from_disk: int
    fallbacks: dict[str, int]  # slower ways that were taken, by reason

    @property
    def kernel_cache_bytes(self) -> int:
        """Return the size of the cache directory, which other processes share. It takes 30 us per kernel in it."""
        store = open_store(settings().cache_dir)
        return 0 if store is None else sum(item.bytes for item in items(store))

    def __str__(self) -> str:
        lines = []
        for name, value in {**vars(self), "kernel_cache_bytes": self.kernel_cache_bytes}.items():
            if isinstance(value, dict):
                lines += [
                    f"{name}: {'none' if not value else ''}".rstrip(),
                    *(f"  {n:6}  {k}" for k, n in value.items()),
                ]
            else:
                lines.append(f"{name}: {value:,}")
        return "\n".join(lines)


_before: dict[str, int] = {}


def counters(reset: bool = False) -> Counters:
    """Return what this process traced, compiled and fell back to.

    Args:
        reset: start counting from zero after this call. The cache's size and the kernels themselves are not affected.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 64, 32)
        >>> _ = flexattn.counters(reset=True)
        >>> for _ in range(3):
        ...     out = flexattn.flex_attention(x, x, x, lambda score, b, h, q_idx, kv_idx: score * 0.5)
        >>> found = flexattn.counters()
        >>> found.traces, found.guard_hits, found.fallbacks
        (1, 2, {})
    """
    now: dict[str, Any] = {**trace.stats(), **build.stats()}
    since = {name: value - _before.get(name, 0) for name, value in now.items()}
    failed, retraced = (
        {k: n - _before.get(k, 0) for k, n in counts.items() if n > _before.get(k, 0)}
        for counts in (trace.failed_guards(), trace.retraced())
    )
    found = Counters(
        since["traces"], since["hits"], failed, retraced, since["compiles"], since["disk_hits"], events.fallbacks()
    )
    if reset:
        _before.update({**now, **trace.failed_guards(), **trace.retraced()})
        events.forget_fallbacks()
    return found
