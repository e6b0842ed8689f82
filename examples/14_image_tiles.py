"""14. Neighborhood attention on an image whose tokens are in the order of tiles, so that windows touch fewer blocks."""

import torch

from flexattn import create_block_mask, flex_attention, mods
from flexattn.layout import TiledGrid

HEIGHT, WIDTH, WINDOW = 32, 128, 13
S = HEIGHT * WIDTH


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 2, S, 64, device=device).unbind(0)  # row-major
    window = mods.natten_2d(HEIGHT, WIDTH, WINDOW)
    grid = TiledGrid((HEIGHT, WIDTH), tile=(16, 8))  # a tile is one block of 128 tokens

    row_major = create_block_mask(window, None, None, S, S, device=device)
    in_tiles = create_block_mask(grid.mod(window), None, None, S, S, device=device)
    for name, mask in (("row-major", row_major), ("in tiles", in_tiles)):
        full, partial, empty = mask.counts()
        print(f"{name}: {full + partial} of {full + partial + empty} blocks are computed")

    expected = flex_attention(q, k, v, block_mask=row_major)
    # A model permutes its tokens once, before the first layer.
    out = flex_attention(grid.permute(q), grid.permute(k), grid.permute(v), block_mask=in_tiles)
    torch.testing.assert_close(grid.restore(out), expected, atol=1e-2, rtol=1e-2)
    print("the same result")


if __name__ == "__main__":
    main()
