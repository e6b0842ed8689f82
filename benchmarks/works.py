"""The workloads: shapes, mods and inputs. The same Python functions serve flexattn and PyTorch's flex_attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexattn.layout import TiledGrid
from flexattn.mods import block_diffusion, natten_2d, natten_3d

Mod = Callable[..., Tensor]

WINDOW = 16  # tokens
PAIRS_AT_ONCE = 1 << 25  # elements of the mask that are evaluated together to count pairs


@dataclass(frozen=True)
class Mods:
    """What a workload computes beyond plain attention. `learnable` captures get gradients; their axis 0 is heads."""

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    learnable: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Native:
    """The same workload as flags of libraries without mods."""

    causal: bool = False
    window: int | None = None  # keys that a query attends to, including itself
    softcap: float = 0.0
    documents: tuple[int, ...] = ()  # lengths of packed documents


@dataclass(frozen=True)
class Work:
    """One attention problem to measure. `mods` and `native` are created for its length and heads."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    mods: Callable[[Work, torch.device], Mods]
    native: Callable[[Work], Native | None]
    value_dim: int = 0  # 0: head_dim
    kv_heads: int = 0  # 0: heads

    @property
    def dv(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def hkv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def shape(self) -> str:
        heads = f"{self.heads}:{self.hkv}" if self.hkv != self.heads else f"{self.heads}"
        dims = f"{self.head_dim}/{self.dv}" if self.dv != self.head_dim else f"{self.head_dim}"
        return f"{self.batch}x{heads}x{self.length} D{dims}"

    def shrunk(self, length: int, group: int = 2) -> Work:
        """Return a small workload of the same kind: batch 1, two key heads."""
        heads = 2 * group if self.hkv != self.heads else 2
        kv_heads = 2 if self.hkv != self.heads else 0
        return replace(self, batch=1, heads=heads, kv_heads=kv_heads, length=min(length, self.length))


@dataclass(frozen=True)
class Inputs:
    """The tensors of a workload, in [batch, heads, length, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_inputs(work: Work, device: torch.device, dtype: torch.dtype, seed: int = 0, grad: bool = True) -> Inputs:
    """Draw normal inputs (zeros would run at a higher clock)."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, dim: int, leaf: bool) -> Tensor:
        shape = (work.batch, heads, work.length, dim)
        drawn = torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
        return drawn.requires_grad_(leaf)

    query, key = draw(work.heads, work.head_dim, grad), draw(work.hkv, work.head_dim, grad)
    return Inputs(query, key, draw(work.hkv, work.dv, grad), draw(work.heads, work.dv, False))


def count_pairs(mask_mod: Mod | None, length: int, device: torch.device) -> int:
    """Count the (query, key) pairs that attend, element by element, for a mask that does not read b or h."""
    if mask_mod is None:
        return length * length
    zero, keys = torch.zeros((), dtype=torch.int32, device=device), torch.arange(length, device=device)
    step = max(1, PAIRS_AT_ONCE // length)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, length, step):
        queries = torch.arange(start, min(start + step, length), device=device)
        attends = mask_mod(zero, zero, queries[:, None], keys[None, :])
        total += attends.expand(len(queries), length).sum()
    return int(total)


def forward_flops(work: Work, pairs: int) -> float:
    """Return floating-point operations of the forward over the attended pairs; a backward counts 2.5 times that."""
    return 2.0 * pairs * (work.head_dim + work.dv) * work.batch * work.heads


def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def document_lengths(length: int, documents: int = 12, seed: int = 12) -> tuple[int, ...]:
    """Return lengths of ragged documents that fill `length`, not multiples of any particular size."""
    generator = torch.Generator().manual_seed(seed)
    documents = min(documents, length // 2)
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1].add(1).sort().values.tolist()
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))


