"""Cases: one call of flex_attention in plain words, and the tables of what is drawn on each device.

To add a feature: a field of Case whose default is the simplest value, its choices in CHOICES (and in a Space where
devices differ), a line in `draw.draw_case`, names in `draw.FEATURES`, and what it does in compare.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kernel_cases import LAYOUTS, SINKS

from fuzz.masks import JOINS, MASKS
from fuzz.score_mods import PIECES

Options = tuple[tuple[str, object], ...]
INPUTS = ("query", "key", "value")


@dataclass(frozen=True, repr=False)
class Case:
    """One call; the defaults are the plainest."""

    scores: tuple[str, ...] = ()  # of PIECES, one after the other
    masks: tuple[str, ...] = ()  # of MASKS
    join: str = "and"  # of JOINS
    extent: str = ""  # "b", "h" or "bh": built for each batch, head or both, even where the mask reads neither
    mask_from: str = "ours"  # or "not separated", "torch"
    block: tuple[int, int] = (128, 128)
    B: int = 1
    Hkv: int = 1
    group: int = 1
    M: int = 1
    N: int = 1
    D: int = 16
    Dv: int = 16
    shares_keys: bool = False  # one batch of keys for all of queries
    layouts: tuple[str, str, str] = ("contiguous",) * 3  # of query, key and value
    d_out_layout: str = "contiguous"
    dtype: str = "float32"
    needs: tuple[str, ...] = ()  # which want a gradient, of query, key, value, captures
    aux: tuple[str, ...] = ()  # of lse, max_scores
    lse_gradient: bool = False
    scale: float | None = None
    sink: str = ""  # of SINKS
    dropout_p: float = 0.0
    deterministic: bool = False
    small_tiles: bool = False  # of the CPU engine
    options: Options = ()  # kernel_options
    numbers: int = 0  # seed of the numbers in mods
    tensors: int = 0  # seed of the values of tensors

    @property
    def H(self) -> int:
        return self.Hkv * self.group

    def __repr__(self) -> str:
        return f"Case({', '.join(self.changes())})"

    def changes(self) -> list[str]:
        """Return what is not as in the plainest case, as keyword arguments."""
        pairs = ((f, getattr(self, f.name)) for f in fields(self))
        return [f"{f.name}={value!r}" for f, value in pairs if value != f.default]


@dataclass(frozen=True)
class Space:
    """What can be drawn for a device, and who computes it: `engines` are kernel_options by name."""

    device: str
    engines: dict[str, dict[str, object]]
    longest: int
    kinds: int  # this many cases have kernels of their own, and three times as many share them; 0: no such thing
    limit_s: float  # of a case
    choices: dict[str, Sequence[Any]] = field(default_factory=dict)  # instead of those in CHOICES
    card: str = ""  # whose kernels are compiled, and run as PTX

    def of(self, name: str) -> Sequence[Any]:
        return self.choices.get(name, CHOICES[name])


EVERYTHING = (*INPUTS, "captures")
# How often each is drawn is how often it is listed.
CHOICES: dict[str, Sequence[Any]] = {
    "score_count": (0, 1, 1, 2, 2, 2, 3),
    "score": tuple(PIECES),
    "mask_count": (0, 1, 1, 1, 2, 2, 3),
    "mask": tuple(MASKS),
    "join": (*JOINS, "and", "or", "xor"),
    "extent": ("", "", "b", "h", "bh"),
    "mask_from": ("ours", "ours", "ours", "ours", "not separated", "torch"),
    "block": (
        (128, 128), (128, 128), (16, 16), (32, 32), (48, 48), (7, 7), (5, 7), (8, 32), (20, 128), (64, 16), (1, 3),
    ),
    "B": (1, 2, 2, 3),
    "Hkv": (1, 1, 2, 3),
    "group": (1, 1, 1, 2, 3, 4),
    "lengths": ("equal", "equal", "unequal", "unequal", "unequal", "unequal", "one query", "one key", "whole tiles"),
    "dims": (
        (16, 16), (8, 8), (32, 32), (64, 64), (64, 64), (128, 128), (256, 256), (1, 1), (7, 7), (16, 1), (24, 8),
        (33, 65), (96, 96), (130, 24), (48, 192), (200, 160),
    ),
    "shares_keys": (False, False, True),
    "layout_count": (0, 0, 1, 1, 3, 3),  # one for all of query, key and value, or one for each
    "layout": tuple(LAYOUTS),
    "d_out_layout": ("contiguous", "contiguous", *LAYOUTS),
    "dtype": ("float16", "bfloat16", "float32", "float32", "float64"),
    "needs": (
        EVERYTHING, EVERYTHING, EVERYTHING, INPUTS, (), ("query",), ("key",), ("value",), ("captures",),
        ("query", "captures"), ("key", "value"),
    ),
    "aux": ((), ("lse",), ("lse",), ("max_scores",), ("lse", "max_scores"), ("lse", "max_scores")),
    "lse_gradient": (True, False),
    "scale": ("default", "default", "default", "zero", "negative", "given", "given"),
    "sink": ("", "", "", "", *SINKS),
    "dropout_p": (0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.5),
    "deterministic": (False, False, True),
    "small_tiles": (False,),
    "options": ((),),
}  # fmt: skip
_TILES = tuple((f"BLOCK_{side}{i}", 16) for i in ("", 1, 2) for side in "MN")
_GPU_DTYPES = ("float16", "float16", "bfloat16", "bfloat16", "float32")
# Small problems, for what runs kernels slowly.
_SMALL: dict[str, Sequence[Any]] = {
    "B": (1, 2), "Hkv": (1, 1, 2), "group": (1, 2),
    "block": ((128, 128), (16, 16), (32, 32), (7, 7), (8, 32), (20, 128), (32, 16)),
    "lengths": ("equal", "unequal", "unequal", "one query", "one key"),
    "options": ((), (), (("EXACT", True),), (("PRESCALE_QK", True),), (("USE_TMA", False),), _TILES),
}  # fmt: skip


def _card(name: str) -> Space:
    return Space(
        "cpu", {"triton": {"BACKEND": "TRITON"}}, longest=40, kinds=0, limit_s=300, card=name,
        choices={
            **_SMALL, "dtype": _GPU_DTYPES,
            "dims": ((16, 16), (64, 64), (128, 128), (1, 1), (33, 65), (96, 96), (130, 24), (192, 128)),
        },
    )  # fmt: skip


SPACES = {
    "cpu": Space(
        "cpu", {"cpu": {}}, longest=150, kinds=0, limit_s=60,
        choices={
            "small_tiles": (False, True),
            "options": ((), (), (("BACKEND", "CPU"),), (("EXACT", True),), (("PRESCALE_QK", True),), _TILES),
        },
    ),
    "interpreter": Space(
        "cpu", {"triton": {"BACKEND": "TRITON"}}, longest=40, kinds=0, limit_s=300,
        choices={
            **_SMALL,
            "dtype": ("float16", "float32"),  # it computes bfloat16 wrong
            "dims": ((16, 16), (8, 8), (32, 32), (1, 1), (7, 7), (16, 1), (24, 8), (33, 65), (48, 16)),
        },
    ),
    "sm_75": _card("sm_75"),
    "sm_80": _card("sm_80"),
    "sm_90": Space(
        "cpu", {"default": {}}, longest=300, kinds=0, limit_s=300, card="sm_90",
        choices={
            "dtype": ("float16", "bfloat16", "bfloat16"), "B": (1, 2), "Hkv": (1, 1, 2), "group": (1, 2),
            "block": (*((128, 128),) * 4, (256, 128), (128, 384)), "layout_count": (0, 0, 0, 1, 3),
            "layout": ("transposed", "transposed", *LAYOUTS), "d_out_layout": (*("contiguous",) * 16, *LAYOUTS),
            "dims": (
                *((64, 64),) * 4, *((128, 128),) * 4, (192, 128), (256, 256), (96, 96), (40, 72), (1, 1), (33, 65),
                (7, 7),
            ),
            "scale": (*("default",) * 4, "given", "zero", "negative"),
        },
    ),
    "cuda": Space(
        "cuda", {"default": {}, "triton": {"BACKEND": "TRITON"}}, longest=700, kinds=100, limit_s=120,
        choices={
            "dtype": _GPU_DTYPES, "B": (1, 2, 3), "Hkv": (1, 2, 3, 4),
            "block": (
                *((128, 128),) * 6, (256, 128), (128, 256), (64, 64), (48, 48), (20, 128), (64, 16),
            ),
            "dims": (
                *((64, 64),) * 4, *((128, 128),) * 4, (192, 128), (192, 128), (256, 256), (256, 256), (96, 96),
                (40, 72), (16, 128), (200, 160), (1, 1), (33, 65), (7, 7), (130, 24),
            ),
            "score_count": (0, 0, 1, 2, 2, 2, 3),
            "layout_count": (0, 0, 0, 0, 0, 0, 0, 1, 1, 3, 3),
            "layout": ("transposed", "transposed", *LAYOUTS),
            "d_out_layout": (*("contiguous",) * 16, *LAYOUTS),
            "needs": (
                *(EVERYTHING, INPUTS) * 4, (), ("query",), ("key",), ("value",), ("captures",), ("key", "value"),
            ),
            "scale": (*("default",) * 6, "zero", "negative", "given", "given", "given"),
            "options": (*((),) * 12, (("EXACT", True),), (("PRESCALE_QK", True),), (("USE_TMA", False),)),
        },
    ),
}  # fmt: skip
