"""Runs and RunLists: sets of blocks per row, and their conversion to and from dense arrays of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import outside


@frozen
class Runs:
    """For each row, half-open runs of blocks, ascending and disjoint. Runs may be empty or adjacent."""

    row_ptr: Tensor  # int32 [rows + 1]; row r is runs[row_ptr[r]:row_ptr[r + 1]]
    runs: Tensor  # int32 [n, 2], first block and one past the last block

    @property
    def rows(self) -> int:
        return self.row_ptr.numel() - 1

    def count(self) -> Tensor:
        """Return the number of blocks of each row, int32 [rows]."""
        ends = _offsets(self.runs[:, 1] - self.runs[:, 0])
        return (ends[self.row_ptr[1:].long()] - ends[self.row_ptr[:-1].long()]).int()

    def owners(self) -> Tensor:
        """Return the row of each run, int64 [n]."""
        # On a CPU, repeat_interleave starts threads for each call: 8 ms on a busy machine, for 64 rows.
        places = torch.arange(len(self.runs), dtype=torch.int32, device=self.runs.device)
        return torch.searchsorted(self.row_ptr[1:], places, right=True)

    def dense(self, columns: int) -> Tensor:
        """Return the blocks as bool [rows, columns]."""
        row = self.owners()
        steps = torch.zeros(self.rows, columns + 1, dtype=torch.int8, device=self.runs.device)
        ones = torch.ones(len(self.runs), dtype=torch.int8, device=self.runs.device)
        steps.index_put_((row, self.runs[:, 0].long()), ones, accumulate=True)
        steps.index_put_((row, self.runs[:, 1].long()), -ones, accumulate=True)
        return steps.cumsum(1, dtype=torch.int8)[:, :columns].bool()

    def between(self, start: int, stop: int) -> Runs:
        """Return the runs of the rows in [start, stop), without a copy."""
        row_ptr = self.row_ptr[start : stop + 1]
        first, last = int(row_ptr[0]), int(row_ptr[-1])
        return Runs(row_ptr - first, self.runs[first:last])

    def take(self, rows: Tensor, times: int | None = None) -> Runs:
        """Return the runs of some rows (int64 [n]), in that order.

        `times`: each row is taken so often. Without it, the host waits for the number of runs.
        """
        count = self.row_ptr.diff()[rows]
        row_ptr = _offsets(count)
        shift = self.row_ptr[:-1][rows] - row_ptr[:-1]
        total = int(row_ptr[-1]) if times is None else times * len(self.runs)
        source = torch.arange(total, device=rows.device) + torch.repeat_interleave(shift, count, output_size=total)
        return Runs(row_ptr.int(), self.runs[source])


@frozen
class RunLists:
    """The blocks of one direction. Rows are (b, h, block) in row-major order; broadcast b and h have size 1."""

    partial: Runs  # mask_mod is applied
    full: Runs  # every pair attends, mask_mod is not applied
    order: Tensor  # int32 [B_mask * H_mask, blocks]: blocks of each (b, h), longest row first

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.partial.row_ptr, self.partial.runs, self.full.row_ptr, self.full.runs, self.order)

    @staticmethod
    def from_tensors(tensors: tuple[Tensor, ...]) -> RunLists:
        """Inverse of `tensors`."""
        return RunLists(Runs(tensors[0], tensors[1]), Runs(tensors[2], tensors[3]), tensors[4])

    def map(self, f: Callable[[Tensor], Tensor]) -> RunLists:
        """Return the lists with `f` applied to each tensor."""
        return RunLists.from_tensors(tuple(f(t) for t in self.tensors))

    def take(self, heads: Tensor, times: int | None = None) -> RunLists:
        """Return the lists of some (b, h) pairs (int64 [n], positions b * H + h), in that order.

        `times`: each pair is taken so often. Without it, the host waits for the number of runs.
        """
        blocks = self.order.shape[1]
        rows = (heads[:, None] * blocks + torch.arange(blocks, device=heads.device)).flatten()
        return RunLists(self.partial.take(rows, times), self.full.take(rows, times), self.order[heads])


class LaterRunLists(RunLists):
    """Run lists whose tensors are created on first use. Those of one direction are often never used."""

    def __init__(self, make: Callable[[], tuple[Tensor, ...]]) -> None:
        self.__dict__["make"] = make

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(name)
        with outside():  # under torch.func transforms, a view created here would belong to the transform
            self.__dict__.update(vars(RunLists.from_tensors(self.__dict__["make"]())))
        return self.__dict__[name]


_FIELDS = tuple(field.name for field in fields(RunLists))


def runs_of(blocks: Tensor) -> Runs:
    """Return the runs of a dense array of blocks, bool [..., columns]. Leading dimensions become rows."""
    columns = blocks.shape[-1]
    edges = blocks.new_zeros((blocks.shape[:-1].numel(), columns + 1))
    rows = blocks.reshape(len(edges), columns)
    edges[:, :columns] = rows
    edges[:, 1:] ^= rows  # true at the first block of a run and one past its last
    row_ptr = _offsets(edges.sum(1) // 2)
    return Runs(row_ptr.int(), edges.nonzero()[:, 1].reshape(-1, 2).int())


def run_lists_of(partial: Tensor, full: Tensor) -> RunLists:
    """Return the lists of two disjoint dense arrays of blocks, bool [B, H, rows, columns]."""
    return run_lists(runs_of(partial), runs_of(full), partial.shape[:2].numel())


def run_lists(partial: Runs, full: Runs, heads: int) -> RunLists:
    """Return the lists of runs whose rows are (b, h, block), for `heads` pairs (b, h)."""
    total = (partial.count() + full.count()).view(heads, partial.rows // max(heads, 1))
    return RunLists(partial, full, total.argsort(dim=-1, descending=True, stable=True).int())


def _offsets(counts: Tensor) -> Tensor:
    """Return 0 followed by the cumulative sums of `counts`, int64 [n + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))
