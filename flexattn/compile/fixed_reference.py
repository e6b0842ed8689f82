"""fixed_reference: hopper_forward with most weights relative to an earlier maximum. docs/numerics.md describes it.

exp2(s - m) / sum(exp2(s - m)) is the same for any m. So only some tiles of keys take the maximum of their scores and
rescale what was before: partial tiles, and the first tile of each chunk of full tiles. The others use the maximum that
is known. Where empty halves of blocks are skipped, most tiles are partial. Then the first tile of keys decides: if the
maxima of its rows are about the same, no other tile takes them. Tiles of queries whose sums overflow are computed
again, with all maxima.
"""

from __future__ import annotations

import torch

from flexattn.call.problem import Problem
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.graph.row_bounds import longest_row
from flexattn.process.config import settings

# Tiles of queries that a scheduler hands out before it looks whether the first of them overflowed, by pairs of
# consumers. Flags of more do not fit with two pairs.
_DONE = {1: 6, 2: 3}
_CONSTANTS: tuple[tuple[str, object], ...] = (
    # A reference is a maximum + HEADROOM. The largest weight is 2 ** -HEADROOM, so float32 also holds those of later
    # scores that are 108 nats larger, 2 ** (127 + HEADROOM). Weights below 2 ** -126 are 0, 2 ** -96 of the largest.
    # Weights and factors come from the same rounded reference.
    ("HEADROOM", 30.0),
    # In powers of two. If the maximum of any row of a warpgroup rises by more, the chunk ends with its first tile. So
    # scores that rise steadily, and those of a large deviation, rarely overflow. Where halves are skipped: by how much
    # the maxima of 64 rows may differ in the first tile.
    ("MOST_RISE", 24.0),
    # Where halves are skipped, a row without a key in the first tile has the reference of another row. A smaller sum
    # may lack weights, because those below 2 ** -126 are 0.
    ("LEAST_SUM", 2.0**-31),
    # Tiles. Chunks of 8: 0.5 % slower with 2,048 tokens, the same with 8,192.
    ("LONGEST_CHUNK", 16),
)


# Keys of a row. With fewer, checks cost more than maxima: 64 x 256 tokens 88 us instead of 83, a window of 1,024 2 %
# more; causal with 2,048 tokens 2 % less (H200, D 128).
_FEWEST_KEYS = 2048


def fixes_reference(plan: KernelPlan, problem: Problem) -> bool:
    """Whether a plan of hopper_forward uses it. The exponents of float16 are too few."""
    all_maxima = plan.batch_invariant or "max_scores" in plan.features
    allowed = plan.dtype == torch.bfloat16 and not all_maxima and "fixed_reference" not in settings().without
    return allowed and _keys_of_a_row(problem) >= _FEWEST_KEYS


def _keys_of_a_row(problem: Problem) -> int:
    """Return a bound of the keys that a query attends to."""
    mask, blocks = problem.mask, problem.block_mask
    window = None if mask is None else longest_row(mask.graph, mask.numbers)
    reach = None if blocks is None else blocks.reach
    return min(n for n in (problem.N, window, reach) if n is not None)


def constants(plan: KernelPlan) -> tuple[tuple[str, object], ...]:
    """Return the constants of its template."""
    return (*_CONSTANTS, ("DONE", _DONE[plan.pairs])) if plan.fixed_reference else ()


def flag_bytes(plan: KernelPlan) -> int:
    """Return the shared memory of the flags of rows."""
    return _DONE[plan.pairs] * plan.tile.BLOCK_M if plan.fixed_reference else 0
