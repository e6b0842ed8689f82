"""memory_order: results have the dim order of the tensors that they are computed from, and copies of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_UNIT = torch.complex128  # of 16 bytes


@lru_cache(4096)
def dense_strides(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose first three dims are in the order of other strides."""
    strides, step = [0, 0, 0, 1], shape[3]
    for d in reversed(order_in_memory(like)):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def order_in_memory(strides: Sequence[int]) -> list[int]:
    """Return the first three dims from the outermost to the innermost in memory."""
    return [0, 1, 2] if 0 in strides[:3] else sorted(range(3), key=lambda d: -strides[d])


def empty_in_order(tensor: Tensor, width: int) -> Tensor:
    """Return an empty [B, H, rows, width] with the dim order of `tensor` in memory, the last dim innermost."""
    shape = (*tensor.shape[:3], width)
    return torch.empty_strided(shape, dense_strides(shape, tensor.stride()), dtype=tensor.dtype, device=tensor.device)


def in_large_elements(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of tensors to copy between, with elements of 16 bytes if all rows allow that.

    PyTorch copies strided rows element by element: 1.8 TB/s in elements of 2 bytes and 4.1 in those of 16 (H200).
    """
    if all(map(_has_whole_units, tensors)):
        return tuple([x.view(_UNIT) for x in tensors])
    return tensors


def _has_whole_units(x: Tensor) -> bool:
    """Return whether all rows are whole multiples of 16 bytes, at such addresses."""
    if x.is_neg() or x.data_ptr() % 16 or x.storage_offset() * x.itemsize % 16:
        return False
    return _are_whole_units(x.shape[-1], x.stride(), x.itemsize)


@lru_cache(4096)
def _are_whole_units(width: int, strides: tuple[int, ...], itemsize: int) -> bool:
    return strides[-1] == 1 and all(n * itemsize % 16 == 0 for n in (width, *strides[:-1]))
