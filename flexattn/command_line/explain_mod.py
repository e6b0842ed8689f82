"""explain_mod: print the graph of a mod, and what is proved about it; with a shape or a target, a line for each kernel.

python -m flexattn explain mods.py:my_mask
python -m flexattn explain 'flexattn.mods:alibi(8)' --shape 1,8,4096,64 --target sm_90
python -m flexattn explain mods.py:my_mask --shape 2,32,8,1024,4096,128 --target sm_90 --html call.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flexattn.command_line.arguments import check_output, dtype_of, target_of, writing
from flexattn.command_line.named_mod import NamedMod, Shape, add_mod, add_shape, named_mod
from flexattn.errors import ArgumentError, message
from flexattn.explanation import Explanation, explain
from flexattn.graph.facts import analyze
from flexattn.mask_build.create import create_block_mask
from flexattn.trace.trace import trace

NAME = "explain"
# The last line of a summary names methods of the Explanation. Here options do the same.
_IN_PYTHON = "full() returns all stages, .sources the kernels, html() a page."
_IN_A_SHELL = "--full prints all stages and the sources of the kernels, --html FILE writes them to a page."
_SHAPE = Shape(B=1, Hq=8, Hkv=8, M=4096, N=4096, D=64)  # if only a target is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what explain takes."""
    add_mod(parser)
    add_shape(parser, None)
    parser.add_argument("--dtype", type=dtype_of, help="default: bfloat16 for a GPU, float32 for a CPU")
    parser.add_argument("--target", type=target_of, metavar="sm_90", help="a GPU architecture; no GPU is needed")
    parser.add_argument("--full", action="store_true", help="print all stages, with the generated sources")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all stages to an HTML page")


def run(chosen: argparse.Namespace) -> int:
    """Print the explanation of a mod."""
    if chosen.html is not None:
        check_output("html", chosen.html)
    named = named_mod(chosen.mod, chosen.kind)
    shape = chosen.shape or (_SHAPE if chosen.target else None)
    if shape is None and chosen.dtype is not None:
        fix = "Add --shape B,H,S,D or --target sm_90, or leave --dtype out."
        raise ArgumentError(message("dtype", str(chosen.dtype)[6:], "a call: a mod alone has no dtype", fix))
    made = alone(named) if shape is None else in_a_call(named, shape, chosen.dtype, chosen.target)
    if chosen.html is not None:
        page = made.html()
        with writing("html", chosen.html):
            chosen.html.write_text(page, encoding="utf-8")
        print(f"wrote {chosen.html}")
        return 0
    graph = made.score or made.mask
    summary = str(made).replace(_IN_PYTHON, _IN_A_SHELL)
    print(made.full() if chosen.full else summary if shape is None else f"{graph}\n\n{summary}")
    return 0


def alone(named: NamedMod) -> Explanation:
    """Explain a mod without a call."""
    return explain(score_mod=named.score_mod, mask_mod=named.mask_mod)


def in_a_call(named: NamedMod, shape: Shape, dtype: torch.dtype | None, target: str | None) -> Explanation:
    """Explain a call with a mod. Its tensors have no values, and nothing is computed."""
    device = "cuda" if torch.cuda.is_available() and not target else "cpu"
    dtype = dtype or (torch.bfloat16 if target or device == "cuda" else torch.float32)
    query = torch.empty(shape.B, shape.Hq, shape.M, shape.D, dtype=dtype, device=device)
    key = torch.empty(shape.B, shape.Hkv, shape.N, shape.D, dtype=dtype, device=device)
    block_mask = None
    if named.mask_mod is not None:
        reads = analyze(trace(named.mask_mod, "mask").graph).reads
        B, H = (shape.B if "b" in reads else None, shape.Hq if "h" in reads else None)
        block_mask = create_block_mask(named.mask_mod, B, H, shape.M, shape.N, device=device)
    grouped = shape.Hq != shape.Hkv
    return explain(query, key, key, named.score_mod, block_mask, enable_gqa=grouped, target=target)
