"""mask_cache: the lists of masks built lately, for those who build the same mask again (in each layer, say).

A mask that captures no tensors is found by what was traced and its numbers. Tensors must be the same objects at the
same version, and hold what they held: dist.broadcast, views by numpy and `.data` write without counting a version. So
what they held is kept from the second build on, and compared.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BuiltMask, Seen, is_same, seen
from flexattn.forks import Lock
from flexattn.graph import BoundMod

_MASKS = 32  # kept after a clearing, which is done when there are twice as many
_LARGEST = 2**26  # bytes of a tensor whose contents are kept


class Built(NamedTuple):
    """One mask and what they were built from; the user's tensors are held weakly."""

    mask: BuiltMask
    tensors: tuple[Seen, ...]
    contents: tuple[Tensor, ...] | None  # None: built once so far

    def is_of(self, bound: BoundMod) -> bool:
        """Tell whether these are the tensors of a mod, at the same version."""
        return len(self.tensors) == len(bound.reached) and all(map(is_same, self.tensors, bound.reached))


_built: OrderedDict[object, Built] = OrderedDict()
_lock = Lock()
_stats = {"hits": 0, "builds": 0}


def stats() -> dict[str, int]:
    """Return how many masks of this process came from the cache, and how many were built."""
    return dict(_stats)


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
        if found and key in _built:
            _built.move_to_end(key)
    return built.mask if found and built is not None else None


def keep(key: object, bound: BoundMod, mask: BuiltMask) -> None:
    """Remember lists for a key; when there are too many, those whose tensors are gone are forgotten first."""
    tensors = bound.reached
    for t in tensors:
        if t.is_inference() or t.numel() * t.element_size() > _LARGEST:
            return
    with _lock:
        before = _built.pop(key, None)
        again = not tensors or (before is not None and before.is_of(bound))
        contents = tuple(t.detach().clone() for t in tensors) if again else None
        _built[key] = Built(mask, tuple(map(seen, tensors)), contents)
        if len(_built) > 2 * _MASKS:  # not at each build: it would take a fifth of its time on the host
            for other in [k for k, b in _built.items() if any(t() is None for t, _ in b.tensors)]:
                del _built[other]
            while len(_built) > _MASKS:
                _built.popitem(last=False)
