"""record: ReadLog, the locations that a mod read while it ran, as the lines of a guard that reads them again.

Each location is a variable of the guard, computed from that of its owner: `v2 = v1.__closure__[0].cell_contents`. The
object at a location is checked by type, value or identity. Values of tensors and numbers may change: the guard returns
them. An object without a location was created by the mod while it ran. It needs no guard, because it follows from what
was read.
"""

from __future__ import annotations

import enum
import marshal
import math
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flexattn.torch_state.symbols import example
from flexattn.trace.follow.libraries import HEAP_TYPE, is_library, is_library_class
from flexattn.trace.follow.lifted import LIFTED, is_liftable, lifted

MOST_LINES = 20_000  # of a guard; a mod that needs more is traced at each call
MOST_LIFTED = 64  # numbers of longer containers stay literals, to limit the number of kernel arguments

_SINGLETONS: tuple[Any, ...] = (None, True, False, ..., NotImplemented)
_VALUES: frozenset[type] = frozenset((
    str, bytes, complex, range, torch.Size, torch.finfo, torch.iinfo, slice, types.CodeType,
))  # fmt: skip
ENDS = ("start", "stop", "step")  # of a slice
_TORCH_CONSTANTS: frozenset[type] = frozenset((torch.dtype, torch.device, torch.layout, torch.memory_format))
_NUMBERS_OF_NUMPY = "bBhHiIlLqQefd"  # characters of the dtypes whose items are Python's ints and floats
DERIVED = (int, float, str, bytes)  # a guard checks the value of an instance of a class derived from these
RECORD = "V"  # character of the dtypes of records, which are views of arrays: their contents may change
_CONTAINERS = (dict, list, tuple, set, frozenset)


