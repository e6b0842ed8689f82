"""5. Softcapping and gradients: the score_mod is differentiated automatically, so training needs no extra code."""

import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention
from flexattn.mods import causal
from flexattn.reference import attention

B, H, S, D = 1, 4, 256, 64
CAP = 20.0


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keep scores within (-CAP, CAP), as Gemma 2 does."""
    return CAP * torch.tanh(score / CAP)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(3, B, H, S, D, device=device)
    inputs[0] *= 8  # large scores, so that the cap matters
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    d_out = torch.randn(B, H, S, D, device=device)
    mask = create_block_mask(causal, None, None, S, S, device=device)

    out = flex_attention(q, k, v, score_mod=softcap, block_mask=mask)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)

    expected, _ = attention(q, k, v, score_mod=softcap, mask_mod=causal)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-3)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out.double())
    for name, found, gradient in zip("qkv", gradients, wanted, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-3, rtol=1e-3)
        print(f"d{name} matches, largest error {(found - gradient).abs().max():.1e}")


if __name__ == "__main__":
    main()
