"""The C functions and methods that mods commonly call, and their implementations."""

from __future__ import annotations

import bisect
import builtins
import collections
import functools
import itertools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flexattn.trace.follow.attributes import BUILTIN_CONTAINERS, MISSING, Unfollowable
from flexattn.trace.follow.calls import Calls
from flexattn.trace.follow.libraries import is_library_class
from flexattn.trace.follow.lifted import LIFTED, is_python_int, literal
from flexattn.trace.follow.operators import BINARY, COMPARE, IN_PLACE, UNARY, is_plain

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_METHODS: dict[tuple[type, str], Callable[..., Any]] = {}


def _function(*functions: Any) -> Callable[[Any], Any]:
    def note(handler: Any) -> Any:
        _FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return note


# Objects and their attributes.


@_function(isinstance)
def _isinstance(f: Calls, value: Any, classes: Any) -> bool:
    return any(_is_instance(f, value, c) for c in _classes(f, classes))


@_function(issubclass)
def _issubclass(f: Calls, cls: Any, classes: Any) -> bool:
    return any(_is_subclass(f, cls, c) for c in _classes(f, classes))


def _classes(f: Calls, classes: Any) -> list[Any]:
    if type(classes) is tuple:
        return [c for part in f.contents(classes) for c in _classes(f, part)]
    if type(classes) is types.UnionType and not f.record.has(classes):
        return list(classes.__args__)
    return [classes]


def _is_instance(f: Calls, value: Any, cls: Any) -> bool:
    method = f.class_attribute(type(cls), "__instancecheck__")
    if isinstance(method, types.FunctionType) and not is_library_class(type(cls)):
        return f.truth(f.call(method, (cls, value)))
    if isinstance(value, LIFTED):
        return isinstance(value.original, cls)
    if isinstance(value, Tensor) or method is type.__instancecheck__:
        f.record.assign_class(type(value))
        return isinstance(value, cls)
    return _asked_again(f, isinstance, value, cls)


def _is_subclass(f: Calls, value: Any, cls: Any) -> bool:
    method = f.class_attribute(type(cls), "__subclasscheck__")
    if isinstance(method, types.FunctionType) and not is_library_class(type(cls)):
        return f.truth(f.call(method, (cls, value)))
    if isinstance(value, type):
        f.record.assign_class(value)
    return issubclass(value, cls) if method is type.__subclasscheck__ else _asked_again(f, issubclass, value, cls)


def _asked_again(f: Calls, ask: Callable[[Any, Any], bool], value: Any, cls: Any) -> bool:
    """Return the answer of an abstract class or a protocol. The guard asks again, because it depends on much state."""
    if not is_plain(value) and type(value) not in BUILTIN_CONTAINERS and not f.record.has(value):
        f.unguarded(f"it calls {ask.__name__}() of a new object and {cls.__name__}, which has its own rules")
    found = ask(value, cls)
    f.record.check(value, f"{ask.__name__}({{}}, {f.record.identity(cls)}) is {{}}", found)
    return found


def _attribute_name(name: object) -> str:
    """Return the name of an attribute, which must be a string, as for Python's functions."""
    if not isinstance(name, str):
        raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")
    return name


@_function(getattr)
def _getattr(f: Calls, value: Any, name: Any, *default: Any) -> Any:
    try:
        return f.get_attribute(value, _attribute_name(name))
    except AttributeError:
        if not default:
            raise
        return default[0]


@_function(hasattr)
def _hasattr(f: Calls, value: Any, name: Any) -> bool:
    try:
        f.get_attribute(value, _attribute_name(name))
    except AttributeError:
        return False
    return True


@_function(setattr, object.__setattr__, type.__setattr__)
def _setattr(f: Calls, value: Any, name: str, new: Any) -> None:
    f.changes(value, f"the attribute {_attribute_name(name)!r}")
    new = f.kept_by(value, new)
    object.__setattr__(value, name, new) if not isinstance(value, type) else setattr(value, name, new)


@_function(object.__getattribute__, type.__getattribute__, types.ModuleType.__getattribute__)
def _getattribute(f: Calls, value: Any, name: str) -> Any:
    name = _attribute_name(name)
    return f.of_class(value, name) if isinstance(value, type) else f.of_instance(value, name)


@_function(type.__or__)
def _union(f: Calls, x: Any, y: Any) -> Any:
    return x | y


