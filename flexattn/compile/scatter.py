"""scatter: gradient graph -> the text of the function that adds the gradients of captured tensors into their buffers.

Each use of a captured tensor (a site) has an index and a gradient for every score of a tile. Before anything is added
in memory it is summed over what the index does not depend on: rows, columns, or the places with equal q_idx - kv_idx.
What is added are floats, in any order, or integers, whose sum is the same in every order (`capture_sums.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Argument, FromShapes, FromTensors
from flexattn.compile.lower import Dialect, Writer, mod_parameters
from flexattn.compile.mod_plan import ModPlan
from flexattn.graph.dependence import after_loads_each_place, each_place
from flexattn.graph.linear import affine, shift_invariant
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Load


def scatter_captures(graph: ModGraph) -> tuple[int, ...]:
    """Return the captured tensors that receive a gradient, each once, in order."""
    return tuple(sorted({graph.loads[s].capture for s in graph.sites}))


# |contribution| in units of an integer sum: what is larger is no number, or the sum's scale is wrong.
LARGEST_UNITS = 2.0**60
# How captured gradients are summed: the arguments of each captured tensor (what its buffer holds first), and what adds
# `value` at `pointers`. "sizes" adds nothing: it finds how large a row's contributions are.
_BUFFERS: dict[str, tuple[tuple[str, str], ...]] = {
    "float": (("grad_ptr", "*fp32"),),
    "integer": (("grad_ptr", "*i64"), ("scale_ptr", "*fp32"), ("lost_ptr", "*i32")),
    "sizes": (("size_ptr", "*i32"),),
}
_ADD = {
    "float": 'tl.atomic_add({pointers}, {value}, mask={inside}, sem="relaxed")',
    "integer": "add_integers({pointers}, {value}, {inside}, {name}_scale, {name}_lost_ptr)",
}


def capture_sum_arguments(mod: ModPlan, sums: str) -> tuple[Argument, ...]:
    """Return the arguments that describe the buffers of gradients of captured tensors; the last stride is 1."""
    found: list[Argument] = []
    for position in scatter_captures(mod.graph):
        name, layout = mod.capture_name(position), mod.layouts[position]
        found += [
            Argument(f"{name}_{argument}", kind, FromTensors(f"{name}_{argument}")) for argument, kind in _BUFFERS[sums]
        ]
        if sums == "sizes":
            continue
        strides = range(mod.graph.captures[position].ndim - 1)
        width = "i64" if layout.wide else "i32"
        found += [Argument(f"{name}_grad_stride{d}", width, _contiguous_stride(mod, position, d)) for d in strides]
    return tuple(found)


@lru_cache(1024)
def _score_plan(graph: ModGraph) -> ModPlan:
    return ModPlan(graph, "score", (), ())


def capture_sum_name(problem: Problem, capture: int, argument: str) -> str:
    """Return the name of an argument (grad, scale, lost, size) of a captured tensor of the score_mod."""
    assert problem.score is not None
    return f"{_score_plan(problem.score.graph).capture_name(capture)}_{argument}_ptr"


def _contiguous_stride(mod: ModPlan, position: int, d: int) -> FromShapes:
    return FromShapes(lambda problem, _: math.prod(mod.bound(problem).captures[position].shape[d + 1 :]))


def scatter_arguments(mod: ModPlan, sums: str) -> tuple[tuple[str, str], ...]:
    """Return (name, Triton type) of these arguments."""
    return tuple((a.name, a.type) for a in capture_sum_arguments(mod, sums))


def needs_live(mod: ModPlan) -> bool:
    """Tell whether a site must know which places are live.

    It need not where it receives the gradient of the score as it is, which is 0 elsewhere, and its index reads no other
    captured tensor at each place, which it may not do elsewhere.
    """
    graph = mod.graph
    passed = all(o is not None and graph.is_input(o, "grad") for o in graph.outputs[1:])
    return not passed or any(after_loads_each_place(graph)[a] for site in graph.sites for a in graph.nodes[site].args)


def scatter_loads(mod: ModPlan, sums: str) -> tuple[tuple[str, str], ...]:
    """Return (value, pointer) of the numbers that a program reads once for all of its tiles."""
    pointers = [name for name, _ in scatter_arguments(mod, sums) if name.endswith("_scale_ptr")]
    return tuple((pointer.removesuffix("_ptr"), pointer) for pointer in pointers)


def scatter_values(mod: ModPlan, sums: str) -> tuple[str, ...]:
    """Return what the lowered function is given for the arguments: pointers, and numbers in place of theirs."""
    loaded = {pointer: value for value, pointer in scatter_loads(mod, sums)}
    return tuple(loaded.get(name, name) for name, _ in scatter_arguments(mod, sums))


def size_names(mod: ModPlan) -> tuple[str, ...]:
    """Return the names of the sizes that `lower_sizes` gives: one for each captured tensor."""
    return tuple(f"{mod.capture_name(i)}_size" for i in scatter_captures(mod.graph))


def lower_sizes(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a function that gives the sum of the sizes of each row's contributions to a captured tensor.

    It has the parameters of `lower_scatter`'s, and gives a tuple of [BLOCK_M] for the captured tensors in order.
    """
    graph, writer = mod.graph, Writer(mod, dialect)
    buffers = [n for n, _ in scatter_arguments(mod, "sizes")]
    body = [line for i in range(len(graph.sites)) for line in _contribution(writer, i)]
    sizes = []
    for position in scatter_captures(graph):
        sites = [i for i, site in enumerate(graph.sites) if graph.loads[site].capture == position]
        sizes.append(" + ".join(f"row_sizes(d{i})" for i in sites))
    result = f"return ({', '.join(sizes)},)"
    return writer.function(function, [*mod_parameters(graph), "live", "m0", "n0"], [*body, result], buffers)


