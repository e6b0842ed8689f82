"""head_dims: how head dims are split into tiles of columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Widths (of q and k, of v) that Hopper's kernels are made for; narrower heads are filled with zeros by the TMA unit.
WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))


@dataclass(frozen=True)
class Part:
    """A slice of a head dim that one matrix product takes: `width` is a power of two, `used` what is there."""

    index: int
    offset: int
    width: int
    used: int


def widths_of(D: int, Dv: int) -> tuple[int, int]:
    """Return the least of WIDTHS that hold these head dims; (0, 0) where none does."""
    return next((widths for widths in WIDTHS if widths[0] >= D and widths[1] >= Dv), (0, 0))


def pieces_of(D: int) -> int:
    """Return of how many pieces of 32 columns Hopper's float32 sum of dq is."""
    return -(-D // 32)


@lru_cache(1024)
def split_head_dim(dim: int) -> tuple[Part, ...]:
    """Split a head dim into powers of two: 192 = 128 + 64, 96 = 64 + 32; one padded part where two do not help."""
    padded = max(16, 1 << (dim - 1).bit_length())
    large = padded // 2
    rest = max(16, 1 << (dim - large - 1).bit_length()) if dim > large else 0
    if large >= 16 and rest and large + rest < padded:
        return (Part(0, 0, large, large), Part(1, large, rest, dim - large))
    return (Part(0, 0, padded, dim),)
