"""follow: what C code reads of values is guarded: sequences, sets, slices, texts, numbers of numpy."""

# ruff: noqa: UP031, RUF015

from __future__ import annotations

import cmath
import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from followed_mods import Config, Mod, compare

from flexattn.errors import ModError
from flexattn.trace.trace import stats, trace

TABLE = torch.arange(20.0).view(5, 4)
NAME = "ab"
THREE = 3
OWN = (1,)
EPOCH, SECOND = np.datetime64(0, "s"), np.timedelta64(1, "s")


class Pair(NamedTuple):
    x: Any
    y: Any


class Items(list):
    pass


class Shifted(list):
    """A list whose items differ from those that C code stores."""

    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i) + 1


class At:
    """An object with a number, as index, text, key and number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n

    def __str__(self) -> str:
        return f"at {'x' * self.n}"

    def __eq__(self, other: object) -> bool:
        return self.n == (other.n if isinstance(other, At) else other)

    def __hash__(self) -> int:
        return self.n


class Tagged(At):
    """Its hash is that of a text, to which it is equal for n == 2 alone."""

    def __hash__(self) -> int:
        return hash("a")

    def __eq__(self, other: object) -> bool:
        return other == "a" and self.n == 2


@dataclass(frozen=True)
class Of:
    kind: object


class Looped(tuple):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise AssertionError("a set does not iterate over its elements")


class Loud(str):
    def format(self, *args: object) -> str:  # type: ignore[override]
        return super().format(*args) + "!"


class Name(str):
    pass


class Raw(bytes):
    pass


class Called(At):
    def __call__(self) -> int:
        return self.n


class Overloaded:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    @classmethod
    def __torch_function__(cls, function: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[a.gain if isinstance(a, Overloaded) else a for a in args], **(kwargs or {}))


class Sizes(enum.IntEnum):
    SMALL = 1
    LARGE = 10


def record(**fields: float) -> Any:
    return np.array([tuple(fields.values())], dtype=[(name, "f8") for name in fields])[0]


def text_of_error(c: Config) -> int:
    try:
        raise ValueError(c.n)
    except ValueError as error:
        return len(str(error))


def repeated(c: Config) -> int:
    own = [1, 2]
    own *= c.n
    return sum(own)


def merged(c: Config) -> int:
    own = {"a": 1}
    own |= c.n
    return own["a"]


def updated(c: Config) -> int:
    own = {c.n: 1}
    own.update({"a": 2})
    return len(own)


def folded(values: Any) -> float:
    found = 0.0
    for v in values:
        found = found * 0.5 + v
    return found


# What is read of `c.n` -> (what the mod adds to the score, c.n at the first calls, c.n at the last).
READS: dict[str, tuple[Callable[[Config], Any], Any, Any]] = {
    "a named tuple as data": (lambda c: torch.tensor(c.n)[0], Pair(1, 2), Pair(3, 3)),
    "a named tuple as index": (lambda c: TABLE[c.n], Pair(1, 2), Pair(3, 3)),
    "a named tuple as shape": (lambda c: torch.zeros(c.n).numel(), Pair(1, 2), Pair(3, 3)),
    "a named tuple of tensors": (lambda c: torch.stack(c.n)[1, 0, 0], Pair(TABLE, TABLE + 1), Pair(TABLE, TABLE + 5)),
    "a named tuple of positions": (
        lambda c: TABLE[c.n], Pair(torch.tensor(1), torch.tensor(2)), Pair(torch.tensor(3), torch.tensor(1)),
    ),
    "a tuple plus a named tuple": (lambda c: sum(OWN + c.n), Pair(1, 2), Pair(3, 3)),
    "a derived list as index": (lambda c: TABLE.flatten()[c.n][0], Items([1, 2]), Items([7, 2])),
    "a nested derived list": (lambda c: torch.tensor([c.n])[0, 1], Items([1, 2]), Items([1, 7])),
    "an object that can be called as index": (lambda c: TABLE[c.n, 0], Called(2), Called(3)),
    "a tensor's shape": (lambda c: 1 if c.n.shape == (5, 4) else 2, TABLE, TABLE[:3]),
    "two shapes": (lambda c: 1 if c.n.shape == TABLE.shape else 2, TABLE, TABLE[:3]),
    "a shape in a list": (lambda c: 1 if c.n.shape in [(5, 4)] else 2, TABLE, TABLE[:3]),
    "a size in a shape": (lambda c: 1 if 5 in c.n.shape else 2, TABLE, TABLE[:3]),
    "the order of shapes": (lambda c: 1 if c.n.shape < (5, 9) else 2, TABLE[:3], torch.ones(6, 4)),
    "the text of a shape": (lambda c: len(f"{c.n.shape}"), TABLE, TABLE[0]),
    "the order of a set": (lambda c: next(iter(c.n)), {0, 8}, {8, 0}),
    "a loop over a set": (lambda c: folded(c.n), {0, 8}, {8, 0}),
    "the sign of an element": (lambda c: math.copysign(1, [*c.n][0]), {0.0}, {-0.0}),
    "the sign of a key": (lambda c: math.copysign(1, next(iter(c.n))), {0.0: 1}, {-0.0: 1}),
    "the sign of a complex part": (lambda c: cmath.phase(c.n), complex(-1, 0.0), complex(-1, -0.0)),
    "an equal slice": (lambda c: 1 if c.n == slice(2) else 2, slice(np.int64(2)), slice(np.int64(3))),
    "a slice of an object": (lambda c: 1 if slice(c.n) == slice(2) else 2, At(2), At(3)),
    "a slice of a number": (lambda c: 1 if slice(c.n) == slice(2) else 2, 2, 3),
    "a slice in a list": (lambda c: 1 if c.n in [slice(2)] else 2, slice(np.int64(2)), slice(np.int64(3))),
    "an object in a range": (lambda c: 1 if c.n in range(3) else 2, At(2), At(5)),
    "an object in a shape": (lambda c: 1 if c.n in TABLE.shape else 2, At(5), At(6)),
    "a repeated list": (repeated, 2, 3),
    "a list repeated by an object": (repeated, At(2), At(3)),
    "a text repeated by an object": (lambda c: len("x" * c.n), At(2), At(3)),
    "a text repeated by an enum": (lambda c: len("x" * c.n), Sizes.SMALL, Sizes.LARGE),
    "a new list repeated by an enum": (lambda c: len([0] * c.n), Sizes.SMALL, Sizes.LARGE),
    "a text plus a derived text": (lambda c: len("x" + c.n), Name("a"), Name("ab")),
    "a derived text plus a text": (lambda c: len(c.n + "x"), Name("a"), Name("ab")),
    "bytes plus derived bytes": (lambda c: len(b"x" + c.n), Raw(b"a"), Raw(b"ab")),
    "% of an object": (lambda c: len("%s" % c.n), At(2), At(3)),
    "% of objects": (lambda c: len("%r%s%d" % ("a", c.n, c.n)), At(2), At(3)),
    "% of a dict": (lambda c: len("%(n)s" % {"n": c.n}), At(2), At(3)),
    "% of a named tuple": (lambda c: len("%s%s" % c.n), Pair(1, At(2)), Pair(1, At(3))),
    "% of an enum": (lambda c: len("%d" % c.n), Sizes.SMALL, Sizes.LARGE),
    "a named tuple as text": (lambda c: len(f"{c.n}"), Pair(1, 2), Pair(10, 2)),
    "a set of an object and a number": (lambda c: len({c.n, 2}), At(2), At(3)),
    "a set of a number and an object": (lambda c: len({2, c.n}), At(2), At(3)),
    "a dict of an object and a number": (lambda c: len({c.n: 1, 2: 2}), At(2), At(3)),
    "a set of tuples": (lambda c: len({(c.n, 1), (2, 1)}), At(2), At(3)),
    "a number in a set of an object": (lambda c: 1 if 2 in {c.n} else 2, At(2), At(3)),
    "a set of an object that becomes equal": (lambda c: len({c.n, 2}), At(3), At(2)),
    "a number in a set of an object that becomes equal": (lambda c: 1 if 2 in {c.n} else 2, At(3), At(2)),
    "a set in a set of frozensets": (lambda c: {1, 2} in {frozenset({1, c.n}), At}, 2, 3),
    "a named tuple next to a tuple": (lambda c: {(1, 2): 5}.get(c.n, 9), Pair(1, 3), Pair(1, 2)),
    "an object with an enum as key": (lambda c: {Of(Sizes.SMALL): 1, Of(Sizes.LARGE): 2}[c.n], *map(Of, Sizes)),
    "a C function as key": (lambda c: {torch.relu: 1, torch.tanh: 2}[c.n], torch.relu, torch.tanh),
    "an updated dict": (updated, Tagged(3), Tagged(2)),
    "an overridden format": (lambda c: len(c.n.format(1)), Loud("{}"), Loud("a{}")),
    "a format of an enum": (lambda c: len("{}".format(c.n)), Sizes.SMALL, Sizes.LARGE),  # noqa: UP032
    "an attribute of a tensor as text": (lambda c: len("{.dtype}".format(c.n)), TABLE, TABLE.int()),  # noqa: UP032
    "a unit of time": (lambda c: float(c.n / SECOND), np.timedelta64(5, "m"), np.timedelta64(5, "h")),
    "a unit of nanoseconds": (lambda c: float(c.n / SECOND) * 1e12, np.timedelta64(5, "ns"), np.timedelta64(5, "ps")),
    "a date": (lambda c: float((c.n - EPOCH) / SECOND), np.datetime64(5, "D"), np.datetime64(5, "h")),
    "whether a number is None": (lambda c: 1 if (c.n is None) is False else 2, 3, None),
    "whether two numbers are one": (lambda c: 1 if c.n is THREE else 2, 3, 4),
    # Traced at each call.
    "an overridden list": (lambda c: TABLE.flatten()[c.n][0], Shifted([1, 2]), Shifted([7, 2])),
    "an updated set": (lambda c: len({c.n} | {2}), At(2), At(3)),
    "a union of sets": (lambda c: len({c.n}.union(["a"])), Tagged(3), Tagged(2)),
    "a union of dicts": (lambda c: len({c.n: 1} | {"a": 2}), Tagged(3), Tagged(2)),
    "a tuple with an own __iter__ in a set": (lambda c: len({c.n, (1,)}), Looped((1,)), Looped((2,))),
    "an overloaded object": (lambda c: torch.ones(()) * c.n, Overloaded(2.0), Overloaded(5.0)),
    "numpy's array as index": (lambda c: TABLE[c.n][0, 1], np.array([1, 2]), np.array([3, 2])),
    "numpy's arrays as index": (lambda c: TABLE[c.n, c.n][0], np.array([1, 2]), np.array([3, 2])),
    "a record": (lambda c: float(c.n["x"]), record(x=1.0, y=2.0), record(y=1.0, x=2.0)),
    "an ordered dict": (merged, OrderedDict(a=2), OrderedDict(a=3)),
    "% of a mapping": (lambda c: len("%(n)s" % c.n), OrderedDict(n=2), OrderedDict(n=33)),
    "the text of an error": (text_of_error, At(2), At(3)),
    "the order of a set of objects": (lambda c: [*{c.n, At(5)}][0].n, At(7), At(4)),
    "whether names are one": (lambda c: 1 if c.n is NAME else 2, NAME, "".join(["a", "b"])),
}  # fmt: skip
AT_EACH_CALL = set(list(READS)[list(READS).index("an overridden list") :])


def adding(read: Callable[[Config], Any], c: Config) -> Mod:
    return lambda s, b, h, q, k: s + read(c)


@pytest.mark.parametrize("name", READS)
def test_what_c_code_reads(name: str) -> None:
    read, before, after = READS[name]
    c = Config(before)
    mod = adding(read, c)
    first = compare(mod)
    count = stats()["traces"]
    compare(mod)
    assert (stats()["traces"] > count) is (name in AT_EACH_CALL)
    c.n = after
    assert compare(mod) != first


def test_a_large_set_with_an_object() -> None:
    c = Config(At(100))
    mod = adding(lambda c: len({c.n, *range(200)}), c)
    first = compare(mod)
    count = stats()["traces"]
    compare(mod)
    assert stats()["traces"] > count
    c.n = At(500)
    assert compare(mod) != first


def test_a_large_set_of_numbers() -> None:
    """Its elements are not compared one by one."""
    c = Config(3)
    mod = adding(lambda c: len({*range(20_000), c.n}), c)
    compare(mod)
    count = stats()["traces"]
    compare(mod)
    assert stats()["traces"] == count


def test_a_record_that_changes_in_place() -> None:
    c = Config(np.array([([1.0],)], dtype=[("o", "O")])[0])
    mod = adding(lambda c: c.n["o"][0], c)
    first = compare(mod)
    c.n["o"][0] = 9.0
    assert compare(mod) != first


TWO = "{}, {a}"
TEXTS: dict[str, Callable[[Any], str]] = {
    "f-string": lambda t: f"{t}", "repr": lambda t: repr(t), "str": lambda t: str([t]), "%": lambda t: "%s" % t,
    "str.format": lambda t: TWO.format(1, a=[t]), "format_map": lambda t: "{a}".format_map({"a": t}),
    "__str__": lambda t: t.__str__(), "__repr__": lambda t: t.__repr__(), "__format__": lambda t: t.__format__(""),
    "error": lambda t: str(ValueError(t)), "computed": lambda t: f"{t + 1}", "named": lambda t: f"{Pair(t, 1)}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_tensor(name: str) -> None:
    t, text = torch.tensor(3), TEXTS[name]
    with pytest.raises(ModError, match="formats a tensor as text"):
        trace(lambda s, b, h, q, k: s + len(text(t)), "score", torch.float32)


VALUES: dict[str, Callable[[Config], Any]] = {
    "a slice of an object as text": lambda c: len(f"{slice(0, c.n)}"[:9] + f"{[slice(0, 2)]}"),
    "a set of objects as text": lambda c: len(f"{ {c.n} }"[:9]),
    "a list of objects as text": lambda c: len(f"{[c.n]}"[:9]),
    "errors as text": lambda c: len(str(KeyError("a")) + str(KeyError("a", 1)) + repr(ValueError(2))),
    "ascii": lambda c: len(f"{Pair(chr(233), c.n)!a}"[:15]),
    "bytes": lambda c: len(b"%d%a" % (c.n, "a")),
    "a long double": lambda c: np.longdouble(c.n.n) / 4,
    "an array in a list": lambda c: torch.tensor([np.array([1.0, 2.0])[0], 3.0])[0],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value(name: str) -> None:
    compare(adding(VALUES[name], Config(At(2))))


def test_a_number_compared_with_none_stays_an_argument() -> None:
    c = Config(3)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        is_unset = c.n is None
        return s + (0 if is_unset else c.n)

    first = compare(mod)
    count = stats()["traces"]
    c.n = 5
    assert compare(mod) != first
    assert stats()["traces"] == count
