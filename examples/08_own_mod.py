"""8. A custom mod. explain shows its facts, the mask and the kernels. full() also has the graph and its gradient."""

import torch
from torch import Tensor, nn

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.reference import attention

B, H, SIDE, D = 1, 4, 16, 32
S = SIDE * SIDE


class ImageBias(nn.Module):
    """Pixels of an image attend to a neighborhood. Each head learns how fast scores decay with distance."""

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius
        self.raw = nn.Parameter(torch.zeros(H))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dx, dy = q_idx % SIDE - kv_idx % SIDE, q_idx // SIDE - kv_idx // SIDE
        # Operations on captured tensors alone run once per call in torch, not once per score.
        return score - nn.functional.softplus(self.raw)[h] * (dx * dx + dy * dy) / self.radius

    def mask_mod(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dx, dy = q_idx % SIDE - kv_idx % SIDE, q_idx // SIDE - kv_idx // SIDE
        return (dx.abs() <= self.radius) & (dy.abs() <= self.radius)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, B, H, S, D, device=device).unbind(0)
    image = ImageBias(radius=3).to(device)
    mask = create_block_mask(image.mask_mod, None, None, S, S, device=device, BLOCK_SIZE=32)

    print(flexattn.explain(q, k, v, score_mod=image.score_mod, block_mask=mask))

    out = flex_attention(q, k, v, score_mod=image.score_mod, block_mask=mask)
    expected, _ = attention(q, k, v, score_mod=image.score_mod, mask_mod=image.mask_mod)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    (found,) = torch.autograd.grad(out.square().sum(), image.raw)
    (wanted,) = torch.autograd.grad(expected.square().sum(), image.raw)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


if __name__ == "__main__":
    main()
