"""Operators: arithmetic, comparisons, items, truth and iteration, through the methods that Python would call."""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.trace.follow.attributes import BUILTIN_CONTAINERS, MISSING, Attributes, Refusal
from flexattn.trace.follow.lifted import LIFTED, calculate, compare, is_python_int, literal, symbolic
from flexattn.trace.follow.record import DERIVED, ENDS, MOST_LIFTED, RECORD

# Symbol in the source -> function, method, reflected method.
BINARY: dict[str, tuple[Callable[..., Any], str, str]] = {
    "+": (operator.add, "__add__", "__radd__"), "-": (operator.sub, "__sub__", "__rsub__"),
    "*": (operator.mul, "__mul__", "__rmul__"), "/": (operator.truediv, "__truediv__", "__rtruediv__"),
    "//": (operator.floordiv, "__floordiv__", "__rfloordiv__"), "%": (operator.mod, "__mod__", "__rmod__"),
    "**": (operator.pow, "__pow__", "__rpow__"), "@": (operator.matmul, "__matmul__", "__rmatmul__"),
    "<<": (operator.lshift, "__lshift__", "__rlshift__"), ">>": (operator.rshift, "__rshift__", "__rrshift__"),
    "&": (operator.and_, "__and__", "__rand__"), "|": (operator.or_, "__or__", "__ror__"),
    "^": (operator.xor, "__xor__", "__rxor__"),
}  # fmt: skip
IN_PLACE: dict[str, Callable[..., Any]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "//": operator.ifloordiv,
    "%": operator.imod, "**": operator.ipow, "@": operator.imatmul, "<<": operator.ilshift, ">>": operator.irshift,
    "&": operator.iand, "|": operator.ior, "^": operator.ixor,
}  # fmt: skip
COMPARE: dict[str, tuple[Callable[..., Any], str, str]] = {
    "<": (operator.lt, "__lt__", "__gt__"), "<=": (operator.le, "__le__", "__ge__"),
    ">": (operator.gt, "__gt__", "__lt__"), ">=": (operator.ge, "__ge__", "__le__"),
    "==": (operator.eq, "__eq__", "__eq__"), "!=": (operator.ne, "__ne__", "__ne__"),
}  # fmt: skip
UNARY: dict[str, tuple[Callable[..., Any], str]] = {
    "-": (operator.neg, "__neg__"), "+": (operator.pos, "__pos__"), "~": (operator.invert, "__invert__"),
}  # fmt: skip

