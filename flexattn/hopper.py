"""hopper: which plans run as Gluon kernels on sm_90, warp-specialised, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from flexattn.lower import Dialect, lower, lower_score
from flexattn.options import option
from flexattn.plan import KernelPlan, Tile, has_descriptor, score_kind
from flexattn.problem import Problem
from flexattn.triton_versions import has_gluon

ROWS = 64  # queries of one consumer warpgroup

# (D, Dv): the tile, whose BLOCK_M is ROWS for each consumer; registers of a consumer are what is left of 65,536.
TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(128, 128, 4, 2),
    (128, 128): Tile(128, 128, 4, 2),
}
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24

# What lowered mods may name of `tl`: the rest Gluon does not have.
_GLUON_NAMES = frozenset((
    "abs", "cast", "ceil", "cos", "div_rn", "erf", "exp", "exp2", "float16", "float32", "bfloat16", "floor", "fma",
    "inline_asm_elementwise", "int1", "int16", "int32", "int64", "int8", "load", "log", "log2", "maximum", "minimum",
    "rsqrt", "sin", "sqrt", "sqrt_rn", "uint8", "where", "zeros_like", "PropagateNan",
))  # fmt: skip


def hopper_plan(plan: KernelPlan, problem: Problem, tensors: list[Tensor]) -> KernelPlan | str:
    """Return the Gluon form of a forward's plan, or the reason why there is none."""
    target, tile = plan.target, TILES.get((plan.D, plan.Dv))
    lengths = problem.query.size(2), problem.key.size(2)
    asked = [
        n for n in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages") if option(problem.options, n, "fwd") is not None
    ]
    reasons = (
        (option(problem.options, "BACKEND") == "TRITON", "BACKEND is TRITON"),
        (target.backend != "cuda" or int(target.arch) != 90, f"{target} is not sm_90"),
        (plan.dtype not in (torch.float16, torch.bfloat16), f"{plan.dtype} is no half precision"),
        (plan.exact, "EXACT is asked for"),
        (not has_gluon(), "this release of Triton is not known to compile it"),
        (bool(asked), f"{', '.join(asked)} chooses a tile of the Triton engine"),
        (option(problem.options, "USE_TMA", "fwd") is False, "USE_TMA is False"),
        (tile is None, f"no tile for D {plan.D}, Dv {plan.Dv}"),
        (not plan.aligned or not all(map(has_descriptor, tensors)), "TMA cannot address the tensors' rows"),
        (problem.scale <= 0, "the scale is not positive"),
        (plan.full_overhangs, "full blocks of these lists may reach past the keys"),
        (not plan.float_index or max(lengths) >= 1 << 30, "the sequences are too long"),
    )
    for refused, reason in reasons:
        if refused:
            return reason
    assert tile is not None
    if plan.blocks and (plan.blocks[0] % tile.BLOCK_M or plan.blocks[1] % tile.BLOCK_N):
        return f"blocks of {plan.blocks[0]} x {plan.blocks[1]} are no whole tiles of {tile.BLOCK_M} x {tile.BLOCK_N}"
    if plan.score is not None and score_kind(plan.score.graph) == "gathers":
        return "the score_mod reads a table at each place"
    if missing := _missing(plan):
        return f"Gluon has no {', '.join(missing)}"
    return replace(plan, kernel="hopper_forward", tile=tile, tma=True)


def hopper_mods(plan: KernelPlan) -> list[str]:
    """Return the lowered mods of a plan as Gluon functions."""
    return [as_gluon(text) for text in _lowered(plan)]


def as_gluon(text: str) -> str:
    """Return functions in the subset that Triton and Gluon share as Gluon's."""
    text = text.replace("@triton.jit", "@gluon.jit")
    return re.sub(r"\btl\.(?!PropagateNan|broadcast_to)", "gl.", text)


def _lowered(plan: KernelPlan) -> list[str]:
    dialect = Dialect(float_index=plan.float_index, float_columns=True)
    found = [] if plan.mask is None else [lower(plan.mask, "mask_mod", dialect)]
    return found if plan.score is None else [*found, lower_score(plan.score, "score_mod", dialect)]


def _missing(plan: KernelPlan) -> list[str]:
    names = {name for text in _lowered(plan) for name in re.findall(r"\btl\.(\w+)", text)}
    return sorted(names - _GLUON_NAMES)
