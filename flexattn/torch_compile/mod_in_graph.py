"""mod_in_graph: which nodes of a graph of torch.compile are a mod."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.call_marker import is_number
from flexattn.torch_state.transforms import innermost
from flexattn.trace.operator_calls import ancestors


@frozen
class ModInGraph:
    """A mod as part of a graph: the node of its result, its arguments, and the values of the graph's inputs."""

    module: fx.GraphModule
    result: fx.Node
    scalars: Sequence[fx.Node]
    values: dict[fx.Node, Any]  # placeholder -> tensor or symbolic integer
    marker: fx.Node  # the call of flexattn::call_marker


def nodes_of(source: ModInGraph) -> set[fx.Node]:
    """Return the nodes of a mod: those that its result depends on, and those that change tensors or modes of torch.

    No name tells whether an operation changes a tensor in place (`relu(x, True)`). So all operations on tensors that
    something changes are part of it, if they are tensors of this mod, or of no mod.
    """
    before = itertools.takewhile(lambda n: n is not source.marker, source.module.graph.nodes)
    nodes = [n for n in before if n.op in ("call_function", "call_method")]
    needed = _with_effects(nodes, [source.result])
    others = _with_effects(nodes, [n for n in source.marker.all_input_nodes if n is not source.result])
    rest = [n for n in nodes if n not in needed and n not in others and _changed_memory(n)]
    return needed | _ancestors([*rest, *(n for n in nodes if n.target in _MODES)])


def _with_effects(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """Return what results depend on, and the operations on what is computed for them and changed."""
    needed, count = _ancestors(results), -1
    while len(needed) > count:
        count = len(needed)
        computed = {s for n in needed if n.op != "placeholder" for s in _storages(n)}
        needed = _ancestors([*needed, *(n for n in nodes if not computed.isdisjoint(_changed_memory(n)))])
    return needed


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and what they are computed from. A captured float is a leaf."""
    return ancestors(nodes, is_number)


# Functions with which Dynamo's graph enters and leaves modes that change what operations compute.
_MODES: frozenset[Any] = frozenset((
    torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode,
))  # fmt: skip


def _changed_memory(node: fx.Node) -> set[int]:
    """Return the storages of an operation's arguments that are changed in place somewhere in the graph."""
    values = [x.meta.get("example_value") for x in node.all_input_nodes]
    tensors = [innermost(x) for x in values if isinstance(x, Tensor)]
    uncounted = any(name in str(node.target) for name in ("_foreach_", "detach_"))  # these raise no version
    return {x.untyped_storage()._cdata for x in tensors if uncounted or x.is_inference() or x._version > 0}


def _storages(node: fx.Node) -> set[int]:
    """Return the storage of a node's tensor."""
    value = node.meta.get("example_value")
    return {innermost(value).untyped_storage()._cdata} if isinstance(value, Tensor) else set()
