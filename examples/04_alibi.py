"""4. ALiBi: a score_mod changes each score before the softmax. This one adds a bias per head, growing with distance."""

from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention
from flexattn.mods import causal
from flexattn.reference import attention

B, H, S, D = 2, 8, 384, 64


def alibi(slopes: Tensor) -> Callable[..., Tensor]:
    """Return a score_mod with one slope per head. flexattn.mods.alibi(H) is the ready-made version."""

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    return bias


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, B, H, S, D, device=device).unbind(0)  # each [B, H, S, D]
    mask = create_block_mask(causal, None, None, S, S, device=device)

    # The slopes are an argument of the kernel: new values, or another tensor, never cause a recompile.
    for strongest in (0.5, 0.25):
        slopes = torch.logspace(0, -7, H, base=2, device=device) * strongest  # [H]
        score_mod = alibi(slopes)
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)
        expected, _ = attention(q, k, v, score_mod=score_mod, mask_mod=causal)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
        print(f"slopes {slopes[0]:.3f} .. {slopes[-1]:.5f}: matches the dense reference")


if __name__ == "__main__":
    main()
