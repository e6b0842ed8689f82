"""Software that imported torch's functions before flexattn replaced them. test_torch_flex runs it in a process."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")


class Attention(torch.nn.Module):
    kernel = staticmethod(flex_attention)  # no attribute of a module

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        return self.kernel(x, x, x, block_mask=mask)


def mask(length: int) -> BlockMask:
    return create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, length, length, device="cpu")
