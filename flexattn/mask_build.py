"""mask_build: the run lists of a mask, made by generated kernels on the device of what it captures.

Range tables, blocks by bounds, then count, scan and fill: a handful of launches. The host waits once, to learn how
many runs there are; where bounds and samples leave blocks open, these are evaluated and it waits a second time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BuildCounts, RunLists, Runs
from flexattn.build import Kernel, build
from flexattn.errors import IndexRangeError, message
from flexattn.graph import BoundMod
from flexattn.lower_bounds import TableSpec, table_dtype
from flexattn.mask_kernels import PLACES, MaskPlan, levels_source, list_sources, table_entries, table_source
from flexattn.target import Target, target_of

_FULL_RESOLUTION = 2**14  # smaller tensors have tables of their elements, larger ones of granules
_GRANULE_BITS = 7
_PROGRAMS = 16  # for each multiprocessor, that look for blocks to evaluate

Sizes = tuple[int, int, int, int]


def fits(sizes: Sizes, block_size: tuple[int, int]) -> bool:
    """Tell whether the kernels can take a mask of this size: it has blocks, and their bits are addressed by int32."""
    B, H, Q, KV = sizes
    q_blocks, kv_blocks = -(-Q // block_size[0]), -(-KV // block_size[1])
    return 0 < B * H * max(q_blocks * -(-kv_blocks // 32), kv_blocks * -(-q_blocks // 32)) < 2**29


def build_lists(
    plan: MaskPlan, bound: BoundMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device, separate: bool
) -> tuple[RunLists, RunLists, BuildCounts]:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as rows of queries and as rows of keys.

    `bound` is on `device`; no size is 0. `separate` False: full blocks are called partial.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return build_lists(plan, bound, sizes, block_size, device, separate)
    B, H, Q, KV = sizes
    target = target_of(device)
    blocks = (-(-Q // block_size[0]), -(-KV // block_size[1]))
    q_words, kv_words = -(-blocks[0] // 32), -(-blocks[1] // 32)
    rows = (B * H * blocks[0], B * H * blocks[1])
    by_row, by_column = rows[0] * kv_words, rows[1] * q_words
    # Bits of blocks, 32 in a word, by row: full, partial, unknown; by column: full, partial. Then the counts of rows.
    scratch = _Memory([by_row] * 3 + [by_column] * 2 + [4 * rows[0] + 3 * rows[1], 8], device)
    full, partial, unknown, full_by_key, partial_by_key, counts, status = scratch.parts()
    kept = _Memory([rows[0] + 1] * 2 + [rows[1] + 1] * 2 + [*rows], device)
    row_ptrs, order = kept.at(0), kept.at(4)

    mod_values = _mod_values(plan, bound)
    geometry = (Q, KV, *block_size, *blocks, H, int(separate))
    bitmaps = (full, partial, unknown, full_by_key, partial_by_key)
    tables = _tables(plan, bound, block_size, target)
    classify, count, scan, fill = _kernels(plan, target)
    classify.launch(B * H * q_words * kv_words, (*bitmaps, status, *geometry, *mod_values, *tables))
    found = (full, partial, full_by_key, partial_by_key)
    ends = (*rows, *blocks)

    def count_runs() -> list[int]:
        count.launch(sum(rows), (*found, unknown, counts, *ends))
        scan.launch(5, (counts, row_ptrs, status, *rows))
        return scratch.tensor(6).tolist()  # here the host waits

    *totals, open_blocks, _, _, _ = count_runs()
    if open_blocks:
        total = 4 * by_row
        programs = min(total, _PROGRAMS * _processors(device))
        octets = scratch.tensor(2).view(torch.uint8) if target.backend == "interpreter" else unknown
        evaluate = build(plan.evaluate, target)
        evaluate.launch(
            programs,
            (full, partial, octets, full_by_key, partial_by_key, status, *geometry, total, *mod_values),
        )
        *totals, _, outside, _, _ = count_runs()
        if outside:
            raise _outside(bound, outside)
    runs = _Memory([2 * n for n in totals], device)
    fill.launch(sum(rows), (*found, counts, row_ptrs, order, *runs.parts(), *ends))
    row_ptr, run = kept.tensors(), runs.tensors(2)
    by_query = RunLists(Runs(row_ptr[0], run[0]), Runs(row_ptr[1], run[1]), row_ptr[4].view(B * H, -1))
    by_key = RunLists(Runs(row_ptr[2], run[2]), Runs(row_ptr[3], run[3]), row_ptr[5].view(B * H, -1))
    return by_query, by_key, BuildCounts(B * H * blocks[0] * blocks[1], None, open_blocks)


class _Memory:
    """One allocation of int32 in parts, given to kernels as addresses, which cost the host less than tensors."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self.starts = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + size)
        self.buffer = torch.empty(self.starts[-1], dtype=torch.int32, device=device)
        self.address = self.buffer.data_ptr() if device.type == "cuda" else None

    def at(self, part: int) -> Any:
        """Return where a part begins: an address, or for the interpreter all that follows as a tensor."""
        start = self.starts[part]
        return self.buffer[start:] if self.address is None else self.address + 4 * start

    def parts(self) -> list[Any]:
        return [self.at(i) for i in range(len(self.sizes))]

    def tensor(self, part: int) -> Tensor:
        return self.buffer[self.starts[part] : self.starts[part + 1]]

    def tensors(self, width: int = 1) -> tuple[Tensor, ...]:
        """Return the parts as tensors, rows of `width` where that is not 1."""
        if width == 1:
            return torch.split_with_sizes(self.buffer, self.sizes)
        return torch.split_with_sizes(self.buffer.view(-1, width), [n // width for n in self.sizes])


@lru_cache(512)
def _kernels(plan: MaskPlan, target: Target) -> tuple[Kernel, ...]:
    """Return the kernels that classify, count, scan and fill; that which evaluates is built where it is needed."""
    return tuple(build(source, target) for source in (plan.classify, *list_sources()))


@lru_cache(64)
def _table_kernel(dtype: torch.dtype, chunk: int, target: Target) -> Kernel:
    return build(table_source(dtype, chunk), target)


@lru_cache(64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
        granule = block_size[spec.own == "kv"] if spec.own else None
        key = spec.capture, spec.axis, granule
        if key not in made:
            made[key] = _table(spec, bound.captures[spec.capture].detach(), granule, target)
        values += made[key]
    return values


def _table(spec: TableSpec, capture: Tensor, granule: int | None, target: Target) -> list[object]:
    x = capture if capture.dim() == 1 else capture.movedim(spec.axis, -1)
    x = x if x.dim() == 2 else x.reshape(-1, x.size(-1))
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    rows, n = x.shape
    shift = 0 if granule is not None or capture.numel() <= _FULL_RESOLUTION else _GRANULE_BITS
    granule = 1 << shift if granule is None else granule
    entries = max(1, -(-n // granule))
    levels = 1 if spec.own else entries.bit_length()
    of = table_dtype(capture.dtype)
    table = torch.empty(2 * levels * rows * entries, dtype=of, device=x.device)
    if x.numel():
        chunk = min(128, 1 << (granule - 1).bit_length())
        programs = rows * -(-entries // table_entries(chunk))
        first = _table_kernel(capture.dtype, chunk, target)
        first.launch(programs, (x, table, n, granule, rows, entries, levels, *x.stride()))
        for level in range(0, levels - 1, 4):
            programs = 2 * rows * -(-entries // PLACES)
            build(levels_source(of), target).launch(programs, (table, level, rows, entries, levels))
    return [table, rows, entries] if spec.own else [table, rows, entries, levels, shift]


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
