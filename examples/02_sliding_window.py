"""2. Sliding window: masks compose with and_masks and or_masks. The cost follows the window, not the sequence."""

import time

import torch
from torch import Tensor

from flexattn import and_masks, create_block_mask, flex_attention, or_masks
from flexattn.mods import causal
from flexattn.reference import attention

WINDOW, SINKS = 128, 4


def recent(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx < WINDOW


def sink(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let every query attend to the first few keys, as streaming language models do."""
    return kv_idx < SINKS


window_with_sinks = and_masks(causal, or_masks(recent, sink))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for length in (512, 1024, 2048):
        q, k, v = torch.randn(3, 1, 2, length, 64, device=device).unbind(0)  # each [B, H, S, D]
        mask = create_block_mask(window_with_sinks, None, None, length, length, device=device)
        flex_attention(q, k, v, block_mask=mask)  # on a GPU, the first call compiles
        start = time.perf_counter()
        out = flex_attention(q, k, v, block_mask=mask)
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = 1e3 * (time.perf_counter() - start)
        print(f"{length:5} tokens: {int(mask.to_dense().sum()):3} blocks, {elapsed:.1f} ms")

        expected, _ = attention(q, k, v, mask_mod=window_with_sinks)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    main()
