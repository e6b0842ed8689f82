"""Calls: what each kind of callable does when the mod calls it.

Python functions are run by `frames`. C functions are either known by name (`known_calls`), or are pure and receive only
plain data, or are called natively, and the mod is then traced at each call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import string
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.trace.follow.attributes import BUILTIN_CONTAINERS, MISSING
from flexattn.trace.follow.libraries import (
    HEAP_TYPE,
    OUR_MODS,
    has_pure_classmethods,
    is_library,
    is_library_class,
    is_ours,
    is_pure_class,
    is_pure_function,
    is_pure_method,
    is_pure_of_numpy,
)
from flexattn.trace.follow.lifted import literal
from flexattn.trace.follow.operators import Operators, is_plain
from flexattn.trace.follow.record import DERIVED

# Modules of torch whose Python functions are operators. Others in torch are followed like the user's own code.
_OPERATOR_MODULES = (
    "torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch.special", "torch.linalg", "torch.fft",
    "torch._jit_internal", "torch.overrides", "torch._ops", "torch._C", "torch._VF", "torch.types", "torch._utils",
    "torch._linalg_utils", "torch._lowrank", "torch.amp.autocast_mode", "torch.autograd.grad_mode",
    "torch.autograd.function", "torch.autograd.functional", "torch._tensor_str", "torch.masked",
    "torch._functorch.predispatch",
)  # fmt: skip
# Functions of torch that depend only on their arguments, or on state that the trace sets itself.
_PURE_OF_TORCH = frozenset((
    "result_type", "promote_types", "can_cast", "is_tensor", "broadcast_shapes", "is_grad_enabled", "sym_int",
    "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sqrt", "sym_sum", "is_autocast_enabled",
    "is_inference_mode_enabled", "get_default_dtype", "is_storage", "has_torch_function", "has_torch_function_unary",
    "has_torch_function_variadic", "_get_tracing_state", "is_compiling", "is_dynamo_compiling", "is_scripting",
    "is_tracing", "typename",
))  # fmt: skip
_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_OPAQUE_LIBRARIES = frozenset(("numpy", "random", "secrets", "uuid", "tempfile"))  # not followed
_OF_KEYS = frozenset((
    "add", "discard", "remove", "pop", "get", "setdefault", "__contains__", "__getitem__", "__setitem__",
))  # fmt: skip
_TEXTS = ("__str__", "__repr__", "__format__")  # methods of objects
_OF_SETS = frozenset((
    "update", "union", "intersection", "difference", "symmetric_difference", "intersection_update", "difference_update",
    "symmetric_difference_update", "issubset", "issuperset", "isdisjoint",
))  # fmt: skip
_STORES = frozenset(("append", "appendleft", "pop", "__setitem__"))  # methods that store or return an argument
_DATA_MODULES = ("builtins", "numpy")  # whose static classes are arguments like dtype=float
_READ_BY_INIT, _READ_BY_NEW = (list, dict, set), (int, float, str, tuple, frozenset)  # classes that read arguments
_IMMUTABLE_OWNERS = (str, bytes, int, float, complex, bool, range, type(None), torch.Size, torch.dtype, torch.device)
_LOG_OF_FAKES = logging.getLogger("torch._subclasses.fake_tensor")

Known = Callable[..., Any]


def _is_heap_type(cls: type) -> bool:
    return bool(cls.__flags__ & HEAP_TYPE)


class NativeExit:
    """The __exit__ of a torch context manager, which Python runs natively."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __call__(self, *error: Any) -> Any:
        return type(self.manager).__exit__(self.manager, *error)


def _shows_arguments(text: str) -> bool:
    """Return whether str.format shows an argument itself, and not only attributes of it."""
    return any("." not in name for _, name, _, _ in string.Formatter().parse(text) if name is not None)


