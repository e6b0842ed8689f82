"""Tensors of a fake device, computed on the CPU. Operations reject what they reject on a GPU.

`with elsewhere():` around code; `there(x)` moves a tensor, `back(x)` asserts that it is there. Operations on tensors of
both devices raise, but for 0-d ones. The other device is cpu:0, which torch takes for another one than cpu: so nothing
needs a driver. A tensor made without `device` is on the CPU. What a GPU's kernels do differently is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cpu", 0)
CPU = torch.device("cpu")


class _There(Tensor):
    """A tensor of the other device."""

    data_there: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> _There:
        return Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip

    def __init__(self, data: Tensor) -> None:
        self.data_there = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_device(x: object) -> bool:
    return isinstance(x, torch.device)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    inside = [x for x in leaves if isinstance(x, _There)]
    outside = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, _There)]
    target = kwargs.get("device")
    moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if inside and not moves:
        assert all(x.dim() == 0 for x in outside), f"{func} on tensors of two devices"
    plain = tree_map(lambda x: x.data_there if isinstance(x, _There) else CPU if _is_device(x) else x, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if target is not None:
        there = torch.device(target) == DEVICE
    else:
        there = bool(inside) if not moves else isinstance(args[0], _There)
    if not there:
        return result
    # What an operation returns of its arguments (out=, in place) is the argument itself.
    own = {id(x.data_there): x for x in inside}
    return tree_map(lambda x: own[id(x)] if id(x) in own else _There(x) if isinstance(x, Tensor) else x, result)


def there(x: Tensor) -> Tensor:
    """Return a copy on the other device."""
    return _There(x.detach().clone())


def back(x: Tensor) -> Tensor:
    """Return a tensor of the other device as one of the CPU."""
    assert isinstance(x, _There), "a tensor on the CPU"
    return x.data_there


@contextmanager
def elsewhere() -> Iterator[None]:
    """Let operations know of the other device."""
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(x, device=...) moves by an operation
    try:
        with _Mode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
