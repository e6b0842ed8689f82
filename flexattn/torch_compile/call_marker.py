"""call_marker: flexattn::call_marker, the last operation of the body that Dynamo traces. It is never executed.

It ties the results of the mods to the arguments of the call, and tells Dynamo the shapes of the results. `wrong`: the
kind of each mod whose result is neither a tensor nor a number, and the type of the result. `ready` to `per_head`: what
`heads_of` returns. `revision`: so that a graph in AOTAutograd's cache on disk is not used by other code of this
package.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from flexattn.call.ready_heads import check_heads
from flexattn.call.wide_dtype import wide_dtype
from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.call_arguments import CallArguments, check_given
from flexattn.torch_state.symbols import valued
from flexattn.trace.scalarize import Kind, wrong_result

_LIBRARY = torch.library.Library("flexattn", "FRAGMENT")
_FIELDS = {
    "score": "Tensor?", "keep": "Tensor?", "scalars": "Tensor[]", "wrong": "str[]", "ready": "str[]",
    "ready_heads": "SymInt[]", "per_head": "Tensor?", "revision": "str",
    # The fields of CallArguments
    "query": "Tensor", "key": "Tensor", "value": "Tensor", "lists": "Tensor[]", "sizes": "SymInt[]", "form": "str?",
    "scale": "Scalar?", "enable_gqa": "bool", "options": "str[]", "sink": "Tensor?", "sink_number": "Scalar?",
    "dropout_p": "float", "seed": "Tensor?", "max_scores": "bool", "layout": "Tensor[]", "lengths": "SymInt[]",
    "sequences": "str?",
}  # fmt: skip
_LIBRARY.define(f"call_marker({', '.join(f'{kind} {name}' for name, kind in _FIELDS.items())}) -> Tensor[]")
CALL_MARKER = torch.ops.flexattn.call_marker
# What the graph of a body computes of captured floats.
ARITHMETIC = (
    operator.neg, operator.pos, operator.abs, abs, operator.add, operator.sub, operator.mul, operator.truediv,
    operator.mod,
)  # fmt: skip


def is_item(node: fx.Node, of_data: bool = False) -> bool:
    """Return whether a node is a captured float: Dynamo passes a 0-d tensor on the CPU and reads its item.

    `of_data`: or whether it is the item of any tensor that has not been changed in place since the graph began.
    """
    source = node.args[0] if node.op == "call_method" and node.target == "item" else None
    if not isinstance(source, fx.Node):
        return False
    return source.meta["example_value"]._version == 0 if of_data else source.op == "placeholder"


def is_number(node: Any, of_data: bool = False) -> bool:
    """Return whether a node is an item, or is computed from items and numbers by arithmetic."""
    if not isinstance(node, fx.Node):
        return isinstance(node, float) or (isinstance(node, int) and -(2**63) <= node < 2**63)
    return is_item(node, of_data) or (node.target in ARITHMETIC and all(is_number(x, of_data) for x in node.args))


def number_of(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the value of an input of the graph, or of a node that `is_number` (in float64, as Python)."""
    if node in values:
        return values[node]
    if node.target in ARITHMETIC:
        return node.target(*fx.map_arg(node.args, lambda x: number_of(x, values)))  # type: ignore[operator]
    assert is_item(node), node
    return values[node.args[0]]  # type: ignore[index]


_OWN = 8  # fields that are not those of CallArguments


@frozen
class MarkedCall:
    """A call_marker in a graph of torch.compile. `values` are those of the graph's inputs."""

    node: fx.Node
    values: dict[fx.Node, Any]  # placeholder -> tensor or symbolic integer

    @property
    def given(self) -> CallArguments:
        """The arguments of the call, with the values of the graph's inputs."""
        values: Any = fx.map_arg(self.node.args[_OWN:], lambda node: number_of(node, self.values))
        return CallArguments(*values)

    @property
    def mods(self) -> tuple[tuple[Kind, fx.Node | None, list[fx.Node]], ...]:
        """Kind, node of the result (None if there is no such mod), and nodes of the arguments of each mod."""
        score, keep, scalars, *_ = self.node.args[:_OWN]
        changed = None if score is scalars[0] else score  # type: ignore[index]
        return ("score", changed, scalars), ("mask", keep, scalars[1:])  # type: ignore


def make_constant(graph: fx.Graph) -> None:
    """Replace symbolic floats among the arguments of a call_marker by guarded constants of a graph."""
    (node,) = (n for n in graph.nodes if n.target is CALL_MARKER)
    names = list(_FIELDS)
    for name in ("dropout_p", "sink_number"):
        given = node.args[names.index(name)]
        if not isinstance(given, fx.Node):
            continue
        with valued(name.removesuffix("_number")):
            node.update_arg(names.index(name), float(given.meta["example_value"]))


def _fake(*args: Any) -> list[Tensor]:
    *_, wrong, ready, ready_heads, per_head, _ = args[:_OWN]
    if wrong:
        kind, found = wrong[:2]
        raise wrong_result(f"{kind}_mod", kind, found)
    given = CallArguments(*args[_OWN:])
    check_given(given)
    check_heads(ready, ready_heads, per_head, *given.query.shape[1:3])
    query, value = given.query, given.value
    wide = wide_dtype(query)
    found = [query.new_empty((*query.shape[:3], value.shape[3])), query.new_empty(query.shape[:3], dtype=wide)]
    return [*found, query.new_empty(query.shape[:3], dtype=torch.float32)] if given.max_scores else found


torch.library.register_fake("flexattn::call_marker", _fake, lib=_LIBRARY)
# Never called. It lets the results require gradients while Dynamo traces.
torch.library.register_autograd("flexattn::call_marker", lambda ctx, *_: None, lib=_LIBRARY)
