"""follow: what a mod computes after a change between two calls is what Python and torch compute then."""

from __future__ import annotations

import abc
import builtins
import enum
import functools
import math
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from followed_mods import Case, Config, Mod, Mode, compare
from torch import Tensor

from flexattn.trace.trace import stats

# Changes between calls. A case yields a mod, changes what it reads, and yields again, with another mod or the same.

CHANGES: dict[str, Case] = {}
KEPT: set[str] = set()  # cases in which an unchanged mod is traced once


def change(kept: bool = True) -> Callable[[Case], Case]:
    def note(case: Case) -> Case:
        CHANGES[case.__name__] = case
        if kept:
            KEPT.add(case.__name__)
        return case

    return note


@change()
def a_bound_method_of_c() -> Iterator[Mod]:
    table = {"n": 2}
    get = table.get
    yield lambda b, h, q, k: q - k < get("n")
    table["n"] = 5


@change()
def another_bound_method_of_c() -> Iterator[Mod]:
    table = [2, 5, 2]
    holder = Config(table.index)
    yield lambda b, h, q, k: q - k < holder.n(2)
    holder.n = table.count


@change()
def a_bound_item_of_c() -> Iterator[Mod]:
    table = [2, 5]
    get = table.__getitem__
    yield lambda b, h, q, k: q - k < get(0)
    table[0] = 6


@change()
def a_key_that_is_an_object() -> Iterator[Mod]:
    first, second = Config(), Config()
    key, table = first, {first: 2, second: 6}
    yield lambda b, h, q, k: q - k < table[key]
    key = second


@change()
def a_key_of_an_enum() -> Iterator[Mod]:
    config, table = Config(Mode.NEAR), {Mode.NEAR: 2, Mode.FAR: 6}
    yield lambda b, h, q, k: q - k < table[config.n]
    config.n = Mode.FAR


@change()
def a_key_of_another_type() -> Iterator[Mod]:
    table: dict[Any, Any] = {1: 2.0}
    yield lambda s, b, h, q, k: s + sum(isinstance(key, bool) for key in table)
    del table[1]
    table[True] = 2.0


@change()
def an_item_of_a_set_of_another_type() -> Iterator[Mod]:
    items: set[Any] = {1}
    yield lambda s, b, h, q, k: s + sum(isinstance(key, float) for key in items)
    items.clear()
    items.add(1.0)


@change()
def a_literal_that_is_one_object_with_a_captured_tuple() -> Iterator[Mod]:
    config = Config((3, 5))

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (3, 5)
        i = config.n[1] - 5
        return q * own[i] - k * own[0] < config.n[0] * 2

    yield mod
    config.n = (7, 5)


@change()
def an_index_of_numpy() -> Iterator[Mod]:
    table, i = [2, 6], np.int64(0)
    yield lambda b, h, q, k: q - k < table[i]
    table[0] = 5


@change()
def an_object_as_index() -> Iterator[Mod]:
    class At:
        def __init__(self) -> None:
            self.i = 0

        def __index__(self) -> int:
            return self.i

    table, at = [2, 6], At()
    yield lambda b, h, q, k: q - k < table[at]
    at.i = 1


@change()
def a_compiled_helper() -> Iterator[Mod]:
    def make(n: int) -> tuple[Mod, Callable[[int], None]]:
        def helper(q: Tensor, k: Tensor) -> Tensor:
            return q - k < n

        def put(value: int) -> None:
            nonlocal n
            n = value

        return torch.compile(helper), put

    helper, put = make(2)
    yield lambda b, h, q, k: helper(q, k)
    put(6)


@change()
def a_compiled_module() -> Iterator[Mod]:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 2.0

        def forward(self, s: Tensor) -> Tensor:
            return s * self.n

    module = Scale()
    compiled = torch.compile(module)
    yield lambda s, b, h, q, k: compiled(s)
    module.n = 3.0


@change()
def a_wrapper_that_has_the_name_of_a_function_of_torch() -> Iterator[Mod]:
    config = Config(2.0)

    @functools.wraps(F.softsign)
    def soft(x: Tensor) -> Tensor:
        return x * config.n

    yield lambda s, b, h, q, k: soft(s)
    config.n = 3.0


@change()
def a_helper_that_the_user_put_into_torch() -> Iterator[Mod]:
    torch.helper_of_the_user = lambda s: s * 2.0
    yield lambda s, b, h, q, k: torch.helper_of_the_user(s)
    torch.helper_of_the_user = lambda s: s * 3.0
    yield lambda s, b, h, q, k: torch.helper_of_the_user(s)
    del torch.helper_of_the_user


