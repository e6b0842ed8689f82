"""The CPU engine: attention tile by tile over the block mask, in torch operations, without any tensor of size M x N.

Both directions first run without guards. An excluded pair has weight 0, which hides everything except NaN and infinity
(0 * NaN). If a result is not finite, it is computed again with guards that zero the contribution of excluded pairs.

In batch-invariant mode, guards are always on, strips and tiles have a fixed size, and head dims are padded to whole
cache lines, because the rounding of BLAS depends on the shape of a product and on the alignment of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexattn.call.problem import Gradients, Needs, Problem
from flexattn.call.sinks import sink_gradient
from flexattn.call.wide_dtype import wide_dtype
from flexattn.engines.cpu_mods import CaptureGradients
from flexattn.engines.cpu_scores import Scores
from flexattn.engines.cpu_threads import Queue, in_threads
from flexattn.engines.cpu_tiles import Share, Strip, Tile, fixed_strips, shares, strips

_LOG2E = math.log2(math.e)


@torch.no_grad()
def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out in the dtype and stride order of query, lse, and the row maxima if requested.

    lse is float64, because half an ulp of a float32 lse would scale every weight of the backward.
    """
    query, value = problem.query, problem.value
    problem = _in_lines(problem)
    wide = wide_dtype(query)
    out = _zeros_in_order_of(query, (*query.shape[:3], value.shape[3]), query.dtype)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64, device=query.device)
    largest = torch.full_like(lse, -torch.inf, dtype=wide) if problem.max_scores else None
    if problem.sink is not None:  # for rows without a key
        lse.copy_(problem.sink[..., None].expand(lse.shape))
    if query.numel() > 0:
        queue = Queue(_strips(problem))

        def work(_: int) -> None:
            tiles = Scores(problem)
            for strip in queue:
                if strip.tiles:
                    _forward_strip(tiles, strip, out, lse, largest)

        in_threads(_threads(problem), work, _single(problem))
    return out, lse, None if largest is None else largest.float()


def _forward_strip(tiles: Scores, strip: Strip, out: Tensor, lse: Tensor, largest: Tensor | None) -> None:
    unit = _unit(tiles.problem)
    m_i, l_i, acc = _softmax_strip(tiles, strip, unit, guard=tiles.fixed)
    if not tiles.fixed and not _all_finite(acc, l_i):
        m_i, l_i, acc = _softmax_strip(tiles, strip, unit, guard=True)
    acc.div_(l_i.masked_fill(l_i == 0, 1.0))
    row_lse = m_i.double().div(unit).add_(l_i.double().log_())
    row_lse.masked_fill_(m_i == torch.inf, torch.inf)  # for a score of +inf, out is NaN
    if tiles.problem.sink is not None:
        sink = tiles.problem.sink[..., None, None].expand(*lse.shape, 1)
        total = torch.logaddexp(row_lse, tiles.stack(sink, strip, torch.float64))
        kept = row_lse.sub_(total).exp_().masked_fill_(total == -torch.inf, 0.0)  # rows with neither a key nor a sink
        acc.mul_(kept.masked_fill_(total == torch.inf, torch.nan))
        row_lse = total
    tiles.rows(out, strip).copy_(tiles.unstack(acc, strip)[..., : out.shape[-1]])
    tiles.rows(lse[..., None], strip).copy_(tiles.unstack(row_lse, strip))
    if largest is not None:
        tiles.rows(largest[..., None], strip).copy_(tiles.unstack(m_i.div_(unit), strip))


def _unit(problem: Problem) -> float:
    """Return the factor of the scores. exp2 is faster than exp; without a mod, the product includes log2(e)."""
    return _LOG2E if problem.score is None else 1.0


