"""hopper: which plans run as Gluon kernels on sm_90, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace

import torch

from flexattn.call.problem import Problem
from flexattn.compile.arguments import NO_ARRAYS, Tensors
from flexattn.compile.fixed_reference import fixes_reference
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import (
    BATCH_CAPTURES,
    BITS,
    CAPTURES,
    DKDV,
    DQ,
    FORWARD,
    FORWARD_SPLIT,
    HALVES,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_STRIPES,
    HOPPER_BACKWARD_WIDE,
    HOPPER_DKDV,
    HOPPER_DQ,
    HOPPER_FORWARD,
    HOPPER_LATENT,
    SIZES,
)
from flexattn.compile.plan import has_descriptor, token_tile
from flexattn.compile.stripes import stripe_of
from flexattn.compile.tiles import Tile
from flexattn.compile.trimmed_runs import trims_runs
from flexattn.graph.dependence import computed_from, loads_per_pair
from flexattn.graph.row_bounds import longest_row
from flexattn.machine.hopper_kernels import no_hopper_kernels
from flexattn.options import option
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen

# Forward tiles by widths. BLOCK_M is HOPPER_ROWS per consumer.
TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(128, 128, 4, 3),
    (96, 128): Tile(128, 128, 4, 2),
    (128, 128): Tile(128, 128, 4, 2),
    (192, 128): Tile(128, 128, 4, 2),
    (256, 256): Tile(128, 64, 4, 2),
}
# With a fixed reference and neither mask nor score_mod, from FEWEST_QUERIES on. Full D 64: 8,192 tokens 2,211 -> 2,001
# us, 2,048 tokens 585 -> 581. With T5's bias it is 2 % slower, and with a causal mask (blocks of 192) 4 %.
PLAIN_TILES: dict[tuple[int, int], Tile] = {(64, 64): Tile(192, 128, 4, 2)}
FEWEST_QUERIES = 2048
# Where empty halves of mask blocks are skipped. A consumer skips at most num_stages - 2 tiles in turn.
HALF_TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(128, 64, 4, 8),
    (96, 128): Tile(128, 64, 4, 4),
    (128, 128): Tile(128, 64, 4, 4),
}
# The same with two pairs of consumers.
PAIR_TILES: dict[tuple[int, int], Tile] = {(64, 64): Tile(128, 64, 4, 5)}
# Attention of few queries with latent keys, without warp specialization.
LATENT_TILES: dict[tuple[int, int], Tile] = {(576, 512): Tile(64, 64, 8, 2)}
# Per thread. The consumers share what the other roles leave of an SM's 65,536 registers.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


@frozen
class RoleRegisters:
    """Registers per thread of the roles of hopper_forward."""

    consumer: int
    other: int


# By the number of consumers of all pairs.
FORWARD_REGISTERS = {
    2: RoleRegisters(CONSUMER_REGISTERS, PRODUCER_REGISTERS),
    3: RoleRegisters(160, 32),
    4: RoleRegisters(112, 24),
}
# Backward: tiles, and registers of its roles. With fewer registers ptxas serializes the wgmma instructions.
BACKWARD_TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(64, 128, 4, 3),
    (96, 96): Tile(64, 128, 4, 3),
    (128, 128): Tile(64, 128, 4, 2),
}
# The next tile of keys is loaded during the current one. Time relative to that without, causal: D 64, 512 tokens 0.91,
# 2,048 0.96, 8,192 0.98; D 96, 1,024 0.96, 5,003 0.98; D 128, 1,024 0.97, 2,048 0.98, 8,192 0.99. With bits, it is 0.92
# for neighborhoods at D 64, but 1.01 for block diffusion at D 128. So with bits, a tile of keys may have up to this
# many queries, or half as many of a window. At D 64 it may have any number.
SHORT_ROWS_OF_BITS: dict[tuple[int, int], int] = {(96, 96): 2048, (128, 128): 1024}
WIDE_TILES: dict[tuple[int, int], Tile] = {(192, 128): Tile(64, 64, 4, 2), (256, 256): Tile(64, 64, 4, 2)}
DKDV_TILES = BACKWARD_TILES | {(192, 128): Tile(64, 128, 4, 2)}  # of dk and dv alone
KEYS_REGISTERS, QUERIES_REGISTERS = 208, 64
# Tiles for dq alone. With BLOCK_N 128, ptxas serializes the wgmma instructions at D 128. At D 64, what mods load per
# key spills 0.5 to 5 KB.
DQ_TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(128, 64, 4, 4),
    (96, 96): Tile(128, 64, 4, 4),
    (128, 128): Tile(128, 64, 4, 3),
    (192, 128): Tile(128, 64, 4, 3),
}

RejectionRule = Callable[[KernelPlan, Problem], str | None]  # why a plan has no Hopper form, None if it may have one


@frozen
class HopperForm:
    """A Gluon kernel that may replace a portable plan: its tiles, and the reasons to reject it."""

    spec: KernelSpec
    tiles: dict[tuple[int, int], Tile]
    refusals: tuple[RejectionRule, ...]
    half_tiles: dict[tuple[int, int], Tile] = field(default_factory=dict)  # that skip empty halves of mask blocks
    others_are_portable: bool = False  # the portable kernel is the best form for head dims that are no key of `tiles`

    def fits(self, plan: KernelPlan) -> bool:
        """Whether it has a tile for the head dims of a plan."""
        return plan.with_fields(spec=self.spec).widths in self.tiles


def _refusal_of_mods(plan: KernelPlan, problem: Problem) -> str | None:
    """Reject mods that lower to functions or types that Gluon lacks: tl.broadcast_to, tl.full and float64."""
    gradient = plan.grad if plan.scales_gradient else None
    for mod in (plan.score, gradient, plan.mask):
        output = None if mod is None else mod.graph.outputs[0]
        if mod is None or output is None:
            continue
        if mod is not plan.mask and not mod.graph.dependence[output] & {"score", "grad"}:
            return "the score_mod does not read its score"
        nodes = (mod.graph.nodes[i] for i in computed_from(mod.graph, output))
        if any(node.op == "cast" and node.dtype == torch.float64 for node in nodes):
            return "a mod computes in float64"
    return None


def _refusal_of_scale(plan: KernelPlan, problem: Problem) -> str | None:
    return "the scale is not positive" if problem.scale <= 0 else None


def _refusal_of_captures(plan: KernelPlan, problem: Problem) -> str | None:
    captured = problem.score_grad is not None and problem.score_grad.sites
    return "captured tensors of score_mod require gradients" if captured else None


def _refusal_of_order(plan: KernelPlan, problem: Problem) -> str | None:
    """Reject atomic adds to dq if the order must be fixed."""
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are enabled, and it adds to dq in any order"
    return "BATCH_INVARIANT is set, and it adds to dq in any order" if problem.batch_invariant else None


def _refusal_of_tables(plan: KernelPlan, problem: Problem) -> str | None:
    """Reject loads per (q, kv) pair. With them, only the fused backward is faster than Triton (docs/kernels.md)."""
    reads = plan.score is not None and bool(loads_per_pair(plan.score.graph))
    return "score_mod loads from a tensor for each (q, kv) pair" if reads else None


def _refusal_of_latent(plan: KernelPlan, problem: Problem) -> str | None:
    if "values_in_keys" not in plan.features:
        return "value is not the first 512 of 576 columns of key"
    has_mods = plan.score is not None or plan.mask is not None or plan.blocks is not None
    return "its kernel supports no score_mod and no mask" if has_mods else None


_DQ = HopperForm(HOPPER_DQ, DQ_TILES, (_refusal_of_captures, _refusal_of_tables))
FORMS: dict[KernelSpec, HopperForm] = {
    FORWARD: HopperForm(HOPPER_FORWARD, TILES, (_refusal_of_scale, _refusal_of_tables), HALF_TILES),
    # CAPTURES, SIZES and BATCH_CAPTURES are listed only so that their reason is reported: they run only if captured
    # tensors require gradients, which this form rejects.
    **dict.fromkeys((DQ, CAPTURES, SIZES, BATCH_CAPTURES), _DQ),
    FORWARD_SPLIT: HopperForm(
        HOPPER_LATENT, LATENT_TILES, (_refusal_of_scale, _refusal_of_latent), others_are_portable=True
    ),
    DKDV: HopperForm(HOPPER_DKDV, DKDV_TILES, (_refusal_of_tables,), BACKWARD_TILES),
}
_FUSED = HopperForm(HOPPER_BACKWARD, BACKWARD_TILES, (_refusal_of_captures, _refusal_of_order), BACKWARD_TILES)
# Without half_tiles: a stripe stores dq with its first tile of keys.
_FUSED_STRIPES = replace(_FUSED, spec=HOPPER_BACKWARD_STRIPES, half_tiles={})
_FUSED_WIDE = replace(_FUSED, spec=HOPPER_BACKWARD_WIDE, tiles=WIDE_TILES, half_tiles={})
# kernel_options that choose a tile of a portable kernel.
_TILE_OPTIONS = {"fwd": ("BLOCK_M", "BLOCK_N"), "bwd": ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}


def hopper_form(plan: KernelPlan, problem: Problem, tensors: Tensors) -> KernelPlan | str:
    """Return the Hopper form of a portable plan, or the reason why it has none."""
    return _in_form(FORMS[plan.spec], plan, problem, tensors)


def fused_backward(plan: KernelPlan, problem: Problem, tensors: Tensors) -> KernelPlan | str:
    """Return the plan of one kernel for dq, dk and dv, or the reason why there is none. `plan` is DKDV's."""
    narrow = _FUSED_STRIPES if stripe_of(problem) else _FUSED
    return _in_form(narrow if narrow.fits(plan) else _FUSED_WIDE, plan, problem, tensors)


