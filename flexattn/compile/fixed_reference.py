"""fixed_reference: hopper_forward with most weights relative to an earlier maximum. docs/numerics.md describes it.

exp2(s - m) / sum(exp2(s - m)) is the same for any m. So only some tiles of keys take the maximum of their scores and
rescale what was before: partial tiles, and the first tile of each chunk of full tiles. The others use the maximum that
is known. Tiles of queries whose sums overflow are computed again, with all maxima.
"""

from __future__ import annotations

import torch

from flexattn.compile.kernel_plan import KernelPlan
from flexattn.process.config import settings

# Tiles of queries that the scheduler hands out before it looks whether the first of them overflowed.
_DONE = 6
CONSTANTS: tuple[tuple[str, object], ...] = (
    # Weights are 2 ** -HEADROOM of a maximum that is up to date, so that float32 also holds those of scores that are
    # 2 ** (127 + HEADROOM) times larger, 108 nats. Below 2 ** -126 they are 0, which is 2 ** -96 of the largest.
    ("HEADROOM", 30.0),
    # In powers of two. If the maximum of any row of a warpgroup rises by more, the chunk ends with its first tile. So
    # scores that rise steadily, and those of a large deviation, rarely overflow.
    ("MOST_RISE", 24.0),
    # Tiles. Chunks of 8: 0.5 % slower with 2,048 tokens, the same with 8,192.
    ("LONGEST_CHUNK", 16),
    ("DONE", _DONE),
)


def fixes_reference(plan: KernelPlan) -> bool:
    """Whether a plan of hopper_forward uses it. The exponents of float16 are too few."""
    all_maxima = plan.batch_invariant or "max_scores" in plan.features
    return plan.dtype == torch.bfloat16 and not all_maxima and "fixed_reference" in settings().experiments


def flag_bytes(plan: KernelPlan) -> int:
    """Return the shared memory of the flags of rows."""
    return 4 * _DONE * plan.tile.BLOCK_M if plan.fixed_reference else 0
