"""wide_dtype: the dtype of scores, of lse as the user sees it, and of sums."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a tensor of float64, else float32. torch.export would record `torch.promote_types`."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
