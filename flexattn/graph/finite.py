"""finite: whether the results of a mod are finite in rows past the end.

Tiles of queries have rows past the end, where query and captured rows are read as 0. Nothing of them may reach a sum.
A weight of 0 does not cancel a score, or a factor of its gradient, that is NaN or infinite there: `score / row[q_idx]`.
"""

from __future__ import annotations

from functools import lru_cache

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import Input, Load, Node, Operation

# Operations whose result is finite if their operands are, up to overflow.
_FINITE = frozenset((
    "add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where", "cast", "detach", "floor", "ceil", "trunc",
    "round", "tanh", "sigmoid", "sin", "cos", "erf", "erfc", "atan", "copysign",
))  # fmt: skip
_OF_ROWS = frozenset(("q_idx", "score", "grad"))  # inputs that rows past the end have other values of


@lru_cache(512)
def stays_finite(graph: ModGraph) -> bool:
    """Return whether a graph's outputs are finite in rows past the end if they are in all others.

    What does not depend on the row is the same as in other rows.
    """
    found: list[bool] = []
    for position, node in enumerate(graph.nodes):
        is_same = not graph.dependence[position] & _OF_ROWS
        found.append(is_same or not node.dtype.is_floating_point or _is_finite(graph, node, found))
    return all(found[output] for output in graph.outputs if output is not None)


def _is_finite(graph: ModGraph, node: Node, found: list[bool]) -> bool:
    match node:
        case Input() | Load():
            return True
        case Operation("div", (x, y)):
            return found[x] and not graph.dependence[y] & _OF_ROWS
    return node.op in _FINITE and all(found[a] for a in node.args)
