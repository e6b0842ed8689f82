"""exchange: rows that ranks send each other, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

Piece = tuple[int, int, int]  # a source, its first row, and one past the last


def packed(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as rows, [local, B, Hkv, D + Dv], so that one message has both."""
    return torch.cat([key, value], -1).permute(2, 0, 1, 3).contiguous()


class _Assembled(Function):
    """Copies rows of several tensors into one. Autograd's slices would each make a gradient of the whole tensor."""

    @staticmethod
    def forward(ctx: Any, pieces: tuple[Piece, ...], *sources: Tensor) -> Tensor:
        ctx.pieces, ctx.shapes = pieces, [x.shape for x in sources]
        return torch.cat([sources[i][start:stop] for i, start, stop in pieces]) if pieces else sources[0][:0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Several ranks may have used a row: their gradients are summed in float32.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        found = [gradient.new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        at = 0
        for i, start, stop in ctx.pieces:
            found[i][start:stop] += gradient[at : at + stop - start]
            at += stop - start
        return None, *(x.to(gradient.dtype) for x in found)


def assemble(pieces: Sequence[Piece], *sources: Tensor) -> Tensor:
    """Return rows of the sources, one piece after the other, [rows, ...]. A row may be in several pieces.

    The result depends on all sources, also on those without a row in it: the backward of a source that other ranks sent
    sends its gradient back, and all ranks must take part in that.
    """
    pieces = [piece for piece in pieces if piece[1] < piece[2]]
    if len(sources) == 1 and len(pieces) == 1 and pieces[0][2] - pieces[0][1] == len(sources[0]):
        return sources[0]
    return _Assembled.apply(tuple(pieces), *sources)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on. Return what all ranks sent here."""
    found = all_to_all_single_autograd(x.contiguous(), list(received), list(sent), group)
    return wait_tensor(found)


class _Dependent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.shape = other.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_zeros(ctx.shape)


def dependent_on(other: Tensor, x: Tensor) -> Tensor:
    """Return x, whose backward also runs that of `other`, with a gradient of 0."""
    return _Dependent.apply(x, other)
