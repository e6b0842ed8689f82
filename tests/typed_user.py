"""A user's file, which test_typing checks with mypy --strict and pyright: mods, masks, packed rows, a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask as TorchsBlockMask

import flexattn
from flexattn import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    PagedKVCache,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    install_as_torch_flex,
    merge_attention,
    mods,
    or_masks,
    varlen_attn,
)

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < 16


def relative(table: Tensor) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).clamp(0, 31)]

    return score_mod


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(q, k, v, relative(self.table), mask, enable_gqa=True)


def masks(ids: Tensor) -> BlockMask:
    mod = and_masks(mods.causal, or_masks(window, mods.document(ids)))
    dense = create_mask(mod, None, None, 64, 64, device="cpu")
    assert_type(dense, Tensor)
    mask = create_block_mask(mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=(32, 64))
    assert_type(mask, BlockMask)
    assert_type(mask.prepare(), BlockMask)
    assert_type(mask.to("cpu"), BlockMask)
    assert_type(mask[:, :1], BlockMask)
    assert_type(mask.sparsity(), float)
    return mask


def requested(q: Tensor, theirs: TorchsBlockMask) -> tuple[Tensor, AuxOutput]:
    options: FlexKernelOptions = {"BLOCK_M": 64, "BATCH_INVARIANT": True}
    return flex_attention(q, q, q, mods.softcap(20.0), theirs, kernel_options=options, return_aux=AuxRequest(lse=True))


def merged(q: Tensor, k: Tensor) -> Tensor:
    (first, one), (second, two) = (flex_attention(q, x, x, return_aux=AuxRequest(lse=True)) for x in k.chunk(2, 2))
    assert one.lse is not None and two.lse is not None
    out, _ = merge_attention([first, second], [one.lse, two.lse])
    return out


def packed(x: Tensor, starts: Tensor) -> Tensor:
    assert_type(varlen_attn(x, x, x, starts, starts, 32, 32), Tensor)
    found = varlen_attn(x, x, x, starts, starts, 32, 32, mask_mod=window, return_aux=AuxRequest(lse=True))
    assert_type(found, Tensor | tuple[Tensor, Tensor])
    return found[0] if isinstance(found, tuple) else found


def generate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = PagedKVCache(2, 256, pages=32, heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    causal = create_block_mask(mods.causal, None, None, 256, 256, device="cpu")
    cache.append(k, v, lengths=[5, 3])
    out = flex_attention(
        q,
        cache.key,
        cache.value,
        None,
        causal,
        seqused_k=cache.seqused_k,
        q_offsets=cache.q_offsets,
        block_table=cache.block_table,
    )
    assert_type(out, Tensor)
    cache.erase([1])
    cache.fork(0, [1])
    cache.erase([0])
    assert_type(cache.free_pages, int)
    return out


def main() -> None:
    q = torch.randn(1, 2, 64, 16)
    mask = masks(torch.zeros(64, dtype=torch.int32))
    out = Attention(2)(q, q, q, mask)
    with install_as_torch_flex() as installed:
        holders = installed.holders
    assert_type(holders, tuple[str, ...])
    installed.remove()
    starts = torch.tensor([0, 32, 64], dtype=torch.int32)
    step, q2 = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    print(out, requested(q, mask), merged(q, q), packed(q[0].transpose(0, 1), starts), generate(step, q2, q2))
    print(flexattn.explain(q, q, q, block_mask=mask), flexattn.counters(), flexattn.__version__)


if __name__ == "__main__":
    main()
