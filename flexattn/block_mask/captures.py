"""Captures: everything that a callable reaches by name (closures, globals, attributes...), as a key and as leaves.

Used to move a mask to another device and to flatten it as a pytree. `survey` finds the tensors and numbers that a
callable reaches, its *leaves*. Everything else (code, strings, flags, structure) goes into the key. `substitute`
rebuilds the callable around other tensors. It copies what holds a leaf, so that later changes of a number do not reach
the copy, and never modifies the user's objects. What a mod reads while it runs, and whether a trace is still valid, is
decided by `trace/follow`.
"""

from __future__ import annotations

import copy as copying
import dis
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import UnsupportedError, message
from flexattn.graph.frozen import FrozenMod
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.subclasses import is_plain
from flexattn.trace.follow.libraries import OUR_MODS

Place = tuple[str, Any]  # location of a child: ("cell", 0), ("global", "table"), ("attribute", "scale"), ("item", 2)...
Slot = tuple[Place, Any, frozenset[str], bool]  # place, child, names read by the code around it, keep numbers literal

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "sympy", "flexattn"}
# Code that calls one of these can read values that no search by name finds.
_OPAQUE_NAMES = frozenset(
    ("getattr", "eval", "exec", "globals", "locals", "vars", "__dict__", "__import__", "__getattribute__")
)
_LITERALS: frozenset[type] = frozenset(
    (
        str, bytes, bool, type(None), complex, range, type(...), types.CodeType, type(NotImplemented), torch.dtype,
        torch.device, torch.layout, torch.Size, torch.memory_format, torch.finfo, torch.iinfo,
    )
)  # fmt: skip
# Names that operators, calls and indexing use implicitly.
_UNNAMED = frozenset((
    "__call__", "forward", "__getitem__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__eq__",
    "__truediv__", "__neg__", "__len__", "__iter__", "__bool__", "__lt__", "__le__", "__gt__", "__ge__", "__getattr__",
))  # fmt: skip
NUMBER_OF_NUMPY = "numpy"  # the first item of its part of a key
_MOST_LIFTED = 64  # numbers of longer containers stay literals, to limit the number of kernel arguments


@frozen(eq=False)
class CodeFacts:
    """What a code object can read. Equal code shares one object, so the object represents the code in keys."""

    code: types.CodeType
    global_names: tuple[str, ...]  # read from globals, here or in nested code
    names: frozenset[str]  # every attribute and global name
    widest: frozenset[str]  # the same, and names used implicitly
    bare: frozenset[str]  # variables with uses other than `variable.name`
    followed: bool  # False: reads names that are only known at run time

    @cached_property
    def cells(self) -> tuple[tuple[Place, frozenset[str]], ...]:
        """For each closure variable, its place, and the names that the code may read from its value."""
        return tuple((("cell", i), self.names_of(name)) for i, name in enumerate(self.code.co_freevars))

    def names_of(self, variable: str) -> frozenset[str]:
        """Return the names that the code may read from the value of a variable."""
        return self.widest if variable in self.bare else self.names

    @property
    def names_of_self(self) -> frozenset[str]:
        """Return the names that a method may read from its first argument."""
        return self.names_of(self.code.co_varnames[0]) if self.code.co_varnames else self.names


