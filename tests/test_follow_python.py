"""follow: statements, patterns, numbers and errors in a mod do what they do in Python."""

from __future__ import annotations

import bisect
import collections
import gc
import heapq
import math
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from followed_mods import TABLE, Config, Mod, Mode, compare, eager, kind_of, traced
from torch import Tensor

from flexattn.errors import ModError, RetraceWarning
from flexattn.trace.trace import trace

# Python, as the interpreter runs it. Each mod is compared with Python, whose state it may change.

MODS: dict[str, Callable[[], Mod]] = {}


def by_python(make: Callable[[], Mod]) -> Callable[[], Mod]:
    MODS[make.__name__] = make
    return make


@by_python
def changes_of_captured_containers() -> Mod:
    items, table, names, queue = [5, 4, 3, 2, 1] * 6, {i: i for i in range(40)}, {9}, collections.deque([1])

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        items.pop()
        items.insert(0, 7)
        items.sort()
        items.remove(7)
        items.reverse()
        table.pop(len(table) - 1)
        names.add(3)
        names.discard(9)
        queue.append(2)
        operator.setitem(table, 0, 5)
        return s + items[0] + len(items) * 0 + table[0] + len(names) + queue[-1]

    return mod


@by_python
def functions_of_c_that_change_a_list() -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = [3, 5]
        bisect.insort(own, 4)
        heapq.heappush(own, 1)
        operator.setitem(own, 1, 9)
        operator.delitem(own, 2)
        return s + sum(i * n for i, n in enumerate(own))

    return mod


@by_python
def generators_that_are_closed() -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = []

        def numbers() -> Iterator[int]:
            try:
                yield 1
                yield 2
            except ValueError:
                yield 7
            finally:
                seen.append(5)

        first, second = numbers(), numbers()
        s = s + next(first) + next(second)
        first.close()
        s = s + second.throw(ValueError)
        return s + len(seen) + sum(seen)

    return mod


@by_python
def a_variable_of_a_handler() -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            raise ValueError(3)
        except ValueError as error:
            found = sum([error.args[0] for _ in range(1)])
        return s + found

    return mod


@by_python
def deep_recursion() -> Mod:
    def depth(n: int) -> int:
        return 1 + depth(n - 1) if n else 0

    return lambda s, b, h, q, k: s + depth(250)


@by_python
def except_star() -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            raise ExceptionGroup("both", [ValueError(1), TypeError(2)])
        except* ValueError:
            s = s + 1
        except* TypeError:
            s = s + 2
        return s

    return mod


@by_python
def a_function_mapped_over_positions() -> Mod:
    return lambda s, b, h, q, k: s + torch.vmap(lambda i: i * 2.0)(torch.arange(4.0, dtype=torch.float64))[h]


@by_python
def a_class_with_mangled_names() -> Mod:
    class Window:
        __n = 3

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            __n = self.__n
            return q - k < __n

    return Window()


@by_python
def every_pattern() -> Mod:
    class Point:
        __match_args__ = ("x", "y")

        def __init__(self, x: int, y: int) -> None:
            self.x, self.y = x, y

    values: list[Any] = [Point(1, 2), {"a": 1, "b": 2}, [1, 2, 3], ("x", 4), 3, None, 2.5, Mode.NEAR, "text"]

    def weight(value: Any) -> float:
        match value:
            case Point(x, y=2) if x == 1:
                return 1
            case {"a": a, **rest}:
                return 10 * a + len(rest)
            case [1, *others]:
                return 100 * len(others)
            case ("x", n):
                return 1000 * n
            case int(n):
                return n
            case None | Mode.NEAR:
                return 0.5
            case float() as n:
                return n
            case _:
                return 0.25

    return lambda s, b, h, q, k: s + sum(map(weight, values))


@pytest.mark.parametrize("name", MODS)
def test_python(name: str) -> None:
    mod = MODS[name]()
    kind = kind_of(mod)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        found = traced(mod, kind)
    assert found == eager(MODS[name](), kind)[:1] * len(found) if "changes" in name else compare(mod)


# Numbers. The first pair is traced; the others are computed by that trace, or by another one.

