"""Calls in which some rows must have the same bits for any other rows: on a CPU, in the interpreter, on a GPU.

Each check changes what stands beside some rows: other batch entries, heads, queries, keys that they do not attend to,
or how the mask is written down. All but those of lists share one mask_mod, and so one set of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention, mods, noop_mask

INVARIANT = ("BATCH_INVARIANT", True)
NAMES = ("out", "lse", "max_scores", "dq", "dk", "dv")


def _distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * 1.7 - 0.03 * kv_idx  # does not depend on q_idx


SCORES: dict[str, Callable[..., Any] | None] = {"none": None, "softcap": mods.softcap(5.0), "distance": _distance}


@dataclass(frozen=True)
class At:
    """Where the checks run, and on what."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    D: int = 40
    Dv: int = 40
    score: str = "none"
    M: int = 300
    N: int = 700
    block: int = 128  # of lists that are written down
    options: tuple[tuple[str, object], ...] = (INVARIANT,)

    def __str__(self) -> str:
        options = "".join(f"-{value}" for name, value in self.options if name != "BATCH_INVARIANT")
        return f"{str(self.dtype).removeprefix('torch.')}-{self.D}-{self.score}{options}"

    def draw(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)


@dataclass(frozen=True)
class Inputs:
    """A query attends to the keys up to its own position + `shift`, or to all where `everywhere` [B, M]."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    everywhere: Tensor
    shift: int

    def rows(self, first: int, last: int) -> Inputs:
        """Return the problem of these queries alone."""
        rows = slice(first, last)
        return replace(
            self, query=self.query[:, :, rows], d_out=self.d_out[:, :, rows], everywhere=self.everywhere[:, rows],
            shift=self.shift + first,
        )  # fmt: skip

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx + self.shift >= kv_idx) | self.everywhere[b, q_idx]


def inputs(at: At, B: int = 1, Hq: int = 2, Hkv: int = 1) -> Inputs:
    everywhere = torch.rand(B, at.M, generator=torch.Generator().manual_seed(4)) < 0.1
    return Inputs(
        at.draw(B, Hq, at.M, at.D, seed=0), at.draw(B, Hkv, at.N, at.D, seed=1), at.draw(B, Hkv, at.N, at.Dv, seed=2),
        at.draw(B, Hq, at.M, at.Dv, seed=3), everywhere.to(at.device), at.N // 3,
    )  # fmt: skip


def attend(at: At, x: Inputs, mask: BlockMask | upstream.BlockMask | None = None) -> tuple[Tensor, ...]:
    """Return (out, lse, max_scores, dq, dk, dv)."""
    leaves = [t.detach().requires_grad_() for t in (x.query, x.key, x.value)]
    if mask is None:
        mask = build(x, 128)
    out, aux = flex_attention(
        *leaves, SCORES[at.score], mask, enable_gqa=True, kernel_options=dict(at.options),
        return_aux=AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    assert aux.lse is not None and aux.max_scores is not None
    grads = torch.autograd.grad((out, aux.lse.sum()), leaves, (x.d_out, torch.ones_like(aux.lse.sum())))
    return out.detach(), aux.lse.detach(), aux.max_scores, *grads


def build(x: Inputs, size: int | tuple[int, int]) -> BlockMask:
    (B, _, M, _), N = x.query.shape, x.key.shape[2]
    return create_block_mask(x.mask_mod, B, None, M, N, device=x.query.device, BLOCK_SIZE=size)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], names: tuple[str, ...] = NAMES) -> None:
    found = dict(zip(NAMES, zip(got, want, strict=True), strict=True))
    unlike = {name: int((a != b).sum()) for name, (a, b) in found.items() if name in names and not torch.equal(a, b)}
    assert not unlike, f"elements with other bits: {unlike}"


OF_ROWS = NAMES[:4]  # dk and dv are sums over all queries


def other_batch_entries(at: At) -> None:
    x = inputs(at, B=3)
    alone = replace(
        x, query=x.query[1:2], key=x.key[1:2], value=x.value[1:2], d_out=x.d_out[1:2], everywhere=x.everywhere[1:2]
    )
    assert_same(attend(at, alone), tuple(t[1:2] for t in attend(at, x)))


def other_heads(at: At) -> None:
    x = inputs(at, Hq=4, Hkv=2)
    some = replace(x, query=x.query[:, 2:], key=x.key[:, 1:], value=x.value[:, 1:], d_out=x.d_out[:, 2:])
    whole = attend(at, x)
    assert_same(attend(at, some), (*(t[:, 2:] for t in whole[:4]), *(t[:, 1:] for t in whole[4:])))


def other_queries(at: At) -> None:
    """Some rows alone, from where no tile begins, and one row alone, as a decoding step has it."""
    x = inputs(at)
    whole = attend(at, x)
    for first, last in ((37, at.M - 11), (at.M // 2 + 1, at.M // 2 + 2)):
        part = attend(at, x.rows(first, last))
        rows = tuple(t[:, :, first:last] for t in whole[:4])
        assert_same(part, (*rows, *part[4:]), OF_ROWS)


def decoded_rows(at: At) -> None:
    """Rows of a prefill, and the same rows as steps on a growing cache, contiguous and in pages."""
    N, B, page = at.M, 2, 16
    q, k, v = at.draw(B, 4, N, at.D, seed=0), at.draw(B, 2, N, at.D, seed=1), at.draw(B, 2, N, at.Dv, seed=2)
    mask = create_block_mask(mods.sliding_window(N - 20), None, None, N, N, device=at.device)
    score_mod, options = SCORES[at.score], dict(at.options)
    whole = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, kernel_options=options)
    columns = -(-N // page)
    table = torch.randperm(B * columns, generator=torch.Generator().manual_seed(3)).view(B, columns)
    for places in ((0, N // 3), (N // 2 + 1, N - 1)):
        offsets = torch.tensor(places, dtype=torch.int32, device=at.device)
        later = (torch.arange(N, device=at.device) > offsets[:, None])[:, None, :, None]
        keys = [torch.where(later, torch.nan, x) for x in (k, v)]
        stored = []
        for x in keys:
            padded = torch.nn.functional.pad(x, (0, 0, 0, columns * page - N), value=torch.nan)
            pages = padded.unflatten(2, (columns, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
            stored.append(torch.empty_like(pages).index_copy_(0, table.flatten().to(at.device), pages))
        rows = torch.stack([q[b, :, p : p + 1] for b, p in enumerate(places)])
        expected = torch.stack([whole[b, :, p : p + 1] for b, p in enumerate(places)])
        for cache, layout in ((keys, {}), (stored, {"block_table": table.int().to(at.device)})):
            out = flex_attention(
                rows, *cache, score_mod, mask, enable_gqa=True, kernel_options=options, seqused_k=offsets + 1,
                q_offsets=offsets, **layout,
            )  # fmt: skip
            assert torch.equal(out, expected), f"other bits at {places}"


def neighbours_that_attend_to_more(at: At) -> None:
    x = inputs(at)
    x = replace(x, everywhere=torch.zeros_like(x.everywhere))
    kept = torch.arange(at.M, device=at.device) % 5 == 0
    more = attend(at, replace(x, everywhere=x.everywhere | ~kept))
    less = attend(at, x)
    rows = (tuple(t[:, :, kept] for t in found[:4]) for found in (more, less))
    assert_same((*next(rows), *less[4:]), (*next(rows), *less[4:]), OF_ROWS)


def keys_to_come(at: At) -> None:
    """Keys that no row attends to: a cache that has grown."""
    x = inputs(at)
    x = replace(x, everywhere=torch.zeros_like(x.everywhere))
    seen = x.shift + at.M
    assert seen < at.N and seen % 32
    short = attend(at, replace(x, key=x.key[:, :, :seen], value=x.value[:, :, :seen]))
    whole = attend(at, x)
    assert_same(short, (*whole[:4], *(t[:, :, :seen] for t in whole[4:])))


def blocks_of_other_sizes(at: At) -> None:
    x = inputs(at)
    want = attend(at, x)
    for size in (256, 64, (32, 96)):
        got = attend(at, x, build(x, size))
        assert_same(got, (*want[:4], *got[4:]), OF_ROWS)


def blocks_of_other_classes(at: At) -> None:
    """The same pairs: blocks that are full by what mask_mod says, and lists that call all partial."""
    x, mod, blocks = _blocks(at)
    built = build_blocks(at, mod)
    assert built.counts()[0] and built.counts()[2], "full blocks and empty ones"
    partial = BlockMask.from_blocks(blocks, torch.zeros_like(blocks), (at.M, at.N), at.block, mod)
    joined = build_blocks(at, mod, separate_full_blocks=False)
    want = attend(at, x, built)
    for mask in (partial, joined):
        assert_same(attend(at, x, mask), want)


def blocks_that_overrule_the_mod(at: At) -> None:
    """Full blocks of user-provided lists attend for any mask_mod. They become a captured tensor of the mask."""
    x, mod, blocks = _blocks(at)
    none = torch.zeros_like(blocks)
    half = blocks & (torch.arange(blocks.shape[-1], device=at.device) % 2 == 0)
    lists = (
        BlockMask.from_blocks(none, blocks, (at.M, at.N), at.block, noop_mask),
        BlockMask.from_blocks(blocks & ~half, half, (at.M, at.N), at.block, mod),
        upstream.create_block_mask(mod, None, None, at.M, at.N, device=at.device, BLOCK_SIZE=at.block),
    )
    want = attend(at, x, build_blocks(at, mod))
    for mask in lists:
        assert_same(attend(at, x, mask), want)


def _blocks(at: At) -> tuple[Inputs, Callable[..., Tensor], Tensor]:
    """Return inputs, a mask_mod that tells whole blocks apart, and these blocks, bool [1, 1, rows, columns]."""
    size = at.block

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // size + kv_idx // size) % 3 != 1

    rows, columns = (torch.arange(-(-n // size), device=at.device) for n in (at.M, at.N))
    return inputs(at), mod, ((rows[:, None] + columns) % 3 != 1)[None, None]


def build_blocks(at: At, mod: Callable[..., Tensor], **options: bool) -> BlockMask:
    return create_block_mask(mod, None, None, at.M, at.N, device=at.device, BLOCK_SIZE=at.block, **options)


def tensors_that_lie_otherwise(at: At) -> None:
    """Keys that the batch shares by expanding them, rows in another order or with gaps, a gradient that is expanded."""
    x = inputs(at, B=2)
    shared = replace(
        x, key=x.key[:1].expand_as(x.key), value=x.value[:1].expand_as(x.value), d_out=x.d_out[:1].expand_as(x.d_out)
    )
    copied = replace(shared, key=shared.key.clone(), value=shared.value.clone(), d_out=shared.d_out.clone())
    turned = replace(copied, query=x.query.transpose(1, 2).contiguous().transpose(1, 2))
    with_gaps = replace(copied, query=torch.nn.functional.pad(x.query, (0, -at.D % 8 or 1))[..., : at.D])
    want = attend(at, copied)
    for other in (shared, turned, with_gaps):
        assert_same(attend(at, other), want)


CHECKS = (
    other_batch_entries, other_heads, other_queries, decoded_rows, neighbours_that_attend_to_more, keys_to_come,
    blocks_of_other_sizes, blocks_of_other_classes, blocks_that_overrule_the_mod, tensors_that_lie_otherwise,
)  # fmt: skip