class Symbols(Protocol):
    """Creates the inputs of the trace for what the mod reads."""

    def number(self, value: int | float, position: int, name: str) -> Any:
        """Return the symbol of the number at `position` in the guard's results."""

    def tensor(self, value: Tensor, position: int, name: str) -> None:
        """Make the tensor an input of the trace."""

    def about_to(self, reason: str) -> None:
        """Stop a run that will be repeated, before the mod does what `reason` says."""

    def scripted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function created by torch.jit.script."""

    def text(self, symbol: Any) -> str:
        """Return the expression by which the guard computes a symbol from its variables."""
        ...

    def name_of(self, symbol: Any) -> str:
        """Return the user's name of a number in a symbol's expression."""
        ...

    def outside(self) -> AbstractContextManager[None]:
        """Return a context in which torch computes outside of the trace."""
        ...


@dataclass
class ReadLog:
    """What has been read so far. `root` is the mod itself, the argument of the guard."""

    root: Any
    symbols: Symbols
    lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    tensor_variables: list[str] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)  # ints and floats, or symbols of a graph that is recorded
    number_variables: list[str] = field(default_factory=list)
    reason: str = ""  # why the guard cannot prove that nothing changed; empty if it can
    computes_from_sizes: bool = False  # a number is computed from a size by more than integer arithmetic
    may_end: bool = False  # the mod has only set something that it had not read, which it may do once
    _variables: dict[int, tuple[Any, str]] = field(default_factory=dict)  # id -> the object, its variable
    _known: dict[str, Any] = field(default_factory=dict)  # text of a read -> the object found
    _names: dict[int, str] = field(default_factory=dict)  # id of an object -> the user's name of it
    _constant_names: dict[tuple[str, int], str] = field(default_factory=dict)
    _count: int = 0

    def start(self) -> Any:
        """Read the mod itself."""
        return self._observe("mod", self.root, "mod", literal=False)

    def unguarded(self, reason: str, may_end: bool = False) -> None:
        """Note that the mod reads or changes something that a guard cannot check."""
        self.symbols.about_to(reason)
        self.may_end = may_end and (self.may_end or not self.reason)
        self.reason = self.reason or reason

    def drawn(self, value: int | float) -> Any:
        """Return a number that differs at each call as a lifted number, so that no kernel is compiled for it."""
        return self._new_number("", value, value, "drawn") if is_liftable(value) else value

    def computed(self, template: str, operands: Sequence[Any], value: Any) -> Any:
        """Return the number computed by `template` from other numbers, lifted. The guard recomputes it."""
        self.computes_from_sizes |= any(isinstance(o, LIFTED) and not o.text for o in operands)
        texts = [self._text_of_number(o) for o in operands]
        name = next((self.symbols.name_of(o.symbol) for o in operands if isinstance(o, LIFTED)), "number")
        return self._at(template.format(*texts), value, name, literal=False)

    def _text_of_number(self, value: Any) -> str:
        if isinstance(value, LIFTED):
            return value.text or self.symbols.text(value.symbol)
        return self.text_of(value)

    def has(self, owner: object) -> bool:
        """Return whether an object existed before the mod ran."""
        return id(owner) in self._variables

    def read(self, owner: object, template: str, value: Any, name: str = "captured", literal: bool = False) -> Any:
        """Return `value`, located at `template` of `owner`, as the mod sees it, and guard it.

        `template` is Python text with {} for the owner. A number is returned lifted, unless `literal`.
        """
        entry = self._variables.get(id(owner))
        return value if entry is None else self._at(template.format(entry[1]), value, name, literal)

    def read_item(
        self, owner: object, template: str, key: Any, value: Any, name: str = "", literal: bool = False
    ) -> Any:
        """Like `read`, for an item: `template` has {} for the owner and {} for the key."""
        entry = self._variables.get(id(owner))
        if entry is None:
            return value
        name = name or _name_of(key, self._names.get(id(owner), ""))
        return self._at(template.format(entry[1], self.text_of(key)), value, name, literal)

    def alias(self, owner: object, template: str, part: object) -> None:
        """Give a part of an object, which is never replaced, a variable; guard that two owners still share it."""
        entry = self._variables.get(id(owner))
        if entry is None:
            return
        text, known = template.format(entry[1]), self._variables.get(id(part))
        if known is None:
            self._variables[id(part)] = (part, text)
        elif known[1] != text:
            self._line(f"if {text} is not {known[1]}: return None")

    def permanent(self, value: object) -> None:
        """Give a library object, which is never replaced, a variable."""
        if id(value) not in self._variables:
            self._variables[id(value)] = (value, self._constant("c", value, value))

    def check(self, owner: object, template: str, *values: Any) -> None:
        """Guard a condition: text with {} for the owner and for each value."""
        entry = self._variables.get(id(owner))
        if entry is not None:
            self._line(f"if not ({template.format(entry[1], *map(self.text_of, values))}): return None")

    def check_same(self, x: object, y: object, same: bool) -> None:
        """Guard whether two objects are identical."""
        entries = [self._variables.get(id(o)) for o in (x, y)]
        texts = [p[1] if p is not None else self.identity(o) for p, o in zip(entries, (x, y), strict=True)]
        if any(p is not None for p in entries):
            self._line(f"if {texts[0]} is {'not ' * same}{texts[1]}: return None")

    def assign_class(self, cls: type) -> None:
        """Give a class whose identity is guarded a variable, and guard its base order."""
        if id(cls) in self._variables or not cls.__flags__ & HEAP_TYPE:
            return
        self._assign(cls, self.identity(cls))
        self.check_bases(cls)

    def check_bases(self, cls: type) -> None:
        """Guard the method resolution order of a class."""
        for i, base in enumerate(cls.__mro__):
            if i and base is not object:
                self._line(f"if {self._variables[id(cls)][1]}.__mro__[{i}] is not {self.identity(base)}: return None")
        self.check(cls, "len({}.__mro__) == {}", len(cls.__mro__))

    def snapshot(self, owner: object, value: Any) -> bool:
        """Guard the whole contents of a container of plain data; return False if it contains anything else."""
        entry = self._variables.get(id(owner))
        if entry is None:
            return True
        if not _is_marshalled(value):
            return False
        found = marshal.dumps(value, 2)
        self._line(f"if {self.constant(marshal.dumps)}({entry[1]}, 2) != {self.constant(found)}: return None")
        return True

    def text_of(self, value: Any) -> str:
        """Return how the guard writes a constant, or an object that it has read."""
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        entry = self._variables.get(id(value))
        return entry[1] if entry is not None and not isinstance(value, _CONTAINERS) else self.constant(value)

    def constant(self, value: Any) -> str:
        """Return the name of a constant of the guard."""
        return self._constant("c", value, value)

    def identity(self, value: Any) -> str:
        """Return the text of an object for a comparison with `is`. The guard keeps no user object alive."""
        if _is_permanent(value):
            return self._constant("c", value, value)
        try:
            return self._constant("r", value, weakref.ref(value)) + "()"
        except TypeError:
            return self._constant("c", value, value)

    def _constant(self, kind: str, value: Any, kept: Any) -> str:
        key = (kind, id(value))
        if key not in self._constant_names:
            self._constant_names[key] = f"{kind}{len(self._constant_names)}"
            self.constants[self._constant_names[key]] = kept
            self._retain(value)
        return self._constant_names[key]

    def _retain(self, value: Any) -> None:
        """Keep a reference to a constant, so that its id is not reused while the mod runs."""
        self._known[f"constant {id(value)}"] = value

    def _line(self, text: str) -> None:
        if self.reason or text in self._known:
            return
        self._known[text] = True
        self.lines.append(text)
        if len(self.lines) > MOST_LINES:
            self.unguarded("it reads too many values to compare at each call")

    def _assign(self, value: Any, text: str) -> str:
        """Give an object a variable of the guard."""
        variable = f"v{self._count}"
        self._count += 1
        self._line(f"{variable} = {text}")
        self._variables[id(value)] = (value, variable)
        return variable

    def _at(self, text: str, value: Any, name: str, literal: bool) -> Any:
        if text in self._known and not self.reason:
            return self._known[text]
        found = self._observe(text, value, name, literal)
        self._known[text] = found
        return found

    def _observe(self, text: str, value: Any, name: str, literal: bool) -> Any:
        kind = type(value)
        if kind in (int, float) and not literal and is_liftable(value):
            return self._lift(text, value, value, name)
        if isinstance(value, np.generic) and value.dtype.char in _NUMBERS_OF_NUMPY and not literal:
            return self._lift_numpy(text, value, name)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._lift_symbol(text, value, name)
        if any(value is s for s in _SINGLETONS):
            self._line(f"if {text} is not {value!r}: return None")
            return value
        if kind in (int, float) or (kind in _VALUES and not _has_objects(value)):
            variable = self._temporary(text)
            self._line(
                f"if type({variable}) is not {self.constant(kind)} or {self._differs(variable, value)}: return None"
            )
            return value
        if kind in _TORCH_CONSTANTS:
            self._line(f"if {text} != {self.constant(value)}: return None")
            return value
        entry = self._variables.get(id(value))
        if entry is not None and not (kind is tuple and not value):
            self._line(f"if {text} is not {entry[1]}: return None")
            return value
        self._object(text, value, name)
        return value

    def _temporary(self, text: str) -> str:
        variable = f"v{self._count}"
        self._count += 1
        self._line(f"{variable} = {text}")
        return variable

    def _differs(self, variable: str, value: Any) -> str:
        # Equal values may differ: 0.0 and -0.0, range(3, 3) and range(0), slice(1) and slice(True).
        if (type(value) is float and (value != value or value == 0)) or type(value) in (complex, range, slice):
            return f"repr({variable}) != {repr(value)!r}"
        return f"{variable} != {self.text_of(value) if type(value) is not float else self.constant(value)}"

    def _lift(self, text: str, value: int | float, original: Any, name: str) -> Any:
        variable = self._temporary(text)
        kind = "int" if type(value) is int else "float"
        least = f"{-(2**63)} <= {variable} < {2**63}" if kind == "int" else f"{variable} - {variable} == 0.0"
        self._line(f"if type({variable}) is not {kind} or not {least}: return None")
        return self._new_number(variable, value, original, name)

    def _lift_numpy(self, text: str, value: Any, name: str) -> Any:
        variable = self._temporary(text)
        self._line(f"if type({variable}) is not {self.constant(type(value))}: return None")
        number = value.item()
        if not is_liftable(number):
            self._line(f"if {variable}.tobytes() != {self.constant(value.tobytes())}: return None")
            return value
        return self._new_number(f"{variable}.item()", number, value, name, variable)

    def _lift_symbol(self, text: str, value: torch.SymInt | torch.SymFloat, name: str) -> Any:
        """Lift a size of a graph that is recorded around this trace. No guard will read it again."""
        number = example(value)
        symbol = self.symbols.number(number, len(self.numbers), name)
        self.numbers.append(value)
        self.number_variables.append(text)
        return lifted(number, symbol)  # without a text, like the size of a tensor that the mod reads

    def _new_number(self, variable: str, value: int | float, original: Any, name: str, text: str = "") -> Any:
        symbol = self.symbols.number(value, len(self.numbers), name)
        self.numbers.append(value)
        self.number_variables.append(variable)
        return lifted(value, symbol, original, text or variable)

    def _object(self, text: str, value: Any, name: str) -> None:
        """Guard the kind of an object. What is read from it later is guarded then."""
        self._names[id(value)] = name
        if isinstance(value, Tensor):
            self._tensor(self._assign(value, text), value, name)
            return
        if isinstance(value, (type, types.ModuleType)) or _is_permanent(value):
            variable = self._assign(value, text)
            self._line(f"if {variable} is not {self.identity(value)}: return None")
            if isinstance(value, type) and value.__flags__ & HEAP_TYPE:
                self.check_bases(value)
            return
        variable = self._assign(value, text)
        if isinstance(value, types.FunctionType):
            code = self.constant(value.__code__)
            self._line(f"if {variable}.__code__ is not {code} and {variable}.__code__ != {code}: return None")
            return
        self._line(f"if type({variable}) is not {self.identity(type(value))}: return None")
        if isinstance(value, enum.Enum):
            self._line(f"if {variable} is not {self.identity(value)}: return None")
        elif isinstance(value, np.generic) and value.dtype.char != RECORD:
            self._line(f"if {variable}.dtype != {self.constant(value.dtype)}: return None")  # such as a unit of time
            self._line(f"if {variable}.tobytes() != {self.constant(value.tobytes())}: return None")
        elif isinstance(value, int | float | str | bytes):  # an instance of a derived class
            base = next(b for b in DERIVED if isinstance(value, b))
            text = f"{base.__name__}.__getnewargs__({variable}) != {self.constant(base.__getnewargs__(value))}"  # type: ignore[attr-defined]
            self._line(f"if {text}: return None")

    def _tensor(self, variable: str, value: Tensor, name: str) -> None:
        self.symbols.tensor(value, len(self.tensors), name)
        with torch._C.DisableTorchFunction():  # these reads are not part of the mod
            self._check_tensor(variable, value)
        self.tensors.append(value)
        self.tensor_variables.append(variable)

    def _check_tensor(self, variable: str, value: Tensor) -> None:
        checks = [
            f"type({variable}) is {self.identity(type(value))}",
            f"{variable}.dtype is {self.constant(value.dtype)}",
            f"{variable}.device == {self.constant(value.device)}",
            f"{variable}.requires_grad is {value.requires_grad}",
            f"{variable}.layout is {self.constant(value.layout)}",
        ]
        self._line(f"if not ({' and '.join(checks)}): return None")
        sizes = [f"s{i}" for i in range(value.dim())]
        tests = [f"{s} > 1" if n > 1 else f"{s} == {n}" for s, n in zip(sizes, map(example, value.shape), strict=True)]
        self._line(f"{''.join(s + ', ' for s in sizes) or '() '}= {variable}.shape")
        if tests and not self.reason:
            self.lines.append(f"if not ({' and '.join(tests)}): return None")


def _is_marshalled(value: Any) -> bool:
    """Return whether marshal writes types and values; of an array it writes only bytes."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_marshalled, value))
    if kind is dict:
        return all(map(_is_marshalled, value)) and all(map(_is_marshalled, value.values()))
    return value is None or kind in (bool, int, float, complex, str, bytes)


