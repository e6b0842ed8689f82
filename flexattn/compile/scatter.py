"""scatter: gradient graph -> text of the function that adds the gradients of captured tensors to their buffers.

Each use of a captured tensor (a site) has an index and a gradient for every score of a tile. Before the atomic adds,
the gradient is summed over everything that the index does not depend on: rows, columns, or positions with equal
q_idx - kv_idx. The sums are floats, or integers whose sum does not depend on the order (`capture_sums.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from flexattn.compile.arguments import Argument, FromShapes, FromTensors
from flexattn.compile.lower import Dialect, Writer, mod_parameters
from flexattn.compile.mod_plan import ModPlan, capture_name
from flexattn.graph.dependence import after_loads_per_pair, varies_per_pair
from flexattn.graph.linear import affine, shift_invariant
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Load


def scatter_captures(graph: ModGraph) -> tuple[int, ...]:
    """Return the positions of the captured tensors that receive a gradient, sorted and without duplicates."""
    return tuple(sorted({graph.loads[s].capture for s in graph.sites}))


# Largest |contribution| to an integer sum, in steps. A larger one is not a number, or the scale is wrong.
LARGEST_UNITS = 2.0**60
# By KernelPlan.sums: the kernel arguments of each captured tensor (its buffer first), and the statement that adds
# `value` at `pointers`. "sizes" has no statement: it computes the magnitude of a row's contributions.
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
    """Return the arguments for the gradient buffers of captured tensors. Their last stride is 1."""
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


def capture_sum_name(graph: ModGraph, capture: int, argument: str) -> str:
    """Return the name of an argument (grad, scale, lost, size) of a captured tensor of this score_mod."""
    return f"{capture_name('score', graph, capture)}_{argument}_ptr"


def _contiguous_stride(mod: ModPlan, position: int, d: int) -> FromShapes:
    return FromShapes(lambda problem, _: math.prod(mod.bound(problem).captures[position].shape[d + 1 :]))


def scatter_arguments(mod: ModPlan, sums: str) -> tuple[tuple[str, str], ...]:
    """Return (name, Triton type) of each argument of `capture_sum_arguments`."""
    return tuple((a.name, a.type) for a in capture_sum_arguments(mod, sums))


def needs_live(mod: ModPlan) -> bool:
    """Return whether a site needs `live`.

    It does not if it receives the unchanged gradient of the score, which is 0 where `live` is false, and its index does
    not load from another captured tensor per (q, kv) pair, which is allowed only where `live` is true.
    """
    graph = mod.graph
    passed = all(o is not None and graph.is_input(o, "grad") for o in graph.outputs[1:])
    return not passed or any(after_loads_per_pair(graph)[a] for site in graph.sites for a in graph.nodes[site].args)


def scatter_loads(mod: ModPlan, sums: str) -> tuple[tuple[str, str], ...]:
    """Return (value, pointer) of the scalars that a program loads once for all of its tiles."""
    pointers = [name for name, _ in scatter_arguments(mod, sums) if name.endswith("_scale_ptr")]
    return tuple((pointer.removesuffix("_ptr"), pointer) for pointer in pointers)


def scatter_values(mod: ModPlan, sums: str) -> tuple[str, ...]:
    """Return the names that the lowered function receives: the arguments, with loaded scalars instead of pointers."""
    loaded = {pointer: value for value, pointer in scatter_loads(mod, sums)}
    return tuple(loaded.get(name, name) for name, _ in scatter_arguments(mod, sums))


def size_names(mod: ModPlan) -> tuple[str, ...]:
    """Return the names of the results of the function of `lower_sizes`, one per captured tensor."""
    return tuple(f"{mod.capture_name(i)}_size" for i in scatter_captures(mod.graph))


def lower_sizes(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a function that returns each row's sum of |contribution| for every captured tensor.

    Its parameters are those of `lower_scatter`. It returns a tuple with one [BLOCK_M] block per captured tensor.
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
    """Return the text of a function that adds the gradient of each captured tensor to its buffer.

    `live` is None if no site needs it (`needs_live`). m0 and n0 are the first q_idx and kv_idx of the tile, which has
    queries along axis 0 and keys along axis 1.
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
            body += _add_diagonals(i, f"{function}_pointers{i}", arguments, one_cell, _ADD[sums], name)
            continue
        for axis, index in ((0, "q_idx"), (1, "kv_idx")):
            if not graph.dependence[site] & {index, "score"}:
                body.append(f"d{i} = tl.sum(d{i}, {axis}, keep_dims=True)")
        body += _add(mod, i, f"{function}_pointers{i}", arguments, sums)
    text = writer.function(function, [*mod_parameters(graph), "live", "m0", "n0"], [*body, "return"], buffers)
    return "\n\n".join([*_pointer_functions(mod, dialect, function, buffers), text])


@lru_cache(512)
def same_in_all_batches(graph: ModGraph) -> bool:
    """Return whether every site adds per (q, kv) pair to an element that all batches share.

    Such gradients are summed over the batch first. Diagonal sums are excluded: they need few atomic adds anyway.
    """
    own = {"b", "score", "grad"}
    return bool(graph.sites) and all(
        varies_per_pair(graph, site) and not graph.dependence[site] & own and not _along_diagonals(graph, site)
        for site in graph.sites
    )


@lru_cache(512)
def without_sites(graph: ModGraph) -> ModGraph:
    """Return the gradient graph with only the gradient of the score."""
    return replace(graph, sites=(), outputs=graph.outputs[:1])


