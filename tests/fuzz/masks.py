"""The masks that are drawn: `MASKS[name](place)` is a mask_mod."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import mask_cases
import torch
from torch import Tensor

from flexattn import mods
from fuzz.grammar import as_function, random_mask
from fuzz.place import Place

Mod = Callable[..., Any]


def natten(at: Place) -> Mod:
    width, kernel = at.random.randint(3, 12), at.random.choice([1, 3])
    return mods.natten_2d(max(3, -(-at.longest // width)), width, kernel)


def sliding(at: Place) -> Mod:
    return mods.sliding_window(at.random.randint(1, at.longest), causal=at.random.random() < 0.5)


def captured(at: Place) -> Mod:
    keep = at.randn(at.M, at.N) > at.random.choice([-2.0, 0.0, 1.5])
    return lambda b, h, q, kv: keep[q, kv]


def tree(at: Place) -> Mod:
    nodes = torch.arange(at.longest)
    return mods.tree(((nodes - 1) // at.random.randint(1, 3)).to(at.device))


def late_rows(at: Place) -> Mod:
    """Leave the first queries without a key, and the last keys without a query."""
    rows, keys = at.random.randint(1, at.M), at.random.randint(1, at.N)
    return lambda b, h, q, kv: (q >= rows) & (kv < keys)


def of_batch_and_head(at: Place) -> Mod:
    by_head, by_batch = at.random.randint(0, 17), at.random.randint(0, 11)
    return lambda b, h, q, kv: (q + h * by_head) >= kv + b * by_batch


def heads_alone(at: Place) -> Mod:
    return lambda b, h, q, kv: (q + h) % 3 != kv % 3


def random_condition(at: Place) -> Mod:
    return as_function(random_mask(at.random.randrange(10_000)), at.device)


# Eager torch rounds each step to half precision, where flexattn computes in float32.
ROUNDED = ("bfloat16", "float16")


def of_mask_cases(at: Place) -> Mod:
    """One of the masks of the mask kernels' own tests, for two batches and three heads that repeat."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    names = [n for n in mask_cases.MASKS if n not in ROUNDED and not (interpreted and n in mask_cases.UNINTERPRETED)]
    mod = mask_cases.make_mask(at.random.choice(names), max(100, at.longest), at.device)
    return lambda b, h, q, kv: mod(b % mask_cases.BATCHES, h % mask_cases.HEADS, q, kv)


MASKS: dict[str, Callable[[Place], Mod]] = {
    "causal": lambda at: mods.causal,
    "causal lower right": lambda at: mods.causal_lower_right(at.M, at.N),
    "sliding": sliding,
    "prefix": lambda at: mods.prefix_lm(at.random.randint(0, at.N)),
    "prefix of batch": lambda at: mods.prefix_lm(at.integers(at.N + 1, at.B)),
    "padding": lambda at: mods.padding(at.integers(at.N + 1, at.B)),
    "document": lambda at: mods.document(at.documents(at.longest)),
    "document of batch": lambda at: mods.document_causal(at.documents(at.B, at.longest)),
    "natten": natten,
    "dilated": lambda at: mods.dilated(at.random.randint(1, 9), at.random.randint(1, 5)),
    "strided": lambda at: mods.strided(at.random.randint(1, 20)),
    "global tokens": lambda at: mods.global_tokens(at.random.randint(0, 8)),
    "block diffusion": lambda at: mods.block_diffusion(-(-at.longest // 2), at.random.choice([1, 4, 16])),
    "tree": tree,
    "captured": captured,
    "batch and head": of_batch_and_head,
    "heads": heads_alone,
    "late rows": late_rows,
    "one key": lambda at: lambda b, h, q, kv: kv == at.N - 1,
    "nothing": lambda at: lambda b, h, q, kv: kv < 0,
    "everything": lambda at: mods.noop_mask,
    "grammar": random_condition,
    "mask case": of_mask_cases,
}
JOINS: dict[str, Callable[..., Mod]] = {
    "and": mods.and_masks,
    "or": mods.or_masks,
    "xor": mods.xor_masks,
    "not": lambda *its: mods.and_masks(mods.not_mask(its[0]), *its[1:]),
}


def make_mask_mod(names: Sequence[str], join: str, at: Place) -> Mod | None:
    """Return the masks of these names, joined."""
    made = [MASKS[name](at) for name in names]
    if not made or (len(made) == 1 and join != "not"):
        return made[0] if made else None
    return JOINS[join](*made)


def dense(mask_mod: Mod | None, at: Place) -> Tensor | None:
    """Return the mask by calling the Python function on index tensors of a CPU, bool [B, H, M, N] on the device."""
    if mask_mod is None:
        return None
    sizes = (at.B, at.H, at.M, at.N)
    axes = (torch.arange(n, dtype=torch.int32) for n in sizes)
    index = (x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(axes))
    return torch.as_tensor(mask_mod(*index)).to(at.device).expand(sizes)
