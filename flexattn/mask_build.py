"""mask_build: the run lists of a mask, made by generated kernels on the device of what it captures.

Range tables, blocks by bounds, then count, scan and fill: a handful of launches. The host waits once, to learn how
many runs there are; where bounds and samples leave blocks open, these are evaluated and it waits a second time. Where
the most runs that there could be take little memory, all is launched before the host waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BuildCounts, BuiltMask, LaterRunLists
from flexattn.build import build
from flexattn.equal_runs import EqualRuns
from flexattn.errors import IndexRangeError, message
from flexattn.graph import BoundMod
from flexattn.mask_kernels import MaskPlan
from flexattn.mask_recipe import Sizes, Step, TableRecipe, recipe_of
from flexattn.target import Target, processors, target_of

_PROGRAMS = 16  # for each multiprocessor, that look for blocks to evaluate


@functools.lru_cache(256)
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
    target, tensors = target_of(device), bound.captures
    recipe = recipe_of(plan, tuple([(t.shape, t.stride()) for t in tensors]), sizes, block_size, separate, target)
    captures = [_pointer(t, target) for t in tensors]
    kept = _allocate(recipe.scratch[-1] if recipe.together else recipe.kept[-1], device)
    scratch = kept if recipe.together else _allocate(recipe.scratch[-1], device)
    row_ptr, order, runs, *equal = _parts(kept, recipe.kept, target)
    *memories, full, partial, full_by_key, partial_by_key, unknown, counts, status = _parts(
        scratch, recipe.scratch, target
    )
    bits = (full, partial, full_by_key, partial_by_key)

    def make_lists() -> None:
        if len(recipe.lists) == 1:
            recipe.lists[0].launch((*bits, unknown, status, row_ptr, order, runs))
            return
        recipe.lists[0].launch((*bits, unknown, counts))
        recipe.lists[1].launch((counts, row_ptr, status))
        if recipe.has_room:
            fill(runs)

    def fill(runs: Any) -> None:
        recipe.lists[2].launch((*bits, counts, status, row_ptr, order, runs))

    tables = [_table(r, tensors, captures, at, target) for r, at in zip(recipe.tables, memories, strict=True)]
    recipe.classify.launch((*bits, unknown, status, *[tables[i] for i in recipe.reads], *captures), bound.numbers)
    for r, starts, ends in zip(recipe.runs, equal[::2], equal[1::2], strict=True):
        r.step.launch((captures[r.capture], starts, ends, status))
    make_lists()
    memory, begin = kept, recipe.kept[2]
    *totals, open_blocks, _, descends, _ = scratch[-8:].tolist()  # here the host waits
    if open_blocks:
        programs = min(recipe.octets, _PROGRAMS * processors(device))
        evaluate = Step(build(plan.evaluate, target), programs, recipe.evaluated)
        evaluate.launch((*bits, _typed(unknown, torch.uint8), status, *captures), bound.numbers)
        make_lists()
        *totals, _, outside, _, _ = scratch[-8:].tolist()
        if outside:
            raise _outside(bound, outside)
    if not recipe.has_room:
        memory, begin = _allocate(2 * sum(totals), device), 0
        fill(_pointer(memory, target))
    by_query, by_key = (
        LaterRunLists(
            functools.partial(_views, kept, memory, (recipe.kept[1], begin), totals, recipe.heads, recipe.rows, by_key)
        )
        for by_key in (0, 1)
    )
    found = () if descends else tuple([
        EqualRuns(r.capture, kept.as_strided(r.shape, r.strides, begin))
        for r, begin in zip(recipe.runs, recipe.kept[3:-1:2], strict=True)
    ])  # fmt: skip
    return BuiltMask(by_query, by_key, BuildCounts(recipe.blocks, None, open_blocks), found)


def _table(recipe: TableRecipe, tensors: Sequence[Tensor], captures: Sequence[Any], memory: Any, target: Target) -> Any:
    """Make a range table; return the pointer to it."""
    table, source = _typed(memory, recipe.dtype), captures[recipe.capture]
    if recipe.moved is not None:
        rows = tensors[recipe.capture].movedim(recipe.moved, -1).contiguous()
        source = _pointer(rows, target)
    for i, step in enumerate(recipe.steps):
        step.launch((table,) if i else (source, table))
    return table


def _views(
    kept: Tensor,
    memory: Tensor,
    begins: tuple[int, int],
    totals: Sequence[int],
    heads: int,
    rows: tuple[int, int],
    by_key: int,
) -> tuple[Tensor, ...]:
    """Return the tensors of `RunLists` of one direction, views of what the kernels wrote (see `Recipe.kept`).

    `begins`: where the orders begin in `kept`, and the runs in `memory`.
    """
    n, row_ptr = rows[by_key], 2 * by_key * (rows[0] + 1)
    order = begins[0] + by_key * rows[0]
    begin = begins[1] + 2 * sum(totals[: 2 * by_key])
    some, every = totals[2 * by_key : 2 * by_key + 2]
    return (
        kept.as_strided((n + 1,), (1,), row_ptr), memory.as_strided((some, 2), (2, 1), begin),
        kept.as_strided((n + 1,), (1,), row_ptr + n + 1), memory.as_strided((every, 2), (2, 1), begin + 2 * some),
        kept.as_strided((heads, n // heads), (n // heads, 1), order),
    )  # fmt: skip


def _allocate(words: int, device: torch.device) -> Tensor:
    return torch.empty(words, dtype=torch.int32, device=device)


def _parts(memory: Tensor, starts: Sequence[int], target: Target) -> list[Any]:
    """Return pointers to the parts of memory, given as where these begin and where the last ends."""
    if target.backend == "interpreter":
        return [memory[start:end] for start, end in itertools.pairwise(starts)]
    address = memory.data_ptr()
    return [address + 4 * start for start in starts[:-1]]


def _pointer(tensor: Tensor, target: Target) -> Any:
    """Return what kernels take for a tensor: its address, which costs the host less than the tensor itself."""
    return tensor.detach() if target.backend == "interpreter" else tensor.data_ptr()


def _typed(pointer: Any, dtype: torch.dtype) -> Any:
    """Return a pointer to elements of `dtype`: the interpreter's are tensors, an address has no type."""
    return pointer.view(dtype) if isinstance(pointer, Tensor) else pointer


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
