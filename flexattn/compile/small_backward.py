"""small_backward: which backwards run as one kernel, backward_small, because launches take longer than their work.

Other backwards launch three kernels. Each takes some microseconds of host time, and the GPU waits between them.
"""

from __future__ import annotations

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Tensors
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernels import SMALL
from flexattn.compile.lower import early_loads
from flexattn.compile.plan import plan_kernel
from flexattn.compile.scalars import tiles_of_both
from flexattn.machine.target import Target, processors
from flexattn.options import option
from flexattn.process.config import settings

# It computes scores twice, for dq and for dk and dv, and does not overlap loads with products as Hopper kernels do. So
# its programs must run at the same time and be short. Measured in CUDA graphs (docs/kernels.md).
PER_PROCESSOR = 1  # programs; with two, 16 heads of 512 tokens take 1.06 to 1.36 of the time of three kernels
_MOST_STEPS = 8  # tiles that a program reads; with 16, 4 heads of 1,024 tokens take 0.82 to 1.12
_WIDEST = 64  # head dims; at 128 its programs would spill up to 816 bytes
_MULTIPROCESSORS = 132  # of an H200, for plans that are made without a GPU
_OF_TILES = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")


def is_small(problem: Problem, tensors: Tensors, target: Target) -> bool:
    """Whether backward_small computes the gradients of query, key and value. Captured tensors receive none."""
    is_known = target.is_hopper or target.is_interpreter  # on others its registers were not looked at
    return is_known and _is_plain(problem) and _is_short(problem) and _has_plan(problem, tensors, target)


def _is_plain(problem: Problem) -> bool:
    """Whether the kernel has all that the call needs."""
    if "one_launch" in settings().without or problem.query.dtype.itemsize != 2:
        return False
    if problem.layout is not None or problem.dropout is not None or problem.sink is not None:
        return False
    if problem.in_tiles or problem.batch_invariant:
        return False
    backend = option(problem.options, "BACKEND", "bwd") or "AUTO"
    return backend in ("AUTO", "TRITON") and all(option(problem.options, name, "bwd") is None for name in _OF_TILES)


def _is_short(problem: Problem) -> bool:
    """Whether all programs run at the same time, and none reads many tiles."""
    (B, Hq, M, D), key, tile = problem.query.shape, problem.key, SMALL.fixed_tile
    assert tile is not None
    device = problem.query.device
    multiprocessors = processors(device) if device.type == "cuda" else _MULTIPROCESSORS
    if max(D, problem.value.size(3)) > _WIDEST:
        return False
    repeats = B // key.size(0) * (Hq // key.size(1))
    steps = max(-(-problem.N // tile.BLOCK_N), repeats * -(-M // tile.BLOCK_M))
    return steps <= _MOST_STEPS and tiles_of_both(tile, problem) <= PER_PROCESSOR * multiprocessors


def _has_plan(problem: Problem, tensors: Tensors, target: Target) -> bool:
    """Whether the kernel's tile fits the mask's blocks and shared memory, and its loads are vectorized."""
    blocks, tile = problem.block_mask, SMALL.fixed_tile
    assert tile is not None
    if blocks is not None and (blocks.BLOCK_SIZE[0] % tile.BLOCK_M or blocks.BLOCK_SIZE[1] % tile.BLOCK_N):
        return False
    plan = plan_kernel(SMALL, problem, target, {name: tensors[name] for name in SMALL.tensors})
    return plan.aligned and plan.tile == tile and not _loads_ahead(plan)


def _loads_ahead(plan: KernelPlan) -> bool:
    """Whether a mod has loads per pair, which are lowered for one of the two loops."""
    return any(mod is not None and early_loads(mod) for mod in (plan.score, plan.grad))
