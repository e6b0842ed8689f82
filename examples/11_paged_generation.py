"""11. Generation with a paged cache: prompts of different lengths, two continuations each, rotary embedding, a mask.

The model is not trained. Each step is compared with the same model on the whole text, without a cache.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from flexattn import BlockMask, PagedKVCache, create_block_mask, flex_attention, mods

HQ, HKV, D, LAYERS = 4, 2, 32, 2
LONGEST, STEPS = 512, 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = (Path(__file__).parent.parent / "README.md").read_bytes()
# The first tokens, and the last 200 before a query.
attends = mods.or_masks(
    mods.and_masks(mods.causal, mods.sliding_window(200)), mods.and_masks(mods.causal, mods.global_tokens(4))
)


def rotary_tables() -> tuple[Tensor, Tensor]:
    angle = torch.arange(LONGEST)[:, None] * 10000 ** (-torch.arange(D // 2) / (D // 2))
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HQ * D, (HQ + 2 * HKV) * D, bias=False)
        self.out = nn.Linear(HQ * D, HQ * D, bias=False)

    def forward(self, x: Tensor, mask: BlockMask, cache: PagedKVCache, lengths: list[int] | None) -> Tensor:
        """x: [B, tokens, HQ * D], the tokens that are not in the cache yet. lengths: how many of them are real."""
        heads = self.qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, D)).transpose(1, 2)
        q, k, v = heads.split((HQ, HKV, HKV), 1)
        q = cache.append(
            k, v, query=q, lengths=lengths, rotary_cos=COS, rotary_sin=SIN, rotary_interleaved=False
        )  # fmt: skip
        assert q is not None
        # Query 0 is at position cache.q_offsets[b] of its sequence. The mask is about positions.
        out = flex_attention(q, cache.key, cache.value, None, mask, enable_gqa=True, **cache.arguments())
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HQ * D)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, mask: BlockMask, caches: list[PagedKVCache], lengths: list[int] | None) -> Tensor:
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, cache, lengths)
        return rms_norm(x, x.shape[-1:]) @ self.embedding.weight.T  # [B, tokens, 256]


def caches_for(sequences: int, pages: int) -> list[PagedKVCache]:
    return [
        PagedKVCache(sequences, LONGEST, pages=pages, heads=HKV, head_dim=D, dtype=torch.float32, device=DEVICE)
        for _ in range(LAYERS)
    ]


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    mask = create_block_mask(attends, None, None, LONGEST, LONGEST, device=DEVICE)  # once, for all positions
    prompts = [TEXT[:300], TEXT[1000:1017], TEXT[2000:2100]]

    # Sequences 0 to 2 are the prompts. Sequences 3 to 5 continue the same prompts, and share their pages.
    caches = caches_for(6, pages=90)
    lengths = [len(p) for p in prompts] + [0, 0, 0]
    padded = torch.zeros(6, max(lengths), dtype=torch.long, device=DEVICE)
    for row, prompt in zip(padded, prompts, strict=False):
        row[: len(prompt)] = torch.tensor(list(prompt))
    logits = model(padded, mask, caches, lengths)
    last = torch.stack([logits[b, len(p) - 1] for b, p in enumerate(prompts)]).repeat(2, 1)
    for cache in caches:
        for b in range(3):
            cache.fork(b, [b + 3])

    texts = [list(p) for p in prompts * 2]
    for _ in range(STEPS):
        token = torch.multinomial(last.softmax(-1), 1)  # [6, 1]
        for text, new in zip(texts, token[:, 0].tolist(), strict=True):
            text.append(new)
        last = model(token, mask, caches, None)[:, 0]

    for b, text in enumerate(texts):
        whole = torch.tensor(text, device=DEVICE)[None]
        expected = model(whole, mask, caches_for(1, pages=32), None)[0, -1]
        torch.testing.assert_close(last[b], expected, atol=1e-4, rtol=1e-4)
    print(f"{STEPS} steps of 6 sequences: each has the logits of the whole text")
    print(caches[0])


COS, SIN = rotary_tables()
if __name__ == "__main__":
    main()
