"""constants: the tl.constexpr constants of a Triton kernel's file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flexattn.call.dropout import KEYS, QUERIES, ROUNDS
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.lower import loads_where_live
from flexattn.compile.mod_plan import TRITON_DTYPE
from flexattn.compile.scalars import FEW_SPLITS
from flexattn.compile.scatter import LARGEST_UNITS, needs_live


class Constant(NamedTuple):
    """A constant, and the plans whose kernels have it."""

    name: str
    of: Callable[[KernelPlan], bool]
    value: Callable[[KernelPlan], object]


def constants_of(plan: KernelPlan) -> list[tuple[str, object]]:
    """Return (name, value) of the constants of the plan's kernel."""
    return [(constant.name, constant.value(plan)) for constant in CONSTANTS if constant.of(plan)]


def _all(plan: KernelPlan) -> bool:
    return True


def _has_blocks(plan: KernelPlan) -> bool:
    return plan.blocks is not None


def _has_token_tiles(plan: KernelPlan) -> bool:
    return plan.token_tile is not None


def _has_loop(plan: KernelPlan) -> bool:
    """Whether programs loop over tiles of keys or queries."""
    return plan.spec.products


def _of_backward(plan: KernelPlan) -> bool:
    return not plan.is_forward and (plan.spec.products or plan.spec.fixed_tile is None)


def _of_forward(plan: KernelPlan) -> bool:
    return plan.is_forward


def _of_gradients(plan: KernelPlan) -> bool:
    """Whether it is a backward kernel that loops over tiles of one batch."""
    return plan.spec.products and not plan.is_forward and not plan.spec.sums_over_batch


def _of_keys(plan: KernelPlan) -> bool:
    return plan.transposed


def _of_dq_rows(plan: KernelPlan) -> bool:
    return not plan.spec.products and "dq" in plan.spec.tensors


def _of_splits(plan: KernelPlan) -> bool:
    return plan.spec.splits_keys or (plan.is_forward and not plan.spec.products)


def _splits_keys(plan: KernelPlan) -> bool:
    return plan.spec.splits_keys


def _is_quantized(plan: KernelPlan) -> bool:
    return "descales" in plan.features


def _has_pages(plan: KernelPlan) -> bool:
    return plan.page_size > 0


def _has_sums(plan: KernelPlan) -> bool:
    return bool(plan.sums)


def _has_integer_sums(plan: KernelPlan) -> bool:
    return plan.sums == "integer"


def _has_dropout(plan: KernelPlan) -> bool:
    return plan.has_dropout


def _mask_block(plan: KernelPlan, axis: int) -> int:
    assert plan.blocks is not None
    return plan.blocks[axis]


def _loads_per_pair(plan: KernelPlan) -> bool:
    """Whether `live` also covers the rows that a program owns, which are guarded when they are stored.

    Necessary if a mod loads from a captured tensor for each score, which it must not do outside of the lengths. Mods
    without arguments do not need it, but their registers are allocated better with it. Without it dK/dV of causal
    spills 660 bytes instead of at most 530 with D 256, and 244 instead of 120 with D 192, Dv 128 (triton 3.7, sm_90).
    """
    gradient = plan.grad if plan.scales_gradient or plan.sums else None
    mods = [mod for mod in (plan.score, plan.mask_of_pairs, gradient) if mod is not None]
    return any(loads_where_live(mod) or not mod.argument_names() for mod in mods)


def _checks_queries(plan: KernelPlan) -> bool:
    """Whether dK/dV masks queries past the end of a run.

    Past M shift is +inf, so weights are 0 unless scores are infinite or NaN. Those of a score_mod may be:
    `score / row[q_idx]`, where a row past M is 0 or what the memory contains.
    """
    return plan.cuts_blocks or "q_offsets" in plan.features or plan.score is not None


def _sums_ask_live(plan: KernelPlan) -> bool:
    """Whether score_scatter takes `live`.

    Otherwise ds is 0 at all other positions: a tile with rows past the end clears theirs. With a comparison per pair,
    the backward of relative_bias took 1.13 of the time on an H200, that of T5 1.17 to 1.19. For other GPUs, Triton puts
    more into shared memory around that branch (sm_89: 16 KB instead of 12), so they compare.
    """
    has_branch = plan.target.is_hopper or plan.target.is_interpreter
    return plan.grad is not None and (needs_live(plan.grad) or not has_branch)


