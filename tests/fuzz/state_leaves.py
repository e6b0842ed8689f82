"""The places of a program's state that can be changed, found by gc.get_referents, and what is written there.

The walk starts at the mod and the modules of the program and never enters a library. It knows nothing of the program.
To add a kind of place: a function with @places_of(the type of its owner). To add another value of a type: ALTERED.
"""

from __future__ import annotations

import builtins
import collections
import copy
import enum
import functools
import gc
import os
import random
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.trace.follow.libraries import is_library

Undo = Callable[[], None]
MISSING: Any = object()


@dataclass(frozen=True)
class Place:
    """A place that can be changed; `change` returns what undoes it, and raises where it cannot be done."""

    kind: str
    where: str
    change: Callable[[Pool], Undo]


@dataclass(frozen=True)
class Pool:
    """All that the walk found, by type: what takes the place of something is often another of its kind."""

    draw: random.Random
    found: Mapping[type, list[Any]]

    def others(self, value: Any) -> list[Any]:
        return [o for o in self.found.get(type(value), []) if o is not value]

    def other(self, value: Any) -> Any:
        """Return something to put where `value` is."""
        draw = self.draw.random()
        if draw < 0.08:
            return self.draw.choice((None, True, 2, 1.5, "a", 3, ()))
        found = self.others(value)
        if draw < 0.3 and found:
            return self.draw.choice(found)
        kind = next((k for k in type(value).__mro__ if k in ALTERED), object)
        return ALTERED[kind](self, value)


# The walk.

# What Python keeps in these is not what it would compute now.
_CLOSED = (
    types.BuiltinFunctionType, types.CodeType, types.FrameType, functools._lru_cache_wrapper, functools.cached_property,
)  # fmt: skip