@_function(callable)
def _callable(f: Calls, value: Any) -> bool:
    if not is_plain(value) and not isinstance(value, Tensor):
        f.class_attribute(type(value), "__call__")  # guards it
    return callable(value)


@_function(id)
def _id(f: Calls, value: Any) -> int:
    f.unguarded("it calls id(), which differs between objects that are alike")
    return id(value)


@_function(hash)
def _hash(f: Calls, value: Any) -> int:
    value = f.for_python(value)
    f.follow_hash(value, may_be_identity=False)
    return hash(value)


@_function(vars)
def _vars(f: Calls, value: Any) -> Any:
    return f.get_attribute(value, "__dict__")


@_function(super)
def _super(f: Calls, *args: Any) -> Any:
    given: Any = args or f.arguments_of_super()
    return super(*given)


@_function(object.__init_subclass__)
def _nothing(f: Calls, /, *args: Any, **kwargs: Any) -> None:
    return None


@_function(object.__init__)
def _object_init(f: Calls, value: Any, /, *args: Any, **kwargs: Any) -> None:
    if (args or kwargs) and not (
        _is_objects(f, type(value), "__init__") and not _is_objects(f, type(value), "__new__")
    ):
        raise TypeError(f"{type(value).__name__}() takes no arguments")


def _is_objects(f: Calls, cls: type, name: str) -> bool:
    """Return whether a class inherits a method from `object`."""
    return f.class_attribute(cls, name) is object.__dict__[name]


@_function(object.__eq__)
def _object_eq(f: Calls, x: Any, y: Any) -> Any:
    return True if f.identical(x, y) else NotImplemented


@_function(object.__ne__)
def _object_ne(f: Calls, x: Any, y: Any) -> Any:
    found = f.call(f.special(x, "__eq__"), (y,))
    return found if found is NotImplemented else not f.truth(found)


@_function(*(vars(object)[name] for name in ("__lt__", "__le__", "__gt__", "__ge__")))
def _object_order(f: Calls, x: Any, y: Any) -> Any:
    return NotImplemented


