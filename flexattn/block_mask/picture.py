"""The picture of a BlockMask: the number of blocks in each cell, and cells as characters."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.block_mask.runs import Runs

_SYMBOLS = (" ", "░", "█")  # of empty, mixed and full cells

_RUNS = 2**20  # runs counted at a time
_CELLS = 2**20  # cells drawn at a time


def draw(partial: Runs, full: Runs, columns: int, grid: tuple[int, int], width: int = 2) -> list[str]:
    """Return lines of at most grid[0] x grid[1] cells, `width` characters each, for the rows of one batch and head.

    A cell is full if all its blocks are full, empty if all are empty, and mixed otherwise.
    """
    if not columns:
        return []
    step = steps((full.rows, columns), grid)
    band = step[0] * max(1, _CELLS // -(-columns // step[1]))
    lines = []
    for start in range(0, full.rows, band):
        stop = min(start + band, full.rows)
        is_full = count_cells(full.between(start, stop), columns, step)
        is_live = count_cells(partial.between(start, stop), columns, step) + is_full
        kinds = (is_live > 0).int() + (is_full == areas((stop - start, columns), step, is_full.device)).int()
        lines += ["".join(_SYMBOLS[kind] * width for kind in row) for row in kinds.tolist()]
    return lines


def steps(blocks: tuple[int, int], most: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks per cell, down and across, for at most `most` cells."""
    down, across = (max(1, -(-n // max(1, cells))) for n, cells in zip(blocks, most, strict=True))
    return down, across


def areas(blocks: tuple[int, int], step: tuple[int, int], device: torch.device) -> Tensor:
    """Return the number of blocks of each cell, int64 [down, across]. Cells at the end may be smaller."""
    down, across = (
        (n - torch.arange(0, n, size, device=device)).clamp(max=size) for n, size in zip(blocks, step, strict=True)
    )
    return down[:, None] * across


def count_cells(runs: Runs, columns: int, step: tuple[int, int]) -> Tensor:
    """Return the number of blocks in each cell of step[0] x step[1] blocks, int64 [down, across].

    Time is proportional to runs and memory to cells; the blocks are never expanded.
    """
    rows = torch.arange(runs.rows, device=runs.runs.device)
    return _sums(runs, columns, step[1], rows // step[0], torch.ones_like(rows))


def count_pairs(runs: Runs, lengths: tuple[int, int], block_size: tuple[int, int], cell: tuple[int, int]) -> Tensor:
    """Return the number of pairs of the listed blocks in each cell of cell[0] queries x cell[1] keys, int64.

    Cells need not be aligned to blocks. Pairs past the lengths do not count.
    """
    (M, N), device = lengths, runs.runs.device
    starts = [torch.arange(0, M, size, device=device) for size in (block_size[0], cell[0])]
    first = torch.cat(starts).unique()  # the first query of each strip that lies in one block and in one cell
    heights = first.diff(append=torch.full((1,), M, device=device))
    strips = runs.take(first // block_size[0])
    keys = (strips.runs.long() * block_size[1]).clamp(max=N)
    return _sums(Runs(strips.row_ptr, keys), N, cell[1], first // cell[0], heights)


def _sums(runs: Runs, columns: int, step: int, cell_of: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of the listed columns in cells of `step`, int64 [down, across].

    Each row adds its columns `weight` times to the cells of row `cell_of`, which ascends.
    """
    down, across = int(cell_of[-1]) + 1 if len(cell_of) else 0, -(-columns // step)
    # The number of blocks before x is a sum over whole cells, plus x % step in its own cell. A run is the difference
    # of these sums at its end and at its start.
    inside, crossed = (torch.zeros(down, across + 1, dtype=torch.int64, device=runs.runs.device) for _ in range(2))
    row_ptr = runs.row_ptr.long()
    for first, part in enumerate(runs.runs.split(_RUNS)):
        places = torch.arange(len(part), device=part.device) + first * _RUNS
        row = torch.searchsorted(row_ptr, places, right=True) - 1
        times = weight[row]
        for x, sign in ((part[:, 0].long(), -1), (part[:, 1].long(), 1)):
            cell = (cell_of[row], x // step)
            inside.index_put_(cell, x % step * times * sign, accumulate=True)
            crossed.index_put_(cell, times * sign, accumulate=True)
    return (inside - crossed.cumsum(1) * step)[:, :across]
