"""The picture of a BlockMask in characters."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.block_mask.runs import Runs

EMPTY, MIXED, FULL = " ", "░", "█"


def draw(partial: Runs, full: Runs, rows: range, columns: int, grid: tuple[int, int], width: int = 2) -> list[str]:
    """Return lines of at most grid[0] x grid[1] cells, `width` characters each, for some rows of blocks.

    A cell is full where all of its blocks are, empty where none is live, and mixed otherwise.
    """
    row_step = max(1, -(-len(rows) // max(1, grid[0])))
    column_step = max(1, -(-columns // max(1, grid[1])))
    lines = []
    for start in range(rows.start, rows.stop, row_step):
        band = torch.arange(start, min(start + row_step, rows.stop))
        is_full = full.take(band).dense(columns)
        is_live = is_full | partial.take(band).dense(columns)
        cells = zip(_cells(is_full, column_step), _cells(is_live, column_step), strict=True)
        lines.append("".join((FULL if f == 1 else MIXED if live > 0 else EMPTY) * width for f, live in cells))
    return lines


def _cells(blocks: Tensor, step: int) -> list[float]:
    """Return the share of true blocks in each cell, the last one as narrow as it is."""
    share = [part.sum().item() / part.numel() for part in blocks.split(step, dim=1)] if blocks.shape[1] else []
    return share
