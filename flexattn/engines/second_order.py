"""Forward mode and derivatives beyond the first: the directional derivative of attention in plain torch operations.

Its gradient is the second derivative: if g is the gradient of <out, d>, then <g, c> is <tangents along c, d>. A strip
contains some queries of some heads, with the keys that any of them attends to, about `_PAIRS` pairs at a time. It saves
only its arguments, so nothing of size M x N is allocated, whatever is differentiated. The mods are evaluated only at
attended pairs, and scores of -inf count as not attended, so no NaN of an excluded pair enters a derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, Runs
from flexattn.call.dropout import Dropout
from flexattn.call.problem import Problem
from flexattn.call.wide_dtype import wide_dtype
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.differentiate import differentiate
from flexattn.graph.mod_graph import ModGraph, load_element
from flexattn.graph.nodes import wide
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import recomputed

_PAIRS = 1 << 20  # about 30 tensors of this size are alive at once in a second derivative

Indices = dict[str, Tensor]
Tensors = tuple[Tensor, ...]


def tangents(problem: Problem, directions: Problem) -> tuple[Tensor, Tensor]:
    """Return the derivatives of out and lse when the tensors of `problem` move along those of `directions`.

    They are differentiable in all floating-point tensors of both problems, to any order, except in captures of a mask.
    """
    (B, Hq, M, _), (Bkv, Hkv, N, Dv) = problem.query.shape, problem.value.shape
    lse_dtype = wide_dtype(problem.query)
    if problem.query.numel() == 0 or (N == 0 and problem.sink is None):
        return problem.query.new_zeros((B, Hq, M, Dv)), problem.query.new_zeros((B, Hq, M), dtype=lse_dtype)
    heads, rows = _extent(problem)
    captures = (*_captures(problem.score), *_captures(directions.score), *_captures(problem.mask))
    # Split and unbind, not slices: their backward joins the pieces once. The gradient of a slice has the full size.
    queries = [x.unflatten(1, (Hkv, Hq // Hkv)).unbind(0) for x in (problem.query, directions.query)]
    sinks = [
        x.expand(B, Hq).unflatten(1, (Hkv, -1)).unbind(0) for x in (problem.sink, directions.sink) if x is not None
    ]
    keys = [x.unbind(0) for x in (problem.key, directions.key, problem.value, directions.value)]
    batches = []
    for b in range(B):
        by_heads = zip(
            *(x[b].split(heads) for x in queries), *(x[b % Bkv].split(heads) for x in keys),
            *(x[b].split(heads) for x in sinks), strict=True,
        )  # fmt: skip
        of_heads = []
        for h, (query, d_query, *of_keys) in enumerate(by_heads):
            by_rows = zip(query.split(rows, 2), d_query.split(rows, 2), strict=True)
            strips = [_Strip.of(problem, (b, h * heads, m * rows)) for m in range(-(-M // rows))]
            found = [recomputed(s, *q, *of_keys, *captures)[0] for s, q in zip(strips, by_rows, strict=True)]
            of_heads.append(torch.cat(found, 2))
        batches.append(torch.cat(of_heads).flatten(0, 1))
    moved = torch.stack(batches)  # [B, Hq, M, Dv + 1]
    return moved[..., :Dv].to(problem.query.dtype), moved[..., Dv]


def _extent(problem: Problem) -> tuple[int, int]:
    """Return the number of key heads and of queries in a strip."""
    (_, Hq, M, _), (_, Hkv, N, _) = problem.query.shape, problem.key.shape
    pairs = max(1, Hq // Hkv * N)
    rows = max(1, min(M, _PAIRS // pairs))
    return max(1, min(Hkv, _PAIRS // (pairs * rows))), rows


def _captures(mod: BoundMod | None) -> Tensors:
    return () if mod is None else mod.captures


@frozen
class _Mod:
    """A mod without its captured tensors."""

    graph: ModGraph
    numbers: tuple[int | float, ...]

    @staticmethod
    def of(bound: BoundMod | None) -> _Mod | None:
        return None if bound is None else _Mod(bound.graph, bound.numbers)

    def at(self, selected: Tensor, indices: Indices, captures: Tensors) -> Tensor:
        """Return the values at the true entries of `selected`, as a 1-D tensor."""
        inputs = _select(indices, selected)
        (found,) = self.graph.evaluate(inputs, captures, self.numbers, _load)
        assert found is not None
        return found.expand(inputs["q_idx"].shape)

    def tangent_at(
        self, selected: Tensor, indices: Indices, captures: Tensors, d_score: Tensor,
        directions: Tensors,
    ) -> Tensor:  # fmt: skip
        """Return the derivative at these positions when the score moves along `d_score` and captures along theirs."""
        floating = tuple(i for i, c in enumerate(captures) if c.is_floating_point())
        gradient = differentiate(self.graph, floating)
        sites = [gradient.loads[s] for s in gradient.sites]
        inputs = _select(indices, selected)
        inputs["grad"] = torch.ones_like(inputs["score"])
        wanted = (*gradient.outputs, *(a for site in sites for a in site.args))
        values = iter(gradient.evaluate(inputs, captures, self.numbers, _load, wanted))
        factors = [next(values) for _ in gradient.outputs]
        moved = [d_score.masked_select(selected)]
        for site in sites:
            index = [next(values) for _ in site.args]
            moved.append(_load(directions[site.capture], tuple(i for i in index if i is not None)))
        terms = [f * x for f, x in zip(factors, moved, strict=True) if f is not None]
        return sum(terms, torch.zeros_like(moved[0]))


def _select(indices: Indices, selected: Tensor) -> Indices:
    return {name: x.expand(selected.shape).masked_select(selected) for name, x in indices.items()}


def _load(source: Tensor, index: Tensors) -> Tensor:
    found = load_element(source, index)
    return found.to(wide(found.dtype))


@frozen
class _Strip:
    """An operation on the tensors of some queries of some heads. It returns the derivatives of out and lse."""

    scale: float
    score: _Mod | None
    mask: _Mod | None
    block_mask: BlockMask | None
    dropout: Dropout | None
    has_sink: bool
    heads_q: int
    start: tuple[int, int, int]  # batch, key head, query

    @staticmethod
    def of(problem: Problem, start: tuple[int, int, int]) -> _Strip:
        return _Strip(
            problem.scale, _Mod.of(problem.score), _Mod.of(problem.mask), problem.block_mask, problem.dropout,
            problem.sink is not None, problem.query.shape[1], start,
        )  # fmt: skip

    def __call__(
        self,
        query: Tensor,  # [heads, G, rows, D], like d_query
        d_query: Tensor,
        key: Tensor,  # [heads, N, D], like d_key
        d_key: Tensor,
        value: Tensor,  # [heads, N, Dv], like d_value
        d_value: Tensor,
        *others: Tensor,  # sink and d_sink [heads, G]; captures of score_mod, their directions, captures of mask_mod
    ) -> tuple[Tensor]:  # [heads, G, rows, Dv + 1], lse last
        count = 0 if self.score is None else len(self.score.graph.captures)
        sinks, captures = others[: 2 * self.has_sink], others[2 * self.has_sink :]
        own, directions, of_mask = captures[:count], captures[count : 2 * count], captures[2 * count :]
        with torch.autocast(query.device.type, enabled=False):
            return (self._moved(query, d_query, key, d_key, value, d_value, sinks, own, directions, of_mask),)

    def _moved(
        self, query: Tensor, d_query: Tensor, key: Tensor, d_key: Tensor, value: Tensor, d_value: Tensor,
        sinks: Tensors, captures: Tensors, directions: Tensors, of_mask: Tensors,
    ) -> Tensor:  # fmt: skip
        dtype = wide_dtype(query)
        shape = query.shape[:3]
        indices = self._indices(shape, torch.arange(key.shape[1], dtype=torch.int32, device=key.device))
        live = self._live(indices, torch.Size((*shape, key.shape[1])), of_mask)
        columns = live.flatten(0, 2).any(0).nonzero()[:, 0]
        if len(columns) == 0 and not sinks:
            return query.new_zeros((*shape, value.shape[2] + 1), dtype=dtype)
        live, N = live[..., columns], key.shape[1]
        indices["kv_idx"] = columns.int()
        query, d_query = (x.to(dtype).flatten(1, 2) for x in (query, d_query))
        key, d_key, value, d_value = (x[:, columns].to(dtype) for x in (key, d_key, value, d_value))

        score = (query @ key.mT * self.scale).view(live.shape)
        d_score = ((d_query @ key.mT + query @ d_key.mT) * self.scale).view(live.shape)
        if self.score is not None:
            indices["score"] = score
            with torch.no_grad():
                live = live.masked_scatter(live, self.score.at(live, indices, captures) != -math.inf)
            modified = self.score.at(live, indices, captures)
            moved = self.score.tangent_at(live, indices, captures, d_score, directions)
            score, d_score = (torch.zeros_like(score).masked_scatter(live, x) for x in (modified, moved))
        score = score.masked_fill(~live, -math.inf)
        d_score = d_score.masked_fill(~live, 0.0)
        # The gradients passed back to rows without a key may be arbitrary, because their lse is -inf.
        empty = ~live.any(-1, keepdim=True)
        if sinks:
            sink, d_sink = (x.to(dtype)[..., None, None].expand(*shape, 1) for x in sinks)
            score, d_score = torch.cat([score, sink], -1), torch.cat([d_score, d_sink], -1)
            empty = empty & (sink == -math.inf)
        p = _softmax(score).flatten(1, 2)  # [heads, G * rows, n], the sink last
        d_score = d_score.flatten(1, 2)
        d_lse = (p * d_score).sum(-1, keepdim=True)
        n = len(columns)
        d_p, p = (p * (d_score - d_lse))[..., :n], p[..., :n]
        if self.dropout is not None:
            kept = self.dropout.keep(indices["b"], indices["h"], self.heads_q, indices["q_idx"], [(0, N)])
            kept = kept[..., columns] * self.dropout.keep_scale
            d_p, p = (x * kept.to(dtype).expand(*shape, n).flatten(1, 2) for x in (d_p, p))
        d_out = d_p @ value + p @ d_value
        return torch.cat([d_out, d_lse], -1).unflatten(1, shape[1:]).masked_fill(empty, 0.0)

    def _indices(self, shape: torch.Size, kv_idx: Tensor) -> Indices:
        """Return b, h, q_idx and kv_idx, which broadcast to [heads, G, rows, N]."""
        heads, group, rows = shape
        b, h, m = self.start
        device = kv_idx.device
        head = torch.arange(h * group, (h + heads) * group, dtype=torch.int32, device=device)
        return {
            "b": torch.full((1,), b, dtype=torch.int32, device=device),
            "h": head.view(heads, group, 1, 1),
            "q_idx": torch.arange(m, m + rows, dtype=torch.int32, device=device).view(rows, 1),
            "kv_idx": kv_idx,
        }

    def _live(self, indices: Indices, shape: torch.Size, captures: Tensors) -> Tensor:
        """Return which pairs attend, [heads, G, rows, N], according to the mask's lists, then its mod."""
        if self.block_mask is None:
            return torch.ones(shape, dtype=torch.bool, device=indices["h"].device)
        lists = self.block_mask.kv_runs
        partial, full = (self._listed(x, self.block_mask, indices).expand(shape) for x in (lists.partial, lists.full))
        if self.mask is not None:
            partial = partial.masked_scatter(partial, self.mask.at(partial, indices, captures))
        return partial | full

    def _listed(self, runs: Runs, block_mask: BlockMask, indices: Indices) -> Tensor:
        """Return which pairs lie in blocks of these lists, broadcasting to [heads, G, rows, N]."""
        block_m, block_n = block_mask.BLOCK_SIZE
        head = indices["h"] if block_mask.H > 1 else torch.zeros_like(indices["h"][:1, :1])
        first = (self.start[0] * block_mask.H if block_mask.B > 1 else 0) + head
        row = first * block_mask.kv_runs.order.shape[1] + indices["q_idx"] // block_m  # [heads, G, rows, 1]
        column = indices["kv_idx"] // block_n
        blocks = runs.take(row.flatten().long()).dense(-(-block_mask.seq_lengths[1] // block_n))
        return blocks[:, column.long()].view(*row.shape[:3], len(column))


def _softmax(score: Tensor) -> Tensor:
    """Return the weights of each row, 0 in rows that contain only -inf."""
    largest = score.detach().amax(-1, keepdim=True)
    weight = torch.exp(score - largest.masked_fill(largest == -math.inf, 0.0))
    total = weight.sum(-1, keepdim=True)
    return weight / total.masked_fill(total == 0, 1.0)
