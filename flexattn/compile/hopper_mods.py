"""hopper_mods: the lowered mods of a Hopper kernel, as Gluon functions."""

from __future__ import annotations

import re

from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.lower import Dialect, lower, lower_score
from flexattn.compile.row_bounds import (
    lower_row_bounds,
    lower_row_interval,
    lower_with_ends,
    row_ends_of,
    streamed_ends_of,
)
from flexattn.graph.row_bounds import is_interval, row_bounds


def hopper_mods(plan: KernelPlan) -> list[str]:
    """Return the lowered mods of a plan as Gluon functions."""
    return [as_gluon(text) for text in _lowered(plan)]


def as_gluon(text: str) -> str:
    """Convert the text of Triton functions to Gluon. They may use only what both have."""
    text = text.replace("@triton.jit", "@gluon.jit")
    return re.sub(r"\btl\.(?!PropagateNan|broadcast_to)", "gl.", text)


def ends_of(plan: KernelPlan) -> tuple[str, ...]:
    """Return which ends of the intervals of queries a kernel computes once for each tile of queries."""
    if plan.mask is None:
        return ()
    if plan.transposed:
        return streamed_ends_of(plan.mask)
    return row_ends_of(plan.mask) if plan.spec.row_ends else ()


def has_intervals_only(plan: KernelPlan) -> bool:
    """Whether a forward's mask is an interval of keys for each query. The template then has the comparisons."""
    return plan.mask is not None and not plan.transposed and is_interval(row_bounds(plan.mask.graph, "kv_idx"))


def _lowered(plan: KernelPlan) -> list[str]:
    dialect = Dialect(float_index=plan.float_index, columns="q_idx" if plan.transposed else "kv_idx")
    found = []
    if plan.mask is not None and ends_of(plan):
        ends, mask_mod = lower_with_ends(plan.mask, dialect.of_masks(ptx=True))
        found += [ends] if has_intervals_only(plan) else [ends, mask_mod]
    elif plan.mask is not None:
        # Weights of queries past the end are 0 without a limit, unless score_mod is infinite or NaN there.
        limited = not plan.transposed or plan.score is not None
        found.append(
            lower_row_bounds(plan.mask, "mask_mod", dialect.of_masks(ptx=True), limited=limited, rows=plan.transposed)
        )
        if plan.trims_runs:
            found.append(lower_row_interval(plan.mask, "row_interval", dialect.of_masks(ptx=True)))
    if plan.score is not None:
        found.append(lower_score(plan.score, "score_mod", dialect))
    if plan.grad is not None and plan.scales_gradient:
        found.append(lower(plan.grad, "score_grad", dialect))
    return found
