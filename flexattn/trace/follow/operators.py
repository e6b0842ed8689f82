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
from flexattn.trace.follow.record import ENDS, MOST_LIFTED

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
_HASHES = (object.__hash__, enum.Enum.__hash__, str.__hash__, bytes.__hash__, int.__hash__, float.__hash__)
_PLAIN: frozenset[type] = frozenset((
    int, float, bool, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
))  # fmt: skip
# How a guard recomputes a number.
_TEMPLATES: dict[Callable[..., Any], str] = {
    **{function: f"({{}}) {symbol} ({{}})" for symbol, (function, _, _) in BINARY.items()},
    **{function: f"{symbol}({{}})" for symbol, (function, _) in UNARY.items()},
    abs: "abs({})", float: "float({})",
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Return whether C code can read only the value itself from it: numbers, strings, torch constants."""
    return type(value) in _PLAIN or isinstance(value, (*LIFTED, np.generic))


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
            if all(map(is_plain, value)):
                self.record.check(value, "{} == {}", kind(value))
                self._check_types(value, "sorted(map(repr, {})) == {}", sorted(map(repr, value)))
            elif value:
                self.unguarded("it reads a set of objects")
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

    def keys(self, value: dict[Any, Any]) -> list[Any]:
        """Return the keys of a dict, and guard them and their order."""
        keys = list(value)
        if self.record.has(value):
            if all(is_plain(k) for k in keys):
                self.record.check(value, "list({}) == {}", keys)
                self._check_types(value, "list(map(type, {})) == {}", list(map(type, keys)))
            else:
                self.unguarded("it reads the keys of a dict that are objects")
        return keys

    def _check_types(self, value: Any, template: str, found: list[Any]) -> None:
        """Guard the types of equal keys: 1, 1.0 and True are the same key."""
        if not all(type(key) in (str, bytes, type(None)) for key in value):
            self.record.check(value, template, found)

    def deep_contents(self, value: Any) -> Any:
        """Return a value with all nested containers replaced by their contents."""
        value = self.contents(value)
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return kind([self.deep_contents(v) for v in value])
        if kind is dict:
            return {k: self.deep_contents(v) for k, v in value.items()}
        if kind is slice:
            parts = [self.get_attribute(value, name) for name in ENDS]
            for part in parts:
                if isinstance(part, Tensor):
                    part.item()  # raises a ModError, where torch would read the value
            return slice(*map(self.as_index, parts))
        return value

    def as_index(self, value: Any) -> Any:
        """Return what `operator.index` does for an object of the user; other values as Python's C code takes them."""
        if isinstance(value, np.ndarray):
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
        is_object = not isinstance(value, (*LIFTED, Tensor)) and not is_plain(value) and not callable(value)
        return symbolic(self.as_index(value) if is_object else value)

    def _converted(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return kind([self._converted(v, convert) for v in value])
        if kind is dict:
            return {self._converted(k, convert): self._converted(v, convert) for k, v in value.items()}
        if kind is torch.Size:
            return tuple(map(convert, value))
        return convert(value)

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
        function, method, reflected = BINARY[symbol]
        native = self._native(function, x, y)
        if native is not MISSING:
            return native
        found = self._by_methods(x, y, method, reflected)
        if found is NotImplemented:
            raise TypeError(f"unsupported operand type(s) for {symbol}: {type(x).__name__!r} and {type(y).__name__!r}")
        return found

    def in_place(self, symbol: str, x: Any, y: Any) -> Any:
        """Return the new value of x after `x <symbol>= y`."""
        kind = type(x)
        if isinstance(x, Tensor):
            return IN_PLACE[symbol](x, self.for_torch(y))
        if kind in (list, dict, set):
            self.changes(x, "the contents")
            y = self.iterated(y) if kind is list and symbol == "+" else self.deep_contents(y)
            return IN_PLACE[symbol](x, self.kept_by(x, y))
        if not is_plain(x) and kind not in BUILTIN_CONTAINERS:
            function = self.special(x, BINARY[symbol][1].replace("__", "__i", 1))
            if function is not MISSING:
                found = self.call(function, (y,))
                if found is not NotImplemented:
                    return found
        return self.binary(symbol, x, y)

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
        if type(x) in (set, frozenset) and not all(map(self.is_data, (x, y))):
            self.unguarded("it combines sets of objects")
        containers = [type(v) in BUILTIN_CONTAINERS for v in (x, y)]
        if all(c or is_plain(v) for c, v in zip(containers, (x, y), strict=True)):
            if type(x) is str:  # a format: `"%d" % (n,)`
                return function(x, self.for_python(y))
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

    def _compare_containers(self, symbol: str, x: Any, y: Any) -> Any:
        x, y = self.for_python(x), self.for_python(y)
        if self.is_data(x) and self.is_data(y):
            return COMPARE[symbol][0](x, y)
        if symbol in ("==", "!=") and type(x) is type(y) and type(x) in (list, tuple):
            same = len(x) == len(y) and all(
                a is b or self.truth(self.compare("==", a, b)) for a, b in zip(x, y, strict=True)
            )
            return same is (symbol == "==")
        self.unguarded("it compares containers of objects")
        return COMPARE[symbol][0](x, y)

    def identical(self, x: Any, y: Any) -> bool:
        """Return `x is y`, guarded if either is a user's object."""
        same = x is y or (isinstance(x, LIFTED) and isinstance(y, LIFTED) and x.original is y.original)
        if isinstance(x, LIFTED) or isinstance(y, LIFTED):
            return literal(x) is literal(y)
        plain = (type(None), bool, type(...), type(NotImplemented))
        if type(x) not in plain and type(y) not in plain:
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

        In a container that the mod made, comparisons of objects are guarded.
        """
        key = self.for_python(key)
        if self.is_data(key):
            return key
        if self.record.has(container):
            self.check_key(key, container)
            return key
        if len(container) > _MOST_COMPARED:
            self.unguarded(
                f"it looks up an object in a {type(container).__name__} of more than {_MOST_COMPARED} objects"
            )
            return key
        return next((own for own in container if self._is_same_key(own, key)), key)

    def _is_same_key(self, own: Any, key: Any) -> bool:
        """Return whether two keys, at least one of them an object, are one in a dict: equal, with equal hashes."""
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
        if kind is dict:
            return iter(self.keys(value))
        if kind in BUILTIN_CONTAINERS:
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

    def _holds_computed(self, value: Any) -> bool:
        if type(value) in (list, tuple, set, dict):
            return any(map(self._holds_computed, value.values() if type(value) is dict else value))
        return isinstance(value, Tensor) and not self.record.has(value)

    def kept_by(self, owner: Any, value: Any) -> Any:
        """Return the value as an object stores it: captured objects, which outlive the mod, store plain numbers."""
        if not self.record.has(owner):
            return value
        if self._holds_computed(value):
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
        if isinstance(value, (*LIFTED, np.generic)) or type(value) in (*_PLAIN, *BUILTIN_CONTAINERS):
            value = self.for_python(value)
        if not self.is_data(value) or isinstance(value, Tensor):
            return self._format_object(value, conversion, spec)
        return format(conversion(value) if conversion is not None else value, spec)

    def _format_object(self, value: Any, conversion: Callable[[Any], str] | None, spec: str) -> str:
        if isinstance(value, type) or (isinstance(value, BaseException) and not self.record.has(value)):
            return format(str(value) if conversion is None else conversion(value), spec)
        names = (
            ("__repr__",) if conversion is repr else ("__str__", "__repr__") if conversion is str or not spec else ()
        )
        if conversion is None and isinstance(self.class_attribute(type(value), "__format__"), types.FunctionType):
            return self.returned(self.call(self.special(value, "__format__"), (spec,)), "__format__", str)
        for name in names:
            method = self.class_attribute(type(value), name)
            if isinstance(method, types.FunctionType):
                return format(self.returned(self.call(method, (value,)), name, str), spec)
            if method is not object.__str__:  # object.__str__ calls __repr__
                break
        self.unguarded(f"it formats an object of {type(value).__name__} as text")
        return format(conversion(value) if conversion is not None else value, spec)
