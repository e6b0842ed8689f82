"""Masks whose rows are intervals of keys. Keys that no query attends to are NaN, and their pages are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from oracle import assert_close_to_oracle
from sequence_cases import Mod, SequenceCase, alibi
from torch import Tensor

from flexattn import BlockMask, mods
from flexattn.graph.equal_runs import EqualRuns, captures_compared
from flexattn.trace.trace import trace

IDS = torch.tensor([0] * 37 + [1] * 100 + [2] * 90 + [3] * 73)
STARTS = torch.searchsorted(IDS, IDS).int()


def document(device: str) -> Mod:
    return mods.document_causal(IDS.to(device))


def from_starts(device: str) -> Mod:
    starts = STARTS.to(device)
    return lambda b, h, q_idx, kv_idx: (kv_idx >= starts[q_idx]) & (kv_idx <= q_idx)


def prefix_by_batch(device: str) -> Mod:
    return mods.prefix_lm(torch.tensor([5, 131, 0], device=device))


def ahead(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx > q_idx + 2) & (kv_idx < q_idx + 70)


def some_rows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 33) & (q_idx % 2 == 0)


@dataclass(frozen=True)
class IntervalCase(SequenceCase):
    """`mod_on` makes the mask_mod from tensors on the device."""

    mod_on: Any = None

    def __post_init__(self) -> None:
        if self.mod_on is not None:
            object.__setattr__(self, "mask_mod", self.mod_on(self.device))

    def mask(self) -> BlockMask | None:
        mask = super().mask()
        assert mask is not None
        bound = trace(mask.mask_mod, "mask")
        if found := captures_compared(bound.graph):  # as a GPU finds them when it builds the mask
            x = bound.captures[found[0]]
            ends = [torch.searchsorted(x, x, right=right).int() for right in (False, True)]
            mask._remember(bound, (EqualRuns(found[0], torch.stack(ends)),))
        return mask

    def attended(self, b: int) -> Tensor:
        """Return which keys some query of a sequence attends to, [N]."""
        mod = self.mask_mod if self.mod_on is None else self.mod_on("cpu")
        assert mod is not None
        q_idx, kv_idx = torch.arange(self.M) + self.offset(b), torch.arange(self.N)
        keep = mod(torch.tensor(b), torch.tensor(0), q_idx[:, None], kv_idx).expand(self.M, self.N)
        return keep.any(0) & (kv_idx < self.length(b))

    def arguments(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        needed = torch.stack([self.attended(b) for b in range(self.B)])
        k, v = (torch.where(needed[:, None, :, None], x, torch.nan) for x in (k, v))
        key, value, found = super().arguments(k, v)
        if self.form == "pages":
            padded = torch.nn.functional.pad(needed, (0, self._columns * self.page_size - self.N))
            used = padded.unflatten(1, (self._columns, self.page_size)).any(2)
            found["block_table"] = torch.where(used.to(self.device), found["block_table"], -1)
        return key, value, found

    def check(self, **options: object) -> None:
        q, k, v = self.tensors()
        found = self.run(q, k, v, BACKEND="TRITON_DECODE", **options)
        dense, exact = self.expected(q, k, v, None), self.expected(q, k, v)
        for of, x, y, z in zip(("out", "lse"), found, dense, exact, strict=False):
            assert_close_to_oracle(of, x.cpu(), y, z, room=3e-7)

    def expected(
        self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = torch.float64
    ) -> tuple[Tensor, Tensor]:
        on_cpu = self if self.mod_on is None else type(self)(**{**self.__dict__, "device": "cpu"})
        return super(IntervalCase, on_cpu).expected(q, k, v, dtype)


LATER, USED = (3, 150, 299), (4, 151, 300)
SEVERAL = {"M": 5, "offsets": (0, 131, 290), "used": (5, 136, 295)}
PAGES: dict[str, Any] = {"form": "pages", "N": 320}
CASES = {
    "window": IntervalCase(mask_mod=mods.sliding_window(70), offsets=LATER, used=USED),
    "window of whole blocks": IntervalCase(mask_mod=mods.sliding_window(64), offsets=(63, 127, 191), used=None),
    "window, whole cache": IntervalCase(mask_mod=mods.sliding_window(70), offsets=LATER, used=None),
    "window, several queries": IntervalCase(mask_mod=mods.sliding_window(70), score_mod=alibi, **SEVERAL),
    "window, several tiles": IntervalCase(
        mask_mod=mods.sliding_window(29), M=70, offsets=(0, 100, 230), used=(70, 170, 300)
    ),
    "window, small pages": IntervalCase(mask_mod=mods.sliding_window(71), offsets=LATER, used=USED, **PAGES),
    "window, large pages": IntervalCase(
        mask_mod=mods.sliding_window(71), offsets=LATER, used=USED, page_size=128, form="pages", N=384, block=128
    ),
    "window, pages, several queries": IntervalCase(mask_mod=mods.sliding_window(71), **SEVERAL, **PAGES),
    "window, float8 pages": IntervalCase(
        mask_mod=mods.sliding_window(71), offsets=LATER, used=USED, float8="pages", **PAGES
    ),
    "keys ahead": IntervalCase(mask_mod=ahead, M=3, offsets=(0, 100, 200), used=(40, 300, 204)),
    "some rows": IntervalCase(mask_mod=some_rows, M=6, offsets=(0, 131, 290), used=(6, 137, 296), block=32),
    "nothing": IntervalCase(mask_mod=some_rows, offsets=(1, 131, 291), used=None),
    "prefix": IntervalCase(mask_mod=mods.prefix_lm(90), offsets=(3, 80, 201), used=(4, 300, 202)),
    "prefix by batch": IntervalCase(mod_on=prefix_by_batch, by_batch=True, **SEVERAL),
    "documents": IntervalCase(mod_on=document, offsets=LATER, used=USED),
    "documents, pages": IntervalCase(mod_on=document, offsets=LATER, used=USED, form="pages"),
    "document starts": IntervalCase(mod_on=from_starts, offsets=LATER, used=USED),
    "causal, wide heads": IntervalCase(mask_mod=mods.causal, D=40, Dv=24, Hq=6, Hkv=1, offsets=LATER, used=None),
}  # fmt: skip
