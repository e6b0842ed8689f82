"""How a case is made from (seed, index), and which features it has."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz.cases import INPUTS, Case, Space
from fuzz.score_mods import in_order

TILE = 128  # lengths of whole tiles are multiples of it
ROUNDS = 4  # so many cases share the kernels of one kind, one in each round of all kinds


@dataclass(frozen=True)
class Deck:
    """Draws without replacement: among any len(choices) numbers that start a shuffle, each choice is drawn once."""

    space: Space
    seed: int
    number: int  # of the case, or of its kind

    def draw(self, name: str, slot: int = 0) -> Any:
        return self._card(name, self.number, slot)

    def several(self, name: str) -> tuple[Any, ...]:
        """Return as many cards of one deck as `name_count` says; the next case goes on with that deck."""
        counts = self.space.of(f"{name}_count")
        shuffle, position = divmod(self.number, len(counts))
        before = [Deck(self.space, self.seed, self.number - 1 - i).draw(f"{name}_count") for i in range(position)]
        start = shuffle * sum(counts) + sum(before)
        return tuple(self._card(name, start + i) for i in range(self.draw(f"{name}_count")))

    def _card(self, name: str, number: int, slot: int = 0) -> Any:
        choices = self.space.of(name)
        shuffle, position = divmod(number, len(choices))
        order = random.Random(f"{self.seed} {name} {slot} {shuffle}").sample(range(len(choices)), len(choices))
        return choices[order[position]]


def kind_of(space: Space, index: int) -> int:
    """Return a number that is the same for all cases that share kernels."""
    if not space.kinds:
        return index
    cycle, position = divmod(index, space.kinds * ROUNDS)
    return cycle * space.kinds + position % space.kinds


def draw_case(space: Space, seed: int, index: int) -> Case:
    """Return the case of a number: what kernels depend on goes by its kind, all else is its own."""
    kind = kind_of(space, index)
    shared, own = Deck(space, seed, kind), Deck(space, seed, index)
    dice = random.Random(f"{seed} {index}")
    B, aux, (D, Dv) = own.draw("B"), shared.draw("aux"), shared.draw("dims")
    M, N = _lengths(own.draw("lengths"), space.longest, dice)
    scale = {"default": None, "zero": 0.0, "negative": -dice.uniform(0.2, 1.5), "given": dice.uniform(0.2, 2.0)}
    factor = scale[own.draw("scale")]
    return Case(
        scores=in_order(shared.several("score")),
        masks=shared.several("mask"),
        join=shared.draw("join"),
        extent=own.draw("extent"),
        mask_from=shared.draw("mask_from"),
        block=shared.draw("block"),
        B=B,
        Hkv=own.draw("Hkv"),
        group=own.draw("group"),
        M=M,
        N=N,
        D=D,
        Dv=Dv,
        shares_keys=B > 1 and own.draw("shares_keys"),
        layouts=_layouts(shared),
        d_out_layout=shared.draw("d_out_layout"),
        dtype=shared.draw("dtype"),
        needs=own.draw("needs"),
        aux=aux,
        lse_gradient="lse" in aux and shared.draw("lse_gradient"),
        scale=factor and round(factor / math.sqrt(D), 4),
        sink=own.draw("sink") if shared.draw("sink") else "",
        dropout_p=shared.draw("dropout_p"),
        deterministic=shared.draw("deterministic"),
        small_tiles=own.draw("small_tiles"),
        options=shared.draw("options"),
        numbers=kind,
        tensors=index,
    )


def _lengths(relation: str, longest: int, dice: random.Random) -> tuple[int, int]:
    """Return the lengths of queries and keys, short ones as often as long ones."""
    M, N = (round(math.exp(dice.uniform(math.log(2), math.log(longest)))) for _ in range(2))
    queries, keys = (TILE * dice.randint(1, max(1, longest // TILE)) for _ in range(2))
    found = {"equal": (M, M), "one query": (1, N), "one key": (M, 1), "whole tiles": (queries, keys)}
    return found.get(relation, (M, N))


def _layouts(deck: Deck) -> tuple[str, str, str]:
    found = deck.several("layout")
    return found if len(found) == 3 else (found or ("contiguous",)) * 3


Has = Callable[[Case], bool]


def _names(space: Space, field: str, prefix: str, has: Callable[[Case, Any], bool]) -> dict[str, Has]:
    """Return a feature for each choice of a table."""
    return {f"{prefix} {choice}": lambda case, x=choice: has(case, x) for choice in dict.fromkeys(space.of(field))}


def _options(space: Space) -> dict[str, Has]:
    names = sorted({name for options in space.of("options") for name, _ in options})
    return {f"option {name}": lambda case, name=name: name in dict(case.options) for name in names}


FEATURES: dict[str, Has] = {
    "no score_mod": lambda c: not c.scores,
    "several score_mods": lambda c: len(c.scores) > 1,
    "no mask": lambda c: not c.masks,
    "several masks": lambda c: len(c.masks) > 1,
    "score_mod and mask": lambda c: bool(c.scores and c.masks),
    "mask per batch": lambda c: bool(c.masks) and "b" in c.extent and c.B > 1,
    "mask per head": lambda c: bool(c.masks) and "h" in c.extent and c.H > 1,
    "block not square": lambda c: bool(c.masks) and c.block[0] != c.block[1],
    "block no power of two": lambda c: bool(c.masks) and any(n & (n - 1) for n in c.block),
    "batch": lambda c: c.B > 1,
    "grouped heads": lambda c: c.group > 1,
    "one key head": lambda c: c.Hkv == 1 and c.group > 1,
    "keys of one batch": lambda c: c.shares_keys,
    "one query": lambda c: c.M == 1,
    "one key": lambda c: c.N == 1,
    "equal lengths": lambda c: c.M == c.N,
    "more queries": lambda c: c.M > c.N,
    "more keys": lambda c: c.M < c.N,
    "odd length": lambda c: bool(c.M % 2 or c.N % 2),
    "D = 1": lambda c: 1 in (c.D, c.Dv),
    "odd D": lambda c: bool(c.D % 2),
    "D no power of two": lambda c: bool(c.D & (c.D - 1)),
    "D != Dv": lambda c: c.Dv != c.D,
    "unlike layouts": lambda c: len(set(c.layouts)) > 1,
    "d_out layout": lambda c: bool(c.needs) and c.d_out_layout != "contiguous",
    "no gradient": lambda c: not c.needs,
    **{f"gradient of {x}": lambda c, x=x: x in c.needs for x in INPUTS},
    "gradient of captures": lambda c: "captures" in c.needs and bool(c.scores),
    "some gradients": lambda c: 0 < len(set(INPUTS) & set(c.needs)) < 3,
    "no aux": lambda c: not c.aux,
    "lse": lambda c: "lse" in c.aux,
    "max_scores": lambda c: "max_scores" in c.aux,
    "gradient through lse": lambda c: c.lse_gradient and bool(c.needs),
    "scale 0": lambda c: c.scale == 0.0,
    "scale negative": lambda c: c.scale is not None and c.scale < 0,
    "scale given": lambda c: c.scale is not None and c.scale > 0,
    "sink": lambda c: bool(c.sink),
    "gradient of sink": lambda c: c.sink not in ("", "one") and "captures" in c.needs,
    "dropout": lambda c: c.dropout_p > 0,
    "deterministic": lambda c: c.deterministic,
}


def features_in(space: Space) -> dict[str, Has]:
    """Return every feature that cases of a space may have, by name."""
    return {
        **_names(space, "score", "score", lambda c, x: x in c.scores),
        **_names(space, "mask", "mask", lambda c, x: x in c.masks),
        **_names(space, "join", "join", lambda c, x: x == c.join and len(c.masks) > (x != "not")),
        **_names(space, "mask_from", "mask", lambda c, x: bool(c.masks) and c.mask_from == x),
        **_names(space, "dtype", "dtype", lambda c, x: c.dtype == x),
        **_names(space, "layout", "layout", lambda c, x: x in c.layouts),
        **_options(space),
        **({"small tiles": lambda c: c.small_tiles} if True in space.of("small_tiles") else {}),
        **({"whole tiles": lambda c: c.M % TILE == 0 == c.N % TILE} if "whole tiles" in space.of("lengths") else {}),
        **FEATURES,
    }  # fmt: skip


def features_of(space: Space, case: Case) -> list[str]:
    return [name for name, has in features_in(space).items() if has(case)]
