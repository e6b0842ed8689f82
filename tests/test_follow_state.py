"""follow: a mod that reads something else than when it was traced is traced again, or at each call."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from followed_mods import TABLE, agrees, eager, kind_of
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.errors import ModError, MutationError, RetraceWarning
from flexattn.trace.trace import stats, trace

# Each case makes a mod and changes one thing; the mod is compared with Python before and after.


class Config:
    gain = 2.0

    def __init__(self) -> None:
        self.window = 3

    def reach(self) -> int:
        return self.window * 2

    @property
    def doubled(self) -> int:
        return self.window * 2


def band(config: Any, q: Tensor, k: Tensor) -> Tensor:
    return q - k < config.window


OFFSET = 3
CASES_OF_STATE: dict[str, Callable[[], Iterator[Callable[..., Any]]]] = {}


def state(make: Callable[[], Iterator[Callable[..., Any]]]) -> Callable[[], Iterator[Callable[..., Any]]]:
    CASES_OF_STATE[make.__name__] = make
    return make


@state
def a_helper_reads_an_attribute() -> Iterator[Callable[..., Any]]:
    config = Config()
    yield lambda b, h, q, k: band(config, q, k)
    config.window = 7


@state
def through_super() -> Iterator[Callable[..., Any]]:
    class Base:
        def limit(self) -> int:
            return self.n

    class Derived(Base):
        n = 2

        def limit(self) -> int:
            return super().limit() + 1

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q - k < self.limit()

    mod = Derived()
    yield mod
    Derived.n = 5


@state
def a_descriptor() -> Iterator[Callable[..., Any]]:
    class Field:
        value = 2

        def __get__(self, owner: Any, cls: type) -> int:
            return self.value

    field = Field()

    class Holder:
        n = field

    holder = Holder()
    yield lambda b, h, q, k: q - k < holder.n
    field.value = 6


@state
def a_descriptor_that_only_assigns() -> Iterator[Callable[..., Any]]:
    class Field:
        def __set__(self, owner: Any, value: int) -> None:
            owner.__dict__["n"] = value + 1

    class Holder:
        n = Field()

    holder = Holder()
    holder.n = 1
    yield lambda b, h, q, k: q - k < holder.n
    holder.n = 5


@state
def the_lengths_of_a_mask() -> Iterator[Callable[..., Any]]:
    mask = create_block_mask(mods.causal, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    yield lambda b, h, q, k: (q < mask.seq_lengths[0]) & (k < mask.shape[-1])
    mask.seq_lengths = (4, 6)


@state
def a_metaclass_property() -> Iterator[Callable[..., Any]]:
    class Meta(type):
        hidden = 2

        @property
        def n(cls) -> int:
            return cls.hidden

    class Holder(metaclass=Meta):
        pass

    yield lambda b, h, q, k: q - k < Holder.n
    Meta.hidden = 5


@state
def a_subclass_of_dict() -> Iterator[Callable[..., Any]]:
    class Settings(dict):
        def __missing__(self, key: str) -> int:
            return 4

    settings = Settings(n=2)
    yield lambda b, h, q, k: q - k < settings["n"] + settings["other"]
    settings["other"] = 0


@state
def a_subclass_of_int() -> Iterator[Callable[..., Any]]:
    class Limit(int):
        pass

    limits = [Limit(2)]
    yield lambda b, h, q, k: q - k < limits[0]
    limits[0] = Limit(5)


@state
def a_context_manager() -> Iterator[Callable[..., Any]]:
    class Scope:
        n = 2

        def __enter__(self) -> int:
            return self.n

        def __exit__(self, *error: object) -> None: ...

    scope = Scope()

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with scope as n:
            return q - k < n

    yield mod
    scope.n = 5


@state
def membership() -> Iterator[Callable[..., Any]]:
    class Flags:
        def __init__(self) -> None:
            self.names = ["causal"]

        def __contains__(self, name: str) -> bool:
            return name in self.names

    flags = Flags()
    yield lambda b, h, q, k: q >= k if "causal" in flags else q < k
    flags.names.clear()


@state
def a_base_class_that_is_changed_later() -> Iterator[Callable[..., Any]]:
    class One:
        n = 1

    class Two:
        n = 6

    class Holder(One):
        pass

    class Other(Two):
        pass

    holder = Holder()
    yield lambda b, h, q, k: q - k < holder.n
    Holder.__bases__ = (Other,)


@state
def an_attribute_that_hides_that_of_the_class() -> Iterator[Callable[..., Any]]:
    config = Config()
    yield lambda b, h, q, k: q * config.gain < k + 3
    config.gain = 0.5


@state
def a_forward_hook() -> Iterator[Callable[..., Any]]:
    module = torch.nn.Linear(1, 1).double()
    yield lambda s, b, h, q, k: s + module(TABLE[q].reshape(1))[0]
    module.register_forward_hook(lambda module, args, out: out * 2)


@state
def a_global_of_an_installed_package() -> Iterator[Callable[..., Any]]:
    package = types.ModuleType("an_installed_package")
    package.__file__ = "/usr/lib/python3/site-packages/an_installed_package.py"
    exec("n = 2\ndef limit():\n    return n", package.__dict__)
    sys.modules[package.__name__] = package
    limit = package.limit
    yield lambda b, h, q, k: q - k < limit()
    package.n = 6


@state
def the_environment() -> Iterator[Callable[..., Any]]:
    os.environ["WINDOW_OF_A_TEST"] = "2"
    yield lambda b, h, q, k: q - k < int(os.environ["WINDOW_OF_A_TEST"]) + int(os.getenv("WINDOW_OF_A_TEST", "1"))
    os.environ["WINDOW_OF_A_TEST"] = "4"


@state
def a_default_argument() -> Iterator[Callable[..., Any]]:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, n: int = 2, *, m: int = 1) -> Tensor:
        return q - k < n + m

    yield mod
    mod.__kwdefaults__["m"] = 5


@state
def a_global_that_hides_a_builtin() -> Iterator[Callable[..., Any]]:
    scope: dict[str, Any] = {}
    exec("def mod(b, h, q, k):\n    return q - k < max(2, 3)", scope)
    yield scope["mod"]
    scope["max"] = lambda *numbers: 6


@state
def a_named_tuple_in_a_list() -> Iterator[Callable[..., Any]]:
    Pair = collections.namedtuple("Pair", "low high")
    pairs = [Pair(1, 2)]
    yield lambda b, h, q, k: (q - k < pairs[0].high) & (q > pairs[0].low)
    pairs[0] = Pair(0, 5)


@state
def a_frozen_dataclass_replaced() -> Iterator[Callable[..., Any]]:
    @dataclasses.dataclass(frozen=True)
    class Window:
        n: int

    holder = types.SimpleNamespace(window=Window(2))
    yield lambda b, h, q, k: q - k < holder.window.n
    holder.window = Window(5)


@state
def a_partial_of_a_helper() -> Iterator[Callable[..., Any]]:
    config = Config()
    yield functools.partial(lambda c, b, h, q, k: q - k < c.reach() + c.doubled, config)
    config.window = 1


@state
def another_tensor_in_a_parameter_list() -> Iterator[Callable[..., Any]]:
    tables = torch.nn.ParameterList([torch.nn.Parameter(TABLE.clone())])
    yield lambda s, b, h, q, k: s + tables[0][q]
    tables[0] = torch.nn.Parameter(TABLE * 3)


@state
def a_dict_of_functions() -> Iterator[Callable[..., Any]]:
    table = {"mod": lambda q, k: q >= k}
    yield lambda b, h, q, k: table["mod"](q, k)
    table["mod"] = lambda q, k: q - 2 >= k


@state
def a_module_level_number() -> Iterator[Callable[..., Any]]:
    global OFFSET
    yield lambda b, h, q, k: q - k < OFFSET
    OFFSET = 5


@state
def getattr_of_a_name_in_a_variable() -> Iterator[Callable[..., Any]]:
    config, name = Config(), "window"

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < getattr(config, name)

    yield mod
    name = "doubled"


@pytest.mark.parametrize("name", CASES_OF_STATE)
def test_a_change_of_what_was_read_is_seen(name: str) -> None:
    steps = CASES_OF_STATE[name]()
    mod = next(steps)
    kind = kind_of(mod)
    agrees(mod, kind)
    before = stats()["traces"]
    agrees(mod, kind)
    assert stats()["traces"] == before, "traced again though nothing changed"
    was = eager(mod, kind)
    next(steps, None)
    agrees(mod, kind)
    assert eager(mod, kind) != was, "the case changes nothing"


def test_a_mask_whose_mod_reads_something_else_now_is_refused() -> None:
    config = Config()
    mask = create_block_mask(lambda b, h, q, k: band(config, q, k), None, None, 32, 32, device="cpu", BLOCK_SIZE=8)
    x = torch.randn(1, 1, 32, 4)
    flex_attention(x, x, x, block_mask=mask)
    config.window = 7
    with pytest.raises(MutationError, match="'window' was 3 and is 7"):
        flex_attention(x, x, x, block_mask=mask)
    config.window = 3
    flex_attention(x, x, x, block_mask=mask)


# Frozen state: what differs on each call is not traced once.


def test_random_numbers_are_drawn_at_each_call_and_warned_of_once() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * random.randint(1, 1000) + int(np.random.randint(1000)) + time.perf_counter_ns() * 0

    with pytest.warns(
        RetraceWarning, match=r"mod .*test_follow_state\.py:\d+\) is traced at each call: it calls .*randint"
    ) as caught:
        for seed in (1, 2, 3):
            random.seed(seed)
            np.random.seed(seed)
            found = trace(mod, "score", torch.float64).numbers
            random.seed(seed)
            np.random.seed(seed)
            assert found[:2] == (random.randint(1, 1000), np.random.randint(1000))
    assert len(caught) == 1


def test_graphs_of_drawn_numbers_are_one() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * random.random()

    with pytest.warns(RetraceWarning):
        graphs = [trace(mod, "score").graph for _ in range(3)]
    assert graphs[0] == graphs[1] == graphs[2]


def test_a_counter_counts() -> None:
    calls = 0

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return s * calls

    with pytest.warns(RetraceWarning, match="changes the captured variable 'calls'"):
        assert [trace(mod, "score").numbers[0] for _ in range(3)] == [1, 2, 3]


def test_what_is_set_up_once_is_not_warned_of() -> None:
    memory: dict[str, int] = {}

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if "window" not in memory:
            memory["window"] = 4
        return q - k < memory["window"]

    agrees(mod, "mask")
    agrees(mod, "mask")
    before = stats()["traces"]
    agrees(mod, "mask")
    assert stats()["traces"] == before
    memory["window"] = 2
    agrees(mod, "mask")


def test_what_is_set_in_each_run_is_warned_of() -> None:
    class Holder:
        last: int | None = None

    holder, memory = Holder(), dict[str, int]()

    def sets_an_attribute(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        holder.last = 0
        return s

    def sets_an_item(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        memory["last"] = 0
        return s

    for mod, what in ((sets_an_attribute, "the attribute 'last'"), (sets_an_item, "an item")):
        trace(mod, "score")
        with pytest.warns(RetraceWarning, match=f"it changes {what} of a captured object") as caught:
            for _ in range(3):
                trace(mod, "score")
        assert len(caught) == 1


def test_a_cached_property_is_computed_by_python() -> None:
    class Slopes:
        def __init__(self) -> None:
            self.heads = 4

        @functools.cached_property
        def table(self) -> Tensor:
            return torch.exp2(-torch.arange(1, self.heads + 1, dtype=torch.float64))

        def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.table[h]

    slopes = Slopes()
    assert trace(slopes.mod, "score").captures[0] is vars(slopes)["table"]
    agrees(slopes.mod)
    slopes.table = TABLE
    agrees(slopes.mod)


def test_a_computed_tensor_is_not_left_in_the_users_objects() -> None:
    class Lazy:
        table: Any = None

        def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.exp2(TABLE)
            return s + self.table[q]

    lazy = Lazy()
    with pytest.raises(
        ModError, match=r"test_follow_state\.py:\d+ keeps a tensor that it computes in a captured object of Lazy"
    ):
        trace(lazy.mod, "score")
    assert lazy.table is None


def test_methods_of_a_class_that_builtins_call() -> None:
    """`callable` and `range` look methods up, which may change."""

    class Width:
        def __index__(self) -> int:
            return 2

    width, x = Width(), torch.randn(1, 1, 4, 8)

    def scaled(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * len(range(width)) * (8 if callable(width) else 1)  # powers of 2: no rounding

    def check(factor: int) -> None:
        expected = flex_attention(x, x, x, lambda s, b, h, q, k: s * factor)
        assert torch.equal(flex_attention(x, x, x, scaled), expected)

    check(2)
    Width.__index__ = lambda self: 4  # type: ignore[method-assign]
    check(4)
    Width.__call__ = lambda self: None  # type: ignore[attr-defined]
    check(32)
