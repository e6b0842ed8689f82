"""cache_size: the size of the kernel cache directory on disk, and eviction when it exceeds its limit.

The least recently used kernels are removed first. An entry is renamed atomically and then deleted, so other processes
see it complete or not at all. Leftovers of a killed process are deleted a day later. A process that has loaded a kernel
continues to use it. A process that is about to load it compiles it again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from flexattn.machine.kernel_store import KernelStore
from flexattn.process.events import debug
from flexattn.process.frozen_class import frozen

_DIGEST = re.compile(r"[0-9a-f]{32}")
_KEPT = 0.75  # fraction of the limit to keep, so that not every new kernel causes an eviction
_EVERY = 16  # new kernels between two scans of the directory, which take 30 us per kernel in it
STUBS = "triton"  # Triton's own files next to the kernels
TEMPLATES = "templates"  # compiled templates of kernels
_MOST_STUBS = 0.25  # fraction of the limit

_added: dict[Path, int] = {}


@frozen
class Item:
    """An entry, or another file or directory next to the entries."""

    name: str
    bytes: int
    used: float  # last use, in seconds since 1970

    @property
    def is_kernel(self) -> bool:
        return _DIGEST.fullmatch(self.name) is not None


def items(store: KernelStore) -> list[Item]:
    """Return the contents of a store's directory."""
    found: list[Item] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(store.root) as entries:
        for entry in entries:
            statuses = list(_statuses(entry))
            size = sum(status.st_size for status in statuses)
            found.append(Item(entry.name, size, max((status.st_mtime for status in statuses), default=0.0)))
    return found


def report(store: KernelStore, limit: int | None) -> str:
    """Return a line that describes the size of a store's directory."""
    found = items(store)
    kernels = sum(item.is_kernel for item in found)
    most = "no limit" if limit is None else f"at most {_mebibytes(limit)}"
    total = _mebibytes(sum(item.bytes for item in found))
    return f"{store.root}: {kernels:,} kernels, {total} in total, {most} (FLEXATTN_CACHE_SIZE)"


def added(store: KernelStore, limit: int | None) -> None:
    """Count a new kernel, and evict from time to time."""
    count = _added.get(store.root, 0)
    _added[store.root] = count + 1
    if limit is not None and count % _EVERY == 0:
        prune(store, limit)


def prune(store: KernelStore, limit: int) -> None:
    """Remove kernels if the directory takes more than `limit` bytes. The most recently used one is kept."""
    found = items(store)
    total = sum(item.bytes for item in found)
    if total <= limit:
        return
    kernels = sorted((item for item in found if item.is_kernel), key=lambda item: item.used)
    stubs = [item for item in found if item.name == STUBS and item.bytes > _MOST_STUBS * limit]
    try:
        for item in (*stubs, *kernels[:-1]):
            if total <= _KEPT * limit:
                break
            store.remove(item.name)
            total -= item.bytes
    except OSError as error:
        debug("store", f"the least recently used entry cannot be removed: {error}")
    debug("store", f"{store.root} took more than {limit:,} bytes, {total:,} are left")


def remove_kernels(store: KernelStore) -> tuple[int, int]:
    """Remove all kernels, compiled templates and Triton's stubs. Return how many kernels, and the bytes of all."""
    removed = [item for item in items(store) if item.is_kernel or item.name in (STUBS, TEMPLATES)]
    for item in removed:
        store.remove(item.name)
    return sum(item.is_kernel for item in removed), sum(item.bytes for item in removed)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _statuses(entry: os.DirEntry[str]) -> Iterator[os.stat_result]:
    """Yield the status of each file at or below an entry. Files removed meanwhile are skipped."""
    with contextlib.suppress(FileNotFoundError):
        if not entry.is_dir(follow_symlinks=False):
            yield entry.stat(follow_symlinks=False)
            return
        with os.scandir(entry) as inner:
            for below in inner:
                yield from _statuses(below)
