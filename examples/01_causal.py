"""1. Causal attention: write in Python which pairs may attend. Only their blocks are computed."""

import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention
from flexattn.reference import attention

B, H, S, D = 2, 4, 512, 64


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return whether the query attends to the key, for one pair of positions given as scalars."""
    return q_idx >= kv_idx


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, B, H, S, D, device=device).unbind(0)  # each [B, H, S, D]

    # B=None and H=None: one mask for every batch and head. It is classified once and used for any number of calls.
    mask = create_block_mask(causal, B=None, H=None, Q_LEN=S, KV_LEN=S, device=device)
    print(mask.to_string())  # █ computed without mask_mod, ░ computed with mask_mod, blank: skipped
    print(f"{mask.sparsity():.0f}% of the pairs lie in skipped blocks")

    out = flex_attention(q, k, v, block_mask=mask)  # [B, H, S, D]

    expected, _ = attention(q, k, v, mask_mod=causal)  # dense, in float64
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    print("matches the dense reference")


if __name__ == "__main__":
    main()
