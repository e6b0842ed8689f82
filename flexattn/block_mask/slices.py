"""Indexing a BlockMask: the selected batches, heads and query blocks, and the mask_mod of the slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import IndexRangeError, message
from flexattn.process.frozen_class import frozen

AXES = ("batch", "head", "Q-block")


@frozen
class SlicedMod:
    """The mask_mod of a slice of a mask: maps indices of the slice to indices of the whole mask.

    `b`, `h` and `q` are an offset, a tensor of positions (for `q`, of blocks of `block` queries), or None (no change).
    """

    base: Callable[..., Any]
    b: int | Tensor | None
    h: int | Tensor | None
    q: int | Tensor | None
    block: int

    @property
    def __name__(self) -> str:
        return getattr(self.base, "__name__", type(self.base).__name__)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if isinstance(self.q, Tensor):
            q_idx = self.q[q_idx // self.block] * self.block + q_idx % self.block
        elif self.q is not None:
            q_idx = q_idx + self.q
        return self.base(_shifted(self.b, b), _shifted(self.h, h), q_idx, kv_idx)


def _shifted(by: int | Tensor | None, index: Tensor) -> Tensor:
    if by is None:
        return index
    return by[index] if isinstance(by, Tensor) else index + by


def positions(index: object, sizes: tuple[int, ...], device: torch.device) -> list[Tensor | range]:
    """Return what an index selects on each axis of a mask. An int keeps its axis, with size 1.

    `sizes` are those of (B, H, Q blocks), without leading axes that the mask does not have.
    """
    entries = index if isinstance(index, tuple) else (index,)
    axes = AXES[len(AXES) - len(sizes) :]
    if len(entries) > len(sizes):
        raise IndexRangeError(
            message("block_mask[...]", f"{len(entries)} indices", f"at most {len(sizes)}: {', '.join(axes)}", _FIX)
        )
    entries = (*entries, *(slice(None),) * (len(sizes) - len(entries)))
    return [_positions(e, size, axis, device) for e, size, axis in zip(entries, sizes, axes, strict=True)]


_FIX = "Key blocks cannot be indexed: crop them with _adjust(q_len, kv_len)."


def _positions(entry: object, size: int, axis: str, device: torch.device) -> Tensor | range:
    if isinstance(entry, slice):
        return range(size)[entry]
    if isinstance(entry, int) and not isinstance(entry, bool):
        _check_range(entry, entry, size, axis)
        return range(entry % size, entry % size + 1)
    if isinstance(entry, list):
        entry = torch.tensor(entry, dtype=None if entry else torch.int64)
    if not isinstance(entry, Tensor) or entry.dtype.is_floating_point or entry.dtype.is_complex or entry.dim() > 1:
        found = f"{entry.dtype} tensor, {entry.dim()}-D" if isinstance(entry, Tensor) else type(entry).__name__
        expected = "an int, a slice, or a 1-D tensor of integers or booleans"
        raise IndexRangeError(message(f"block_mask[...], {axis} index", found, expected, "Index one axis at a time."))
    entry = entry.to(device).reshape(-1)
    if entry.dtype == torch.bool:
        if len(entry) != size:
            raise IndexRangeError(
                message(f"block_mask[...], {axis} index", f"{len(entry)} booleans", str(size), "Pass one per entry.")
            )
        return entry.nonzero()[:, 0]
    entry = entry.long()
    if len(entry):
        low, high = torch.stack(entry.aminmax()).tolist()
        _check_range(low, high, size, axis)
    return torch.where(entry < 0, entry + size, entry)


def _check_range(low: int, high: int, size: int, axis: str) -> None:
    if low < -size or high >= size:
        found = low if low < -size else high
        raise IndexRangeError(
            message(f"block_mask[...], {axis} index", found, f"from {-size} to {size - 1}", "Use an index in range.")
        )


def as_tensor(taken: Tensor | range, device: torch.device) -> Tensor:
    """Return positions as int64 [n]."""
    if isinstance(taken, Tensor):
        return taken
    return torch.arange(len(taken), device=device) * taken.step + taken.start


def offset_of(taken: Tensor | range, device: torch.device) -> int | Tensor | None:
    """Return positions as an offset, None for offset 0, or as a tensor if they are not consecutive."""
    if isinstance(taken, range) and (taken.step == 1 or len(taken) < 2):
        return taken.start or None
    return as_tensor(taken, device).int()


def sliced_length(taken: Tensor | range, length: int, block: int) -> int:
    """Return the number of queries in the selected blocks. Only the last one may be the sequence's short last block."""
    count, blocks = len(taken), -(-length // block)
    short = length - (blocks - 1) * block
    if short == block or count == 0:
        return count * block
    places = taken if isinstance(taken, range) else taken.tolist()
    where = [i for i, place in enumerate(places) if place == blocks - 1]
    if where and where != [count - 1]:
        found = f"block {blocks - 1}, which holds {short} of {block} queries, in the middle"
        raise IndexRangeError(message("block_mask[...], Q-block index", found, "it last", "Reorder the index."))
    return count * block - (block - short if where else 0)
