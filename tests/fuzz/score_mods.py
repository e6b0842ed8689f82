"""The score mods that are drawn: `PIECES[name](place)` is (score_mod, the tensors whose gradients are compared).

They keep scores of a few units, so that several can follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import kernel_cases
import torch
from torch import Tensor

from flexattn import mods
from fuzz.grammar import as_function, random_bias
from fuzz.place import Place

Mod = Callable[..., Any]
Made = tuple[Mod, tuple[Tensor, ...]]


def learned(shape: Callable[[Place], tuple[int, ...]], mod: Mod, dtype: torch.dtype = torch.float32) -> Mod:
    """Return a maker of a mod(score, b, h, q_idx, kv_idx, table) with one table."""

    def make(at: Place) -> Made:
        table = at.randn(*shape(at), dtype=dtype)
        return lambda s, b, h, q, kv: mod(s, b, h, q, kv, table), (table,)

    return make


def ready(shape: Callable[[Place], tuple[int, ...]], factory: Mod, size: float = 1.0) -> Mod:
    """Return a maker of factory(table) of flexattn.mods."""

    def make(at: Place) -> Made:
        table = at.randn(*shape(at)) * size
        return factory(table), (table,)

    return make


def fixed(mod: Mod) -> Mod:
    return lambda at: (mod, ())


def alibi(at: Place) -> Made:
    if at.random.random() < 0.3:
        return mods.alibi(at.H), ()
    slopes = at.randn(at.H) * 0.02
    return mods.alibi(slopes), (slopes,)


def t5_bias(at: Place) -> Made:
    table, both = at.randn(8, at.H), at.random.random() < 0.5
    return mods.t5_bias(table, bidirectional=both, max_distance=40), (table,)


def temperature(at: Place) -> Made:
    value = at.randn(at.H).abs() + 0.5
    return mods.temperature(value), (value,)


def pair_bias(at: Place) -> Made:
    """A dense bias [1 or B, 1 or H, M, N], of which a batch or head may serve all."""
    of_batch, of_head = at.random.choice([(0, 0), (0, 1), (1, 0), (1, 1)])
    bias = at.randn(at.B if of_batch else 1, at.H if of_head else 1, at.M, at.N)
    return lambda s, b, h, q, kv: s + bias[b * of_batch, h * of_head, q, kv], (bias,)


def expanded_pair_bias(at: Place) -> Made:
    bias = at.randn(1, 1, at.M, at.N)
    every = bias.expand(at.B, at.H, at.M, at.N)
    return lambda s, b, h, q, kv: s + every[b, h, q, kv], ()


def nested(at: Place) -> Made:
    group, table = at.integers(7, at.longest).int(), at.randn(7, 7)
    return lambda s, b, h, q, kv: s + table[group[q], group[kv]], (table,)


def numbers(at: Place) -> Made:
    factor, step, divisor = at.random.uniform(0.5, 1.0), at.random.randint(0, 9), at.random.randint(2, 5)
    return lambda s, b, h, q, kv: s * factor + 0.01 * ((q + step) // divisor - kv), ()


def random_addend(at: Place) -> Made:
    """A function of positions from the grammar, where it is tame."""
    addend = as_function(random_bias(at.random.randrange(10_000)), at.device)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = addend(b, h, q_idx, kv_idx).float()  # torch takes no absolute value of a bool
        return score + torch.where(found.abs() <= 4, found, 0.25)

    return mod, ()


def infinite(at: Place) -> Made:
    """Hide places, or all of the first rows."""
    rows, hides = at.random.randint(1, at.M), at.random.random() < 0.3
    mod = lambda s, b, h, q, kv: torch.where(q < rows if hides else (q + 2 * kv + h) % 5 == 0, -math.inf, s)  # noqa: E731
    return mod, ()


# Infinite ones are drawn as "infinite". Where 'score_in_index' reads, a score decides: a last bit changes the result.
LEFT_OUT = ("empties_rows", "infinite", "infinite_bias", "score_in_index")


def of_kernel_cases(at: Place) -> Made:
    """One of the mods of the kernels' own tests; those with a batch in their tables have two."""
    name = at.random.choice([name for name in kernel_cases.SCORES if name not in LEFT_OUT])
    setting = kernel_cases.Setting(at.device, torch.float32)
    mod, tables = kernel_cases.SCORES[name](setting, max(8, at.H), at.M, at.N)
    return lambda s, b, h, q, kv: mod(s, b % 2, h, q, kv), tables