class Calls(Operators):
    """Calls functions. `run` is implemented by a later layer."""

    known_functions: dict[int, tuple[Any, Known]] = {}  # id -> the function, its implementation  # noqa: RUF012
    known_methods: dict[tuple[type, str], Known] = {}  # noqa: RUF012

    def run(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function; see `frames`."""
        raise NotImplementedError

    def arguments_of_super(self) -> tuple[type, Any]:
        """Return the class and the object that `super()` means in the running function; see `frames`."""
        raise NotImplementedError

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Return `function(*args, **kwargs)`."""
        kwargs = kwargs or {}
        known = self.known_functions.get(id(function))
        if known is not None:
            return known[1](self, *args, **kwargs)
        kind = type(function)
        if is_pure_of_numpy(function) and not self._holds_tensor((args, tuple(kwargs.values()))):
            return self.call_pure(function, args, kwargs)
        if kind is NativeExit:
            return function(*args)
        if kind is types.FunctionType:
            return self._call_function(function, args, kwargs)
        if kind is types.MethodType:
            own = self.record.read(function, "{}.__self__", function.__self__)
            return self.call(self.record.read(function, "{}.__func__", function.__func__), (own, *args), kwargs)
        if kind is functools.partial:
            return self._call_partial(function, args, kwargs)
        if kind is functools._lru_cache_wrapper:
            return self.call(self.record.read(function, "{}.__wrapped__", function.__wrapped__), args, kwargs)
        if isinstance(function, type):
            return self._call_class(function, args, kwargs)
        if self._is_of_torch(function):
            return self._call_torch(function, args, kwargs)
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
            return self._call_builtin(function, args, kwargs)
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType) and args:
            return self._call_method(function, args[0], args[1:], kwargs)
        return self._call_object(function, args, kwargs)

    # Python.

    def _call_function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = function.__dict__.get("_torchdynamo_orig_callable")
        module = function.__globals__.get("__name__") or ""  # its __module__ may be that of a function it wraps
        if original is not None and module.partition(".")[0] == "torch":  # made by torch.compile
            place = "{}.__dict__['_torchdynamo_orig_callable']"
            return self.call(self.record.read(function, place, original), args, kwargs)
        if is_ours(module) and not module.startswith(OUR_MODS):  # a call inside of a mod, which raises its own error
            return function(*args, **kwargs)
        if module in _OPERATOR_MODULES and not any(isinstance(a, types.FunctionType) for a in args):
            return self._call_torch(function, args, kwargs)
        if module.partition(".")[0] in _OPAQUE_LIBRARIES:
            return self.call_unknown(function, args, kwargs)
        return self.run(function, args, kwargs)

    def _call_partial(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = self.record.read(function, "{}.args", function.args)
        named = self.record.read(function, "{}.keywords", function.keywords)
        inner = self.record.read(function, "{}.func", function.func)
        return self.call(inner, (*self.contents(first), *args), {**self.contents(named), **kwargs})

    def _call_class(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls is type and len(args) == 1:
            return self.type_of(args[0])
        if not _is_heap_type(cls) or (is_library(cls.__module__) and not issubclass(cls, torch.nn.Module)):
            return self._call_library_class(cls, args, kwargs)
        of_meta = self.class_attribute(type(cls), "__call__")
        if isinstance(of_meta, types.FunctionType):
            return self.call(of_meta, (cls, *args), kwargs)
        return self.make(cls, args, kwargs)

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a new instance, as type.__call__ does."""
        new = self.class_attribute(cls, "__new__")
        if isinstance(new, staticmethod):
            new = self.record.read(new, "{}.__func__", new.__func__, "__new__")
        if isinstance(new, types.BuiltinFunctionType) and new is not object.__new__:
            made = self._by_constructor(new, new.__self__, cls, args, kwargs)
        else:
            made = self.call(new, (cls, *args), kwargs)
        if isinstance(made, cls):
            init = self.class_attribute(cls, "__init__")
            if isinstance(init, types.WrapperDescriptorType):
                if init is not object.__init__:
                    self._by_constructor(init, init.__objclass__, made, args, kwargs)
            else:
                self.call(self.special(made, "__init__"), args, kwargs)
        return made

    def _by_constructor(self, method: Any, base: Any, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the __new__ or __init__ of a C class. What it would read of its arguments is read first."""
        if base in _READ_BY_INIT and method is base.__new__:
            return method(made)
        if base in _READ_BY_INIT or base in _READ_BY_NEW:
            given = self.known_functions[id(base)][1](self, *args, **kwargs)
            return method(made, tuple(map(self.for_native, given)) if base is tuple else self.for_native(given))
        if not issubclass(base, BaseException) and not (is_pure_class(base) and self._takes_data(args, kwargs)):
            self.unguarded(f"it calls {base.__name__}.{method.__name__}, which may read more than its arguments")
        return method(made, *map(self.for_python, args), **{k: self.for_python(v) for k, v in kwargs.items()})

    def _call_library_class(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if issubclass(cls, torch.autograd.Function) or cls.__module__.partition(".")[0] == "torch":
            return self._call_torch(cls, args, kwargs)
        if issubclass(cls, BaseException):
            return cls(*map(self.for_python, args), **{k: self.for_python(v) for k, v in kwargs.items()})
        if not _is_heap_type(cls):
            return self._call_if_pure(is_pure_class(cls), cls, args, kwargs)
        of_meta = self.class_attribute(type(cls), "__call__")
        return self.call(of_meta, (cls, *args), kwargs) if isinstance(of_meta, types.FunctionType) else self.make(
            cls, args, kwargs
        )  # fmt: skip

    def _call_object(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = getattr(value, "_orig_mod", None) if type(value).__name__ == "OptimizedModule" else None
        if inner is not None:
            return self.call(self.record.read(value, "{}._orig_mod", inner), args, kwargs)
        known = self.known_methods.get((type(value), "__call__"))
        if known is not None:
            return known(self, value, *args, **kwargs)
        method = self.special(value, "__call__")
        if method is MISSING:
            raise TypeError(f"{type(value).__name__!r} object is not callable")
        if isinstance(getattr(method, "__func__", None), types.WrapperDescriptorType):
            return self.call_unknown(value, args, kwargs)
        return self.call(method, args, kwargs)

    # Torch.

    def _is_of_torch(self, function: Any) -> bool:
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.jit.ScriptFunction)):
            return True
        if not isinstance(function, _OF_C):  # otherwise `__self__` is defined by the user's code
            return False
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Tensor):
            return True
        if torch.Size in (type(owner), getattr(function, "__objclass__", None)):  # a tuple of numbers
            return False
        module = getattr(function, "__module__", None) or getattr(
            getattr(function, "__objclass__", None), "__module__", ""
        )
        if isinstance(owner, type):
            module = owner.__module__
        return (
            isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType))
            and (module or "").partition(".")[0] == "torch"
        )

    def _call_torch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(function, "__name__", None) in _TEXTS:
            self.refuse_text_of_tensors([getattr(function, "__self__", None), *args])
        if any(isinstance(a, np.ndarray) for a in args):
            self.unguarded("it reads a numpy array")
            with self.record.symbols.outside():
                return function(*args, **kwargs)
        takes_tensors = self._holds_tensor((getattr(function, "__self__", None), args, kwargs))
        args, kwargs = tuple(map(self.for_torch, args)), {k: self.for_torch(v) for k, v in kwargs.items()}
        if isinstance(function, torch.jit.ScriptFunction):
            return self.from_torch(self.record.symbols.scripted(function, args, kwargs))
        found = self._with_symbols_or_literals(function, args, kwargs)
        if not takes_tensors and not self._is_answer_of_torch(function, found):
            name = f"{getattr(function, '__module__', None) or 'torch'}.{getattr(function, '__name__', function)}"
            self.unguarded(f"it calls {name}, whose result may differ between calls")
        return self.from_torch(found)

    def _with_symbols_or_literals(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with symbols for numbers. If it takes none, as F.pad, their values are guarded."""
        if not _holds_symbol((args, kwargs)):
            return function(*args, **kwargs)
        try:
            with _silenced(_LOG_OF_FAKES):
                return function(*args, **kwargs)
        except (RuntimeError, TypeError):
            args, kwargs = self._converted((args, kwargs), _value_of_symbol)
            return function(*args, **kwargs)

    def _is_answer_of_torch(self, function: Any, found: Any) -> bool:
        own = getattr(function, "__self__", None)
        return (
            self._holds_tensor(found)
            or isinstance(function, type)
            or getattr(function, "__name__", "") in _PURE_OF_TORCH
            or (own is not None and is_plain(own))
        )

    def _holds_tensor(self, value: Any) -> bool:
        if type(value) in (list, tuple):
            return any(map(self._holds_tensor, value))
        if type(value) is dict:
            return any(map(self._holds_tensor, value.values()))
        return isinstance(value, Tensor)

    # C.

    def _call_builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = function.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return self._call_if_pure(is_pure_function(function), function, args, kwargs)
        if self.record.has(function):
            self.record.check(function, "{}.__name__ == {}", function.__name__)
            owner = self.record.read(function, "{}.__self__", owner, literal=True)
        cls = getattr(function, "__objclass__", type(owner))
        descriptor = getattr(cls, function.__name__, None)
        if type(descriptor) in (types.MethodDescriptorType, types.WrapperDescriptorType):
            return self.call(descriptor, (owner, *args), kwargs)
        if isinstance(owner, type) and function.__name__ == "__new__" and args:  # of `super().__new__(cls, ...)`
            return self._by_constructor(function, owner, args[0], args[1:], kwargs)
        return self._call_if_pure(has_pure_classmethods(owner), function, args, kwargs)

    def _takes_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return all(self.is_data(self.deep_contents(a)) or self._is_data_class(a) for a in (*args, *kwargs.values()))

    def _is_data_class(self, value: Any) -> bool:
        return isinstance(value, type) and not _is_heap_type(value) and value.__module__ in _DATA_MODULES

    def call_pure(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a C function that reads only its arguments. What it reads of objects is unknown."""
        return self._call_if_pure(True, function, args, kwargs)

    def _call_if_pure(self, is_pure: bool, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_pure or not self._takes_data(args, kwargs):
            return self.call_unknown(function, args, kwargs)
        return function(*map(self.for_python, args), **{k: self.for_python(v) for k, v in kwargs.items()})

    def divmod(self, x: Any, y: Any) -> Any:
        """Return `divmod(x, y)`."""
        if all(is_plain(v) or isinstance(v, Tensor) for v in (x, y)):
            return self.binary("//", x, y), self.binary("%", x, y)
        found = self._by_methods(x, y, "__divmod__", "__rdivmod__")
        if found is NotImplemented:
            raise TypeError(f"unsupported operand type(s) for divmod(): {type(x).__name__!r} and {type(y).__name__!r}")
        return found

    def _call_method(self, method: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method implemented in C for an object of its type or of a derived class."""
        known = self.known_methods.get((method.__objclass__, method.__name__))
        if known is not None:
            return known(self, owner, *args, **kwargs)
        if isinstance(owner, Tensor):
            return self._call_torch(method, (owner, *args), kwargs)
        if method in (str.format, str.format_map) and _shows_arguments(owner):
            self.refuse_text_of_tensors([*args, kwargs])
        is_data = self._takes_data(args, kwargs)
        if (is_plain(owner) or isinstance(owner, _IMMUTABLE_OWNERS)) and is_data:
            return method(*map(self.for_python, (owner, *args)), **{k: self.for_python(v) for k, v in kwargs.items()})
        if isinstance(owner, DERIVED) and all(is_plain(a) or isinstance(a, DERIVED) for a in args) and not kwargs:
            return method(owner, *map(literal, args))
        is_new = not self.record.has(owner) and is_library_class(type(owner)) and is_pure_method(method)
        is_set = isinstance(owner, (set, frozenset))
        takes_objects = method.__name__ in (_OF_SETS if is_set else _STORES) or method.__name__ in _OF_KEYS
        if is_new and (is_data or (type(owner) in BUILTIN_CONTAINERS and takes_objects)):
            if (is_set or isinstance(owner, dict)) and method.__name__ in _OF_KEYS:
                args = (self.own_key(owner, args[0]), *args[1:]) if args else args
            elif is_set and method.__name__ in _OF_SETS:
                args = tuple(map(self.iterated, args))
                if not all(map(self.is_data, (owner, *args))):
                    self.unguarded("it combines sets of objects")
            given = self.for_native if method.__name__ in _STORES else self.for_python
            return method(owner, *map(given, args), **{k: given(v) for k, v in kwargs.items()})
        return self.call_unknown(method, (owner, *args), kwargs)

    def call_unknown(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an unknown function natively. The mod is then traced at each call."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        module = getattr(function, "__module__", None)
        owner = getattr(function, "__self__", None)
        if module is None and owner is not None and not isinstance(owner, types.ModuleType):
            module = type(owner).__module__
        name = name if module in (None, "builtins") else f"{module}.{name}"
        of_array = isinstance(args[0] if args else owner, np.ndarray)
        self.unguarded(
            f"it reads a numpy array with {name}: capture torch.from_numpy(array) instead" if of_array
            else f"it calls {name}, which may return a different result each time"
        )  # fmt: skip
        found = function(*map(self.for_native, args), **{k: self.for_native(v) for k, v in kwargs.items()})
        return self.record.drawn(found) if type(found) in (int, float) else found


def _holds_symbol(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return any(map(_holds_symbol, value.values() if type(value) is dict else value))
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _value_of_symbol(value: Any) -> Any:
    """Return the value of a symbol, with a guard."""
    kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(value))
    return value if kind is None else kind(value)


@contextlib.contextmanager
def _silenced(log: logging.Logger) -> Iterator[None]:
    """Drop the messages of a logger: an operator that takes no symbols is called again without."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
