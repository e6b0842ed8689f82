"""Followed mods do what Python does, and see what changes: short forms of what the state fuzzer found."""

from __future__ import annotations

import abc
import contextvars
import enum
import operator
import weakref
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import pytest
import torch

from flexattn.errors import ModError, RetraceWarning
from flexattn.trace.trace import trace

PLACE = [torch.tensor(n, dtype=torch.int32) for n in (0, 1, 2, 3)]


def value(read: Callable[[], Any]) -> float:
    """Return what a mod adds to the score, traced, and check that Python adds the same."""

    def mod(score, b, h, q, k):
        return score + read()

    found = trace(mod, "score")(torch.tensor(0.0), *PLACE).item()
    assert found == float(mod(torch.tensor(0.0), *PLACE))
    return found


def made_by_exec(source: str) -> dict[str, Any]:
    """Return the globals of a source that runs in no module: its classes say that they are of builtins."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope


def test_a_class_made_by_exec_is_the_users_own() -> None:
    scope = made_by_exec(
        "class Meta(type):\n"
        "    def __iter__(cls):\n        return iter(cls.members)\n"
        "    def __getattr__(cls, name):\n        return len(name)\n"
        "class Box(metaclass=Meta):\n    members = [3, 4]\n    width = 3\n"
        "    def __init__(self):\n        self.n = self.width\n"
    )
    box = scope["Box"]
    assert value(lambda: sum(box) + box().n) == 10
    box.width, box.members[0] = 5, 6
    assert value(lambda: sum(box) + box().n) == 15


class Low:
    def __init__(self, n: int) -> None:
        self.n = n

    def __lt__(self, other: Low) -> bool:
        return self.n < other.n

    def __add__(self, other: object) -> int:
        return 10

    def __radd__(self, other: object) -> int:
        return 20


class High(Low):
    def __add__(self, other: object) -> int:
        return 30


class Higher(Low):
    def __radd__(self, other: object) -> int:
        return 40


def test_reflected_methods_are_called_where_python_calls_them() -> None:
    assert value(lambda: max([Low(1), Low(3), Low(2)]).n) == 3  # by __lt__ of the other
    assert value(lambda: Low(1) + High(1)) == 10  # __radd__ is the same one
    assert value(lambda: Low(1) + Higher(1)) == 40


class Nosy:
    """Its attributes are made up by its own code."""

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":  # which isinstance() reads
            raise TypeError(f"nobody asked for {name}")
        return object.__getattribute__(self, name)

    def __call__(self) -> int:
        return 3


def test_calling_an_object_reads_none_of_its_attributes() -> None:
    nosy = Nosy()
    assert value(lambda: nosy()) == 3


def test_requires_grad_of_a_captured_tensor() -> None:
    bias = torch.tensor(1.0)
    read = lambda: 1 if bias.requires_grad else 2  # noqa: E731
    assert value(read) == 2
    bias.requires_grad_()
    assert value(read) == 1


def test_isinstance_after_other_bases() -> None:
    class Base: ...

    class Other: ...

    class Some(Base): ...

    some = Some()
    read = lambda: 10 * isinstance(some, Base) + issubclass(type(some), Base)  # noqa: E731
    assert value(read) == 11
    Some.__bases__ = (Other,)
    assert value(read) == 0


class Shape(abc.ABC):  # noqa: B024
    """Abstract; others may be registered."""


@runtime_checkable
class Sized(Protocol):
    def size(self) -> int: ...


def test_isinstance_of_abstract_classes_and_protocols() -> None:
    class Square: ...

    square = Square()
    read = lambda: 10 * isinstance(square, Shape) + isinstance(square, Sized)  # noqa: E731
    assert value(read) == 0
    Shape.register(Square)
    assert value(read) == 10
    square.size = lambda: 3
    assert value(read) == 11


def test_what_a_new_of_the_user_reads() -> None:
    def made_with(shift: int) -> type:
        class Made:
            def __new__(cls, n: int) -> Any:
                made = super().__new__(cls)
                made.width = n + shift
                return made

        return Made

    made = made_with(1)
    read = lambda: made(2).width  # noqa: E731
    assert value(read) == 3
    made.__new__.__closure__[1].cell_contents = 5
    assert value(read) == 7


def test_a_class_without_init_takes_no_arguments() -> None:
    class Made:
        def __init__(self, n: int) -> None:
            self.n = n

    read = lambda: Made(2).n  # noqa: E731
    assert value(read) == 2
    del Made.__init__
    with pytest.raises(ModError, match="takes no arguments"):
        value(read)


@pytest.mark.parametrize(
    ("method", "wrong", "read"),
    [
        ("__len__", 2.5, len), ("__len__", -1, len), ("__bool__", 1, bool), ("__int__", 2.5, int),
        ("__float__", 2, float),
        ("__repr__", 3, lambda x: len(repr(x))), ("__format__", 3, lambda x: len(f"{x}")),
    ],
)  # fmt: skip
def test_methods_must_return_what_python_takes(method: str, wrong: object, read: Callable[[Any], Any]) -> None:
    some = type("Some", (), {method: lambda self, *args: wrong})()
    with pytest.raises(ModError, match="Error"):
        value(lambda: read(some))


class Key:
    """Equal to keys of the same number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __hash__(self) -> int:
        return hash(self.n)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.n == other.n