def _keys_together(plan: KernelPlan) -> int:
    """Return how many keys' dropout numbers a tile generates at once; 0 if tiles may split a group of counters.

    In a transposed product, one thread owns two of a counter's four keys.
    """
    blocks = plan.blocks or (QUERIES, KEYS)
    if blocks[0] % QUERIES or blocks[1] % (KEYS // 2):
        return 0
    return KEYS // 2 if plan.transposed or plan.tile.BLOCK_N % KEYS or blocks[1] % KEYS else KEYS


def _settles(plan: KernelPlan) -> bool:
    """Whether products of a tile sum over 16 terms and dropout numbers are joined into one of their operands."""
    terms = min(plan.tile.BLOCK_M, plan.tile.partial_m) if plan.transposed else plan.tile.BLOCK_N
    return plan.target.backend == "cuda" and plan.has_dropout and terms == 16 and _keys_together(plan) > 0


def _column_step(plan: KernelPlan) -> int:
    return 32 if pieces_of(plan.D) % 2 else 64


CONSTANTS = (
    Constant("BLOCK_M", _all, lambda plan: plan.tile.BLOCK_M),
    Constant("BLOCK_N", _all, lambda plan: plan.tile.BLOCK_N),
    Constant("UNIT", _all, lambda plan: plan.unit),  # elements in the unit that strides are passed in
    Constant("PRECISION", _all, lambda plan: repr(plan.precision)),  # of float32 products
    Constant("SPARSE_Q", _has_blocks, lambda plan: _mask_block(plan, 0)),
    Constant("SPARSE_KV", _has_blocks, lambda plan: _mask_block(plan, 1)),
    Constant("TILES", _has_blocks, lambda plan: plan.tiles_per_block),
    Constant("TILE_TOKENS", _has_token_tiles, lambda plan: math.prod(plan.token_tile or ())),
    Constant("TILE_COLUMNS", _has_token_tiles, lambda plan: plan.token_tile and plan.token_tile[1]),
    Constant("EXACT", _of_backward, lambda plan: plan.exact),  # shift is lse itself, not lse in the exp2 domain
    Constant("PTX", _has_loop, lambda plan: plan.target.backend == "cuda"),  # inline PTX may be called
    Constant("FMA_PRODUCTS", _has_loop, lambda plan: plan.dtype == torch.float32 and plan.precision == "ieee"),
    Constant("LOADS_PER_PAIR", _has_loop, _loads_per_pair),
    Constant("HAS_SCORE", _of_forward, lambda plan: plan.score is not None),
    Constant("BATCH_INVARIANT", _of_forward, lambda plan: plan.batch_invariant),
    # Whether the lowered score_mod returns scores in the exp2 domain.
    Constant("SCORES_IN_EXP2", _of_forward, lambda plan: plan.score is not None and not plan.exact),
    Constant("PRODUCTS_FIRST", _of_gradients, lambda plan: plan.tile.PRODUCTS_FIRST),
    Constant("PARTIAL_M", _of_keys, lambda plan: plan.tile.partial_m),
    Constant("CHECKS_QUERIES", _of_keys, _checks_queries),
    # Of queries, keys, weights and values in products, if keys and values are float8.
    Constant("PRODUCT_DTYPE", _is_quantized, lambda plan: "tl.float16" if plan.dtype.itemsize == 2 else "tl.float32"),
    # Units of queries in the unit of the strides of float8 keys and values.
    Constant("KEY_UNITS", _is_quantized, lambda plan: plan.dtype.itemsize if plan.aligned else 1),
    Constant("PAGE_SIZE", _has_pages, lambda plan: plan.page_size),
    Constant("PAGES_PER_TILE", _has_pages, lambda plan: plan.pages_per_tile),  # 0: looked up for each key
    Constant("DTYPE", _has_sums, lambda plan: f"tl.{TRITON_DTYPE[plan.dtype]}"),
    Constant("SUMS_ASK_LIVE", _has_sums, _sums_ask_live),
    Constant("LARGEST_UNITS", _has_integer_sums, lambda plan: LARGEST_UNITS),
    Constant("PHILOX_ROUNDS", _has_dropout, lambda plan: ROUNDS),
    Constant("TRANSPOSED", _has_dropout, lambda plan: plan.transposed),
    Constant("KEYS_TOGETHER", _has_dropout, _keys_together),
    Constant("SETTLES", _has_dropout, _settles),
    Constant("FEW_SPLITS", _splits_keys, lambda plan: FEW_SPLITS),
    Constant("DV", _of_splits, lambda plan: plan.Dv),
    Constant("D", _of_dq_rows, lambda plan: plan.D),
    Constant("PIECES", _of_dq_rows, lambda plan: pieces_of(plan.D)),
    Constant("STEP", _of_dq_rows, _column_step),
)
