"""frozen_class: the same classes as those of `@dataclass(frozen=True)`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest
import torch
from torch._dynamo.utils import is_frozen_dataclass

from flexattn.process.frozen_class import frozen


class Plain:
    """Fields of all kinds."""

    x: int
    y: tuple[int, ...] = (1, 2)
    z: list[int] = field(default_factory=list, compare=False)
    w: str = field(default="w", repr=False)

    def total(self) -> int:
        return self.x + sum(self.y)


class One:
    x: float


class Empty:
    pass


class Own:
    x: int

    def __repr__(self) -> str:
        return "own"

    def __hash__(self) -> int:
        return 5


def both(plain: type, **options: bool) -> tuple[Any, Any]:
    """Return a class made by `frozen` and one made by `dataclass`."""
    members = {name: value for name, value in vars(plain).items() if name not in ("__dict__", "__weakref__")}
    one, other = (type(plain.__name__, (), dict(members)) for _ in range(2))
    return frozen(**options)(one) if options else frozen(one), dataclasses.dataclass(frozen=True, **options)(other)


@pytest.mark.parametrize("options", [{}, {"eq": False}, {"repr": False}], ids=str)
@pytest.mark.parametrize(
    "plain, arguments",
    [(Plain, (1,)), (Plain, (1, (3,), [4], "v")), (One, (1.5,)), (One, (float("nan"),)), (Empty, ()), (Own, (1,))],
)
def test_like_dataclass(plain: type, arguments: tuple[Any, ...], options: dict[str, bool]) -> None:
    ours, theirs = both(plain, **options)
    one, other = ours(*arguments), theirs(*arguments)
    assert vars(one) == vars(other)
    assert [(f.name, f.default, f.compare) for f in dataclasses.fields(one)] == [
        (f.name, f.default, f.compare) for f in dataclasses.fields(other)
    ]
    assert ours.__match_args__ == theirs.__match_args__
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    if options.get("repr", True):
        assert repr(one) == repr(other)
    if options.get("eq", True):
        assert hash(one) == hash(other)
    assert (one == ours(*arguments)) == (other == theirs(*arguments))
    assert one != other and one != "text"
    assert is_frozen_dataclass(one)


def test_fields_cannot_be_set_or_deleted() -> None:
    ours, _ = both(Plain)
    value = ours(1)
    for change in (lambda: setattr(value, "x", 2), lambda: setattr(value, "q", 2), lambda: delattr(value, "x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert value.x == 1 and not hasattr(value, "q")


def test_defaults_are_not_shared() -> None:
    ours, _ = both(Plain)
    assert ours(1).z is not ours(1).z


@pytest.mark.parametrize("arguments", [(), (1, 2, 3, 4, 5)])
def test_wrong_arguments(arguments: tuple[int, ...]) -> None:
    ours, _ = both(Plain)
    with pytest.raises(TypeError, match=r"Plain.__init__\(\)"):
        ours(*arguments)


@frozen
class Kept:
    x: int
    inner: Any = None


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), dataclasses.replace]
)
def test_copies(how: Callable[[Any], Any]) -> None:
    value = Kept(1, Kept(2))
    assert how(value) == value and hash(how(value)) == hash(value)
    assert dataclasses.replace(value, x=3) == Kept(3, Kept(2))
    assert dataclasses.asdict(value) == {"x": 1, "inner": {"x": 2, "inner": None}}


def test_a_repr_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(Kept(1, loop))
    assert repr(loop[0]) == "Kept(x=1, inner=[...])"


def test_what_it_does_not_support_is_refused() -> None:
    with pytest.raises(AssertionError, match="differ"):
        frozen(type("Below", (Kept,), {}))
    with pytest.raises(AssertionError, match="called"):
        frozen(type("Post", (), {"__post_init__": lambda self: None}))


def test_dynamo_reads_and_makes_them() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor, given: Kept) -> torch.Tensor:
        return Kept(given.x + 1, x * given.x).inner

    torch._dynamo.reset()
    assert doubled(torch.ones(2), Kept(3)).tolist() == [3.0, 3.0]
