"""Counts of torch's operations: on a GPU most are launches, and some make the host wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAIT = "aten._local_scalar_dense.default"  # int(tensor), tensor.item(), tensor.tolist()


class Operations(TorchDispatchMode):
    """Counts operations that allocate uninitialized memory, and those that launch a kernel or wait, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations, self.others = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket == torch.ops.aten.empty:
            self.allocations += 1
        elif not func.is_view:
            self.others[str(func)] += 1
        return func(*args, **kwargs or {})
