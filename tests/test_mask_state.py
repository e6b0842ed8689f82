"""A mask that was built before its mask_mod's state changed is rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn import create_block_mask, flex_attention
from flexattn.errors import MutationError


@pytest.mark.parametrize(("name", "other"), [("shift", 3), ("factor", 3.0), ("operator", torch.sub)])
def test_what_is_combined_with_captured_tensors_is_watched(name: str, other: Any) -> None:
    """It goes into a tensor that is computed before the kernel, and is no number of the kernel."""
    cfg, table = SimpleNamespace(shift=1, factor=1.0, operator=torch.add), torch.tensor(2.0)

    def mask(b, h, q, k):
        return q - k < cfg.operator(table, cfg.shift) * cfg.factor

    x = torch.randn(1, 1, 8, 4)
    block_mask = create_block_mask(mask, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    flex_attention(x, x, x, block_mask=block_mask)
    setattr(cfg, name, other)
    with pytest.raises(MutationError):
        flex_attention(x, x, x, block_mask=block_mask)


def test_a_tensor_that_the_mod_makes_is_watched() -> None:
    cfg, table = SimpleNamespace(spans=[1.0, 2.0]), torch.arange(8)

    def mask(b, h, q, k):
        return q - k < (table.sum() * 0 + torch.tensor(cfg.spans))[b]

    x = torch.randn(1, 1, 8, 4)
    block_mask = create_block_mask(mask, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4)
    flex_attention(x, x, x, block_mask=block_mask)
    cfg.spans[0] = 3.0
    with pytest.raises(MutationError):
        flex_attention(x, x, x, block_mask=block_mask)
