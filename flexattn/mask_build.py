"""mask_build: the run lists of a mask, made by generated kernels on the device of what it captures.

Range tables, blocks by bounds, then count, scan and fill: a handful of launches. The host waits once, to learn how
many runs there are; where bounds and samples leave blocks open, these are evaluated and it waits a second time. Where
the most runs that there could be take little memory, all is launched before the host waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BuildCounts, BuiltMask, RunLists, Runs
from flexattn.build import Kernel, KernelSource, build
from flexattn.equal_runs import EqualRuns
from flexattn.errors import IndexRangeError, message
from flexattn.graph import BoundMod
from flexattn.lower_bounds import TableSpec, table_dtype
from flexattn.mask_kernels import (
    PLACES,
    RUN_PLACES,
    MaskPlan,
    levels_source,
    list_sources,
    runs_source,
    table_entries,
    table_source,
)
from flexattn.target import Target, processors, target_of

_FULL_RESOLUTION = 2**14  # smaller tensors have tables of their elements, larger ones of granules
_GRANULE_BITS = 7
_SMALL = 2**18  # runs (of 8 bytes) that may be allocated before it is known how many there are
_PROGRAMS = 16  # for each multiprocessor, that look for blocks to evaluate

Sizes = tuple[int, int, int, int]


def fits(sizes: Sizes, block_size: tuple[int, int]) -> bool:
    """Tell whether the kernels can take a mask of this size: it has blocks, and their bits are addressed by int32."""
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // block_size[0]), -(-KV // block_size[1])
    return 0 < B * H * max(q_blocks * -(-kv_blocks // 32), kv_blocks * -(-q_blocks // 32)) < 2**29


def build_lists(
    plan: MaskPlan, bound: BoundMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device, separate: bool
) -> BuiltMask:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as rows of queries and as rows of keys.

    `bound` is on `device`; no size is 0. `separate` False: full blocks are called partial.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return build_lists(plan, bound, sizes, block_size, device, separate)
    g = _geometry(sizes, block_size, separate)
    target = target_of(device)
    scratch, kept = _Memory(g.scratch, device), _Memory(g.kept, device)
    full, partial, unknown, full_by_key, partial_by_key, counts, status = scratch.parts()
    mod_values = _mod_values(plan, bound)
    tables = _tables(plan, bound, block_size, target)
    classify, count, scan, fill = _kernels(plan, target)
    bitmaps = (full, partial, unknown, full_by_key, partial_by_key)
    found = (full, partial, full_by_key, partial_by_key)

    def count_runs() -> None:
        count.launch(g.rows, (*found, unknown, counts, *g.ends))
        scan.launch(5, (counts, kept.at(0), status, *g.ends[:2]))

    def fill_runs(memory: _Memory, part: int) -> None:
        fill.launch(g.rows, (*found, counts, status, kept.at(0), kept.at(4), memory.at(part), *g.ends))

    classify.launch(g.tiles, (*bitmaps, status, *g.values, *mod_values, *tables))
    equal = _equal_runs(plan, bound, status, target)
    count_runs()
    if g.kept[6]:
        fill_runs(kept, 6)
    *parts, runs = kept.tensors()  # while the device works
    *totals, open_blocks, _, descends, _ = scratch.tensor(6).tolist()  # here the host waits
    if open_blocks:
        octets = scratch.tensor(2).view(torch.uint8) if target.backend == "interpreter" else unknown
        programs = min(g.octets, _PROGRAMS * processors(device))
        bitmaps = (full, partial, octets, full_by_key, partial_by_key)
        build(plan.evaluate, target).launch(programs, (*bitmaps, status, *g.values, g.octets, *mod_values))
        count_runs()
        *totals, _, outside, _, _ = scratch.tensor(6).tolist()
        if outside:
            raise _outside(bound, outside)
    if open_blocks or not g.kept[6]:
        memory = _Memory((2 * sum(totals),), device)
        fill_runs(memory, 0)
        runs = memory.buffer
    by_query, by_key = _run_lists(parts, runs.view(-1, 2), totals, g.heads)
    return BuiltMask(by_query, by_key, BuildCounts(g.blocks, None, open_blocks), () if descends else equal)


def _equal_runs(plan: MaskPlan, bound: BoundMod, status: Any, target: Target) -> tuple[EqualRuns, ...]:
    """Find the runs of equal elements in what the mask compares by its elements; the status tells whether they hold."""
    found = []
    for position in plan.compared:
        x = bound.captures[position]
        if not x.is_contiguous() or not 0 < x.size(-1) < 2**30:
            continue
        starts, ends = torch.empty((2, *x.shape), dtype=torch.int32, device=x.device).unbind()
        n = x.size(-1)
        programs = x.numel() // n * -(-n // RUN_PLACES)
        _runs_kernel(x.dtype, target).launch(programs, (x, starts, ends, status, n, n.bit_length()))
        found.append(EqualRuns(position, starts, ends))
    return tuple(found)


def _run_lists(kept: Sequence[Tensor], runs: Tensor, totals: list[int], heads: int) -> tuple[RunLists, RunLists]:
    """Return both lists from where their rows begin, their orders, and all runs one after the other."""
    partial, full, partial_by_key, full_by_key, order, order_by_key = kept
    run = runs.split_with_sizes([*totals, len(runs) - sum(totals)])
    return (
        RunLists(Runs(partial, run[0]), Runs(full, run[1]), order.view(heads, -1)),
        RunLists(Runs(partial_by_key, run[2]), Runs(full_by_key, run[3]), order_by_key.view(heads, -1)),
    )


@dataclass(frozen=True)
class _Geometry:
    """What follows from the sizes of a mask and its blocks."""

    heads: int
    blocks: int
    rows: int  # of both directions
    tiles: int  # of 32 x 32 blocks
    octets: int  # bytes of the bits by row
    values: tuple[int, ...]  # arguments of the kernels that decide blocks
    ends: tuple[int, ...]  # and of those that list them
    scratch: tuple[int, ...]  # bits by row: full, partial, unknown; by column: full, partial; counts of rows; status
    # row_ptr of partial and full runs by query, then by key; the two orders; the most runs that there can be (in a row
    # of n blocks n / 2 of each kind), or 0 where these are many.
    kept: tuple[int, ...]


@lru_cache(256)
def _geometry(sizes: Sizes, block_size: tuple[int, int], separate: bool) -> _Geometry:
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // block_size[0]), -(-KV // block_size[1])
    q_words, kv_words = -(-q_blocks // 32), -(-kv_blocks // 32)
    q_rows, kv_rows = B * H * q_blocks, B * H * kv_blocks
    by_row, by_column = q_rows * kv_words, kv_rows * q_words
    most = 2 * (q_rows * -(-kv_blocks // 2) + kv_rows * -(-q_blocks // 2))
    return _Geometry(
        heads=B * H, blocks=q_rows * kv_blocks, rows=q_rows + kv_rows, tiles=B * H * q_words * kv_words,
        octets=4 * by_row, values=(Q, KV, *block_size, q_blocks, kv_blocks, H, int(separate)),
        ends=(q_rows, kv_rows, q_blocks, kv_blocks),
        scratch=(by_row, by_row, by_row, by_column, by_column, 4 * q_rows + 3 * kv_rows, 8),
        kept=(q_rows + 1, q_rows + 1, kv_rows + 1, kv_rows + 1, q_rows, kv_rows, 2 * most * (most <= _SMALL)),
    )  # fmt: skip


class _Memory:
    """One allocation of int32 in parts, given to kernels as addresses, which cost the host less than tensors."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.sizes = sizes
        self.starts = [0, *itertools.accumulate(sizes)]
        self.buffer = torch.empty(self.starts[-1], dtype=torch.int32, device=device)
        self.address = self.buffer.data_ptr() if device.type == "cuda" else None

    def at(self, part: int) -> Any:
        """Return where a part begins: an address, or for the interpreter all that follows as a tensor."""
        start = self.starts[part]
        return self.buffer[start:] if self.address is None else self.address + 4 * start

    def parts(self) -> list[Any]:
        if self.address is None:
            return [self.at(i) for i in range(len(self.sizes))]
        return [self.address + 4 * start for start in self.starts[:-1]]

    def tensor(self, part: int) -> Tensor:
        return self.buffer[self.starts[part] : self.starts[part + 1]]

    def tensors(self) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(self.buffer, self.sizes)


