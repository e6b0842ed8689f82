"""follow: what C functions read of their arguments is read under guard, or the mod is traced at each call."""

from __future__ import annotations

import bisect
import collections
import copy
import datetime
import decimal
import functools
import itertools
import math
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from followed_mods import Config, compare, traced

from flexattn.errors import RetraceWarning
from flexattn.trace.trace import stats


class Number:
    """An object that C code converts to a number or to text."""

    def __init__(self, n: int = 2) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n

    def __float__(self) -> float:
        return float(self.n)

    def __str__(self) -> str:
        return str(self.n)

    def __pow__(self, exponent: int, modulus: int | None = None) -> int:
        return pow(self.n, exponent, modulus)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self.n + other, 1


class Items(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    __slots__ = ()


class Names(dict[str, Any]):
    pass


class Weight(float):
    pass


class Count(int):
    pass


class Twice(int):
    def __new__(cls, n: int) -> Twice:
        return super().__new__(cls, 2 * n)


class Text(str):
    __slots__ = ()


class Point(NamedTuple):
    x: float
    y: float


Read = Callable[[], Any]
Changed = Iterator[Read]  # yields what a mod adds to the score, and changes what it reads
CHANGES: dict[str, Callable[[], Changed]] = {}


def change(case: Callable[[], Changed]) -> Callable[[], Changed]:
    CHANGES[case.__name__] = case
    return case


def number(read: Callable[[Number], Any]) -> Callable[[], Changed]:
    """Return a case in which a number's value changes."""

    def case() -> Changed:
        n = Number()
        yield lambda: read(n)
        n.n = 5

    return case


def container(value: Any, read: Callable[[Any], Any], update: Callable[[Any], Any]) -> Callable[[], Changed]:
    """Return a case in which a copy of a container is changed."""

    def case() -> Changed:
        own = copy.copy(value)
        yield lambda: read(own)
        update(own)

    return case


def at(key: Any) -> Callable[[Any], None]:
    return lambda own: own.__setitem__(key, 4.0)


NUMBERS = {
    "the tolerance of math.isclose": lambda n: math.isclose(1.0, 4.0, abs_tol=n),
    "the repetitions of a product": lambda n: len(list(itertools.product("ab", repeat=n))),
    "the base of a number's text": lambda n: int("11", n),
    "a derived float": lambda n: float(Weight(n)),
    "a derived int": lambda n: int(Count(n)),
    "an int with its own __new__": lambda n: int(Twice(n.n)),
    "a derived text": lambda n: float(Text(n)),
    "a power with a modulus": lambda n: pow(n, 2, 100),
    "a quotient": lambda n: divmod(n, 2)[0],
    "digits": lambda n: round(math.pi, ndigits=n),
    "a new list": lambda n: [0, *[1] * 5].pop(n) + n.n,
    "the position of a new item": lambda n: (items := [0, 0, 0, 0, 0, 0], items.insert(n, 1), items.index(1))[2],
    "a named tuple": lambda n: Point(n.n, 1.0).x,
    "a position in a derived list": lambda n: Items(range(6))[n],
    "a position in a derived tuple": lambda n: Pair(range(6))[n],
    "a method of a new list": lambda n: len([1].__mul__(n)),
    "a key of bisect": lambda n: bisect.bisect_left([1, 2, 3, 4], 8, key=lambda v: v * n.n),
}
CONTAINERS: dict[str, Any] = {
    "keywords of numpy": (np.array([0.0, 1.0]), lambda a: np.interp(1.0, xp=[0.0, 1.0], fp=a), at(1)),
    "a limit of numpy": (np.array([0.0, 1.0]), lambda a: np.clip(0.0, a_min=a[1:], a_max=9.0)[0], at(1)),
    "a copy of an OrderedDict": (OrderedDict(a=1.0), lambda d: d.copy()["a"], at("a")),
    "a copy of a derived list": (Items([1.0]), lambda d: d.copy()[0], at(0)),
    "a copy of a derived dict": (Names(a=1.0), lambda d: d.copy()["a"], at("a")),
    "a list of a list": (Items([1.0]), lambda d: Items(d)[0], at(0)),
    "a list of a deque": (deque([1.0]), lambda d: Items(d)[0], at(0)),
    "a dict of a dict": (OrderedDict(a=1.0), lambda d: Names(d)["a"], at("a")),
    "a union of sets": (Items([1.0]), lambda d: max({0.0}.union(d)), at(0)),
    "an update of a set": (deque([1.0]), lambda d: (own := {0.0}, own.update(d), max(own))[2], at(0)),
    "a default that is not used": ({"a": 1.0}, lambda d: d.setdefault("a", 0.0), at("a")),
    "int of bytes": (bytearray(b"2"), lambda b: int(b), lambda b: b.__setitem__(0, 53)),
    "float of bytes": (bytearray(b"2"), lambda b: float(b), lambda b: b.__setitem__(0, 53)),
    "text of bytes": (bytearray(b"2"), lambda b: float(str(b, "ascii")), lambda b: b.__setitem__(0, 53)),
}
CHANGES.update({name: number(read) for name, read in NUMBERS.items()})


@change
def an_item_of_a_captured_view() -> Changed:
    table = {"a": 1.0}
    view = table.items()
    yield lambda: ("a", 1.0) in view
    table["a"] = 2.0


@change
def an_item_that_a_list_has_later() -> Changed:
    items = Items([1.0])

    def read() -> float:
        try:
            return items[1]
        except IndexError:
            return 7.0

    yield read
    items.append(2.0)


@change
def a_function_that_numpy_calls() -> Changed:
    config = Config(2.0)
    scaled = np.frompyfunc(lambda v: v * config.n, 1, 1)
    yield lambda: scaled(2.0)
    config.n = 5.0


@change
def another_function_that_numpy_calls() -> Changed:
    config = Config(2.0)
    scaled = np.vectorize(lambda v: v * config.n)
    yield lambda: float(scaled(2.0))
    config.n = 5.0


@change
def the_state_of_numpy() -> Changed:
    with np.errstate(under="ignore"):
        yield lambda: np.geterr()["under"] == "ignore"
        np.seterr(under="warn")
        yield lambda: np.geterr()["under"] == "ignore"


@change
def the_context_of_decimals() -> Changed:
    with decimal.localcontext() as context:
        read = lambda: float(decimal.Decimal(1) / 3)  # noqa: E731
        yield read
        context.prec = 2
        yield read


@change
def the_type_of_a_key() -> Changed:
    class Table(dict[Any, float]):
        def __getitem__(self, key: Any) -> float:
            return 1.0 if type(key) is int else 2.0

    table, config = Table(), Config(operator.itemgetter(1))
    yield lambda: config.n(table)
    config.n = operator.itemgetter(1.0)


def adding(read: Read) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + read()


@pytest.mark.parametrize("name", [*CHANGES, *CONTAINERS])
def test_a_change(name: str) -> None:
    steps = CHANGES[name]() if name in CHANGES else container(*CONTAINERS[name])()
    mod = adding(next(steps))
    first = compare(mod)
    compare(mod)
    next(steps, None)
    assert compare(mod) != first, "the case changes nothing"


def test_each_call_runs_a_captured_generator() -> None:
    values = (float(n) for n in range(1000))
    mod = adding(lambda: values.send(None))
    with pytest.warns(RetraceWarning, match="captured generator"):
        first = traced(mod, "score")
    assert traced(mod, "score") != first


# Traces that stay guarded, and those that do not.

GUARDED: dict[str, Read] = {
    "a ufunc": lambda: np.sqrt(2.0),
    "numpy's functions": lambda: np.clip(3.0, a_min=0.0, a_max=2.0) + np.max([1, 2]) + np.full(2, 2, dtype=np.int32)[1],
    "classmethods": lambda: int.from_bytes(b"12", byteorder="big") + dict.fromkeys("ab", 2)["a"] + float.fromhex("1"),
    "chains": lambda: sum(itertools.chain.from_iterable([[1, 2], [3]])) + next(itertools.count(start=2, step=3)),
    "dates": lambda: (datetime.timedelta(days=3) * 2).days + datetime.date(2020, 1, 1).weekday(),
    "a named tuple": lambda: Point(1.0, y=2.0)._replace(x=3.0).x,
    "derived numbers": lambda: Twice(3) + Count("7") + Weight(2) + float(Text("2")),
    "derived containers": lambda: Items([1, 2])[1] + Names({"a": 1}, b=2)["b"],
    "a cached helper": lambda: functools.cache(lambda: 2)(),
    "a default dict": lambda: len(collections.defaultdict(list)),
}
UNGUARDED: dict[str, Read] = {
    "the time": lambda: datetime.datetime.now().year,
    "the day": lambda: datetime.date.today().year,
    "the time zone": lambda: datetime.datetime(2020, 1, 1).timestamp(),
    "a decimal": lambda: float(decimal.Decimal(1) + 1),
    "numpy's settings": lambda: len(np.get_printoptions()),
    "random numbers": lambda: np.random.RandomState(0).randint(5),
}


def traces(mod: Callable[..., Any]) -> int:
    before = stats()["traces"]
    compare(mod)
    compare(mod)
    return stats()["traces"] - before


@pytest.mark.parametrize("name", GUARDED)
def test_guarded(name: str) -> None:
    assert traces(adding(GUARDED[name])) == 1


@pytest.mark.parametrize("name", UNGUARDED)
def test_traced_at_each_call(name: str) -> None:
    assert traces(adding(UNGUARDED[name])) == 2


KEYWORDS: dict[str, Read] = {
    "round": lambda: round(number=2.345, ndigits=1) + round(2.6, None),
    "pow": lambda: pow(2, 5, mod=7) + pow(base=2, exp=3),
    "accumulate": lambda: list(itertools.accumulate([1, 2, 3], func=operator.mul))[-1],
    "combinations": lambda: len(list(itertools.combinations([1, 2, 3], r=2))),
    "permutations": lambda: len(list(itertools.permutations(iterable=[1, 2, 3]))),
    "repeat": lambda: sum(itertools.repeat(2, times=3)),
    "count": lambda: next(itertools.count(start=3)),
    "zip_longest": lambda: sum(b for _, b in itertools.zip_longest([1, 2], [3], fillvalue=4)),
    "dict": lambda: dict(f=1, owner=2)["f"],  # noqa: C408
    "update": lambda: (d := {}, d.update(f=1, owner=2), d["owner"])[2],
    "partial": lambda: functools.partial(lambda f, function: f + function, f=1, function=2)(),
    "int": lambda: int("11", base=2),
    "str": lambda: float(str(object=2) + str(b"5", encoding="ascii")),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords(name: str) -> None:
    compare(adding(KEYWORDS[name]))


def test_a_type_error_is_pythons() -> None:
    def mod(s: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        try:
            return s + divmod(Config(), 2)[0]  # type: ignore[operator]
        except TypeError as error:
            return s + len(str(error))

    compare(mod)
