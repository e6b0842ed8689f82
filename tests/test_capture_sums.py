"""capture_sums: scales of integer sums, what bounds them, and where no sum is needed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import deterministic
from torch import Tensor

from flexattn import explain
from flexattn.call.problem import Problem
from flexattn.compile.capture_sums import SUM_BITS, CaptureSums, _scale, _sum_factor, has_known_bounds, largest_of_rows
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.differentiate import differentiate
from flexattn.trace.trace import trace

B, H, M, N = 2, 4, 96, 160
T = torch.zeros(M + N, requires_grad=True)
S = torch.zeros((), requires_grad=True)
PAIR = torch.zeros(B, H, M, N, requires_grad=True)


def problem_of(score_mod: Callable[..., Tensor]) -> Problem:
    score = trace(score_mod, "score")
    learned = tuple(i for i, x in enumerate(score.captures) if x.requires_grad)
    q, k = torch.zeros(B, H, M, 16), torch.zeros(B, H, N, 16)
    bound = BoundMod(score.graph, tuple(x.detach() for x in score.captures), score.numbers)
    return Problem(q, k, k, 0.25, bound, score_grad=differentiate(score.graph, learned))


# (mod, how often what a row contributes may come together in a cell; None where a row's contributions are not bounded)
FACTORS: dict[str, tuple[Callable[..., Tensor], float | None]] = {
    "0-d": (lambda s, b, h, i, j: s + S, B * H * M),
    "by head": (lambda s, b, h, i, j: s + T[h], B * M),
    "by row": (lambda s, b, h, i, j: s + T[i], B * H),
    "by column": (lambda s, b, h, i, j: s + T[j], B * H * M),
    "both": (lambda s, b, h, i, j: s + T[i] + T[j], B * H + B * H * M),
    "place": (lambda s, b, h, i, j: s + PAIR[b, h, i, j], 1),
    "less": (lambda s, b, h, i, j: s - 0.5 * T[i - j + N], B * H * M / 2),
    "where": (lambda s, b, h, i, j: torch.where(i > j, s + T[h], s), B * M),
    "softcap": (lambda s, b, h, i, j: 20 * torch.tanh((s + T[h]) / 20), 2 * B * M),
    "slope": (lambda s, b, h, i, j: s + T[h] * (j - i), B * M * (N - 1)),
    "number": (lambda s, b, h, i, j, x=3.0: s + T[h] / x, B * M / 3),
    "product": (lambda s, b, h, i, j: s * T[h], None),
    "of another": (lambda s, b, h, i, j: s + T[h] * T[i], None),
    "sigmoid": (lambda s, b, h, i, j: s * torch.sigmoid(T[h]), None),
    "exp": (lambda s, b, h, i, j: s + torch.exp(T[h]), None),
}


@pytest.mark.parametrize("name", FACTORS)
def test_what_bounds_a_sum(name: str) -> None:
    mod, factor = FACTORS[name]
    problem = problem_of(mod)
    assert has_known_bounds(problem) == (factor is not None)
    if factor is not None:
        assert math.isclose(_sum_factor(problem, 0, measured=False), factor, rel_tol=1e-6)
    assert _sum_factor(problem, 0, measured=True) >= 1


@pytest.mark.parametrize("factor", [1.0, 3.0, 4096.0, 1e9])
@pytest.mark.parametrize("size", [1e-20, 1e-6, 0.75, 1.0, 1e4, 3e30])
def test_scales_leave_no_bit_unused(size: float, factor: float) -> None:
    scale = float(_scale(torch.tensor(size), factor))
    assert math.frexp(scale)[0] == 0.5, "a power of two: scaling does not round"
    assert 2.0 ** (SUM_BITS - 2) <= scale * size * factor <= 2.0**SUM_BITS


def test_scales_at_the_ends() -> None:
    assert _scale(torch.tensor(0.0), 5.0) > 0
    assert _scale(torch.tensor(1e-38), 5.0) == 2.0**126
    assert all(_scale(torch.tensor(x), 5.0) == 0 for x in (math.inf, math.nan, 3e38))


def test_the_largest_row_counts_what_is_finite() -> None:
    d_out, value, delta = torch.ones(1, 2, 3, 4), torch.full((1, 1, 5, 4), 2.0), torch.tensor([1.0, -7.0])
    assert largest_of_rows(d_out, value, delta) == 2 * 4 + 7
    d_out[0, 0, 1], value[0, 0, 2, 0], delta[1] = math.nan, math.inf, math.nan
    assert largest_of_rows(d_out, value, delta) == 2 * 4 + 1
    large = torch.full((1, 1, 1, 4), 1e30)  # whose square is not finite in float32
    assert largest_of_rows(large, value, delta).isclose(torch.tensor(8e30 + 1))


def test_sums_become_gradients() -> None:
    problem = problem_of(lambda s, b, h, i, j: s + T[h] + S)
    sums = CaptureSums.of(problem, integers=True)
    assert [x.dtype for x in sums.buffers.values()] == [torch.int64] * 2
    scales = sums.scales(problem, torch.tensor(0.7))
    sums.buffers[0][3], sums.buffers[1][...] = int(2.5 * scales[0]), int(-1.25 * scales[1])
    found = sums.gradients(problem, scales)
    assert found[0] is not None and found[0][3] == 2.5 and found[0].sum() == 2.5 and found[1] == -1.25
    sums.lost[1].fill_(1)
    found = sums.gradients(problem, scales)
    assert found[0] is not None and found[0][3] == 2.5 and found[1] is not None and found[1].isnan()


def plans(score_mod: Callable[..., Tensor], needs: str = "qkv", batch: int = B) -> tuple[KernelPlan, ...]:
    q, k, v = (torch.zeros(batch, H, n, 64, dtype=torch.bfloat16) for n in (M, N, N))
    for name, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(name in needs)
    return explain(q, k, v, score_mod, target="sm_90").plans[2:]


def test_a_plan_tells_how_captured_gradients_are_summed() -> None:
    bias = FACTORS["by head"][0]
    assert "float32 sums: 4 bytes" in str(plans(bias)[0])
    with deterministic():
        assert "int64 sums, the same in any order: 8 bytes" in str(plans(bias)[0])
        (sizes, dq, _) = plans(FACTORS["product"][0])
    assert (sizes.spec.name, dq.spec.name) == ("backward_sizes", "backward_dq")
    assert sizes.tile == dq.tile and "memory" not in str(sizes)


def test_cells_that_receive_one_contribution_need_no_sum() -> None:
    with deterministic():
        assert [p.sums for p in plans(FACTORS["place"][0])] == ["float", ""]
        shared = lambda s, b, h, i, j: s + PAIR[0, h, i, j]  # noqa: E731
        assert [p.sums for p in plans(shared)] == ["integer", "", ""]  # of all batches, then dQ, dK/dV
        assert [p.sums for p in plans(shared, batch=1)] == ["float", ""]
        assert plans(lambda s, b, h, i, j: s + PAIR[b, h, i, j] + PAIR[b, h, 0, j])[0].sums == "integer"


def test_captured_tensors_that_need_no_gradient_cost_nothing() -> None:
    fixed = T.detach()
    for flag in (contextlib.nullcontext, deterministic):
        with flag():
            made = plans(lambda s, b, h, i, j: s + fixed[h] + 0.1 * fixed[i])
        assert not any(p.sums for p in made)
        assert not any("scatter" in p.text() for p in made)
