"""capture_axes: captured tensors whose varying axes are not last are copied for kernels. Nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import explain, mods
from flexattn.graph.capture_axes import pair_axes_last
from flexattn.graph.tables_by_distance import read_tables_by_distance
from flexattn.trace.trace import trace

M, N, H = 5, 7, 4
CELLS = (torch.arange(M)[:, None] * 3 + torch.arange(N)) % 11
Mod = Callable[..., Any]

# (mod of a tensor, its shape, the shape that kernels read)
COPIED: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...], tuple[int, ...]]] = {
    "swin": (lambda t: lambda s, b, h, i, j: s + t[CELLS[i, j], h], (11, H), (H, 11)),
    "pairs": (lambda t: lambda s, b, h, i, j: s * t[i, j, h], (M, N, H), (H, M, N)),
    "batch between": (lambda t: lambda s, b, h, i, j: s + t[i, b, j, h], (M, 2, N, H), (2, H, M, N)),
    "twice": (lambda t: lambda s, b, h, i, j: s * t[CELLS[i, j], h] + t[j, 0] + t[-1, h], (11, H), (H, 11)),
    "by score": (lambda t: lambda s, b, h, i, j: s + t[(i + j + s.long()).clamp(0, 10), h], (11, H), (H, 11)),
}
TABLE, PAIRS = torch.zeros(11, H), torch.zeros(M, N, H)
UNCHANGED: dict[str, Mod] = {
    "places last": lambda s, b, h, i, j: s + TABLE.T.contiguous()[h, CELLS[i, j]],
    "so in memory": lambda s, b, h, i, j: s + TABLE.T[i % 4, CELLS[i, j]],
    "by rows": lambda s, b, h, i, j: s + TABLE[i, h] + TABLE[j, h],
    "one head": lambda s, b, h, i, j: s + PAIRS[..., :1].contiguous()[i, j, 0],
    "two orders": lambda s, b, h, i, j: s + TABLE[CELLS[i, j], h] + TABLE[h, CELLS[i, j] % 4],
    "no index": mods.softcap(3.0),
}


def places() -> tuple[Tensor, ...]:
    """Return score, b, h, q_idx, kv_idx of every position."""
    sizes = (2, H, M, N)
    index = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)]
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)), *index


@pytest.mark.parametrize("name", COPIED)
def test_results_and_gradients(name: str) -> None:
    make, shape, read = COPIED[name]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bound = trace(make(table), "score")
    other = pair_axes_last(bound)
    at = [i for i, c in enumerate(other.graph.captures) if c.name.endswith("_pairs_last")]
    assert [tuple(other.captures[i].shape) for i in at] == [read]
    assert all(other.captures[i].is_contiguous() for i in at)
    wanted, found = (mod(*places()) for mod in (bound, other))
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(x.square().sum(), table)[0] for x in (wanted, found)]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_stays_as_it_is(name: str) -> None:
    bound = trace(UNCHANGED[name], "score")
    assert pair_axes_last(bound) is bound


def test_large_tensors_stay_as_they_are() -> None:
    large = torch.empty(2**12 + 1, 2**10, 4, device="meta")
    bound = trace(lambda s, b, h, i, j: s + large[i, j, h], "score")
    assert pair_axes_last(bound) is bound


def test_indices_of_the_distance_are_taken_first() -> None:
    bound = read_tables_by_distance(trace(mods.t5_bias(torch.zeros(32, H)), "score"), M, N)
    assert pair_axes_last(bound) is bound


def test_explain_shows_it_for_a_gpu() -> None:
    q = torch.zeros(1, H, M, 16, dtype=torch.float16)
    k = torch.zeros(1, H, N, 16, dtype=torch.float16)
    mod = COPIED["swin"][0](TABLE)
    assert "TABLE" not in str(explain(q, k, k, mod, target="sm_90").score)
    assert "t_pairs_last[h, " in str(explain(q, k, k, mod, target="sm_90").score)
    assert "_pairs_last" not in str(explain(q, k, k, mod).score)  # nothing is gained on a CPU
