"""12. Training on documents of different lengths without padding: jagged tensors, a mask and a learned bias.

The documents are the sections of local text files. The model predicts the next byte.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from flexattn import create_block_mask, flex_attention, mods

H, D, LAYERS = 4, 32, 2
LONGEST, BATCH, STEPS = 400, 6, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parent.parent


def documents() -> list[Tensor]:
    text = b"".join(path.read_bytes() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md"))
    sections = (s[:LONGEST] for s in text.split(b"\n\n"))
    return [torch.tensor(list(s), device=DEVICE) for s in sections if len(s) > 20]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H * D, 3 * H * D, bias=False)
        self.mlp = nn.Sequential(nn.Linear(H * D, 4 * H * D), nn.GELU(), nn.Linear(4 * H * D, H * D))
        self.bias = nn.Parameter(torch.zeros(H, 64))  # by distance

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x: [tokens of all documents, H * D]."""
        rows = self.qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (3, H, D)).unbind(1)
        # [documents, H, lengths, D]. Mods see positions in a document, and b is the document.
        q, k, v = (torch.nested.nested_tensor_from_jagged(r, offsets).transpose(1, 2) for r in rows)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + self.bias[h, (q_idx - kv_idx).clamp(0, 63)]

        out = flex_attention(q, k, v, score_mod, CAUSAL)
        x = x + out.transpose(1, 2).values().flatten(1)
        return x + self.mlp(rms_norm(x, x.shape[-1:]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, H * D)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, offsets)
        return rms_norm(x, x.shape[-1:]) @ self.embedding.weight.T


def main() -> None:
    torch.manual_seed(0)
    model, texts = Model().to(DEVICE), documents()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        batch = [texts[(step * BATCH + i) % len(texts)] for i in range(BATCH)]
        lengths = torch.tensor([len(t) - 1 for t in batch], device=DEVICE)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        logits = model(torch.cat([t[:-1] for t in batch]), offsets)
        loss = cross_entropy(logits, torch.cat([t[1:] for t in batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    learned = max(float(layer.bias.detach().abs().max()) for layer in model.layers)
    assert last < 0.8 * first and learned > 0
    print(f"{len(texts)} documents, {STEPS} steps: loss {first:.2f} -> {last:.2f}, largest bias {learned:.3f}")


CAUSAL = create_block_mask(mods.causal, None, None, LONGEST, LONGEST, device=DEVICE)
if __name__ == "__main__":
    main()
