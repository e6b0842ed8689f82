"""capture_sums: the accumulators of captured tensors' gradients, in floats or integers.

A float sum depends on its order, and atomic adds have no fixed order. With deterministic algorithms, each contribution
is truncated to a multiple of a step and added as an int64. The step is a power of two, computed on the device for each
call. It is large enough that no element's sum overflows, and at most 2**-57 of the bound of such a sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.scatter import scatter_captures
from flexattn.graph.magnitudes import gradient_factors
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Input, Load
from flexattn.process.frozen_class import frozen

# Sums stay below 2**SUM_BITS steps. 4 bits are spare, because the weights of a row sum to 1 only up to rounding.
SUM_BITS = 59
_LARGEST_SCALE = 126  # as a power of two: 1 / scale is still a normal float32
_LARGEST_SIZE = 2.0**120  # of a row's contributions; beyond it the gradient is NaN, as on float32 overflow


def sums_integers(problem: Problem) -> bool:
    """Return whether gradients of captured tensors are summed in an order that must not matter."""
    return torch.are_deterministic_algorithms_enabled() and _has_sums(problem)


def _has_sums(problem: Problem) -> bool:
    """Return whether an element of a captured tensor may receive more than one contribution."""
    graph = problem.score_grad
    if graph is None or not graph.sites:
        return False
    used = [graph.loads[site].capture for site in graph.sites]
    shape = (*problem.query.shape[:3], problem.key.size(2))
    return len(used) > len(set(used)) or any(
        math.prod(_unnamed(graph, graph.loads[site], shape)) > 1 for site in graph.sites
    )


def has_known_bounds(problem: Problem) -> bool:
    """Return whether the gradient at each use of a captured tensor is at most a known multiple of the score's."""
    return None not in _factors_of(problem)


@frozen
class CaptureSums:
    """Gradient accumulators by capture position; `sizes` and `lost` have one entry per buffer, in the same order."""

    buffers: dict[int, Tensor]  # float32 or int64, with the shapes of the captured tensors
    sizes: tuple[Tensor, ...] = ()  # for int64: bits of the largest sum of a row's |contributions|, float32 as int32
    lost: tuple[Tensor, ...] = ()  # for int64: int32, nonzero if a contribution was not a number

    @staticmethod
    def of(problem: Problem, integers: bool) -> CaptureSums:
        """Return zeroed accumulators for the captured tensors of a problem."""
        if problem.score is None or problem.score_grad is None:
            return CaptureSums({})
        captures, summed = problem.score.captures, scatter_captures(problem.score_grad)
        dtype, device = torch.int64 if integers else torch.float32, problem.query.device
        buffers = {i: torch.zeros(captures[i].shape, dtype=dtype, device=device) for i in summed}
        if not integers:
            return CaptureSums(buffers)
        sizes, lost = torch.zeros((2, len(summed)), dtype=torch.int32, device=device).unbind()
        return CaptureSums(buffers, sizes.unbind(), lost.unbind())

    def scales(self, problem: Problem, largest: Tensor | None) -> tuple[Tensor, ...]:
        """Return the steps per unit of each buffer, for rows that contribute at most `largest` (None: `sizes`)."""
        sizes = tuple(s.view(torch.float32) for s in self.sizes) if largest is None else (largest,) * len(self.sizes)
        return tuple(
            _scale(size, _sum_factor(problem, i, largest is None)) for i, size in zip(self.buffers, sizes, strict=False)
        )

    def gradients(self, problem: Problem, scales: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradient of each captured tensor in its dtype; all NaN if a contribution was not a number."""
        captures = () if problem.score is None else problem.score.captures
        sums = dict(self.buffers)
        for i, lost, scale in zip(self.buffers, self.lost, scales, strict=False):
            sums[i] = self.buffers[i] / torch.where(lost == 0, scale, math.nan)
        return tuple(sums[i].to(c.dtype) if i in sums else None for i, c in enumerate(captures))


def largest_of_rows(d_out: Tensor, value: Tensor, delta: Tensor, kept: float = 1.0) -> Tensor:
    """Return an upper bound of sum(|d score|) over a row, float32, 0-d.

    A score's gradient is weight * (kept * d_out . value + delta), without the first term if it is dropped, and the
    weights of a row sum to at most 1. Non-finite elements are ignored, because their contributions are not finite
    either. Norms of rows would give a tighter bound of the dot product, but need float64 to avoid overflow: 0.56 ms of
    4.4 (T5's buckets, 8x32x2048, H200).
    """
    of_rows, of_keys, of_delta = (_largest(x) for x in (d_out, value, delta))
    return (kept * value.size(-1) * of_rows * of_keys + of_delta).float()


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of the finite elements, float64, 0-d."""
    return torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), math.inf).double()


def _scale(size: Tensor, factor: float) -> Tensor:
    """Return a power of two such that size * factor times it is below 2**SUM_BITS; 0 if the size is too large."""
    _, exponent = torch.frexp(size)  # size < 2**exponent
    power = (SUM_BITS - math.frexp(factor)[1] - exponent).clamp(max=_LARGEST_SCALE)
    scale = ((power + 127) << 23).view(torch.float32)
    return torch.where(size < _LARGEST_SIZE, scale, 0.0)


def _sum_factor(problem: Problem, capture: int, measured: bool) -> float:
    """Return how many times a row's bound may be added to one element of a captured tensor."""
    assert problem.score_grad is not None
    graph = problem.score_grad
    factors = (1.0,) * len(graph.sites) if measured else _factors_of(problem)
    total = 0.0
    for site, factor in zip(graph.sites, factors, strict=True):
        if graph.loads[site].capture == capture:
            assert factor is not None
            total += factor * math.prod(_unnamed(graph, graph.loads[site], problem.query.shape[:3]))
    return max(1.0, total)


def _unnamed(graph: ModGraph, site: Load, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of those of b, h, q_idx, kv_idx that are not an index of the site.

    Each element may receive contributions from all of their values.
    """
    named = {node.name for a in site.args if isinstance(node := graph.nodes[a], Input)}
    return tuple(size for name, size in zip(MASK_INPUTS, sizes, strict=False) if name not in named)


def _factors_of(problem: Problem) -> tuple[float | None, ...]:
    assert problem.score is not None and problem.score_grad is not None
    B, H, M, _ = problem.query.shape
    return gradient_factors(problem.score_grad, problem.score.numbers, (B, H, M, problem.key.size(2)))
