"""Mods as traces compute them, compared with Python at a few points."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flexattn.errors import RetraceWarning
from flexattn.trace.trace import trace

Mod = Callable[..., Any]
Case = Callable[[], Iterator[Mod]]
POINTS = [(0, 0, 0, 0), (1, 2, 7, 3), (0, 1, 3, 7), (1, 0, 6, 6)]
TABLE = torch.arange(20, dtype=torch.float64) / 7


def eager(mod: Mod, kind: str) -> list[Any]:
    """Run a mod by Python at a few points."""
    score = (torch.tensor(0.75, dtype=torch.float64),) if kind == "score" else ()
    return [torch.as_tensor(mod(*score, *map(torch.tensor, point))).item() for point in POINTS]


def traced(mod: Mod, kind: str) -> list[Any]:
    bound = trace(mod, kind, torch.float64)
    score = (torch.tensor(0.75, dtype=torch.float64),) if kind == "score" else ()
    places = [[torch.tensor(i, dtype=torch.int32) for i in point] for point in POINTS]
    return [bound(*score, *place).item() for place in places]


def agrees(mod: Mod, kind: str = "score") -> None:
    assert traced(mod, kind) == eager(mod, kind)


def kind_of(mod: Mod) -> str:
    required = [p for p in inspect.signature(mod).parameters.values() if p.default is p.empty]
    return "score" if len(required) == 5 else "mask"


def compare(mod: Mod) -> list[Any]:
    """Check a mod that may warn that it is traced at each call; return its values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        found = traced(mod, kind_of(mod))
    wanted = eager(mod, kind_of(mod))
    assert found == wanted
    return wanted


class Config:
    """An object with a value that a mod reads."""

    def __init__(self, n: Any = 3) -> None:
        self.n = n


class Mode(enum.Enum):
    NEAR = 1
    FAR = 2