@change()
def a_name_that_the_user_put_into_builtins() -> Iterator[Mod]:
    builtins.USERS_WINDOW = 2
    yield lambda b, h, q, k: q - k < USERS_WINDOW  # noqa: F821
    builtins.USERS_WINDOW = 5


@change(kept=False)
def a_class_that_is_registered_later() -> Iterator[Mod]:
    class Near(abc.ABC):  # noqa: B024
        pass

    config = Config()
    yield lambda b, h, q, k: q - k < (2 if isinstance(config, Near) else 6)
    Near.register(Config)


@change(kept=False)
def a_protocol_that_is_met_later() -> Iterator[Mod]:
    @typing.runtime_checkable
    class Near(typing.Protocol):
        near: int

    config = Config()
    yield lambda b, h, q, k: q - k < (2 if isinstance(config, Near) else 6)
    config.near = 1


@change()
def numbers_that_are_sorted() -> Iterator[Mod]:
    config = Config([4, 2])

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = list(config.n)
        own.sort()
        return q - k < own[0]

    yield mod
    config.n = [9, 6]


@change()
def sorted_by_a_function() -> Iterator[Mod]:
    config = Config(1)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = [2, 6]
        own.sort(key=lambda x: x * config.n)
        return q - k < own[0]

    yield mod
    config.n = -1


@change()
def numbers_in_a_set() -> Iterator[Mod]:
    config = Config([4, 2])
    yield lambda s, b, h, q, k: s + len(set(config.n)) + len(frozenset(config.n))
    config.n = [4, 4]


@change()
def a_set_that_grows() -> Iterator[Mod]:
    config = Config([4, 2])

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own: set[int] = {1}
        for n in config.n:
            own.add(n)
        return s + len(own) + len(own.union(config.n))

    yield mod
    config.n = [1, 1]


@change()
def numbers_as_keys() -> Iterator[Mod]:
    config = Config([4, 2])
    yield lambda s, b, h, q, k: s + len(dict([*zip(config.n, "ab", strict=True)])) + len(dict.fromkeys(config.n))
    config.n = [3, 3]


@change()
def a_position_that_is_a_number() -> Iterator[Mod]:
    config = Config(0)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = [2, 6, 9]
        own.insert(config.n, 6)
        return q - k < own[0]

    yield mod
    config.n = 1


@change()
def a_number_that_is_popped() -> Iterator[Mod]:
    config = Config(0)
    yield lambda b, h, q, k: q - k < [2, 6, 9].pop(config.n) + {0: 1, 1: 5}.pop(config.n)
    config.n = 1


@change()
def a_number_that_is_removed() -> Iterator[Mod]:
    config = Config(2)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = [2, 6, 9]
        own.remove(config.n)
        return q - k < own[0]

    yield mod
    config.n = 6


@change()
def an_item_of_a_dict_view() -> Iterator[Mod]:
    table = {"n": 3}
    yield lambda b, h, q, k: q - k < (2 if ("n", 3) in table.items() else 6)
    table["n"] = 4


@change()
def keys_of_a_dict_as_a_set() -> Iterator[Mod]:
    table = {"n": 3, "m": 4}

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keys = table.keys()
        return s + len(keys) + 2 * len(list(keys)) + 3 * len(list(keys)) + 5 * len(keys & {"n"}) + ("m" in keys)

    yield mod
    del table["m"]


@change()
def a_sentinel() -> Iterator[Mod]:
    config = Config(3)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        items = iter([1, config.n, 3, 4])
        return s + sum(iter(lambda: next(items), 3))

    yield mod
    config.n = 5


@change()
def a_cached_method() -> Iterator[Mod]:
    class Slopes:
        @functools.lru_cache  # noqa: B019
        def of(self, n: int) -> int:
            return n * 2

    slopes, config = Slopes(), Config(1)
    yield lambda b, h, q, k: q - k < slopes.of(config.n)
    config.n = 3


@change()
def a_module_with_a_class_of_its_own() -> Iterator[Mod]:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> int:
            return {"n": 2}[name]

        @property
        def m(self) -> int:
            return self.hidden

    lazy = Lazy("lazy_module_of_the_user")
    lazy.hidden = 1
    yield lambda b, h, q, k: q - k < lazy.n + lazy.m
    lazy.hidden = 4


@change(kept=False)
def a_class_that_the_mod_defines() -> Iterator[Mod]:
    config = Config(2)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        class Local:
            n = config.n

            def reach(self) -> int:
                return self.n + 1

        return q - k < Local().reach()

    yield mod
    config.n = 5


@change(kept=False)
def single_dispatch() -> Iterator[Mod]:
    @functools.singledispatch
    def window(n: Any) -> int:
        return 1

    @window.register
    def _(n: int) -> int:
        return n

    config = Config(2)
    yield lambda b, h, q, k: q - k < window(config.n)
    config.n = 5


