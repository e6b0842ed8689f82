"""Steps over a pool of pages as vLLM describes them: packed queries, a block table with entries that are not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import mods, varlen_attn

HQ, HKV, D, PAGE, PAGES = 4, 2, 16, 16, 24
Mod = Callable[..., Any]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 8)


def image(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) | ((q >= 4) & (q < 12) & (k >= 4) & (k < 12) & (b == 0))


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 3 * torch.tanh((score - 0.1 * (h + 1) * (q - k)) / 3)


class Step:
    """What vLLM says of a step, and its tensors."""

    def __init__(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], padding: int = 0, seed: int = 0) -> None:
        self.query_lens, self.seq_lens, self.padding = query_lens, seq_lens, padding
        generator = torch.Generator().manual_seed(seed)
        self.pool = torch.randn(PAGES, PAGE, HKV, 2 * D, generator=generator)
        self.query = torch.randn(sum(query_lens) + padding, HQ, D, generator=generator)
        table = 1 + torch.randperm(PAGES - 1, generator=generator)[: 5 * len(seq_lens)].view(-1, 5)
        used = torch.arange(5) < -(-torch.tensor(seq_lens)[:, None] // PAGE)
        self.block_table = table.masked_fill(~used, 9999).int()

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """query_start_loc and seq_lens."""
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        return starts.int(), torch.tensor(self.seq_lens, dtype=torch.int32)

    def expected(self, mask_mod: Mod, score_mod: Mod | None) -> Tensor:
        """Return the result by one dense computation for each request."""
        starts, _ = self.lengths
        rows = []
        for b, n in enumerate(self.seq_lens):
            pages = self.pool[self.block_table[b, : -(-n // PAGE)].long()].flatten(0, 1)[:n]
            k, v = (x.transpose(0, 1).repeat_interleave(HQ // HKV, 0) for x in pages.split(D, -1))
            q_idx, k_idx = torch.arange(n - self.query_lens[b], n)[:, None], torch.arange(n)
            score = self.query[starts[b] : starts[b + 1]].transpose(0, 1) @ k.mT / D**0.5
            if score_mod is not None:
                score = score_mod(score, b, torch.arange(HQ)[:, None, None], q_idx, k_idx)
            rows.append((score.masked_fill(~mask_mod(b, 0, q_idx, k_idx), -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return torch.cat([*rows, torch.zeros(self.padding, HQ, D)])


STEPS = {
    "mixed": Step((40, 9, 1), (40, 34, 13)),
    "padding": Step((5, 0, 1), (70, 0, 33), padding=10),
    "decoding": Step((1, 1, 1), (17, 80, 1)),
    "padding as if all had rows": Step((1, 2), (20, 45), padding=1),
}
KINDS: dict[str, tuple[Mod, Mod | None, dict[str, Any]]] = {
    "causal": (causal, None, {"window_size": (-1, 0)}),
    "windowed": (windowed, None, {"window_size": (7, 0)}),
    "mods": (image, softcap, {}),
}


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, kind: str, num_splits: int | None) -> None:
    step = STEPS[name]
    mask_mod, score_mod, options = KINDS[kind]
    starts, seq_lens = step.lengths
    if not options:
        before = (seq_lens - starts.diff()).int()
        assert score_mod is not None
        options = {"mask_mod": mods.shifted(mask_mod, before), "score_mod": mods.shifted(score_mod, before)}
    key, value = step.pool.split(D, -1)
    out = varlen_attn(
        step.query, key, value, starts, None, max(step.query_lens), 5 * PAGE, enable_gqa=True, seqused_k=seq_lens,
        block_table=step.block_table, num_splits=num_splits, **options,
    )  # fmt: skip
    torch.testing.assert_close(out, step.expected(mask_mod, score_mod))


class PoolMasks:
    """Masks of tokens by slots of the pool, in buffers that all steps share."""

    def __init__(self) -> None:
        self.request = torch.zeros(128, dtype=torch.int32)
        self.position_of_page = torch.zeros(4, PAGES, dtype=torch.long)
        self.lists = torch.zeros(8, PAGES, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)

    def mods_of(self, step: Step, mask_mod: Mod, score_mod: Mod | None) -> tuple[Mod, Mod | None]:
        """Write a step into the buffers, and return mods of tokens and slots."""
        starts, seq_lens = step.lengths
        tokens, requests = sum(step.query_lens), len(step.seq_lens)
        self.request[:tokens].copy_(torch.repeat_interleave(torch.arange(requests), starts.diff().long()))
        self.position_of_page.fill_(-1)
        for b, n in enumerate(step.seq_lens):
            pages = -(-n // PAGE)
            self.position_of_page[b, step.block_table[b, :pages].long()] = torch.arange(pages)
        request, pages, before = self.request[:tokens], self.position_of_page[:requests], seq_lens - starts.diff()

        def places(token: Any, slot: Any) -> tuple[Any, Any, Any, Any]:
            b = request[token]
            k = pages[b, slot // PAGE] * PAGE + slot % PAGE
            return b, (k >= 0) & (k < seq_lens[b]), token - starts[b] + before[b], k

        def mask(_: Any, h: Any, token: Any, slot: Any) -> Any:
            b, exists, q, k = places(token, slot)
            return exists & mask_mod(b, h, q, k)

        def score_of(score: Any, _: Any, h: Any, token: Any, slot: Any) -> Any:
            assert score_mod is not None
            b, exists, q, k = places(token, slot)
            return torch.where(exists, score_mod(score, b, h, q, k), -float("inf"))

        return mask, None if score_mod is None else score_of

    def block_mask(self, step: Step, mask: Mod) -> Any:
        """Return torch's BlockMask, whose lists name the pages of all requests with tokens in a group."""
        tokens = sum(step.query_lens)
        indices, counts = (x[: -(-tokens // 16)] for x in self.lists)
        for row, group in enumerate(self.request[:tokens].split(16)):
            found = [step.block_table[b, : -(-step.seq_lens[b] // PAGE)] for b in group.unique().tolist()]
            listed = torch.cat(found)
            indices[row] = -1
            indices[row, : len(listed)] = listed
            counts[row] = len(listed)
        return upstream.BlockMask.from_kv_blocks(
            counts[None, None], indices[None, None], BLOCK_SIZE=(16, PAGE), mask_mod=mask,
            seq_lengths=(tokens, PAGES * PAGE), compute_q_blocks=False,
        )  # fmt: skip


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_masks_over_the_pool(backend: str | None) -> None:
    """As vLLM's backend builds them for torch's functions. The buffers change between steps."""
    torch._dynamo.reset()
    flex: Any = upstream.flex_attention
    if backend is not None:
        flex = torch.compile(flex, fullgraph=True, backend=backend)
    masks = PoolMasks()
    steps = [Step((20, 1, 7), (50, 34, 13), seed=s) for s in range(2)]
    steps += [Step((1, 1, 1), n, seed=s) for s, n in enumerate(((17, 60, 1), (18, 61, 2)))]
    with flexattn.install_as_torch_flex():
        for step in steps:
            for mask_mod, score_mod, _ in KINDS.values():
                mask, score = masks.mods_of(step, mask_mod, score_mod)
                key, value = (x.flatten(0, 1).transpose(0, 1)[None] for x in step.pool.split(D, -1))
                query = step.query.transpose(0, 1)[None]
                options: Any = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 16, "BLOCK_N": 16}
                out = flex(
                    query, key, value, score, masks.block_mask(step, mask), enable_gqa=True, kernel_options=options
                )
                torch.testing.assert_close(out[0].transpose(0, 1), step.expected(mask_mod, score_mod))
