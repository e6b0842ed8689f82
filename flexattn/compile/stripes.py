"""stripes: the keys that one program of Hopper's backward owns, if sequences are short.

Queries of short sequences have few tiles of keys. A program that owns all of them has no other programs to share the
float32 sum of dq with. It writes dq itself, while three kernels would set the sum to zero, add to it and read it.
"""

from __future__ import annotations

import math

from flexattn.call.problem import Problem
from flexattn.machine.target import l2_bytes, processors
from flexattn.options import LARGEST_TILE
from flexattn.process.config import settings

_PACKED = (1024, 512)  # keys of a stripe of packed sequences; longer ones cut fewer sequences
_SEQUENCES = 2  # of the longest length that fit in a stripe. Queries of a sequence that is cut gain nothing.
_BUSY = 0.9  # the least part of the multiprocessors that is busy, on average, if programs take the same time
_WAVES = 1.9  # the fewest waves of programs of packed sequences, whose lengths may differ
_MOST_TILES = 4  # of keys
# What all programs read again for each tile of keys, in units of L2. 512 tokens, D 128: 1.4, and up to 1.3 times as
# fast as without stripes; 1,024 tokens: 2.7 and 0.8 times (H200).
_OF_L2 = 1.5
_H200 = 132, 50 << 20  # multiprocessors and bytes of L2, for plans that are made without a GPU


def stripe_of(problem: Problem) -> int:
    """Return the number of keys in a stripe, a multiple of the tile; 0 if programs own single tiles."""
    blocks, N = problem.block_mask, problem.N
    if N == 0 or problem.in_tiles or "stripes" in settings().without:
        return 0
    if blocks is not None and not blocks.is_built:  # lists by hand may differ by direction
        return 0
    longest = None if blocks is None else blocks.reach
    if longest is None:
        stripe = -(-N // LARGEST_TILE) * LARGEST_TILE
        fits = _stays_in_l2(max(N, problem.query.size(2)), problem) and _busy(_waves(stripe, problem)) >= _BUSY
        return stripe if fits else 0
    if not _stays_in_l2(longest, problem):
        return 0
    for stripe in _PACKED:
        waves = _waves(stripe, problem)
        if stripe >= _SEQUENCES * longest and waves >= _WAVES and _busy(waves) >= _BUSY:
            return stripe
    return 0


def _stays_in_l2(rows: int, problem: Problem) -> bool:
    """Whether a sequence's queries, d_out and sums of dq stay in L2 from one tile of keys to the next."""
    (B, Hq, _, D), Dv = problem.query.shape, problem.value.size(3)
    tiles, repeats = -(-rows // LARGEST_TILE), Hq // problem.key.size(1) * (B // problem.key.size(0))
    bytes_of_row = (D + Dv) * problem.query.element_size() + 4 * D
    multiprocessors, l2 = _sizes(problem)
    read_again = rows * repeats * bytes_of_row * multiprocessors
    return tiles <= 2 or (tiles <= _MOST_TILES and read_again <= _OF_L2 * l2)


def _waves(stripe: int, problem: Problem) -> float:
    """Return the number of programs, in units of those that run at the same time."""
    return problem.key.size(0) * problem.key.size(1) * -(-problem.N // stripe) / _sizes(problem)[0]


def _busy(waves: float) -> float:
    """Return which part of the multiprocessors is busy, on average, with programs that take the same time."""
    return waves / math.ceil(waves) if waves else 0.0


def _sizes(problem: Problem) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of L2."""
    device = problem.query.device
    return (processors(device), l2_bytes(device)) if device.type == "cuda" else _H200
