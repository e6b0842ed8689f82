"""operator_calls: an operator in an FX graph: its name, its arguments, its ancestors, and errors if it has no row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx


class UnknownOperator(Exception):
    """No row of the tables computes this operator with these arguments. `reason` is part of the message."""

    def __init__(self, node: fx.Node, reason: str = "") -> None:
        super().__init__(str(node.target))
        self.node = node
        self.reason = reason


class Refused(UnknownOperator):
    """An UnknownOperator for which a decomposition would not help."""


def is_symbol(value: object) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def operator_name(node: fx.Node) -> str:
    """Return the name of an aten or prims operator without overload; for in-place operators, the functional one's."""
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    space, _, name = name.rpartition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if space in ("aten", "") else f"{space}.{name}"


def entry(table: dict[str, Any], node: fx.Node) -> Any:
    """Return the row of an operator, by its overload or else by its name."""
    name = operator_name(node)
    overload = getattr(node.target, "_overloadname", "")
    return table.get(f"{name}.{overload}", table.get(name))


_LAYOUT = frozenset(("layout", "device", "pin_memory", "memory_format", "non_blocking"))


def arguments(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operator that are not defaults, positional if its schema allows.

    Arguments that do not affect the elements (layout, device and so on) are omitted.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return list(node.args), dict(node.kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    needed = 0
    for i, argument in enumerate(target._schema.arguments):
        default = argument.default_value
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
        given = not argument.has_default_value() or type(value) is not type(default) or value != default
        if not argument.kwarg_only:
            positional.append(value)
            needed = len(positional) if given else needed
        elif given and argument.name not in _LAYOUT:
            named[argument.name] = value
    return positional[:needed], named


def check_arguments(compute: Callable[..., Any], node: fx.Node, *args: Any, **kwargs: Any) -> None:
    """Raise unless a row has a parameter for each argument of the operator. No argument may be ignored."""
    try:
        _signature(compute).bind(*args, **kwargs)
    except TypeError as error:
        raise UnknownOperator(node, f"with arguments that have no rule: {error}") from None


@lru_cache(1024)
def _signature(compute: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(compute)


def meta_of(arg: Any) -> Any:
    """Return the fake value of a node's result, or the argument itself."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def concrete(value: Any) -> Any:
    """Return a symbolic number as a Python number. The trace is then valid only for this value (a guard)."""
    value = meta_of(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    return int(value) if isinstance(value, torch.SymInt) else value


def common_dtype(args: Sequence[Any]) -> torch.dtype:
    """Return the dtype in which torch computes with these operands."""
    values = [meta_of(a) for a in args]
    stand_ins: list[Any] = [
        1.5 if isinstance(v, torch.SymFloat) else 1 if isinstance(v, torch.SymInt) else v
        for v in values
        if isinstance(v, (Tensor, int, float, torch.SymInt, torch.SymFloat))
    ]
    if len(stand_ins) < 2:
        only = stand_ins[0] if stand_ins else 0
        return only.dtype if isinstance(only, Tensor) else torch.as_tensor(only, device="cpu").dtype
    result = torch.result_type(stand_ins[0], stand_ins[1])
    for more in stand_ins[2:]:
        result = torch.promote_types(result, torch.result_type(stand_ins[0], more))
    return result


def ancestors(
    roots: Sequence[fx.Node], is_leaf: Callable[[fx.Node], bool] = lambda node: node.op == "placeholder"
) -> set[fx.Node]:
    """Return `roots` and all nodes that they are computed from. Nothing is asked of what a leaf is computed from."""
    found: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += () if is_leaf(node) else node.all_input_nodes
    return found