def _is_of_library(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return is_library(value.__name__)
    if isinstance(value, (type, types.FunctionType)):
        return is_library(value.__module__)
    return isinstance(value, _CLOSED)


def _is_scope(value: dict[Any, Any]) -> bool:
    """Tell whether a dict has the globals of functions, or of a module."""
    return "__builtins__" in value or "__loader__" in value


def _referents(value: Any) -> Iterable[Any]:
    if isinstance(value, enum.Enum):  # a member does not change
        return []
    if isinstance(value, Tensor):
        return [value.__dict__]
    if isinstance(value, type):  # never the dict itself: writing there goes past Python's own caches
        return [*vars(value).values(), *value.__bases__, type(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):  # its module is walked by its own name
        return [r for r in gc.get_referents(value) if r is not value.__globals__ or "__file__" not in r]
    return gc.get_referents(value)


def walk(roots: Iterable[Any]) -> list[Any]:
    """Return what can be reached from the roots, in the order in which it was found."""
    found: dict[int, Any] = {}
    queue = collections.deque(roots)
    stop = {id(vars(builtins))}
    while queue:
        value = queue.popleft()
        if id(value) in found or id(value) in stop or _is_of_library(value):
            continue
        found[id(value)] = value
        if isinstance(value, dict) and _is_scope(value):  # not what a module imports
            queue.extend(v for k, v in value.items() if not (isinstance(k, str) and k.startswith("__")))
        else:
            queue.extend(_referents(value))
    return list(found.values())


def pool_of(values: Iterable[Any], draw: random.Random) -> Pool:
    """Return the values by type."""
    found: dict[type, list[Any]] = collections.defaultdict(list)
    for value in values:
        found[type(value)].append(value)
    return Pool(draw, found)


def _shown(value: Any) -> str:
    """Return the repr of an object of the program, which a change may have broken."""
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def places(values: Iterable[Any], sources: str) -> list[Place]:
    """Return all places in the values, and the environment variables that the sources name."""
    values = [v for v in values if not isinstance(v, enum.Enum)]
    return [p for v in values for kind, find in _PLACES if isinstance(v, kind) for p in find(v)] + [
        *environment(sources), *shadows(values),
    ]  # fmt: skip


# Places.

_PLACES: list[tuple[Any, Callable[[Any], Iterator[Place]]]] = []


def places_of(*kinds: Any) -> Callable[[Any], Any]:
    """Note which places objects of some types have."""

    def note(find: Any) -> Any:
        _PLACES.append((kinds, find))
        return find

    return note


def _set(setter: Callable[[Any], None], deleter: Callable[[], None], old: Any, new: Any) -> Undo:
    """Write, and return what writes the old value."""
    if new is MISSING:
        deleter()
    else:
        setter(new)
    return (lambda: setter(old)) if old is not MISSING else deleter


def _store(kind: str, where: str, setter: Any, deleter: Any, old: Any) -> Iterator[Place]:
    """Yield what can be done to a value that something holds: replaced, or removed."""
    yield Place(kind, where, lambda pool: _set(setter, deleter, old, pool.other(old)))
    yield Place(kind, where, lambda pool: _set(setter, deleter, old, pool.other(old)))
    if deleter is not None:
        yield Place(f"no {kind}", where, lambda pool: _set(setter, deleter, old, MISSING))


@places_of(dict)
def _items(owner: dict[Any, Any]) -> Iterator[Place]:
    is_scope = _is_scope(owner)
    kind = "global" if is_scope else "item"
    for key, old in list(dict.items(owner)):
        if isinstance(key, weakref.ref):  # C code keeps itself what such a dict holds
            return
        if is_scope and (str(key).startswith("__") or _is_of_library(old)):
            continue
        yield from _store(
            kind, f"[{_shown(key)}]", functools.partial(_dict_of(owner).__setitem__, owner, key),
            functools.partial(_delete_item, owner, key), old,
        )  # fmt: skip
    if not is_scope and owner:
        key = next(iter(owner))
        yield Place("new item", "{}", lambda pool: _new_item(owner, pool.other(key), pool.other(owner[key])))
        yield Place("order of a dict", "{}", lambda pool: _restore(owner, lambda: owner.update({key: owner.pop(key)})))


def _dict_of(owner: dict[Any, Any]) -> Any:
    """Return whose methods change a dict: of a class of the user, not the user's own."""
    return collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict


def _delete_item(owner: dict[Any, Any], key: Any) -> None:
    _dict_of(owner).pop(owner, key)


def _new_item(owner: dict[Any, Any], key: Any, value: Any) -> Undo:
    if key in owner:
        raise ValueError
    _dict_of(owner).__setitem__(owner, key, value)
    return functools.partial(_delete_item, owner, key)


def _restore(owner: Any, change: Callable[[], Any]) -> Undo:
    """Change a container; undone, it holds what it held, in that order."""
    base = next(b for b in (dict, list, set, collections.deque) if isinstance(owner, b))
    before = list(dict.items(owner)) if base is dict else list(base.__iter__(owner))
    change()

    def undo() -> None:
        base.clear(owner)
        (base.extend if base in (list, collections.deque) else base.update)(owner, before)

    return undo


@places_of(list, collections.deque)
def _elements(owner: Any) -> Iterator[Place]:
    base = list if isinstance(owner, list) else collections.deque
    for i, old in enumerate(base.__iter__(owner)):
        yield Place("element", f"[{i}]", lambda pool, i=i, old=old: _set(
            functools.partial(base.__setitem__, owner, i), lambda: None, old, pool.other(old)))  # fmt: skip
        if i == 0:
            yield Place("more elements", "[]", lambda pool, old=old: _restore(
                owner, lambda: base.append(owner, pool.other(old))))  # fmt: skip
            yield Place("less elements", "[]", lambda pool: _restore(owner, lambda: base.pop(owner)))
            yield Place("order of a list", "[]", lambda pool: _restore(owner, lambda: base.reverse(owner)))


def _order(x: Any) -> str:
    """Return what sorts the members of a set in the same order in every process."""
    return repr(x) if isinstance(x, int | float | str) else type(x).__name__


@places_of(set)
def _members(owner: set[Any]) -> Iterator[Place]:
    for x in sorted(owner, key=_order):
        yield Place("member", "{}", lambda pool, x=x: _restore(owner, lambda: owner.discard(x)))
        yield Place("member", "{}", lambda pool, x=x: _restore(owner, lambda: owner.add(pool.other(x))))


@places_of(types.CellType)
def _cell(owner: types.CellType) -> Iterator[Place]:
    try:
        old = owner.cell_contents
    except ValueError:
        return
    yield from _store("cell", "cell", *_attribute(owner, "cell_contents"), old)


def _attribute(owner: Any, name: str) -> tuple[Callable[[Any], None], Callable[[], None]]:
    return functools.partial(setattr, owner, name), functools.partial(delattr, owner, name)


@places_of(types.FunctionType)
def _function(owner: types.FunctionType) -> Iterator[Place]:
    where = owner.__qualname__
    if owner.__defaults__:
        yield from _store("defaults", where, *_attribute(owner, "__defaults__"), owner.__defaults__)
    if owner.__kwdefaults__:
        yield from _store("defaults", where, *_attribute(owner, "__kwdefaults__"), owner.__kwdefaults__)
    yield Place("code", where, lambda pool: _set(
        *_attribute(owner, "__code__"), owner.__code__, _other_code(pool, owner)))  # fmt: skip


@places_of(type)
def _class(owner: type) -> Iterator[Place]:
    if owner.__module__ == "builtins":
        return
    skipped = (
        "__dict__", "__weakref__", "__module__", "__doc__", "__slots__", "__annotations__", "__abstractmethods__",
        "_abc_impl", "__slotnames__", "__getattribute__", "__parameters__", "__orig_bases__",
    )  # fmt: skip
    for name, old in list(vars(owner).items()):
        if name in skipped or isinstance(old, types.MemberDescriptorType):
            continue
        setter, deleter = (
            functools.partial(type.__setattr__, owner, name),
            functools.partial(type.__delattr__, owner, name),
        )
        yield from _store("class attribute", f"{owner.__name__}.{name}", setter, deleter, old)
    for base in owner.__mro__[1:]:
        if base is object or _is_of_library(base):
            continue
        for name, old in list(vars(base).items()):
            if (
                not name.startswith("__")
                and name not in vars(owner)
                and not isinstance(old, types.MemberDescriptorType)
            ):
                setter, deleter = (functools.partial(f, owner, name) for f in (type.__setattr__, type.__delattr__))
                yield Place(
                    "shadow in a class", f"{owner.__name__}.{name}", functools.partial(_shadow, setter, deleter, old)
                )
    yield Place("bases", owner.__name__, lambda pool: _set(
        *_attribute(owner, "__bases__"), owner.__bases__, _other_bases(pool, owner)))  # fmt: skip
    yield Place("name of a class", owner.__name__, lambda pool: _set(
        *_attribute(owner, "__name__"), owner.__name__, owner.__name__ + "x"))  # fmt: skip
    yield Place("new method", owner.__name__, lambda pool: _new_method(pool, owner))


_NEW_METHODS: dict[str, Any] = {
    "__getattr__": lambda self, name: 7 if not name.startswith("__") else object.__getattribute__(self, name),
    "__getattribute__": lambda self, name: 6 if name == "width" else object.__getattribute__(self, name),
    "__len__": lambda self: 5,
    "__bool__": lambda self: False,
    "__eq__": lambda self, other: True,
    "__call__": lambda self, *args, **kwargs: 8,
    "__contains__": lambda self, x: True,
    "__iter__": lambda self: iter((9, 10)),
    "__getitem__": lambda self, i: 11,
    "__radd__": lambda self, other: 12,
    "__lt__": lambda self, other: True,
    "__format__": lambda self, spec: "formatted",
    "__index__": lambda self: 1,
    "__missing__": lambda self, key: 13,
    "__init__": lambda self, *args, **kwargs: None,
}


def _shadow(setter: Callable[[Any], None], deleter: Callable[[], None], old: Any, pool: Pool) -> Undo:
    return _set(setter, deleter, MISSING, pool.other(old))


def _new_method(pool: Pool, owner: type) -> Undo:
    name = pool.draw.choice(list(_NEW_METHODS))
    if name in vars(owner):
        raise ValueError
    type.__setattr__(owner, name, _NEW_METHODS[name])
    return functools.partial(type.__delattr__, owner, name)


def _other_bases(pool: Pool, owner: type) -> tuple[type, ...]:
    classes = [c for c in pool.others(owner) if not issubclass(c, owner)]
    if len(owner.__bases__) > 1 and pool.draw.random() < 0.5:
        return owner.__bases__[::-1]
    return (pool.draw.choice(classes), *owner.__bases__[1:])


@places_of(object)
def _instance(owner: Any) -> Iterator[Place]:
    kind = type(owner)
    if isinstance(owner, (type, types.ModuleType, types.FunctionType)) or (
        _is_of_library(kind) and not hasattr(owner, "__dict__")
    ):
        return
    held = owner.__dict__ if isinstance(getattr(owner, "__dict__", None), dict) else None
    if held is not None and not isinstance(owner, Tensor):
        # A dict of inline attributes is made by this access alone: gc does not reach it.
        yield from (p for p in _items(held) if p.kind != "new item")
    for base in kind.__mro__:
        for name, slot in list(vars(base).items()):
            if isinstance(slot, types.MemberDescriptorType) and not _is_of_library(base):
                old = getattr(owner, name, MISSING)
                setter, deleter = functools.partial(slot.__set__, owner), functools.partial(slot.__delete__, owner)
                if old is MISSING:
                    yield Place("slot", name, lambda pool, s=setter, d=deleter: _set(s, d, MISSING, pool.other(2)))
                else:
                    yield from _store("slot", name, setter, deleter, old)
            elif held is not None and not name.startswith("__") and name not in held and not _is_of_library(base):
                yield Place("shadow in an instance", name, lambda pool, name=name, old=slot: _set(
                    functools.partial(held.__setitem__, name), functools.partial(held.pop, name), MISSING,
                    _as_attribute(pool, owner, name, old)))  # fmt: skip
    if not _is_of_library(kind):
        setter = functools.partial(object.__setattr__, owner, "__class__")
        yield Place("class", kind.__name__, lambda pool: _set(
            setter, lambda: None, kind, pool.draw.choice(_siblings(pool, kind))))  # fmt: skip


def _as_attribute(pool: Pool, owner: Any, name: str, old: Any) -> Any:
    """Return what an instance may hold itself instead of an attribute of its class."""
    return (lambda *args, **kwargs: 14) if isinstance(old, types.FunctionType) else pool.other(old)


def _siblings(pool: Pool, kind: type) -> list[type]:
    return [type(f"Sub{kind.__name__}", (kind,), {}), *(c for c in pool.others(kind) if c.__base__ is kind.__base__)]


@places_of(functools.partial)
def _partial(owner: functools.partial[Any]) -> Iterator[Place]:
    def change(pool: Pool) -> Undo:
        _, (_, args, keywords, held) = owner.__reduce__()[1], owner.__reduce__()[2]
        func, before = owner.func, (owner.func, args, keywords, held)
        new = (pool.other(func), args) if pool.draw.random() < 0.5 else (func, pool.other(args))
        owner.__setstate__((*new, keywords, held))
        return lambda: owner.__setstate__(before)

    yield Place("partial", "partial", change)


@places_of(Tensor)
def _tensor(owner: Tensor) -> Iterator[Place]:
    yield Place("tensor in place", "tensor", lambda pool: _in_place(owner))
    yield Place("tensor in place", "tensor", lambda pool: _in_place(owner))
    yield Place(
        "data of a tensor", "tensor", lambda pool: _set(*_attribute(owner, "data"), owner.data, pool.other(owner).data)
    )
    if owner.is_leaf and owner.is_floating_point():
        yield Place("requires_grad", "tensor", lambda pool: _set(
            *_attribute(owner, "requires_grad"), owner.requires_grad, not owner.requires_grad))  # fmt: skip
    yield Place("attribute of a tensor", "tensor", lambda pool: _new_item(owner.__dict__, "width", 4))


def _in_place(owner: Tensor) -> Undo:
    before = owner.detach().clone()
    with torch.no_grad():
        owner.view(-1)[:1].add_(1)

    def undo() -> None:
        with torch.no_grad():
            owner.copy_(before)

    return undo


@places_of(torch.nn.Module)
def _module(owner: torch.nn.Module) -> Iterator[Place]:
    yield Place(
        "forward hook", "hook", lambda pool: owner.register_forward_hook(lambda module, args, out: out + 2).remove
    )
    yield Place("forward pre-hook", "hook", lambda pool: owner.register_forward_pre_hook(
        lambda module, args: tuple(a + 1 for a in args)).remove)  # fmt: skip
    yield Place("training", "training", lambda pool: _trained(owner))
    yield Place("global hook", "hook", lambda pool: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out + 2).remove)  # fmt: skip


def _trained(owner: torch.nn.Module) -> Undo:
    was = owner.training
    owner.train(not was)
    return lambda: owner.train(was) and None


@places_of(ContextVar)
def _context_variable(owner: Any) -> Iterator[Place]:
    def change(pool: Pool) -> Undo:
        token = owner.set(pool.other(owner.get()))
        return lambda: owner.reset(token)

    yield Place("context variable", "var", change)


def environment(sources: str) -> Iterator[Place]:
    """Yield the environment variables that the sources name."""
    for name in dict.fromkeys(re.findall(r"\bFUZZED_\w+", sources)):
        old = os.environ.get(name, MISSING)
        setter, deleter = functools.partial(os.environ.__setitem__, name), functools.partial(os.environ.pop, name, None)
        for text in ("5", "12"):
            yield Place("environment", name, lambda pool, t=text, s=setter, d=deleter, o=old: _set(s, d, o, t))


_SHADOWS: dict[str, Any] = {
    "len": lambda x: 20, "abs": lambda x: 21, "max": lambda *x, **k: 22, "min": lambda *x, **k: 23, "sum": lambda x: 24,
    "int": lambda x: 25, "round": lambda x: 26, "isinstance": lambda x, c: False, "type": lambda x: None,
    "getattr": lambda x, n, *d: 27, "map": lambda f, *x: [28], "zip": lambda *x: [(29, 30)], "range": lambda *x: [31],
    "enumerate": lambda x: [(32, 33)], "sorted": lambda x, **k: [34], "super": lambda *x: None, "vars": lambda x: {},
}  # fmt: skip


def shadows(values: Iterable[Any]) -> Iterator[Place]:
    """Yield globals that would take the place of a builtin that a function uses."""
    functions = [v for v in values if isinstance(v, types.FunctionType)]
    for function in functions:
        scope = function.__globals__
        for name in function.__code__.co_names:
            if name in _SHADOWS and name not in scope:
                yield Place("shadow of a builtin", name, lambda pool, scope=scope, name=name: _new_item(
                    scope, name, _SHADOWS[name]))  # fmt: skip


# Other values.


def _other_int(pool: Pool, x: int) -> Any:
    return pool.draw.choice(
        (x + 1, x + 1, x + 2, x - 1, -x, 0, 1, x + 300, float(x), x + 0.5, 2**40 + x, np.int64(x + 1))
    )


def _other_float(pool: Pool, x: float) -> Any:
    return pool.draw.choice((x + 1, x * 2, x - 0.25, -x, 0.0, -0.0, int(x), np.float32(x + 1), 1e30, x + 1e-3))


def _other_str(pool: Pool, x: str) -> str:
    found = [s for s in pool.others(x) if s.isidentifier() and len(s) < 12]
    return pool.draw.choice((*found[:20], x + "x", x.upper(), x[1:]))


def _other_sequence(pool: Pool, x: Any) -> Any:
    items = list(tuple.__iter__(x) if isinstance(x, tuple) else x)
    draw = pool.draw.random()
    if items and draw < 0.6:
        i = pool.draw.randrange(len(items))
        items[i] = pool.other(items[i])
    elif items and draw < 0.8:
        items = items[::-1] if draw < 0.7 else items[:-1]
    else:
        items.append(pool.other(items[-1] if items else 1))
    return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)