_COMPARISONS = frozenset(method for _, method, _ in COMPARE.values())
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: all of Python's own C types
_NUMBERS = (bool, int, float, complex)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MOST_COMPARED = 32  # elements of a set or dict with which an object is compared under guard
# Hash methods of objects whose identity, or value of a builtin type, a guard has checked.
_HASHES = (
    object.__hash__, types.BuiltinFunctionType.__hash__, enum.Enum.__hash__, str.__hash__, bytes.__hash__, int.__hash__,
    float.__hash__,
)  # fmt: skip
_KEYED = (set, frozenset, dict)
_PLAIN: frozenset[type] = frozenset((
    int, float, bool, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
))  # fmt: skip
# Types of which equal values may be several objects: their guards check values, not identities.
_BY_VALUE: frozenset[type] = frozenset((
    int, float, complex, str, bytes, range, torch.Size, torch.device, torch.finfo, torch.iinfo,
))  # fmt: skip
_SMALL_INTS = range(-5, 257)  # of which Python has one object each
_PROTOCOL_OF_SEQUENCES = ("__len__", "__getitem__", "__iter__")
_TEXT_OF_TENSOR = (
    "formats a tensor as text. The mod runs once for all positions, on tensors without values: capture the text, or a "
    "Python number (n = t.item() outside of the mod). print(tensor) shows its shape and dtype."
)
# How a guard recomputes a number.
_TEMPLATES: dict[Callable[..., Any], str] = {
    **{function: f"({{}}) {symbol} ({{}})" for symbol, (function, _, _) in BINARY.items()},
    **{function: f"{symbol}({{}})" for symbol, (function, _) in UNARY.items()},
    abs: "abs({})", float: "float({})",
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Return whether C code can read only the value itself from it: numbers, strings, torch constants."""
    if type(value) is slice:
        return all(is_plain(getattr(value, name)) for name in ENDS)
    return type(value) in _PLAIN or isinstance(value, LIFTED) or (isinstance(value, np.generic) and not is_array(value))


def is_array(value: Any) -> bool:
    """Return whether a value is numpy's array, or a record, which is a view of an array."""
    return isinstance(value, np.ndarray) or (isinstance(value, np.generic) and value.dtype.char == RECORD)


class _InText:
    """An object in a text that C code formats. The methods that C code calls are called by `f`, under guard."""

    def __init__(self, f: Operators, value: Any) -> None:
        self.f = f
        self.value = value

    def __str__(self) -> str:
        return self.f.format(self.value, str, "")

    def __repr__(self) -> str:
        return self.f.format(self.value, repr, "")

    def __bytes__(self) -> bytes:
        self.f.unguarded(f"it formats an object of {type(self.value).__name__} as bytes")
        return bytes(self.value)

    def __int__(self) -> int:
        return literal(self.f.call(int, (self.value,)))

    def __index__(self) -> int:
        return self.f.as_index(self.value)

    def __float__(self) -> float:
        return literal(self.f.call(float, (self.value,)))


class Operators(Attributes):
    """Applies operators."""

    # Arguments of native code.

    def contents(self, value: Any) -> Any:
        """Return a user's container as a new container with the same items, each read under guard.

        Other values, and containers created by the mod, are returned unchanged. Long containers of plain data are
        literal.
        """
        kind = type(value)
        if kind not in BUILTIN_CONTAINERS or not self.record.has(value):
            return value
        if kind in (set, frozenset):
            self.keys(value)
            return kind(value)
        if len(value) > MOST_LIFTED and self.record.snapshot(value, value):
            return kind(value)
        if kind is dict:
            return {
                k: self.record.read_item(value, "{}[{}]", k, v)
                for k, v in zip(self.keys(value), value.values(), strict=True)
            }
        self.record.check(value, "len({}) == {}", len(value))
        return kind([self.record.read_item(value, "{}[{}]", i, v, "captured") for i, v in enumerate(value)])

    def keys(self, value: Any) -> list[Any]:
        """Return the keys of a dict, or the elements of a set, and guard them and their order."""
        keys = list(value)
        if not self.record.has(value):
            return keys
        if not all(map(is_plain, keys)):
            what = "the keys of a dict that are" if type(value) is dict else "a set of"
            self.unguarded(f"it reads {what} objects")
            return keys
        self.record.check(value, "list({}) == {}", keys)
        types_of_keys = list(map(type, keys))
        if not {str, bytes, type(None)}.issuperset(types_of_keys):  # 1, 1.0 and True are the same key
            self.record.check(value, "list(map(type, {})) == {}", types_of_keys)
        if any(isinstance(key, (float, complex, np.generic)) for key in keys):  # 0.0 and -0.0 are the same key
            self.record.check(value, "list(map(repr, {})) == {}", list(map(repr, keys)))
        return keys

    def deep_contents(self, value: Any) -> Any:
        """Return a value with all nested containers replaced by their contents."""
        kind = type(value)
        if kind in (set, frozenset):  # the set itself: a copy may have another order
            self.keys(value)
            return value
        value = self.contents(value)
        if kind in (list, tuple):
            return kind([self.deep_contents(v) for v in value])
        if kind is dict:
            return {k: self.deep_contents(v) for k, v in value.items()}
        if kind is slice:
            parts = [self.get_attribute(value, name) for name in ENDS]
            for part in parts:
                if isinstance(part, Tensor):
                    operator.index(part)  # raises a ModError, where torch would read the value
            return slice(*map(self.as_index, parts))
        return value

    def as_index(self, value: Any) -> Any:
        """Return what `operator.index` does for an object of the user; other values as Python's C code takes them."""
        if is_array(value):
            self.unguarded("it reads a numpy array")
        elif not isinstance(value, (*LIFTED, Tensor, int)) and not is_plain(value):
            method = self.special(value, "__index__")
            if isinstance(getattr(method, "__func__", None), types.FunctionType):
                value = self.returned(self.call(method, ()), "__index__", int)
        return self.for_python(value)

    def for_python(self, value: Any) -> Any:
        """Return a value for Python's C code: containers are read, numbers are literal."""
        return self._converted(self.deep_contents(value), literal)

    def for_native(self, value: Any) -> Any:
        """Return a value for code that may change it: the container itself, with literal numbers in it."""
        if self.record.has(value):
            return value
        match value:
            case list():
                value[:] = map(self.for_native, value)
            case dict():
                value.update({key: self.for_native(item) for key, item in value.items()})
            case _:
                return literal(value)
        return value

    def for_torch(self, value: Any) -> Any:
        """Return a value for a torch function: containers are read, numbers are symbolic."""
        return self._converted(self.deep_contents(value), self._symbolic)

    def _symbolic(self, value: Any) -> Any:
        """Return what a torch function receives for a part of its arguments."""
        kind = type(value)
        if is_plain(value) or isinstance(value, Tensor) or kind in (slice, set, frozenset):
            return symbolic(value)
        if is_array(value):
            self.unguarded("it reads a numpy array")
            with self.record.symbols.outside():
                return torch.as_tensor(value)
        overloads = self.class_attribute(kind, "__torch_function__") is not MISSING
        if isinstance(value, (list, tuple)) and not overloads and self._is_sequence_of_python(kind):
            return self.for_torch(self._sequence(value))
        if not overloads and (index := self.as_index(value)) is not value:
            return index
        is_torchs = kind.__module__.partition(".")[0] == "torch"
        if overloads or not (isinstance(value, DERIVED) or callable(value) or is_torchs):
            self.unguarded(f"it passes an object of {kind.__name__} to torch")
        return value

    def _is_sequence_of_python(self, cls: type) -> bool:
        """Return whether a class derived from list or tuple is read by C code like its base."""
        return not any(isinstance(self.class_attribute(cls, n), types.FunctionType) for n in _PROTOCOL_OF_SEQUENCES)

    def _sequence(self, value: Any) -> Any:
        """Return the items of an instance of a class derived from list or tuple, as a list or a tuple."""
        base: Any = list if isinstance(value, list) else tuple
        return base(self.call(base.__iter__, (value,)))

    def _converted(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return kind([self._converted(v, convert) for v in value])
        if kind is dict:
            return {self._converted(k, convert): self._converted(v, convert) for k, v in value.items()}
        if kind is torch.Size:
            sizes = tuple(map(convert, value))
            return torch.Size(sizes) if all(type(n) is int for n in sizes) else sizes
        return convert(value)  # elements of a set are literal

    def is_data(self, value: Any) -> bool:
        """Return whether a value is plain data or tensors, including the contents of containers created or read."""
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return all(map(self.is_data, value))
        if kind is dict:
            return all(map(self.is_data, value)) and all(map(self.is_data, value.values()))
        return is_plain(value) or isinstance(value, Tensor)

    # Binary and unary.

    def binary(self, symbol: str, x: Any, y: Any) -> Any:
        """Return `x <symbol> y`."""
        if symbol == "%" and type(x) in (str, bytes):
            return self._formatted(x, y)
        function, method, reflected = BINARY[symbol]
        native = self._native(function, x, y)
        if native is not MISSING:
            return native
        found = self._by_methods(x, y, method, reflected)
        if found is NotImplemented and symbol in ("+", "*"):
            found = self._of_sequences(symbol, x, y)
        if found is NotImplemented:
            raise TypeError(f"unsupported operand type(s) for {symbol}: {type(x).__name__!r} and {type(y).__name__!r}")
        return found

    def _of_sequences(self, symbol: str, x: Any, y: Any) -> Any:
        """Return a sequence plus one of a derived class, or times an object with `__index__`, or NotImplemented."""
        if symbol == "+":
            if not isinstance(y, type(x)) or type(y) is type(x):
                return NotImplemented
            if type(x) in (str, bytes):
                return type(x).__add__(x, y)
            return self.binary(symbol, x, self._sequence(y)) if type(x) in (list, tuple) else NotImplemented
        for values, count in ((x, y), (y, x)):
            if type(values) not in (str, bytes, list, tuple):
                continue
            is_derived = isinstance(count, int) and not is_plain(count)  # an IntEnum
            n = int.__index__(count) if is_derived else self.as_index(count)
            if n is not count:
                return self.binary(symbol, values, n)
        return NotImplemented

    def in_place(self, symbol: str, x: Any, y: Any) -> Any:
        """Return the new value of x after `x <symbol>= y`."""
        kind = type(x)
        if isinstance(x, Tensor):
            return IN_PLACE[symbol](x, self.for_torch(y))
        if kind in (list, dict, set):
            self.changes(x, "the contents")
            read = {"+": self.iterated, "*": self.as_index} if kind is list else {}
            y = read.get(symbol, self.deep_contents)(y)
            if self.record.has(y) and type(y) not in BUILTIN_CONTAINERS:
                self.unguarded(f"it changes a {kind.__name__} by an object of {type(y).__name__}")
            return IN_PLACE[symbol](x, self.kept_by(x, y))
        if not is_plain(x) and kind not in BUILTIN_CONTAINERS:
            function = self.special(x, BINARY[symbol][1].replace("__", "__i", 1))
            if function is not MISSING:
                found = self.call(function, (y,))
                if found is not NotImplemented:
                    return found
        return self.binary(symbol, x, y)

    def _has_data_keys(self, value: Any) -> bool:
        return type(value) not in _KEYED or all(map(self.is_data, value))

    def _native(self, function: Callable[..., Any], x: Any, y: Any) -> Any:
        """Return a function of two operands that C code may see; MISSING for other operands."""
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            if self._is_for_torch(x) and self._is_for_torch(y):
                return self.from_torch(function(self.for_torch(x), self.for_torch(y)))
            return MISSING
        if isinstance(x, LIFTED) or isinstance(y, LIFTED):
            if isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS) and self._is_exact(x) and self._is_exact(y):
                return self.calculate(function, x, y)
            if is_plain(x) and is_plain(y):
                return function(literal(x), literal(y))
        if is_plain(x) and is_plain(y):
            return function(x, y)
        if type(x) in _KEYED and not (self._has_data_keys(x) and self._has_data_keys(y)):
            self.unguarded(f"it combines {type(x).__name__}s of objects")
        containers = [type(v) in BUILTIN_CONTAINERS for v in (x, y)]
        if all(c or is_plain(v) for c, v in zip(containers, (x, y), strict=True)):
            x, y = self.contents(x), self.contents(y)
            return function(*(literal(v) if isinstance(v, LIFTED) else v for v in (x, y)))
        return MISSING

    def calculate(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return `function` of numbers, some of them lifted."""
        template = _TEMPLATES.get(function)
        if all(map(is_python_int, operands)) and function is not operator.truediv and function is not float:
            return calculate(function, *operands)
        result = function(*(o.original if isinstance(o, LIFTED) else o for o in operands))
        if template is None or not (type(result) is float or isinstance(result, np.generic)):
            return function(*map(literal, operands))
        return self.record.computed(template, operands, result)

    def _is_exact(self, value: Any) -> bool:
        return isinstance(value, LIFTED) or type(value) in _NUMBERS

    def _is_for_torch(self, value: Any) -> bool:
        return isinstance(value, (Tensor, *LIFTED)) or is_plain(value) or type(value) in BUILTIN_CONTAINERS

    def _by_methods(self, x: Any, y: Any, method: str, reflected: str) -> Any:
        """Call the methods of the operands in Python's order; return NotImplemented if none of them answers."""
        order = [(x, method, y), (y, reflected, x)]
        is_comparison = method in _COMPARISONS
        if type(x) is type(y) and not is_comparison:
            order.pop()
        elif type(x) is not type(y) and self.is_subclass(type(y), type(x)):
            own = self.class_attribute(type(y), reflected)
            if is_comparison or own is not self.class_attribute(type(x), reflected):
                order.reverse()
        for owner, name, other in order:
            if is_plain(owner) or type(owner) in BUILTIN_CONTAINERS:
                continue  # Python's own types return NotImplemented for unknown types
            function = self.special(owner, name)
            if function is MISSING or function is None:
                continue
            found = self.call(function, (other,))
            if found is not NotImplemented:
                return found
        return NotImplemented

    def is_subclass(self, cls: type, base: type) -> bool:
        """Return whether a class derives from another, and guard its bases."""
        self.record.assign_class(cls)
        return base in cls.__mro__

    def unary(self, symbol: str, x: Any) -> Any:
        """Return `-x`, `+x` or `~x`."""
        function, method = UNARY[symbol]
        if isinstance(x, LIFTED):
            return self.calculate(function, x)
        if is_plain(x) or isinstance(x, Tensor):
            return self.from_torch(function(x))
        found = self.special(x, method)
        if found is MISSING:
            raise TypeError(f"bad operand type for unary {symbol}: {type(x).__name__!r}")
        return self.call(found, ())

    def compare(self, symbol: str, x: Any, y: Any) -> Any:
        """Return the comparison `x <symbol> y`."""
        function, method, reflected = COMPARE[symbol]
        if (isinstance(x, LIFTED) or isinstance(y, LIFTED)) and self._is_exact(x) and self._is_exact(y):
            return compare(function, x, y)
        if type(x) is type(y) is slice or torch.Size in (type(x), type(y)):
            x, y = map(self._as_tuple, (x, y))
        if type(x) in BUILTIN_CONTAINERS and type(y) in BUILTIN_CONTAINERS:
            found = self._compare_containers(symbol, x, y)
        else:
            found = self._native(function, x, y)
        if found is not MISSING:
            return found
        by_identity = isinstance(x, type) and isinstance(y, type) and type(x).__eq__ is type.__eq__
        if (by_identity or (isinstance(x, _FUNCTIONS) and isinstance(y, _FUNCTIONS))) and symbol in ("==", "!="):
            return self.identical(x, y) is (symbol == "==")
        found = self._by_methods(x, y, method, reflected)
        if found is NotImplemented:
            if symbol in ("==", "!="):
                return self.identical(x, y) is (symbol == "==")
            raise TypeError(
                f"{symbol!r} not supported between instances of {type(x).__name__!r} and {type(y).__name__!r}"
            )
        return found

    def _as_tuple(self, value: Any) -> Any:
        """Return a slice or a torch.Size as a tuple of the numbers that comparisons read."""
        if type(value) is slice:
            return tuple([self.get_attribute(value, name) for name in ENDS])
        return tuple(value) if type(value) is torch.Size else value

    def _compare_containers(self, symbol: str, x: Any, y: Any) -> Any:
        if symbol in ("==", "!=") and type(x) is type(y) and type(x) in (list, tuple):
            x, y = self.contents(x), self.contents(y)
            same = len(x) == len(y) and all(map(self.is_equal, x, y))
            return same is (symbol == "==")
        x, y = self.for_python(x), self.for_python(y)
        if not (self.is_data(x) and self.is_data(y)):
            self.unguarded("it compares containers of objects")
        return COMPARE[symbol][0](x, y)

    def identical(self, x: Any, y: Any) -> bool:
        """Return `x is y`, guarded if either is a user's object."""
        kind = self.type_of(x)
        if isinstance(x, LIFTED) or isinstance(y, LIFTED):
            if self.type_of(y) is not kind:
                return False
            x, y = literal(x), literal(y)
        same = x is y
        if (kind in _BY_VALUE or issubclass(kind, np.generic)) and type(y) is kind:
            if x == y and not (kind is int and x in _SMALL_INTS):
                self.unguarded(f"it compares equal values of {kind.__name__} by `is`: write ==")
            return same
        plain = (type(None), bool, type(...), type(NotImplemented))
        if kind not in plain and type(y) not in plain:
            self.record.check_same(x, y, same)
        return same

    # Truth, items, iteration.

    def truth(self, value: Any) -> bool:
        """Return `bool(value)`."""
        if isinstance(value, LIFTED):
            return compare(operator.ne, value, 0)
        if is_plain(value) or isinstance(value, Tensor):
            return bool(value)
        if type(value) in BUILTIN_CONTAINERS:
            self.record.check(value, "bool({}) is {}", bool(value))
            return bool(value)
        method = self.special(value, "__bool__")
        if method is not MISSING:
            return self.returned(self.call(method, ()), "__bool__", bool)
        return self.special(value, "__len__") is MISSING or self.truth(self.length(value))

    def length(self, value: Any) -> int:
        """Return `len(value)`."""
        if isinstance(value, Tensor):
            return self.from_torch(value.shape[0]) if value.dim() else len(value)
        if is_plain(value):
            return len(value)
        if type(value) in BUILTIN_CONTAINERS:
            self.record.check(value, "len({}) == {}", len(value))
            return len(value)
        found = self.special(value, "__len__")
        if found is MISSING:
            raise TypeError(f"object of type {type(value).__name__!r} has no len()")
        length = self.returned(self.call(found, ()), "__len__", int)
        if self.compare("<", length, 0):
            raise ValueError("__len__() should return >= 0")
        return length

    def returned(self, value: Any, method: str, kind: type) -> Any:
        """Return the result of a method; raise TypeError if Python would not accept its type."""
        if not isinstance(value, kind):
            raise TypeError(f"{method} returned {type(value).__name__}, expected {kind.__name__}")
        return value

    def get_item(self, value: Any, key: Any) -> Any:
        """Return `value[key]`."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self.from_torch(value[self.for_torch(key)])
        if isinstance(key, Tensor) and (kind in (list, tuple, str, range)):
            return value[key]  # reads the tensor's value, which is rejected with the user's line
        if kind is torch.Size or is_plain(value):
            return value[self.as_index(key)]
        if kind is dict:
            return self.item_of_dict(value, key)
        if kind in (list, tuple):
            return self._item_of_sequence(value, self.for_python(key), "{}[{}]")
        if isinstance(value, type):
            found = self.special(value, "__getitem__")
            if found is MISSING:
                found = self.get_attribute(value, "__class_getitem__")
            return self.call(found, (key,))
        found = self.special(value, "__getitem__")
        if found is MISSING:
            raise TypeError(f"{kind.__name__!r} object is not subscriptable")
        return self.call(found, (key,))

    def item_of_dict(self, value: dict[Any, Any], key: Any, template: str = "{}[{}]") -> Any:
        """Return an item of a dict by dict.__getitem__; raise KeyError if it has none."""
        key = self.own_key(value, key)
        if not dict.__contains__(value, key):
            self.record.check(value, "not dict.__contains__({}, {})", key)
            raise KeyError(key)
        return self.record.read_item(value, template, key, dict.__getitem__(value, key))

    def own_key(self, container: Any, key: Any) -> Any:
        """Return the key of a dict, or the element of a set, that is equal to a key; or the key itself if none is.

        In a container that the mod made, hashes and comparisons of objects are guarded.
        """
        key, is_data = self.for_python(key), self.is_data(key)
        if self.record.has(container):
            if not is_data:
                self.check_key(key, container)
            return key
        # A larger container has passed this length, where an object in it makes the trace unguarded.
        if is_data and (len(container) > _MOST_COMPARED + 1 or all(map(self.is_data, container))):
            return key
        self.follow_hash(key)
        if len(container) > _MOST_COMPARED:
            self.unguarded(
                f"it looks up an object in a {type(container).__name__} of more than {_MOST_COMPARED} objects"
            )
            return key
        return next((own for own in container if self._is_same_key(own, key)), key)

    def follow_hash(self, key: Any, may_be_identity: bool = True) -> None:
        """Guard the hash of a key. That of an object is followed if its method is written in Python.

        may_be_identity: a hash of the object's identity is accepted too, because it is only used to find the key.
        """
        if self.is_data(key) or isinstance(key, (type, enum.Enum)):
            return
        method = self.class_attribute(type(key), "__hash__")
        if isinstance(method, types.FunctionType):
            literal(self.returned(self.call(self.special(key, "__hash__"), ()), "__hash__", int))
        elif method in (tuple.__hash__, frozenset.__hash__):
            is_derived = isinstance(key, tuple) and type(key) is not tuple
            elements = self._sequence(key) if is_derived else type(key).__iter__(key)
            for element in elements:
                self.follow_hash(literal(element), may_be_identity)
        elif method is not None and not (may_be_identity and method in _HASHES):
            self.unguarded(f"it hashes an object of {type(key).__name__}")

    def _is_same_key(self, own: Any, key: Any) -> bool:
        """Return whether two keys are one in a dict: equal, with equal hashes."""
        key = frozenset(key) if type(key) is set else key  # as `in`, `discard` and `remove` do
        if self.is_data(own) and self.is_data(key):
            return own in {key}
        if own is key:
            return self.identical(own, key)
        same_hash = hash(own) == hash(key)
        if type(own) is not type(key) and not same_hash:  # Python does not compare them
            return False
        try:
            return self.truth(self.compare("==", own, key)) and same_hash
        except Exception:
            if same_hash:
                raise
            return False  # the same

    def new_set(self, values: Iterable[Any], cls: type = set) -> Any:
        """Return a set, or a frozenset, of values."""
        made: set[Any] = set()
        for value in values:
            made.add(self.own_key(made, value))
        return made if cls is set else cls(made)

    def is_equal(self, x: Any, y: Any) -> bool:
        """Return `x is y or x == y`, as lists compare their items."""
        if x is y:
            return is_plain(x) or self.identical(x, y)
        return self.truth(self.compare("==", x, y))

    def check_key(self, key: Any, owner: Any) -> None:
        # The guard of a captured container looks up the object that it reads.
        if self.record.has(key) and self.record.has(owner) and not isinstance(key, tuple | frozenset):
            return
        if not self.is_data(key) and not isinstance(key, type):
            cls = type(key)
            if self.class_attribute(cls, "__hash__") not in _HASHES:
                self.unguarded(f"it looks up an object of {cls.__name__} in a dict by its own __hash__")

    def _item_of_sequence(self, value: Any, key: Any, template: str) -> Any:
        if isinstance(key, slice):
            return self.contents(value)[key]
        if isinstance(key, np.integer):
            key = int(key)
        if not isinstance(key, int):
            index = self.special(key, "__index__")
            if index is MISSING:
                return value[key]  # a TypeError
            key = self.for_python(self.call(index, ()))
        if not -len(value) <= key < len(value):
            self.record.check(value, "len({}) == {}", len(value))
        return self.record.read_item(value, template, key, list.__getitem__(value, key) if type(value) is list else
                                     tuple.__getitem__(value, key))  # fmt: skip

    def contains(self, container: Any, item: Any) -> bool:
        """Return `item in container`."""
        kind = type(container)
        if isinstance(container, Tensor):
            return self.for_torch(item) in container
        if kind is torch.Size or (kind is range and not is_plain(item)):
            return self._is_among(container, item)
        if is_plain(container):
            return self.for_python(item) in container
        if kind is dict:
            item = self.own_key(container, item)
            found = item in container
            self.record.check(container, "({1} in {0}) is {2}", item, found)
            return found
        if kind in BUILTIN_CONTAINERS:
            return self._is_among(self.contents(container), item)
        method = self.special(container, "__contains__")
        if method is not MISSING:
            return self.truth(self.call(method, (item,)))
        return self._is_among(list(self.iterate(container)), item)

    def _is_among(self, items: Any, item: Any) -> bool:
        if type(items) in (set, frozenset):
            return self.own_key(items, item) in items
        return any(self.is_equal(x, item) for x in items)

    def iterate(self, value: Any) -> Iterator[Any]:
        """Return `iter(value)`."""
        kind = type(value)
        if isinstance(value, Tensor):
            return iter([self.from_torch(v) for v in value])
        if is_plain(value):
            return iter(value)
        if kind in (dict, set, frozenset) and self.record.has(value):
            return iter(self.keys(value))
        if kind in BUILTIN_CONTAINERS:
            if kind in (set, frozenset) and len(value) > 1 and not all(map(self._has_a_fixed_hash, value)):
                self.unguarded("it reads the order of a set of objects")
            return iter(self.contents(value))
        if isinstance(value, types.GeneratorType):
            if self.record.has(value):
                self.unguarded("it takes values of a captured generator")
            return value
        if self._is_native_iterator(value):
            return value
        method = self.special(value, "__iter__")
        if method is not MISSING:
            return self.call(method, ())
        if self.special(value, "__getitem__") is not MISSING:
            return self._by_position(value)
        raise TypeError(f"{kind.__name__!r} object is not iterable")

    def _has_a_fixed_hash(self, value: Any) -> bool:
        """Return whether an element is placed in a set by what a guard checks: its value, or its identity."""
        if isinstance(value, (type, enum.Enum)):
            return self.class_attribute(type(value), "__hash__") in (type.__hash__, *_HASHES)
        return self.is_data(value) and not any(self._tensors(value))

    def _by_position(self, value: Any) -> Iterator[Any]:
        position = 0
        while True:
            try:
                yield self.get_item(value, position)
            except IndexError:
                return
            position += 1

    def _is_native_iterator(self, value: Any) -> bool:
        return bool(type(value).__flags__ & _IMMUTABLE_TYPE) and hasattr(type(value), "__next__")

    def next(self, iterator: Any) -> Any:
        """Return `next(iterator)`; raise StopIteration at its end."""
        if self._is_native_iterator(iterator):
            if self.record.has(iterator):
                self.unguarded("it takes values of a captured iterator")
            return next(iterator)
        method = self.special(iterator, "__next__")
        if method is MISSING:
            raise TypeError(f"{type(iterator).__name__!r} object is not an iterator")
        return self.call(method, ())

    def items(self, value: Any) -> Iterator[Any]:
        """Yield the items of a `for` loop over `value`."""
        iterator = self.iterate(value)
        while True:
            try:
                item = self.next(iterator)
            except StopIteration:
                return
            yield item

    def iterated(self, value: Any) -> list[Any]:
        """Return the items of an iterable."""
        return list(self.items(value))

    # Changes.

    def changes(self, value: Any, what: str, may_end: bool = False) -> None:
        if self.record.has(value):
            self.unguarded(f"it changes {what} of a captured object of {type(value).__name__}", may_end)

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        """Yield the tensors in nested containers."""
        if type(value) in BUILTIN_CONTAINERS:
            for item in value.values() if type(value) is dict else value:
                yield from self._tensors(item)
        elif isinstance(value, Tensor):
            yield value

    def kept_by(self, owner: Any, value: Any) -> Any:
        """Return the value as an object stores it: captured objects, which outlive the mod, store plain numbers."""
        if not self.record.has(owner):
            return value
        if not all(map(self.record.has, self._tensors(value))):
            raise Refusal(
                f"keeps a tensor that it computes in a captured object of {type(owner).__name__}. The mod runs once "
                f"for all positions, on tensors without values: compute the tensor before the call, and capture it."
            )
        return self._converted(value, lambda v: v.original if isinstance(v, LIFTED) else v)

    def set_attribute(self, value: Any, name: str, new: Any) -> None:
        """Do `value.name = new`."""
        own = getattr(value, "__dict__", {})
        self.changes(value, f"the attribute {name!r}", may_end=own.get(name) is None)
        new = self.kept_by(value, new)
        method = self.class_attribute(type(value), "__setattr__")
        if isinstance(method, types.FunctionType):
            self.call(method, (value, name, new))
            return
        of_class = self.class_attribute(type(value), name)
        if isinstance(of_class, property) and of_class.fset is not None:
            self.call(of_class.fset, (value, new))
            return
        setattr(value, name, new)

    def delete_attribute(self, value: Any, name: str) -> None:
        """Do `del value.name`."""
        self.changes(value, f"the attribute {name!r}")
        delattr(value, name)

    def set_item(self, value: Any, key: Any, new: Any) -> None:
        """Do `value[key] = new`."""
        if isinstance(value, Tensor):
            value[self.for_torch(key)] = self.for_torch(new)
            return
        self.changes(value, "an item", may_end=type(value) is dict and self.for_python(key) not in value)
        new = self.kept_by(value, new)
        if type(value) in BUILTIN_CONTAINERS:
            value[self.own_key(value, key) if type(value) is dict else self.as_index(key)] = new
            return
        self.call(self.special(value, "__setitem__"), (key, new))

    def delete_item(self, value: Any, key: Any) -> None:
        """Do `del value[key]`."""
        self.changes(value, "an item")
        if type(value) in BUILTIN_CONTAINERS:
            del value[self.own_key(value, key) if type(value) is dict else self.as_index(key)]
            return
        self.call(self.special(value, "__delitem__"), (key,))

    # Text.

    def format(self, value: Any, conversion: Callable[[Any], str] | None, spec: str) -> str:
        """Return the text of a value in an f-string."""
        if conversion is None and type(value) is str and not spec:
            return value
        if not is_plain(value) and type(value) not in BUILTIN_CONTAINERS:
            return self._format_object(value, conversion, spec)
        value = self._in_text(value)
        return format(conversion(value) if conversion is not None else value, spec)

    def _formatted(self, text: Any, value: Any) -> Any:
        """Return `text % value`."""
        given = self._in_text(self._sequence(value) if isinstance(value, tuple) else value)
        is_object = isinstance(given, _InText) and not isinstance(value, DERIVED)
        if is_object and self.class_attribute(type(value), "__getitem__") is not MISSING:  # a mapping
            self.unguarded(f"it formats an object of {type(value).__name__} as text")
            given = value
        return text % given

    def _in_text(self, value: Any) -> Any:
        """Return a value for C code that formats it: containers are read, objects are formatted under guard."""
        return self._converted(self.deep_contents(value), self._part_of_text)

    def _part_of_text(self, value: Any) -> Any:
        self.refuse_text_of_tensors(value)
        if self.is_data(value):
            return literal(value)
        if type(value) in (set, frozenset):
            self.unguarded("it formats a set of objects as text")
            return value
        return _InText(self, value)

    def refuse_text_of_tensors(self, value: Any) -> None:
        if any(True for _ in self._tensors(value)):
            raise Refusal(_TEXT_OF_TENSOR)

    def _format_object(self, value: Any, conversion: Callable[[Any], str] | None, spec: str) -> str:
        self.refuse_text_of_tensors(value)
        if conversion is None and isinstance(self.class_attribute(type(value), "__format__"), types.FunctionType):
            return self.returned(self.call(self.special(value, "__format__"), (spec,)), "__format__", str)
        names = ("__str__", "__repr__") if conversion is str or (conversion is None and not spec) else ()
        names = ("__repr__",) if conversion in (repr, ascii) else names
        is_known = isinstance(value, type)
        for name in names:
            method = self.class_attribute(type(value), name)
            if isinstance(method, types.FunctionType):
                text = self.returned(self.call(method, (value,)), name, str)
                text = text.encode("ascii", "backslashreplace").decode() if conversion is ascii else text
                return format(text, spec)
            if method is not object.__str__:  # object.__str__ calls __repr__
                is_known |= isinstance(value, DERIVED) and getattr(method, "__objclass__", None) in DERIVED
                break
        if isinstance(value, BaseException) and not self.record.has(value):
            is_known |= self.is_data(self._in_text(value.args))
        if not is_known:
            self.unguarded(f"it formats an object of {type(value).__name__} as text")
        return format(conversion(value) if conversion is not None else value, spec)