_FLOATS = [(2.0, 0.5), (1.0, 0.1), (-1.0, 0.3), (1e16, 1.0), (7.5, 2.5), (-0.0, 1.0), (0.0, 2.0)]
_INTS = [(7, 3), (-7, 3), (7, -3), (2**40, 7), (9, 9), (3, 0), (0, 0)]
_HALVES = [(np.float32(0.1), 3), (np.float32(0.3), 7), (np.float32(1 / 3), np.float32(3.0)), (np.float32(0.0), 1)]
_BYTES = [(np.int8(10), np.int8(5)), (np.int8(100), np.int8(100)), (np.int8(7), np.int8(3))]
_NUMBERS: dict[str, tuple[Callable[[Any, Any], Any], list[Any]]] = {
    "floor": (lambda x, y: x // y, _FLOATS + _INTS + _HALVES + _BYTES),
    "remainder": (lambda x, y: x % y, _FLOATS + _INTS + _HALVES),
    "quotient": (lambda x, y: x / y, _FLOATS + _INTS + _HALVES),
    "divmod": (lambda x, y: divmod(x, y)[0] + 8 * divmod(x, y)[1], _FLOATS + _INTS),
    "not reordered": (lambda x, y: (x + y) - x, _FLOATS + _INTS + _HALVES),
    "rounded by a large number": (lambda x, y: (x + 1.5 * 2**52) - 1.5 * 2**52, _FLOATS),
    "divided by itself": (lambda x, y: x // x + y / y, _FLOATS + _INTS),
    "sign of zero": (lambda x, y: math.copysign(1.0, x * 0.0), [(2.0, 1), (-2.0, 1), (0.0, 1), (-0.0, 1)]),
    "decided by rounding": (lambda x, y: 1 if x + 0.1 == 0.4 else 2, [(0.5, 0), (0.3, 0), (0.30000000000000004, 0)]),
    "wrapped": (lambda x, y: float(x + y) + float(x - y), _BYTES + _HALVES),
    "absolute": (lambda x, y: abs(x) + abs(y), _FLOATS + _INTS + _HALVES),
    "types": (lambda x, y: isinstance(x + y, np.floating) + 2 * isinstance(x * 2, int), _INTS + _HALVES),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy: overflow, division by zero
@pytest.mark.parametrize("name", _NUMBERS)
def test_numbers(name: str) -> None:
    function, pairs = _NUMBERS[name]
    config = Config()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * 0 + function(*config.n)

    for pair in pairs:
        config.n = pair
        try:
            wanted = eager(mod, "score")
        except ZeroDivisionError:
            with pytest.raises(ModError, match="ZeroDivisionError"):
                trace(mod, "score", torch.float64)
        else:
            assert traced(mod, "score") == wanted, pair


# What is given up: errors, runs that Python makes again.


@pytest.mark.parametrize("manager", [lambda: torch.device("meta"), lambda: torch.autocast("cpu"), threading.Lock])
def test_a_with_statement_ends_with_the_trace(manager: Callable[[], Any]) -> None:
    held = manager()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with held:
            try:
                return s + TABLE.sum().item()
            except:
                entered.append("an error that is not the mod's")
                raise
            finally:
                entered.append("finally")

    entered: list[str] = []
    depth = torch._C._len_torch_function_stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        with pytest.raises(ModError, match=r"test_follow_python\.py:\d+"):
            trace(mod, "score", torch.float64)
    assert entered == ["finally"]
    assert torch._C._len_torch_function_stack() == depth
    assert not torch.is_autocast_enabled("cpu")
    assert not getattr(held, "locked", bool)()


def test_a_bare_except_does_not_catch_a_restart() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return s + TABLE.stride()[0]
        except:  # noqa: E722
            return s + 100

    compare(mod)


def test_what_is_defined_in_a_mod_is_run_by_python_after_a_finally() -> None:
    lock = threading.Lock()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with lock:

            class Local:
                n = 2

            return s + Local.n

    compare(mod)


def test_keys_are_not_kept_alive() -> None:
    def use() -> weakref.ref[Config]:
        config = Config()
        table = {config: 2}
        compare(lambda b, h, q, k: q - k < table[config])
        return weakref.ref(config)

    gone = use()
    gc.collect()
    assert gone() is None