@lru_cache(512)
def _kernels(plan: MaskPlan, target: Target) -> tuple[Kernel, ...]:
    """Return the kernels that classify, count, scan and fill; that which evaluates is built where it is needed."""
    return tuple(build(source, target) for source in (plan.classify, *list_sources()))


@lru_cache(64)
def _runs_kernel(dtype: torch.dtype, target: Target) -> Kernel:
    return build(runs_source(dtype), target)


@lru_cache(64)
def _table_kernel(dtype: torch.dtype, chunk: int, target: Target) -> Kernel:
    return build(table_source(dtype, chunk), target)


def _mod_values(plan: MaskPlan, bound: BoundMod) -> list[object]:
    """Return the arguments of the lowered mask in their order."""
    values: list[object] = []
    for tensor, layout in zip(bound.captures, plan.mod.layouts, strict=True):
        values.append(tensor.data_ptr() if tensor.is_cuda else tensor.detach())
        values += tensor.stride()[:-1] if layout.dense else tensor.stride()
        values += tensor.shape
    return [*values, *bound.numbers]


def _tables(plan: MaskPlan, bound: BoundMod, block_size: tuple[int, int], target: Target) -> list[object]:
    """Make the range tables that the bounds read; return their arguments in order."""
    values: list[object] = []
    made: dict[object, list[object]] = {}
    for spec in plan.tables:
        granule = _granule(spec, block_size)
        key = spec.capture, spec.axis, granule
        if key not in made:
            made[key] = _table(spec, bound.captures[spec.capture].detach(), granule, target)
        values += made[key]
    return values


