"""launch_plan: the launches of a mask build, prepared once per plan, sizes and shapes of the captured tensors.

A build only adds pointers and numbers, which keeps its host time low.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.bits import BITS_BLOCK
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.lower_bounds import table_dtype
from flexattn.graph.bound_mod import BoundMod
from flexattn.machine.target import Target
from flexattn.mask_build.kernels import (
    BITS_PROGRAMS,
    PLACES,
    RUN_PLACES,
    SCAN_PROGRAMS,
    SMALL_LISTS,
    SMALL_PROGRAMS,
    MaskPlan,
    levels_source,
    list_sources,
    runs_source,
    small_lists_source,
    table_entries,
    table_source,
)
from flexattn.mask_build.pair_bits import unwanted
from flexattn.process.frozen_class import frozen
from flexattn.runtime.build import Kernel, build, build_ahead

_FULL_RESOLUTION = 2**14  # smaller tensors have tables of single elements, larger ones of granules
_GRANULE_BITS = 7
_SMALL_SCRATCH = 2**16  # int32 that a mask may keep in order to use a single allocation
_SMALL = 2**18  # runs (of 8 bytes) that may be allocated before their number is known

Sizes = tuple[int, int, int, int]
Strided = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor


@frozen
class Step:
    """One launch. The kernel's arguments are pointers, then these constants, then the numbers of the mask."""

    kernel: Kernel
    programs: int
    constants: tuple[int, ...]

    def launch(self, stream: int, pointers: Sequence[Any], numbers: Sequence[int | float] = ()) -> None:
        self.kernel.launch(self.programs, (*pointers, *self.constants, *numbers), stream)


def as_argument(tensor: Tensor, target: Target) -> Any:
    """Return a tensor as a kernel argument: its address, which costs less host time than the tensor."""
    return tensor.detach() if target.is_interpreter else tensor.data_ptr()


@frozen
class TableRecipe:
    """How to build one range table."""

    capture: int
    moved: int | None  # the axis to move last, for tensors of more than two axes; this may need a copy
    dtype: torch.dtype
    words: int  # size in int32
    steps: tuple[Step, ...]  # the first also reads the tensor
    constants: tuple[int, ...]  # arguments of the bounds, after the pointer to the table


@frozen
class RunsRecipe:
    """How to find the runs of equal elements of one captured tensor."""

    capture: int
    shape: tuple[int, ...]  # of the starts and ends of runs, int32, which are kept
    strides: tuple[int, ...]
    elements: int  # of the tensor, rounded up
    programs: int
    constants: tuple[int, ...]
    step: Step | None  # None: the kernel that builds all lists also finds these runs


@frozen
class Recipe:
    """Everything about a build that is known in advance. Memory is one or two int32 allocations in 16-byte parts.

    scratch: tables; bits by row: full, partial; by column: full, partial; by row: unknown; counts of rows; status.
    kept: row_ptr of partial runs, full runs and partial blocks by query, then by key; both orders; space for the
    maximum number of runs (n / 2 of each kind in a row of n blocks), or none if that is large; starts and ends of runs
    of equal elements.
    """

    heads: int
    rows: tuple[int, int]  # of queries, of keys
    blocks: int
    octets: int  # bytes of the bits by row
    kept: tuple[int, ...]  # start of each part, and the end of the last
    scratch: tuple[int, ...]  # the same; continues at the end of `kept` if there is one allocation
    together: bool  # whether there is one allocation
    tables: tuple[TableRecipe, ...]
    reads: tuple[int, ...]  # the tables that the bounds read, in the order of their arguments
    runs: tuple[RunsRecipe, ...]
    classify: Step
    lists: tuple[Step, ...]  # one that builds all lists of a small mask (and the first runs), or count, scan and fill
    evaluated: tuple[int, ...]  # constants of the evaluation kernel, which is built on first use

    @property
    def at_once(self) -> bool:
        """Whether one launch builds the lists."""
        return len(self.lists) == 1

    @property
    def has_room(self) -> bool:
        """Whether `kept` has space for any number of runs."""
        return self.kept[2] < self.kept[3]