@change()
def total_ordering() -> Iterator[Mod]:
    @functools.total_ordering
    class Version:
        def __init__(self, n: int) -> None:
            self.n = n

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Version) and self.n == other.n

        def __lt__(self, other: Version) -> bool:
            return self.n < other.n

        __hash__ = None

    one, two = Version(1), Version(2)
    yield lambda b, h, q, k: q - k < (2 if one >= two else 5)
    one.n = 2


@change()
def a_flag() -> Iterator[Mod]:
    class Parts(enum.IntFlag):
        CAUSAL = 1
        WINDOW = 2

    config = Config(Parts.CAUSAL)
    yield lambda b, h, q, k: q >= k if config.n & Parts.CAUSAL else q < k
    config.n = Parts.WINDOW


@change(kept=False)
def a_context_variable() -> Iterator[Mod]:
    import contextvars

    window = contextvars.ContextVar("window", default=2)
    yield lambda b, h, q, k: q - k < window.get()
    window.set(5)


@change(kept=False)
def a_thread_local() -> Iterator[Mod]:
    local = threading.local()
    local.n = 2
    yield lambda b, h, q, k: q - k < local.n
    local.n = 5


@change(kept=False)
def a_weak_reference() -> Iterator[Mod]:
    config = Config(2)
    reference = weakref.ref(config)
    mod = lambda b, h, q, k: q - k < reference().n  # noqa: E731
    yield mod
    config.n = 5
    yield mod
    assert config


@change()
def arrays_in_a_long_list() -> Iterator[Mod]:
    table: list[Any] = [np.float16(1.0)] * 70
    yield lambda s, b, h, q, k: s + float(table.copy()[0])
    table[:] = [np.float16(1.0).view(np.int16)] + [np.int16(0).view(np.float16)] * 69


@change()
def a_hook_of_a_parametrization() -> Iterator[Mod]:
    class Double(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    linear = torch.nn.Linear(1, 1).double()
    yield lambda s, b, h, q, k: linear(s.reshape(1))[0]
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Double())


@change()
def layers() -> Iterator[Mod]:
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict({
        "embed": torch.nn.Embedding(8, 4), "norm": torch.nn.LayerNorm(4),
        "out": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1)),
    }).double()  # fmt: skip
    yield lambda s, b, h, q, k: s + torch.round(parts["out"](parts["norm"](parts["embed"](h)))[0] * 100)
    parts["out"][1] = torch.nn.Tanh()


@change()
def whether_a_tensor_has_a_gradient() -> Iterator[Mod]:
    table = torch.ones(8, dtype=torch.float64)
    yield lambda s, b, h, q, k: s + (table[q] if table.requires_grad else 0)
    table.requires_grad_()


@change()
def the_sign_of_a_zero() -> Iterator[Mod]:
    config = Config((0.0, math.nan))
    yield lambda s, b, h, q, k: s * 0 + math.atan2(config.n[0], -1.0) + (config.n[1] != 0)
    config.n = (-0.0, math.nan)


@change()
def a_union_of_classes() -> Iterator[Mod]:
    config = Config(2)
    yield lambda b, h, q, k: q - k < (config.n if isinstance(config.n, int | float) else 6)
    config.n = "all"


@change()
def enums_of_numbers_and_names() -> Iterator[Mod]:
    class Size(enum.IntEnum):
        SMALL = 2
        LARGE = 6

    class Name(enum.StrEnum):
        ONE = "one"
        TWO = "two"

    config, table = Config((Size.SMALL, Name.ONE)), {"one": 2, "two": 5}

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < table[config.n[1]] + (config.n[0] == Size.LARGE) + [0, 0, 0, 3, 4, 5, 6][config.n[0]]

    yield mod
    config.n = (Size.LARGE, Name.TWO)


@change()
def a_partial_of_a_partial() -> Iterator[Mod]:
    def mod(n: int, m: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, o: int = 1) -> Tensor:
        return q * o - k < n + m

    yield functools.partial(functools.partial(mod, 1, o=2), 3)
    yield functools.partial(functools.partial(mod, 1, o=1), 3)
    yield functools.partial(functools.partial(mod, 2, o=1), 3)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change(name: str) -> None:
    steps = CHANGES[name]()
    mod = next(steps)
    first = compare(mod)
    before = stats()["traces"]
    compare(mod)
    if name in KEPT:
        assert stats()["traces"] == before, "traced again though nothing changed"
    last = compare(next(steps, mod))
    assert last != first, "the case changes nothing"
    for other in steps:
        compare(other)
