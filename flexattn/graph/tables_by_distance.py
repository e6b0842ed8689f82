"""tables_by_distance: replace loads of a score_mod that depend only on q_idx - kv_idx by a table of all distances.

`table[bucket(q_idx - kv_idx), h]`, whose bucket takes a logarithm (T5), becomes `found[h, q_idx - kv_idx + N - 1]`.
This computes M + N - 1 buckets instead of M * N for each head and kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, without_unused
from flexattn.graph.dependence import PAIR_INDICES, computed_from
from flexattn.graph.linear import shift_invariant
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Capture, Load, Number
from flexattn.torch_state.tensor_cache import kept
from flexattn.torch_state.transforms import outside

_LARGEST = 2**24  # elements of a tensor by distance
_CHEAP = frozenset(("input", "number", "const", "add", "sub", "neg", "cast", "detach", "minimum", "maximum"))


class _Site(NamedTuple):
    """An index expression by which a captured tensor is read."""

    capture: int
    axis: int  # the axis whose index depends on the distance
    index: int  # the node of that index


def read_tables_by_distance(bound: BoundMod, M: int, N: int) -> BoundMod:
    """Return the mod with loads by distance instead of loads with a costly index, if the tables are small."""
    indices: dict[_Site, Tensor] = {}
    for site in _sites(bound.graph) if M and N else ():
        table = bound.captures[site.capture]
        size = table.size(site.axis)
        if size and table.numel() // size * (M + N) <= _LARGEST:
            index = _index(bound.graph, site.index, bound.numbers, M, N, size, table.device)
            if index is not None:
                indices[site] = index
    if not indices:
        return bound
    graph, captures, numbers = _rewritten(bound.graph, tuple(indices))
    read = [bound.captures[s.capture].movedim(s.axis, -1).index_select(-1, index) for s, index in indices.items()]
    return replace(
        bound, graph=graph, captures=(*(bound.captures[i] for i in captures), *read),
        numbers=(*(bound.numbers[i] for i in numbers), N - 1),
    )  # fmt: skip


@lru_cache(512)
def _sites(graph: ModGraph) -> tuple[_Site, ...]:
    """Return the loads with one index that varies within a head, is costly and depends only on q_idx - kv_idx."""
    found: dict[_Site, None] = {}
    for load in graph.loads.values():
        axes = [axis for axis, a in enumerate(load.args) if graph.dependence[a] - {"b", "h"}]
        if len(axes) == 1 and _is_costly_distance(graph, load.args[axes[0]]):
            found[_Site(load.capture, axes[0], load.args[axes[0]])] = None
    return tuple(found)


def _is_costly_distance(graph: ModGraph, index: int) -> bool:
    ops = {graph.nodes[n].op for n in computed_from(graph, index)}
    return (
        shift_invariant(graph)[index]
        and graph.dependence[index] <= PAIR_INDICES
        and "load" not in ops
        and not ops <= _CHEAP
    )


@kept(2**26)
def _index(
    graph: ModGraph, position: int, numbers: tuple[int | float, ...], M: int, N: int, size: int, device: torch.device
) -> Tensor | None:
    """Return the index for each distance from 1 - N to M - 1, int32; None if one is out of bounds for `size`."""
    builder = Builder()
    copied = builder.copy(graph)
    alone = builder.build(graph.name, graph.inputs, (), graph.numbers, [copied[position]])
    with torch.inference_mode(False), torch.no_grad(), outside():
        distance = torch.arange(1 - N, M, dtype=torch.int32, device=device)
        places = {"q_idx": distance.clamp(min=0), "kv_idx": (-distance).clamp(min=0)}
        (index,) = alone.evaluate(places, (), numbers)
        assert index is not None
        index = torch.where(index < 0, index + size, index)  # PyTorch's wrap-around
        inside = (index >= 0) & (index < size)
        return index.int() if bool(inside.all()) else None


@lru_cache(256)
def _rewritten(graph: ModGraph, sites: tuple[_Site, ...]) -> tuple[ModGraph, tuple[int, ...], tuple[int, ...]]:
    """Return the graph that reads appended captures by distance, and the captures and numbers that it keeps."""
    last_key, first = len(graph.numbers), len(graph.captures)
    replaced = {n: i for n, load in graph.loads.items() for i, site in enumerate(sites) if _is_at(load, site)}
    builder = Builder()
    distance = builder.number(last_key, torch.int64).cast(torch.int32)
    distance = builder.input("q_idx", torch.int32).apply("sub", builder.input("kv_idx", torch.int32)) + distance

    def at_distance(_: Builder, n: int, made: list[Expr]) -> Expr | None:
        if n not in replaced:
            return None
        load, axis = graph.loads[n], sites[replaced[n]].axis
        others = [made[a] for i, a in enumerate(load.args) if i != axis]
        return builder.load(first + replaced[n], load.dtype, [*others, distance])

    made = builder.copy(graph, at_distance)
    about = [graph.captures[s.capture] for s in sites]
    rewritten = builder.build(
        graph.name, graph.inputs,
        (*graph.captures, *(Capture(f"{c.name}_by_distance", c.dtype, c.ndim) for c in about)),
        (*graph.numbers, Number("last_key", torch.int64)),
        [None if o is None else made[o] for o in graph.outputs], location=graph.location,
    )  # fmt: skip
    kept, captures, numbers = without_unused(rewritten)
    return kept, captures[: -len(sites)], numbers[:-1]


def _is_at(load: Load, site: _Site) -> bool:
    return load.capture == site.capture and len(load.args) > site.axis and load.args[site.axis] == site.index
