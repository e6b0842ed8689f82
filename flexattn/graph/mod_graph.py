"""ModGraph: a score_mod, a mask_mod or a gradient as a list of scalar operations that prints, hashes and runs.

A graph is in SSA form: node i reads nodes before i. Leaves are the inputs of the mod (`score, b, h, q_idx, kv_idx`),
numbers lifted out of the user's Python, constants, and loads from captured tensors. Half-precision values are loaded
and then computed in float32, so a node's dtype is one of float32, float64, an integer type or bool; a cast to
float16 or bfloat16 that the user wrote stays, as a rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.errors import IndexRangeError, message
from flexattn.graph.operators import OPS, identity_of
from flexattn.process.forks import cached_property
from flexattn.process.tensor_cache import kept
from flexattn.torch_state.transforms import outside

SCORE_INPUTS = ("score", "b", "h", "q_idx", "kv_idx")
MASK_INPUTS = ("b", "h", "q_idx", "kv_idx")
GRAD_INPUTS = ("grad", *SCORE_INPUTS)

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Return the dtype as it is written in printed graphs: f32, bf16, i32, bool."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of `dtype` are computed in: half and quarter precision in float32."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Node:
    """One scalar operation: `op` is a name in OPS, or one of the leaves `input`, `number`, `const`, `load`."""

    op: str
    args: tuple[int, ...]  # positions of earlier nodes; of a load, its index expressions, one for each dimension
    dtype: torch.dtype
    value: object = None  # input: its name; number, load: position in numbers, captures; const: the Python scalar


@dataclass(frozen=True)
class Capture:
    """A tensor that the mod reads: its name in the user's code, dtype and rank. Sizes and strides are not fixed."""

    name: str
    dtype: torch.dtype
    ndim: int
    literal: bool = field(default=False, compare=False)  # the mod makes it from numbers, on the CPU

    def __repr__(self) -> str:
        return f"{self.name}: {short_dtype(self.dtype)}[{', '.join(':' * self.ndim)}]"


@dataclass(frozen=True)
class Number:
    """A Python int or float of the user's code that is a runtime argument of the kernel."""

    name: str
    dtype: torch.dtype  # int64 for an int, float64 for a float: what Python computes in

    def __repr__(self) -> str:
        return f"{self.name}: {'int' if self.dtype == torch.int64 else 'float'}"


@dataclass(frozen=True)
class ModGraph:
    """The scalar program of one mod.

    `outputs` holds one node for a score_mod (the new score) and a mask_mod (a bool); of a gradient graph it holds
    d(score) first (or None where the score is not read), then d(load) for each load listed in `sites`.
    """

    name: str
    inputs: tuple[str, ...]
    captures: tuple[Capture, ...]
    numbers: tuple[Number, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int | None, ...]
    sites: tuple[int, ...] = ()  # gradient graphs: load nodes whose gradient the outputs after the first give
    location: str = ""  # the user's file:line; not part of the key

    @cached_property
    def key(self) -> str:
        """Digest of everything that can change generated code: equal graphs have equal keys."""
        parts = (self.name, self.inputs, self.captures, self.numbers, self.nodes, self.outputs, self.sites)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModGraph) and self.key == other.key

    @cached_property
    def computes(self) -> tuple[object, ...]:
        """What the graph computes, whatever it and its captures are called."""
        captures = [(c.dtype, c.ndim) for c in self.captures]
        return (self.inputs, *captures, *(n.dtype for n in self.numbers), *self.nodes, *self.outputs)

    @cached_property
    def dependence(self) -> tuple[frozenset[str], ...]:
        """For each node, the inputs (score, b, h, q_idx, kv_idx, grad) that it is computed from."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = frozenset((str(node.value),)) if node.op == "input" else frozenset()
            found.append(own.union(*(found[a] for a in node.args)))
        return tuple(found)

    @cached_property
    def _read(self) -> frozenset[str]:
        return frozenset[str]().union(*(self.dependence[o] for o in self.outputs if o is not None))

    def reads(self, name: str) -> bool:
        """Tell whether any output depends on the input `name`."""
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

        `load` replaces `capture[index]`; `outputs` asks for other nodes than the graph's own (index expressions, say).
        """
        load = load or load_element
        device = next(iter(inputs.values())).device
        values: list[Tensor] = []
        for node in self.nodes:
            match node.op:
                case "input":
                    value = inputs[str(node.value)]
                case "number":
                    value = torch.tensor(numbers[node.value], dtype=node.dtype)  # type: ignore[index]
                case "const":
                    value = _constant(node.value, node.dtype, device)
                case "load":
                    source, index = captures[node.value], tuple(values[a] for a in node.args)  # type: ignore[index]
                    try:
                        value = load(source, index)
                    except IndexError as error:
                        found = _first_outside(source, index)
                        if found is None:
                            raise
                        raise self.index_error(self.captures[node.value].name, *found) from error  # type: ignore[index]
                case "cast":
                    value = values[node.args[0]].to(node.dtype)
                case _:
                    value = OPS[node.op].torch(*(values[a] for a in node.args))
            values.append(value)
        return tuple(None if o is None else values[o] for o in (self.outputs if outputs is None else outputs))

    def index_error(self, capture: str, dimension: int, size: int, index: int, where: str = "") -> IndexRangeError:
        """Return the error for an index that lies outside of a captured tensor."""
        kind = "score_mod" if "score" in self.inputs else "mask_mod"
        mod = kind if self.name == kind else f"{kind} {self.name}"
        where_is = f" ({self.location})" if self.location else ""
        found = f"index {index} in dimension {dimension} of the captured tensor `{capture}`{where}"
        expected = f"{-size} to {size - 1}, as its size is {size}"
        mend = f"Pad `{capture}` up to the lengths of query and key, or clamp the index in the mod."
        return IndexRangeError(message(mod + where_is, found, expected, mend))

    def __repr__(self) -> str:
        return _print(self)


