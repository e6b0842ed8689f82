"""trimmed_runs: whether Hopper's backward skips tiles of queries at the ends of partial blocks.

A tile has 64 queries, a block 128. Where a document or a window ends in the first half of a block, no query of the
other half attends to the keys of the program. The scheduler finds out from the bounds of the mask's rows.
"""

from __future__ import annotations

from flexattn.call.problem import Problem
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.row_bounds import streamed_ends_of
from flexattn.graph.row_bounds import bounded_sides, row_bounds
from flexattn.process.config import settings


def trims_runs(plan: KernelPlan, problem: Problem) -> bool:
    """Return whether a kernel that owns keys trims the runs of partial blocks.

    All query heads that read the keys must have the same blocks and bounds. Lists by hand take precedence over bounds.
    """
    blocks, mask = problem.block_mask, plan.mask
    if blocks is None or mask is None or not blocks.is_built or plan.spec.owns_dq or not plan.transposed:
        return False
    if "trimmed_runs" in settings().without or mask.graph.reads("h"):
        return False
    if mask.graph.reads("b") and problem.query.size(0) != problem.key.size(0):
        return False
    # Bounds by key. With a low one alone, as of a causal mask, blocks begin and end where their pairs do.
    return bool(streamed_ends_of(mask)) or "high" in bounded_sides(row_bounds(mask.graph, "q_idx"))
