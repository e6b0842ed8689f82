"""distances: what a score_mod reads from a tensor by q_idx - kv_idx alone, read once for each distance of a call.

`table[bucket(q_idx - kv_idx), h]`, whose bucket takes a logarithm (T5), becomes `found[h, q_idx - kv_idx + N - 1]`:
M + N - 1 buckets in place of M * N for each head and kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.graph.index_range import shift_invariant
from flexattn.graph.mod_graph import BoundMod, Builder, Capture, Expr, ModGraph, Number
from flexattn.process.tensor_cache import kept
from flexattn.torch_state.transforms import outside

_LARGEST = 2**24  # elements of a tensor by distance
_CHEAP = frozenset(("input", "number", "const", "add", "sub", "neg", "cast", "detach", "minimum", "maximum"))
_PLACES = frozenset(("q_idx", "kv_idx"))


class _Site(NamedTuple):
    """One way in which a captured tensor is read."""

    capture: int
    axis: int  # whose index depends on the distance
    index: int  # node of that index


def by_distance(bound: BoundMod, M: int, N: int) -> BoundMod:
    """Return the mod with costly indices that depend on the distance alone taken once each, where that is small."""
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
    """Return the loads of which one index depends on places, costs much, and is a function of their distance alone."""
    found: dict[_Site, None] = {}
    for node in graph.nodes:
        if node.op != "load":
            continue
        axes = [axis for axis, a in enumerate(node.args) if graph.dependence[a] - {"b", "h"}]
        if len(axes) == 1 and _is_costly_distance(graph, node.args[axes[0]]):
            found[_Site(int(str(node.value)), axes[0], node.args[axes[0]])] = None
    return tuple(found)


def _is_costly_distance(graph: ModGraph, index: int) -> bool:
    ops = {graph.nodes[n].op for n in _under(graph, index)}
    return (
        shift_invariant(graph)[index] and graph.dependence[index] <= _PLACES and "load" not in ops and not ops <= _CHEAP
    )


def _under(graph: ModGraph, position: int) -> set[int]:
    """Return a node and all that it is computed from."""
    found = {position}
    for n in range(position, -1, -1):
        if n in found:
            found.update(graph.nodes[n].args)
    return found


@kept(2**26)
def _index(
    graph: ModGraph, position: int, numbers: tuple[int | float, ...], M: int, N: int, size: int, device: torch.device
) -> Tensor | None:
    """Return the index of each distance from 1 - N to M - 1, int32; None where one is outside of `size`."""
    builder = Builder()
    copied = _copy(builder, graph, {}, {n: n for n in range(len(graph.numbers))}, {})
    alone = builder.build(graph.name, graph.inputs, (), graph.numbers, [copied[position]])
    with torch.inference_mode(False), torch.no_grad(), outside():
        distance = torch.arange(1 - N, M, dtype=torch.int32, device=device)
        places = {"q_idx": distance.clamp(min=0), "kv_idx": (-distance).clamp(min=0)}
        (index,) = alone.evaluate(places, (), numbers)
        assert index is not None
        index = torch.where(index < 0, index + size, index)  # as PyTorch counts from the end
        inside = (index >= 0) & (index < size)
        return index.int() if bool(inside.all()) else None


@lru_cache(256)
def _rewritten(graph: ModGraph, sites: tuple[_Site, ...]) -> tuple[ModGraph, tuple[int, ...], tuple[int, ...]]:
    """Return the graph that reads appended captures by distance, and which captures and numbers it keeps."""
    loads = {n: s for n, node in enumerate(graph.nodes) if node.op == "load" for s in sites if _is_at(graph, n, s)}
    needed = set[int]().union(*(_needed(graph, o, frozenset(loads)) for o in graph.outputs if o is not None))
    of = {
        op: sorted({int(str(graph.nodes[n].value)) for n in needed - loads.keys() if graph.nodes[n].op == op})
        for op in ("load", "number")
    }
    captures, numbers = of["load"], of["number"]
    builder = Builder()
    last_key = builder.number(len(numbers), torch.int64).cast(torch.int32)
    distance = builder.input("q_idx", torch.int32).apply("sub", builder.input("kv_idx", torch.int32)) + last_key
    capture_of = {old: new for new, old in enumerate(captures)}
    new_capture = {s: len(captures) + i for i, s in enumerate(sites)}
    replaced = {n: (new_capture[s], s.axis, distance) for n, s in loads.items()}
    copied = _copy(builder, graph, capture_of, {old: new for new, old in enumerate(numbers)}, replaced)
    about = [graph.captures[s.capture] for s in sites]
    made = builder.build(
        graph.name, graph.inputs,
        (*(graph.captures[i] for i in captures), *(Capture(f"{c.name}_by_distance", c.dtype, c.ndim) for c in about)),
        (*(graph.numbers[i] for i in numbers), Number("last_key", torch.int64)),
        [None if o is None else copied[o] for o in graph.outputs], location=graph.location,
    )  # fmt: skip
    return made, tuple(captures), tuple(numbers)


def _is_at(graph: ModGraph, load: int, site: _Site) -> bool:
    node = graph.nodes[load]
    return int(str(node.value)) == site.capture and len(node.args) > site.axis and node.args[site.axis] == site.index


def _needed(graph: ModGraph, output: int, replaced: frozenset[int]) -> set[int]:
    """Return the nodes that an output is computed from where some loads are replaced."""
    found = {output}
    for n in range(output, -1, -1):
        if n in found:
            site = graph.nodes[n]
            found.update(a for a in site.args if n not in replaced or not graph.dependence[a] & _PLACES)
    return found


def _copy(
    builder: Builder, graph: ModGraph, captures: dict[int, int], numbers: dict[int, int],
    replaced: dict[int, tuple[int, int, Expr]],
) -> dict[int, Expr]:  # fmt: skip
    """Append the nodes whose captures and numbers are known; `replaced` loads read (capture, axis, distance)."""
    copied: dict[int, Expr] = {}
    for n, node in enumerate(graph.nodes):
        args = [copied.get(a) for a in node.args]
        if n in replaced:
            capture, axis, distance = replaced[n]
            others = [a for i, a in enumerate(args) if i != axis]
            copied[n] = builder.load(capture, node.dtype, [*(a for a in others if a is not None), distance])
        elif None not in args:
            known = {"load": captures, "number": numbers}.get(node.op)
            value = node.value if known is None else known.get(int(str(node.value)))
            if known is None or value is not None:
                copied[n] = builder.add(node.op, tuple(a.index for a in args if a is not None), node.dtype, value)
    return copied
