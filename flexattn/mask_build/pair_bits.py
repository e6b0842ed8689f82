"""pair_bits: the bits of a mask's partial blocks, if reading them is faster than evaluating its mask_mod."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_BYTES, ROW_WORDS, MaskBits, PairBits
from flexattn.block_mask.runs import Runs
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns, with_runs
from flexattn.graph.pair_cost import pair_cost
from flexattn.machine.target import Target
from flexattn.mask_build.kernels import BITS_PROGRAMS, MaskPlan
from flexattn.mask_build.launch_plan import Sizes, Step, as_argument, numbers_of_captures
from flexattn.process.config import settings
from flexattn.process.events import fallback
from flexattn.runtime.build import build, current_stream

MOST_BYTES = 2**26  # of the bits of one mask
# Testing a bit takes two instructions per pair. In partial blocks, its loads take as long as a few more.
_CHEAPEST = 8


def wants_bits(bound: BoundMod, runs: tuple[EqualRuns, ...], block_size: tuple[int, int], target: Target) -> bool:
    """Return whether kernels read the bits of a mask: Hopper kernels do, if its mask_mod is expensive."""
    if any(t.is_inference() for t in bound.reached):  # its changes would not be seen
        return False
    allowed = target.is_hopper and "bits" not in settings().without and block_size == (BITS_BLOCK, BITS_BLOCK)
    return allowed and pair_cost(with_runs(bound, runs, by_key=False).graph) >= _CHEAPEST


def pair_bits(
    plan: MaskPlan, bound: BoundMod, by_query: Runs, by_key: Runs, sizes: Sizes, device: torch.device, target: Target
) -> MaskBits | None:
    """Return the bits of the partial blocks, or None without such blocks or with too many.

    `by_query` and `by_key` are the partial runs. The host waits for the number of blocks.
    """
    starts = [_numbers(runs) for runs in (by_query, by_key)]
    blocks = int(starts[0][-1])
    if blocks == 0:
        return None
    if 2 * blocks * BLOCK_BYTES > MOST_BYTES:
        fallback("mask evaluated per pair", f"{blocks} partial blocks, whose bits take more than {MOST_BYTES} bytes")
        return None
    stream = current_stream(device.index) if target.backend == "cuda" else 0
    of_captures = numbers_of_captures(plan, [(t.shape, t.stride()) for t in bound.captures])
    found = []
    for runs, first, source in zip((by_query, by_key), starts, plan.pair_bits, strict=True):
        words = torch.empty((blocks + 1) * BITS_BLOCK * ROW_WORDS, dtype=torch.int16, device=device)
        words._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]  # as in one_tensor.pack
        row_blocks = runs.rows // (sizes[0] * sizes[1])
        constants = (*sizes[1:], row_blocks, *of_captures)
        step = Step(build(source, target), runs.rows * BITS_PROGRAMS, constants)
        pointers = [as_argument(t, target) for t in (runs.row_ptr, runs.runs, first, words, *bound.captures)]
        step.launch(stream, pointers, bound.numbers)
        found.append(PairBits(first, words))
    return MaskBits(found[0], found[1], sizes[2:])


def _numbers(runs: Runs) -> Tensor:
    """Return the number of the first block of each row, and the number of all blocks at the end, int32 [rows + 1]."""
    return torch.nn.functional.pad(runs.count().cumsum(0, dtype=torch.int32), (1, 0))
