"""Attributes: Python's attribute lookup, step by step, so that each location that decides the result is recorded.

The rules are those of object.__getattribute__, type.__getattribute__ and super in the Python data model: data
descriptors of the class, then the instance's own dict, then other attributes of the class, then __getattr__.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flexattn.trace.follow.libraries import HEAP_TYPE, is_library
from flexattn.trace.follow.lifted import LIFTED, from_symbol, literal
from flexattn.trace.follow.record import ENDS, ReadLog

MISSING: Any = object()

# Types of Python and torch whose attributes depend only on the value.
_IMMUTABLE: frozenset[type] = frozenset((
    int, float, bool, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented), torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo, types.CodeType,
))  # fmt: skip
_TupleGetter = type(vars(collections.namedtuple("_Pair", "x y"))["x"])  # descriptor type of a namedtuple field
BUILTIN_CONTAINERS: frozenset[type] = frozenset((list, tuple, dict, set, frozenset))
# Implementations that look up attributes by the rules of object.__getattribute__.
_GENERIC = tuple(
    cls.__getattribute__
    for cls in (
        object, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, BaseException,
        types.SimpleNamespace, types.ModuleType, collections.OrderedDict, collections.defaultdict, collections.deque,
    )
)  # fmt: skip
_FUNCTION_FIELDS = {
    "__code__": "code", "__globals__": "globals", "__defaults__": "defaults", "__kwdefaults__": "keyword defaults",
    "__closure__": "closure", "__dict__": "attributes",
}  # fmt: skip
_LAYOUT_OF_TENSOR = frozenset(("is_leaf", "grad", "grad_fn", "data_ptr", "_version", "_base", "storage_offset"))
_DATA = ("__get__", "__set__", "__delete__")


class Unfollowable(Exception):
    """The interpreter cannot run this code, so Python must run it."""


class Refusal(Exception):
    """The mod does something that cannot be traced. The text says what, and what to write instead."""

    line = ""  # file:line


class Attributes:
    """Reads attributes. `call` is implemented by a later layer."""

    def __init__(self, record: ReadLog) -> None:
        self.record = record

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Call as Python does; see `calls`."""
        raise NotImplementedError

    def unguarded(self, reason: str, may_end: bool = False) -> None:
        """Note that a guard cannot check what the mod reads or changes. The mod is then traced at each call."""
        self.record.unguarded(reason, may_end)

    # Classes.

    def class_attribute(self, cls: type, name: str, mro: Iterable[type] | None = None) -> Any:
        """Return the attribute `name` of the class or of its first base that has it; MISSING if none has it."""
        for base in cls.__mro__ if mro is None else mro:
            # The trace modifies torch.autograd.function.
            if not base.__flags__ & HEAP_TYPE or base.__module__ == "torch.autograd.function":
                if name in base.__dict__:
                    return base.__dict__[name]
                continue
            self.record.assign_class(base)
            if name in base.__dict__:
                return self.record.read_item(base, "{}.__dict__[{}]", name, base.__dict__[name], name)
            self.record.check(base, "{1} not in {0}.__dict__", name)
        return MISSING

    def special(self, value: Any, name: str) -> Any:
        """Return the method that an operator calls, bound to `value`; MISSING if its class has none."""
        found = self.class_attribute(type(value), name)
        if found is MISSING or found is None:
            return found
        return self._bind(found, value, type(value), name)

    # Any object.

    def get_attribute(self, value: Any, name: str) -> Any:
        """Return `value.name`."""
        kind = type(value)
        if isinstance(value, Tensor) and name == "requires_grad" and self.record.has(value):
            with torch._C.DisableTorchFunction():  # the trace's tensor never requires a gradient; the guard checks it
                return value.requires_grad
        if isinstance(value, Tensor):
            return self._of_tensor(value, name)
        if isinstance(value, LIFTED):
            return getattr(literal(value), name)
        if kind is slice and name in ENDS:
            return self.record.read(value, f"{{}}.{name}", getattr(value, name), name)
        if kind in _IMMUTABLE or kind in BUILTIN_CONTAINERS:
            return getattr(value, name)
        if isinstance(value, types.ModuleType) and (kind is types.ModuleType or is_library(value.__name__)):
            return self._of_module(value, name)
        if isinstance(value, types.FunctionType):
            return self._of_function(value, name)
        if isinstance(value, types.MethodType):
            return self._of_method(value, name)
        if isinstance(value, super):
            return self._of_super(value, name)
        lookup = self.class_attribute(kind, "__getattribute__")
        try:
            if isinstance(value, type) and lookup is type.__getattribute__:
                return self.of_class(value, name)
            if lookup in _GENERIC:
                return self.of_instance(value, name)
            if isinstance(lookup, types.FunctionType):
                return self.call(lookup, (value, name))
        except AttributeError:
            fallback = self.class_attribute(kind, "__getattr__")
            if fallback is MISSING:
                raise
            return self.call(self._bind(fallback, value, kind, "__getattr__"), (name,))
        return self._foreign(value, name)

    def of_instance(self, value: Any, name: str) -> Any:
        """Return `value.name` according to object.__getattribute__."""
        kind = type(value)
        of_class = self.class_attribute(kind, name)
        descriptor = type(of_class)
        if of_class is not MISSING and self._is_data(descriptor):
            return self._bind(of_class, value, kind, name)
        own = self._own_dict(value)
        if own is not None:
            if name in own:
                return self.record.read_item(own, "{}[{}]", name, own[name], name)
            self.record.check(own, "{1} not in {0}", name)
        if of_class is not MISSING:
            return self._bind(of_class, value, kind, name)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=value)

    def _own_dict(self, value: Any) -> dict[str, Any] | None:
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return None
        if type(own) is not dict:
            return own
        return self.record.read(value, "object.__getattribute__({}, '__dict__')", own)

    def _is_data(self, descriptor: type) -> bool:
        """Whether a class has __get__, and __set__ or __delete__. Its instances precede the object's own dict."""
        if not descriptor.__flags__ & HEAP_TYPE:
            return hasattr(descriptor, "__set__") and hasattr(descriptor, "__get__")
        has_get, *writes = (self.class_attribute(descriptor, n) is not MISSING for n in _DATA)
        return has_get and any(writes)

    def _bind(self, found: Any, value: Any, owner: type, name: str) -> Any:
        """Return the result of binding a class attribute to its instance `value`, or to the class itself (None)."""
        kind = type(found)
        if kind in (types.FunctionType, functools._lru_cache_wrapper):
            return found if value is None else types.MethodType(found, value)
        if kind is staticmethod:
            return self.record.read(found, "{}.__func__", found.__func__, name)
        if kind is classmethod:
            return types.MethodType(self.record.read(found, "{}.__func__", found.__func__, name), owner)
        if kind is property:
            if value is None:
                return found
            getter = self.record.read(found, "{}.fget", found.fget, name)
            if getter is None:
                raise AttributeError(f"property {name!r} of {owner.__name__!r} object has no getter")
            return self.call(getter, (value,))
        if kind is types.MemberDescriptorType:
            return found if value is None else self._slot(found, value, name)
        if kind is types.GetSetDescriptorType:
            return found if value is None else self._computed(found, value, name)
        if kind in (types.WrapperDescriptorType, types.MethodDescriptorType):
            return found if value is None else types.MethodType(found, value)
        if kind is types.ClassMethodDescriptorType:
            return found.__get__(value, owner)
        if kind is functools.cached_property and value is not None:
            return self._cached(found, value, owner, name)
        if kind is _TupleGetter and value is not None:
            return self.record.read(value, f"object.__getattribute__({{}}, {name!r})", found.__get__(value), name)
        if isinstance(found, Tensor) or not kind.__flags__ & HEAP_TYPE:
            return found
        get = self.class_attribute(kind, "__get__")
        return found if get is MISSING else self.call(get, (found, value, owner))

    def _cached(self, found: functools.cached_property[Any], value: Any, owner: type, name: str) -> Any:
        """Let Python compute a cached property on real tensors. It is then an ordinary attribute."""
        with self.record.symbols.outside():
            found.__get__(value, owner)
        return self.of_instance(value, name)

    def _slot(self, descriptor: types.MemberDescriptorType, value: Any, name: str) -> Any:
        try:
            found = descriptor.__get__(value)
        except AttributeError:
            self.record.check(value, "not hasattr({}, {})", name)
            raise
        return self.record.read(value, f"object.__getattribute__({{}}, {name!r})", found, name)

    def _computed(self, descriptor: types.GetSetDescriptorType, value: Any, name: str) -> Any:
        """Return an attribute computed by C code. Those of Python's own objects are known."""
        if name == "__dict__":
            return self._own_dict(value)
        if name == "__class__":
            return self.type_of(value)
        found = descriptor.__get__(value)
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return self.record.read(value, f"{{}}.{name}", found, name)
        if self.record.has(value):
            self.unguarded(f"it reads the attribute {name!r} of a {type(value).__name__}, which C code computes")
        return found

    def type_of(self, value: Any) -> type:
        """Return `type(value)` as the user sees it: for lifted numbers and fake tensors, the type of the original."""
        if isinstance(value, LIFTED):
            return type(value.original)
        if isinstance(value, Tensor) and not self.record.has(value):
            return Tensor
        return type(value)

    # Modules, functions, classes.

    def _of_module(self, module: types.ModuleType, name: str) -> Any:
        scope = module.__dict__
        if is_library(module.__name__):
            found = getattr(module, name)
            code = (types.FunctionType, types.BuiltinFunctionType, type)
            if isinstance(found, types.ModuleType) or (isinstance(found, code) and is_library(found.__module__)):
                self.record.permanent(found)
                return found
            if type(found) in (torch.dtype, torch.layout, torch.memory_format):
                return found
            if name not in scope:
                self.unguarded(f"it reads {module.__name__}.{name}, which is computed at each read")
                return found
            return self.library_value(module, name, found)
        scope = self.record.read(module, "{}.__dict__", scope)
        if name in scope:
            return self.record.read_item(scope, "{}[{}]", name, scope[name], name)
        self.record.check(scope, "{1} not in {0}", name)
        if type(module) is types.ModuleType and name in dir(types.ModuleType):
            return getattr(module, name)
        fallback = scope.get("__getattr__")
        if fallback is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)
        fallback = self.record.read_item(scope, "{}[{}]", "__getattr__", fallback, name)
        return self.call(fallback, (name,))

    def library_value(self, module: types.ModuleType, name: str, found: Any) -> Any:
        """Return an object owned by a library, with a guard: os.environ, torch.backends..., constants of math."""
        self.record.permanent(module)
        return self.record.read_item(module, "{}.__dict__[{}]", name, found, name, literal=True)

    def _of_function(self, function: types.FunctionType, name: str) -> Any:
        if name in _FUNCTION_FIELDS:
            return self.record.read(function, f"{{}}.{name}", getattr(function, name), name)
        if name in ("__name__", "__qualname__", "__module__", "__doc__"):
            return self.record.read(function, f"{{}}.{name}", getattr(function, name), name)
        own = self.record.read(function, "{}.__dict__", function.__dict__)
        if name in own:
            return self.record.read_item(own, "{}[{}]", name, own[name], name)
        self.record.check(own, "{1} not in {0}", name)
        return getattr(function, name)  # an attribute of the type `function`, or AttributeError

    def _of_method(self, method: types.MethodType, name: str) -> Any:
        function = self.record.read(method, "{}.__func__", method.__func__, name)
        owner = self.record.read(method, "{}.__self__", method.__self__, name)
        if name in ("__func__", "__self__"):
            return function if name == "__func__" else owner
        return self.get_attribute(function, name)

    def of_class(self, cls: Any, name: str) -> Any:
        """Return `cls.name` according to type.__getattribute__."""
        if name in ("__name__", "__qualname__", "__module__", "__mro__", "__bases__", "__doc__"):
            return self.record.read(cls, f"{{}}.{name}", getattr(cls, name), name)
        if name == "__dict__":
            self.unguarded("it reads the __dict__ of a class")
            return cls.__dict__
        of_meta = self.class_attribute(type(cls), name)
        if of_meta is not MISSING and self._is_data(type(of_meta)):
            return self._bind(of_meta, cls, type(cls), name)
        found = self.class_attribute(cls, name)
        if found is not MISSING:
            return self._bind(found, None, cls, name)
        if of_meta is not MISSING:
            return self._bind(of_meta, cls, type(cls), name)
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}", name=name, obj=cls)

    def _of_super(self, value: Any, name: str) -> Any:
        start: type = value.__thisclass__
        owner, cls = value.__self__, value.__self_class__
        assert cls is not None
        found = self.class_attribute(cls, name, cls.__mro__[cls.__mro__.index(start) + 1 :])
        if found is MISSING:
            return getattr(value, name)  # of `super` itself, or AttributeError
        return self._bind(found, None if owner is cls else owner, cls, name)

    def _foreign(self, value: Any, name: str) -> Any:
        """Return an attribute computed by unknown C code."""
        found = getattr(value, name)
        if isinstance(value, functools.partial) and name in ("func", "args", "keywords"):
            return self.record.read(value, f"{{}}.{name}", found, name)
        if type(value).__module__.partition(".")[0] == "numpy" and name in ("dtype", "shape", "ndim", "item"):
            self.unguarded(f"it reads {name!r} of a numpy array: capture torch.from_numpy(array) instead")
            return found
        is_own_method = isinstance(found, types.BuiltinFunctionType) and found.__self__ is value
        if not is_own_method and self.record.has(value):
            self.unguarded(f"it reads the attribute {name!r} of a {type(value).__name__}, an object of C")
        return found

    # Tensors.

    def _of_tensor(self, value: Tensor, name: str) -> Any:
        kind = type(value)
        own_classes = [base for base in kind.__mro__ if not is_library(base.__module__)]  # of a derived class
        of_class = self.class_attribute(kind, name, own_classes)
        is_data = of_class is not MISSING and self._is_data(type(of_class))
        if name in value.__dict__ and not is_data:
            return self._attribute_of_tensor(value, value.__dict__, name)
        if of_class is not MISSING:
            return self._bind(of_class, value, kind, name)
        if name == "__class__":
            return self.type_of(value)
        if name == "nbytes":  # torch has no symbolic form of it
            return self.from_torch(value.numel() * value.element_size())
        if name in _LAYOUT_OF_TENSOR:
            self.unguarded(f"it reads {name!r} of a tensor")
        try:
            return self.from_torch(getattr(value, name))
        except AttributeError:
            self.record.check(value, "{1} not in {0}.__dict__", name)
            raise

    def _attribute_of_tensor(self, value: Tensor, own: Any, name: str) -> Any:
        own = self.record.read(value, "{}.__dict__", own)
        return self.record.read_item(own, "{}[{}]", name, own[name], name)

    def from_torch(self, value: Any) -> Any:
        """Return a result of torch as the mod sees it: symbols become lifted numbers."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return from_symbol(value)
        if isinstance(value, torch.Size):
            return torch.Size([self.from_torch(n) for n in value])
        if type(value) in (tuple, list):
            return type(value)([self.from_torch(v) for v in value])
        return value
