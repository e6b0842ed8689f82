"""7. Grouped queries and the logsumexp: attend to a cache and to new tokens separately, then merge them exactly."""

import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, flex_attention, merge_attention
from flexattn.mods import causal
from flexattn.reference import attention

B, HQ, HKV, D = 2, 8, 2, 64  # four query heads share each key head; keys and values are never expanded
CACHED, NEW = 300, 100


def shifted_causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx + CACHED


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(B, HQ, NEW, D, device=device)
    k, v = torch.randn(2, B, HKV, CACHED + NEW, D, device=device).unbind(0)

    # Every new token attends to the whole cache, so that part needs no mask. Among the new tokens, attention is causal.
    mask = create_block_mask(causal, None, None, NEW, NEW, device=device)
    lse = AuxRequest(lse=True)
    cached, cached_aux = flex_attention(q, k[:, :, :CACHED], v[:, :, :CACHED], enable_gqa=True, return_aux=lse)
    new, new_aux = flex_attention(
        q, k[:, :, CACHED:], v[:, :, CACHED:], block_mask=mask, enable_gqa=True, return_aux=lse
    )
    out, total = merge_attention([cached, new], [cached_aux.lse, new_aux.lse])

    expected, expected_lse = attention(q, k, v, mask_mod=shifted_causal)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(total.double(), expected_lse, atol=1e-5, rtol=1e-4)
    print("cache and new tokens merged: out and lse match attention over all keys at once")


if __name__ == "__main__":
    main()