def lower_scatter(mod: ModPlan, function: str, dialect: Dialect, sums: str) -> str:
    """Return the text of a function that adds the gradient of each captured tensor into its buffer.

    `live` is None where the gradient of the score is 0 wherever the place is not live; m0 and n0 are the first q_idx
    and kv_idx of the tile, which has queries along axis 0 and keys along axis 1.
    """
    graph = mod.graph
    writer = Writer(mod, dialect)
    buffers = list(scatter_values(mod, sums))
    arguments = ", ".join((*mod.argument_names(), *buffers))
    body: list[str] = []
    for i, site in enumerate(graph.sites):
        body += _contribution(writer, i)
        if _along_diagonals(graph, site):
            one_cell = not all(affine(graph, a) for a in graph.nodes[site].args)
            name = mod.capture_name(graph.loads[site].capture)
            body += _add_diagonals(i, f"{function}_place{i}", arguments, one_cell, _ADD[sums], name)
            continue
        for axis, index in ((0, "q_idx"), (1, "kv_idx")):
            if index not in graph.dependence[site]:
                body.append(f"d{i} = tl.sum(d{i}, {axis}, keep_dims=True)")
        body += _add(mod, i, f"{function}_place{i}", arguments, sums)
    text = writer.function(function, [*mod_parameters(graph), "live", "m0", "n0"], [*body, "return"], buffers)
    return "\n\n".join([*_places(mod, dialect, function, buffers), text])


@lru_cache(512)
def same_in_all_batches(graph: ModGraph) -> bool:
    """Tell whether every site adds at each place, to a cell that all batches share: they are summed over these first.

    Along diagonals little is added to memory anyway.
    """
    own = {"b", "score", "grad"}
    return bool(graph.sites) and all(
        each_place(graph, site) and not graph.dependence[site] & own and not _along_diagonals(graph, site)
        for site in graph.sites
    )


@lru_cache(512)
def without_sites(graph: ModGraph) -> ModGraph:
    """Return a gradient graph that has the gradient of the score alone."""
    return replace(graph, sites=(), outputs=graph.outputs[:1])


def contribution_names(mod: ModPlan) -> tuple[str, ...]:
    """Return the names of what each site of a gradient graph receives from the places of a tile."""
    return tuple(f"d{i}" for i in range(len(mod.graph.sites)))


