"""Scores of a tile: the product of queries and keys, score_mod and mask_mod, with slicing and stacking."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.call.wide_dtype import wide_dtype
from flexattn.engines.cpu_mods import TileGraph
from flexattn.engines.cpu_tiles import Strip, Tile


class Scores:
    """Slices tensors into tiles [batches * key heads, group * rows, ...] and computes tiles of scores."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = wide_dtype(problem.query)
        self.device = problem.query.device
        self.fixed = problem.batch_invariant  # all strips and tiles have one size, and may extend past the lengths
        self._buffers: dict[str, Tensor] = {}
        self.group = problem.query.shape[1] // max(1, problem.key.shape[1])
        score, mask = problem.score, problem.mask
        self.score = None if score is None else TileGraph(score.graph, score.captures, score.numbers, self.device)
        self.mask = None if mask is None else TileGraph(mask.graph, mask.captures, mask.numbers, self.device)
        self.gradient = None
        if score is not None and problem.score_grad is not None:
            self.gradient = TileGraph(problem.score_grad, score.captures, score.numbers, self.device)

    def shape(self, strip: Strip, tile: Tile) -> torch.Size:
        """Return the shape [batches, key heads, group, rows, keys] of a tile of scores."""
        (h0, h1), (g0, g1), (m0, m1) = strip.key_heads, strip.group, strip.rows
        return torch.Size((len(strip.batches), h1 - h0, g1 - g0, m1 - m0, tile.width))

    def rows(self, x: Tensor, strip: Strip) -> Tensor:
        """Return the strip's rows of a tensor [B, Hq, M, ...] as a view [batches, key heads, group, rows, ...]."""
        heads = _entries(x, strip.batches).unflatten(1, (x.shape[1] // self.group, self.group))
        return heads[:, slice(*strip.key_heads), slice(*strip.group), slice(*strip.rows)]

    def stack(self, x: Tensor, strip: Strip, dtype: torch.dtype | None = None) -> Tensor:
        """Return the strip's rows, [batches * key heads, group * rows, ...], in `dtype` or the computing dtype."""
        rows, dtype = self.rows(x, strip), dtype or self.dtype
        if self.fixed:
            rows = _filled(rows, 3, strip.rows[1] - strip.rows[0], dtype)
        batches, heads, members, length = rows.shape[:4]
        return rows.to(dtype).reshape(batches * heads, members * length, *rows.shape[4:])

    def unstack(self, x: Tensor, strip: Strip) -> Tensor:
        (h0, h1), (g0, g1), (m0, m1) = strip.key_heads, strip.group, strip.rows
        rows = x.view(len(strip.batches), h1 - h0, g1 - g0, m1 - m0, *x.shape[2:])
        return rows[:, :, :, : self.problem.query.shape[2] - m0]

    def keys_of(self, x: Tensor, strip: Strip, tile: Tile) -> Tensor:
        """Return the tile's keys of a tensor [B or 1, Hkv, N, ...] as [batches * key heads, keys, ...]."""
        heads = _entries(x, strip.batches)[:, slice(*strip.key_heads)]
        if self.fixed:
            ((lo, hi),) = tile.keys
            return _filled(heads[:, :, lo:hi], 2, tile.width, self.dtype).flatten(0, 1)
        pieces = [heads[:, :, lo:hi].to(self.dtype) for lo, hi in tile.keys]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)).flatten(0, 1)

    def add_to_keys(self, total: Tensor, strip: Strip, tile: Tile, part: Tensor, factor: float = 1.0) -> None:
        """Add [batches * key heads, keys, ...] to the keys of the tile."""
        part = part.unflatten(0, (len(strip.batches), -1))
        if total.shape[0] < len(strip.batches):  # keys shared by all batch entries
            part, heads = part.sum(0, keepdim=True), total
        else:
            heads = _entries(total, strip.batches)
        heads = heads[:, slice(*strip.key_heads)]
        first = 0
        for lo, hi in tile.keys:
            into = heads[:, :, lo:hi]
            into.add_(part[:, :, first : first + into.shape[2]], alpha=factor)
            first += hi - lo

    def indices(self, strip: Strip, tile: Tile, first_column: int = 0) -> dict[str, Tensor]:
        """Return b, h, q_idx and kv_idx as int32 tensors that broadcast to the tile."""
        (h0, h1), (g0, g1) = strip.key_heads, strip.group
        batches = strip.batches
        key_heads = self._arange(h0, h1).view(-1, 1, 1, 1)
        keys = [self._arange(lo, hi) for lo, hi in tile.keys]
        return {
            "b": self._arange(batches.start, batches.stop, batches.step).view(-1, 1, 1, 1, 1),
            "h": key_heads * self.group + self._arange(g0, g1).view(-1, 1, 1),
            "q_idx": self._arange(*strip.rows).view(-1, 1),
            "kv_idx": (keys[0] if len(keys) == 1 else torch.cat(keys))[first_column:],
        }

    def _arange(self, first: int, end: int, step: int = 1) -> Tensor:
        return torch.arange(first, end, step, dtype=torch.int32, device=self.device)

    def kept(self, strip: Strip, tile: Tile) -> Tensor:
        """Return the dropout factors of the weights, [batches * key heads, group * rows, keys]."""
        assert self.problem.dropout is not None
        indices, dropout = self.indices(strip, tile), self.problem.dropout
        heads = self.problem.query.shape[1]
        keep = dropout.keep(indices["b"], indices["h"], heads, indices["q_idx"], tile.keys)
        keep = keep.expand(self.shape(strip, tile))
        return keep.flatten(2, 3).flatten(0, 1).to(self.dtype).mul_(dropout.keep_scale)

    def plain_scores(self, strip: Strip, tile: Tile, query: Tensor, factor: float, name: str = "scores") -> Tensor:
        """Return query @ key.mT * factor, [batches * key heads, group * rows, keys].

        The next call with the same `name` overwrites the result.
        """
        key = self.keys_of(self.problem.key, strip, tile)
        s = self.buffer(name, strip, tile)
        return torch.baddbmm(s, query, key.mT, beta=0, alpha=factor, out=s)

    def buffer(self, name: str, strip: Strip, tile: Tile) -> Tensor:
        """Return a reused buffer for a tile of scores. Page faults of new memory cost 10% of a forward."""
        batches, heads, members, rows, width = self.shape(strip, tile)
        size = batches * heads * members * rows * width
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._buffers[name][:size].view(batches * heads, members * rows, width)

    def scores(self, strip: Strip, tile: Tile, query: Tensor, guard: bool, unit: float = 1.0) -> Tensor:
        """Return scores after mod and mask, like `plain_scores`. Without a mod they are multiplied by `unit`.

        Without `guard`, a NaN at an excluded position is kept.
        """
        shape = self.shape(strip, tile)
        live = self._live(strip, tile)
        if self.score is None:
            s = self.plain_scores(strip, tile, query, self.problem.scale * unit)
        else:
            s = self.plain_scores(strip, tile, query, self.problem.scale)
            plain = s.view(shape)
            values = self.score.run(self.indices(strip, tile) | {"score": plain}, shape, writable=("score",))
            modified = values[self.score.graph.output]
            if modified is not plain:
                plain.copy_(modified)
            if self.score.outside:
                _check(self.score, live, shape, tile.full)
        if live is not None:
            _exclude(s.view(shape)[..., tile.full :], live, guard)
        return s

    def _live(self, strip: Strip, tile: Tile) -> Tensor | None:
        """Return which pairs attend in the columns after `tile.full`, as a tensor that broadcasts; None: all."""
        states = tile.states
        if tile.full == tile.width or (self.mask is None and states is None):
            return None
        if states is not None and (self.mask is None or states.partial is None):
            return states.live
        assert self.mask is not None
        *heads, rows, _ = self.shape(strip, tile)
        shape = torch.Size((*heads, rows, tile.width - tile.full))
        values = self.mask.run(self.indices(strip, tile, tile.full), shape)
        asked = values[self.mask.graph.output]
        if states is not None and states.partial is not None:
            asked = asked & states.partial
        for outside in self.mask.outside:
            outside.check(asked)
        return asked if states is None or states.full is None else asked | states.full


