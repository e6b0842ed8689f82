"""mask_build: the run lists of a mask, made by generated kernels on the device of what it captures.

Range tables, blocks by bounds, the open ones pair by pair, then count, scan and fill: a handful of launches, and one
time that the host waits, to learn how many runs there are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flexattn.block_mask import BuildCounts, RunLists, Runs
from flexattn.build import Kernel, KernelSource, build
from flexattn.errors import IndexRangeError, message
from flexattn.graph import BoundMod
from flexattn.lower_bounds import TableSpec, table_dtype
from flexattn.mask_kernels import PLACES, MaskPlan, levels_source, list_sources, table_entries, table_source
from flexattn.target import Target, target_of

_FULL_RESOLUTION = 2**14  # smaller tensors have tables of their elements, larger ones of granules
_GRANULE_BITS = 7
_PROGRAMS = 16  # for each multiprocessor, that look for blocks to evaluate

Sizes = tuple[int, int, int, int]


def build_lists(
    plan: MaskPlan, bound: BoundMod, sizes: Sizes, block_size: tuple[int, int], device: torch.device, separate: bool
) -> tuple[RunLists, RunLists, BuildCounts]:
    """Return the blocks of a mask over `sizes` (B, H, Q, KV), as rows of queries and as rows of keys.

    `bound` is on `device`; no size is 0.
    """
    B, H, Q, KV = sizes
    blocks = tuple(-(-n // size) for n, size in zip((Q, KV), block_size, strict=True))
    words = tuple(-(-n // 32) for n in blocks)
    rows = (B * H * blocks[0], B * H * blocks[1])
    by_row, by_column = rows[0] * words[1], rows[1] * words[0]
    # Bits by row: full, partial, unknown; by column: full, partial; then counts; then what the host reads.
    parts = [by_row] * 3 + [by_column] * 2 + [3 * sum(rows), 8]
    full, partial, unknown, full_by_key, partial_by_key, counts, status = _split(parts, device)
    lists = [rows[0] + 1] * 2 + [rows[1] + 1] * 2 + [*rows]
    row_ptrs = torch.empty(sum(lists), dtype=torch.int32, device=device)
    run = _Runner(target_of(device), device)

    mod_values = _mod_values(plan, bound)
    geometry = (Q, KV, *block_size, *blocks, H, int(separate))
    bitmaps = (full, partial, unknown, full_by_key, partial_by_key)
    tables = _tables(run, plan, bound, (Q, KV), block_size)
    run(plan.classify, B * H * words[0] * words[1], *bitmaps, status, *geometry, *mod_values, *tables)
    total = 4 * by_row
    unknown_bytes = unknown.view(torch.uint8)
    programs = min(total, _PROGRAMS * _processors(device))
    run(
        plan.evaluate, programs, full, partial, unknown_bytes, full_by_key, partial_by_key, status, *geometry, total,
        *mod_values,
    )  # fmt: skip
    count, scan, fill = list_sources()
    found = (full, partial, full_by_key, partial_by_key, counts)
    run(count, sum(rows), *found, *rows, *blocks)
    run(scan, 4, counts, row_ptrs, status, *rows)
    evaluated, outside, *totals = status[:6].tolist()  # here the host waits
    if outside:
        raise _outside(bound, outside)
    runs = torch.empty(sum(totals), 2, dtype=torch.int32, device=device).split(totals)
    *row_ptr, q_order, kv_order = row_ptrs.split(lists)
    order = row_ptrs[sum(lists[:4]) :]
    run(fill, sum(rows), *found, row_ptrs, order, *runs, *rows, *blocks)
    by_query = RunLists(Runs(row_ptr[0], runs[0]), Runs(row_ptr[1], runs[1]), q_order.view(B * H, -1))
    by_key = RunLists(Runs(row_ptr[2], runs[2]), Runs(row_ptr[3], runs[3]), kv_order.view(B * H, -1))
    return by_query, by_key, BuildCounts(B * H * blocks[0] * blocks[1], 0, evaluated)


class _Runner:
    """Launches kernels on one device."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target = target
        self.on_gpu = target.backend != "interpreter"
        self.elsewhere = self.on_gpu and device.index != torch.cuda.current_device()
        self.device = device

    def __call__(self, source: KernelSource, programs: int, *arguments: object) -> None:
        if self.on_gpu:  # an address costs less than a tensor
            arguments = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        if self.elsewhere:
            with torch.cuda.device(self.device):
                _built(source, self.target).launch(programs, arguments)
        else:
            _built(source, self.target).launch(programs, arguments)


@lru_cache(1024)
def _built(source: KernelSource, target: Target) -> Kernel:
    return build(source, target)


@lru_cache(64)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _split(sizes: list[int], device: torch.device) -> tuple[Tensor, ...]:
    return torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)


def _mod_values(plan: MaskPlan, bound: BoundMod) -> list[object]:
    """Return the arguments of the lowered mask in their order."""
    values: list[object] = []
    for tensor, layout in zip(bound.captures, plan.mod.layouts, strict=True):
        values.append(tensor)
        values += tensor.stride()[:-1] if layout.dense else tensor.stride()
        values += tensor.shape
    return [*values, *bound.numbers]


def _tables(
    run: _Runner, plan: MaskPlan, bound: BoundMod, lengths: tuple[int, int], block_size: tuple[int, int]
) -> list[object]:
    """Make the range tables that the bounds read; return their arguments in order."""
    values: list[object] = []
    for spec in plan.tables:
        values += _table(run, spec, bound.captures[spec.capture], block_size)
    return values


def _table(run: _Runner, spec: TableSpec, capture: Tensor, block_size: tuple[int, int]) -> list[object]:
    capture = capture.detach()
    x = capture.movedim(spec.axis, -1)
    x = x.reshape(-1, x.size(-1)) if x.dim() != 2 else x
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    rows, n = x.shape
    if spec.own:
        shift, granule = 0, block_size[spec.own == "kv"]
    else:
        shift = 0 if capture.numel() <= _FULL_RESOLUTION else _GRANULE_BITS
        granule = 1 << shift
    entries = max(1, -(-n // granule))
    levels = 1 if spec.own else entries.bit_length()
    of = table_dtype(capture.dtype)
    table = torch.empty(2 * levels * rows * entries, dtype=of, device=x.device)
    if x.numel():
        chunk = min(128, 1 << (granule - 1).bit_length())
        programs = rows * -(-entries // table_entries(chunk))
        first = table_source(capture.dtype, chunk)
        run(first, programs, x, table, n, granule, rows, entries, levels, *x.stride())
        for level in range(0, levels - 1, 4):
            run(levels_source(of), 2 * rows * -(-entries // PLACES), table, level, rows, entries, levels)
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
