"""pair_bits: why a mask has no bits of its partial blocks, and what the build writes of them if no reason applies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexattn.block_mask.bits import BITS_BLOCK, BLOCK_BYTES, BLOCK_WORDS, MaskBits, PairBits
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.pair_cost import pair_cost
from flexattn.machine.hopper_kernels import no_hopper_kernels
from flexattn.machine.target import Target
from flexattn.process.config import settings

MOST_BYTES = 2**26  # of the bits of one mask
# Kernels skip empty halves, in smaller tiles, if at most this part of the quarters of all blocks is not empty. With
# 0.52 a forward takes 0.75 of the time, and with all of them 1.18.
_MOST_QUARTERS = 0.75
NO_PARTIAL = "no block is partial"
NO_READER = "only Hopper kernels read them"
# Testing a bit takes two instructions per pair. In partial blocks, its loads take as long as a few more.
_CHEAPEST = 8


def unwanted(graph: ModGraph, block_size: tuple[int, int], runs: tuple[int, ...], target: Target) -> str:
    """Return why kernels evaluate a mask_mod for each pair by choice; "" if reading bits is faster.

    `runs`: the captures in which runs of equal elements are known.
    """
    if no_hopper_kernels(target):
        return NO_READER
    if "bits" in settings().without:
        return "FLEXATTN_WITHOUT=bits"
    if block_size != (BITS_BLOCK, BITS_BLOCK):
        return f"kernels that read them read blocks of {BITS_BLOCK} x {BITS_BLOCK}"
    cost = pair_cost(graph, runs)
    return "" if cost >= _CHEAPEST else f"mask_mod takes about {cost} instructions per pair, fewer than {_CHEAPEST}"


def impossible(bound: BoundMod, blocks: int) -> str:
    """Return why the partial blocks of a mask cannot have bits; "" if they can."""
    reasons = (
        (
            any(t.is_inference() for t in bound.reached),
            "mask_mod reads a tensor of inference mode, whose changes would not be seen",
        ),
        (bytes_of(blocks) > MOST_BYTES, f"those of {blocks:,} blocks would take more than {MOST_BYTES >> 20} MiB"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def size_of_halves(blocks: int, rows: tuple[int, int]) -> int:
    """Return the int32 that the build writes about halves of blocks. `rows`: rows of blocks, by query and by key."""
    return sum(_parts_of_halves(blocks, rows))


def _parts_of_halves(blocks: int, rows: tuple[int, int]) -> tuple[int, ...]:
    """Return the int32 of each part, see `bits_of_memory`. Parts are aligned to 16 bytes, which Inductor checks."""
    return *(-(-n // 4) * 4 for n in (2 * blocks + 1, 2 * blocks + 1, *rows)), 2


def bits_of_memory(firsts: Sequence[Tensor], words: Tensor, halves: Tensor, lengths: tuple[int, int]) -> MaskBits:
    """Return the bits that the build wrote: words of both directions, then halves. The host waits for the build.

    `halves`: of both directions, the counts of their rows, how many quarters of partial blocks are not empty, and how
    many blocks are full.
    """
    blocks, rows = words.shape[1] // BLOCK_WORDS - 1, (len(firsts[0]), len(firsts[1]))
    *parts, live = halves.split(_parts_of_halves(blocks, rows))
    by_query, by_key = (
        PairBits(firsts[i], words[i], parts[i][: 2 * blocks + 1], parts[2 + i][: rows[i]]) for i in (0, 1)
    )
    quarters, full = live.tolist()
    skips = is_sparse(quarters, blocks, full)
    return MaskBits(by_query, by_key, lengths, skips, computed_quarters(quarters, blocks, full, skips))


def is_sparse(quarters: int, partial: int, full: int) -> bool:
    """Return whether so few quarters of partial blocks are not empty that kernels skip empty halves."""
    return quarters + 4 * full <= _MOST_QUARTERS * 4 * (partial + full)


def computed_quarters(quarters: int, partial: int, full: int, skips_halves: bool) -> int:
    """Return how many quarters of blocks kernels compute, of which `quarters` of the partial ones are not empty."""
    return 4 * full + (quarters if skips_halves else 4 * partial)


def bytes_of(blocks: int) -> int:
    """Return the bytes of the bits of partial blocks, for both directions."""
    return 2 * blocks * BLOCK_BYTES
