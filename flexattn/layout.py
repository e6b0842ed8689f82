"""layout: the order of tokens of images and volumes. In tiles, the neighborhood of a token touches few blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, DtypeError, IndexRangeError, ModError, message
from flexattn.mods.arguments import described, with_heads_of
from flexattn.mods.kinds import is_score_mod, named


@dataclass(frozen=True, slots=True)
class TiledGrid:
    """The tokens of a grid, tile by tile: those of a tile are adjacent, in row-major order, as are the tiles.

    A block of 128 tokens in row-major order is a part of a row, so a window of 13 x 13 touches 13 rows of blocks. With
    tiles of 8 x 16 it touches 12 blocks at most, 8 on average. Narrow windows may touch fewer blocks in row-major
    order: compare `counts()` of both masks.

    Permute tokens before a model's first layer, restore them after the last one, and rewrite mods that were written for
    row-major order with `mod`. Positional embeddings are permuted as tokens are.

    Args:
        shape: the grid, for example (height, width) or (depth, height, width).
        tile: the shape of a tile. Its product should be the BLOCK_SIZE of masks. Tiles at the ends may be smaller.

    Raises ArgumentError for other numbers of dims, for sizes below 1, and for tensors with other numbers of tokens,
    DtypeError for arguments of other types, ModError for what is no mod, and IndexRangeError for an int that is no
    position. Positions in tensors are not checked.

    Example:
        >>> import torch
        >>> from flexattn import create_block_mask, flex_attention, mods
        >>> grid = TiledGrid((32, 32), (8, 16))
        >>> q = k = v = torch.randn(1, 2, 32 * 32, 16)  # row-major
        >>> window = mods.natten_2d(32, 32, 7)
        >>> mask = create_block_mask(grid.mod(window), None, None, grid.tokens, grid.tokens, device="cpu")
        >>> out = grid.restore(flex_attention(*(grid.permute(x) for x in (q, k, v)), block_mask=mask))  # row-major
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("shape", "tile"):
            sizes = getattr(self, name)
            good = isinstance(sizes, tuple) and sizes and all(type(n) is int and n > 0 for n in sizes)
            if not good:
                fix = f"Pass {name}=(height, width), for example."
                raise ArgumentError(message(name, repr(sizes), "a tuple of ints from 1 on", fix))
        if len(self.shape) != len(self.tile):
            fix = "Pass one size of a tile for each dim of the grid."
            raise ArgumentError(message("tile", f"{len(self.tile)} sizes", f"{len(self.shape)}, as in shape", fix))

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return math.prod(self.shape)

    def row_major(self, position: Any) -> Any:
        """Return the row-major position of the token at a position in this order. Both are ints or integer tensors."""
        if isinstance(position, int) and not 0 <= position < self.tokens:
            expected = f"one of the {self.tokens} tokens, 0 to {self.tokens - 1}"
            raise IndexRangeError(message("position", position, expected, "Pass the position of a token of the grid."))
        rest, outside = self.tokens, 1  # tokens of a slice of the dims that follow, and of a tile in those before
        starts, sizes = [], []
        for n, tile in zip(self.shape, self.tile, strict=True):
            rest //= n
            index = position // (outside * tile * rest)
            position = position - index * (outside * tile * rest)
            starts.append(index * tile)
            sizes.append(tile if n % tile == 0 else _at_most(n - index * tile, tile))
            outside = outside * sizes[-1]
        found: Any = 0
        stride = 1
        for n, start, size in zip(reversed(self.shape), reversed(starts), reversed(sizes), strict=True):
            found = found + stride * (start + position % size)
            position = position // size
            stride *= n
        return found

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Return the row-major position of each token in this order, int64 [tokens]."""
        return self.row_major(torch.arange(self.tokens, device=device))

    @property
    def has_whole_tiles(self) -> bool:
        """Whether all tiles have the same shape."""
        return all(n % tile == 0 for n, tile in zip(self.shape, self.tile, strict=True))

    def permute(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return a tensor with tokens along `dim` in row-major order in this order."""
        self._check_tokens(x, dim)
        if not self.has_whole_tiles:
            return x.index_select(dim, self.order(x.device))
        dim = dim % x.dim()
        return self._tiles_of_row_major(x, dim).flatten(dim, dim + 2 * len(self.shape) - 1)

    def restore(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return a tensor with tokens along `dim` in this order in row-major order."""
        self._check_tokens(x, dim)
        if not self.has_whole_tiles:
            return x.index_select(dim, self.order(x.device).argsort())
        dim, n = dim % x.dim(), len(self.shape)
        pairs = [axis for i in range(n) for axis in (dim + i, dim + n + i)]
        return _moved(self._tiles_in_order(x, dim), dim, pairs).flatten(dim, dim + 2 * n - 1)

    def _tiles_of_row_major(self, x: Tensor, dim: int) -> Tensor:
        """Return a view of a tensor in row-major order: instead of `dim`, the dims of tiles, then those within a tile.

        All tiles must have the same shape, and `dim` is not negative.
        """
        n = len(self.shape)
        sizes = [size for whole, tile in zip(self.shape, self.tile, strict=True) for size in (whole // tile, tile)]
        return _moved(x.unflatten(dim, sizes), dim, [*range(dim, dim + 2 * n, 2), *range(dim + 1, dim + 2 * n, 2)])

    def _tiles_in_order(self, x: Tensor, dim: int) -> Tensor:
        """Return the same view of a tensor in this order."""
        counts = [whole // tile for whole, tile in zip(self.shape, self.tile, strict=True)]
        return x.unflatten(dim, (*counts, *self.tile))

    def _check_tokens(self, x: Tensor, dim: int) -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(message("x", described(x), "a tensor", "Convert it with torch.as_tensor."))
        if isinstance(dim, bool) or not isinstance(dim, (int, Integral)):
            raise DtypeError(message("dim", repr(dim), "an int", "Pass the dim of the tokens, -2 by default."))
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.tokens:
            fix = "Pass the dim of the tokens. Split off tokens that are not of the grid, and add them afterwards."
            raise ArgumentError(message("x", f"shape {tuple(x.shape)}", f"{self.tokens} tokens along dim {dim}", fix))

    def mod(self, mod: Callable[..., Any]) -> Callable[..., Any]:
        """Return a mask_mod or score_mod of row-major positions as one of positions in this order."""
        if not callable(mod):
            expected = "a callable mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx)"
            raise ModError(message("mod", described(mod), expected, "Pass the function."))

        def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
            return mod(score, b, h, self.row_major(q_idx), self.row_major(kv_idx))

        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
            return mod(b, h, self.row_major(q_idx), self.row_major(kv_idx))

        name = f"{getattr(mod, '__name__', 'mod')}_in_tiles"
        return with_heads_of(mod, named(score, name)) if is_score_mod(mod) else named(mask, name)


def _moved(x: Tensor, dim: int, axes: list[int]) -> Tensor:
    """Return a view with these axes from `dim` on."""
    return x.permute(*range(dim), *axes, *range(dim + len(axes), x.dim()))


def _at_most(n: Any, most: int) -> Any:
    return n.clamp(max=most) if isinstance(n, Tensor) else min(n, most)
