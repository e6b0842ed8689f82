"""The types of the two kinds of mods, and names for mods made by factories."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, q_idx, kv_idx) -> bool
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, b, h, q_idx, kv_idx) -> score

Mod = TypeVar("Mod", MaskMod, ScoreMod)


def named(mod: Mod, name: str, *parts: object, between: str = "_") -> Mod:
    """Give a closure a descriptive name, which graphs, masks and kernels show: the name and these parts.

    In torch.compile the parts are left out: numbers may be symbols there, which Dynamo does not convert to text.
    """
    if parts and not torch.compiler.is_dynamo_compiling():
        name = f"{name}_{between.join(map(_text, parts))}"
    mod.__name__ = mod.__qualname__ = name
    return mod


def _text(part: object) -> str:
    if isinstance(part, Tensor):
        return "tensor"
    if isinstance(part, (int, str, torch.SymInt, torch.SymFloat)):
        return str(part)
    return f"{part:g}".replace(".", "p").replace("-", "m").replace("+", "")


def call_of_factory(mod: Callable[..., Any]) -> str | None:
    """Return how to call a factory of this package that was passed as a mod itself, `mods.sliding_window(window)`."""
    ours = str(getattr(mod, "__module__", "")).startswith("flexattn.mods.")
    if not ours or mod.__annotations__.get("return") not in ("ScoreMod", "MaskMod"):
        return None
    required = [p.name for p in inspect.signature(mod).parameters.values() if p.default is p.empty]
    return f"mods.{mod.__name__}({', '.join(required) or '...'})"


def is_score_mod(mod: Callable[..., Any]) -> bool:
    """Return whether a mod is a score_mod: it has five required positional arguments."""
    parameters = inspect.signature(mod).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.default is p.empty and p.kind in kinds]) == 5
