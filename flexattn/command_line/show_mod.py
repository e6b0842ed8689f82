"""show_mod: draw a mod, as a file that matplotlib writes.

python -m flexattn show mods.py:my_mask --shape 1,8,1024,64 --out mask.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flexattn
from flexattn.command_line.named_mod import NamedMod, Shape, add_mod, add_shape, named_mod
from flexattn.errors import UnsupportedError, message

NAME = "show"
_SHAPE = Shape(B=1, Hq=1, Hkv=1, M=256, N=256, D=64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what show takes."""
    add_mod(parser)
    add_shape(parser, _SHAPE)
    parser.add_argument("--out", type=Path, default=Path("mask.png"), metavar="FILE", help="default: mask.png")


def run(chosen: argparse.Namespace) -> int:
    """Draw a mod to a file."""
    figure_of(named_mod(chosen.mod, chosen.kind), chosen.shape).savefig(chosen.out)
    print(f"wrote {chosen.out}")
    return 0


def figure_of(named: NamedMod, shape: Shape) -> Any:
    """Return a figure of a mod. This is the only place that calls flexattn.show."""
    show = getattr(flexattn, "show", None)
    if show is None:
        fix = "Print a mask instead: python -m flexattn explain, or BlockMask.plot()."
        raise UnsupportedError(message("show", "no flexattn.show in this version", "a function that draws mods", fix))
    return show(score_mod=named.score_mod, mask_mod=named.mask_mod, Q_LEN=shape.M, KV_LEN=shape.N)
