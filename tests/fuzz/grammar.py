"""Mods from the grammar of mod_grammar.py as functions of torch tensors, which is what a user writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from mod_grammar import CAPTURES, COMPARE, NUMBERS, Write, booleans, build, floats
from torch import Tensor

from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.nodes import MASK_INPUTS, Node
from flexattn.graph.operators import OPS

# A last bit more or less in these, and whether a comparison holds changes: machines compute them differently.
INEXACT = {"div", "exp", "floordiv", "log", "mod", "rsqrt", "sigmoid", "sin", "sqrt", "tanh"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACE = {"q_idx", "kv_idx"}


@dataclass(frozen=True)
class Term:
    """Stands for flexattn.graph.builder.Expr where a mod is run, not built."""

    value: Tensor

    def apply(self, op: str, *others: Term | float) -> Term:
        beside = next((x.value for x in others if isinstance(x, Term)), self.value) if op == "where" else self.value
        values = [x.value if isinstance(x, Term) else beside.new_full((), x) for x in others]
        return Term(OPS[op].torch(self.value, *values))

    def cast(self, dtype: torch.dtype) -> Term:
        return Term(self.value.to(dtype))

    def __sub__(self, other: float) -> Term:
        return self.apply("sub", other)


@dataclass(frozen=True)
class Runner:
    """Stands for flexattn.graph.builder.Builder: `like` is any tensor of the device."""

    like: Tensor
    captures: tuple[Tensor, ...]
    numbers: tuple[int, ...]

    def const(self, value: float, dtype: torch.dtype) -> Term:
        return Term(self.like.new_full((), value, dtype=dtype))

    def number(self, position: int, dtype: torch.dtype) -> Term:
        return self.const(self.numbers[position], dtype)

    def load(self, capture: int, dtype: torch.dtype, index: list[Term]) -> Term:
        return Term(self.captures[capture][tuple(i.value for i in index)])


def as_function(write: Write, device: str) -> Callable[..., Tensor]:
    """Return `write` as a function (b, h, q_idx, kv_idx) of tensors."""
    captures, numbers = tuple(c.to(device) for c in CAPTURES), NUMBERS

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return write(Runner(q_idx, captures, numbers), *map(Term, (b, h, q_idx, kv_idx))).value

    return mod


@lru_cache(64)
def random_mask(number: int) -> Write:
    return _sampled(booleans(2), number)


@lru_cache(64)
def random_bias(number: int) -> Write:
    return _sampled(floats(2), number)


def _sampled(strategy: st.SearchStrategy[Write], number: int) -> Write:
    """Return a sample that is exact and reads a position; each number has attempts of its own."""
    attempts = (_sample(strategy, 1000 * number + attempt) for attempt in range(20))
    return next(filter(_is_wanted, attempts), lambda builder, b, h, q_idx, kv_idx: q_idx.apply("ge", kv_idx))


def _sample(strategy: st.SearchStrategy[Write], number: int) -> Write:
    """Return what hypothesis draws with a seed: the last of a few, as the first are the simplest."""
    found: list[Any] = []
    settings = hypothesis.settings(
        max_examples=6, database=None, deadline=None, derandomize=False, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    def keep(drawn: Write) -> None:
        found.append(drawn)

    hypothesis.seed(number)(settings(hypothesis.given(strategy)(keep)))()
    return found[-1]


def _is_wanted(write: Write) -> bool:
    """Tell whether machines agree on a mod, and whether it reads a position."""
    graph = build(write, CAPTURES, NUMBERS).graph
    on_floats = [(i, n.op) for i, n in enumerate(graph.nodes) if n.args and _takes_floats(graph, n)]
    # Triton's interpreter fails on a comparison of two floats that are the same at all places.
    alike = INTERPRETED and any(op in COMPARE and not graph.dependence[i] & PLACE for i, op in on_floats)
    return not alike and not INEXACT & {op for _, op in on_floats} and any(map(graph.reads, MASK_INPUTS))


def _takes_floats(graph: ModGraph, node: Node) -> bool:
    return graph.nodes[node.args[0]].dtype.is_floating_point
