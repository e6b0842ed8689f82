"""pair_bits: why a mask has no bits of its partial blocks. If no reason applies, the build evaluates them."""

from __future__ import annotations

from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_BYTES
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.pair_cost import pair_cost
from flexattn.machine.target import Target
from flexattn.process.config import settings

MOST_BYTES = 2**26  # of the bits of one mask
NO_PARTIAL = "no block is partial"
# Testing a bit takes two instructions per pair. In partial blocks, its loads take as long as a few more.
_CHEAPEST = 8


def unwanted(graph: ModGraph, runs: tuple[int, ...], target: Target) -> str:
    """Return why kernels evaluate a mask_mod for each pair by choice; "" if reading bits is faster.

    `runs`: the captures in which runs of equal elements are known.
    """
    if not target.is_hopper:
        return "only Hopper kernels read them"
    if "bits" in settings().without:
        return "FLEXATTN_WITHOUT=bits"
    cost = pair_cost(graph, runs)
    return "" if cost >= _CHEAPEST else f"mask_mod takes about {cost} instructions per pair, fewer than {_CHEAPEST}"


def impossible(bound: BoundMod, block_size: tuple[int, int], blocks: int) -> str:
    """Return why the partial blocks of a mask cannot have bits; "" if they can."""
    reasons = (
        (block_size != (BITS_BLOCK, BITS_BLOCK), f"BLOCK_SIZE is {block_size}, not {BITS_BLOCK}"),
        (
            any(t.is_inference() for t in bound.reached),
            "mask_mod reads a tensor of inference mode, whose changes would not be seen",
        ),
        (bytes_of(blocks) > MOST_BYTES, f"those of {blocks:,} blocks would take more than {MOST_BYTES >> 20} MiB"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def bytes_of(blocks: int) -> int:
    """Return the bytes of the bits of partial blocks, for both directions."""
    return 2 * blocks * BLOCK_BYTES
