"""subgraph: a mod in a graph of torch.compile -> BoundMod, bound to the values that the graph passes to it."""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.errors import UnsupportedError
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.nodes import MASK_INPUTS
from flexattn.torch_compile.call_marker import is_number, number_of
from flexattn.torch_compile.mod_in_graph import ModInGraph, nodes_of
from flexattn.torch_state.modes import outside_of_modes, without_autocast
from flexattn.torch_state.symbols import example, valued
from flexattn.torch_state.transforms import is_transformed
from flexattn.trace.interception import LINES, is_user_file
from flexattn.trace.recording import Leaf
from flexattn.trace.scalarize import Kind, Traced
from flexattn.trace.trace import trace_body


def bind_mod(source: ModInGraph, kind: Kind, score_dtype: torch.dtype) -> BoundMod:
    """Cut a mod out of a graph, trace it, and bind it to the values of the graph's inputs.

    Numbers of the result may be symbols, or float64 tensors on the CPU, and its graph is not narrowed for them.
    """
    traced, lifted, leaves = _traced(source, kind, score_dtype)
    tensors = [source.values[n] for n, leaf in zip(lifted, leaves, strict=True) if isinstance(leaf.value, Tensor)]
    floats = [n for n, leaf in zip(lifted, leaves, strict=True) if not isinstance(leaf.value, Tensor)]
    return bind(traced, tensors, [number_of(n, source.values) for n in floats])


def _traced(source: ModInGraph, kind: Kind, score_dtype: torch.dtype) -> tuple[Traced, list[fx.Node], list[Leaf]]:
    """Return the trace of a mod, and the nodes of what it captures, with an example of each."""
    body, lifted = _cut(source)
    with outside_of_modes():
        leaves = [_leaf(n, source.values) for n in lifted]
        return trace_body(body, kind, leaves, *location_of_result(source.result, kind), score_dtype), lifted, leaves


def floats_by_value(source: ModInGraph, kind: Kind, score_dtype: torch.dtype) -> list[fx.Node]:
    """Return the floats of which a trace needs the value: the tensors that stand for them in a graph do not suffice.

    A condition of the trace needs it, and so does a number that is computed by more than arithmetic (`round(x)`).
    """
    traced, lifted, leaves = _traced(source, kind, score_dtype)
    numbers = [n for n, leaf in zip(lifted, leaves, strict=True) if not isinstance(leaf.value, Tensor)]
    needing = [*traced.conditions, *(text for text in traced.number_texts if not _is_arithmetic(text))]
    read = {int(i) for text in needing for i in _READ.findall(text)}
    return [n for i, n in enumerate(numbers) if i in read and is_number(n)]


_READ = re.compile(r"\bn\[(\d+)\]")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")


def _is_arithmetic(text: str) -> bool:
    return set(_NAME.findall(_READ.sub("", text))) <= {"float", "abs", "torch._sym_sqrt"}


def bind(traced: Traced, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> BoundMod:
    """Return a traced mod with values that may be symbolic. The conditions of the trace become guards of the graph."""
    names = {"t": tensors, "n": numbers}
    for condition in traced.conditions:
        with valued(f"{traced.graph.name} at {traced.graph.location}"):
            holds = bool(eval(condition, _NAMES, names))
        if not holds:
            raise UnsupportedError(f"{traced.graph.name}: found other numbers than it was traced for ({condition}).")
    if traced.picks is not None:
        captures = [tensors[i] for i in traced.picks]
    else:
        assert isinstance(traced.prologue, types.MethodType)
        module: Any = traced.prologue.__self__
        with without_autocast([t.device.type for t in tensors]):
            captures = _Prologue(module).run(*tensors, *(_as_symbol(n) for n in numbers))
    if traced.graph.inputs is MASK_INPUTS:
        captures = [c.detach() if c.requires_grad else c for c in captures]
    values = tuple(eval(text, _NAMES, names) for text in traced.number_texts)
    return BoundMod(traced.graph, tuple(captures), values, tuple(tensors), traced.tensor_names)


def as_float64(source: Tensor) -> Tensor:
    """Return the tensor that a captured float is an item of as the operators take it."""
    return (source.detach() if source.requires_grad else source).to("cpu", torch.float64)


def _cut(source: ModInGraph) -> tuple[Callable[..., Any], list[fx.Node]]:
    """Return the mod as a function of its scalars and of the nodes that the rest of the graph passes to it."""
    needed = nodes_of(source)
    if any(is_transformed(n.meta.get("example_value")) for n in needed):
        raise UnsupportedError(f"A mod at {_line_of(source.result) or 'an unknown line'} {_TRANSFORMS}")
    order = [n for n in source.module.graph.nodes if n in needed and n not in source.scalars]
    lifted = [n for n in order if n.op == "placeholder" or is_number(n)]
    graph = fx.Graph()
    # The names say nothing about the layer, so layers with equal mods share a trace and its kernels.
    copies = {n: graph.placeholder(f"leaf_{i}") for i, n in enumerate([*source.scalars, *lifted])}
    for node in order:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target is _DATA:  # no mode of torch sees this function
                copies[node].target = torch.detach
    graph.output(copies[source.result])
    module = fx.GraphModule(source.module, graph)
    body: Any = module.forward
    body.__globals__[LINES] = _lines(body, {copy.name: node for node, copy in copies.items()})
    return body, lifted


_TRANSFORMS = (
    "uses torch.func or torch.vmap in a compiled function. Write the derivative, or operations on small tensors."
)
_DATA: Any = getattr(getattr(torch._C, "_autograd"), "_get_data_attr", _cut)  # noqa: B009  (what Dynamo makes of x.data)

# The file and the name of the function that calls the mods. call.py cannot be imported here: it imports higher_order.
_BODY = "torch_compile/call.py", "body"
_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)')


