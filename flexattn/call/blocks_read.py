"""blocks_read: which blocks of a mask a call reads, those of its BLOCK_SIZE or those of Hopper kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.options import selects_portable_kernels

_HALF = (torch.float16, torch.bfloat16)


def blocks_read(mask: BlockMask, query: Tensor, kernel_options: Mapping[str, object] | None) -> BlockMask:
    """Return the mask itself, or the same mask in the blocks of Hopper kernels. Dynamo traces this function."""
    other = mask._for_hopper
    if other is None:
        return mask
    kind, dtype = query.device.type, query.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return mask if dtype not in _HALF or selects_portable_kernels(kernel_options) else other
