"""head_dims: how head dims are split into tiles of columns."""

from __future__ import annotations

from functools import lru_cache

from flexattn.process.frozen_class import frozen


@frozen
class HeadDimPart:
    """A slice of a head dim for one matrix product: `width` is a power of two, `used` of its columns exist."""

    index: int
    offset: int
    width: int
    used: int


def smallest_widths(known: tuple[tuple[int, int], ...], D: int, Dv: int) -> tuple[int, int]:
    """Return the first of the known widths that fit these head dims; (0, 0) if none does."""
    return next((widths for widths in known if widths[0] >= D and widths[1] >= Dv), (0, 0))


def pieces_of(D: int) -> int:
    """Return the number of 32-column pieces in Hopper's float32 accumulator of dq."""
    return -(-D // 32)


@lru_cache(1024)
def split_head_dim(dim: int) -> tuple[HeadDimPart, ...]:
    """Split a head dim into powers of two: 192 = 128 + 64, 96 = 64 + 32; one padded part if two are not smaller."""
    padded = max(16, 1 << (dim - 1).bit_length())
    large = padded // 2
    rest = max(16, 1 << (dim - large - 1).bit_length()) if dim > large else 0
    if large >= 16 and rest and large + rest < padded:
        return (HeadDimPart(0, 0, large, large), HeadDimPart(1, large, rest, dim - large))
    return (HeadDimPart(0, 0, padded, dim),)
