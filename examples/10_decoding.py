"""10. Decoding: sequences of different lengths grow by one token per step in a cache, with ALiBi and a window."""

import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.reference import attention

B, HQ, HKV, D = 3, 8, 2, 64
CAPACITY, STEPS, WINDOW = 2048, 20, 700


def recent(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < WINDOW)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k, v = (torch.randn(B, HKV, CAPACITY, D, device=device) for _ in range(2))  # the cache
    lengths = torch.tensor([1500, 3, 777], device=device)  # tokens of each sequence so far
    alibi = mods.alibi(HQ)

    for _ in range(STEPS):
        q = torch.randn(B, HQ, 1, D, device=device)
        new = torch.randn(2, B, HKV, D, device=device)
        for cache, token in zip((k, v), new, strict=True):
            cache[torch.arange(B, device=device), :, lengths] = token

        # Query 0 of a step is query `lengths[b]` of the sequence. The mask has one row of blocks per sequence.
        mask = create_block_mask(mods.shifted(recent, lengths), B, None, 1, CAPACITY, device=device)
        out = flex_attention(q, k, v, mods.shifted(alibi, lengths), mask, enable_gqa=True)

        for b, length in enumerate(lengths.tolist()):
            first = max(0, length + 1 - WINDOW)
            keys, values = (x[b : b + 1, :, first : length + 1] for x in (k, v))
            expected, _ = attention(q[b : b + 1], keys, values, mods.shifted(alibi, length, first))
            torch.testing.assert_close(out[b : b + 1].double(), expected, atol=1e-5, rtol=1e-4)
        lengths = lengths + 1
    print(f"{STEPS} steps of {B} sequences: each equals attention over the tokens that it attends to")


if __name__ == "__main__":
    main()