@_function(object.__new__)
def _new(f: Calls, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    if (args or kwargs) and not (_is_objects(f, cls, "__new__") and not _is_objects(f, cls, "__init__")):
        raise TypeError(f"{cls.__name__}() takes no arguments")
    return object.__new__(cls)


@_function(type.__call__)
def _type_call(f: Calls, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    return f.make(cls, args, kwargs)


@_function(print)
def _print(f: Calls, *args: Any, **kwargs: Any) -> None:
    print(*[str(f.for_python(a)) for a in args], **kwargs)  # a run on a tape stops at a tensor, before it prints


@_function(builtins.breakpoint)
def _breakpoint(f: Calls, *args: Any, **kwargs: Any) -> None:
    raise Unfollowable("it calls breakpoint()")


@_function(globals, locals, eval, exec, compile, dir, __import__)
def _scope(f: Calls, *args: Any, **kwargs: Any) -> None:
    raise Unfollowable("it calls globals(), locals(), eval(), exec(), compile(), dir() or __import__()")


# Numbers.


@_function(len)
def _len(f: Calls, value: Any) -> int:
    return f.length(value)


@_function(abs)
def _abs(f: Calls, value: Any) -> Any:
    if isinstance(value, LIFTED):
        if not is_python_int(value):
            return f.calculate(abs, value)
        return value if f.compare(">=", value, 0) else f.calculate(operator.neg, value)
    return _by_method(f, value, abs, "__abs__")


def _by_method(f: Calls, value: Any, function: Callable[..., Any], method: str, *rest: Any) -> Any:
    """Return a function of one value that Python implements by a method of its class."""
    if is_plain(value):
        return function(literal(value), *map(literal, rest))
    if isinstance(value, Tensor):
        return f.from_torch(function(value, *map(literal, rest)))
    found = f.special(value, method)
    if found is MISSING:
        raise TypeError(f"bad operand type for {function.__name__}(): {type(value).__name__!r}")
    return f.call(found, rest)


@_function(round)
def _round(f: Calls, number: Any, ndigits: Any = None) -> Any:
    return _by_method(f, number, round, "__round__", *([] if ndigits is None else [f.as_index(ndigits)]))


@_function(divmod)
def _divmod(f: Calls, x: Any, y: Any) -> Any:
    return f.divmod(x, y)


@_function(pow)
def _pow(f: Calls, base: Any, exp: Any, mod: Any = None) -> Any:
    return f.binary("**", base, exp) if mod is None else _by_method(f, base, pow, "__pow__", exp, mod)


@_function(bool)
def _bool(f: Calls, value: Any = False) -> bool:
    return f.truth(value)


@_function(int)
def _int(f: Calls, value: Any = 0, /, base: Any = MISSING) -> Any:
    if base is not MISSING:
        return _of_text(f, int, value, f.as_index(base))
    if isinstance(value, LIFTED) and is_python_int(value):
        return value
    if not is_plain(value) and not isinstance(value, Tensor):
        for name in ("__int__", "__index__", "__trunc__"):
            if (found := f.special(value, name)) is not MISSING:
                return f.returned(f.call(found, ()), name, int)
    return _of_text(f, int, value)


def _of_text(f: Calls, cls: type, text: Any, *base: Any) -> Any:
    """Return a number of a class. A guard has checked the text of a derived class, but not that in a bytearray."""
    return cls(text, *base) if isinstance(text, (str, bytes)) else f.call_pure(cls, (text, *base), {})


@_function(float)
def _float(f: Calls, value: Any = 0.0, /) -> Any:
    if isinstance(value, LIFTED):
        return value if type(value.original) is float else f.calculate(float, value)
    if not is_plain(value) and not isinstance(value, Tensor):
        for name in ("__float__", "__index__"):
            if (found := f.special(value, name)) is not MISSING:
                return float(literal(f.returned(f.call(found, ()), name, float if name == "__float__" else int)))
    return _of_text(f, float, value)


@_function(str)
def _str(f: Calls, *args: Any, **kwargs: Any) -> str:
    return f.format(args[0], str, "") if len(args) == 1 and not kwargs else f.call_pure(str, args, kwargs)


@_function(repr)
def _repr(f: Calls, value: Any) -> str:
    return f.format(value, repr, "")


@_function(format)
def _format(f: Calls, value: Any, spec: str = "") -> str:
    return f.format(value, None, spec)


@_function(max)
def _max(f: Calls, *args: Any, key: Any = None, **kwargs: Any) -> Any:
    return _extreme(f, ">", args, key, kwargs)


@_function(min)
def _min(f: Calls, *args: Any, key: Any = None, **kwargs: Any) -> Any:
    return _extreme(f, "<", args, key, kwargs)


def _extreme(f: Calls, wins: str, args: tuple[Any, ...], key: Any, kwargs: dict[str, Any]) -> Any:
    items = f.iterated(args[0]) if len(args) == 1 else list(args)
    if not items:
        if "default" in kwargs:
            return kwargs["default"]
        raise ValueError("max() or min() of an empty sequence")
    best, *others = [(item, item if key is None else f.call(key, (item,))) for item in items]
    for other in others:
        if f.truth(f.compare(wins, other[1], best[1])):
            best = other
    return best[0]


@_function(sum)
def _sum(f: Calls, values: Any, start: Any = 0) -> Any:
    return functools.reduce(lambda x, y: f.binary("+", x, y), f.items(values), start)


@_function(math.prod)
def _prod(f: Calls, values: Any, *, start: Any = 1) -> Any:
    return functools.reduce(lambda x, y: f.binary("*", x, y), f.items(values), start)


@_function(all)
def _all(f: Calls, values: Any) -> bool:
    return all(f.truth(v) for v in f.items(values))


@_function(any)
def _any(f: Calls, values: Any) -> bool:
    return any(f.truth(v) for v in f.items(values))


# Iterables. Their items are read first; the iterator itself is Python's own, over new containers.


@_function(iter)
def _iter(f: Calls, value: Any, *sentinel: Any) -> Any:
    return _until(f, value, sentinel[0]) if sentinel else f.iterate(value)


def _until(f: Calls, function: Any, sentinel: Any) -> Iterator[Any]:
    while not f.truth(f.compare("==", item := f.call(function, ()), sentinel)):
        yield item


@_function(next)
def _next(f: Calls, iterator: Any, *default: Any) -> Any:
    try:
        return f.next(iterator)
    except StopIteration:
        if not default:
            raise
        return default[0]


for _cls in (list, tuple):
    _FUNCTIONS[_cls] = lambda f, *args, _cls=_cls: _cls(f.iterated(args[0])) if args else _cls()
for _cls in (set, frozenset):
    _FUNCTIONS[_cls] = lambda f, *args, _cls=_cls: f.new_set(f.items(args[0]), _cls) if args else _cls()


@_function(dict)
def _dict(f: Calls, /, *args: Any, **kwargs: Any) -> Any:
    if not args:
        return dict(**kwargs)
    source = args[0]
    if type(source) is dict:
        return {**f.contents(source), **kwargs}
    if hasattr(source, "keys"):
        keys = f.items(f.call(f.get_attribute(source, "keys"), ()))
        return {literal(k): f.get_item(source, k) for k in keys} | kwargs
    made: dict[Any, Any] = {}
    for pair in f.items(source):
        key, value = f.iterated(pair)
        made[f.own_key(made, key)] = value
    return {**made, **kwargs}


@_function(range)
def _range(f: Calls, *args: Any) -> range:
    return range(*map(f.as_index, args))


@_function(slice)
def _slice(f: Calls, *args: Any) -> slice:
    return slice(*args)


@_function(enumerate)
def _enumerate(f: Calls, values: Any, start: Any = 0) -> Any:
    return enumerate(f.items(values), f.as_index(start))


@_function(zip)
def _zip(f: Calls, *values: Any, strict: bool = False) -> Any:
    return zip(*[f.items(v) for v in values], strict=f.truth(strict))


@_function(reversed)
def _reversed(f: Calls, values: Any) -> Any:
    if type(values) in BUILTIN_CONTAINERS or is_plain(values):
        return iter(f.iterated(values)[::-1])
    found = f.special(values, "__reversed__")
    if found is not MISSING:
        return f.call(found, ())
    return iter([f.get_item(values, i) for i in reversed(range(int(literal(f.length(values)))))])


@_function(map)
def _map(f: Calls, function: Any, *values: Any) -> Iterator[Any]:
    return (f.call(function, items) for items in zip(*[f.items(v) for v in values], strict=False))


@_function(filter)
def _filter(f: Calls, function: Any, values: Any) -> Iterator[Any]:
    return (v for v in f.items(values) if f.truth(v if function is None else f.call(function, (v,))))


@_function(sorted)
def _sorted(f: Calls, values: Any, *, key: Any = None, reverse: Any = False) -> list[Any]:
    items = f.iterated(values)
    keys = items if key is None else [f.call(key, (item,)) for item in items]

    def order(i: int, j: int) -> int:
        if f.truth(f.compare("<", keys[i], keys[j])):
            return -1
        return int(f.truth(f.compare("<", keys[j], keys[i])))

    return [items[i] for i in sorted(range(len(items)), key=functools.cmp_to_key(order), reverse=f.truth(reverse))]


@_function(functools.reduce)
def _reduce(f: Calls, function: Any, values: Any, *initial: Any) -> Any:
    return functools.reduce(lambda x, y: f.call(function, (x, y)), f.items(values), *initial)


@_function(functools.partial)
def _partial(f: Calls, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return functools.partial(function, *args, **kwargs)


@_function(functools._lru_cache_wrapper)
def _cached(f: Calls, *args: Any) -> Any:
    return functools._lru_cache_wrapper(*map(literal, args))


@_function(itertools.accumulate)
def _accumulate(f: Calls, iterable: Any, func: Any = None, *, initial: Any = None) -> Any:
    def both(x: Any, y: Any) -> Any:
        return f.binary("+", x, y) if func is None else f.call(func, (x, y))

    return itertools.accumulate(f.items(iterable), both, initial=initial)


@_function(itertools.starmap)
def _starmap(f: Calls, function: Any, values: Any) -> Iterator[Any]:
    return (f.call(function, tuple(f.iterated(v))) for v in f.items(values))


def _over_iterables(function: Any) -> Callable[..., Any]:
    return lambda f, *values, **kwargs: function(*[f.items(v) for v in values], **kwargs)


for _tool in (itertools.chain, itertools.pairwise, itertools.zip_longest):
    _FUNCTIONS[_tool] = _over_iterables(_tool)


@_function(itertools.product)
def _product(f: Calls, *values: Any, repeat: Any = 1) -> Any:
    return itertools.product(*[f.items(v) for v in values], repeat=f.as_index(repeat))


@_function(itertools.repeat)
def _repeat(f: Calls, object: Any, *args: Any, **times: Any) -> Any:
    return itertools.repeat(object, *map(f.as_index, args), **{name: f.as_index(n) for name, n in times.items()})


_FUNCTIONS[itertools.islice] = lambda f, values, *args: itertools.islice(f.items(values), *map(f.as_index, args))
for _tool in (itertools.combinations, itertools.permutations, itertools.combinations_with_replacement):
    _FUNCTIONS[_tool] = lambda f, iterable, *args, _tool=_tool, **r: _tool(
        f.items(iterable), *map(f.as_index, args), **{name: f.as_index(n) for name, n in r.items()}
    )


for _tool in (bisect.insort_left, bisect.insort_right):
    _FUNCTIONS[_tool] = lambda f, *args, _tool=_tool, **kwargs: f.call_unknown(_tool, args, kwargs)

# The operator module.

for _symbol, (_apply, _, _) in BINARY.items():
    _FUNCTIONS[_apply] = lambda f, x, y, _symbol=_symbol: f.binary(_symbol, x, y)
    _FUNCTIONS[IN_PLACE[_symbol]] = lambda f, x, y, _symbol=_symbol: f.in_place(_symbol, x, y)
for _symbol, (_apply, _, _) in COMPARE.items():
    _FUNCTIONS[_apply] = lambda f, x, y, _symbol=_symbol: f.compare(_symbol, x, y)
for _symbol, (_apply, _) in UNARY.items():
    _FUNCTIONS[_apply] = lambda f, x, _symbol=_symbol: f.unary(_symbol, x)
_FUNCTIONS[operator.getitem] = lambda f, x, key: f.get_item(x, key)
_FUNCTIONS[operator.setitem] = lambda f, x, key, value: f.set_item(x, key, value)
_FUNCTIONS[operator.delitem] = lambda f, x, key: f.delete_item(x, key)
_FUNCTIONS[operator.contains] = lambda f, x, item: f.contains(x, item)
_FUNCTIONS[operator.truth] = lambda f, x: f.truth(x)
_FUNCTIONS[operator.not_] = lambda f, x: not f.truth(x)
_FUNCTIONS[operator.is_] = lambda f, x, y: f.identical(x, y)
_FUNCTIONS[operator.is_not] = lambda f, x, y: not f.identical(x, y)


# Reading methods of Python's containers. Methods that change a container run natively if the mod created it.


def _method(*names: str, of: tuple[type, ...]) -> Callable[[Any], Any]:
    def note(handler: Any) -> Any:
        _METHODS.update({(cls, name): handler for cls in of for name in names})
        return handler

    return note


_DICTS = (dict, collections.OrderedDict)


def _base(owner: Any) -> Any:
    """Return the class of C whose methods a container has, unless a derived class overrides them."""
    return next(b for b in (collections.OrderedDict, dict, list, tuple, set, frozenset) if isinstance(owner, b))


def _template(owner: Any, cls: type) -> str:
    """Return how a guard reads an item. For derived classes it calls the base class, whose method is not overridden."""
    return "{}[{}]" if type(owner) is cls else f"{cls.__name__}.__getitem__({{}}, {{}})"


@_method("__getitem__", of=_DICTS)
def _dict_item(f: Calls, owner: dict[Any, Any], key: Any) -> Any:
    try:
        return f.item_of_dict(owner, key, _template(owner, dict))
    except KeyError:
        missing = MISSING if type(owner) is dict else f.class_attribute(type(owner), "__missing__")
        if isinstance(missing, types.FunctionType):
            return f.call(missing, (owner, key))
        if missing is not MISSING:
            f.unguarded(f"it looks up a missing key of a {type(owner).__name__}")
            return owner[key]
        raise


@_method("get", of=_DICTS)
def _dict_get(f: Calls, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
    try:
        return f.item_of_dict(owner, key, _template(owner, dict))
    except KeyError:
        return default


@_method("__contains__", of=_DICTS)
def _dict_contains(f: Calls, owner: dict[Any, Any], key: Any) -> bool:
    key = f.own_key(owner, key)
    found = dict.__contains__(owner, key)
    f.record.check(owner, "dict.__contains__({}, {}) is {}", key, found)
    return found


@_method("__iter__", of=_DICTS)
def _dict_iter(f: Calls, owner: dict[Any, Any]) -> Any:
    return iter(f.keys(owner))


@_method("keys", of=_DICTS)
def _dict_keys(f: Calls, owner: dict[Any, Any]) -> Any:
    return dict.fromkeys(f.keys(owner)).keys() if f.record.has(owner) else owner.keys()


@_method("items", of=_DICTS)
def _dict_items(f: Calls, owner: dict[Any, Any]) -> Any:
    if not f.record.has(owner):
        return owner.items()
    return {k: f.item_of_dict(owner, k, _template(owner, dict)) for k in f.keys(owner)}.items()


@_method("__contains__", of=(type({}.items()),))
def _has_pair(f: Calls, owner: Any, pair: Any) -> bool:
    key, value = f.iterated(pair)
    if f.record.has(owner):
        f.unguarded("it reads a captured view of a dict")
    held = dict(owner)
    return f.contains(held, key) and f.truth(f.compare("==", f.get_item(held, key), value))


@_method("values", of=_DICTS)
def _dict_values(f: Calls, owner: dict[Any, Any]) -> Any:
    if not f.record.has(owner):
        return owner.values()
    return [f.item_of_dict(owner, k, _template(owner, dict)) for k in f.keys(owner)]


@_method("copy", of=(*_DICTS, list, set))
def _copy(f: Calls, owner: Any) -> Any:
    if f.record.has(owner) and type(owner) in BUILTIN_CONTAINERS:
        return f.contents(owner)
    base = _base(owner)
    if not f.record.has(owner):
        return base.copy(owner)
    if type(owner) is collections.OrderedDict or base is dict:
        return base(_dict_items(f, owner))
    return list(_sequence_items(f, owner)) if base is list else f.call_unknown(base.copy, (owner,), {})


@_method("__len__", of=(*_DICTS, list, tuple, set, frozenset))
def _container_len(f: Calls, owner: Any) -> int:
    base: Any = next(b for b in (dict, list, tuple, set, frozenset) if isinstance(owner, b))
    f.record.check(owner, f"{base.__name__}.__len__({{}}) == {{}}", base.__len__(owner))
    return base.__len__(owner)


@_method("__getitem__", of=(list, tuple))
def _sequence_item(f: Calls, owner: Any, key: Any) -> Any:
    if type(owner) in (list, tuple):
        return f.get_item(owner, key)
    base: Any = list if isinstance(owner, list) else tuple
    key = f.as_index(key)
    if isinstance(key, slice):
        return base(_sequence_items(f, owner))[key]
    try:
        found = base.__getitem__(owner, key)
    except IndexError:
        _container_len(f, owner)  # guards it
        raise
    return f.record.read_item(owner, _template(owner, base), key, found)


@_method("__iter__", of=(list, tuple))
def _sequence_items(f: Calls, owner: Any) -> Iterator[Any]:
    if type(owner) in (list, tuple):
        return iter(f.contents(owner))
    return iter([_sequence_item(f, owner, i) for i in range(_container_len(f, owner))])


@_method("__contains__", of=(list, tuple, set, frozenset))
def _sequence_contains(f: Calls, owner: Any, item: Any) -> bool:
    if type(owner) in BUILTIN_CONTAINERS:
        return f.contains(owner, item)
    return f.contains(list(_sequence_items(f, owner)) if isinstance(owner, (list, tuple)) else f.contents(owner), item)


@_method("index", of=(list, tuple))
def _position(f: Calls, owner: Any, item: Any, *limits: Any) -> int:
    items = list(_sequence_items(f, owner))
    if f.is_data(data := f.for_python(items)) and f.is_data(found := f.for_python(item)):
        return data.index(found, *map(f.as_index, limits))
    first, end = (*map(f.as_index, limits), *(None, None)[len(limits) :])
    for i in range(*slice(first, end).indices(len(items))):
        if f.is_equal(items[i], item):
            return i
    raise ValueError(f"{item!r} is not in {type(owner).__name__}")


@_method("count", of=(list, tuple))
def _occurrences(f: Calls, owner: Any, item: Any) -> int:
    items = list(_sequence_items(f, owner))
    if f.is_data(data := f.for_python(items)) and f.is_data(found := f.for_python(item)):
        return data.count(found)
    return sum(f.is_equal(own, item) for own in items)


@_method("pop", of=(list,))
def _pop(f: Calls, owner: list[Any], *position: Any) -> Any:
    f.changes(owner, "items")
    return list.pop(owner, *map(f.as_index, position))


@_method("extend", of=(list,))
def _extend(f: Calls, owner: list[Any], values: Any) -> None:
    f.changes(owner, "items")
    list.extend(owner, f.kept_by(owner, f.iterated(values)))


@_method("append", of=(list,))
def _append(f: Calls, owner: list[Any], value: Any) -> None:
    f.changes(owner, "items")
    list.append(owner, f.kept_by(owner, value))


@_method("sort", of=(list,))
def _sort(f: Calls, owner: list[Any], *, key: Any = None, reverse: Any = False) -> None:
    f.changes(owner, "items")
    list.__setitem__(owner, slice(None), f.kept_by(owner, _sorted(f, owner, key=key, reverse=reverse)))


@_method("insert", of=(list,))
def _insert(f: Calls, owner: list[Any], position: Any, value: Any) -> None:
    f.changes(owner, "items")
    list.insert(owner, f.as_index(position), f.kept_by(owner, value))


@_method("remove", of=(list,))
def _remove(f: Calls, owner: list[Any], value: Any) -> None:
    f.changes(owner, "items")
    for i, item in enumerate(owner):
        if f.is_equal(item, value):
            list.__delitem__(owner, i)
            return
    raise ValueError("list.remove(x): x not in list")


@_method("setdefault", of=_DICTS)
def _setdefault(f: Calls, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
    try:
        return f.item_of_dict(owner, key, _template(owner, dict))
    except KeyError:
        f.changes(owner, "an item")
    return _base(owner).setdefault(owner, f.own_key(owner, key), f.kept_by(owner, default))


@_method("update", of=_DICTS)
def _update(f: Calls, owner: dict[Any, Any], /, *others: Any, **items: Any) -> None:
    f.changes(owner, "items")
    for other in (*others, items):
        for key, value in f.kept_by(owner, _dict(f, other)).items():
            _base(owner).__setitem__(owner, f.own_key(owner, key), value)


@_method("join", of=(str,))
def _join(f: Calls, owner: str, values: Any) -> str:
    return owner.join(f.for_python(f.iterated(values)))


@_method("__call__", of=(operator.attrgetter, operator.itemgetter, operator.methodcaller))
def _getter(f: Calls, owner: Any, value: Any) -> Any:
    """Apply an itemgetter, attrgetter or methodcaller. Its arguments never change."""
    kind, given = owner.__reduce__()[:2]
    if kind is not type(owner) or not f.is_data(given):  # a methodcaller with keywords, or keys that are objects
        return f.call_unknown(owner, (value,), {})
    f.record.check(owner, "repr({}.__reduce__()[1]) == {}", repr(given))  # 1 and 1.0 may be two keys
    if kind is operator.methodcaller:
        return f.call(f.get_attribute(value, given[0]), given[1:])
    get = f.get_item if kind is operator.itemgetter else lambda x, names: functools.reduce(
        f.get_attribute, names.split("."), x)  # fmt: skip
    found = [get(value, name) for name in given]
    return tuple(found) if len(found) > 1 else found[0]


@_method("__call__", of=(weakref.ReferenceType,))
def _referent(f: Calls, owner: Any) -> Any:
    return f.record.read(owner, "{}()", owner())


@_method("get", of=(ContextVar,))
def _context_variable(f: Calls, owner: Any, *default: Any) -> Any:
    return f.record.read(owner, "{}.get()", owner.get()) if not default else f.call_unknown(owner.get, default, {})


def _of_generator(name: str) -> Callable[..., Any]:
    def method(f: Calls, owner: Any, *args: Any) -> Any:
        if f.record.has(owner):
            f.unguarded("it runs a captured generator")
        return getattr(owner, name)(*args)

    return method


for _name in ("__next__", "send", "throw", "close"):
    _METHODS[types.GeneratorType, _name] = _of_generator(_name)

# Torch functions that inspect Python objects.

_FUNCTIONS[torch.is_tensor] = lambda f, x: isinstance(x, Tensor)


def _tables() -> Iterable[tuple[int, tuple[Any, Callable[..., Any]]]]:
    return ((id(function), (function, handler)) for function, handler in _FUNCTIONS.items())


Calls.known_functions.update(_tables())
Calls.known_methods.update(_METHODS)
