"""The first kernel of the backward in Triton's interpreter, as it runs before Hopper's backward."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask, create_mask, mods
from flexattn.call.problem import Problem
from flexattn.compile import scalars
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernels import DELTA
from flexattn.compile.scalars import padded
from flexattn.runtime.launch import forget_launches, run_kernel
from flexattn.trace.trace import trace

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


def holes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Rows without keys, keys of one stripe, and of several."""
    return (q % 300 < 200) & (kv >= q // 2 - 60 - 40 * h) & (kv < q // 2 + 90 * (q % 200 // 128))


@pytest.mark.parametrize("mask_mod", [None, holes, mods.causal], ids=["no mask", "holes", "causal"])
@pytest.mark.parametrize("stripe", [128, 256])
@pytest.mark.parametrize("M", [500, 520])
def test_delta_finds_the_keys_of_queries(mask_mod: Callable[..., Tensor] | None, stripe: int, M: int) -> None:
    """It stores the first and the last + 1, by blocks, and sets only those sums to zero that several stripes share."""
    B, H, N, D, BLOCK = 1, 2, 600, 16, 128
    q, k, out, d_out = (torch.randn(B, H, n, D) for n in (M, N, M, M))
    mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, M, N, device="cpu", BLOCK_SIZE=BLOCK)
    problem = Problem(q, k, k, 0.5, mask=None if mask_mod is None else trace(mask_mod, "mask"), block_mask=mask)
    rows = B * H * padded(M)
    sums = torch.full((rows * pieces_of(D), 32), torch.nan)
    spans = torch.full((rows // 64, 2), -1, dtype=torch.int32)
    arrays = {"lse_ptr": torch.randn(B, H, M), "dq_sum_ptr": sums, "spans_ptr": spans}
    arrays |= {name: torch.empty(rows) for name in ("delta_ptr", "shift_ptr")}
    forget_launches()  # the stripe is an argument of theirs
    with patch.object(scalars, "stripe_of", lambda problem: stripe):
        run_kernel(DELTA, problem, {"o": out, "do": d_out}, arrays)
    forget_launches()
    dense = torch.ones(B, H, M, N, dtype=torch.bool)
    if mask_mod is not None:
        dense = create_mask(mask_mod, B, H, M, N, device="cpu")
    sums = sums.view(H, padded(M), -1)
    for h in range(H):
        for m0 in range(0, padded(M), 64):
            keys = dense[0, h, m0 // BLOCK * BLOCK : m0 // BLOCK * BLOCK + BLOCK].any(0).nonzero().flatten()
            first, end = spans.view(H, -1, 2)[h, m0 // 64].tolist()
            shared = False
            if m0 < M and len(keys):
                assert first // BLOCK == int(keys[0]) // BLOCK and -(-end // BLOCK) == int(keys[-1]) // BLOCK + 1
                assert first % BLOCK == 0 and end <= N
                shared = first // stripe != (end - 1) // stripe
            else:
                assert first >= end
            own = sums[h, m0 : m0 + 64]
            assert not own.any() if shared else own.isnan().all()
