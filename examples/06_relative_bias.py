"""6. A learnable bias: tensors captured by a score_mod get gradients. Here it is a table of biases by distance (T5)."""

from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import create_block_mask, flex_attention
from flexattn.mods import causal
from flexattn.reference import attention

B, H, S, D = 2, 4, 256, 32
DISTANCES = 64  # length of the table; larger distances share the last entry


def relative_bias(table: Tensor) -> Callable[..., Tensor]:
    """Return a score_mod that adds `table[h, distance]`."""

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.clamp(q_idx - kv_idx, 0, DISTANCES - 1)
        return score + table[h, distance]

    return bias


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, S, D, device=device).unbind(0)
    mask = create_block_mask(causal, None, None, S, S, device=device)
    hidden = torch.linspace(2, -2, DISTANCES, device=device).expand(H, -1)  # the bias to learn
    target, _ = attention(q, k, v, score_mod=relative_bias(hidden), mask_mod=causal, dtype=None)

    table = torch.zeros(H, DISTANCES, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    losses = []
    for step in range(30):
        out = flex_attention(q, k, v, score_mod=relative_bias(table), block_mask=mask)
        loss = (out - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            expected, _ = attention(q, k, v, score_mod=relative_bias(table), mask_mod=causal)
            (wanted,) = torch.autograd.grad((expected - target).square().mean(), table)
            torch.testing.assert_close(table.grad, wanted, atol=1e-7, rtol=1e-3)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2e} -> {losses[-1]:.2e}, bias found {table[0, :4].tolist()}")
    assert losses[-1] < 0.1 * losses[0]


if __name__ == "__main__":
    main()
