"""mod_graph: ModGraph, a score_mod, mask_mod or gradient as a list of scalar operations. It prints, hashes and runs.

A graph is in SSA form: node i reads nodes before i. Leaves are the inputs of the mod (`score, b, h, q_idx, kv_idx`),
numbers lifted out of the user's Python, constants, and loads from captured tensors. Half-precision values are loaded
and then computed in float32, so a node's dtype is float32, float64, an integer type or bool. A cast to float16 or
bfloat16 in the user's code is kept as a rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flexattn.errors import IndexRangeError, message, mod_in_messages
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
    short_dtype,
)  # fmt: skip
from flexattn.graph.operators import OPS
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.lasting import cached_on_device
from flexattn.torch_state.transforms import outside

FROM_OFFSETS = "of_token_from_offsets"  # a name in flexattn.mods: the documents of tokens, computed from offsets


@frozen
class ModGraph:
    """The scalar program of one mod.

    `outputs` has one node for a score_mod (the new score) and a mask_mod (a bool). For a gradient graph it has d(score)
    first (None if the score is not read), then d(load) for each load in `sites`.
    """

    name: str
    inputs: tuple[str, ...]
    captures: tuple[Capture, ...]
    numbers: tuple[Number, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int | None, ...]
    sites: tuple[int, ...] = ()  # gradient graphs: the load nodes whose gradients are the outputs after the first
    location: str = ""  # the user's file:line; not part of the key

    @cached_property
    def key(self) -> str:
        """Digest of everything that can change generated code. Equal graphs have equal keys."""
        parts = (self.name, self.inputs, self.captures, self.numbers, self.nodes, self.outputs, self.sites)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModGraph) and self.key == other.key

    @cached_property
    def computes(self) -> tuple[object, ...]:
        """What the graph computes, without the names of the graph and its captures."""
        captures = [(c.dtype, c.ndim) for c in self.captures]
        return (self.inputs, *captures, *(n.dtype for n in self.numbers), *self.nodes, *self.outputs)

    @cached_property
    def digest(self) -> str:
        """Digest of what the graph computes, without names."""
        return hashlib.sha256(repr(self.computes).encode()).hexdigest()[:20]

    @cached_property
    def dependence(self) -> tuple[frozenset[str], ...]:
        """For each node, the inputs (score, b, h, q_idx, kv_idx, grad) that it depends on."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = frozenset((node.name,)) if isinstance(node, Input) else frozenset()
            found.append(own.union(*(found[a] for a in node.args)))
        return tuple(found)

    @cached_property
    def loads(self) -> dict[int, Load]:
        """The loads, by their positions in `nodes`."""
        return {i: node for i, node in enumerate(self.nodes) if isinstance(node, Load)}

    def is_input(self, position: int, *names: str) -> bool:
        """Return whether a node is one of these inputs."""
        node = self.nodes[position]
        return isinstance(node, Input) and node.name in names

    @property
    def is_true(self) -> bool:
        """Whether it is a mask_mod for which every pair attends."""
        result = self.nodes[self.output]
        return isinstance(result, Const) and bool(result.value)

    @property
    def output(self) -> int:
        """The node of the result of a score_mod or a mask_mod."""
        output = self.outputs[0]
        assert output is not None
        return output

    @cached_property
    def _read(self) -> frozenset[str]:
        return frozenset[str]().union(*(self.dependence[o] for o in self.outputs if o is not None))

    def reads(self, name: str) -> bool:
        """Return whether any output depends on the input `name`."""
        return name in self._read

    def evaluate(
        self,
        inputs: dict[str, Tensor],
        captures: Sequence[Tensor],
        numbers: Sequence[int | float],
        load: Callable[[Tensor, tuple[Tensor, ...]], Tensor] | None = None,
        outputs: Sequence[int | None] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Run the graph on tensors that broadcast against each other.

        `load` replaces `capture[index]`. `outputs` selects other nodes than the graph's outputs (for example indices).
        """
        load = load or load_element
        device = next(iter(inputs.values())).device
        values: list[Tensor] = []
        for node in self.nodes:
            match node:
                case Input(name):
                    value = inputs[name]
                case NumberRef(position):
                    value = torch.tensor(numbers[position], dtype=node.dtype)
                case Const():
                    value = _constant(node, device)
                case Load(capture):
                    source, index = captures[capture], tuple(values[a] for a in node.args)
                    try:
                        value = load(source, index)
                    except IndexError as error:
                        found = _first_outside(source, index)
                        if found is None:
                            raise
                        raise self.index_error(node, *found) from error
                case Operation("cast"):
                    value = values[node.args[0]].to(node.dtype)
                case _:
                    value = OPS[node.op].torch(*(values[a] for a in node.args))
            values.append(value)
        return tuple(None if o is None else values[o] for o in (self.outputs if outputs is None else outputs))

    def index_error(self, load: Load, dimension: int, size: int, index: int, where: str = "") -> IndexRangeError:
        """Return the error for an index that is out of bounds for a captured tensor."""
        mod = mod_in_messages("score" if "score" in self.inputs else "mask", self.name)
        capture = self.captures[load.capture]
        line = capture.line or self.location
        what = "a tensor that it makes" if capture.literal else f"the captured tensor `{capture.name}`"
        dimension_of = "" if capture.literal else f"in dimension {dimension} "
        found = f"index {index} {dimension_of}of {what}{where}"
        expected = f"{-size} to {size - 1}, as its size is {size}"
        fix = self._fix_of_index(load, dimension, size)
        return IndexRangeError(message(f"{mod} ({line})" if line else mod, found, expected, fix))

    def _fix_of_index(self, load: Load, dimension: int, size: int) -> str:
        capture, reads = self.captures[load.capture], self.dependence[load.args[dimension]]
        if capture.name == FROM_OFFSETS:
            return (
                f"offsets ends at {size}. It is cumulative, from 0 to the length of a row: offsets[-1] is that length."
            )
        name = "it" if capture.literal else f"`{capture.name}`"
        for input_name, size_of, entry in (("b", "batch of query", "sequence"), ("h", "heads of query", "query head")):
            if reads == {input_name}:
                return f"The index is {input_name}: give {name} an entry for each {entry}, as many as the {size_of}."
        return f"Pad {name} up to the lengths of query and key, or clamp the index in the mod."

    def __repr__(self) -> str:
        return _print(self)


def load_element(source: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """Return `source[index]` with PyTorch's wrap-around of negative indices, or a 0-d source itself."""
    return source[tuple(i.long() for i in index)] if index else source


def _first_outside(source: Tensor, index: tuple[Tensor, ...]) -> tuple[int, int, int] | None:
    """Return (dimension, its size, an index out of bounds) of `source[index]`, None if all are in bounds."""
    for dimension, (size, places) in enumerate(zip(source.shape, index, strict=True)):
        low, high = (int(x) for x in places.aminmax()) if places.numel() else (0, -1)
        if low < -size or high >= size:
            return dimension, size, high if high >= size else low
    return None


def _constant(node: Const, device: torch.device) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # an operation of the graph. Dynamo cannot trace `outside`
        return torch.full((), node.value, dtype=node.dtype, device=device)
    return _kept_constant(node, device)


@partial(cached_on_device, most=1024)
def _kept_constant(node: Const, device: torch.device) -> Tensor:
    with torch.inference_mode(False), outside():
        return torch.full((), node.value, dtype=node.dtype, device=device)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def _print(graph: ModGraph) -> str:
    """Print the graph as a Python function with one line per operation and its dtype as a comment."""
    names: list[str] = []
    lines: list[tuple[str, str]] = []
    for node in graph.nodes:
        args = [names[a] for a in node.args]
        match node:
            case Input(name):
                names.append(name)
                continue
            case NumberRef(position):
                names.append(graph.numbers[position].name)
                continue
            case Const(value):
                names.append(_literal(value))
                continue
            case Load(capture):
                name = graph.captures[capture].name
                text = f"{name}[{', '.join(args)}]" if args else f"{name}[()]"
            case RangeLoad(op, capture):
                text = f"{op}({', '.join((graph.captures[capture].name, *args))})"
            case Operation("cast"):
                text = f"{short_dtype(node.dtype)}({args[0]})"
            case Operation(op) if op in _INFIX:
                text = f"{args[0]} {_INFIX[op]} {args[1]}"
            case Operation(op):
                text = f"{op}({', '.join(args)})"
        names.append(f"t{len(lines)}")
        lines.append((f"{names[-1]} = {text}", short_dtype(node.dtype)))
    width = max((len(text) for text, _ in lines), default=0)
    extras = [repr(x) for x in (*graph.captures, *graph.numbers)]
    signature = ", ".join((*graph.inputs, *extras))
    body = [f"    {text:<{width}}  # {dtype}" for text, dtype in lines]
    result = ", ".join("None" if o is None else names[o] for o in graph.outputs)
    return "\n".join([f"def {graph.name}({signature}):", *body, f"    return {result}"])


def _literal(value: Scalar) -> str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else repr(value)