PIECES: dict[str, Callable[[Place], Made]] = {
    "softcap": lambda at: (mods.softcap(at.random.uniform(2.0, 30.0)), ()),
    "alibi": alibi,
    "relative bias": ready(lambda at: (at.H, 2 * at.random.randint(1, at.longest) + 1), mods.relative_bias),
    "t5 bias": t5_bias,
    "head gate": ready(lambda at: (at.H,), mods.head_gate),
    "temperature": temperature,
    "distance decay": ready(lambda at: (at.H,), mods.distance_decay, 0.01),
    "scalar": learned(lambda at: (), lambda s, b, h, q, kv, t: s * torch.exp(0.1 * t) + t * (q % 3)),
    "pair bias": pair_bias,
    "expanded pair bias": expanded_pair_bias,
    "row and column": learned(lambda at: (at.longest,), lambda s, b, h, q, kv, t: s + t[q] + t[kv]),
    "row times column": learned(lambda at: (at.longest,), lambda s, b, h, q, kv, t: s + t[q] * t[kv]),
    "bias of keys": learned(lambda at: (at.B, at.H, at.N), lambda s, b, h, q, kv, t: s + t[b, h, kv]),
    "bias of queries": learned(lambda at: (at.H, at.M), lambda s, b, h, q, kv, t: s + t[h, q]),
    "half table": learned(lambda at: (at.H, 9), lambda s, b, h, q, kv, t: s + t[h, kv % 9], torch.float16),
    "transposed table": learned(lambda at: (5, at.H), lambda s, b, h, q, kv, t: s + t.T[h][kv % 5]),
    "gate of keys": learned(lambda at: (at.H, at.N), lambda s, b, h, q, kv, t: s * torch.sigmoid(t)[h, kv]),
    "nested tables": nested,
    "square": fixed(lambda s, b, h, q, kv: 0.1 * s * s + s),
    "branches": fixed(lambda s, b, h, q, kv: torch.where(q >= kv, s, 0.5 * s - 0.1 * h)),
    "smooth": fixed(lambda s, b, h, q, kv: torch.sin(s) + torch.sigmoid(s) * s),
    "detached": fixed(lambda s, b, h, q, kv: s * torch.tanh(s).detach() * 0.5 + s),
    "numbers": numbers,
    # No two rows of weights are equal: else, with rows of d_out that are, terms are, and all roundings go one way.
    "no score": fixed(lambda s, b, h, q, kv: torch.sin(0.75 * q + kv)),  # of an exact number: fused or not is the same
    "grammar": random_addend,
    "kernel case": of_kernel_cases,
    "infinite": infinite,
}
LAST = ("infinite",)  # other mods may make a NaN of an infinity


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return names in an order in which they can follow each other."""
    return tuple(sorted(names, key=lambda name: name in LAST))


def make_score_mod(names: Sequence[str], at: Place) -> tuple[Mod | None, tuple[Tensor, ...]]:
    """Return the mods of these names, one after the other, and their tensors."""
    made = [PIECES[name](at) for name in names]
    tensors = tuple(t for _, its in made for t in its)
    if len(made) < 2:
        return (made[0][0] if made else None), tensors
    steps = tuple(mod for mod, _ in made)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, q_idx, kv_idx)
        return score

    return score_mod, tensors
