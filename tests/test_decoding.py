"""Decoding step by step equals full recomputation: ragged growing lengths, ring buffers, pages, with any mod."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from sequence_cases import BIAS, alibi, relative, sinks_and_window, softcap
from torch import Tensor

from flexattn import PagedKVCache, counters, create_block_mask, flex_attention, mods, reference

B, HQ, HKV, D = 3, 4, 2, 16
PROMPTS = (1, 40, 17)  # lengths of the prompts
STEPS = 500
CAPACITY = 576
RING = 64

Mod = Callable[..., Tensor]


@dataclass(frozen=True)
class Model:
    """What all steps have in common."""

    score_mod: Mod | None = None
    mask_mod: Mod = mods.causal
    sink: Tensor | None = None

    def expected(self, q: Tensor, k: Tensor, v: Tensor, b: int) -> Tensor:
        """Return the output of each position of sequence b, [Hq, positions, D], in one dense computation."""

        def of_sequence(mod: Mod | None) -> Mod | None:
            return None if mod is None else lambda *args: mod(*args[:-4], torch.tensor(b), *args[-3:])

        out, _ = reference.attention(
            q[None], k[None], v[None], of_sequence(self.score_mod), of_sequence(self.mask_mod), sink=self.sink
        )  # fmt: skip
        return out[0]


MODELS = {
    "causal": Model(),
    "window": Model(mask_mod=mods.sliding_window(50)),
    "sinks and window": Model(mask_mod=sinks_and_window),
    "alibi": Model(alibi),
    "softcap, sink": Model(softcap, mods.sliding_window(33), torch.linspace(-1, 1, HQ)),
    "relative": Model(lambda s, b, h, q_idx, kv_idx: s + BIAS[q_idx - kv_idx] * (b + 1)),
}


class Sequences:
    """Queries, keys and values of all positions, [H, positions, D] for each sequence."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = [n + STEPS for n in PROMPTS]
        self.q, self.k, self.v = (
            [torch.randn(H, n, D, generator=generator) for n in self.lengths] for H in (HQ, HKV, HKV)
        )

    def at(self, x: list[Tensor], step: int) -> Tensor:
        """Return the token of each sequence at a step, [B, H, 1, D]."""
        return torch.stack([t[:, n + step] for t, n in zip(x, PROMPTS, strict=True)])[:, :, None]

    def prompts(self, x: list[Tensor]) -> Tensor:
        """Return the tokens before the first step, padded with NaN, [B, H, longest, D]."""
        out = torch.full((B, x[0].size(0), max(PROMPTS), D), torch.nan)
        for b, n in enumerate(PROMPTS):
            out[b, :, :n] = x[b][:, :n]
        return out


class Rows:
    """A contiguous cache [B, Hkv, CAPACITY, D], NaN where there is no token."""

    def __init__(self, sequences: Sequences) -> None:
        self.k, self.v = (torch.full((B, HKV, CAPACITY, D), torch.nan) for _ in range(2))
        for cache, x in ((self.k, sequences.k), (self.v, sequences.v)):
            cache[:, :, : max(PROMPTS)] = sequences.prompts(x)
        self.used = torch.tensor(PROMPTS, dtype=torch.int32)
        self.offsets = self.used.clone()

    def append(self, k: Tensor, v: Tensor) -> None:
        self.offsets.copy_(self.used)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[torch.arange(B), :, self.used.long()] = new[:, :, 0]
        self.used += 1

    def arguments(self) -> dict[str, Any]:
        return {"key": self.k, "value": self.v, "seqused_k": self.used, "q_offsets": self.offsets}


