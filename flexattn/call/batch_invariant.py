"""batch_invariant: Problem -> Problem whose kernels compute each row independently of all other rows.

Which blocks are full, their order in the lists and the block size may depend on what other rows attend to. Here each
row of blocks has a single ascending list of partial blocks, whose size is a multiple of every tile. Kernels then visit
keys in ascending order, in one loop body. A visited key that a row does not attend to does not change its bits: its
weight is 0, and the rescaling factor of the accumulator is exactly 1 if the maximum does not change.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, LaterRunLists, RunLists, Runs, run_lists_of
from flexattn.block_mask.dense import all_partial, dense_blocks, outside_of_call
from flexattn.call.problem import Problem
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr
from flexattn.graph.dependence import varies_per_pair
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture
from flexattn.mods.combine import noop_mask
from flexattn.options import LARGEST_TILE
from flexattn.process.frozen_class import frozen


def as_batch_invariant(problem: Problem) -> Problem:
    """Return the problem with one ascending list of partial blocks per row of blocks, and the same mask."""
    M, N = problem.query.size(2), problem.N
    if problem.query.numel() == 0 or N == 0:
        return problem
    blocks, mask = problem.block_mask, problem.mask
    if blocks is None:
        return replace(problem, block_mask=all_partial(M, N, problem.query.device))
    known = _known.get(blocks)
    if known is None or known.kv_runs is not blocks.kv_runs or known.q_runs is not blocks.q_runs:
        known = _known[blocks] = _OneClass(blocks.kv_runs, blocks.q_runs, _of_whole_tiles(blocks))
    if problem.layout is None and not blocks.is_built and (len(blocks.kv_runs.full.runs) or _grows(blocks)):
        mask = as_listed(mask, blocks)
    return replace(problem, block_mask=known.blocks, mask=mask)


@frozen
class _OneClass:
    kv_runs: RunLists  # the lists that `blocks` was made from
    q_runs: RunLists | None
    blocks: BlockMask


_known: weakref.WeakKeyDictionary[BlockMask, _OneClass] = weakref.WeakKeyDictionary()


def _one_class(
    kv_runs: RunLists, q_runs: RunLists | None, heads: tuple[int, int], lengths: tuple[int, int], size: tuple[int, int]
) -> BlockMask:
    # Its mask_mod is never called: the problem has its own.
    return BlockMask.from_runs(
        kv_runs, q_runs, *heads, lengths, size, noop_mask, separate_full_blocks=False, full_overhangs=False
    )


def _grows(blocks: BlockMask) -> bool:
    """Return whether the mask needs larger blocks: its block size is not a multiple of every tile."""
    return any(size % LARGEST_TILE for size in blocks.BLOCK_SIZE)


def _of_whole_tiles(blocks: BlockMask) -> BlockMask:
    heads, q_runs, (block_m, block_n) = (blocks.B, blocks.H), blocks.q_runs, blocks.BLOCK_SIZE
    if not _grows(blocks):
        later = None if q_runs is None else LaterRunLists(lambda: _merged(q_runs).tensors)
        return _one_class(_merged(blocks.kv_runs), later, heads, blocks.seq_lengths, blocks.BLOCK_SIZE)
    size = math.lcm(block_m, LARGEST_TILE), math.lcm(block_n, LARGEST_TILE)
    with outside_of_call():
        partial, full = dense_blocks(blocks)
        live = _joined(_joined(partial | full, size[1] // block_n).mT, size[0] // block_m).mT
        lists = [run_lists_of(x, torch.zeros_like(x)) for x in (live, live.mT)]
    return _one_class(lists[0], None if q_runs is None else lists[1], heads, blocks.seq_lengths, size)


def _joined(blocks: Tensor, factor: int) -> Tensor:
    """Return whether any of each `factor` blocks along the last axis is true."""
    columns = -(-blocks.size(-1) // factor)
    padded = torch.nn.functional.pad(blocks, (0, columns * factor - blocks.size(-1)))
    return padded.unflatten(-1, (columns, factor)).any(-1)


def _merged(lists: RunLists) -> RunLists:
    """Return the lists with full blocks merged into the partial ones.

    Adjacent runs are not joined, because that would synchronize with the device.
    """
    partial, full = lists.partial, lists.full
    with outside_of_call():
        runs = torch.cat((partial.runs, full.runs))
        key = torch.cat((partial.owners(), full.owners())) << 32 | runs[:, 0]
        row_ptr = partial.row_ptr + full.row_ptr
        nothing = Runs(torch.zeros_like(row_ptr), runs[:0])
        return RunLists(Runs(row_ptr, runs[key.argsort()]), nothing, lists.order)


def as_listed(mask: BoundMod | None, blocks: BlockMask) -> BoundMod:
    """Return the mask_mod that user-provided lists and their mod define together. The lists take precedence."""
    partial, full = dense_blocks(blocks)
    graph = _listed(None if mask is None else mask.graph, blocks.BLOCK_SIZE, (blocks.B > 1, blocks.H > 1))
    captures, numbers = ((), ()) if mask is None else (mask.captures, mask.numbers)
    return BoundMod(graph, (*captures, partial, full), numbers)


@lru_cache(512)
def _listed(graph: ModGraph | None, size: tuple[int, int], own: tuple[bool, bool]) -> ModGraph:
    """Return full[b, h, block] | partial[b, h, block] & mod. Both block tensors are appended captures."""
    captures = () if graph is None else graph.captures
    builder = Builder()
    b, h, q_idx, kv_idx = (builder.input(name, torch.int32) for name in MASK_INPUTS)
    zero = builder.const(0, torch.int32)
    index = [
        b if own[0] else zero, h if own[1] else zero, q_idx.apply("floordiv", size[0]),
        kv_idx.apply("floordiv", size[1]),
    ]  # fmt: skip
    partial, full = (builder.load(len(captures) + i, torch.bool, index) for i in range(2))
    live = partial if graph is None else partial.apply("and", _applied_where(builder, graph, partial))
    name, location, numbers = ("lists", "", ()) if graph is None else (graph.name, graph.location, graph.numbers)
    added = (Capture("partial_blocks", torch.bool, 4), Capture("full_blocks", torch.bool, 4))
    return builder.build(name, MASK_INPUTS, (*captures, *added), numbers, [live.apply("or", full)], location=location)


def _applied_where(builder: Builder, graph: ModGraph, partial: Expr) -> Expr:
    """Append the graph with its loads per (q, kv) pair at index 0 outside of `partial` blocks.

    There the mod is not applied, and its own index may be out of bounds.
    """

    def guarded(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        load = graph.loads.get(i)
        if load is None or not varies_per_pair(graph, i):
            return None
        index = [partial.apply("where", made[a], builder.const(0, made[a].dtype)) for a in load.args]
        return builder.load(load.capture, load.dtype, index)

    return builder.copy(graph, guarded)[graph.output]
