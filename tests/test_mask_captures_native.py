"""Captures: tensors made in each run, exports, copies of mods with other tensors, and what a mod does not find."""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import pickle
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from followed_mods import Case, Mod, compare
from torch import Tensor

from flexattn import create_block_mask, flex_attention
from flexattn.block_mask.record import lift
from flexattn.errors import ModError, MutationError, RetraceWarning, UnsupportedError
from flexattn.trace.trace import stats

SIZE = 8
X = torch.randn(1, 1, SIZE, 16)
EYE = torch.eye(SIZE)[None, None]
T = torch.arange(SIZE) % 2

pytestmark = pytest.mark.filterwarnings("ignore::flexattn.errors.RetraceWarning")


def build(mod: Mod) -> Any:
    return create_block_mask(mod, 1, 1, SIZE, SIZE, device="cpu")


def keys(mask: Any) -> list[int]:
    """Return whether query 0 attends each key."""
    return (flex_attention(X, X, EYE, block_mask=mask)[0, 0, 0] > 0).int().tolist()


# Tensors that a mask_mod makes in each run compare by contents.

ARRAY = (np.arange(SIZE) % 2).astype(np.float32)
MADE: dict[str, Mod] = {
    "itself": lambda b, h, q, k: torch.from_numpy(ARRAY)[k] > 0,
    "computed from": lambda b, h, q, k: (torch.from_numpy(ARRAY) * 2)[k] > 0,
    "a view": lambda b, h, q, k: torch.from_numpy(ARRAY[::-1].copy()[::-1].copy())[k] > 0,
    "nan": lambda b, h, q, k: torch.from_numpy(ARRAY + np.array([0] * 6 + [np.nan, 0], np.float32))[k] > 0,
    "half": lambda b, h, q, k: torch.frombuffer(bytearray(ARRAY.astype(np.float16)), dtype=torch.float16)[k] > 0,
    "a 0-d tensor": lambda b, h, q, k: torch.from_numpy(ARRAY[1:2]).reshape(()) * k % 2 > 0,
}


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_made_in_each_run_compares_by_contents(name: str) -> None:
    ARRAY[:] = np.arange(SIZE) % 2
    mask = build(MADE[name])
    expected = [0, 1] * (SIZE // 2)
    for same in (mask, copy.deepcopy(mask), mask.to("cpu"), pickle.loads(pickle.dumps(mask))):
        assert keys(same) == expected
    with torch.inference_mode():
        assert keys(mask) == expected
    ARRAY[1] = 3
    with pytest.raises(MutationError, match="has other values"):
        keys(mask)
    ARRAY[1] = 1
    assert keys(mask) == expected


def test_a_tensor_captured_by_a_mod_without_a_guard_is_still_watched() -> None:
    table = T.clone()
    mask = build(lambda b, h, q, k: table[k] > time.time() * 0)
    assert keys(mask) == T.tolist()
    table[0] = 1
    with pytest.raises(MutationError, match="'table' was changed in place"):
        keys(mask)


def test_numbers_of_a_mask_differ_in_the_sign_of_zero() -> None:
    class Config:
        x = -1.0

    mod: Mod = lambda b, h, q, k: ((1 + k.double()) / Config.x > 0) | (k == 0)  # noqa: E731
    for x, attended in ((-1.0, 1), (-0.0, 1), (0.0, SIZE)):
        Config.x = x
        mask = build(mod)
        assert sum(keys(mask)) == attended
        if not x:
            Config.x = -x
            with pytest.raises(MutationError, match=f"'x' was {x} and is {-x}"):
                keys(mask)


# A traced tensor has no memory to export.

EXPORTS: dict[str, Callable[[Tensor], Any]] = {
    "torch.from_dlpack": torch.from_dlpack,
    "capsule": lambda x: torch.from_dlpack(x.__dlpack__()),
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "numpy": lambda x: torch.from_numpy(np.from_dlpack(x)),
    "a number": lambda x: float(np.from_dlpack(x)),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_of_a_traced_tensor_is_refused(name: str) -> None:
    export = EXPORTS[name]
    with pytest.raises(ModError, match=r"test_mask_captures_native\.py:\d+ exports a tensor"):
        flex_attention(X, X, X, lambda s, b, h, q, k: s + export(k))
    if name != "to_dlpack":  # torch.utils.dlpack.to_dlpack exports the captured tensor itself
        scalar = torch.ones(())
        with pytest.raises(ModError, match="exports a tensor"):
            flex_attention(X, X, X, lambda s, b, h, q, k: s + export(scalar))


# Copies of mods, with other tensors.


class Row(tuple):
    def table(self) -> Tensor:
        return self[0]


class Named(collections.namedtuple("Named", "t n")):
    def __new__(cls, t: Tensor) -> Any:
        return super().__new__(cls, t, 1)  # type: ignore[call-arg]


class Slotted:
    __slots__ = ("__n", "t")

    def __init__(self, t: Tensor) -> None:
        self.t, self.__n = t, 1

    def read(self, k: Tensor) -> Tensor:
        return self.t[k] * self.__n > 0


class OneSlot:
    __slots__ = "table"


class Base:
    t: Tensor

    def read(self, k: Tensor) -> Tensor:
        return self.t[k] > 0


class Derived(Base):
    def __init__(self, t: Tensor) -> None:
        self.t = t

    def read(self, k: Tensor) -> Tensor:
        return super().read(k)


class Box:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


COPIES: dict[str, Callable[[Tensor], Mod]] = {}


def copied(make: Callable[[Tensor], Mod]) -> Callable[[Tensor], Mod]:
    COPIES[make.__name__] = make
    return make


@copied
def a_tuple_subclass(t: Tensor) -> Mod:
    row = Row((t,))
    row.scale = 2  # type: ignore[attr-defined]
    return lambda b, h, q, k: row.table()[k] * row.scale > 1  # type: ignore[attr-defined]


@copied
def a_namedtuple_with_its_own_new(t: Tensor) -> Mod:
    named = Named(t)
    return lambda b, h, q, k: named.t[k] >= named.n


@copied
def a_struct_sequence(t: Tensor) -> Mod:
    box, when = Box(t=t), time.gmtime(0)
    return lambda b, h, q, k: box.t[k] > when.tm_hour


@copied
def private_slots(t: Tensor) -> Mod:
    slotted = Slotted(t)
    return lambda b, h, q, k: slotted.read(k)


@copied
def a_single_slot(t: Tensor) -> Mod:
    slot = OneSlot()
    slot.table = t
    return lambda b, h, q, k: slot.table[k] > 0


@copied
def a_method_that_calls_super(t: Tensor) -> Mod:
    derived = Derived(t)
    return lambda b, h, q, k: derived.read(k)


@copied
def scalars_of_numpy(t: Tensor) -> Mod:
    box = Box(t=t, n=np.int8(1), x=np.array(1))
    return lambda b, h, q, k: box.t[k] * (box.n.dtype == np.int8) >= box.n


@copied
def an_object_in_two_places(t: Tensor) -> Mod:
    box = Box(t=t)
    places = [box]  # visited after the object itself
    return lambda b, h, q, k: box.t[k] + places[0].t[k] > 1


@copied
def a_cycle(t: Tensor) -> Mod:
    parent = Box(t=t)
    parent.child = (Box(parent=parent),)  # type: ignore[attr-defined]
    return lambda b, h, q, k: parent.t[k] + parent.child[0].parent.t[k] > 1  # type: ignore[attr-defined]


@copied
def a_module_and_a_partial(t: Tensor) -> Mod:
    module = torch.nn.Module()
    module.register_buffer("t", t)
    return functools.partial(lambda m, b, h, q, k: m.t[k] > 0, module)


@copied
def a_helper(t: Tensor) -> Mod:
    def helper(k: Tensor) -> Tensor:
        return t[k] > 0

    return lambda b, h, q, k: helper(k) & (helper(k) > 0)


@pytest.mark.parametrize("name", COPIES)
def test_a_flattened_mask_takes_other_tensors(name: str) -> None:
    mask = build(COPIES[name](T))
    leaves, context = mask._flatten()
    assert keys(mask) == keys(mask._unflatten(leaves, context)) == T.tolist()
    assert keys(mask._unflatten([1 - x if x is T else x for x in leaves], context)) == (1 - T).tolist()
    assert keys(mask) == T.tolist()


def test_a_copy_keeps_its_numbers_and_shares_what_holds_no_leaf() -> None:
    box, shared = Box(n=1), Box(name="keep")
    mod: Mod = lambda b, h, q, k: (T[k] >= box.n) & (shared.name == "keep")  # type: ignore[attr-defined]  # noqa: E731
    tensors, shell = lift(mod)
    made = shell.fill([t.clone() for t in tensors])
    held = dict(zip(made.__code__.co_freevars, (c.cell_contents for c in made.__closure__), strict=True))  # type: ignore[attr-defined]
    assert held["shared"] is shared
    assert held["box"] is not box


def test_shells_differ_by_types_of_numpy_and_the_sign_of_zero() -> None:
    def shell(n: Any) -> Any:
        return lift(lambda b, h, q, k: T[k] > n)[1]

    assert shell(np.int8(1)) == shell(np.int8(1)) != shell(np.int16(1))
    assert shell(0.0) == shell(0.0) != shell(-0.0)


def of_a_class(t: Tensor) -> Mod:
    class Holder:
        table = t

    return lambda b, h, q, k: Holder.table[k] > 0


def of_the_class_of_an_instance(t: Tensor) -> Mod:
    class Holder:
        table = t

    holder = Holder()
    return lambda b, h, q, k: holder.table[k] > 0


def of_a_method(t: Tensor) -> Mod:
    class Holder:
        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return t[k] > 0

    return Holder()


@pytest.mark.parametrize("make", [of_a_class, of_the_class_of_an_instance, of_a_method])
def test_a_tensor_of_a_class_is_not_replaced_silently(make: Callable[[Tensor], Mod]) -> None:
    mask = build(make(T))
    leaves, context = mask._flatten()
    assert keys(mask._unflatten(leaves, context)) == T.tolist()
    with pytest.raises(UnsupportedError, match=r"through the attribute \w+ of the class .*Holder"):
        mask._unflatten([1 - x if x is T else x for x in leaves], context)
    with pytest.raises(UnsupportedError, match="Keep it in a variable"):
        mask.to("meta")


# What a mod did not find, and finds later.

ABSENT: dict[str, Case] = {}


def absent(case: Case) -> Case:
    ABSENT[case.__name__] = case
    return case


def attempt(read: Callable[[Tensor], Any], error: type[Exception]) -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return s + read(s)
        except error:
            return s + 7

    return mod


@absent
def a_default() -> Iterator[Mod]:
    def helper(x: Tensor, y: Any) -> Tensor:
        return x + y

    yield attempt(lambda s: helper(s), TypeError)  # type: ignore[call-arg]
    helper.__defaults__ = (2.0,)


@absent
def a_default_by_keyword() -> Iterator[Mod]:
    def helper(x: Tensor, *, y: Any, z: Any = 1.0) -> Tensor:
        return x + y * z

    yield attempt(lambda s: helper(s), TypeError)  # type: ignore[call-arg]
    helper.__kwdefaults__ = {"y": 2.0, "z": 3.0}


@absent
def a_builtin() -> Iterator[Mod]:
    yield attempt(lambda s: ZZ_LATE_NAME, NameError)  # type: ignore[name-defined]  # noqa: F821
    builtins.ZZ_LATE_NAME = 2.0  # type: ignore[attr-defined]
    yield lambda s, b, h, q, k: s
    del builtins.ZZ_LATE_NAME  # type: ignore[attr-defined]


@absent
def a_module() -> Iterator[Mod]:
    def read(s: Tensor) -> Any:
        import zz_late_module  # type: ignore[import-not-found]

        return zz_late_module.g

    yield attempt(read, ImportError)
    sys.modules["zz_late_module"] = types.SimpleNamespace(g=2.0, __name__="zz_late_module", __spec__=None)  # type: ignore[assignment]
    yield lambda s, b, h, q, k: s
    del sys.modules["zz_late_module"]


@absent
def a_name_of_a_module() -> Iterator[Mod]:
    late = types.ModuleType("zz_named_module")
    sys.modules["zz_named_module"] = late

    def read(s: Tensor) -> Any:
        from zz_named_module import g  # type: ignore[import-not-found]

        return g

    yield attempt(read, ImportError)
    late.g = 2.0  # type: ignore[attr-defined]
    yield lambda s, b, h, q, k: s
    del sys.modules["zz_named_module"]


@pytest.mark.parametrize("name", ABSENT)
def test_what_was_absent_is_found_later(name: str) -> None:
    steps = ABSENT[name]()
    mod = next(steps)
    was = compare(mod)
    next(steps, None)
    try:
        assert compare(mod) != was
    finally:
        list(steps)


def test_absence_of_a_default_is_guarded() -> None:
    mod = next(ABSENT["a_default"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RetraceWarning)
        compare(mod)
        before = stats()["traces"]
        compare(mod)
    assert stats()["traces"] == before
