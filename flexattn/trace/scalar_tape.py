"""ScalarTape: records the operators of a mod that computes with scalars alone, without FakeTensorMode and sympy.

Most mods compute with 0-d tensors and gather from captured tensors. For these, a dispatch mode on plain meta tensors
records the same graph as make_fx on fake tensors with symbolic sizes. FakeTensorMode imports Dynamo, and symbolic sizes
import sympy: 1.4 s of the first call of a process. Whatever depends on a size or a device raises NotScalar. The mod is
then run again on fake tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from flexattn.process.frozen_class import frozen

_GATHER = torch.ops.aten.index.Tensor
_OTHER_TAGS = frozenset((torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output))
_META, _CPU = torch.device("meta"), torch.device("cpu")


class NotScalar(BaseException):
    """The tape cannot record this mod. A BaseException, so that no handler of the mod catches it."""


@dataclass(eq=False)
class Expression:
    """A number as Python text over t (tensors) and n (numbers), with what tracing reads of a sympy expression."""

    text: str
    value: int | float
    free_symbols: tuple[str, ...]  # the names of the numbers that it is computed from
    is_number: bool = False  # the trace is valid for this value only, so it is a literal


@frozen
class Condition:
    """A condition under which a trace is valid, as a guard of a ShapeEnv."""

    expr: Expression


def _not_scalar(*_: object) -> NoReturn:
    raise NotScalar


# Python's operators on ints, by the names of torch's methods. torch's own expressions round and simplify like these.
_ARITHMETIC: dict[str, tuple[str, Callable[[Any, Any], int]]] = {
    "add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul),
    "floordiv": ("//", operator.floordiv), "int_floordiv": ("//", operator.floordiv), "mod": ("%", operator.mod),
}  # fmt: skip
_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "eq": ("==", operator.eq), "ne": ("!=", operator.ne), "lt": ("<", operator.lt), "le": ("<=", operator.le),
    "gt": (">", operator.gt), "ge": (">=", operator.ge),
}  # fmt: skip


class _Node:
    """What torch calls on a SymInt, SymFloat or SymBool. A read of the value adds a condition to the tape."""

    def __init__(self, tape: ScalarTape, expression: Expression) -> None:
        self.tape = tape
        self.expr = expression
        self.hint = expression.value

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def wrap_int(self, value: int) -> _Node:
        return _Node(self.tape, Expression(repr(value), value, ()))

    def wrap_float(self, value: float) -> _Node:
        return _Node(self.tape, Expression(repr(value), value, ()))

    def neg(self) -> _Node:
        return self.wrap_int(0).computed("sub", self)

    def computed(self, name: str, other: _Node) -> _Node:
        """Return the number or truth value that an operator gives."""
        if not isinstance(other, _Node) or (name in _ARITHMETIC and not (self.is_int() and other.is_int())):
            raise NotScalar
        sign, function = (_ARITHMETIC | _COMPARISONS)[name]
        value = function(self.hint, other.hint)
        names = tuple(dict.fromkeys((*self.expr.free_symbols, *other.expr.free_symbols)))
        made = _Node(self.tape, Expression(f"({self.expr.text} {sign} {other.expr.text})", value, names))
        if name in _ARITHMETIC:
            self.tape.calculation(made, function, self, other)
        return made

    def guard_int(self, file: str, line: int) -> int | float:
        if not self.expr.is_number and self.expr.free_symbols:
            self.tape.depends_on(self.expr, f"{self.expr.text} == {self.hint!r}")
        self.expr.is_number = True
        return self.hint

    guard_float = guard_int

    def int_(self) -> int | float:
        return self.guard_int("", 0)

    def guard_bool(self, file: str, line: int) -> bool:
        self.tape.depends_on(self.expr, self.expr.text if self.hint else f"not {self.expr.text}")
        return bool(self.hint)

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ARITHMETIC or name in _COMPARISONS:
            return functools.partial(self.computed, name)
        return _not_scalar


class ScalarTape(TorchDispatchMode):
    """A dispatch mode that records operators on scalars, and gathers, in an FX graph."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo to disable it; `uncompiled` has disabled it for all of flexattn

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.guards: list[Condition] = []  # like those of a ShapeEnv, they may grow until the trace is finished
        self._device = _CPU  # of the captured tensors
        self._nodes: dict[
            int, tuple[Any, fx.Node]
        ] = {}  # by id of a tensor or of a symbol's node, which it keeps alive
        self._last: fx.Node | None = None  # the last placeholder

    def scalar(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return an argument of the mod."""
        made = torch.empty((), dtype=dtype, device=_META)
        self._placeholder(name, made, made)
        return made

    def number(self, value: int | float, name: str, text: str) -> tuple[Any, fx.Node]:
        """Return the symbol of a captured number, and its placeholder. `text` is the number over n."""
        node = _Node(self, Expression(text, value, (name,)))
        symbol = torch.SymFloat(node) if isinstance(value, float) else torch.SymInt(node)
        return symbol, self._placeholder(name, symbol, node)

    def tensor(self, value: Tensor, name: str) -> tuple[Tensor, fx.Node]:
        """Return a stand-in for a captured tensor, and its placeholder."""
        if value.is_meta or (value.device != self._device and not (value.is_cpu and value.dim() == 0)):
            if value.is_meta or self._device.type != "cpu" or any(t.dim() for t in self._captured()):
                raise NotScalar  # tensors of two devices
            self._device = value.device
        with _disable_current_modes():
            made = torch.empty(value.shape, dtype=value.dtype, device=_META)
        return made, self._placeholder(name, made, made)

    def is_traced(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a stand-in or a result."""
        return id(tensor) in self._nodes

    def calculation(self, made: _Node, function: Callable[..., int], *operands: _Node) -> None:
        """Record arithmetic on numbers, which operators may then read."""
        known = [self._nodes.get(id(operand)) for operand in operands]
        args = [o.hint if found is None else found[1] for o, found in zip(operands, known, strict=True)]
        self._note(made, self.graph.call_function(function, tuple(args)), torch.SymInt(made))

    def depends_on(self, expression: Expression, condition: str) -> None:
        """Note a condition under which what is recorded is valid."""
        self.guards.append(Condition(replace(expression, text=condition)))

    def node_of(self, result: Any) -> Any:
        """Return the FX node of a tensor. Other results are returned unchanged."""
        return self._nodes[id(result)][1] if isinstance(result, Tensor) else result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []

        def recorded(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
            return self._recorded(value)

        node_args, node_kwargs = tree_map(recorded, (args, kwargs))
        if func.namespace != "aten" or func._schema.is_mutable or _OTHER_TAGS & set(func.tags):
            raise NotScalar
        if not _computes_scalars(func, args, tensors):
            raise NotScalar
        device = kwargs.get("device")
        if device is not None and (tensors or device.type not in ("cpu", "meta")):
            raise NotScalar
        with _disable_current_modes():  # modes of the user do not see how a dtype is found
            result = torch.empty(_shape(func, args), dtype=_dtype(func, args, kwargs), device=_META)
        self._note(result, self.graph.call_function(func, node_args, node_kwargs), result)
        return result

    def _recorded(self, value: Any) -> Any:
        """Return an argument of an operator as an argument of its FX node."""
        if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            known = self._nodes.get(id(value if isinstance(value, Tensor) else value.node))
            if known is None:
                raise NotScalar
            return known[1]
        return self._device if value == _META and isinstance(value, torch.device) else value

    def _captured(self) -> list[Tensor]:
        inputs = (node.meta["val"] for node in self.graph.nodes if node.op == "placeholder")
        return [value for value in inputs if isinstance(value, Tensor)]

    def _placeholder(self, name: str, value: Any, key: Any) -> fx.Node:
        if self._last is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last):
                node = self.graph.placeholder(name)
        self._last = node
        self._note(key, node, value)
        return node

    def _note(self, key: Any, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        self._nodes[id(key)] = (key, node)


def _shape(func: Any, args: Sequence[Any]) -> torch.Size:
    return args[0].shape[len(args[1]) :] if func is _GATHER else torch.Size()


def _dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """Return the dtype of a result, computed on CPU tensors: most meta kernels are Python code that imports Dynamo."""
    if func is _GATHER:
        return args[0].dtype
    given, named = tree_map(_number, (args, kwargs))
    result = func(*given, **({**named, "device": _CPU} if "device" in named else named))
    if not isinstance(result, Tensor) or result.dim():
        raise NotScalar
    return result.dtype


def _number(argument: Any) -> Any:
    """Return a number of the same kind as an argument. 1 divides every number."""
    if isinstance(argument, Tensor):
        return torch.ones((), dtype=argument.dtype, device=_CPU)
    return argument.node.hint if isinstance(argument, (torch.SymInt, torch.SymFloat)) else argument


def _computes_scalars(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Return whether an operator reads scalars alone, or gathers with integer scalars."""
    if func is not _GATHER:
        return not any(t.dim() for t in tensors)
    source, indices = args
    whole = all(i is not None and i.dim() == 0 and i.dtype in (torch.int64, torch.int32) for i in indices)
    return whole and len(indices) <= source.dim() and source.numel() > 0
