"""Sequences packed end to end, and their results from one dense computation per sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexattn import AuxRequest, mods, reference, varlen_attn

Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class PackedCase:
    """A call of varlen_attn. Keys that are not used are NaN, and rows of query after the last sequence are `poison`."""

    q_lengths: tuple[int, ...] = (70, 0, 30, 1, 100, 7)
    k_lengths: tuple[int, ...] = (70, 5, 60, 0, 100, 200)
    used: tuple[int, ...] | None = None
    after: int = 0  # rows of query after the last sequence
    poison: float = torch.nan
    window_size: tuple[int, int] = (-1, -1)
    mask_mod: Mod | None = None
    table: bool = False  # score_mod reads a tensor that needs a gradient
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    sink: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def tensors(self) -> tuple[Tensor, ...]:
        """Return query, key, value and what score_mod reads."""
        generator = torch.Generator().manual_seed(0)
        T_q, T_k = sum(self.q_lengths) + self.after, sum(self.k_lengths)
        shapes = (T_q, self.Hq, self.D), (T_k, self.Hkv, self.D), (T_k, self.Hkv, self.Dv)
        q, k, v = (torch.randn(*shape, generator=generator).to(self.dtype) for shape in shapes)
        table = torch.randn(self.Hq, 500, generator=generator).to(self.dtype)
        found = [x.to(self.device).requires_grad_() for x in (q, k, v, table)]
        return tuple(found if self.table else found[:3])

    def score_mod(self, table: Tensor) -> Mod:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[h, q_idx - kv_idx + 250].to(score.dtype) * (b + 1)

        return score_mod

    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 2, self.Hq, device=self.device) if self.sink else None

    def run(self, q: Tensor, k: Tensor, v: Tensor, *table: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return out [T_q, Hq, Dv] and lse [Hq, T_q]."""
        cu_q, cu_k = (integers(0, *accumulate(x)).to(self.device) for x in (self.q_lengths, self.k_lengths))
        if self.used is not None:
            options["seqused_k"] = integers(*self.used).to(self.device)
        rows = torch.cat(
            [torch.arange(n) < used for n, used in zip(self.k_lengths, self.used or self.k_lengths, strict=True)]
        )
        k, v = (torch.where(rows.to(self.device)[:, None, None], x, torch.nan) for x in (k, v))
        if self.after:
            q = torch.cat([q[: -self.after], torch.full_like(q[-self.after :], self.poison)])
        q, k, v = (_before_nan(x) for x in (q, k, v))
        return varlen_attn(
            q, k, v, cu_q, cu_k, max(self.q_lengths), max(self.k_lengths), enable_gqa=self.Hq != self.Hkv,
            score_mod=self.score_mod(*table) if table else None, mask_mod=self.mask_mod, sink=self.sinks(),
            window_size=self.window_size, return_aux=AuxRequest(lse=True), **options,
        )  # fmt: skip

    def expected(
        self, q: Tensor, k: Tensor, v: Tensor, *table: Tensor, dtype: torch.dtype | None = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse with differentiable torch operations, sequence by sequence."""
        score_mod = self.score_mod(*table) if table else None
        outs, lses, sizes = [], [], [*self.q_lengths, self.after]
        keys, values = k.split(self.k_lengths), v.split(self.k_lengths)
        *queries, rest = q.split(sizes)
        for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
            n = len(key) if self.used is None else self.used[i]
            one = (x.transpose(0, 1)[None] for x in (query, key[:n], value[:n]))
            out, lse = reference.attention(
                *one, _of_sequence(score_mod, i), _of_sequence(self._mask(n - len(query)), i),
                dtype=dtype, sink=self.sinks(),
            )  # fmt: skip
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        outs.append(rest.new_zeros(len(rest), self.Hq, self.Dv, dtype=outs[0].dtype))
        lses.append(rest.new_full((self.Hq, len(rest)), -torch.inf, dtype=lses[0].dtype))
        return torch.cat(outs), torch.cat(lses, 1)

    def _mask(self, diagonal: int) -> Mod:
        left, right = (10**6 if x < 0 else x for x in self.window_size)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = kv_idx - q_idx - diagonal
            keep = (distance >= -left) & (distance <= right)
            return keep if self.mask_mod is None else keep & self.mask_mod(b, h, q_idx, kv_idx)

        return mask_mod


def _before_nan(x: Tensor) -> Tensor:
    """Return x at the start of memory that is NaN after it."""
    return torch.cat([x, x.new_full((128, *x.shape[1:]), torch.nan)])[: len(x)]


def _of_sequence(mod: Mod | None, i: int) -> Mod | None:
    if mod is None:
        return None
    return lambda *args: mod(*args[:-4], torch.tensor(i), *args[-3:])


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx + 40 * h) & ((kv_idx % 3 < 2) | (b == 0))


def by_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx % 3 == 0


CASES = {
    "plain": PackedCase(),
    "causal, bottom right": PackedCase(window_size=(-1, 0), table=True, after=3),
    "causal, top left": PackedCase(mask_mod=mods.causal, table=True),
    "full blocks": PackedCase((300, 40, 257), (300, 40, 257), mask_mod=mods.causal),
    "no full blocks": PackedCase((300, 40), (300, 40), mask_mod=by_third),
    "window": PackedCase(window_size=(20, 3), after=1),
    "window before": PackedCase(window_size=(9, -1)),
    "sliding mask": PackedCase(mask_mod=mods.sliding_window(9), sink=True),
    "by head": PackedCase(window_size=(-1, 30), mask_mod=by_head, Hkv=1, Dv=24, table=True),
    "used": PackedCase(used=(50, 5, 60, 0, 0, 111), window_size=(-1, 0), table=True),
    "equal lengths": PackedCase((40, 40, 40), (40, 40, 40), mask_mod=mods.causal),
    "one sequence": PackedCase((70,), (90,), window_size=(5, 5)),
    "nothing": PackedCase((0, 0), (3, 0)),
    "many short ones": PackedCase((3,) * 90, (3,) * 90, window_size=(-1, 0)),
}