def load_element(source: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    """Return `source[index]` with PyTorch's wrap-around of negative indices; a 0-d source is itself."""
    return source[tuple(i.long() for i in index)] if index else source


def _first_outside(source: Tensor, index: tuple[Tensor, ...]) -> tuple[int, int, int] | None:
    """Return (dimension, its size, an index outside of it) of `source[index]`, None where all lie inside."""
    for dimension, (size, places) in enumerate(zip(source.shape, index, strict=True)):
        low, high = (int(x) for x in places.aminmax()) if places.numel() else (0, -1)
        if low < -size or high >= size:
            return dimension, size, high if high >= size else low
    return None


@lru_cache(1024)
def _constant(value: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    with outside():  # it is kept for longer than any transform lasts
        return torch.tensor(value, dtype=dtype, device=device)


@dataclass(frozen=True)
class BoundMod:
    """A graph with the values of this call: captured tensors (after the prologue, under autograd) and numbers."""

    graph: ModGraph
    captures: tuple[Tensor, ...] = ()
    numbers: tuple[int | float, ...] = ()
    reached: tuple[Tensor, ...] = field(default=(), compare=False)  # the user's tensors, which captures come from
    reached_names: tuple[str, ...] = field(default=(), compare=False)
    source: tuple[object, tuple[int | float, ...]] | None = field(default=None, compare=False)  # see `origin`
    prologue: tuple[str, tuple[int | float, ...]] = field(default=("", ()), compare=False)  # its text and its numbers

    @property
    def origin(self) -> object:
        """What is equal for mods that compute the same of what they reached; None where that is not known."""
        return None if self.source is None else (self.source[0], repr(self.source[1]))  # tells 0.0 from -0.0

    def on(self, device: torch.device) -> BoundMod:
        """Return the mod with those captures of the CPU on `device` that may be anywhere: scalars and literals."""
        if all(c.device == device for c in self.captures):
            return self
        described = zip(self.captures, self.graph.captures, strict=True)
        moved = tuple(_on(device, c, about.literal) for c, about in described)
        return BoundMod(self.graph, moved, self.numbers)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the mod on tensors given in the order of its inputs."""
        (out,) = self.graph.evaluate(dict(zip(self.graph.inputs, inputs, strict=True)), self.captures, self.numbers)
        assert out is not None
        return out


def _on(device: torch.device, capture: Tensor, literal: bool) -> Tensor:
    if capture.device.type != "cpu" or (capture.dim() and not literal):
        return capture
    if not literal or capture.numel() == 0:
        return capture.to(device)
    placed = _placed.get(capture) if capture.numel() > _LARGE else None
    if placed is None or placed.device != device:
        data = capture.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        placed = _literal_on(device, data, capture.dtype, capture.shape)
        if capture.numel() > _LARGE:
            _placed[capture] = placed
    return placed


_LARGE = 1024  # elements; a trace has one tensor for a literal as long as this, so looking for its bytes is not needed
_placed = WeakTensorKeyDictionary()  # by literal: its copy on a GPU


@kept(2**26)
def _literal_on(device: torch.device, data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    with torch.inference_mode(False), outside():
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).to(device, copy=True)


class Expr:
    """A node under construction, with Python's operators; literals take the dtype of the expression beside them."""

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
    def constant(self) -> object:
        """The Python value of a constant, None for anything else."""
        return self.node.value if self.node.op == "const" else None

    def apply(self, op: str, *others: Expr | float) -> Expr:
        """Append `op(self, *others)`."""
        return self.builder.apply(op, self, *others)

    def cast(self, dtype: torch.dtype) -> Expr:
        """Append a conversion, or return self where the dtype is the same."""
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


class Builder:
    """Builds the nodes of a graph: equal nodes are shared, constants folded, identities dropped."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index: dict[tuple[object, ...], int] = {}

    def add(self, op: str, args: tuple[int, ...], dtype: torch.dtype, value: object = None) -> Expr:
        """Append a node, or return the equal one that stands already."""
        # repr tells 0.0 from -0.0 and 1 from True, which compare equal; nan equals itself.
        key = (op, args, dtype, repr(value))
        if key not in self._index:
            self._index[key] = len(self.nodes)
            self.nodes.append(Node(op, args, dtype, value))
        return Expr(self, self._index[key])

    def input(self, name: str, dtype: torch.dtype) -> Expr:
        return self.add("input", (), dtype, name)

    def number(self, position: int, dtype: torch.dtype) -> Expr:
        return self.add("number", (), dtype, position)

    def const(self, value: float | int | bool, dtype: torch.dtype) -> Expr:
        return self.add("const", (), dtype, _as_python(value, dtype))

    def like(self, value: Expr | float, other: Expr) -> Expr:
        """Return `value` as an expression: a literal becomes a constant of the dtype of `other`."""
        return value if isinstance(value, Expr) else self.const(value, other.dtype)

    def load(self, capture: int, dtype: torch.dtype, index: Sequence[Expr]) -> Expr:
        return self.add("load", tuple(i.index for i in index), dtype, capture)

    def cast(self, x: Expr, dtype: torch.dtype) -> Expr:
        if x.dtype == dtype:
            return x
        if x.node.op == "const" and dtype not in (torch.float16, torch.bfloat16):
            return self.const(x.constant, dtype)  # type: ignore[arg-type]
        if x.node.op == "const":
            return self.const(torch.tensor(x.constant, dtype=x.dtype).to(dtype).item(), dtype)
        return self.add("cast", (x.index,), dtype)

    def apply(self, op: str, *operands: Expr | float) -> Expr:
        """Append `op(*operands)`; all operands but a leading condition have one dtype already."""
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
        return self.add(op, tuple(a.index for a in args), dtype)

    def copy(self, graph: ModGraph, replace: dict[str, Expr] | None = None) -> list[Expr]:
        """Append all nodes of `graph`, its inputs replaced by name where given, and return them in order."""
        copied: list[Expr] = []
        for node in graph.nodes:
            if node.op == "input" and replace and node.value in replace:
                copied.append(replace[str(node.value)])
            else:
                copied.append(self.add(node.op, tuple(copied[a].index for a in node.args), node.dtype, node.value))
        return copied

    def build(
        self,
        name: str,
        inputs: tuple[str, ...],
        captures: tuple[Capture, ...],
        numbers: tuple[Number, ...],
        outputs: Sequence[Expr | None],
        sites: Sequence[Expr] = (),
        location: str = "",
    ) -> ModGraph:
        """Return the graph of `outputs`, less every node that they do not need."""
        keep = {e.index for e in (*outputs, *sites) if e is not None}
        for i in reversed(range(len(self.nodes))):
            if i in keep:
                keep.update(self.nodes[i].args)
        position = {old: new for new, old in enumerate(sorted(keep))}
        nodes = tuple(
            Node(n.op, tuple(position[a] for a in n.args), n.dtype, n.value)
            for n in (self.nodes[i] for i in sorted(keep))
        )
        return ModGraph(
            name, inputs, captures, numbers, nodes,
            tuple(None if e is None else position[e.index] for e in outputs),
            tuple(position[e.index] for e in sites), location,
        )  # fmt: skip


def _as_python(value: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.tensor(value, dtype=dtype).item()
    return float(value) if dtype.is_floating_point else int(value)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def _print(graph: ModGraph) -> str:
    """Write the graph as a Python function with one line for each operation and its dtype as a comment."""
    names: list[str] = []
    lines: list[tuple[str, str]] = []
    for node in graph.nodes:
        args = [names[a] for a in node.args]
        match node.op:
            case "input":
                names.append(str(node.value))
                continue
            case "number":
                names.append(graph.numbers[node.value].name)  # type: ignore[index]
                continue
            case "const":
                names.append(_literal(node.value))
                continue
            case "load":
                capture = graph.captures[node.value].name  # type: ignore[index]
                text = f"{capture}[{', '.join(args)}]" if args else f"{capture}[()]"
            case "range_min" | "range_max":  # of a bounding graph: over a box of indices, (low, high) of each
                capture = graph.captures[node.value].name  # type: ignore[index]
                text = f"{node.op}({', '.join((capture, *args))})"
            case "cast":
                text = f"{short_dtype(node.dtype)}({args[0]})"
            case op if op in _INFIX:
                text = f"{args[0]} {_INFIX[op]} {args[1]}"
            case op:
                text = f"{op}({', '.join(args)})"
        names.append(f"t{len(lines)}")
        lines.append((f"{names[-1]} = {text}", short_dtype(node.dtype)))
    width = max((len(text) for text, _ in lines), default=0)
    extras = [repr(x) for x in (*graph.captures, *graph.numbers)]
    signature = ", ".join((*graph.inputs, *extras))
    body = [f"    {text:<{width}}  # {dtype}" for text, dtype in lines]
    result = ", ".join("None" if o is None else names[o] for o in graph.outputs)
    return "\n".join([f"def {graph.name}({signature}):", *body, f"    return {result}"])


def _literal(value: object) -> str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else repr(value)