def _other_mapping(pool: Pool, x: Any) -> Any:
    new = copy.copy(x)
    if new:
        key = pool.draw.choice(list(new))
        new[key] = pool.other(new[key])
    return new


def _other_set(pool: Pool, x: Any) -> Any:
    return type(x)([*sorted(x, key=_order)[1:], pool.other(next(iter(x), 1))])


def _other_code(pool: Pool, function: types.FunctionType) -> types.CodeType:
    code = function.__code__
    alike = [
        f.__code__ for f in pool.others(function)
        if len(f.__code__.co_freevars) == len(code.co_freevars) and f.__code__.co_argcount == code.co_argcount
    ]  # fmt: skip
    constants = tuple(c + 1 if type(c) in (int, float) else c for c in code.co_consts)
    changed = code.replace(co_consts=constants)
    return pool.draw.choice((changed, changed, *alike[:3]))


def _other_function(pool: Pool, function: types.FunctionType) -> Any:
    if pool.draw.random() < 0.5:
        return _more(function)
    made = types.FunctionType(
        _other_code(pool, function), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _more(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) + 1


def _other_class(pool: Pool, cls: type) -> type:
    return pool.draw.choice(_siblings(pool, cls))


def _other_tensor(pool: Pool, x: Tensor) -> Tensor:
    x = x.detach()
    return pool.draw.choice((
        x + 1, x.clone(), x.double() + 1, x.long(), torch.cat((x.reshape(-1), x.reshape(-1))), x.bool(),
        (x + 2).double().requires_grad_(), torch.nn.Parameter(x.double()), x.expand(2, *x.shape),
    ))  # fmt: skip


def _other_object(pool: Pool, x: Any) -> Any:
    """Return a copy of which one attribute is another."""
    new = copy.copy(x)
    held = getattr(new, "__dict__", None)
    if isinstance(held, dict) and held:
        name = pool.draw.choice(list(held))
        held[name] = pool.other(held[name])
    return new


ALTERED: dict[type, Callable[[Pool, Any], Any]] = {
    object: _other_object,
    type(None): lambda pool, x: pool.draw.choice((1, 2.5, "a")),
    bool: lambda pool, x: not x,
    int: _other_int,
    float: _other_float,
    str: _other_str,
    tuple: _other_sequence,
    list: _other_sequence,
    collections.deque: _other_sequence,
    dict: _other_mapping,
    set: _other_set,
    frozenset: _other_set,
    enum.Enum: lambda pool, x: pool.draw.choice(list(type(x))),
    types.FunctionType: _other_function,
    types.MethodType: lambda pool, x: pool.draw.choice((
        types.MethodType(x.__func__, pool.other(x.__self__)), types.MethodType(pool.other(x.__func__), x.__self__))),
    type: _other_class,
    property: lambda pool, x: property(pool.other(x.fget), x.fset),
    staticmethod: lambda pool, x: staticmethod(pool.other(x.__func__)),
    classmethod: lambda pool, x: classmethod(pool.other(x.__func__)),
    functools.partial: lambda pool, x: functools.partial(x, 1) if pool.draw.random() < 0.3 else functools.partial(
        pool.other(x.func), *x.args, **x.keywords),
    torch.dtype: lambda pool, x: pool.draw.choice((torch.float16, torch.float32, torch.float64)),
    Tensor: _other_tensor,
    np.generic: lambda pool, x: pool.draw.choice((type(x)(x + 1), x.item() + 1, np.float64(x))),
    weakref.ref: lambda pool, x: weakref.ref(pool.draw.choice(pool.others(x()) or [x()])),
    functools._lru_cache_wrapper: lambda pool, x: x.__wrapped__,
}  # fmt: skip
