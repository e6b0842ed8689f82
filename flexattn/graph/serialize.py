"""serialize: ModGraph <-> text, for graphs that leave the process: compiled models, exported programs, pickles.

The text is JSON. It is checked when it is read: whatever it contains, the result is a graph of known operators whose
names are identifiers, so a file cannot put other code into a generated kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from flexattn.errors import FormatError, message
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import (
    GRAD_INPUTS,
    MASK_INPUTS,
    SCORE_INPUTS,
    Capture,
    Const,
    Input,
    Load,
    Node,
    Number,
    NumberRef,
    Operation,
    short_dtype,
)
from flexattn.graph.operators import OPS

FORMAT = 2  # changes with the form of the text or the meaning of an operator
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_DTYPE = {short_dtype(d): d for d in _DTYPES}
_KINDS: dict[str, type[Any]] = {
    "input": Input, "number": NumberRef, "const": Const, "load": Load, "operation": Operation
}  # fmt: skip
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
_INPUTS = {len(inputs): inputs for inputs in (MASK_INPUTS, SCORE_INPUTS, GRAD_INPUTS)}
_MOST = 100_000  # nodes
_OPERAND = re.compile(r"\{(\d+)\}")


def dumps(graph: ModGraph) -> str:
    """Return a graph as text."""
    nodes = [[_KIND_OF[type(node)], *(_plain(getattr(node, f.name)) for f in fields(node))] for node in graph.nodes]
    captures = [[c.name, short_dtype(c.dtype), c.ndim, c.literal] for c in graph.captures]
    numbers = [[n.name, short_dtype(n.dtype), n.bits] for n in graph.numbers]
    parts = [
        FORMAT, graph.name, len(graph.inputs), captures, numbers, nodes, graph.outputs, graph.sites, graph.location
    ]  # fmt: skip
    return json.dumps(parts, separators=(",", ":"))


@lru_cache(1024)
def loads(text: str) -> ModGraph:
    """Return the graph of a text.

    Raise FormatError if another version of flexattn wrote the text, or if it does not describe a graph.
    """
    try:
        version, *parts = json.loads(text)
        if type(version) is int and version != FORMAT:
            fix = "Make it again with this version of flexattn."
            raise FormatError(message("graph", f"format {version}", f"format {FORMAT}", fix))
        return _graph(*parts)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError) as error:
        raise FormatError(message("graph", f"a text that is no graph ({error!r})", "one of `dumps`", "")) from error


def _plain(value: Any) -> Any:
    return short_dtype(value) if isinstance(value, torch.dtype) else value


def _graph(
    name: str, inputs: int, captures: list[Any], numbers: list[Any], nodes: list[Any], outputs: list[Any],
    sites: list[Any], location: str,
) -> ModGraph:  # fmt: skip
    _require(type(location) is str and len(nodes) <= _MOST and len(nodes) > 0, "size")
    graph = ModGraph(
        _identifier(name), _INPUTS[inputs],
        tuple(_capture(*c) for c in captures),
        tuple(Number(_identifier(n), _DTYPE[dtype], _index(bits, 64)) for n, dtype, bits in numbers),
        tuple(_node(i, *node) for i, node in enumerate(nodes)),
        tuple(None if o is None else _index(o, len(nodes)) for o in outputs),
        tuple(_index(s, len(nodes)) for s in sites), location,
    )  # fmt: skip
    names = [*graph.inputs, *(c.name for c in graph.captures), *(n.name for n in graph.numbers)]
    _require(len(set(names)) == len(names) and len(graph.outputs) == 1 + len(graph.sites), "names or outputs")
    _require(all(n.dtype in (torch.int64, torch.float64) for n in graph.numbers), "dtypes of numbers")
    for node in graph.nodes:
        _CHECKS[type(node)](graph, node)
    _require(all(isinstance(graph.nodes[s], Load) for s in graph.sites), "sites")
    return graph


def _capture(name: str, dtype: str, ndim: int, literal: bool) -> Capture:
    return Capture(_identifier(name), _DTYPE[dtype], _index(ndim, 65), _bool(literal))


def _node(position: int, kind: str, *values: Any) -> Node:
    """Return a node. Its arguments are earlier nodes."""
    cls = _KINDS[kind]
    named = dict(zip((f.name for f in fields(cls)), values, strict=True))
    named["dtype"] = _DTYPE[named["dtype"]]
    if "args" in named:
        named["args"] = tuple(_index(a, position) for a in named["args"])
    return cls(**named)


def _check_input(graph: ModGraph, node: Input) -> None:
    is_place = node.name in MASK_INPUTS
    good = node.dtype == torch.int32 if is_place else node.dtype in (torch.float32, torch.float64)
    _require(node.name in graph.inputs and good, "inputs")


def _check_number(graph: ModGraph, node: NumberRef) -> None:
    _require(graph.numbers[_index(node.position, len(graph.numbers))].dtype == node.dtype, "numbers")


def _check_const(graph: ModGraph, node: Const) -> None:
    kind = bool if node.dtype == torch.bool else float if node.dtype.is_floating_point else int
    _require(type(node.value) is kind, "constants")
    if kind is int:
        limits = torch.iinfo(node.dtype)
        _require(limits.min <= node.value <= limits.max, "constants")


def _check_load(graph: ModGraph, node: Load) -> None:
    capture = graph.captures[_index(node.capture, len(graph.captures))]
    integers = all(not graph.nodes[a].dtype.is_floating_point for a in node.args)
    _require(len(node.args) == capture.ndim and integers and node.dtype == capture.dtype, "loads")


def _check_operation(graph: ModGraph, node: Operation) -> None:
    if node.op == "cast":
        _require(len(node.args) == 1, "operands")
        return
    op = OPS[node.op]
    _require(len(node.args) == len(set(_OPERAND.findall(op.triton))), "operands")
    dtypes = [graph.nodes[a].dtype for a in node.args]
    if node.op == "where":
        _require(dtypes.pop(0) == torch.bool, "operands")
    result = torch.bool if op.result == "bool" else dtypes[0]
    _require(set(dtypes) == {dtypes[0]} and node.dtype == result, "operands")


_CHECKS: dict[type[Any], Callable[[ModGraph, Any], None]] = {
    Input: _check_input, NumberRef: _check_number, Const: _check_const, Load: _check_load, Operation: _check_operation
}  # fmt: skip


def _identifier(name: Any) -> str:
    _require(type(name) is str and name.isidentifier() and len(name) <= 200, "names")
    return name


def _index(value: Any, size: int) -> int:
    _require(type(value) is int and 0 <= value < size, "positions")
    return value


def _bool(value: Any) -> bool:
    _require(type(value) is bool, "flags")
    return value


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(message("graph", f"a text with invalid {what}", "one of `dumps`", "The file is damaged."))
