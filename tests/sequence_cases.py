"""Calls with lengths, offsets, pages and ring buffers, and their results from one dense computation per sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention, mods, reference

Mod = Callable[..., Tensor]
FLOAT8 = torch.float8_e4m3fn
BIAS = torch.linspace(-1, 1, 1200, dtype=torch.float64)


def relative_to(table: Tensor) -> Mod:
    def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx - kv_idx + 600].to(score.dtype)

    return relative


relative = relative_to(BIAS)


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - 0.02 * (h + 1) * (q_idx - kv_idx).abs()


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 50)


def sinks_and_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & ((kv_idx < 3) | (q_idx - kv_idx < 30))


def by_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + 20 * b >= kv_idx) & (kv_idx % (b + 2) < 2)


@dataclass(frozen=True)
class SequenceCase:
    """A call for three sequences. Keys that are not used are NaN."""

    M: int = 1
    N: int = 300  # capacity
    offsets: tuple[int, ...] | None = (0, 100, 299)
    used: tuple[int, ...] | None = (1, 101, 300)
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    by_batch: bool = False  # the mask has a list per sequence
    by_hand: bool = False  # the block lists are the user's
    block: int | tuple[int, int] = 64
    form: Literal["rows", "pages", "ring"] = "rows"
    page_size: int = 16
    heads_first: bool = False
    float8: Literal["", "heads", "pages"] = ""  # descales by head, or by page and head
    sink: bool = False
    max_scores: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def B(self) -> int:
        return 3

    def length(self, b: int) -> int:
        return self.N if self.used is None else self.used[b]

    def offset(self, b: int) -> int:
        return 0 if self.offsets is None else self.offsets[b]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, and the keys and values of all positions."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.Hq, self.M, self.D), (self.Hkv, self.N, self.D), (self.Hkv, self.N, self.Dv))
        q, k, v = (torch.randn(self.B, *shape, generator=generator).to(self.dtype) for shape in shapes)
        if self.float8:
            k, v = ((9 * x).to(FLOAT8).to(self._wide) * self._scale_of_tokens(i) for i, x in enumerate((k, v)))
        return q, k, v

    def _scales(self, i: int) -> Tensor:
        """Return the factors of key (0) or value (1), [pages or 1, Hkv]."""
        pages = len(self._pool()) if self.float8 == "pages" else 1
        return torch.rand(pages, self.Hkv, generator=torch.Generator().manual_seed(i)).add(0.1) / 9

    def _scale_of_tokens(self, i: int) -> Tensor:
        """Return the factor of each token, [B or 1, Hkv, N or 1, 1]."""
        scales = self._scales(i).to(self._wide)
        if self.float8 == "heads":
            return scales[:, :, None, None]
        of_pages = scales[self._table()].repeat_interleave(self.page_size, 1)[:, : self.N]  # [B, N, Hkv]
        return of_pages.transpose(1, 2)[..., None]

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _columns(self) -> int:
        return -(-self.N // self.page_size)

    def _pool(self) -> Tensor:
        return torch.randperm(self.B * self._columns + 3, generator=torch.Generator().manual_seed(1))

    def _table(self) -> Tensor:
        return self._pool()[: self.B * self._columns].view(self.B, self._columns)

    def mask(self) -> BlockMask | None:
        if self.mask_mod is None:
            return None
        rows = self.M if self.offsets is None else max(self.N, self.M + max(self.offsets))
        B = self.B if self.by_batch else None
        columns = self.N if self.form != "ring" else rows
        mask = create_block_mask(self.mask_mod, B, None, rows, columns, device=self.device, BLOCK_SIZE=self.block)
        if self.by_hand:
            mask.mask_mod = self.mask_mod
        return mask

    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 2, self.Hq, device=self.device) if self.sink else None

    def arguments(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return key and value as they are stored, and the arguments that describe this."""
        found: dict[str, Any] = {}
        if self.offsets is not None:
            found["q_offsets"] = self._integers(self.offsets)
        if self.used is not None and self.form != "ring":
            found["seqused_k"] = self._integers(self.used)
        nan = torch.nan
        if self.float8:
            k, v = (x / self._scale_of_tokens(i) for i, x in enumerate((k, v)))
            scales = [self._scales(i).to(self.device) for i in range(2)]
            found["k_descale"], found["v_descale"] = scales if self.float8 == "pages" else [x[0] for x in scales]
        unused = torch.stack([torch.arange(self.N) >= self.length(b) for b in range(self.B)])[:, None, :, None]
        k, v = (torch.where(unused, nan, x) for x in (k, v))
        if self.form == "pages":
            k, v = self._paged(k, v, found)
        elif self.form == "ring":
            k, v = self._in_ring(k, v, found)
        dtype = FLOAT8 if self.float8 else self.dtype
        return k.to(self.device, dtype), v.to(self.device, dtype), found

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _paged(self, k: Tensor, v: Tensor, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Scatter the tokens over a pool of pages in random order. Entries of the table that are not used are -1."""
        size, columns, pool, table = self.page_size, self._columns, self._pool(), self._table()
        pages = []
        for x in (k, v):
            padded = torch.nn.functional.pad(x, (0, 0, 0, columns * size - self.N), value=torch.nan)
            tokens = padded.unflatten(2, (columns, size)).transpose(1, 2)  # [B, columns, Hkv, size, D]
            stored = x.new_full((len(pool), *tokens.shape[2:]), torch.nan)
            stored[table.flatten()] = tokens.flatten(0, 1)
            stored = stored if self.heads_first else stored.transpose(1, 2).contiguous()
            pages.append(stored)
        lengths = torch.tensor([self.length(b) for b in range(self.B)])[:, None]
        table = torch.where(torch.arange(columns) * size < lengths, table, -1)
        found["block_table"] = table.int().to(self.device)
        if self.heads_first:
            found["kv_layout"] = "HND"
        return pages[0], pages[1]

    def _in_ring(self, k: Tensor, v: Tensor, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Keep the last tokens of each sequence, in slot position % size."""
        size = 96
        positions = torch.full((self.B, size), -1)
        stored = [x.new_full((self.B, x.size(1), size, x.size(3)), torch.nan) for x in (k, v)]
        for b in range(self.B):
            for p in range(max(0, self.length(b) - size), self.length(b)):
                positions[b, p % size] = p
                for x, y in zip(stored, (k, v), strict=True):
                    x[b, :, p % size] = y[b, :, p]
        found["kv_positions"] = positions.int().to(self.device)
        return stored[0].nan_to_num(0.0), stored[1].nan_to_num(0.0)

    def run(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return out, lse and, if requested, the largest scores."""
        key, value, layout = self.arguments(k, v)
        score_mod = relative_to(BIAS.to(self.device)) if self.score_mod is relative else self.score_mod
        out, aux = flex_attention(
            q.to(self.device), key, value, score_mod, self.mask(), enable_gqa=True, sink=self.sinks(),
            kernel_options=options, return_aux=AuxRequest(lse=True, max_scores=self.max_scores), **layout,
        )  # fmt: skip
        assert aux.lse is not None
        return out, aux.lse, aux.max_scores

    def expected(
        self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse, sequence by sequence, with differentiable torch operations."""
        found = [self._expected(b, q, k, v, dtype) for b in range(self.B)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _expected(self, b: int, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        first = max(0, self.length(b) - 96) if self.form == "ring" else 0
        keys = slice(first, self.length(b))
        at, offset = torch.tensor(b), self.offset(b)

        def moved(mod: Mod | None) -> Mod | None:
            if mod is None:
                return None
            return lambda *args: mod(*args[:-4], at, args[-3], args[-2] + offset, args[-1] + first)

        sink = self.sinks()
        return reference.attention(
            q[b : b + 1], k[b : b + 1, :, keys], v[b : b + 1, :, keys], moved(self.score_mod), moved(self.mask_mod),
            dtype=dtype, sink=None if sink is None else sink.cpu(),
        )  # fmt: skip


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


causal = mods.causal
CASES = {
    "one query": SequenceCase(),
    "one query, causal": SequenceCase(mask_mod=causal),
    "several queries": SequenceCase(M=5, offsets=(0, 100, 200), used=(5, 105, 205), mask_mod=causal),
    "across rows of blocks": SequenceCase(M=40, offsets=(30, 100, 63), used=(70, 140, 103), mask_mod=causal),
    "across rows of blocks, lists": SequenceCase(
        M=40, offsets=(30, 100, 63), used=(70, 140, 103), mask_mod=causal, by_hand=True
    ),
    "many queries": SequenceCase(M=150, offsets=(0, 100, 33), used=(150, 250, 0), mask_mod=causal),
    "window": SequenceCase(M=70, offsets=(30, 100, 63), used=(100, 170, 133), mask_mod=window, score_mod=alibi),
    "sinks and window": SequenceCase(mask_mod=sinks_and_window, score_mod=softcap, block=32),
    "without lengths": SequenceCase(M=7, used=None, offsets=(0, 100, 290), mask_mod=causal, score_mod=relative),
    "without offsets": SequenceCase(M=70, offsets=None, used=(1, 70, 299), score_mod=alibi),
    "lengths, mask": SequenceCase(M=300, offsets=None, used=(1, 70, 299), mask_mod=causal, score_mod=relative),
    "by batch": SequenceCase(M=9, offsets=(3, 60, 200), used=(30, 90, 260), mask_mod=by_batch, by_batch=True),
    "sink, maxima": SequenceCase(M=4, offsets=(0, 9, 90), used=(4, 13, 0), sink=True, max_scores=True, mask_mod=causal),
    "wide heads": SequenceCase(D=40, Dv=24, Hq=6, Hkv=1, mask_mod=causal),
    "float8": SequenceCase(float8="heads", mask_mod=causal, M=5, offsets=(0, 100, 200), used=(5, 105, 205)),
    "float8, whole rows": SequenceCase(float8="heads", used=None, offsets=None, M=70, score_mod=softcap),
    "float8 pages": SequenceCase(float8="pages", form="pages", score_mod=alibi, mask_mod=causal),
    "float8 pages, by head": SequenceCase(float8="heads", form="pages", page_size=64, D=40, Dv=24),
    "float8, large pages": SequenceCase(
        M=90, float8="pages", form="pages", page_size=128, mask_mod=window, offsets=(0, 100, 200), used=(90, 190, 290)
    ),
    "pages": SequenceCase(form="pages"),
    "pages, causal": SequenceCase(M=5, offsets=(0, 100, 200), used=(5, 105, 205), mask_mod=causal, form="pages"),
    "large pages": SequenceCase(M=3, offsets=(0, 98, 297), mask_mod=window, form="pages", page_size=128),
    "large pages, lists": SequenceCase(
        M=3, offsets=(0, 98, 297), mask_mod=window, form="pages", page_size=128, by_hand=True
    ),
    "pages, heads first": SequenceCase(mask_mod=window, score_mod=alibi, form="pages", heads_first=True, page_size=32),
    "pages, many queries": SequenceCase(
        M=150, offsets=(0, 100, 33), used=(150, 250, 183), mask_mod=causal, form="pages", score_mod=softcap
    ),
    "ring": SequenceCase(used=(1, 101, 300), offsets=(0, 100, 299), mask_mod=window, form="ring", score_mod=alibi),
    "ring, queries": SequenceCase(M=9, used=(9, 101, 300), offsets=(0, 92, 291), mask_mod=causal, form="ring"),
}  # fmt: skip