@lru_cache(512)
def recipe_of(
    plan: MaskPlan, captures: tuple[Strided, ...], sizes: Sizes, block_size: tuple[int, int], separate: bool,
    target: Target,
) -> Recipe:  # fmt: skip
    """Prepare the build of a mask over `sizes` (B, H, Q, KV) whose captures have these shapes and strides."""
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // block_size[0]), -(-KV // block_size[1])
    q_words, kv_words = -(-q_blocks // 32), -(-kv_blocks // 32)
    q_rows, kv_rows = rows = B * H * q_blocks, B * H * kv_blocks
    by_row, by_column = q_rows * kv_words, kv_rows * q_words
    listed = (*rows, q_blocks, kv_blocks)
    of_blocks = (Q, KV, *block_size, q_blocks, kv_blocks, H, int(separate))
    of_captures = _numbers_of_captures(plan, captures)
    dtypes = [c.dtype for c in plan.mod.graph.captures]
    keys = _table_keys(plan, block_size)
    wanted = tuple(dict.fromkeys(keys))
    found = _captures_with_runs(plan, captures)
    has_bits = not unwanted(plan.mod.graph, block_size, found, target)
    build_ahead(_sources(plan, captures, sizes, block_size, has_bits), target, here=[plan.classify])
    classify = build(plan.classify, target)
    tables = tuple(_table(key, captures[key[0]], dtypes[key[0]], target) for key in wanted)
    reads = tuple(wanted.index(key) for key in keys)
    of_tables = [n for i in reads for n in tables[i].constants]
    lists, apart = _list_sources(plan, captures, sizes, block_size)
    runs = tuple(_runs(i, captures[i], apart.get(i), target) for i in found)
    most = 2 * (q_rows * -(-kv_blocks // 2) + kv_rows * -(-q_blocks // 2))
    kept = _starts(
        3 * (q_rows + kv_rows + 2),
        q_rows + kv_rows,
        2 * most * (most <= _SMALL),
        *(r.elements for r in runs for _ in range(2)),
    )
    scratch = (*(t.words for t in tables), by_row, by_row, by_column, by_column, by_row, 5 * q_rows + 4 * kv_rows, 8)
    within = [r for r in runs if r.step is None]
    at_once = (SMALL_PROGRAMS + sum(r.programs for r in within), (*listed, *(n for r in within for n in r.constants)))
    launched = (at_once,) if len(lists) == 1 else ((sum(rows), listed), (SCAN_PROGRAMS, rows), (sum(rows), listed))
    together = sum(scratch) <= _SMALL_SCRATCH
    return Recipe(
        heads=B * H, rows=rows, blocks=q_rows * kv_blocks, octets=4 * by_row,
        kept=kept, scratch=_starts(*scratch, begin=together * kept[-1]), together=together,
        tables=tables, reads=reads, runs=runs,
        classify=Step(classify, B * H * q_words * kv_words, (*of_blocks, *of_tables, *of_captures)),
        lists=tuple(Step(build(source, target), *of) for source, of in zip(lists, launched, strict=True)),
        evaluated=(*of_blocks, 4 * by_row, *of_captures),
    )  # fmt: skip


@lru_cache(512)
def bits_step(plan: MaskPlan, captures: tuple[Strided, ...], sizes: Sizes, target: Target) -> Step:
    """Prepare the launch that evaluates the partial blocks of a mask."""
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // BITS_BLOCK), -(-KV // BITS_BLOCK)
    rows = B * H * q_blocks, B * H * kv_blocks
    constants = (*rows, q_blocks, kv_blocks, H, Q, KV, *_numbers_of_captures(plan, captures))
    return Step(build(plan.pair_bits, target), rows[0] * BITS_PROGRAMS, constants)


def _numbers_of_captures(plan: MaskPlan, captures: Sequence[Strided]) -> tuple[int, ...]:
    """Return the strides and sizes of captured tensors that kernels get."""
    return tuple([
        n
        for (shape, strides), layout in zip(captures, plan.mod.layouts, strict=True)
        for n in (*(strides[:-1] if layout.dense else strides), *shape)
    ])  # fmt: skip


def _is_small(sizes: Sizes, block_size: tuple[int, int]) -> bool:
    """Return whether one launch builds the lists of a mask."""
    B, H, *lengths = sizes
    blocks = [-(-length // block) for length, block in zip(lengths, block_size, strict=True)]
    return B * H * max(blocks) <= SMALL_LISTS[0] and max(blocks) <= 32 * SMALL_LISTS[1]


def _list_sources(
    plan: MaskPlan, captures: Sequence[Strided], sizes: Sizes, block_size: tuple[int, int]
) -> tuple[tuple[KernelSource, ...], dict[int, KernelSource]]:
    """Return the kernels that build the lists, and by capture the separate kernels that find runs of equal elements."""
    dtypes = [c.dtype for c in plan.mod.graph.captures]
    found = _captures_with_runs(plan, captures)
    is_small = _is_small(sizes, block_size)
    lists = (small_lists_source(dtypes[found[0]] if found else None),) if is_small else list_sources()
    return lists, {i: runs_source(dtypes[i]) for i in found[is_small:]}


def _captures_with_runs(plan: MaskPlan, captures: Sequence[Strided]) -> tuple[int, ...]:
    """Return the captures in which to find runs of equal elements. Their rows must be contiguous."""
    return tuple([
        i
        for i in plan.compared
        for shape, strides in captures[i : i + 1]
        if 0 < shape[-1] < 2**30 and torch.empty_strided(shape, strides, device="meta").is_contiguous()
    ])  # fmt: skip


def _starts(*sizes: int, begin: int = 0) -> tuple[int, ...]:
    """Return the starts of parts of these sizes, and the end of the last."""
    return tuple(itertools.accumulate(map(_aligned, sizes), initial=begin))


def _aligned(words: int) -> int:
    """Return the int32 size of a part, rounded to 16 bytes: attention kernels are compiled for aligned pointers."""
    return -(-words // 4) * 4


def _runs(capture: int, strided: Strided, source: KernelSource | None, target: Target) -> RunsRecipe:
    shape, strides = strided
    n, elements = shape[-1], math.prod(shape)
    programs, constants = elements // n * -(-n // RUN_PLACES), (n, n.bit_length())
    step = None if source is None else Step(build(source, target), programs, constants)
    elements = _aligned(elements)
    return RunsRecipe(capture, (2, *shape), (elements, *strides), elements, programs, constants, step)


# Range tables.

_TableKey = tuple[int, int, int | None]  # capture, axis, elements per entry if an entry is a block


def _table_keys(plan: MaskPlan, block_size: tuple[int, int]) -> list[_TableKey]:
    """Return the keys of the tables that the bounds read, with repetitions."""
    return [(t.capture, t.axis, block_size[t.own == "kv"] if t.own else None) for t in plan.tables]


@frozen
class _TableShape:
    granule: int  # elements per entry
    shift: int  # its log2, for tables with levels
    entries: int
    levels: int

    @property
    def chunk(self) -> int:
        return min(128, 1 << (self.granule - 1).bit_length())


def _table_shape(key: _TableKey, shape: tuple[int, ...]) -> _TableShape:
    _, axis, block = key
    shift = 0 if block is not None or math.prod(shape) <= _FULL_RESOLUTION else _GRANULE_BITS
    granule = 1 << shift if block is None else block
    entries = max(1, -(-shape[axis] // granule))
    return _TableShape(granule, shift, entries, entries.bit_length() if block is None else 1)


def _table(key: _TableKey, strided: Strided, dtype: torch.dtype, target: Target) -> TableRecipe:
    (capture, axis, block), (shape, strides) = key, strided
    table, of = _table_shape(key, shape), table_dtype(dtype)
    n, entries, levels = shape[axis], table.entries, table.levels
    rows = math.prod(shape[:axis] + shape[axis + 1 :])
    between = {1: (0, strides[0]), 2: (strides[axis - 1], strides[axis])}.get(len(shape), (n, 1))
    steps: list[Step] = []
    if rows * n:
        programs = rows * -(-entries // table_entries(table.chunk))
        first = build(table_source(dtype, table.chunk), target)
        steps.append(Step(first, programs, (n, table.granule, rows, entries, levels, *between)))
        for level in range(0, levels - 1, 4):
            programs = 2 * rows * -(-entries // PLACES)
            steps.append(Step(build(levels_source(of), target), programs, (level, rows, entries, levels)))
    return TableRecipe(
        capture, axis if len(shape) > 2 else None, of, 2 * levels * rows * entries * of.itemsize // 4, tuple(steps),
        (rows, entries) if block is not None else (rows, entries, levels, table.shift),
    )  # fmt: skip


def sources(
    plan: MaskPlan, bound: BoundMod, sizes: Sizes, block_size: tuple[int, int], evaluates: bool, has_bits: bool
) -> tuple[KernelSource, ...]:
    """Return the kernels that building a mask runs. `evaluates`: bounds and samples leave undecided blocks."""
    captures = tuple([(t.shape, t.stride()) for t in bound.captures])
    return (*_sources(plan, captures, sizes, block_size, has_bits), *([plan.evaluate] if evaluates else []))


def _sources(
    plan: MaskPlan, captures: Sequence[Strided], sizes: Sizes, block_size: tuple[int, int], has_bits: bool
) -> tuple[KernelSource, ...]:
    """Return the kernels that building a mask runs if no block is undecided."""
    lists, apart = _list_sources(plan, captures, sizes, block_size)
    found = [plan.classify, *lists, *apart.values()]
    for key in _table_keys(plan, block_size):
        shape, dtype = captures[key[0]][0], plan.mod.graph.captures[key[0]].dtype
        table = _table_shape(key, shape)
        found.append(table_source(dtype, table.chunk))
        if table.levels > 1:
            found.append(levels_source(table_dtype(dtype)))
    if has_bits:
        found.append(plan.pair_bits)
    return tuple(dict.fromkeys(found))
