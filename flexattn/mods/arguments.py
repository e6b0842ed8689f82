"""Checks of the arguments of factories."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Rational, Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, DtypeError, message
from flexattn.mods.kinds import ScoreMod

Number = TypeVar("Number")


class PerHead(NamedTuple):
    """The tensor of a ready mod with something for each query head: calls compare it with query."""

    argument: str
    tensor: Tensor
    form: str  # "[buckets, H]"

    @property
    def heads(self) -> int:
        return self.tensor.shape[self.form.strip("[]").split(", ").index("H")]

    def expected(self, heads: int) -> str:
        return f"{self.form.replace('H', str(heads))}, as query has {heads} heads"

    def fix(self, heads: int) -> str:
        if heads in self.tensor.shape:
            return f"Pass {self.argument}.T."
        return f"Give one entry for each query head. For some of the heads, slice {self.argument}."


def per_head(mod: ScoreMod, argument: str, tensor: Tensor, form: str) -> ScoreMod:
    """Let calls check the heads of a tensor. Without this, a transposed table is read without an error."""
    if not torch.compiler.is_dynamo_compiling():
        mod.per_head = argument, tensor, form  # type: ignore[attr-defined]  # a PerHead; models make mods at each call
    return mod


def with_heads_of(mod: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls check the heads of a mod that another one is made of, at the same heads."""
    if str(getattr(mod, "__module__", "")).startswith("flexattn.") and not hasattr(mod, "__wrapped__"):
        for name in ("per_head", "heads"):
            if hasattr(mod, name):
                setattr(made, name, getattr(mod, name))
                made.ready_name = getattr(mod, "ready_name", mod.__module__.split(".")[-1])  # type: ignore[attr-defined]
    return made


def check_number(argument: str, value: object, fix: str) -> None:
    """Raise unless a value is a number or a tensor."""
    if torch.compiler.is_dynamo_compiling():  # which shows numbers of numpy as arrays
        return
    is_fraction = isinstance(value, Rational) and not isinstance(value, Integral)  # which torch does not multiply
    is_number = isinstance(value, (Real, Tensor, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    if is_number and not is_fraction:
        return
    found = repr(value) if isinstance(value, (bool, str, type(None))) else described(value)
    fix = f"Pass float({argument})." if hasattr(value, "__float__") and not isinstance(value, bool) else fix
    raise DtypeError(message(argument, found, "a number", fix))


def checked_int(argument: str, value: Number, least: int, fix: str) -> Number:
    """Return a whole number, that of numpy as an int: torch.compile would make a tensor of it. Raise if it is none.

    The value of a 0-d tensor is not read.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
        return value
    expected = f"an int from {least} on"
    if isinstance(value, bool) or not isinstance(value, (int, Integral, torch.SymInt)):
        found = repr(value) if isinstance(value, (bool, float, str)) else described(value)
        raise DtypeError(message(argument, found, expected, fix))
    if value < least:  # type: ignore[operator]
        raise ArgumentError(message(argument, value, expected, fix))
    return value if isinstance(value, (int, torch.SymInt)) else int(value)  # type: ignore[return-value]


def check_tensor(argument: str, value: object, shape: str, fix: str, *, integers: bool = False) -> None:
    """Check the rank of a tensor, which `shape` lists ("[H]"), and with `integers` its dtype."""
    kind = "integers" if integers else "a tensor"
    wrong_dtype = isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool)
    if not isinstance(value, Tensor) or (integers and wrong_dtype):
        if isinstance(getattr(value, "weight", None), Tensor):  # torch.nn.Embedding
            fix = f"Pass its weight: {argument}.weight."
        raise DtypeError(message(argument, described(value), f"{kind} {shape}", fix))
    if value.dim() != shape.count(",") + 1:
        raise ArgumentError(message(argument, described(value), f"{kind} {shape}", fix))


def described(value: object) -> str:
    """Return what a value is, without its elements."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
