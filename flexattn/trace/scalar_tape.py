"""ScalarTape: records the operators of a mod that computes with scalars alone, without FakeTensorMode and sympy.

Most mods compute with 0-d tensors and gather from captured tensors. For these, a dispatch mode on plain meta tensors
records the same graph as make_fx on fake tensors with symbolic sizes. FakeTensorMode imports Dynamo, and symbolic sizes
import sympy: 1.4 s of the first call of a process. Whatever depends on a size or a device, or computes with numbers,
raises NotScalar. The mod is then run again on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

_GATHER = torch.ops.aten.index.Tensor
_OTHER_TAGS = frozenset((torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output))
_META, _CPU = torch.device("meta"), torch.device("cpu")


class NotScalar(BaseException):
    """The tape cannot record this mod. A BaseException, so that no handler of the mod catches it."""


class Leaf:
    """The expression of a number: its symbol alone. It has the attributes of a sympy symbol that tracing reads.

    `is_number`: the mod, or the kernel, depends on the value. The trace is then valid for this value only.
    """

    def __init__(self, name: str, value: int | float) -> None:
        self.name = name
        self.value = value
        self.free_symbols = (self,)
        self.is_number = False

    def __str__(self) -> str:
        return self.name

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class ValueGuard:
    """The condition that a number has the value that the trace was made with."""

    number: Leaf

    @property
    def expr(self) -> ValueGuard:
        return self


def _not_scalar(*_: object) -> NoReturn:
    raise NotScalar


class _Node:
    """What torch calls on a SymInt or SymFloat. A read of the value is guarded. Arithmetic raises NotScalar."""

    def __init__(self, hint: int | float, name: str) -> None:
        self.hint = hint
        self.expr = Leaf(name, hint)

    def guard_int(self, file: str, line: int) -> int | float:
        self.expr.is_number = True
        return self.hint

    guard_float = guard_int

    def int_(self) -> int | float:
        return self.guard_int("", 0)

    def is_int(self) -> bool:
        return isinstance(self.hint, int)

    def is_float(self) -> bool:
        return isinstance(self.hint, float)

    def is_bool(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _not_scalar


class ScalarTape(TorchDispatchMode):
    """A dispatch mode that records operators on scalars, and gathers, in an FX graph."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo to disable it; `uncompiled` has disabled it for all of flexattn

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
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

    def number(self, value: int | float, name: str) -> tuple[Any, fx.Node]:
        """Return the symbol of a captured number, and its placeholder."""
        node = _Node(value, name)
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

    @property
    def guards(self) -> list[ValueGuard]:
        """The conditions under which what is recorded is valid. They may still grow, as those of a ShapeEnv."""
        numbers = (known.expr for known, _ in self._nodes.values() if isinstance(known, _Node))
        return [ValueGuard(number) for number in numbers if number.is_number]

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
