"""Counts of torch's operations, of which on a GPU most are launches, and some make the host wait; their sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
