"""The picture of a BlockMask drawn with matplotlib, an optional extra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.picture import areas, count_cells, steps
from flexattn.block_mask.runs import Runs

MOST = (2000, 2000)  # cells down and across
COLOURS = {"empty": (255, 255, 255), "partial": (230, 159, 0), "full": (0, 114, 178)}  # red, green, blue


def image(partial: Runs, full: Runs, columns: int, most: tuple[int, int] = MOST) -> tuple[Tensor, tuple[int, int]]:
    """Return uint8 [down, across, 3] of at most `most` cells, and the number of blocks per cell, down and across.

    The runs are the rows of one batch and head. A cell has the mean color of its blocks.
    """
    step = steps((full.rows, columns), most)
    counts = [count_cells(runs, columns, step) for runs in (partial, full)]
    area = areas((full.rows, columns), step, counts[0].device)
    shares = torch.stack((area - counts[0] - counts[1], *counts), -1) / area[..., None]  # empty, partial, full
    palette = torch.tensor(list(COLOURS.values()), dtype=shares.dtype, device=shares.device)
    return (shares @ palette).round().to(torch.uint8).cpu(), step


def plot(ax: Any, cells: Tensor, tokens: tuple[int, int], seq_lengths: tuple[int, int]) -> Any:
    """Draw the cells of `image`, each of `tokens` queries and keys, into `ax` (None: a new figure). Return the Axes."""
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
        from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "BlockMask.plot: found no matplotlib, expected this optional extra. Run pip install flexattn[plot], "
            "or print(mask) for a picture in characters."
        ) from error
    ax = pyplot.subplots()[1] if ax is None else ax
    queries, keys = seq_lengths
    if cells.numel():
        # The last cells may extend past the lengths; the axes end at the lengths.
        extent = (0, cells.shape[1] * tokens[1], cells.shape[0] * tokens[0], 0)
        ax.imshow(cells.numpy(), extent=extent, origin="upper", aspect="auto")
    ax.set_xlim(0, max(1, keys))
    ax.set_ylim(max(1, queries), 0)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    colours = {kind: (r / 255, g / 255, b / 255) for kind, (r, g, b) in COLOURS.items()}
    ax.legend(handles=[Patch(facecolor=c, edgecolor="gray", label=kind) for kind, c in colours.items()])
    return ax
