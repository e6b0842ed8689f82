"""Scalarize: the FX graph of a traced mod as a ModGraph, and how to find its captures and numbers at each call.

Operations on captured tensors alone become the prologue, a function that torch runs once per call, under autograd.
Its results are the captures of the graph. Arithmetic on numbers and sizes alone becomes the numbers of the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.errors import ModError, UnsupportedError, mod_in_messages
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.builder import Builder, Expr, without_unused
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import narrowed
from flexattn.graph.nodes import MASK_INPUTS, SCORE_INPUTS, Capture, Load, Number, wide
from flexattn.graph.ranges import ranges
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.modes import without_autocast
from flexattn.torch_state.symbols import example
from flexattn.trace.aten import TABLES, has_row
from flexattn.trace.elements import Elements, Index
from flexattn.trace.elementwise import CREATION
from flexattn.trace.interception import (
    CONSTANT,
    IN_PLACE,
    MOST_SHOWN,
    NO_GRAD,
    RANDOM,
    UNKNOWN_SIZE,
    WITHOUT_GRADIENT,
    line_of_node,
)
from flexattn.trace.operator_calls import ancestors, concrete, is_symbol, operator_name
from flexattn.trace.scalar_tape import Expression

Kind = Literal["score", "mask"]

_MOST_NUMBERS = 64  # sets of number values per mod with a cached graph


_GATHERS = frozenset(("index", "_unsafe_index", "index_select", "gather", "embedding"))
_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}  # their types in the user's code


@frozen
class RecordedGraph:
    """The result of a run: the FX graph, its inputs, its return value, and the source of every symbol."""

    graph: fx.Graph
    result: Any  # an FX node, or a Python or symbolic number
    inputs: dict[fx.Node, str]
    tensors: list[fx.Node]
    numbers: list[fx.Node]
    names: dict[fx.Node, str]  # the user's names of the tensors
    sources: dict[str, str]  # symbol -> Python text over t (tensors) and n (numbers)
    symbol_names: dict[str, str]  # symbol -> the user's name
    conditions: tuple[str, ...]  # on tensors t of a graph, whose layouts the mod reads
    environment: Any  # the ShapeEnv, whose guards may still grow, or the ScalarTape


@frozen(eq=False)
class Traced:
    """A graph, and how to find its values in what the guard of this trace returns."""

    graph: ModGraph
    numbers: Callable[[Sequence[Tensor], Sequence[int | float]], tuple[int | float, ...]] | None
    number_texts: tuple[str, ...]  # the numbers of the graph, as Python text over tensors t and numbers n
    picks: tuple[int, ...] | None  # captures that are leaves themselves; None: the prologue computes them
    prologue: Callable[..., tuple[Tensor, ...]] | None
    prologue_text: str  # identifies what it computes
    prologue_numbers: tuple[int, ...]  # the numbers that it reads
    conditions: tuple[str, ...]  # on tensors t and numbers n, under which the graph is valid
    tensor_names: tuple[str, ...]  # the user's names, for messages
    _graphs: dict[tuple[int | float, ...], ModGraph] = field(default_factory=dict)  # by the values of numbers

    def values(
        self, tensors: Sequence[Tensor], numbers: Sequence[int | float]
    ) -> tuple[tuple[Tensor, ...], tuple[int | float, ...]]:
        """Return the captures and the numbers of the graph, computed from those that the mod reads."""
        if self.picks is not None:
            captures = tuple([tensors[i] for i in self.picks])
        else:
            assert self.prologue is not None
            with without_autocast([t.device.type for t in tensors]):
                captures = tuple(self.prologue(*tensors, *numbers))
        return captures, () if self.numbers is None else self.numbers(tensors, numbers)

    def graph_of(self, values: tuple[int | float, ...]) -> ModGraph:
        """Return the graph for its numbers."""
        return self.graph if not values else self._graphs.get(values) or self._narrowed(values)

    def _narrowed(self, numbers: tuple[int | float, ...]) -> ModGraph:
        """Return the graph for these numbers, cached because calls repeat the same few values."""
        if len(self._graphs) >= _MOST_NUMBERS:
            self._graphs.clear()
        graph = self._graphs[numbers] = narrowed(self.graph, numbers)
        return graph

    def bind(self, tensors: Sequence[Tensor], numbers: Sequence[int | float], guarded: bool) -> BoundMod:
        """Return the mod with the values of this call. The prologue runs here.

        `guarded`: the mod is fully determined by this object, the tensors and the numbers.
        """
        captures, values = self.values(tensors, numbers)
        graph = self.graph_of(values)
        if captures and graph.inputs is MASK_INPUTS:
            captures = tuple([c.detach() if c.requires_grad else c for c in captures])
        of_prologue = tuple([numbers[i] for i in self.prologue_numbers]) if self.prologue_numbers else ()
        return BoundMod(
            graph, captures, values, tuple(tensors), self.tensor_names, (self, tuple(numbers)) if guarded else None,
            self.graph, (self.prologue_text, of_prologue),
        )  # fmt: skip


def scalarize(recorded: RecordedGraph, kind: Kind, name: str, score_dtype: torch.dtype, location: str) -> Traced:
    """Split the FX graph into a prologue and scalar expressions."""
    called = mod_in_messages(kind, name)
    _refuse_mutation_and_randomness(recorded, called)
    if kind == "score":
        _refuse_changes_without_gradient(recorded, called)
    _refuse_unknown_values(recorded, called)
    leaves = _Leaves(recorded, score_dtype)
    elements = Elements(TABLES, leaves.builder, leaves.load, leaves.number, leaves.inside)
    dtype = score_dtype if kind == "score" else torch.bool
    out = _output(elements, recorded, kind, called, dtype)
    graph = leaves.builder.build(
        name, SCORE_INPUTS if kind == "score" else MASK_INPUTS, tuple(leaves.captures), tuple(leaves.numbers), [out],
        location=location,
    )  # fmt: skip
    graph, roots, number_texts = _without_unused(graph, leaves)
    direct = [recorded.tensors.index(r) if r in recorded.tensors else None for r in roots]
    picks = tuple(i for i in direct if i is not None) if None not in direct else None
    prologue = _prologue(recorded, roots) if picks is None else None
    needed = ancestors(roots) if picks is None else set()
    return Traced(
        graph=graph if graph.numbers else narrowed(graph, ()),
        numbers=_compiled(f"({', '.join(number_texts)},)") if number_texts else None,
        number_texts=tuple(number_texts),
        picks=picks,
        prologue=prologue.forward if prologue is not None else None,
        prologue_text=_text_of(prologue) if prologue is not None else "",
        prologue_numbers=tuple(i for i, n in enumerate(recorded.numbers) if n in needed),
        conditions=_conditions(recorded),
        tensor_names=tuple(recorded.names[n] for n in recorded.tensors),
    )


def _output(elements: Elements, recorded: RecordedGraph, kind: Kind, name: str, dtype: torch.dtype) -> Expr:
    """Return the result of the mod as an expression of the dtype required for its kind."""
    result = recorded.result
    if isinstance(result, fx.Node):
        value = result.meta["val"]
        if value.ndim > 0:
            shape = [example(size) for size in value.shape]
            raise ModError(
                f"{name}, line {line_of_node(result)}: found a result of shape {shape}, expected a scalar (a 0-d "
                f"tensor). Read one element of each captured tensor, for example {_example_of_read(recorded)}."
            )
        if kind == "score" and (value.is_complex() or value.dtype == torch.bool):
            raise ModError(
                f"{name}, line {line_of_node(result)}: found a result of dtype {value.dtype}, expected a real number. "
                f"{_BOOL_SCORE if value.dtype == torch.bool else _COMPLEX_SCORE}"
            )
        if kind == "mask" and value.dtype != torch.bool:
            raise ModError(
                f"{name}, line {line_of_node(result)}: found a result of dtype {value.dtype}, expected "
                f"torch.bool. Write a comparison, for example `!= 0`."
            )
        return elements.cast(elements.value(result), dtype)
    if isinstance(result, np.generic):
        result = result.item()
    if kind == "mask" and isinstance(result, (bool, torch.SymBool)):
        return elements.builder.const(bool(result), dtype)
    boolean = isinstance(result, (bool, torch.SymBool))
    if kind == "score" and not boolean and isinstance(result, (int, float, torch.SymInt, torch.SymFloat)):
        return elements.scalar(result, dtype)
    fix = _BOOL_SCORE if boolean else _COMPLEX_SCORE if isinstance(result, complex) else ""
    raise wrong_result(name, kind, _NUMBERS.get(type(result), type(result)).__name__, fix)


def wrong_result(name: str, kind: Kind, found: str, fix: str = "") -> ModError:
    """Return the error for a mod whose result has a type that is neither a tensor's nor a number's."""
    wanted = "a bool tensor" if kind == "mask" else "a scalar tensor"
    fix = fix or ("It has no return statement, or one without a value." if found == "NoneType" else "Return one.")
    return ModError(f"{name}: found a result of type {found}, expected {wanted}. {fix}")


def _example_of_read(recorded: RecordedGraph) -> str:
    """Return how a mod reads an element: of a tensor that it indexes with too few, or of the one with the most dims."""
    captured = recorded.names
    for node in recorded.graph.nodes:
        is_index = node.op == "call_function" and operator_name(node) == "index"
        source: Any = node.args[0] if is_index else None
        if source in captured and node.meta["val"].ndim in (1, 2):
            given = [recorded.inputs.get(n, "") for n in node.all_input_nodes if n is not source]
            if all(given):
                others = [name for name in MASK_INPUTS if name not in given][-node.meta["val"].ndim :]
                return f"{captured[source]}[{', '.join([*given, *others])}]"
    ranks = {name: node.meta["val"].ndim for node, name in captured.items()}
    largest = max(ranks, key=lambda name: ranks[name], default="")
    indices = {1: "h", 2: "q_idx, kv_idx", 3: "h, q_idx, kv_idx", 4: "b, h, q_idx, kv_idx"}.get(ranks.get(largest, 0))
    return f"{largest}[{indices}]" if indices else "scale[0]"


_BOOL_SCORE = "It looks like a mask_mod: pass it as block_mask=create_block_mask(mask_mod, ...)."
_COMPLEX_SCORE = "Return its real part or its absolute value."


class _Leaves:
    """The leaves of the graph under construction: inputs, loads from captures, and numbers."""

    def __init__(self, recorded: RecordedGraph, score_dtype: torch.dtype) -> None:
        self.recorded = recorded
        self.builder = Builder()
        self.captures: list[Capture] = []
        self.roots: list[fx.Node] = []  # FX node of each capture
        self.numbers: list[Number] = []
        self.number_texts: list[str] = []
        self._names: set[str] = {*SCORE_INPUTS, "grad"}
        self._positions: dict[int, fx.Node] = {}  # by size: a captured tensor that contains its own indices
        self._inputs = {
            node: self.builder.input(name, score_dtype if name == "score" else torch.int32).cast(
                wide(node.meta["val"].dtype)
            )
            for node, name in recorded.inputs.items()
        }
        self._depends_on_inputs, self._captured = _dependence(recorded)

    def load(self, node: fx.Node, index: Index) -> Expr | None:
        """Return an input or a load, or None for a node that must be computed from its operands."""
        if node in self._inputs:
            return self._inputs[node]
        if node in self._depends_on_inputs or (node not in self._captured and _is_constant(node)):
            return None
        value = node.meta["val"]
        if node not in self.roots:
            name = self._captured.get(node, "constant")
            literal = node not in self._captured and value.device.type == "cpu"
            self._add_capture(node, name, literal, _lines_of_reads(node))
        return self.builder.load(self.roots.index(node), value.dtype, index).cast(wide(value.dtype))

    def inside(self, node: fx.Node, dimension: int, index: Expr, value: Callable[[], Expr]) -> Expr:
        """Return an index in a dimension of a node. Loads are checked. A tensor that the mod makes may not be loaded.

        If the index may be out of range, a tensor of numbers becomes a constant that is loaded. For other tensors, the
        index itself is loaded, from a constant that contains 0, 1, 2... `value()` is the element at the index.
        """
        is_loaded = node not in self._depends_on_inputs and (node in self._captured or not _is_constant(node))
        if is_loaded or node in self._inputs:
            return index
        size = node.meta["val"].shape[dimension]
        is_constant = not any(n.op == "placeholder" for n in ancestors([node]))
        if not is_constant and self._is_loaded_at(index, size, value()):
            return index
        size = concrete(size)
        if self._is_within(index, size):
            return index
        if is_constant and node.meta["val"].is_cpu:
            plain = without_autocast(["cpu"])
            with torch.inference_mode(False), _disable_current_modes(), torch.no_grad(), torch.device("cpu"), plain:
                unused = [None] * (len(self.recorded.tensors) + len(self.recorded.numbers))
                (node.meta[CONSTANT],) = _prologue(self.recorded, [node])(*unused)
            return index
        if size not in self._positions:
            with self.recorded.graph.inserting_before(next(iter(self.recorded.graph.nodes))):
                positions = self.recorded.graph.call_function(torch.ops.aten.arange.default, (size,))
            with torch.inference_mode(False), _disable_current_modes():
                positions.meta["val"] = positions.meta[CONSTANT] = torch.arange(size, dtype=torch.int32, device="cpu")
            self._add_capture(positions, "positions", True, "")
            self._positions[size] = positions
        position = self.roots.index(self._positions[size])
        before = self.captures[position]
        lines = ", ".join(dict.fromkeys(filter(None, (before.line, _lines_of_reads(node)))))
        self.captures[position] = replace(before, line=lines)
        return self.builder.load(position, torch.int32, (index,)).cast(torch.int64)

    def _is_loaded_at(self, index: Expr, size: Any, value: Expr) -> bool:
        """Return whether a value reads a dimension of this size of a captured tensor at the index, as `table[h][q]`."""
        return any(
            argument == index.index and str(length) == str(size)
            for node in self.builder.needed(value)
            if isinstance(node, Load)
            for argument, length in zip(node.args, self.roots[node.capture].meta["val"].shape, strict=True)
        )

    def _is_within(self, index: Expr, size: int) -> bool:
        """Return whether an index is in range for all inputs, captured tensors and numbers."""
        numbers, captures = tuple(self.numbers), tuple(self.captures)
        low, high = ranges(self.builder.build("index", SCORE_INPUTS, captures, numbers, [index]))[-1]
        return -size <= low and high < size

    def _add_capture(self, root: fx.Node, name: str, literal: bool, line: str) -> None:
        self.roots.append(root)
        value = root.meta["val"]
        self.captures.append(Capture(self._unique(name), value.dtype, value.ndim, literal, line))

    def number(self, symbol: Any) -> Expr:
        """Return a symbolic number as a leaf, which the host computes from the user's numbers and sizes."""
        expression = symbol.node.expr
        if expression.is_number:
            number = expression.value if isinstance(expression, Expression) else expression
            value = float(number) if isinstance(symbol, torch.SymFloat) else int(number)
            return self.builder.const(value, torch.float64 if isinstance(value, float) else torch.int64)
        dtype = torch.float64 if isinstance(symbol, torch.SymFloat) else torch.int64
        text = python_text(expression, self.recorded.sources)
        text = f"float({text})" if dtype == torch.float64 else text
        if text not in self.number_texts:
            self.number_texts.append(text)
            names = self.recorded.symbol_names
            base = next((names[str(s)] for s in sorted(expression.free_symbols, key=str)), "number")
            self.numbers.append(Number(self._unique(base), dtype))
        return self.builder.number(self.number_texts.index(text), dtype)

    def _unique(self, name: str) -> str:
        name = name if name.isidentifier() else "captured"
        chosen, count = name, 1
        while chosen in self._names:
            chosen, count = f"{name}_{count}", count + 1
        self._names.add(chosen)
        return chosen


