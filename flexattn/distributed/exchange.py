"""exchange: a rank receives the keys and values that its chunks need, and returns their gradients. One message each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from flexattn.call.memory_order import in_large_elements
from flexattn.distributed.plan import ContextPlan, kept
from flexattn.distributed.transfer import Copy, Sum, Transfer, transfer_of
from flexattn.process.frozen_class import frozen

Pair = tuple[Tensor, Tensor]  # keys [B, Hkv, rows, D] and values [B, Hkv, rows, Dv], or their gradients


def keys_of_spans(plan: ContextPlan, key: Tensor, value: Tensor) -> list[Pair]:
    """Return the keys and values of each span of the calls of this rank, from those that each rank has.

    All ranks must run the backward (`with_backward_of`).
    """
    transfer = kept(plan, "transfer", lambda: transfer_of(plan))
    group = plan.device_mesh.get_group() if plan.most_received else None
    found = _Gathered.apply(transfer, group, key, value)
    return list(zip(found[::2], found[1::2], strict=True))


def with_backward_of(other: Tensor, x: Tensor) -> Tensor:
    """Return x, whose backward also runs that of `other`, without a gradient."""
    return _Dependent.apply(x, other)


class _Dependent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@frozen
class _Form:
    """What keys and values are, besides their rows."""

    B: int
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def pair(self, rows: int) -> Pair:
        D, Dv = self.widths
        return self.empty(self.B, self.heads, rows, D), self.empty(self.B, self.heads, rows, Dv)

    def message(self, rows: int) -> tuple[Tensor, Pair]:
        """Return rows of keys and values, so that one message has both, and these as views of it."""
        whole = self.empty(rows, self.B, self.heads, sum(self.widths))
        keys, values = whole.permute(1, 2, 0, 3).split(self.widths, -1)
        return whole, (keys, values)


class _Gathered(Function):
    """Own keys and values -> those of all spans."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, group: Any, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        form = _Form(key.size(0), key.size(1), (key.size(3), value.size(3)), key.dtype, key.device)
        ctx.transfer, ctx.group, ctx.form = transfer, group, form
        ctx.set_materialize_grads(False)
        own = key, value
        message, outgoing = form.message(sum(transfer.sent))
        arriving, arrived = form.message(sum(transfer.received))
        _copy(transfer.to_send, own, outgoing)
        work = _start(group, message, transfer.sent, arriving, transfer.received)
        gathered = form.pair(transfer.gathered)
        _copy(transfer.local, own, gathered)
        if work is not None:
            work.wait()
        _copy(transfer.arrived, arrived, gathered)
        return tuple(x[:, :, slice(*span.rows)] for span in transfer.spans for x in (own if span.is_own else gathered))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_Returned.apply(ctx.transfer, ctx.group, ctx.form, *gradients)


class _Returned(Function):
    """Gradients of all spans -> those of own keys and values: the transpose of `_Gathered`."""

    @staticmethod
    def forward(
        ctx: Any, transfer: Transfer, group: Any, form: _Form, *gradients: Tensor | None
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.transfer, ctx.group = transfer, group
        of_spans = gradients[::2], gradients[1::2]
        message, outgoing = form.message(sum(transfer.received))
        arriving, returned = form.message(sum(transfer.sent))
        for x, spans in zip(outgoing, of_spans, strict=True):
            for part in transfer.gradients_of_arrived:
                _store(x[:, :, slice(*part.rows)], _sum(_parts(part, spans)))
        work = _start(group, message, transfer.received, arriving, transfer.sent)
        found, waiting = [], []
        for width, spans, others in zip(form.widths, of_spans, returned, strict=True):
            totals = [_sum(_parts(part, spans)) for part in transfer.gradients_of_own]
            if len(totals) == 1 and totals[0] is not None and not transfer.gradients_of_own[0].returned:
                found.append(totals[0].to(form.dtype))  # not copied
                continue
            found.append(form.empty(form.B, form.heads, transfer.own, width))
            for part, total in zip(transfer.gradients_of_own, totals, strict=True):
                rows = found[-1][:, :, slice(*part.rows)]
                if part.returned:
                    waiting.append((rows, total, [others[:, :, slice(*span)] for span in part.returned]))
                else:
                    _store(rows, total)
        if work is not None:
            work.wait()
        for rows, total, others in waiting:
            _store(rows, _sum(others if total is None else [total, *others]))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        found, needed = _Gathered.apply(ctx.transfer, ctx.group, *gradients), ctx.needs_input_grad[3:]
        return None, None, None, *(x if need else None for x, need in zip(found, needed, strict=True))


def _start(group: Any, message: Tensor, sent: Sequence[int], arriving: Tensor, received: Sequence[int]) -> Any:
    """Start to send rows to each rank, and to receive. Return what to wait for; on a GPU the stream waits."""
    if group is None:
        return None
    return dist.all_to_all_single(arriving, message, list(received), list(sent), group=group, async_op=True)


def _copy(copies: Sequence[Copy], sources: Pair, targets: Pair) -> None:
    if not copies:
        return
    for x, y in zip(sources, targets, strict=True):
        x, y = in_large_elements(x, y)
        for row, at, count in copies:
            y[:, :, at : at + count] = x[:, :, row : row + count]


def _parts(part: Sum, spans: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients of spans that are added to rows."""
    pairs = [(spans[i], rows) for i, rows in part.spans]
    return [x[:, :, slice(*rows)] for x, rows in pairs if x is not None]


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    """Add gradients, in float32 if there are several."""
    if not gradients:
        return None
    wide = torch.promote_types(gradients[-1].dtype, torch.float32)
    return reduce(lambda total, x: total.to(wide) + x, gradients)


def _store(rows: Tensor, total: Tensor | None) -> None:
    if total is None:
        rows.zero_()
    else:
        rows.copy_(total)