class Mode(enum.Enum):
    NEAR = 1
    FAR = 2


def test_lookups_by_objects_with_a_hash_of_their_own() -> None:
    keys: list[Any] = [Key(3), Mode.NEAR]
    table: dict[Any, int] = {Key(3): 4, Key(5): 6, Mode.NEAR: 10, Mode.FAR: 20}
    read = lambda: table[keys[0]] + table[keys[1]]  # noqa: E731
    assert value(read) == 14
    keys[0].n = 5
    assert value(read) == 16
    keys[:] = Key(3), Mode.FAR
    assert value(read) == 24
    table[Key(3)] = 7
    assert value(read) == 27


def test_getters_weak_references_and_context_variables() -> None:
    class Some:
        def __init__(self, n: int) -> None:
            self.n, self.items = n, [n, n + 1]

        def plus(self, m: int) -> int:
            return self.n + m

    some = Some(1)
    context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=1000)
    got = SimpleNamespace(
        attribute=operator.attrgetter("n"), item=operator.itemgetter(1), method=operator.methodcaller("plus", 10),
        some=weakref.ref(some),
    )  # fmt: skip

    def read() -> Any:
        found = got.some()
        return got.attribute(found) + 100 * got.item(found.items) + got.method(found) + context.get()

    assert value(read) == 1 + 200 + 11 + 1000
    some.n = 2
    assert value(read) == 2 + 200 + 12 + 1000
    got.item, got.method = operator.itemgetter(0), operator.methodcaller("plus", 20)
    context.set(2000)
    assert value(read) == 2 + 100 + 22 + 2000
    other = Some(5)
    got.some = weakref.ref(other)
    assert value(read) == 5 + 500 + 25 + 2000


def test_the_bases_of_operands_and_of_exceptions() -> None:
    class Wide(Low):
        def __radd__(self, other: object) -> int:
            return 40

    class Bad(Exception): ...

    class Worse(Bad): ...

    class Other(Exception): ...

    caught = (KeyError, Bad)

    def read() -> int:
        try:
            raise Worse
        except caught:
            return Low(1) + Wide(1)
        except Exception:
            return -1

    assert value(read) == 40
    Worse.__bases__ = (Other,)
    assert value(read) == -1
    Worse.__bases__ = (Bad,)
    assert value(read) == 40
    caught = (KeyError, ValueError)
    assert value(read) == -1
    caught = Worse
    Wide.__bases__ = (Key,)
    assert value(lambda: read()) == 10


def test_sets_that_are_compared_whole() -> None:
    members = frozenset((3, 5))
    read = lambda: sum(x * 2 for x in members)  # noqa: E731
    assert value(read) == 16
    members = frozenset((4, 5))
    assert value(read) == 18


class Anything:
    """It has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + 1


def test_a_mod_that_makes_up_attributes() -> None:
    assert trace(Anything(), "score")(torch.tensor(0.0), *PLACE).item() == 1


def test_the_arguments_of_class_patterns() -> None:
    class Some:
        __match_args__: Any = ("width",)
        width, step = 3, 5

    some, more = Some(), High(2)

    def read() -> int:
        match some, more, 7:
            case Some(found), High(n=n), int(number):
                return found + n + number
        return 0

    assert value(read) == 12
    Some.__match_args__ = ("step",)
    assert value(read) == 14
    Some.__match_args__ = (3,)
    with pytest.raises(ModError, match="tuple of strings"):
        value(read)


def test_a_key_that_is_a_namedtuple_is_no_constant() -> None:
    Place = namedtuple("Place", "x y")
    table = {Place(1, 2): 4, Place(1, 3): 5}
    place = Place(1, 2)
    read = lambda: table[place]  # noqa: E731
    with pytest.warns(RetraceWarning, match="__hash__"):
        assert value(read) == 4
    place = Place(1, 3)
    assert value(read) == 5


def test_a_str_that_is_no_function() -> None:
    class Some:
        def __repr__(self) -> str:
            return "some"

    some = Some()
    read = lambda: len(str(some))  # noqa: E731
    assert value(read) == 4
    Some.__str__ = 3
    with pytest.raises(ModError, match="not callable"):
        value(read)


@pytest.mark.parametrize("read", [lambda x, n: getattr(x, n, 3), hasattr, object.__getattribute__])
def test_the_name_of_an_attribute_is_a_string(read: Callable[..., Any]) -> None:
    held, name = Low(1), "n"

    def mod(score, b, h, q, k):
        return score + read(held, name)

    trace(mod, "score")
    name = True
    with pytest.raises(Exception, match="attribute name must be string, not 'bool'"):
        mod(torch.tensor(0.0), *PLACE)
    with pytest.raises(Exception, match="attribute name must be string, not 'bool'"):
        trace(mod, "score")
