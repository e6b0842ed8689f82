"""append: write new tokens into pages, by one kernel on a GPU and in torch operations on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.call.layout import FLOAT8 as FLOAT8
from flexattn.machine.triton_versions import is_interpreting
from flexattn.process.frozen_class import frozen

_TOKENS = 16  # of a program
_LARGEST = 448.0  # of FLOAT8


@frozen(eq=False)
class Pages:
    """The tensors of a cache. key and value are [pages, page_size, Hkv, D], in any order in memory."""

    key: Tensor
    value: Tensor
    block_table: Tensor  # int32 [sequences, columns]
    lengths: Tensor  # int32 [sequences]
    starts: Tensor  # int32 [sequences], the lengths before the latest append
    arrived: Tensor  # int32 [sequences], 0 between appends
    k_descale: Tensor | None  # float32 [Hkv], for FLOAT8
    v_descale: Tensor | None


@frozen(eq=False)
class Tokens:
    """What is appended: key [B, Hkv, M, D], value [B, Hkv, M, Dv] and, to be rotated, query [B, Hq, M, D]."""

    key: Tensor
    value: Tensor
    query: Tensor | None
    rows: Tensor | None  # int64 [B], the sequences; None: all
    counts: Tensor | None  # int32 [B], how many of the M tokens; None: M
    cos: Tensor | None  # [positions, rotary dims // 2]
    sin: Tensor | None
    interleaved: bool


@torch.no_grad()
def append(pages: Pages, tokens: Tokens) -> Tensor | None:
    """Write the tokens, update the lengths, and return the rotated query."""
    if tokens.key.size(2) == 0:  # a launch without programs would leave `starts` as it is
        rows = slice(None) if tokens.rows is None else tokens.rows.long()
        pages.starts[rows] = pages.lengths[rows]
        return tokens.query
    if pages.key.is_cuda or is_interpreting():
        return _launch(pages, tokens)
    return _in_torch(pages, tokens)


def _launch(pages: Pages, tokens: Tokens) -> Tensor | None:
    from flexattn.kv_cache import append_kernel

    kernel: Any = append_kernel.append_tokens
    key, value, query = (_with_rows(x) for x in (tokens.key, tokens.value, tokens.query))
    assert key is not None and value is not None
    B, Hkv, M, D = key.shape
    Dv, Hq = value.size(3), 0 if query is None else query.size(1)
    out = None if query is None else torch.empty_like(query, memory_format=torch.contiguous_format)
    cos, sin = (None if x is None else x.contiguous() for x in (tokens.cos, tokens.sin))
    with torch.cuda.device_of(key):
        kernel[(B * -(-M // _TOKENS), max(Hkv, Hq))](
            key, value, query, out, pages.key, pages.value, pages.block_table, pages.lengths, pages.starts,
            tokens.counts, tokens.rows, pages.arrived, cos, sin, pages.k_descale, pages.v_descale,
            M, Hq, Hkv, pages.block_table.size(1), 0 if cos is None else cos.size(0),
            *key.stride()[:3], *value.stride()[:3], *_strides(query), *_strides(out),
            *pages.key.stride()[:3], *pages.value.stride()[:3],
            D=D, DV=Dv, ROTARY=0 if cos is None else 2 * cos.size(1), INTERLEAVED=tokens.interleaved,
            PAGE_SIZE=pages.key.size(1), TOKENS=_TOKENS, WIDTH=_power_of_two(D), WIDTH_V=_power_of_two(Dv),
            num_warps=4,
        )  # fmt: skip
    return out


def _with_rows(x: Tensor | None) -> Tensor | None:
    """Return the tensor with a last stride of 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _in_torch(pages: Pages, tokens: Tokens) -> Tensor | None:
    M, size = tokens.key.size(2), pages.key.size(1)
    rows = slice(None) if tokens.rows is None else tokens.rows.long()
    start = pages.lengths[rows]  # a copy if rows are given, otherwise a view
    pages.starts[rows] = start
    steps = torch.arange(M, device=start.device)
    position = pages.starts[rows].long()[:, None] + steps  # [B, M]
    count = torch.full_like(start, M) if tokens.counts is None else tokens.counts.clamp(0, M)
    appended = steps < count[:, None]
    table = pages.block_table[rows]
    page = table.gather(1, (position // size).clamp(max=table.size(1) - 1))[appended].long()
    slot = (position % size)[appended]
    for cache, new, descale in (
        (pages.key, _rotated(tokens.key, position, tokens), pages.k_descale),
        (pages.value, tokens.value, pages.v_descale),
    ):
        x = new.transpose(1, 2)[appended]  # [tokens, Hkv, D]
        if descale is not None:
            x = (x.float() / descale[:, None]).clamp(-_LARGEST, _LARGEST)
        cache[page, slot] = x.to(cache.dtype)
    pages.lengths[rows] = pages.starts[rows] + count
    return None if tokens.query is None else _rotated(tokens.query, position, tokens)


def _rotated(x: Tensor, position: Tensor, tokens: Tokens) -> Tensor:
    """Rotate the first columns of x [B, H, M, D] by the angles of position [B, M]."""
    if tokens.cos is None or tokens.sin is None:
        return x
    half = tokens.cos.size(1)
    wide = torch.promote_types(x.dtype, torch.float32)
    known = (position < tokens.cos.size(0))[:, None, :, None]
    angles = (t.to(wide)[position.clamp(max=t.size(0) - 1)][:, None] for t in (tokens.cos, tokens.sin))
    cos, sin = (torch.where(known, angle, torch.nan) for angle in angles)
    turned, rest = x.to(wide).split((2 * half, x.size(3) - 2 * half), -1)
    if tokens.interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        a, b = turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if tokens.interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1).to(x.dtype)
