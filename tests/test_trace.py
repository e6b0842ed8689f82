"""trace: which values of a mod become numbers, literals and captured tensors, and the printed graphs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager_comparison import POINTS, H, N, Straight, check_score, values
from expecttest import assert_expected_inline
from torch import Tensor

from flexattn.errors import RetraceWarning, UnsupportedError
from flexattn.graph.differentiate import differentiate
from flexattn.graph.nodes import Const
from flexattn.trace import recording
from flexattn.trace.trace import trace


def test_numbers_in_all_positions() -> None:
    """Some become runtime numbers, some (math.sqrt, int) literals under a guard: the value is right in any case."""

    def make(g: float, n: int) -> list[Callable[..., Tensor]]:
        return [
            lambda s, b, h, q, k: s * math.sqrt(g) + math.exp(-g),
            lambda s, b, h, q, k: torch.clamp(s, -g, g) + s**n + sum(q * i for i in range(n)),
            lambda s, b, h, q, k: s.masked_fill(q < k, -g) + torch.where(q > k, g, s) + torch.where(q > k, g, 0.0),
            lambda s, b, h, q, k: s + max(n, 2) + min(g, 1.0) + abs(g) + n**2 + (n << 1) + g**2 + 2**-n,
            lambda s, b, h, q, k: s + torch.tensor(g) + torch.full((), g) + torch.tensor([g, 2.0])[0] + s.new_tensor(g),
            lambda s, b, h, q, k: s * round(g, 1) + int(g) + n / 2 + n % 2 + n // 2 + float(n),
            lambda s, b, h, q, k: s + (q - k) / g + g / (q + 1) + (q - k) / n,
            lambda s, b, h, q, k: torch.lerp(s, s * 2, g) + torch.add(s, s, alpha=g) + torch.addcmul(s, s, s, value=g),
            lambda s, b, h, q, k: F.elu(s, g) + F.hardtanh(s, -g, g) + torch.pow(g, s) + F.softplus(s, beta=g),
        ]

    for g, n in ((0.5, 3), (1.25, 2), (0.5, 4)):
        for mod in make(g, n):
            check_score(mod)


def test_divisors_and_infinities_stay_literals() -> None:
    def make(stride: int, low: float) -> Callable[..., Tensor]:
        return lambda s, b, h, q, k: torch.where(q % stride == k // stride, s, low)

    for stride in (2, 3):
        bound = check_score(make(stride, -math.inf))
        assert bound.numbers == ()
        assert next(n.value for n in bound.graph.nodes if isinstance(n, Const)) == stride
    assert check_score(make(3, -2.0)).numbers == (-2.0,)


def test_custom_functions_are_refused_where_they_run() -> None:
    use = False

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return Straight.apply(score) if use else score * 2

    trace(mod, "score")
    use = True
    with pytest.raises(UnsupportedError, match=r"autograd\.Function Straight at .*test_trace\.py:\d+, expected plain"):
        trace(mod, "score")
    x = torch.ones((), requires_grad=True)
    assert Straight.apply(x * 1.4).item() == 1.0  # outside of a trace it works as ever
    trace(lambda b, h, q_idx, kv_idx: Straight.apply(q_idx.float()) > 1, "mask")


def test_numpy_numbers() -> None:
    gain, shift = np.float32(0.5), np.int64(2)
    assert check_score(lambda s, b, h, q, k: s * gain + (q + shift)).numbers == (0.5, 2)


def test_long_literal_lists_are_loaded() -> None:
    bound = check_score(lambda s, b, h, q, k: s + torch.tensor([i * i for i in range(40)])[q + k])
    assert [c.shape for c in bound.captures] == [(40,)]
    check_score(lambda s, b, h, q, k: s + torch.linspace(0, 1, 50, dtype=torch.float64)[q] + torch.arange(100).sum())


def test_a_long_list_is_one_tensor_for_all_calls() -> None:
    """Neither a node for each number, nor a tensor for each call; the list is read again when it changes."""
    numbers = [i * 7 % 1000 for i in range(5000)]
    table = [[i / 3 + j for j in range(7)] for i in range(100)]

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = torch.tensor(table)[q, k % 7] + torch.tensor([0.5] * 20 + [1, True], dtype=torch.float64).square()[k]
        return s * torch.as_tensor(numbers)[q * 100 + k] + near - s.new_tensor(numbers).long()[k]

    first = check_score(mod)
    assert len(first.graph.nodes) < 60
    assert {c.shape for c in first.captures} == {(5000,), (100, 7), (22,)}
    assert all(a is b for a, b in zip(first.captures, trace(mod, "score", torch.float64).captures, strict=True))
    numbers[100 * POINTS[2][1] + POINTS[3][1]] += 1
    check_score(mod)


def test_recursion_and_cycles() -> None:
    table = values(N)

    def folded(s: Tensor, q: Tensor, depth: int) -> Tensor:
        return s if depth == 0 else folded(s + table[q], q, depth - 1)

    check_score(lambda s, b, h, q, k: folded(s, q, 2), table)

    class Node:
        def __init__(self) -> None:
            self.owner, self.table = self, table

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.owner.owner.table[q]

    check_score(Node(), table)


def test_printed_alibi() -> None:
    slopes = values(H, dtype=torch.float32)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    graph = trace(alibi, "score").graph
    assert_expected_inline(
        repr(graph),
        """\
def alibi(score, b, h, q_idx, kv_idx, slopes: f32[:]):
    t0 = slopes[h]       # f32
    t1 = kv_idx - q_idx  # i32
    t2 = f32(t1)         # f32
    t3 = t0 * t2         # f32
    t4 = score + t3      # f32
    return t4""",
    )
    assert_expected_inline(
        repr(differentiate(graph, (0,))),
        """\
def alibi_grad(grad, score, b, h, q_idx, kv_idx, slopes: f32[:]):
    t0 = slopes[h]       # f32
    t1 = kv_idx - q_idx  # i32
    t2 = f32(t1)         # f32
    t3 = grad * t2       # f32
    return grad, t3""",
    )


def test_printed_window() -> None:
    window = 128

    def sliding(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    assert_expected_inline(
        repr(trace(sliding, "mask").graph),
        """\
def sliding(b, h, q_idx, kv_idx, window: int):
    t0 = q_idx >= kv_idx  # bool
    t1 = q_idx - kv_idx   # i32
    t2 = i32(window)      # i32
    t3 = t1 < t2          # bool
    t4 = t0 & t3          # bool
    return t4""",
    )


def test_the_offset_of_a_view_in_its_storage():
    table = torch.rand(N + 2, N)[2:]
    with pytest.warns(RetraceWarning, match="storage_offset"):
        check_score(lambda s, b, h, q, k: s + table[1].storage_offset() * 1e-2)


def test_a_watched_run_starts_again_with_another_setting():
    """Tools that watch a mod (profilers, debuggers) see one more run, which must not raise."""
    table, runs = torch.rand(4), []

    def mod(score, b, h, q_idx, kv_idx):
        runs.append(1)
        return score + table[h] * table.stride(0)

    setting = recording.Setting(torch.device("cpu"))
    with pytest.raises(recording.Restart):
        recording._run(mod, "score", "mod", torch.float32, {}, dataclasses.replace(setting, natively=True))
    recording._show(mod, "score", "mod", torch.float32, setting)
    assert len(runs) == 3
