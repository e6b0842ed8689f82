"""builder: Builder and Expr, to write graphs with Python's operators and to copy graphs with some nodes replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import (
    Capture,
    Const,
    Input,
    Load,
    Node,
    Number,
    NumberRef,
    Operation,
    RangeLoad,
    Scalar,
)  # fmt: skip
from flexattn.graph.operators import OPS, identity_of


class Expr:
    """A node of a Builder, with Python's operators. Literals take the dtype of the other operand."""

    __slots__ = ("builder", "index")

    def __init__(self, builder: Builder, index: int) -> None:
        self.builder = builder
        self.index = index

    @property
    def node(self) -> Node:
        return self.builder.nodes[self.index]

    @property
    def dtype(self) -> torch.dtype:
        return self.node.dtype

    @property
    def constant(self) -> Scalar | None:
        """The Python value of a constant, None for other nodes."""
        node = self.node
        return node.value if isinstance(node, Const) else None

    def apply(self, op: str, *others: Expr | float) -> Expr:
        """Append `op(self, *others)`."""
        return self.builder.apply(op, self, *others)

    def cast(self, dtype: torch.dtype) -> Expr:
        """Append a cast, or return self if the dtype is the same."""
        return self.builder.cast(self, dtype)

    def __add__(self, other: Expr | float) -> Expr:
        return self.apply("add", other)

    def __radd__(self, other: float) -> Expr:
        return self.builder.like(other, self).apply("add", self)

    def __sub__(self, other: Expr | float) -> Expr:
        return self.apply("sub", other)

    def __rsub__(self, other: float) -> Expr:
        return self.builder.like(other, self).apply("sub", self)

    def __mul__(self, other: Expr | float) -> Expr:
        return self.apply("mul", other)

    def __rmul__(self, other: float) -> Expr:
        return self.builder.like(other, self).apply("mul", self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return self.apply("div", other)

    def __rtruediv__(self, other: float) -> Expr:
        return self.builder.like(other, self).apply("div", self)

    def __neg__(self) -> Expr:
        return self.apply("neg")

    def __lt__(self, other: Expr | float) -> Expr:
        return self.apply("lt", other)

    def __le__(self, other: Expr | float) -> Expr:
        return self.apply("le", other)

    def __gt__(self, other: Expr | float) -> Expr:
        return self.apply("gt", other)

    def __ge__(self, other: Expr | float) -> Expr:
        return self.apply("ge", other)


# rule(builder, i, replacements of nodes 0 to i - 1) returns the replacement of node i, or None to keep the operation.
Rule = Callable[["Builder", int, list[Expr]], Expr | None]


class Builder:
    """Builds the nodes of a graph. Equal nodes are shared, constants folded and identities removed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index: dict[Node, int] = {}

    def add(self, node: Node) -> Expr:
        """Append a node, or return the existing equal node."""
        index = self._index.setdefault(node, len(self.nodes))
        if index == len(self.nodes):
            self.nodes.append(node)
        return Expr(self, index)

    def input(self, name: str, dtype: torch.dtype) -> Expr:
        return self.add(Input(name, dtype))

    def number(self, position: int, dtype: torch.dtype) -> Expr:
        return self.add(NumberRef(position, dtype))

    def const(self, value: Scalar, dtype: torch.dtype) -> Expr:
        return self.add(Const(_as_python(value, dtype), dtype))

    def like(self, value: Expr | float, other: Expr) -> Expr:
        """Return `value` as an expression: a literal becomes a constant of the dtype of `other`."""
        return value if isinstance(value, Expr) else self.const(value, other.dtype)

    def load(self, capture: int, dtype: torch.dtype, index: Sequence[Expr]) -> Expr:
        return self.add(Load(capture, tuple(i.index for i in index), dtype))

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        if x.dtype == dtype:
            return x
        if x.constant is None:
            return self.add(Operation("cast", (x.index,), dtype))
        if dtype not in (torch.float16, torch.bfloat16):
            return self.const(x.constant, dtype)
        return self.const(torch.tensor(x.constant, dtype=x.dtype).to(dtype).item(), dtype)

    def apply(self, op: str, *operands: Expr | float) -> Expr:
        """Append `op(*operands)`. All operands except a leading condition must have the same dtype."""
        first = next(x for x in operands if isinstance(x, Expr) and (op != "where" or x is not operands[0]))
        args = tuple(self.like(x, first) for x in operands)
        spec = OPS[op]
        dtype = torch.bool if spec.result == "bool" else args[-1].dtype
        if all(a.node.op == "const" for a in args):
            values = [torch.tensor(a.constant, dtype=a.dtype) for a in args]
            return self.const(spec.torch(*values).item(), dtype)
        same = identity_of(op, args)
        if same is not None:
            return same if isinstance(same, Expr) else self.const(same, dtype)
        return self.add(Operation(op, tuple(a.index for a in args), dtype))

    def needed(self, x: Expr) -> list[Node]:
        """Return the nodes that an expression is computed from, and its own."""
        positions = {x.index}
        for i in range(x.index, -1, -1):
            if i in positions:
                positions.update(self.nodes[i].args)
        return [self.nodes[i] for i in sorted(positions)]

    def copy(self, graph: ModGraph, rule: Rule | None = None) -> list[Expr]:
        """Append the nodes of `graph`, replaced by `rule` if it does not return None. Return them in order."""
        made: list[Expr] = []
        for i, node in enumerate(graph.nodes):
            replaced = None if rule is None else rule(self, i, made)
            args = tuple(made[a].index for a in node.args)
            made.append(self.add(_with_args(node, args)) if replaced is None else replaced)
        return made

    def build(
        self,
        name: str,
        inputs: tuple[str, ...],
        captures: tuple[Capture, ...],
        numbers: tuple[Number, ...],
        outputs: Sequence[Expr | None],
        sites: Sequence[Expr] = (),
        location: str = "",
        keep_unused: bool = False,
    ) -> ModGraph:
        """Return the graph of `outputs`. Nodes that they do not need are removed unless `keep_unused`."""
        keep = {e.index for e in (*outputs, *sites) if e is not None}
        keep = set(range(len(self.nodes))) if keep_unused else keep
        for i in reversed(range(len(self.nodes))):
            if i in keep:
                keep.update(self.nodes[i].args)
        position = {old: new for new, old in enumerate(sorted(keep))}
        kept = (self.nodes[i] for i in sorted(keep))
        nodes = tuple(_with_args(node, tuple(position[a] for a in node.args)) for node in kept)
        return ModGraph(
            name, inputs, captures, numbers, nodes,
            tuple(None if e is None else position[e.index] for e in outputs),
            tuple(position[e.index] for e in sites), location,
        )  # fmt: skip


def rewrite(
    graph: ModGraph, rule: Rule, *, inputs: tuple[str, ...] | None = None,
    captures: tuple[Capture, ...] | None = None, numbers: tuple[Number, ...] | None = None, keep_unused: bool = False,
) -> ModGraph:  # fmt: skip
    """Return `graph` with its nodes replaced by `rule`. Outputs keep their dtypes.

    `inputs`, `captures` and `numbers` replace the graph's own.
    """
    builder = Builder()
    made = builder.copy(graph, rule)
    return builder.build(
        graph.name, graph.inputs if inputs is None else inputs, graph.captures if captures is None else captures,
        graph.numbers if numbers is None else numbers,
        [None if o is None else made[o].cast(graph.nodes[o].dtype) for o in graph.outputs],
        [made[s] for s in graph.sites], graph.location, keep_unused,
    )  # fmt: skip


def without_unused(graph: ModGraph) -> tuple[ModGraph, tuple[int, ...], tuple[int, ...]]:
    """Return the graph without unused captures and numbers, and the positions of those that it keeps."""
    captures = tuple(sorted({load.capture for load in graph.loads.values()}))
    numbers = tuple(sorted({node.position for node in graph.nodes if isinstance(node, NumberRef)}))

    def renumbered(builder: Builder, i: int, made: list[Expr]) -> Expr | None:
        match graph.nodes[i]:
            case NumberRef(position, dtype):
                return builder.number(numbers.index(position), dtype)
            case Load(capture, args, dtype):
                return builder.load(captures.index(capture), dtype, [made[a] for a in args])
        return None

    kept_captures, kept_numbers = (tuple(graph.captures[i] for i in captures), tuple(graph.numbers[i] for i in numbers))
    return rewrite(graph, renumbered, captures=kept_captures, numbers=kept_numbers), captures, numbers


def in_order_of_use(graph: ModGraph) -> ModGraph:
    """Return the graph with its nodes in the order in which its outputs need them, whatever order they were made in."""
    position: dict[int, int] = {}
    todo = [i for i in reversed((*graph.outputs, *graph.sites)) if i is not None]
    while todo:
        missing = [a for a in graph.nodes[todo[-1]].args if a not in position]
        if missing:
            todo += reversed(missing)
        else:
            position.setdefault(todo.pop(), len(position))
    nodes = (graph.nodes[i] for i in position)
    return replace(
        graph, nodes=tuple([_with_args(node, tuple([position[a] for a in node.args])) for node in nodes]),
        outputs=tuple([None if o is None else position[o] for o in graph.outputs]),
        sites=tuple([position[s] for s in graph.sites]),
    )  # fmt: skip


def _with_args(node: Node, args: tuple[int, ...]) -> Node:
    """Return the node with other operands."""
    return replace(node, args=args) if isinstance(node, (Load, RangeLoad, Operation)) else node


def _as_python(value: Scalar, dtype: torch.dtype) -> Scalar:
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.tensor(value, dtype=dtype).item()
    return float(value) if dtype.is_floating_point else int(value)