@dataclass(frozen=True)
class _TableShape:
    granule: int  # elements of an entry
    shift: int  # its logarithm, for tables with levels
    entries: int
    levels: int

    @property
    def chunk(self) -> int:
        return min(128, 1 << (self.granule - 1).bit_length())


def _table_shape(spec: TableSpec, capture: Tensor, granule: int | None) -> _TableShape:
    shift = 0 if granule is not None or capture.numel() <= _FULL_RESOLUTION else _GRANULE_BITS
    granule = 1 << shift if granule is None else granule
    entries = max(1, -(-capture.size(spec.axis) // granule))
    return _TableShape(granule, shift, entries, 1 if spec.own else entries.bit_length())


def _granule(spec: TableSpec, block_size: tuple[int, int]) -> int | None:
    """Return the elements of an entry where it is a block."""
    return block_size[spec.own == "kv"] if spec.own else None


def _table(spec: TableSpec, capture: Tensor, granule: int | None, target: Target) -> list[object]:
    shape = _table_shape(spec, capture, granule)
    x = capture if capture.dim() == 1 else capture.movedim(spec.axis, -1)
    x = x if x.dim() == 2 else x.reshape(-1, x.size(-1))
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    (rows, n), entries, levels = x.shape, shape.entries, shape.levels
    of = table_dtype(capture.dtype)
    table = torch.empty(2 * levels * rows * entries, dtype=of, device=x.device)
    if x.numel():
        programs = rows * -(-entries // table_entries(shape.chunk))
        first = _table_kernel(capture.dtype, shape.chunk, target)
        first.launch(programs, (x, table, n, shape.granule, rows, entries, levels, *x.stride()))
        for level in range(0, levels - 1, 4):
            programs = 2 * rows * -(-entries // PLACES)
            build(levels_source(of), target).launch(programs, (table, level, rows, entries, levels))
    return [table, rows, entries] if spec.own else [table, rows, entries, levels, shape.shift]


def sources(plan: MaskPlan, bound: BoundMod, block_size: tuple[int, int], evaluates: bool) -> tuple[KernelSource, ...]:
    """Return the kernels that building a mask runs; `evaluates`: bounds and samples leave blocks open."""
    found = [plan.classify, *list_sources(), *([plan.evaluate] if evaluates else [])]
    for spec in plan.tables:
        capture = bound.captures[spec.capture]
        shape = _table_shape(spec, capture, _granule(spec, block_size))
        found.append(table_source(capture.dtype, shape.chunk))
        if shape.levels > 1:
            found.append(levels_source(table_dtype(capture.dtype)))
    found += [runs_source(bound.captures[i].dtype) for i in plan.compared]
    return tuple(dict.fromkeys(found))


def _outside(bound: BoundMod, captures: int) -> IndexRangeError:
    position = (captures & -captures).bit_length() - 1
    capture, tensor = bound.graph.captures[position], bound.captures[position]
    where = f" ({bound.graph.location})" if bound.graph.location else ""
    return IndexRangeError(
        message(
            f"mask_mod {bound.graph.name}{where}", f"an index outside of {capture.name!r}, {list(tensor.shape)}",
            "indices inside for every place within Q_LEN and KV_LEN", "Make the tensor longer, or clamp the index.",
        )
    )  # fmt: skip
