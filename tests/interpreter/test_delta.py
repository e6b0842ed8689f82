"""The first kernel of the backward in Triton's interpreter, as it runs before Hopper's backward."""

from __future__ import annotations

import pytest
import torch

from flexattn.call.problem import Problem
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernels import DELTA
from flexattn.compile.scalars import padded
from flexattn.runtime.launch import run_kernel

pytest.importorskip("triton")


@pytest.mark.parametrize(("D", "M"), [(16, 50), (64, 128), (72, 130)])
def test_delta_sets_the_sums_of_dq_and_the_counter_to_zero(D: int, M: int) -> None:
    q, out, d_out = torch.randn(3, 2, 2, M, D)
    lse, rows = torch.randn(2, 2, M), 4 * padded(M)
    delta, shift = torch.empty(2, rows)
    memory = torch.full((rows * pieces_of(D) * 32 + 64,), torch.nan)
    sums = memory[:-64].view(-1, 32)
    claimed = torch.full((2,), 7, dtype=torch.int32)
    arrays = {"lse_ptr": lse, "delta_ptr": delta, "shift_ptr": shift, "dq_sum_ptr": sums, "counter_ptr": claimed[:1]}
    run_kernel(DELTA, Problem(q, q, q, 0.5), {"o": out, "do": d_out}, arrays)
    assert not sums.any() and memory[-64:].isnan().all() and claimed.tolist() == [0, 7]
    torch.testing.assert_close(delta.view(2, 2, -1)[..., :M], -(out * d_out).sum(-1), atol=1e-4, rtol=1e-4)
