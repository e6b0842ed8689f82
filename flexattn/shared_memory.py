"""shared_memory: how much of it a plan takes, and the largest tile that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexattn.errors import CompileError, message
from flexattn.kernel_plan import BATCH_CAPTURES, KernelPlan, split_head_dim


def shared_bytes(plan: KernelPlan) -> int:
    """Return an upper bound of the shared memory that the kernel's tiles take."""
    t, size = plan.tile, plan.dtype.itemsize
    widths = sum(p.width for p in split_head_dim(plan.D)) + sum(p.width for p in split_head_dim(plan.Dv))
    held, streamed = (t.BLOCK_N, t.BLOCK_M) if plan.transposed else (t.BLOCK_M, t.BLOCK_N)
    if plan.kernel in ("backward_delta", "backward_dq_rows"):
        return max(4096, 4 * t.BLOCK_M * 64)
    D, Dv = plan.widths
    if plan.is_hopper and plan.transposed:
        ring, rows = plan.rings, (plan.rings.queries + plan.rings.gradients) * t.BLOCK_M * 4
        tiles = t.BLOCK_N * (D + Dv) + t.BLOCK_M * (D * ring.queries + Dv * ring.gradients)
        for_dq = (ring.ds * size + ring.dq) * 128 * t.BLOCK_M
        return tiles * size + rows + (for_dq if plan.adds_dq else 0) + 1024
    if plan.kernel == "hopper_dq":
        return (t.BLOCK_M * (D + Dv) + t.BLOCK_N * (D * plan.key_stages + Dv * t.num_stages)) * size + 1024
    if plan.is_hopper:
        queries = t.BLOCK_M * (D * plan.tiles_of_queries + (0 if plan.shares_output else Dv))
        return (queries + t.num_stages * t.BLOCK_N * (D + Dv)) * size + 1024
    if plan.kernel == BATCH_CAPTURES:  # all tiles are streamed
        return max(1, t.num_stages) * (t.BLOCK_M + t.BLOCK_N) * widths * size + 2048
    scores = t.BLOCK_M * t.BLOCK_N * size * (2 if plan.kernel != "forward" else 1)
    held_bytes = held * size * (widths if plan.kernel != "forward" else sum(p.width for p in split_head_dim(plan.D)))
    barriers_and_reductions = 2048
    return held_bytes + max(1, t.num_stages) * streamed * widths * size + scores + barriers_and_reductions


def smaller_tiles(plan: KernelPlan) -> Iterator[KernelPlan]:
    """Yield the plan, then the same with ever smaller tiles, down to 16 x 16 with one stage."""
    while True:
        yield plan
        t = plan.tile
        if t.num_stages > 1:
            t = replace(t, num_stages=t.num_stages - 1)
        elif t.BLOCK_N >= t.BLOCK_M and t.BLOCK_N > 16:
            t = replace(t, BLOCK_N=t.BLOCK_N // 2)
        elif t.BLOCK_M > 16:
            t = replace(t, BLOCK_M=t.BLOCK_M // 2, PARTIAL_M=min(t.PARTIAL_M, t.BLOCK_M // 2))
        else:
            return
        plan = replace(plan, tile=t)


def fit(plan: KernelPlan) -> KernelPlan:
    """Return the plan with the largest tile not above its own that fits the target's shared memory."""
    for smaller in smaller_tiles(plan):
        if shared_bytes(smaller) <= plan.target.shared_memory:
            return smaller
    found = f"D {plan.D}, Dv {plan.Dv} in {plan.dtype}"
    raise CompileError(
        message("head dims", found, f"at most what {plan.target} holds", "Use the CPU engine or fewer channels.")
    )