def location_of_result(result: fx.Node, kind: Kind) -> tuple[str, str]:
    """Return the name of the user's function, and file:line of its result, from the stack that Dynamo recorded."""
    frames = _frames(result)
    if not frames:
        return f"{kind}_mod", ""
    file, line, name = frames[0]
    return name if name.isidentifier() else f"{kind}_mod", f"{file}:{line}"


def _lines(code: Any, nodes: dict[str, fx.Node]) -> dict[int, str]:
    """Return the user's line for each line of generated code. `nodes` are by the names that the code assigns to."""
    found = {}
    for at, line in enumerate(linecache.getlines(code.__code__.co_filename), 1):
        # An assignment to an element is followed by one to the node's name.
        names = [part.partition("=")[0].partition(":")[0].strip() for part in line.split(";")]
        node = next((nodes[name] for name in names if name in nodes), None)
        if node is not None and (where := _line_of(node)) is not None:
            found[at] = where
    return found


def _line_of(node: fx.Node) -> str | None:
    """Return file:line of the innermost frame in the user's code."""
    return next((f"{file}:{line}" for file, line, _ in reversed(_frames(node)) if is_user_file(file)), None)


def _frames(node: fx.Node) -> list[tuple[str, str, str]]:
    """Return file, line and function of the frames that Dynamo recorded, from that of the mod on."""
    frames = _FRAME.findall(node.stack_trace or "")
    called = [i for i, (file, _, name) in enumerate(frames) if file.endswith(_BODY[0]) and name == _BODY[1]]
    return frames[called[-1] + 1 :] if called else []


def _name(node: fx.Node) -> str:
    """Return the user's name of a captured value: the last part of Dynamo's name (l_self_parameters_bias_)."""
    text = str(node.target if node.op == "placeholder" else node.args[0]).strip("_")
    for mark in ("_parameters_", "_buffers_", "_attrs_"):
        if mark in text:
            return text.rpartition(mark)[2]
    return "captured" if isinstance(node.meta.get("example_value"), Tensor) else "number"


def _leaf(node: fx.Node, values: dict[fx.Node, Any]) -> Leaf:
    """Return an example of a captured value: a tensor without memory, or a number."""
    value = node.meta["example_value"] if is_number(node) else values[node]
    if not isinstance(value, Tensor):
        return Leaf(_name(node), example(value))
    empty = torch.empty((), dtype=value.dtype, device=value.device)
    empty = empty.expand([int(example(s)) for s in value.shape]).requires_grad_(value.requires_grad)
    return Leaf(_name(node), empty, value)


def _as_float(number: Any) -> Any:
    """Convert a number to a float. A symbol, or a tensor that represents one, stays what it is."""
    return number if isinstance(number, Tensor) else torch.sym_float(number)


def _as_symbol(number: Any) -> Any:
    return number.item() if isinstance(number, Tensor) else number


_NAMES = {"float": _as_float, "math": __import__("math"), "torch": torch}


class _Prologue(fx.Interpreter):
    """Runs the prologue of a trace. Its constants are created in the graph, which has no tensors of its own."""

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        return super().run(*args, enable_io_processing=False)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        kept = super().get_attr(target, args, kwargs)
        with outside_of_modes():
            values = kept.tolist()
        return torch.tensor(values, dtype=kept.dtype, device=kept.device)