def contribution_names(mod: ModPlan) -> tuple[str, ...]:
    """Return the names of the contributions of a tile, one per site of the gradient graph."""
    return tuple(f"d{i}" for i in range(len(mod.graph.sites)))


def lower_contributions(mod: ModPlan, function: str, dialect: Dialect) -> str:
    """Return the text of a function that returns a tuple with the contributions of a tile to each site."""
    writer = Writer(mod, dialect)
    body = [line for i in range(len(mod.graph.sites)) for line in _contribution(writer, i)]
    result = f"return ({', '.join(contribution_names(mod))},)"
    return writer.function(function, [*mod_parameters(mod.graph), "live"], [*body, result])


def lower_additions(mod: ModPlan, function: str, dialect: Dialect, sums: str) -> str:
    """Return the text of a function that adds sums of contributions to the buffers where `live` is true."""
    buffers = list(scatter_values(mod, sums))
    arguments = ", ".join((*mod.argument_names(), *buffers))
    body = [
        line for i in range(len(mod.graph.sites)) for line in _add(mod, i, f"{function}_pointers{i}", arguments, sums)
    ]
    inputs = [*contribution_names(mod), "b", "h", "q_idx", "kv_idx", "live"]
    text = Writer(mod, dialect).function(function, inputs, [*body, "return"], buffers)
    return "\n\n".join([*_pointer_functions(mod, dialect, function, buffers), text])


def _pointer_functions(mod: ModPlan, dialect: Dialect, function: str, buffers: list[str]) -> list[str]:
    """Return the texts of the functions that compute the address of each site."""
    sites = [(mod.graph.loads[site], site) for site in mod.graph.sites]
    return [_pointers(mod, dialect, *of, f"{function}_pointers{i}", buffers) for i, of in enumerate(sites)]


def _add(mod: ModPlan, i: int, function: str, arguments: str, sums: str) -> list[str]:
    """Return statements that add d{i} to the buffer of its site."""
    graph, site = mod.graph, mod.graph.sites[i]
    name = mod.capture_name(graph.loads[site].capture)
    pointers, inside = (f"tl.broadcast_to({x}, d{i}.shape)" for x in ("pointers", "inside"))
    return [
        f"pointers, inside = {function}({', '.join(_of_index(graph, site))}, {arguments})",
        *(["if live is not None:", "    inside = inside & live"] if varies_per_pair(graph, site) else []),
        _ADD[sums].format(pointers=pointers, value=f"d{i}", inside=inside, name=name),
    ]


def _contribution(writer: Writer, i: int) -> list[str]:
    """Return statements that compute d{i}, the contributions of the tile to the i-th site."""
    output = writer.graph.outputs[1 + i]
    assert output is not None
    return [
        f"d{i} = tl.broadcast_to({writer.value(output)}, score.shape)",
        "if live is not None:",
        f"    d{i} = tl.where(live, d{i}, 0.0)",
    ]


def adds_along_diagonals(graph: ModGraph) -> bool:
    """Return whether the gradient of any captured tensor is first summed along the diagonals of a tile."""
    return any(_along_diagonals(graph, site) for site in graph.sites)


def _along_diagonals(graph: ModGraph, site: int) -> bool:
    """Return whether the index of a site is constant along diagonals and computed without loads per (q, kv) pair."""
    if not varies_per_pair(graph, site) or graph.dependence[site] & {"score", "grad"}:
        return False
    return all(shift_invariant(graph)[a] and not after_loads_per_pair(graph)[a] for a in graph.loads[site].args)


def _pointers(mod: ModPlan, dialect: Dialect, node: Load, site: int, function: str, buffers: list[str]) -> str:
    """Return the text of a function that returns the address of a site in its buffer, and whether it is in bounds."""
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
    return writer.function(function, _of_index(mod.graph, site), [result], buffers)


def _of_index(graph: ModGraph, site: int) -> list[str]:
    """Return the inputs of the function that computes the address of a site. Few indices depend on the score."""
    return [*(["score", "sm_scale"] if "score" in graph.dependence[site] else []), "b", "h", "q_idx", "kv_idx", "live"]


def _add_diagonals(i: int, function: str, arguments: str, one_cell: bool, adder: str, name: str) -> list[str]:
    """Return statements that add the diagonal sums of each 8 x 8 block."""
    add = adder.format(pointers="pointers", value="sums", inside="inside & diagonal", name=name)
    add_whole = adder.format(pointers="corner", value="whole", inside="corner_inside", name=name)
    text = [
        f"sums, q_at, kv_at, diagonal = diagonal_sums(d{i}, m0, n0)",
        f"pointers, inside = {function}(b, h, q_at, kv_at, None, {arguments})",
    ]
    if not one_cell:
        return [*text, add]
    # With a clamped or bucketed distance, most tiles add to a single element.
    return [
        *text,
        "q_first, kv_first = m0 + tl.arange(0, 1)[:, None], n0 + tl.arange(0, 1)[None, :]",
        f"corner, corner_inside = {function}(b, h, q_first, kv_first, None, {arguments})",
        "if tl.max((diagonal & (pointers.to(tl.int64) != corner.to(tl.int64))).to(tl.int32)) == 0:",
        "    whole = tl.sum(tl.sum(sums, 0, keep_dims=True), 1, keep_dims=True)",
        f"    {add_whole}",
        "else:",
        f"    {add}",
    ]
