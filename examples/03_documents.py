"""3. Packed documents: a mask that reads a tensor. New lengths need a new mask at each step, but no new kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from flexattn import and_masks, create_block_mask, flex_attention
from flexattn.mods import causal
from flexattn.reference import attention

H, S, D = 4, 640, 32


def document_mask(ids: Tensor) -> Callable[..., Tensor]:
    """Return a mask_mod that keeps each token in its own document; `ids` [S] is the document of each token."""

    def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    return same_document


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, H, S, D, device=device).unbind(0)  # each [1, H, S, D]: all documents in one row

    for lengths in ([300, 40, 200, 100], [64, 512, 64]):
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)  # [S]
        mask_mod = and_masks(causal, document_mask(ids))
        mask = create_block_mask(mask_mod, None, None, S, S, device=device)
        print(lengths, mask.to_string(), sep="\n")
        out = flex_attention(q, k, v, block_mask=mask)

        # Each document alone gives the same result as its part of the row.
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for length, end in zip(lengths, ends, strict=True):
            part = slice(end - length, end)
            expected, _ = attention(q[:, :, part], k[:, :, part], v[:, :, part], mask_mod=causal)
            torch.testing.assert_close(out[:, :, part].double(), expected, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    main()
