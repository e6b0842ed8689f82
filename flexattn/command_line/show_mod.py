"""show_mod: draw a mod, as a file that matplotlib writes.

python -m flexattn show mods.py:my_mask --shape 1,8,1024,64 --out mask.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import flexattn
from flexattn.block_mask.plot import import_pyplot
from flexattn.command_line.arguments import check_output, writing
from flexattn.command_line.named_mod import Shape, add_mod, add_shape, named_mod

NAME = "show"
_SHAPE = Shape(B=1, Hq=1, Hkv=1, M=256, N=256, D=64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what show takes."""
    add_mod(parser)
    add_shape(parser, _SHAPE)
    parser.add_argument("--out", type=Path, default=Path("mask.png"), metavar="FILE", help="default: mask.png")


def run(chosen: argparse.Namespace) -> int:
    """Draw a mod to a file."""
    try:
        pyplot = import_pyplot("show", "or call BlockMask.html in Python, which needs no other package")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    check_output("out", chosen.out, tuple(sorted(pyplot.Figure().canvas.get_supported_filetypes())))
    named, shape = named_mod(chosen.mod, chosen.kind), chosen.shape
    with writing("out", chosen.out):
        flexattn.show(named.score_mod, named.mask_mod, Q_LEN=shape.M, KV_LEN=shape.N, path=chosen.out)
    print(f"wrote {chosen.out}")
    return 0