def _window(work: Work) -> int:
    return min(1024, work.length // 4)


def _full(work: Work, device: torch.device) -> Mods:
    return Mods()


def _causal(work: Work, device: torch.device) -> Mods:
    return Mods(mask_mod=causal_mask)


def _sliding(window: Callable[[Work], int]) -> Callable[[Work, torch.device], Mods]:
    def mods(work: Work, device: torch.device) -> Mods:
        keys = window(work)

        def sliding_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (q_idx - kv_idx < keys)

        return Mods(mask_mod=sliding_mask)

    return mods


def _documents(work: Work, device: torch.device) -> Mods:
    lengths = torch.tensor(document_lengths(work.length), device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device, dtype=torch.int32), lengths)

    def document_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    return Mods(mask_mod=document_causal_mask)


def _windows(work: Work, device: torch.device) -> Mods:
    def windows_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // WINDOW == kv_idx // WINDOW

    return Mods(mask_mod=windows_mask)


def _prefix(work: Work, device: torch.device) -> Mods:
    prefix = min(2048, work.length // 4)

    def prefix_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | (kv_idx < prefix)

    return Mods(mask_mod=prefix_mask)


SOFTCAP = 30.0


def softcap_of(cap: float) -> Mod:
    def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return softcap


def _softcap(work: Work, device: torch.device) -> Mods:
    return Mods(softcap_of(SOFTCAP), causal_mask)


def _alibi(work: Work, device: torch.device) -> Mods:
    slopes = torch.exp2(-8.0 * torch.arange(1, work.heads + 1, device=device) / work.heads)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return Mods(alibi, causal_mask)


def _relative_bias(work: Work, device: torch.device) -> Mods:
    table, last = _learned(work, 2 * work.length - 1, device), work.length - 1

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx - kv_idx + last]

    return Mods(relative_bias, causal_mask, (table,))