def _has_objects(value: Any) -> bool:
    """Return whether a slice ends at objects with `__index__`. Equal slices of the same objects may then differ."""
    if type(value) is not slice:
        return False
    parts = (getattr(value, name) for name in ENDS)
    return not all(part is None or type(part) is int for part in parts)


def _name_of(key: Any, owner: str) -> str:
    """Return a name for the item of an object with this name: the key, or windows_0 for windows[0]."""
    if isinstance(key, str):
        return key
    is_position = type(key) is int and key >= 0 and owner.isidentifier() and owner != "captured"
    return f"{owner}_{key}" if is_position else "captured"


def _is_permanent(value: Any) -> bool:
    """Return whether an object lives as long as the process: definitions in libraries, and C functions."""
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        owner = getattr(value, "__self__", None)
        return owner is None or isinstance(owner, (types.ModuleType, type))
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, np.ufunc)):
        return True
    if isinstance(value, type):
        return is_library_class(value)
    return isinstance(value, types.ModuleType) and is_library(value.__name__)


Guard = Callable[[Any], tuple[tuple[Tensor, ...], tuple[int | float, ...]] | None]


def guard_of(record: ReadLog, conditions: Sequence[str]) -> tuple[Guard, str]:
    """Return the guard of a finished record and its source; `conditions` are over t (tensors) and n (numbers)."""
    results = [f"t = ({''.join(v + ', ' for v in record.tensor_variables)})"]
    results.append(f"n = ({''.join(v + ', ' for v in record.number_variables)})")
    conditions = [f"if not ({c}): return None" for c in conditions]
    body = "\n        ".join((*record.lines, *results, *conditions, "return t, n"))
    source = f"def guard(mod):\n    try:\n        {body}\n    except Exception:\n        return None\n"
    scope: dict[str, Any] = {**record.constants, "math": math}  # which printed symbols may call
    exec(compile(source, "<guard of a mod>", "exec"), scope)
    return scope["guard"], source