def lower_contributions(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a function that gives what each site receives from each place, a tuple."""
    writer = Writer(mod, dialect)
    body = [line for i in range(len(mod.graph.sites)) for line in _contribution(writer, i)]
    result = f"return ({', '.join(contribution_names(mod))},)"
    return writer.function(function, [*mod_parameters(mod.graph), "live"], [*body, result])


def lower_additions(mod: ModPlan, function: str, dialect: Dialect, sums: str) -> str:
    """Return the text of a function that adds sums of contributions of live places into the buffers."""
    buffers = list(scatter_values(mod, sums))
    arguments = ", ".join((*mod.argument_names(), *buffers))
    body = [line for i in range(len(mod.graph.sites)) for line in _add(mod, i, f"{function}_place{i}", arguments, sums)]
    inputs = [*contribution_names(mod), "b", "h", "q_idx", "kv_idx", "live"]
    text = Writer(mod, dialect).function(function, inputs, [*body, "return"], buffers)
    return "\n\n".join([*_places(mod, dialect, function, buffers), text])


def _places(mod: ModPlan, dialect: Dialect, function: str, buffers: list[str]) -> list[str]:
    """Return the texts of the functions that give the address of each site."""
    sites = [(mod.graph.loads[site], site) for site in mod.graph.sites]
    return [_place(mod, dialect, *of, f"{function}_place{i}", buffers) for i, of in enumerate(sites)]


def _add(mod: ModPlan, i: int, place: str, arguments: str, sums: str) -> list[str]:
    """Return statements that add d{i} at the addresses of its places."""
    graph, site = mod.graph, mod.graph.sites[i]
    name = mod.capture_name(graph.loads[site].capture)
    pointers, inside = (f"tl.broadcast_to({x}, d{i}.shape)" for x in ("pointers", "inside"))
    return [
        f"pointers, inside = {place}(b, h, q_idx, kv_idx, live, {arguments})",
        *(["if live is not None:", "    inside = inside & live"] if each_place(graph, site) else []),
        _ADD[sums].format(pointers=pointers, value=f"d{i}", inside=inside, name=name),
    ]


def _contribution(writer: Writer, i: int) -> list[str]:
    """Return statements that give d{i}, what the i-th site receives from each place of the tile."""
    output = writer.graph.outputs[1 + i]
    assert output is not None
    return [
        f"d{i} = tl.broadcast_to({writer.value(output)}, score.shape)",
        "if live is not None:",
        f"    d{i} = tl.where(live, d{i}, 0.0)",
    ]


def adds_along_diagonals(graph: ModGraph) -> bool:
    """Tell whether the gradients of a graph's captured tensors are first summed along the diagonals of a tile."""
    return any(_along_diagonals(graph, site) for site in graph.sites)


def _along_diagonals(graph: ModGraph, site: int) -> bool:
    """Tell whether the index of a site is the same along diagonals, and read from nothing but q_idx and kv_idx."""
    if not each_place(graph, site) or graph.dependence[site] & {"score", "grad"}:
        return False
    return all(shift_invariant(graph)[a] and not after_loads_each_place(graph)[a] for a in graph.loads[site].args)


def _place(mod: ModPlan, dialect: Dialect, node: Load, site: int, function: str, buffers: list[str]) -> str:
    """Return the text of a function that gives the address of a site in its buffer, and whether it is inside."""
    writer = Writer(mod, dialect)
    position = node.capture
    name, layout = mod.capture_name(position), mod.layouts[position]
    index = [writer.wrapped(a, f"{name}_size{d}") for d, a in enumerate(node.args)]
    strides = [f" * {name}_grad_stride{d}" for d in range(len(index) - 1)] + [""]
    terms = [f"({f'tl.cast({i}, tl.int64)' if layout.wide else i}{s})" for i, s in zip(index, strides, strict=False)]
    inside = " & ".join(f"({i} >= 0) & ({i} < {name}_size{d})" for d, i in enumerate(index))
    if not index or site in mod.inside:
        inside = "b >= 0"
    result = f"return {' + '.join([f'{name}_grad_ptr', *terms])}, {inside}"
    return writer.function(function, ["b", "h", "q_idx", "kv_idx", "live"], [result], buffers)


def _add_diagonals(i: int, place: str, arguments: str, one_cell: bool, adder: str, name: str) -> list[str]:
    """Return statements that add the sums of the diagonals of each 8 x 8 block."""
    add = adder.format(pointers="pointers", value="sums", inside="inside & diagonal", name=name)
    add_whole = adder.format(pointers="corner", value="whole", inside="corner_inside", name=name)
    text = [
        f"sums, q_at, kv_at, diagonal = diagonal_sums(d{i}, m0, n0)",
        f"pointers, inside = {place}(b, h, q_at, kv_at, None, {arguments})",
    ]
    if not one_cell:
        return [*text, add]
    # A clamped or bucketed distance sends most tiles as a whole to one cell.
    return [
        *text,
        "q_first, kv_first = m0 + tl.arange(0, 1)[:, None], n0 + tl.arange(0, 1)[None, :]",
        f"corner, corner_inside = {place}(b, h, q_first, kv_first, None, {arguments})",
        "if tl.max((diagonal & (pointers.to(tl.int64) != corner.to(tl.int64))).to(tl.int32)) == 0:",
        "    whole = tl.sum(tl.sum(sums, 0, keep_dims=True), 1, keep_dims=True)",
        f"    {add_whole}",
        "else:",
        f"    {add}",
    ]
