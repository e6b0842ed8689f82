"""follow: objects that are looked up in containers, and objects that are indices, as they are at each call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import flex_attention
from flexattn.errors import ModError


@dataclass(frozen=True)
class Kind:
    name: str


class Plain:
    pass


@dataclass(frozen=True)
class Picky:
    name: str

    def __eq__(self, other: Any) -> bool:
        return self.name == other.name

    def __hash__(self) -> int:
        return hash((self.name, 1))


KINDS, PLAIN = [Kind("local"), Kind("global")], [Plain(), Plain()]
LOOKUPS: dict[str, Callable[[Any, Any], float]] = {
    "index": lambda kind, plain: KINDS.index(kind) + 1,
    "index of a new tuple": lambda kind, plain: (Kind("other"), Kind("local"), kind).index(kind, 1),
    "index by identity": lambda kind, plain: PLAIN.index(plain) + 1,
    "count": lambda kind, plain: KINDS[:1].count(kind) + 1,
    "item of a new dict": lambda kind, plain: {Kind("local"): 2.0, Kind("global"): 4.0}[kind],
    "get": lambda kind, plain: {Kind("local"): 2.0}.get(kind, 4.0),
    "pop": lambda kind, plain: {Kind("local"): 2.0, Kind("global"): 4.0}.pop(kind),
    "key that is a tuple": lambda kind, plain: {(Kind("local"), 1): 2.0}.get((kind, 1), 4.0),
    "in a new dict": lambda kind, plain: 2 if kind in {Kind("local"): 1} else 4,
    "in a new set": lambda kind, plain: 2 if kind in {Kind("local")} else 4,
    "in a list, by identity": lambda kind, plain: 2 if plain in [PLAIN[0]] else 4,
    "size of a new set": lambda kind, plain: len({KINDS[0], kind}) * 2,
    "size of a new dict": lambda kind, plain: len({KINDS[0]: 1, kind: 2}) * 2,
    "keys of two types": lambda kind, plain: {Picky(kind.name): 1.0, "local": 2.0}.get(kind.name, 4.0),
    "key by identity": lambda kind, plain: {PLAIN[0]: 2.0, PLAIN[1]: 4.0}[plain],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_objects(name: str) -> None:
    """An object that is looked up in a container may be replaced by an equal one, or by another one."""
    find, x = LOOKUPS[name], torch.randn(1, 1, 4, 8)
    kind: Any = KINDS[0]
    plain: Any = PLAIN[0]

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * find(kind, plain)

    found = []
    for kind, plain in ((KINDS[0], PLAIN[0]), (KINDS[1], PLAIN[1]), (Kind("local"), PLAIN[0])):
        factor = find(kind, plain)
        expected = flex_attention(x, x, x, lambda s, b, h, q, k, factor=factor: s * factor)
        torch.testing.assert_close(flex_attention(x, x, x, scaled), expected)
        found.append(factor)
    assert found[0] != found[1]


class Width:
    def __init__(self, n: int) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n


class Two(int):
    def __index__(self) -> int:  # Python does not call it: this is an int
        return 0


TABLE = torch.tensor([2.0, 4.0, 8.0])
INDEXED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda w: sum((2, 4, 8)[w:]),
    "step": lambda w: sum((2, 4, 8, 16)[::w]),
    "slice of text": lambda w: len("abcd"[w:]),
    "item of text": lambda w: float("248"[w]),
    "slice of a range": lambda w: len(range(9)[w:]),
    "item of a tensor": lambda w: TABLE[w],
    "slice of a tensor": lambda w: TABLE[:w].sum(),
    "argument of torch": lambda w: torch.ones(w).sum() + TABLE.select(0, w),
    "enumerate": lambda w: next(enumerate([1], w))[0],
    "islice": lambda w: sum(itertools.islice((1, 2, 4), w)),
    "round": lambda w: round(2.28, w),
    "pop": lambda w: [1, 2, 4].pop(w),
}


@pytest.mark.parametrize("name", INDEXED)
def test_objects_that_are_indices(name: str) -> None:
    """The index is that of the time of the call, and a call with an earlier one traces nothing."""
    read, width, x = INDEXED[name], Width(1), torch.randn(1, 1, 4, 8)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * read(width)

    for width.n in (1, 2, 1):
        before = flexattn.counters().traces
        found = flex_attention(x, x, x, scaled)
        traced = flexattn.counters().traces - before
        factor = float(read(width))
        torch.testing.assert_close(found, flex_attention(x, x, x, lambda s, b, h, q, k, factor=factor: s * factor))
    assert traced == 0


SLICED: dict[str, Callable[[slice], Any]] = {
    "tensor": lambda part: TABLE[part].sum(),
    "tuple of indices": lambda part: TABLE[None][0, part].sum(),
    "list": lambda part: sum([2.0, 4.0, 8.0][part]),
    "its start": lambda part: TABLE[part.start],
}


@pytest.mark.parametrize("name", SLICED)
def test_slices_that_end_at_objects(name: str) -> None:
    read, width, x = SLICED[name], Width(1), torch.randn(1, 1, 4, 8)
    part = slice(width, None)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * read(part)

    for width.n in (1, 2, 0):
        factor = float(read(part))
        expected = flex_attention(x, x, x, lambda s, b, h, q, k, factor=factor: s * factor)
        torch.testing.assert_close(flex_attention(x, x, x, scaled), expected)


PARTS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {  # what is read, and two objects that are equal in part
    "ranges": (lambda x: x.stop, range(0, 3, 2), range(0, 4, 2)),
    "empty ranges": (lambda x: x.stop, range(3, 3), range(0)),
    "kinds of numbers": (lambda x: 5 if x.start is True else 3, slice(1, 2), slice(True, 2)),
    "arrays": (lambda x: len(range(x)) + TABLE[x:].sum(), np.array(1), np.array(2)),
    "lengths of arrays": (lambda x: torch.ones(x).sum(), np.array(1), np.array(2)),
    "integers with their own __index__": (lambda x: sum([2, 4, 8][x:]), Two(2), Two(1)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.filterwarnings("ignore::flexattn.errors.RetraceWarning")  # numpy's arrays
def test_what_equality_does_not_compare(name: str) -> None:
    read, *values = PARTS[name]
    box, x = {"x": values[0]}, torch.randn(1, 1, 4, 8)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * read(box["x"])

    for box["x"] in values:
        factor = float(read(box["x"]))
        expected = flex_attention(x, x, x, lambda s, b, h, q, k, factor=factor: s * factor)
        torch.testing.assert_close(flex_attention(x, x, x, scaled), expected)


@pytest.mark.parametrize("read", [lambda n: TABLE[n:], lambda n: TABLE[None][0, :n], lambda n: TABLE[slice(n, None)]])
def test_captured_tensors_as_ends_of_slices_are_errors(read: Callable[[Tensor], Tensor]) -> None:
    """Torch reads their values, which a guard does not see."""
    x, n = torch.randn(1, 1, 4, 8), torch.tensor(1)
    with pytest.raises(ModError, match=r"n = int\(t\) outside of the mod"):
        flex_attention(x, x, x, lambda s, b, h, q, k: s * read(n).sum())
