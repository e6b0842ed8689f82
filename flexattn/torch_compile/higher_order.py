"""higher_order: the higher-order operator by which Dynamo traces the mods of a call.

Dynamo traces `body`, lifts what the mods capture to inputs of its graph, and guards it. What runs Dynamo's graph
(AOTAutograd, export, the eager backend) calls `FlexAttentionHOP.__call__`. It cuts the mods out of the graph, traces
them as `flexattn.trace` does, and calls the operators of operators.py. Later stages see these operators only.

BaseHOPVariable and create_wrapped_node are private to torch, and the same in 2.11 and 2.13. This module imports Dynamo,
so only a call that Dynamo traces imports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from flexattn.call.wide_dtype import wide_dtype
from flexattn.errors import FlexAttentionError, mod_in_messages
from flexattn.torch_compile.attention import call_operators
from flexattn.torch_compile.call_arguments import operands_of
from flexattn.torch_compile.call_marker import (
    ARITHMETIC,
    CALL_MARKER,
    MarkedCall,
    is_item,
    is_number,
    make_constant,
)
from flexattn.torch_compile.graph_break import body_with_graph_break
from flexattn.torch_compile.mod_in_graph import ModInGraph
from flexattn.torch_compile.spec import revision
from flexattn.torch_compile.subgraph import (
    as_float64,
    bind_mod,
    floats_by_value,
    location_of_result,
)
from flexattn.torch_state.symbols import valued
from flexattn.trace.interception import gather

try:
    from torch._dynamo.variables.higher_order_ops import BaseHOPVariable, _hop_name_to_variable_class
except ImportError as error:  # another version of torch
    BaseHOPVariable, _hop_name_to_variable_class = object, None
    text = f"flex_attention is a graph break in torch.compile, because torch {torch.__version__} changed: {error}."
    warnings.warn(text, stacklevel=2)

_NAME = "flexattn"
REVISION = revision()


class FlexAttentionHOP(HigherOrderOperator):
    """The operator. `body(query, key, value, *scalars)` ends in a call of flexattn::call_marker."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._cacheable = True  # AOTAutograd's cache on disk may keep a graph: all that matters is in the sub-graph

    def __call__(self, subgraph: Any, *operands: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if not isinstance(
            subgraph, fx.GraphModule
        ):  # a mod breaks the graph: Python calls this with the function `body`
            return tuple(x for x in body_with_graph_break(subgraph, *operands[:3]) if x is not None)
        placeholders = [n for n in subgraph.graph.nodes if n.op == "placeholder"]
        values = {
            n: as_float64(x) if any(map(is_item, n.users)) else x for n, x in zip(placeholders, operands, strict=True)
        }
        (node,) = (n for n in subgraph.graph.nodes if n.target is CALL_MARKER)
        marked = MarkedCall(node, values)
        given = marked.given
        wide = wide_dtype(given.query)
        score, mask = (
            None if result is None else bind_mod(ModInGraph(subgraph, result, scalars, values, node), kind, wide)
            for kind, result, scalars in marked.mods
        )
        return tuple(x for x in call_operators(operands_of(given, score, mask)) if x is not None)


class Gathers(TorchFunctionMode):
    """Lets `table[q_idx]` with 0-d indices gather. Dynamo's run on fake tensors would ask the index for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return gather(*args) if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))


class FlexAttentionHOPVariable(BaseHOPVariable):  # type: ignore[misc]
    """How Dynamo traces a call of the operator."""

    supports_aliasing = True  # query, key and value are often views of one tensor

    def create_wrapped_node(self, *args: Any, **kwargs: Any) -> Any:
        translator = args[0]
        with Gathers(), _items_outside(translator.output):  # `body` cannot enter a mode: Dynamo would refuse it
            operands, *rest = super().create_wrapped_node(*args, **kwargs)
        body = translator.output.nn_modules[operands[0].node.target]
        make_constant(body.graph)
        found = _without_floats(body.graph, operands[1:])
        _guard_values(body)
        return (operands[0], *found), *rest


@contextmanager
def _items_outside(output: Any) -> Iterator[None]:
    """Read items of captured floats in the graph around a body. `_without_floats` moves them into the body.

    Dynamo reads an item where it first meets the float, and uses it everywhere: another call cannot reach one that is
    in a body (torch 2.13).
    """
    create, outer = output.create_proxy, output.root_tracer

    def created(kind: str, target: Any, args: Any, *rest: Any, **others: Any) -> fx.Proxy:
        if kind == "call_method" and target == "item" and _is_float(args[0].node):
            return outer.create_proxy(kind, target, args, *rest, **others)
        return create(kind, target, args, *rest, **others)

    output.create_proxy = created
    try:
        yield
    finally:
        del output.create_proxy


def _is_float(node: fx.Node) -> bool:
    """Return whether a node is the tensor that stands for a Python float."""
    return getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)


def _without_floats(graph: fx.Graph, operands: Sequence[fx.Proxy]) -> list[Any]:
    """Return the operands of a body without symbolic floats, and change its graph accordingly.

    A captured float is an item of a 0-d tensor. If the user's function read it before the call, the item is an operand.
    AOTAutograd would make it a constant of the graph that it caches on disk, without the guard (torch 2.11 and 2.13).
    So the operand becomes the tensor, and the body reads its item. So does an item of another tensor, which depends on
    data. What is computed from items (`-x`) is computed in the body. Any other symbolic float becomes a guarded
    constant.
    """
    found: list[Any] = []
    for node, operand in zip([n for n in graph.nodes if n.op == "placeholder"], operands, strict=True):
        number = node.meta["example_value"]
        if not isinstance(number, torch.SymFloat):
            found.append(operand)
        else:
            value: Any = None
            if is_number(operand.node, of_data=number.node.hint is None):
                with graph.inserting_before(node):
                    value, sources = _computed_in(graph, operand.node)
                found += [fx.Proxy(source, operand.tracer) for source in sources]
            else:
                with valued("flex_attention"):
                    value = float(number)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return found


def _computed_in(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Compute a number in the graph of a body. Return its node, and the tensors around it that are new operands."""
    sources: list[Any] = []
    if node.target in ARITHMETIC:
        arguments: list[Any] = []
        for x in node.args:
            part, of_part = _computed_in(graph, x) if isinstance(x, fx.Node) else (x, [])
            arguments.append(part)
            sources += of_part
        computed = graph.call_function(node.target, tuple(arguments))  # type: ignore[arg-type]
    else:
        sources.append(node.args[0])
        # The name of a placeholder is that of an argument: no two are equal.
        tensor = graph.placeholder(f"{sources[0].name}_{len(graph.nodes)}")
        tensor.meta["example_value"] = sources[0].meta["example_value"]
        computed = graph.call_method("item", (tensor,))
    computed.meta["example_value"] = node.meta["example_value"]
    return computed, sources


def _guard_values(body: fx.GraphModule) -> None:
    """Make floats whose values the traces of the mods need guarded constants."""
    graph = body.graph
    if not any(map(is_item, graph.nodes)):
        return
    values = {n: n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"}
    (node,) = (n for n in graph.nodes if n.target is CALL_MARKER)
    marked = MarkedCall(node, values)
    wide = wide_dtype(marked.given.query)
    for kind, result, scalars in marked.mods:
        if result is None:
            continue
        try:
            found = floats_by_value(ModInGraph(body, result, scalars, values, node), kind, wide)
        except FlexAttentionError:  # it is raised again when the mod is bound
            continue
        for item in found:
            name, location = location_of_result(result, kind)
            with valued(f"{mod_in_messages(kind, name)} at {location}"):
                value: Any = float(item.meta["example_value"])
            item.replace_all_uses_with(value)
            graph.erase_node(item)


# None: each call is a graph break.
HOP = None if _hop_name_to_variable_class is None else FlexAttentionHOP()
if _hop_name_to_variable_class is not None:
    _hop_name_to_variable_class[_NAME] = FlexAttentionHOPVariable
