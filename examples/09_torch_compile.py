"""Train a compiled model whose attention has a learned bias, with a new document mask at each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexattn import BlockMask, create_block_mask, flex_attention, mods

TOKENS, HEADS, DIM = 256, 4, 32


class Block(nn.Module):
    """Attention with a learned slope per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.slopes = nn.Parameter(torch.full((HEADS,), 0.1))

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.slopes[h] * (q_idx - kv_idx).abs()

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return x + flex_attention(q, k, v, self.score_mod, mask).transpose(1, 2).flatten(2)


def document_mask(seed: int) -> BlockMask:
    """Return the causal mask of packed documents of random lengths."""
    starts = torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.02
    return create_block_mask(mods.document_causal(starts.cumsum(0)), None, None, TOKENS, TOKENS, device="cpu")


def main() -> None:
    torch.manual_seed(0)
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # Inductor, the default backend, works too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = torch.randn(2, 2, TOKENS, HEADS * DIM)
    for step in range(4):
        mask = document_mask(step)  # built outside of the compiled function
        loss = (compiled(x, mask) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {mask.sparsity():.0f} % of the pairs skipped")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{graphs} graph compiled for 4 masks; slopes {[round(s, 4) for s in model.slopes.tolist()]}")
    same = torch.equal(compiled(x, mask), model(x, mask))
    print(f"equal to the uncompiled model: {same}")


if __name__ == "__main__":
    main()
