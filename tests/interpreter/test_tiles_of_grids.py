"""The Triton engine computes masks of grids in the order of tiles, in both passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flexattn import AuxRequest, api, create_block_mask, flex_attention, mods
from flexattn.block_mask import InTiles
from flexattn.engines import token_tiles, triton
from flexattn.layout import TiledGrid
from flexattn.trace.trace import trace

pytest.importorskip("triton")


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_are_those_of_the_mask(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 0)
    monkeypatch.setattr(api, "engine_of", lambda problem: triton)
    copied = []
    original = token_tiles._copied
    monkeypatch.setattr(token_tiles, "_copied", lambda x, *order: copied.append(x) or original(x, *order))
    grid, window = TiledGrid((16, 16), (16, 8)), mods.natten_2d(16, 16, 5)
    mask = create_block_mask(window, None, None, 256, 256, device="cpu")
    other = grid.mod(window)
    mask._in_tiles = InTiles(
        grid, create_block_mask(other, None, None, 256, 256, device="cpu"), trace(other, "mask"), 48.0
    )
    plain = copy.copy(mask)
    plain._in_tiles = None
    inputs = [torch.randn(1, heads, 256, 16).half().requires_grad_() for heads in (2, 1, 1)]
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    found = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for m in (mask, plain, mask):
            out, aux = flex_attention(*inputs, None, m, **options)
            assert aux.lse is not None
            loss = out.float().square().sum() + aux.lse.square().sum()
            found.append((out, aux.lse, *torch.autograd.grad(loss, inputs)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(copied) == 2 * (4 + 8)
    for x, y, again in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=5e-3)
        torch.testing.assert_close(x, again)
