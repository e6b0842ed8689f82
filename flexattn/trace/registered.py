"""registered: what users say of operators that PyTorch does not know: a custom operator, an autograd.Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from flexattn.errors import DtypeError, message

_meanings: dict[Any, Callable[..., Any]] = {}
_count = 0


def register_operator(op: Any, like: Callable[..., Any]) -> None:
    """Let mods call a custom operator: say that it computes what `like` computes.

    `op` is what ``torch.library.custom_op`` gives, an operator of ``torch.ops``, or a class derived from
    ``torch.autograd.Function``. `like` takes the same arguments: a function of torch, or a Python function of torch
    operations. Kernels compute `like`, and gradients are those of `like`. A later registration replaces an earlier one.

    Example::

        flexattn.register_operator(torch.ops.approx.tanh, like=torch.tanh)
        flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 20 * torch.ops.approx.tanh(score / 20))
    """
    global _count
    if not callable(like):
        raise DtypeError(message("like", repr(like), "a function of the operator's arguments", "Pass torch.tanh, say."))
    for overload in _overloads(op):
        _meanings[overload] = like
    _count += 1


def meaning_of(op: Any) -> Callable[..., Any] | None:
    """Return what was registered for an operator or an autograd.Function."""
    return _meanings.get(op)


def registrations() -> int:
    """Return how many there were: traces made before another one do not hold."""
    return _count


def _overloads(op: Any) -> list[Any]:
    op = getattr(op, "_opoverload", op)  # of a CustomOpDef
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(op, torch._ops.OpOverload) or (isinstance(op, type) and issubclass(op, Function)):
        return [op]
    raise DtypeError(
        message("op", repr(op), "an operator of torch.ops or an autograd.Function", "Pass torch.ops.<library>.<name>.")
    )
