"""The Triton kernels of a backward in tiles, in Triton's interpreter: tensors are row-major, sums are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask, mods
from flexattn.block_mask import InTiles
from flexattn.call.problem import Problem
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernels import DELTA, DQ_ROWS
from flexattn.compile.scalars import padded
from flexattn.layout import TiledGrid
from flexattn.runtime.launch import run_kernel
from flexattn.trace.trace import trace

pytest.importorskip("triton")

B, H = 2, 2
GRIDS = [TiledGrid((16, 24), (16, 8)), TiledGrid((16, 32), (8, 16)), TiledGrid((32, 8), (32, 4))]


def problem_of(grid: TiledGrid, q: Tensor, in_tiles: bool) -> Problem:
    mask = create_block_mask(mods.causal, None, None, grid.tokens, grid.tokens, device="cpu")
    mask._in_tiles = InTiles(grid, mask)  # these kernels read the grid only
    return Problem(q, q, q, 0.5, mask=trace(mods.causal, "mask"), block_mask=mask, in_tiles=in_tiles)


def tokens_first(tokens: int, D: int) -> Tensor:
    """Return random [B, H, tokens, D], in memory [B, tokens, H, D]."""
    return torch.randn(B, tokens, H, D).transpose(1, 2)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("D", "has_d_lse"), [(16, True), (72, False)])
def test_delta(grid: TiledGrid, D: int, has_d_lse: bool) -> None:
    S = grid.tokens
    out, d_out = tokens_first(S, D), torch.randn(B, H, S, D)
    lse, d_lse = torch.randn(B, H, S), torch.randn(B, H, S)
    lse[:, 1, 5:200:3] = -torch.inf

    def computed(in_tiles: bool) -> tuple[Tensor, ...]:
        def placed(x: Tensor) -> Tensor:
            return x.contiguous() if in_tiles else grid.permute(x, 2).contiguous()

        delta, shift = torch.full((2, B, H, padded(S)), torch.nan)
        sums = torch.full((delta.numel() * pieces_of(D), 32), torch.nan)
        arrays = {"lse_ptr": placed(lse), "delta_ptr": delta, "shift_ptr": shift, "dq_sum_ptr": sums}
        arrays |= {"dlse_ptr": placed(d_lse)} if has_d_lse else {}
        tensors = {"o": out, "do": d_out} if in_tiles else {"o": placed(out), "do": placed(d_out)}
        run_kernel(DELTA, problem_of(grid, out, in_tiles), tensors, arrays)
        return delta, shift, sums

    found, expected = computed(True), computed(False)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    delta, shift, sums = found
    exact = (d_lse if has_d_lse else 0) - (out * d_out).sum(-1)
    exact = grid.permute(exact.masked_fill(lse == -torch.inf, 0), 2)
    torch.testing.assert_close(delta[:, :, :S], exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(shift[:, :, :S] == torch.inf, grid.permute(lse == -torch.inf, 2))
    assert (shift[:, :, S:] == torch.inf).all()
    assert not sums.any()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("D", [40, 64])
def test_the_last_step_of_dq(grid: TiledGrid, D: int) -> None:
    S = grid.tokens
    sums = torch.randn(B * H * padded(S) * pieces_of(D), 32)

    def computed(in_tiles: bool, dq: Tensor) -> Tensor:
        run_kernel(DQ_ROWS, problem_of(grid, dq, in_tiles), {"dq": dq.fill_(torch.nan)}, {"dq_sum_ptr": sums})
        return dq

    row_major = computed(True, tokens_first(S, D).half())
    in_order = computed(False, torch.randn(B, H, S, D).half())
    assert not torch.equal(row_major, in_order)
    assert torch.equal(row_major, grid.restore(in_order, 2))