def _factors(length: int, dims: int) -> tuple[int, ...]:
    """Return the sides of a grid of `length` tokens, as equal as divisors allow."""
    if dims == 1:
        return (length,)
    most = round(length ** (1 / dims))
    side = max(n for n in range(1, most + 1) if length % n == 0)
    return (*_factors(length // side, dims - 1), side)


def _odd(size: int, most: int) -> int:
    return min(most, size - 1 + size % 2)


def _neighborhood(window: int, dims: int, tile: tuple[int, ...] = ()) -> Callable[[Work, torch.device], Mods]:
    """Neighborhood attention on a grid, in row-major order or, with `tile`, in that of a TiledGrid."""

    def mods(work: Work, device: torch.device) -> Mods:
        grid = _factors(work.length, dims)
        kernel = tuple(_odd(side, window) for side in grid)
        mask_mod: Mod = (natten_2d if dims == 2 else natten_3d)(*grid, kernel)
        return Mods(mask_mod=TiledGrid(grid, tile).mod(mask_mod) if tile else mask_mod)

    return mods


def _block_diffusion(work: Work, device: torch.device) -> Mods:
    return Mods(mask_mod=block_diffusion(work.length // 2, 32))


def swin_cells(length: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the cell of a Swin table for each pair of patches in a window, and how many cells the table has."""
    side = math.isqrt(length - 1) + 1
    place = torch.arange(length, device=device)
    y, x = place // side, place % side
    cells = (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1
    return cells.int(), (2 * side - 1) ** 2


def _learned(work: Work, entries: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(work.heads, entries, device=device, generator=generator).requires_grad_()


def _swin(work: Work, device: torch.device) -> Mods:
    cells, entries = swin_cells(work.length, device)
    table = _learned(work, entries, device)

    def swin(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, cells[q_idx, kv_idx]]

    return Mods(swin, None, (table,))


def _t5(work: Work, device: torch.device) -> Mods:
    """T5's bias for 32 buckets of distances, bidirectional, with heads as the first axis of the table."""
    table = _learned(work, 32, device)

    def t5(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        far = 8 + (torch.log(distance.clamp(min=1) / 8.0) * (8 / math.log(16.0))).to(torch.int32)
        bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + torch.where(q_idx < kv_idx, 16, 0)
        return score + table[h, bucket]

    return Mods(t5, None, (table,))


def _gemma(work: Work, device: torch.device) -> Mods:
    """Gemma 2's local layers: scores capped at 50, and a window of 4,096 tokens."""
    window = _sliding(lambda work: min(4096, work.length // 2))(work, device)
    return Mods(softcap_of(50.0), window.mask_mod)


def _flags(**flags: object) -> Callable[[Work], Native | None]:
    return lambda work: Native(**flags)


def _none(work: Work) -> None:
    return None


_CAUSAL = _flags(causal=True)

WORKS = {
    work.name: work
    for work in (
        Work("full_d128", 2, 16, 8192, 128, _full, _flags()),
        Work("full_d64", 2, 32, 8192, 64, _full, _flags()),
        Work("causal_d64", 2, 32, 8192, 64, _causal, _CAUSAL),
        Work("causal_d96", 3, 12, 5003, 96, _causal, _CAUSAL),
        Work("causal_d128", 2, 16, 8192, 128, _causal, _CAUSAL),
        Work("causal_d256", 2, 8, 8192, 256, _causal, _CAUSAL),
        Work("causal_d192_128", 2, 16, 8192, 192, _causal, _CAUSAL, value_dim=128),
        Work("causal_gqa", 2, 32, 8192, 128, _causal, _CAUSAL, kv_heads=8),
        Work("causal_1k", 16, 16, 1024, 128, _causal, _CAUSAL),
        Work("causal_2k", 8, 16, 2048, 128, _causal, _CAUSAL),
        Work("causal_32k", 1, 16, 32768, 128, _causal, _CAUSAL),
        Work("sliding_32k", 1, 16, 32768, 128, _sliding(_window), lambda w: Native(causal=True, window=_window(w))),
        Work("documents_16k", 1, 16, 16384, 128, _documents,
             lambda w: Native(causal=True, documents=document_lengths(w.length))),
        Work("prefix_2048", 2, 16, 8192, 128, _prefix, _none),
        Work("softcap", 2, 16, 8192, 128, _softcap, _flags(causal=True, softcap=SOFTCAP)),
        Work("alibi", 2, 16, 8192, 128, _alibi, _none),
        Work("relative_bias", 2, 16, 4096, 64, _relative_bias, _none),
        Work("natten_2d", 1, 16, 16384, 64, _neighborhood(13, 2), _none),
        Work("natten_2d_tiles", 1, 16, 16384, 64, _neighborhood(13, 2, (16, 8)), _none),
        Work("natten_3d", 1, 16, 16384, 64, _neighborhood(7, 3), _none),
        Work("block_diffusion", 1, 16, 8192, 128, _block_diffusion, _none),
        Work("swin", 4096, 6, 49, 32, _swin, _none),
        Work("t5", 8, 32, 2048, 64, _t5, _none),
        Work("gemma", 2, 16, 8192, 256, _gemma, _none, kv_heads=8),
    )
}  # fmt: skip

CPU_WORKS = {
    work.name: work
    for work in (
        Work("cpu_causal", 1, 8, 4096, 64, _causal, _CAUSAL),
        Work("cpu_alibi", 1, 8, 4096, 64, _alibi, _none),
        Work("cpu_softcap", 1, 8, 4096, 64, _softcap, _none),
        Work("cpu_causal_16k", 1, 8, 16384, 64, _causal, _CAUSAL),
        Work("cpu_sliding_16k", 1, 8, 16384, 64, _sliding(lambda work: min(256, work.length // 4)), _none),
        Work("cpu_windows", 1024, 4, WINDOW, 32, _full, _flags()),
        Work("cpu_windows_bias", 1024, 4, WINDOW, 32, _relative_bias, _none),
        Work("cpu_swin", 512, 3, 49, 32, _relative_bias, _none),
        Work("cpu_windows_packed", 1, 4, 256 * WINDOW, 32, _windows, _none),
    )
}
