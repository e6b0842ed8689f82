"""The picture of a BlockMask drawn with matplotlib, an optional extra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.pairs import attending
from flexattn.block_mask.picture import areas, count_cells, count_pairs, steps
from flexattn.block_mask.runs import Runs
from flexattn.graph.bound_mod import BoundMod

Colours = dict[str, tuple[int, int, int]]  # red, green, blue

MOST = (2000, 2000)  # cells down and across
COLOURS: Colours = {"empty": (255, 255, 255), "partial": (230, 159, 0), "full": (0, 114, 178)}
OF_PAIRS: Colours = {
    "empty block": (255, 255, 255), "partial block, masked": (251, 231, 195), "partial block, attends": (230, 159, 0),
    "full block": (0, 114, 178),
}  # fmt: skip


def image(partial: Runs, full: Runs, columns: int, most: tuple[int, int] = MOST) -> tuple[Tensor, tuple[int, int]]:
    """Return uint8 [down, across, 3] of at most `most` cells, and the number of blocks per cell, down and across.

    The runs are the rows of one batch and head. A cell has the mean color of its blocks.
    """
    step = steps((full.rows, columns), most)
    counts = [count_cells(runs, columns, step) for runs in (partial, full)]
    area = areas((full.rows, columns), step, counts[0].device)
    kinds = torch.stack((area - counts[0] - counts[1], *counts), -1)  # empty, partial, full
    return _mean_colours(kinds, area, COLOURS), step


def image_of_pairs(
    bound: BoundMod, head: tuple[int, int], partial: Runs, full: Runs, lengths: tuple[int, int],
    block_size: tuple[int, int], most: tuple[int, int] = MOST,
) -> tuple[Tensor, tuple[int, int]]:  # fmt: skip
    """Return the same for pairs: uint8 [down, across, 3], and the number of queries and of keys per cell.

    The mod is evaluated in all partial blocks.
    """
    cell = steps(lengths, most)
    in_partial, in_full = (count_pairs(runs, lengths, block_size, cell) for runs in (partial, full))
    attends = attending(bound, head, partial, lengths, block_size, cell)
    area = areas(lengths, cell, attends.device)
    kinds = torch.stack((area - in_partial - in_full, in_partial - attends, attends, in_full), -1)
    return _mean_colours(kinds, area, OF_PAIRS), cell


def _mean_colours(kinds: Tensor, area: Tensor, colours: Colours) -> Tensor:
    """Return uint8 [down, across, 3] on the CPU for the counts of each kind in a cell, [down, across, kinds]."""
    shares = (kinds / area[..., None]).cpu()
    palette = torch.tensor(list(colours.values()), dtype=shares.dtype, device="cpu")
    return (shares @ palette).round().to(torch.uint8)


def import_pyplot(name: str, otherwise: str) -> Any:
    """Return matplotlib.pyplot. Without matplotlib, raise ImportError for the function `name`."""
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{name}: found no matplotlib, expected this optional extra. Run pip install flexattn[plot], {otherwise}."
        ) from error
    return pyplot


def plot(
    ax: Any, cells: Tensor, tokens: tuple[int, int], seq_lengths: tuple[int, int], colours: Colours, legend: bool
) -> Any:  # fmt: skip
    """Draw the cells of an image, each of `tokens` queries and keys, into `ax` (None: a new figure). Return the Axes.

    `colours` are the kinds in the legend, if there is one.
    """
    pyplot = import_pyplot("BlockMask.plot", "or print(mask) for a picture in characters")
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]

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
    scaled = {kind: (r / 255, g / 255, b / 255) for kind, (r, g, b) in colours.items()}
    if legend:
        ax.legend(handles=[Patch(facecolor=c, edgecolor="gray", label=kind) for kind, c in scaled.items()])
    return ax
