"""registered: definitions by users of operators that PyTorch does not know (custom operators, autograd.Functions)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from flexattn.errors import DtypeError, message

_meanings: dict[Any, Callable[..., Any]] = {}
_count = 0


def register_operator(op: Any, like: Callable[..., Any]) -> None:
    """Let mods call a custom operator, by defining that it computes what `like` computes.

    `op` is the result of ``torch.library.custom_op``, an operator of ``torch.ops``, or a subclass of
    ``torch.autograd.Function``. `like` takes the same arguments. It is a torch function, or a Python function of torch
    operations. Kernels compute `like`, with the gradients of `like`. A later registration replaces an earlier one.

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
    """Return the function registered for an operator or an autograd.Function."""
    return _meanings.get(op)


def registrations() -> int:
    """Return the number of registrations. Traces made before a later registration are invalid."""
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