def _softmax_strip(tiles: Scores, strip: Strip, unit: float, guard: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running maximum (times `unit`), the sum and the weighted values over all tiles."""
    query = tiles.stack(tiles.problem.query, strip)  # [batches * heads, rows, D]
    m_i = query.new_full((*query.shape[:2], 1), -torch.inf)
    l_i = torch.zeros_like(m_i)
    acc = query.new_zeros((*query.shape[:2], tiles.problem.value.shape[-1]))
    for tile in strip.tiles:
        p = tiles.scores(strip, tile, query, guard, unit)
        m_new = torch.maximum(m_i, p.amax(-1, keepdim=True))
        # Rows without a score so far: any finite number prevents -inf - m from being NaN.
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p.sub_(m_safe)
        decay = m_i.sub_(m_safe)
        if unit != _LOG2E:  # after the subtraction: the smaller difference makes the product more precise
            p.mul_(_LOG2E)
            decay.mul_(_LOG2E)
        p.exp2_()
        decay.exp2_()
        l_i.mul_(decay).add_(p.sum(-1, keepdim=True))
        acc.mul_(decay)
        if tiles.problem.dropout is not None:
            p.mul_(tiles.kept(strip, tile))
        _add_product(acc, p, tiles.keys_of(tiles.problem.value, strip, tile), guard)
        m_i = m_new
    return m_i, l_i, acc


@torch.no_grad()
def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> Gradients:
    """Return the needed gradients of query, key, value, tensors captured by score_mod, and the sink."""
    whole, fixed = _in_lines(problem), problem.batch_invariant
    wide_out, wide_d_out = (_widened(x, whole.value.shape[-1]) for x in (out, d_out))
    given = (wide_out, lse[..., None], wide_d_out, None if d_lse is None else d_lse[..., None])
    sums = _backward(whole, given, needs, guard=fixed)
    if not fixed and not _all_finite(*sums.all()):
        sums = _backward(whole, given, needs, guard=True)
    return *sums.finish(problem), _sink_gradient(problem, out, lse, d_out, d_lse) if needs[3] else None


def _sink_gradient(problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    assert problem.sink is not None
    delta = torch.stack([-(o.double() * d).sum(-1) for o, d in zip(out, d_out, strict=True)])
    return sink_gradient(problem.sink, lse, delta if d_lse is None else delta + d_lse)


@dataclass
class _Sums:
    """Gradients in the computing dtype, while they are accumulated."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    captures: CaptureGradients | None

    def all(self) -> list[Tensor]:
        inner = [] if self.captures is None else list(self.captures.sums.values())
        return [x for x in (self.dq, self.dk, self.dv, *inner) if x is not None]

    def finish(self, problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        captures = () if problem.score is None else problem.score.captures
        sums = {} if self.captures is None else self.captures.sums
        return (
            None if self.dq is None else self.dq[..., : problem.query.shape[-1]].to(problem.query.dtype),
            None if self.dk is None else self.dk[..., : problem.key.shape[-1]].to(problem.key.dtype),
            None if self.dv is None else self.dv[..., : problem.value.shape[-1]].to(problem.value.dtype),
            tuple(sums[i].to(c.dtype) if i in sums else None for i, c in enumerate(captures)),
        )


def _backward(
    problem: Problem,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    needs: Needs,
    guard: bool,
) -> _Sums:
    wide = wide_dtype(problem.query)
    pairs = zip((problem.query, problem.key, problem.value), needs[:3], strict=True)
    dq, dk, dv = (_zeros_in_order_of(x, x.shape, wide) if need else None for x, need in pairs)
    has_sites = problem.score is not None and problem.score_grad is not None and problem.score_grad.sites
    if problem.query.numel() == 0:
        return _Sums(dq, dk, dv, CaptureGradients.of(problem, wide) if has_sites else None)
    parts = shares(problem, _threads(problem))

    def work(i: int) -> CaptureGradients | None:
        tiles = Scores(problem)
        captures = CaptureGradients.of(problem, wide) if has_sites else None
        for strip in _strips(problem, parts[i]):
            if strip.tiles:
                _backward_strip(tiles, strip, given, _Sums(dq, dk, dv, captures), guard)
        return captures

    first, *others = in_threads(len(parts), work, _single(problem))
    for other in others:
        if first is not None and other is not None:
            first.add_all(other)
    return _Sums(dq, dk, dv, first)


def _backward_strip(
    tiles: Scores, strip: Strip, given: tuple[Tensor, Tensor, Tensor, Tensor | None], sums: _Sums, guard: bool
) -> None:
    problem = tiles.problem
    out, d_out = tiles.stack(given[0], strip), tiles.stack(given[2], strip)
    exact_lse = tiles.stack(given[1], strip, torch.float64)
    d_lse = None if given[3] is None else tiles.stack(given[3], strip)
    query = tiles.stack(problem.query, strip)
    # For a score of +inf, the gradients are NaN. For a row without a key, exp(-inf - inf) is 0; -inf - -inf is NaN.
    exact_lse = exact_lse.masked_fill(exact_lse == torch.inf, torch.nan)
    exact_lse = exact_lse.masked_fill(exact_lse == -torch.inf, torch.inf)
    unit = _unit(problem)
    lse = (exact_lse * unit).to(tiles.dtype)
    delta = (out.double() * d_out).sum(-1, keepdim=True)
    if d_lse is not None:
        delta -= d_lse
    # The rounding error of lse is a factor of each row of weights. The gradients carry it instead of the weights.
    factor = (lse.double() / unit - exact_lse).nan_to_num_().exp_()  # inf - inf: a row without a key
    delta = (delta * factor).to(tiles.dtype)
    d_out = (d_out * factor).to(tiles.dtype)
    dq = torch.zeros_like(query) if sums.dq is not None else None
    for tile in strip.tiles:
        p = tiles.scores(strip, tile, query, guard, unit)  # bitwise equal to the forward, so the weights sum to 1
        excluded = p == -torch.inf if guard else None
        p.sub_(lse)
        (p if unit == _LOG2E else p.mul_(_LOG2E)).exp2_()
        kept = None if problem.dropout is None else tiles.kept(strip, tile)
        if sums.dv is not None:
            tiles.add_to_keys(sums.dv, strip, tile, _product((p if kept is None else p * kept).mT, d_out, guard))
        if sums.dq is None and sums.dk is None and sums.captures is None:
            continue
        ds = tiles.buffer("gradient", strip, tile)
        torch.bmm(d_out, tiles.keys_of(problem.value, strip, tile).mT, out=ds)
        if kept is not None:
            ds.mul_(kept)
        ds.sub_(delta).mul_(p)
        ds = _through_mod(tiles, strip, tile, query, ds, excluded, sums.captures)
        if ds is None:
            continue
        if dq is not None:
            _add_product(dq, ds, tiles.keys_of(problem.key, strip, tile), guard)
        if sums.dk is not None:
            tiles.add_to_keys(sums.dk, strip, tile, _product(ds.mT, query, guard), problem.scale)
    if dq is not None and sums.dq is not None:
        tiles.rows(sums.dq, strip).copy_(tiles.unstack(dq.mul_(problem.scale), strip))


def _through_mod(
    tiles: Scores, strip: Strip, tile: Tile, query: Tensor, ds: Tensor, excluded: Tensor | None,
    captures: CaptureGradients | None,
) -> Tensor | None:  # fmt: skip
    """Convert the gradient of modified scores to that of plain scores (None: zero); sum those of captured tensors."""
    if tiles.gradient is not None:
        shape = tiles.shape(strip, tile)
        score = tiles.plain_scores(strip, tile, query, tiles.problem.scale, "plain").view(shape)
        inputs = tiles.indices(strip, tile) | {"grad": ds.view(shape), "score": score}
        values = tiles.gradient.run(inputs, shape, writable=("grad", "score"))
        if captures is not None:
            captures.add(values, shape, None if excluded is None else excluded.view(shape))
        output = tiles.gradient.graph.outputs[0]
        if output is None:
            return None
        ds = values[output].to(tiles.dtype).expand(shape).reshape(ds.shape)
    return ds if excluded is None else torch.where(excluded, 0.0, ds)


def _product(weights: Tensor, values: Tensor, guard: bool) -> Tensor:
    """Return weights @ values. With `guard`, non-finite values count only if their weight is not 0."""
    plain = torch.bmm(weights, values)
    if not guard or _all_finite(values):
        return plain
    bad = ~values.isfinite()
    clean = torch.bmm(weights, values.masked_fill(bad, 0.0))
    touched = torch.bmm((weights != 0).to(values.dtype), bad.to(values.dtype)) > 0
    return torch.where(touched, plain, clean)


def _add_product(total: Tensor, weights: Tensor, values: Tensor, guard: bool) -> None:
    if guard:
        total.add_(_product(weights, values, guard))
    else:
        total.baddbmm_(weights, values)


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether all elements are finite, judged by sums. An overflowing sum gives False, which costs only time."""
    return all(math.isfinite(x.sum().item()) for x in tensors)


def _zeros_in_order_of(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros with the dimension order of `x` in memory, except for the last dimension, whose stride is 1."""
    order = sorted(range(x.ndim - 1), key=lambda d: -x.stride(d))
    zeros = torch.zeros([*(shape[d] for d in order), shape[-1]], dtype=dtype, device=x.device)
    return zeros.permute([*(order.index(d) for d in range(x.ndim - 1)), x.ndim - 1])


def _strips(problem: Problem, share: Share | None = None) -> Iterator[Strip]:
    return (fixed_strips if problem.batch_invariant else strips)(problem, share)


_LINE = 16  # elements that fill 64 bytes, also in float32


def _in_lines(problem: Problem) -> Problem:
    """In batch-invariant mode, return the problem with head dims padded to whole cache lines.

    With MKL on AVX2, rows of 33 doubles gave different bits at different positions in a product. Rows of 48 never did.
    """
    if not problem.batch_invariant:
        return problem
    tensors = (problem.query, problem.key, problem.value)
    query, key, value = (_widened(x, -(-x.shape[-1] // _LINE) * _LINE) for x in tensors)
    return replace(problem, query=query, key=key, value=value)


def _widened(x: Tensor, width: int) -> Tensor:
    """Return the tensor padded with zeros to a last dim of `width`."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _threads(problem: Problem) -> int:
    """Return the number of threads for a problem: one if it takes about a millisecond, or if a GPU computes it."""
    B, Hq, M, D = problem.query.shape
    large = problem.query.is_cpu and B * Hq * M * problem.key.shape[2] * D >= 1 << 24
    return torch.get_num_threads() if large else 1


def _single(problem: Problem) -> bool:
    """Whether each operation must run on one core."""
    return problem.batch_invariant and problem.query.is_cpu