@dataclass
class Survey:
    """The key of a callable, and its leaves in the order in which `substitute` visits them."""

    key: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # each object once
    numbers: list[int | float] = field(default_factory=list)
    followed: bool = True  # False: something may have been missed, trace at each call
    wanted: dict[int, frozenset[str]] = field(default_factory=dict)  # by id: the names that any code reads of an object
    complete: bool = True  # False: an object was met again with names that were not searched the first time
    _seen: dict[int, int] = field(default_factory=dict)
    _tensor_positions: dict[int, int] = field(default_factory=dict)

    def visit(self, value: Any, names: frozenset[str], literal: bool) -> None:
        kind = type(value)
        if kind is float or kind is int:
            if literal or not _is_liftable(value):
                self.key.append((kind, repr(value)))
            else:
                self.key.append(kind)
                self.numbers.append(value)
        elif kind in _LITERALS:
            self.key.append(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        else:
            self._composite(value, names, literal)

    def _tensor(self, value: Tensor) -> None:
        position = self._tensor_positions.setdefault(id(value), len(self.tensors))
        self.key.append(position)
        if position == len(self.tensors):
            self.tensors.append(value)
            if not is_plain(value):  # it may not even have a shape
                return
            shape = tuple([2 if s > 1 else s for s in value.shape])
            self.key += (value.dtype, value.device, value.requires_grad, shape)

    def _composite(self, value: Any, names: frozenset[str], literal: bool) -> None:
        wanted = self.wanted.get(id(value))
        if wanted is not None:
            names |= wanted
        seen = self._seen.get(id(value))
        if seen is not None:
            self.key.append(("again", seen))
            if names != wanted and type(value) is not types.FunctionType:
                self.wanted[id(value)] = names
                self.complete = False
            return
        self._seen[id(value)] = len(self._seen)
        self.wanted[id(value)] = names
        head, slots = open_value(value, names)
        if slots is None:
            self.followed = False
            return
        self.key.append(head)
        if type(value) is types.FunctionType:
            self.followed = self.followed and head[0].followed
        for _, child, child_names, child_literal in slots:
            self.visit(child, child_names, literal or child_literal)


def survey(mod: Callable[..., Any]) -> Survey:
    """Find everything that `mod` reaches."""
    found = Survey()
    found.visit(mod, _UNNAMED, False)
    while not found.complete:  # two methods of one object read different attributes: search for the names of both
        found = Survey(wanted=found.wanted)
        found.visit(mod, _UNNAMED, False)
    return found


def _is_liftable(value: int | float) -> bool:
    return math.isfinite(value) if type(value) is float else -(2**63) <= value < 2**63


def open_value(value: Any, names: frozenset[str]) -> tuple[Any, Sequence[Slot] | None]:
    """Return the part of `value` that belongs to the key, and its children; None if children cannot be found."""
    opener = _OPENERS.get(type(value))
    if opener is not None:
        return opener(value, names)
    if isinstance(value, types.ModuleType):
        return _open_module(value, names)
    if isinstance(value, type):
        return _open_class(value, names)
    if isinstance(value, enum.Enum) or type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins"):
        return _open_foreign(value, names)
    for base in (dict, list, tuple):
        if isinstance(value, base):
            return _OPENERS[base](value, names)
    return _open_instance(value, names) if _is_copyable(type(value)) else (None, None)


@lru_cache(4096)
def code_facts(code: types.CodeType) -> CodeFacts:
    """Find the names that `code` and the code nested in it read."""
    global_names: dict[str, None] = {}
    names: set[str] = set()
    bare: set[str] = set()
    followed = True
    for part in _nested_code(code):
        names.update(part.co_names)
        instructions = list(dis.get_instructions(part))
        for instruction, following in zip(instructions, (*instructions[1:], None), strict=True):
            bare.update(_bare(instruction, following))
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                global_names[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME" and instruction.argval.partition(".")[0] not in _LIBRARIES:
                followed = False
    followed = followed and not names & _OPAQUE_NAMES
    return CodeFacts(code, tuple(global_names), frozenset(names), _UNNAMED.union(names), frozenset(bare), followed)


def _bare(instruction: dis.Instruction, following: dis.Instruction | None) -> Sequence[str]:
    """Return the variables that an instruction loads for uses other than reading an attribute."""
    opname = instruction.opname
    if "LOAD_FAST" not in opname and opname not in ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"):
        return ()
    loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    is_read = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return loaded[:-1] if is_read else loaded


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)


_EMPTY = "<empty cell>"
_IMMUTABLE = (tuple, slice, types.MethodType, functools.partial, FrozenMod)  # a copy is made with its children


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _open_function(function: types.FunctionType, _: frozenset[str]) -> tuple[Any, list[Slot]]:
    facts = code_facts(function.__code__)
    slots: list[Slot] = []
    if function.__closure__:
        cells = zip(facts.cells, function.__closure__, strict=True)
        slots += [(place, _contents(cell), names, False) for (place, names), cell in cells]
    foreign: list[Any] = []
    if not _is_library(function.__module__):
        scope = function.__globals__
        for name in facts.global_names:
            if name not in scope:
                continue
            if _is_foreign(scope[name], function.__module__):
                foreign.append(scope[name])
            else:
                slots.append((("global", name), scope[name], facts.names_of(name), False))
    names = facts.widest
    if function.__defaults__:
        slots += [(("default", i), value, names, False) for i, value in enumerate(function.__defaults__)]
    if function.__kwdefaults__:
        slots += [(("keyword", k), value, names, False) for k, value in function.__kwdefaults__.items()]
    if function.__dict__:
        slots += [(("attribute", k), v, names, False) for k, v in function.__dict__.items() if k in names]
    return (facts, *foreign), slots


@lru_cache(1024)
def _is_library(module: str | None) -> bool:
    if module is None or module == "__main__":
        return False
    return module.partition(".")[0] in _LIBRARIES and not module.startswith(OUR_MODS)


def _is_foreign(value: Any, module: str | None) -> bool:
    """Return whether a global of `module` is code of another installed package, which is treated as a constant."""
    if not isinstance(value, (types.FunctionType, types.ModuleType, type)):
        return False
    owner = (value.__name__ if isinstance(value, types.ModuleType) else value.__module__) or ""
    package = owner.partition(".")[0]
    return package != (module or "").partition(".")[0] and _is_installed(package)


@lru_cache(1024)
def _is_installed(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _open_method(method: types.MethodType, names: frozenset[str]) -> tuple[Any, list[Slot]]:
    function = method.__func__
    is_python = isinstance(function, types.FunctionType)
    read = code_facts(function.__code__).names_of_self if is_python else names | _UNNAMED
    return "method", [(("function", None), function, names, False), (("self", None), method.__self__, read, False)]


def _open_partial(value: functools.partial[Any], names: frozenset[str]) -> tuple[Any, list[Slot]]:
    names |= _UNNAMED
    if isinstance(value.func, types.FunctionType):
        names |= code_facts(value.func.__code__).names
    slots: list[Slot] = [(("function", None), value.func, names, False)]
    slots += [(("argument", i), a, names, False) for i, a in enumerate(value.args)]
    slots += [(("keyword", k), a, names, False) for k, a in value.keywords.items()]
    return ("partial", len(value.args), *value.keywords), slots


def _open_sequence(value: Sequence[Any], names: frozenset[str]) -> tuple[Any, list[Slot]]:
    long = len(value) > _MOST_LIFTED
    return (type(value), len(value)), [(("item", i), child, names, long) for i, child in enumerate(value)]


def _open_dict(value: dict[Any, Any], names: frozenset[str]) -> tuple[Any, list[Slot]]:
    long = len(value) > _MOST_LIFTED
    return (type(value), *value), [(("item", k), child, names, long) for k, child in value.items()]


def _open_set(value: Any, names: frozenset[str]) -> tuple[Any, list[Slot] | None]:
    plain = all(type(v) in _LITERALS or type(v) in (int, float) for v in value)
    return (type(value), frozenset(map(repr, value))), [] if plain else None


def _open_slice(value: slice, names: frozenset[str]) -> tuple[Any, list[Slot]]:
    return slice, [((part, None), getattr(value, part), names, True) for part in ("start", "stop", "step")]


def _open_frozen(mod: FrozenMod, names: frozenset[str]) -> tuple[Any, list[Slot]]:
    slots: list[Slot] = [(("item", i), t, names, False) for i, t in enumerate(mod.captures)]
    return (FrozenMod, mod.graph, repr(mod.numbers)), slots


def _open_module(module: types.ModuleType, names: frozenset[str]) -> tuple[Any, list[Slot]]:
    if _is_library(module.__name__):
        return module, []
    scope = vars(module)
    return module, [(("attribute", n), scope[n], names | _UNNAMED, False) for n in sorted(names & scope.keys())]


def _open_class(cls: type, names: frozenset[str]) -> tuple[Any, list[Slot]]:
    """Classes are never copied, so their numbers are literals, and their tensors cannot be replaced."""
    return cls, _class_slots(cls, names) if not _is_library(cls.__module__) else []


def _class_slots(cls: type, names: frozenset[str]) -> list[Slot]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not _is_library(base.__module__):
            found.update({n: vars(base)[n] for n in sorted(names) if n in vars(base)})
    slots: list[Slot] = []
    for name, value in found.items():
        value = getattr(value, "__func__", getattr(value, "fget", value))  # static and class methods, properties
        value = getattr(value, "func", value) if isinstance(value, functools.cached_property) else value
        slots.append((("class attribute", name), value, names | _UNNAMED, True))
    return slots


def _open_foreign(value: Any, names: frozenset[str]) -> tuple[Any, list[Slot] | None]:
    """Open an object of torch, numpy or Python: constants are literals, modules and partials are supported."""
    if isinstance(value, torch.nn.Module):
        return _open_instance(value, names)
    if isinstance(value, (enum.Enum, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return value, []
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return (NUMBER_OF_NUMPY, type(value)), [(("numpy", None), value.item(), names, False)]
    if isinstance(value, types.BuiltinFunctionType):
        return (value, []) if isinstance(value.__self__, (types.ModuleType, type, type(None))) else (None, None)
    if type(value).__name__ in ("method_descriptor", "wrapper_descriptor", "ufunc", "getset_descriptor"):
        return value, []
    return None, None


def _open_instance(value: Any, names: frozenset[str]) -> tuple[Any, list[Slot] | None]:
    cls = type(value)
    names = _names_of_methods(cls, names)
    attributes = dict(_attributes(value, names))
    if not attributes and not hasattr(value, "__dict__") and not _has_slots(cls):
        return None, None
    slots: list[Slot] = [(("attribute", k), v, names | _UNNAMED, False) for k, v in attributes.items()]
    return (cls, *attributes), slots + _class_slots(cls, names)


def _is_copyable(cls: type) -> bool:
    """Return whether instances can be created without __init__. Compiled classes keep state elsewhere."""
    if cls is types.SimpleNamespace:
        return True
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return not _is_library(cls.__module__) or issubclass(cls, torch.nn.Module)


def _has_slots(cls: type) -> bool:
    return any("__slots__" in vars(base) for base in cls.__mro__) and not _is_library(cls.__module__)


def _names_of_methods(cls: type, names: frozenset[str]) -> frozenset[str]:
    """Add to `names` the names that the methods among them read, transitively."""
    while True:
        wider = names
        for value in [vars(base)[n] for base in cls.__mro__ for n in names & vars(base).keys()]:  # super() reads others
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(value, types.FunctionType) and not _is_library(value.__module__):
                wider |= code_facts(value.__code__).names_of_self
        if wider == names:
            return names
        names = wider


def _attributes(value: Any, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an instance that code reading `names` can read, in a fixed order."""
    own = getattr(value, "__dict__", {})
    for name in sorted(names & own.keys()):
        yield name, own[name]
    if isinstance(value, torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            for name in sorted(names & own[table].keys()):
                yield name, own[table][name]
        if isinstance(value, (torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.ModuleDict, torch.nn.Sequential)):
            for table in ("_parameters", "_modules"):
                for name in own[table].keys() - names:
                    yield name, own[table][name]
    for name, member in _members(type(value)).items():
        if name in names and (found := _member_value(member, value)) is not _EMPTY:
            yield name, found


def _members(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class, by the names of attributes: `__n` in class A is `_A__n`."""
    with_slots = [vars(base) for base in reversed(cls.__mro__) if "__slots__" in vars(base)]
    return {name: m for scope in with_slots for name, m in scope.items() if isinstance(m, types.MemberDescriptorType)}


def _member_value(member: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return member.__get__(owner)
    except AttributeError:
        return _EMPTY


_OPENERS: dict[type, Callable[[Any, frozenset[str]], tuple[Any, list[Slot] | None]]] = {
    types.FunctionType: _open_function,
    types.MethodType: _open_method,
    functools.partial: _open_partial,
    list: _open_sequence,
    tuple: _open_sequence,
    dict: _open_dict,
    set: _open_set,
    frozenset: _open_set,
    slice: _open_slice,
    FrozenMod: _open_frozen,
}


class Reached:
    """The objects that a callable reaches, by id: each with its slots, and from which objects it is reached."""

    def __init__(self, mod: Callable[..., Any], wanted: dict[int, frozenset[str]]) -> None:
        self.opened: dict[int, tuple[Any, Sequence[Slot]]] = {}
        self.owners: dict[int, list[int]] = {}
        self.of_numbers: list[int] = []  # ids of objects that have a lifted number
        todo: list[tuple[Any, frozenset[str], bool]] = [(mod, _UNNAMED, False)]
        while todo:
            value, names, literal = todo.pop()
            if id(value) in self.opened or isinstance(value, Tensor):
                continue
            slots = open_value(value, wanted.get(id(value), names))[1] or ()
            self.opened[id(value)] = value, slots
            for _, child, child_names, child_literal in slots:
                is_literal = literal or child_literal
                self.owners.setdefault(id(child), []).append(id(value))
                if type(child) in (int, float) and not is_literal and _is_liftable(child):
                    self.of_numbers.append(id(value))
                todo.append((child, child_names, is_literal))

    def holders(self, leaves: Iterable[int]) -> set[int]:
        """Return the ids of the leaves, and of what they are reached from."""
        found, todo = set(leaves), list(leaves)
        while todo:
            owners = [o for o in self.owners.get(todo.pop(), ()) if o not in found]
            found.update(owners)
            todo += owners
        return found

    def check_replaceable(self, tensors: Iterable[int]) -> None:
        """Raise UnsupportedError if a tensor to be replaced is reached through a class, which is never copied."""
        holders = self.holders(tensors)
        for value, slots in self.opened.values():
            for (kind, name), child, *_ in slots:
                if kind == "class attribute" and id(child) in holders:
                    owner = value if isinstance(value, type) else type(value)
                    found = f"a tensor that it reaches through the attribute {name} of the class {owner.__qualname__}"
                    expected = "tensors that a copy of the mask can replace"
                    fix = "Keep it in a variable that mask_mod itself reads, or in an attribute of an instance."
                    raise UnsupportedError(message("mask_mod", found, expected, fix))


class Substitution:
    """Copies what holds a leaf, with other tensors."""

    def __init__(self, reached: Reached, tensors: dict[int, Any]) -> None:
        self._opened = reached.opened
        self._holders = reached.holders([*tensors, *reached.of_numbers])
        self._copies: dict[int, Any] = dict(tensors)

    def visit(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) not in self._holders or isinstance(value, (Tensor, type)):
            return value
        slots = self._opened[id(value)][1]
        copy = None if isinstance(value, _IMMUTABLE) else _blank(value)
        if copy is not None:  # cycles refer to it before it is filled
            self._copies[id(value)] = copy
        children = {place: self.visit(child) for place, child, *_ in slots if place[0] != "class attribute"}
        return self._copies.setdefault(id(value), _fill(value, copy, children))


def substitute(mod: Callable[..., Any], found: Survey, tensors: Sequence[Any]) -> Any:
    """Return a copy of `mod` with other tensors, in the order of its survey."""
    reached = Reached(mod, found.wanted)
    pairs = list(zip(found.tensors, tensors, strict=True))
    reached.check_replaceable([id(old) for old, new in pairs if new is not old])
    return Substitution(reached, {id(old): new for old, new in pairs}).visit(mod)


def _blank(value: Any) -> Any:
    """Return a copy to fill later."""
    if isinstance(value, types.FunctionType):
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        copy = types.FunctionType(value.__code__, dict(value.__globals__), value.__name__, None, cells or None)
        copy.__qualname__, copy.__module__ = value.__qualname__, value.__module__
        return copy
    if isinstance(value, types.ModuleType):
        return types.ModuleType(value.__name__)
    if isinstance(value, (list, dict)) or type(value).__module__ == "numpy":
        return copying.copy(value)
    return types.SimpleNamespace() if type(value) is types.SimpleNamespace else object.__new__(type(value))


def _fill(value: Any, copy: Any, children: dict[Place, Any]) -> Any:
    """Fill the copy of `value` with its children, and return it."""
    match value:
        case types.FunctionType():
            return _fill_function(value, copy, children)
        case types.MethodType():
            return types.MethodType(children["function", None], children["self", None])
        case functools.partial():
            arguments = [children["argument", i] for i in range(len(value.args))]
            keywords = {k: children["keyword", k] for k in value.keywords}
            return functools.partial(children["function", None], *arguments, **keywords)
        case FrozenMod():
            return value.with_captures(list(children.values()))
        case types.ModuleType():
            vars(copy).update(vars(value))
            vars(copy).update({name: child for (_, name), child in children.items()})
            return copy
        case slice():
            return slice(*children.values())
        case tuple():
            return _filled_tuple(value, list(children.values()))
        case list() | dict():
            put: Any = list.__setitem__ if isinstance(value, list) else dict.__setitem__
            for (_, key), child in children.items():
                put(copy, key, child)
            return copy
        case _ if ("numpy", None) in children:
            return copy
    return _fill_instance(value, copy, children)


def _filled_tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Return a tuple of the same class. Its own __new__ may take other arguments."""
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # a struct sequence of C, which only its own type creates
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        made.__dict__.update(vars(value))
    return made


def _fill_function(value: types.FunctionType, copy: Any, children: dict[Place, Any]) -> Any:
    defaults: list[Any] = list(value.__defaults__ or ())
    copy.__dict__.update(value.__dict__)
    keywords: dict[str, Any] = dict(value.__kwdefaults__ or {})
    for (kind, at), child in children.items():
        match kind:
            case "cell" if child is not _EMPTY:
                copy.__closure__[at].cell_contents = child
            case "global":
                copy.__globals__[at] = child
            case "default":
                defaults[at] = child
            case "keyword":
                keywords[at] = child
            case "attribute":
                vars(copy)[at] = child
    copy.__defaults__, copy.__kwdefaults__ = tuple(defaults) or None, keywords or None
    return copy


def _fill_instance(value: Any, copy: Any, children: dict[Place, Any]) -> Any:
    tables = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
    own = dict(getattr(value, "__dict__", {}))
    own.update({table: dict(own[table]) for table in tables})
    members = _members(type(value))
    for member in members.values():
        if (found := _member_value(member, value)) is not _EMPTY:
            member.__set__(copy, found)
    for (_, name), child in children.items():
        scope = next((own[table] for table in tables if name in own[table]), own)
        if name in scope:
            scope[name] = child
        else:
            members[name].__set__(copy, child)
    if own:
        object.__getattribute__(copy, "__dict__").update(own)
    return copy