def _lines_of_reads(node: fx.Node) -> str:
    """Return the user's lines that index a tensor, or an empty string if they are not known."""
    lines = [user.meta.get("user_line", "") for user in node.users if operator_name(user) in _GATHERS]
    return ", ".join(dict.fromkeys(filter(None, lines)))


def _is_constant(node: fx.Node) -> bool:
    """Return whether to compute a node that reads neither inputs nor captures in the graph, instead of loading it."""
    if CONSTANT in node.meta:
        return False
    name = operator_name(node)
    if name in ("stack", "cat"):
        return math.prod(node.meta["val"].shape) <= MOST_SHOWN
    return has_row(node)


_LONG_NAME = 100  # each operator on captured tensors makes names longer, and graphs have up to 200 characters


def _dependence(recorded: RecordedGraph) -> tuple[set[fx.Node], dict[fx.Node, str]]:
    """Return the nodes that depend on the mod's inputs, and names for other nodes that read a captured tensor."""
    moving = set(recorded.inputs)
    captured = dict(recorded.names)
    for node in recorded.graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if any(s in moving for s in sources):
            moving.add(node)
        elif not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            continue
        elif (base := next((s for s in sources if s in captured), None)) is not None:
            name = captured[base]
            if _call_of(node) is node and len(name) < _LONG_NAME:
                name += f"_{operator_name(node).rpartition('.')[2].strip('_')}"
            captured[node] = name
    return moving, captured


