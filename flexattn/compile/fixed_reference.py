"""fixed_reference: hopper_forward with most weights relative to an earlier maximum. docs/numerics.md describes it.

exp2(s - m) / sum(exp2(s - m)) is the same for any m. So only some tiles of keys take the maximum of their scores and
rescale what was before: partial tiles, and the first tile of each chunk of full tiles. The others use the maximum that
is known. Tiles of queries whose sums overflow are computed again, with all maxima.
"""

from __future__ import annotations

import torch

from flexattn.call.problem import Problem
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.graph.row_bounds import longest_row
from flexattn.process.config import settings

# Tiles of queries that the scheduler hands out before it looks whether the first of them overflowed.
_DONE = 6
CONSTANTS: tuple[tuple[str, object], ...] = (
    # A reference is a maximum + HEADROOM. The largest weight is 2 ** -HEADROOM, so float32 also holds those of later
    # scores that are 108 nats larger, 2 ** (127 + HEADROOM). Weights below 2 ** -126 are 0, 2 ** -96 of the largest.
    # Weights and factors come from the same rounded reference.
    ("HEADROOM", 30.0),
    # In powers of two. If the maximum of any row of a warpgroup rises by more, the chunk ends with its first tile. So
    # scores that rise steadily, and those of a large deviation, rarely overflow.
    ("MOST_RISE", 24.0),
    # Tiles. Chunks of 8: 0.5 % slower with 2,048 tokens, the same with 8,192.
    ("LONGEST_CHUNK", 16),
    ("DONE", _DONE),
)


# Keys of a row. With fewer, checks cost more than maxima: 64 x 256 tokens 88 us instead of 83, a window of 1,024 2 %
# more; causal with 2,048 tokens 2 % less (H200, D 128).
_FEWEST_KEYS = 2048


def fixes_reference(plan: KernelPlan, problem: Problem) -> bool:
    """Whether a plan of hopper_forward uses it. The exponents of float16 are too few.

    Masks whose empty halves are skipped have few full blocks, and partial ones take all maxima.
    """
    all_maxima = plan.batch_invariant or "max_scores" in plan.features or "halves" in plan.features
    allowed = plan.dtype == torch.bfloat16 and not all_maxima and "fixed_reference" not in settings().without
    return allowed and _keys_of_a_row(problem) >= _FEWEST_KEYS


def _keys_of_a_row(problem: Problem) -> int:
    """Return a bound of the keys that a query attends to."""
    mask, blocks = problem.mask, problem.block_mask
    window = None if mask is None else longest_row(mask.graph, mask.numbers)
    reach = None if blocks is None else blocks.reach
    return min(n for n in (problem.N, window, reach) if n is not None)


def flag_bytes(plan: KernelPlan) -> int:
    """Return the shared memory of the flags of rows."""
    return 4 * _DONE * plan.tile.BLOCK_M if plan.fixed_reference else 0