class Ring(Rows):
    """The last RING tokens of each sequence."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(sequences)
        self.positions = torch.full((B, RING), -1, dtype=torch.int32)
        rows, self.k, self.v = (self.k, self.v), *(torch.zeros(B, HKV, RING, D) for _ in range(2))
        for b, n in enumerate(PROMPTS):
            self.positions[b, :n] = torch.arange(n)
            for cache, x in zip((self.k, self.v), rows, strict=True):
                cache[b, :, :n] = x[b, :, :n]

    def append(self, k: Tensor, v: Tensor) -> None:
        self.offsets.copy_(self.used)
        slot = (self.used % RING).long()
        for cache, new in ((self.k, k), (self.v, v)):
            cache[torch.arange(B), :, slot] = new[:, :, 0]
        self.positions[torch.arange(B), slot] = self.used
        self.used += 1

    def arguments(self) -> dict[str, Any]:
        return {"key": self.k, "value": self.v, "kv_positions": self.positions, "q_offsets": self.offsets}


class Paged:
    """A PagedKVCache whose pages are in random order. Sequence 0 was forked, so that its pages are shared."""

    def __init__(self, sequences: Sequences) -> None:
        cache = self.cache = PagedKVCache(
            B + 1, CAPACITY, pages=(B + 1) * CAPACITY // 16, heads=HKV, head_dim=D, dtype=torch.float32, device="cpu"
        )  # fmt: skip
        order = torch.randperm(len(cache._pool.free), generator=torch.Generator().manual_seed(2)).tolist()
        cache._pool.free = [cache._pool.free[i] for i in order]
        for x in (cache.key, cache.value):
            x.fill_(torch.nan)
        cache.append(
            sequences.prompts(sequences.k), sequences.prompts(sequences.v), lengths=PROMPTS, sequences=range(B)
        )  # fmt: skip
        cache.fork(0, [B])

    def append(self, k: Tensor, v: Tensor) -> None:
        self.cache.append(k, v, sequences=range(B))

    def arguments(self) -> dict[str, Any]:
        return {"key": self.cache.key, "value": self.cache.value, **self.cache.arguments(range(B))}


CACHES = {"rows": Rows, "pages": Paged, "ring": Ring}
CALLS = [(m, c) for m in MODELS for c in CACHES if c != "ring" or m in ("window", "softcap, sink")]


def decode(model: Model, kind: str, steps: int, **options: Any) -> tuple[Tensor, Tensor, int]:
    """Return the outputs of all steps, [B, Hq, steps, D], what they should be, and how often a mod was traced again."""
    sequences = Sequences()
    cache = CACHES[kind](sequences)
    positions = CAPACITY if kind != "ring" else max(sequences.lengths)
    mask = create_block_mask(model.mask_mod, None, None, positions, positions, device="cpu", BLOCK_SIZE=64)
    found, traces = [], []
    for step in range(steps):
        cache.append(sequences.at(sequences.k, step), sequences.at(sequences.v, step))
        q = sequences.at(sequences.q, step)
        found.append(
            flex_attention(
                q, score_mod=model.score_mod, block_mask=mask, enable_gqa=True, sink=model.sink,
                kernel_options=options, **cache.arguments(),
            )
        )  # fmt: skip
        traces.append(counters().traces)
    expected = torch.stack([
        model.expected(sequences.q[b], sequences.k[b], sequences.v[b], b)[:, n : n + steps]
        for b, n in enumerate(PROMPTS)
    ])  # fmt: skip
    return torch.cat(found, 2), expected, sum(x != y for x, y in pairwise(traces))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CALLS)
def test_decoding_equals_full_recomputation(name: str, kind: str) -> None:
    out, expected, traces = decode(MODELS[name], kind, STEPS)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert traces == 0


def test_a_chunk_of_a_prompt_equals_its_tokens_one_by_one() -> None:
    cache = PagedKVCache(2, 128, pages=16, heads=HKV, head_dim=D, dtype=torch.float32, device="cpu")
    mask = create_block_mask(mods.sliding_window(20), None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    q, k, v = (torch.randn(2, H, 90, D) for H in (HQ, HKV, HKV))
    found = []
    for first, last in pairwise((0, 40, 41, 57, 90)):
        part = slice(first, last)
        cache.append(k[:, :, part], v[:, :, part])
        out = flex_attention(
            q[:, :, part], cache.key, cache.value, relative, mask, enable_gqa=True, **cache.arguments()
        )  # fmt: skip
        found.append(out)
    expected, _ = reference.attention(q, k, v, relative, mods.sliding_window(20))
    torch.testing.assert_close(torch.cat(found, 2).double(), expected, rtol=1e-4, atol=1e-5)
