"""mask_cache: the lists of masks built lately, for those who build the same mask again (in each layer, say).

A mask that captures no tensors is found by what was traced and its numbers. Tensors must be the same objects at the
same version, and hold what they held: dist.broadcast, views by numpy and `.data` write without counting a version. So
what they held is kept from the second build on, and compared.

All that is kept takes at most MEMORY bytes, on all devices together, and goes with the user's tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BuiltMask, Seen, is_same, seen
from flexattn.graph.bound_mod import BoundMod
from flexattn.process.forks import Lock

MEMORY = 2**28  # bytes of lists, and of copies of tensors
_LARGEST = MEMORY // 4  # bytes of one mask
_MASKS = 64


class Built(NamedTuple):
    """One mask and what it was built from; the user's tensors are held weakly."""

    mask: BuiltMask
    tensors: tuple[Seen, ...]
    contents: tuple[Tensor, ...] | None  # None: built once so far
    bytes: int

    def is_of(self, bound: BoundMod) -> bool:
        """Tell whether these are the tensors of a mod, at the same version."""
        return len(self.tensors) == len(bound.reached) and all(map(is_same, self.tensors, bound.reached))


_built: dict[object, Built] = {}  # the one that was used last stands last
_lock = Lock()
_stats = {"hits": 0, "builds": 0}


def stats() -> dict[str, int]:
    """Return how many masks of this process came from the cache, and how many were built."""
    return dict(_stats)


def memory() -> int:
    """Return the bytes of all lists and copies that are kept."""
    return sum(built.bytes for built in list(_built.values()))


def clear() -> None:
    """Forget all masks and start the counts anew."""
    with _lock:
        _built.clear()
        _stats.update(dict.fromkeys(_stats, 0))


def find(key: object, bound: BoundMod) -> BuiltMask | None:
    """Return the lists built for the key from tensors that are unchanged; the host waits to compare them.

    The key holds the ids of the tensors; an id may come again, so `Built.is_of` tells whether it is them.
    """
    built = _built.get(key)
    found = (
        built is not None
        and built.contents is not None
        and built.is_of(bound)
        and all(torch.equal(t.detach(), c) for t, c in zip(bound.reached, built.contents, strict=True))
    )
    with _lock:
        _stats["hits" if found else "builds"] += 1
        if found and (again := _built.pop(key, None)) is not None:
            _built[key] = again
    return built.mask if found and built is not None else None


def keep(key: object, bound: BoundMod, mask: BuiltMask) -> None:
    """Remember lists for a key as long as the tensors live; those that were not used for longest make room."""
    tensors = bound.reached
    copied = sum(t.numel() * t.element_size() for t in tensors)
    if mask.bytes + copied > _LARGEST or any(t.is_inference() for t in tensors):
        return

    def forget(_: object, built: dict[object, Built] = _built) -> None:
        built.pop(key, None)

    with _lock:
        before = _built.pop(key, None)
        again = not tensors or (before is not None and before.is_of(bound))
        contents = tuple(t.detach().clone() for t in tensors) if again else None
        size = mask.bytes + (copied if again else 0)
        _built[key] = Built(mask, tuple(seen(t, forget) for t in tensors), contents, size)
        for other in list(_built):
            if len(_built) <= _MASKS and memory() <= MEMORY:
                break
            _built.pop(other, None)
