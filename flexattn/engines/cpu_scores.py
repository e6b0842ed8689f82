"""Scores of a tile: the product of queries and keys, score mod and mask, with the cutting and stacking."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.engines.cpu_mods import TileGraph
from flexattn.engines.cpu_tiles import FULL, PARTIAL, Strip, Tile
from flexattn.problem import Problem


def computing_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class Scores:
    """Cuts tensors of the problem into stacked tiles [key heads, group * rows, ...] and computes tiles of scores."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = computing_dtype(problem.query)
        self.fixed = problem.batch_invariant  # all strips and tiles have one size, and may pass the lengths
        self._buffers: dict[str, Tensor] = {}
        self.group = problem.query.shape[1] // max(1, problem.key.shape[1])
        score, mask = problem.score, problem.mask
        self.score = None if score is None else TileGraph(score.graph, score.captures, score.numbers)
        self.mask = None if mask is None else TileGraph(mask.graph, mask.captures, mask.numbers)
        self.gradient = None
        if score is not None and problem.score_grad is not None:
            self.gradient = TileGraph(problem.score_grad, score.captures, score.numbers)

    def shape(self, strip: Strip, tile: Tile) -> torch.Size:
        """Return [key heads, group, rows, keys] of a tile of scores."""
        (h0, h1), (g0, g1), (m0, m1) = strip.key_heads, strip.group, strip.rows
        return torch.Size((h1 - h0, g1 - g0, m1 - m0, tile.width))

    def rows(self, x: Tensor, strip: Strip) -> Tensor:
        """Return the rows of the strip of a tensor [B, Hq, M, ...] as a view [key heads, group, rows, ...]."""
        heads = x[strip.batch].unflatten(0, (x.shape[1] // self.group, self.group))
        return heads[slice(*strip.key_heads), slice(*strip.group), slice(*strip.rows)]

    def stack(self, x: Tensor, strip: Strip, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows of the strip as [key heads, group * rows, ...] in `dtype`, else in the computing dtype."""
        rows, dtype = self.rows(x, strip), dtype or self.dtype
        if self.fixed:
            rows = _filled(rows, 2, strip.rows[1] - strip.rows[0], dtype)
        return rows.to(dtype).flatten(1, 2)

    def unstack(self, x: Tensor, strip: Strip) -> Tensor:
        (g0, g1), (m0, m1) = strip.group, strip.rows
        return x.unflatten(1, (g1 - g0, m1 - m0))[:, :, : self.problem.query.shape[2] - m0]

    def keys_of(self, x: Tensor, strip: Strip, tile: Tile) -> Tensor:
        """Return the keys of the tile of a tensor [B or 1, Hkv, N, ...] as [key heads, keys, ...]."""
        heads = x[strip.batch % x.shape[0], slice(*strip.key_heads)]
        if self.fixed:
            ((lo, hi),) = tile.keys
            return _filled(heads[:, lo:hi], 1, tile.width, self.dtype)
        pieces = [heads[:, lo:hi].to(self.dtype) for lo, hi in tile.keys]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def add_to_keys(self, total: Tensor, strip: Strip, tile: Tile, part: Tensor, factor: float = 1.0) -> None:
        """Add [key heads, keys, ...] to the keys of the tile."""
        heads = total[strip.batch % total.shape[0], slice(*strip.key_heads)]
        first = 0
        for lo, hi in tile.keys:
            into = heads[:, lo:hi]
            into.add_(part[:, first : first + into.shape[1]], alpha=factor)
            first += hi - lo

    def indices(self, strip: Strip, tile: Tile, first_column: int = 0) -> dict[str, Tensor]:
        """Return b, h, q_idx and kv_idx as int32 tensors that broadcast to the tile."""
        (h0, h1), (g0, g1) = strip.key_heads, strip.group
        key_heads = torch.arange(h0, h1, dtype=torch.int32).view(-1, 1, 1, 1)
        members = torch.arange(g0, g1, dtype=torch.int32).view(-1, 1, 1)
        keys = [torch.arange(lo, hi, dtype=torch.int32) for lo, hi in tile.keys]
        return {
            "b": torch.full((1, 1, 1, 1), strip.batch, dtype=torch.int32),
            "h": key_heads * self.group + members,
            "q_idx": torch.arange(*strip.rows, dtype=torch.int32).view(-1, 1),
            "kv_idx": torch.cat(keys)[first_column:],
        }

    def kept(self, strip: Strip, tile: Tile) -> Tensor:
        """Return what dropout multiplies the weights by, [key heads, group * rows, keys]."""
        assert self.problem.dropout is not None
        places, dropout = self.indices(strip, tile), self.problem.dropout
        batch_head = places["b"] * self.problem.query.shape[1] + places["h"]
        keep = dropout.keep(batch_head, places["q_idx"], tile.keys).expand(self.shape(strip, tile))
        return keep.flatten(1, 2).to(self.dtype).mul_(dropout.keep_scale)

    def plain_scores(self, strip: Strip, tile: Tile, query: Tensor, factor: float, name: str = "scores") -> Tensor:
        """Return query @ key.mT * factor, [key heads, group * rows, keys]; it lasts until `name` is asked for again."""
        key = self.keys_of(self.problem.key, strip, tile)
        s = self.buffer(name, strip, tile)
        return torch.baddbmm(s, query, key.mT, beta=0, alpha=factor, out=s)

    def buffer(self, name: str, strip: Strip, tile: Tile) -> Tensor:
        """Return memory for a tile of scores, the same each time: the pages of new memory cost 10% of a forward."""
        heads, members, rows, width = self.shape(strip, tile)
        size = heads * members * rows * width
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return self._buffers[name][:size].view(heads, members * rows, width)

    def scores(self, strip: Strip, tile: Tile, query: Tensor, guard: bool, unit: float = 1.0) -> Tensor:
        """Return scores after mod and mask, [key heads, group * rows, keys]; `unit` multiplies them where no mod is.

        Without `guard` a NaN at an excluded place stays.
        """
        shape = self.shape(strip, tile)
        live = self._live(strip, tile)
        if self.score is None:
            s = self.plain_scores(strip, tile, query, self.problem.scale * unit)
        else:
            s = self.plain_scores(strip, tile, query, self.problem.scale)
            plain = s.view(shape)
            values = self.score.run(self.indices(strip, tile) | {"score": plain}, shape, writable=("score",))
            modified = values[self.score.graph.outputs[0]]  # type: ignore[index]
            if modified is not plain:
                plain.copy_(modified)
            if self.score.outside:
                _check(self.score, live, shape, tile.full)
        if live is not None:
            _exclude(s.view(shape)[..., tile.full :], live, guard)
        return s

    def _live(self, strip: Strip, tile: Tile) -> Tensor | None:
        """Return which places attend in the columns after `tile.full`, as a tensor that broadcasts; None: all."""
        if tile.full == tile.width or (self.mask is None and tile.states is None):
            return None
        if self.mask is None:
            return tile.states != 0  # type: ignore[union-attr]
        *heads, rows, _ = self.shape(strip, tile)
        shape = torch.Size((*heads, rows, tile.width - tile.full))
        values = self.mask.run(self.indices(strip, tile, tile.full), shape)
        live = values[self.mask.graph.outputs[0]]  # type: ignore[index]
        if tile.states is None:
            asked = live
        else:
            asked = live & (tile.states == PARTIAL)
            live = asked | (tile.states == FULL)
        for outside in self.mask.outside:
            outside.check(asked)
        return live


def _filled(x: Tensor, axis: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return a copy with zeros up to `length` along an axis; new memory lies the same each time, as BLAS minds."""
    shape = list(x.shape)
    shape[axis] = length
    filled = torch.zeros(shape, dtype=dtype)
    filled.narrow(axis, 0, x.shape[axis]).copy_(x)
    return filled


def _check(mod: TileGraph, live: Tensor | None, shape: torch.Size, full: int) -> None:
    """Raise if the mod used an index out of range at an attended place."""
    if live is not None:
        live = live.expand(*shape[:-1], shape[-1] - full)
        live = torch.nn.functional.pad(live, (full, 0), value=True)
    for outside in mod.outside:
        outside.check(live)


def _exclude(s: Tensor, live: Tensor, guard: bool) -> None:
    """Put -inf where `live` is false."""
    if guard or live.numel() * 2 > s.numel():
        torch.where(live, s, s.new_tensor(-torch.inf), out=s)
    else:
        # 20 times the speed of where: a comparison of floats is vectorised. It keeps NaN.
        bound = torch.full(live.shape, torch.inf, dtype=s.dtype).masked_fill_(~live, -torch.inf)
        torch.minimum(s, bound, out=s)
