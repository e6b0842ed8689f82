"""differentiate: ModGraph -> graph of the gradients with respect to the score and every load of a captured tensor."""

from __future__ import annotations

from functools import lru_cache

from flexattn.graph.builder import Builder, Expr
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import GRAD_INPUTS, Input, Load, Operation, wide
from flexattn.graph.operators import OPS


@lru_cache(512)
def differentiate(graph: ModGraph, wrt: tuple[int, ...]) -> ModGraph:
    """Return the graph of (d(score), d(load) of each load from the captures in `wrt`), given `grad` = d(mod output).

    Reverse mode over scalars: a node's gradient is the sum over its uses. An output is None if it is zero for every
    input. Gradients are float32 or float64, also those of half-precision loads. Integers, booleans, indices and
    detached values have no gradient.
    """
    builder = Builder()
    grad = builder.input("grad", graph.nodes[graph.output].dtype)
    nodes = builder.copy(graph)
    needed = _reach_leaves(graph, wrt)
    gradients: dict[int, Expr] = {graph.output: grad}
    for i in reversed(range(len(graph.nodes))):
        if i not in gradients or not needed[i]:
            continue
        for operand, contribution in _contributions(graph, i, gradients[i], nodes):
            if needed[operand]:
                present = gradients.get(operand)
                gradients[operand] = contribution if present is None else present + contribution
    leaves = {node.name: i for i, node in enumerate(graph.nodes) if isinstance(node, Input)}
    sites = [i for i, load in graph.loads.items() if load.capture in wrt and needed[i] and _is_used(gradients.get(i))]
    d_score = gradients.get(leaves["score"]) if "score" in leaves else None
    outputs = [d_score if _is_used(d_score) else None, *(gradients[i] for i in sites)]
    return builder.build(
        f"{graph.name}_grad", GRAD_INPUTS, graph.captures, graph.numbers, outputs, [nodes[i] for i in sites],
        graph.location,
    )  # fmt: skip


def _is_used(gradient: Expr | None) -> bool:
    return gradient is not None and gradient.constant != 0


def _reach_leaves(graph: ModGraph, wrt: tuple[int, ...]) -> list[bool]:
    """For each node, whether a gradient through it reaches the score or a load from `wrt`."""
    needed: list[bool] = []
    for node in graph.nodes:
        match node:
            case Input(name):
                leaf = name == "score"
            case Load(capture):
                leaf = capture in wrt
            case _:
                leaf = False
        through = node.op not in ("load", "detach") and any(needed[a] for a in node.args)
        needed.append(node.dtype.is_floating_point and (leaf or through))
    return needed


def _contributions(graph: ModGraph, i: int, gradient: Expr, nodes: list[Expr]) -> list[tuple[int, Expr]]:
    """Return the contributions of node i's gradient to its operands, as (operand, contribution) pairs."""
    node = graph.nodes[i]
    if not isinstance(node, Operation):
        return []
    if node.op == "cast":
        return [(node.args[0], gradient.cast(wide(graph.nodes[node.args[0]].dtype)))]
    rule = OPS[node.op].grad
    if rule is None:
        return []
    results = rule(gradient, nodes[i], *(nodes[a] for a in node.args))
    return [
        (a, r if isinstance(r, Expr) else gradient.builder.const(r, gradient.dtype))
        for a, r in zip(node.args, results, strict=True)
        if r is not None
    ]