def _call_of(node: fx.Node) -> Any:
    """Return the node of the operator that computes a value, which may be one of several results."""
    found: Any = node
    while found.target is operator.getitem:
        found = found.args[0]
    return found


def _refuse_mutation_and_randomness(recorded: RecordedGraph, name: str) -> None:
    given = {*recorded.inputs, *recorded.tensors}
    aliases = set(given)
    for node in recorded.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ModError(f"{name} at {line_of_node(node)} {RANDOM.format(what=node.target)}")
        if node.target._schema.is_mutable:
            what = _refused_change(node, aliases)
            if what is not None:
                raise ModError(f"{name} at {line_of_node(node)} {IN_PLACE.format(what=what)}")
        elif node.target.is_view and not aliases.isdisjoint(node.all_input_nodes):
            aliases.add(node)
    for node in recorded.graph.nodes:
        if node.op == "get_attr" and any(CONSTANT not in user.meta for user in node.users):
            raise UnsupportedError(
                f"{name}: found a tensor that a library creates or keeps, at {line_of_node(next(iter(node.users)))}, "
                f"expected captured tensors. Create it before the call and capture it."
            )


def _refused_change(node: fx.Node, aliases: set[fx.Node]) -> str | None:
    """Return what a mutating operation changes, if that is refused. `aliases`: what a mod was given, and its views."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        changed = node.kwargs.get(argument.name) if argument.kwarg_only else node.args[position]
        sources: list[fx.Node] = []
        fx.map_arg(changed, sources.append)
        if not aliases.isdisjoint(sources):
            return "an argument or a captured tensor"
        if argument.kwarg_only or not isinstance(changed, fx.Node):
            return "a tensor through out=" if argument.kwarg_only else "a list of tensors"
        if any(map(_is_view, (changed, *changed.users))):
            return "a tensor that has views"
    return None


def _refuse_changes_without_gradient(recorded: RecordedGraph, name: str) -> None:
    """Raise for operations in place under torch.no_grad on tensors that have a gradient."""
    learned = {n for n in (*recorded.inputs, *recorded.tensors) if n.meta["val"].is_floating_point()}
    for node in recorded.graph.nodes:
        if node.op != "call_function" or learned.isdisjoint(node.all_input_nodes):
            continue
        if NO_GRAD in node.meta and node.args[0] in learned:
            raise ModError(f"{name} at {line_of_node(node)} {WITHOUT_GRADIENT}")
        if _has_floats(node.meta.get("val")) and operator_name(node) not in ("detach", *CREATION):
            learned.add(node)


def _has_floats(value: Any) -> bool:
    if isinstance(value, (tuple, list)):  # an operator with several results
        return any(map(_has_floats, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def _refuse_unknown_values(recorded: RecordedGraph, name: str) -> None:
    """Raise for numbers and sizes that depend on tensor values (nonzero, unique, a tensor as a number)."""
    for node in recorded.graph.nodes:
        found = node.meta.get("val")
        if node.op == "call_function" and found is not None and _is_unknown(found):
            raise ModError(f"{name} at {line_of_node(node)} {UNKNOWN_SIZE.format(what=_call_of(node).target)}")


def _is_unknown(value: Any) -> bool:
    if is_symbol(value):
        return any(str(s).startswith(("u", "zu")) for s in value.node.expr.free_symbols)
    if not isinstance(value, Tensor) or not any(map(is_symbol, (*value.shape, *value.stride()))):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def _is_view(node: fx.Node) -> bool:
    node = _call_of(node)
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target.is_view:
        return False
    if operator_name(node) != "detach":
        return True
    # torch.no_grad detaches each result, of which nothing else is a view then, unless it is one itself.
    source = node.all_input_nodes[0]
    return len(source.users) > 1 or _is_view(source)


def _without_unused(graph: ModGraph, leaves: _Leaves) -> tuple[ModGraph, list[fx.Node], list[str]]:
    """Drop unused captures and numbers (folding can remove the last use)."""
    kept, captures, numbers = without_unused(graph)
    return kept, [leaves.roots[i] for i in captures], [leaves.number_texts[i] for i in numbers]


def python_text(expression: Any, sources: dict[str, str]) -> str:
    """Return a sympy expression over symbols, or what a ScalarTape has instead, as Python text over t and n."""
    if isinstance(expression, Expression):
        return expression.text
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        def _print_Symbol(self, symbol: Any) -> str:
            return sources[str(symbol)]

    return Printer().doprint(expression)


def _conditions(recorded: RecordedGraph) -> tuple[str, ...]:
    guards = (python_text(g.expr, recorded.sources) for g in recorded.environment.guards)
    return tuple(dict.fromkeys((*recorded.conditions, *guards)))


def _compiled(text: str) -> Callable[..., Any]:
    return eval(f"lambda t, n: {text}", {"math": math, "torch": torch})


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _prologue(recorded: RecordedGraph, roots: list[fx.Node]) -> fx.GraphModule:
    """Return a function of all leaves that computes the captures of the graph."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in (*recorded.tensors, *recorded.numbers)}
    needed = ancestors(roots)
    constants: dict[str, Tensor] = {}
    for node in recorded.graph.nodes:
        if node not in needed or node in copies or node.op == "get_attr":
            continue
        if CONSTANT in node.meta:
            name = f"constant_{len(constants)}"
            constants[name] = node.meta[CONSTANT]
            copies[node] = graph.get_attr(name)
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}  # its fake tensors would keep the whole trace alive
            if node.target in _VIEWS:  # a capture with other strides may need a copy
                copies[node].target = torch.ops.aten.reshape.default
    graph.output(tuple(copies[r] for r in roots))
    return fx.GraphModule(constants, graph)


def _text_of(prologue: fx.GraphModule) -> str:
    """Return a text that is equal for prologues that compute the same."""
    return prologue.code + "".join(f"{t.dtype} {t.tolist()}\n" for t in prologue.buffers())
