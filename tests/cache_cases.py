"""A paged cache next to a model of it: lists of tokens on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn import PagedKVCache


class ModelledCache:
    """Applies each operation to a cache, and to lists of tokens."""

    def __init__(self, sequences: int = 4, max_tokens: int = 90, pages: int = 24, **options: Any) -> None:
        self.heads, self.D, self.Dv = 2, 8, 12
        options = {"dtype": torch.float32, "device": "cpu", **options}
        self.cache = PagedKVCache(
            sequences, max_tokens, pages=pages, heads=self.heads, head_dim=self.D, value_head_dim=self.Dv, **options
        )
        for x in (self.cache.key, self.cache.value):
            x.fill_(torch.nan)
        self.tokens = [torch.empty(0, self.heads, self.D + self.Dv) for _ in range(sequences)]

    def append(self, counts: list[int], sequences: list[int] | None = None, **options: Any) -> None:
        rows = list(range(len(self.tokens))) if sequences is None else sequences
        M = max(counts)
        new = torch.randn(len(rows), M, self.heads, self.D + self.Dv)
        key, value = new.to(self.cache.key.device).transpose(1, 2).split((self.D, self.Dv), -1)
        self.cache.append(key, value, lengths=counts, sequences=sequences, **options)
        for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
            self.tokens[row] = torch.cat((self.tokens[row], new[i, :n]))

    def erase(self, sequences: list[int], keep: list[int]) -> None:
        self.cache.erase(sequences, keep)
        for row, n in zip(sequences, keep, strict=True):
            self.tokens[row] = self.tokens[row][:n]

    def fork(self, source: int, targets: list[int]) -> None:
        self.cache.fork(source, targets)
        for row in targets:
            self.tokens[row] = self.tokens[source]

    def check(self) -> None:
        """Compare the lengths and all tokens, and count the pages."""
        cache = self.cache
        lengths = [len(tokens) for tokens in self.tokens]
        assert cache.synchronize() == lengths
        for row, tokens in enumerate(self.tokens):
            key, value = stored(cache, row)
            torch.testing.assert_close(torch.cat((key, value), -1), tokens.to(cache.key.device), rtol=0, atol=0)
        table = cache.block_table
        in_table = set(table[table >= 0].tolist())
        assert len(in_table) == len(cache._pool.uses) - cache.free_pages
        assert not in_table & set(cache._pool.free)


def stored(cache: PagedKVCache, row: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a sequence, [tokens, Hkv, D]."""
    n = int(cache.seqused_k[row])
    pages = cache.block_table[row, : -(-n // cache.page_size)].long()
    found = []
    for x in (cache.key, cache.value):
        x = x[pages] if cache.kv_layout == "NHD" else x[pages].transpose(1, 2)
        found.append(x.flatten(0, 1)[:n])
    return found[0], found[1]