def _in_form(form: HopperForm, plan: KernelPlan, problem: Problem, tensors: Tensors) -> KernelPlan | str:
    reasons = (
        _refusal(plan, problem, tensors),
        *(refusal(plan, problem) for refusal in (*form.refusals, _refusal_of_mods)),
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    return reason or _with_tile(form, plan, problem)


def _refusal(plan: KernelPlan, problem: Problem, tensors: Tensors) -> str | None:
    """Return why no Gluon kernel can compute a plan; None if one may."""
    phase = plan.spec.phase
    unavailable, lengths = no_hopper_kernels(plan.target), (problem.query.size(2), problem.N)
    asked = [
        n for n in (*_TILE_OPTIONS[phase], "num_warps", "num_stages") if option(problem.options, n, phase) is not None
    ]
    reasons = (
        *(
            (option(problem.options, "BACKEND", phase) == name, f"BACKEND is {name}")
            for name in ("TRITON", "TRITON_DECODE")
        ),
        (bool(unavailable), unavailable),
        (plan.dtype not in (torch.float16, torch.bfloat16), f"{plan.dtype} is not float16 or bfloat16"),
        (plan.exact, "EXACT is True"),
        (bool(asked), f"{', '.join(asked)} chooses a tile of the portable kernel"),
        (option(problem.options, "USE_TMA", phase) is False, "USE_TMA is False"),
        (not plan.aligned or not all(map(has_descriptor, tensors.values())), "TMA cannot address the tensors' rows"),
        (plan.full_overhangs, "full blocks of these lists may extend past the queries or keys"),
        (not plan.float_index or max(lengths) >= 1 << 30, "the sequences are too long"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def _with_tile(form: HopperForm, plan: KernelPlan, problem: Problem) -> KernelPlan | str:
    """Return the plan in a form, or why it has no tile there."""
    spec = form.spec
    known = {feature.name for feature in spec.features}
    unknown = [name for name in plan.features if name not in known]
    plan = plan.with_fields(spec=spec, tma=True)
    tile = form.tiles.get(plan.widths)
    if tile is None:
        return f"no tile for D {plan.D}, Dv {plan.Dv}"
    if plan.blocks and (plan.blocks[0] % tile.BLOCK_M or plan.blocks[1] % tile.BLOCK_N):
        return f"blocks of {plan.blocks[0]} x {plan.blocks[1]} are not multiples of {tile.BLOCK_M} x {tile.BLOCK_N}"
    if unknown:
        return f"it does not support {', '.join(unknown)}"
    plan = _with_bits(form, plan, problem)
    plan = plan.with_fields(
        fixed_reference=spec is HOPPER_FORWARD and fixes_reference(plan, problem),
        prefetches_keys=_prefetches_keys(plan, problem),
        trims_runs=trims_runs(plan, problem),
    )
    return plan.with_fields(tile=_tile_of(form, plan, problem))


def _prefetches_keys(plan: KernelPlan, problem: Problem) -> bool:
    """Return whether a backward loads the next tile of keys during the current one."""
    if plan.widths not in plan.spec.prefetch_rings or "early_keys" in settings().without:
        return False
    if BITS.name not in plan.features or plan.widths not in SHORT_ROWS_OF_BITS:
        return True
    most = SHORT_ROWS_OF_BITS[plan.widths]
    blocks, mask = problem.block_mask, problem.mask
    (B, Hq, M, _), (B_kv, Hkv, _, _) = problem.query.shape, problem.key.shape
    longest = M if blocks is None or blocks.reach is None else blocks.reach
    repeats = B * Hq // max(B_kv * Hkv, 1)
    if longest * repeats > most and mask is not None:  # in a window, a key has as many queries as a query has keys
        window = longest_row(mask.graph, mask.numbers)
        longest = longest if window is None else min(longest, 2 * window)
    return longest * repeats <= most


def _with_bits(form: HopperForm, plan: KernelPlan, problem: Problem) -> KernelPlan:
    """Return the plan with the bits of the mask in place of its mask_mod, if it has some."""
    if BITS not in form.spec.features or not BITS.wanted(problem, NO_ARRAYS):
        return plan
    skips = plan.widths in form.half_tiles and HALVES.wanted(problem, NO_ARRAYS)
    features = (*plan.features, BITS.name, *([HALVES.name] if skips else []))
    tile = token_tile(problem) if form.spec.token_tiles else None
    return plan.with_fields(mask=None, features=features, token_tile=tile)


def _tile_of(form: HopperForm, plan: KernelPlan, problem: Problem) -> Tile:
    if HALVES.name in plan.features:
        return PAIR_TILES[plan.widths] if plan.pairs > 1 else form.half_tiles[plan.widths]
    is_plain = plan.fixed_reference and plan.blocks is None and plan.score is None
    if is_plain and problem.query.size(2) >= FEWEST_QUERIES:
        return PLAIN_TILES.get(plan.widths, form.tiles[plan.widths])
    return form.tiles[plan.widths]