def _entries(x: Tensor, batches: range) -> Tensor:
    """Return batch entries of a tensor [B or 1, ...] as a view."""
    if x.shape[0] == 1:
        return x.expand(len(batches), *x.shape[1:])
    return x[batches.start : batches.stop : batches.step]


def _filled(x: Tensor, axis: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return a copy padded with zeros to `length` along an axis, always with the same layout, which affects BLAS."""
    shape = list(x.shape)
    shape[axis] = length
    filled = torch.zeros(shape, dtype=dtype, device=x.device)
    filled.narrow(axis, 0, x.shape[axis]).copy_(x)
    return filled


def _check(mod: TileGraph, live: Tensor | None, shape: torch.Size, full: int) -> None:
    """Raise if the mod used an out-of-range index at an attended position."""
    if live is not None:
        live = live.expand(*shape[:-1], shape[-1] - full)
        live = torch.nn.functional.pad(live, (full, 0), value=True)
    for outside in mod.outside:
        outside.check(live)


def _exclude(s: Tensor, live: Tensor, guard: bool) -> None:
    """Set positions where `live` is false to -inf."""
    if guard or live.numel() * 2 > s.numel():
        torch.where(live, s, s.new_tensor(-torch.inf), out=s)
    else:
        # 20 times as fast as where, because a comparison of floats is vectorized. It keeps NaN.
        bound = torch.full(live.shape, torch.inf, dtype=s.dtype, device=s.device).masked_fill_(~live, -torch.inf)
        torch.minimum(s, bound, out=s)
