"""positions: mods in terms of rows of query and slots of key -> mods in terms of positions in the sequence."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.call.layout import FARTHEST, Layout
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, rewrite
from flexattn.graph.equal_runs import EqualRuns, with_runs
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Capture


def at_positions(bound: BoundMod, layout: Layout) -> BoundMod:
    """Return the mod with q_idx + q_offsets[b] for q_idx and kv_positions[b, kv_idx] for kv_idx.

    The tensors of the layout become captures of the mod. Empty slots have position 0; a mask excludes them.
    """
    offsets, slots = layout.q_offsets, layout.kv_positions
    if offsets is None and slots is None:
        return bound
    graph = _at_positions(bound.graph, offsets is not None, None if slots is None else slots.size(0) > 1)
    added = tuple(x for x in (offsets, slots) if x is not None)
    return BoundMod(graph, (*bound.captures, *added), bound.numbers)


@lru_cache(512)
def _at_positions(graph: ModGraph, offsets: bool, slots: bool | None) -> ModGraph:
    """`slots` is whether kv_positions differ by batch; None without kv_positions."""
    first = len(graph.captures)
    added = ([Capture("q_offsets", torch.int32, 1)] if offsets else []) + (
        [] if slots is None else [Capture("kv_positions", torch.int32, 2)]
    )

    def moved(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        if offsets and graph.is_input(i, "q_idx"):
            b = builder.input("b", torch.int32)
            # With limits it is known that sums do not wrap around.
            offset = builder.load(first, torch.int32, [b]).apply("maximum", 0).apply("minimum", FARTHEST)
            return builder.input("q_idx", torch.int32) + offset
        if slots is not None and graph.is_input(i, "kv_idx"):
            return _slot(builder, first + offsets, slots).apply("maximum", 0)
        return None

    result = rewrite(graph, moved, captures=(*graph.captures, *added))
    if slots is None or graph.inputs != MASK_INPUTS:
        return result
    builder = Builder()
    keep = builder.copy(result)[result.output]
    keep = (_slot(builder, first + offsets, slots) >= 0).apply("and", keep)
    return builder.build(result.name, result.inputs, result.captures, result.numbers, [keep], location=result.location)


def _slot(builder: Builder, capture: int, by_batch: bool) -> Expr:
    """Append the position of the token in slot kv_idx."""
    b = builder.input("b", torch.int32) if by_batch else builder.const(0, torch.int32)
    return builder.load(capture, torch.int32, [b, builder.input("kv_idx", torch.int32)])


@lru_cache(8)
def _everywhere(names: tuple[str, ...]) -> ModGraph:
    builder = Builder()
    return builder.build("sequences", names, (), (), [builder.const(True, torch.bool)])


def mask_at_positions(
    mask: BoundMod | None, runs: tuple[EqualRuns, ...], layout: Layout
) -> tuple[BoundMod | None, tuple[EqualRuns, ...]]:
    """Return a mask at positions, and the runs of equal elements that are not used in it yet.

    Slots without a token are excluded.
    """
    if layout.q_offsets is None and layout.kv_positions is None:
        return mask, runs
    if mask is not None and layout.kv_positions is None:
        mask = with_runs(mask, runs, by_key=False)  # the comparisons are recognized only before indices are moved
    if mask is None and layout.kv_positions is None:
        return None, ()
    return at_positions(BoundMod(_everywhere(MASK_INPUTS)) if mask is None else mask, layout), ()


def used_keys(bound: BoundMod | None, layout: Layout) -> BoundMod:
    """Return the mask `kv_idx < seqused_k[b]`, and `bound` if it is not None."""
    assert layout.seqused_k is not None
    graph = _everywhere(MASK_INPUTS) if bound is None else bound.graph
    captures, numbers = ((), ()) if bound is None else (bound.captures, bound.numbers)
    return BoundMod(_used_keys(graph), (*captures, layout.seqused_k), numbers)


@lru_cache(512)
def _used_keys(graph: ModGraph) -> ModGraph:
    builder = Builder()
    keep = builder.copy(graph)[graph.output]
    used = builder.load(len(graph.captures), torch.int32, [builder.input("b", torch.int32)])
    keep = (builder.input("kv_idx", torch.int32) < used).apply("and", keep)
    captures = (*graph.captures, Capture("seqused_k", torch.int32, 1))
    return builder.build(graph.name, graph.inputs, captures, graph.numbers, [keep], location=graph.location)
