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
_BUSY = 0.9  # the least part of the multiprocessors that is busy, on average
_MOST_TILES = 4  # of keys
# What all programs read again for each tile of keys, in units of L2. 512 tokens, D 128: 1.4, and up to 1.2 times as
# fast as without stripes; 1,024 tokens: 2.7 and 0.8 times (H200).
_OF_L2 = 1.5


def stripe_of(problem: Problem) -> int:
    """Return the number of keys in a stripe, a multiple of the tile; 0 if programs own single tiles."""
    blocks, N = problem.block_mask, problem.N
    if N == 0 or "stripes" in settings().without:
        return 0
    if blocks is not None and not blocks.is_built:  # lists by hand may differ by direction
        return 0
    packed = blocks is not None and blocks.reach is not None
    longest = blocks.reach if blocks is not None and blocks.reach is not None else max(N, problem.query.size(2))
    if not _stays_in_l2(longest, problem):
        return 0
    whole = -(-N // LARGEST_TILE) * LARGEST_TILE
    return next((s for s in (_PACKED if packed else (whole,)) if _busy(s, problem) >= _BUSY), 0)


def _stays_in_l2(rows: int, problem: Problem) -> bool:
    """Whether a sequence's queries, d_out and sums of dq stay in L2 from one tile of keys to the next."""
    tiles = -(-rows // LARGEST_TILE)
    group = problem.query.size(1) // problem.key.size(1)
    D, Dv = problem.query.size(3), problem.value.size(3)
    bytes_of_row = (D + Dv) * problem.query.element_size() + 4 * D
    read_again = rows * group * bytes_of_row * _processors(problem)
    return tiles <= 2 or (tiles <= _MOST_TILES and read_again <= _OF_L2 * l2_bytes(problem.query.device))


def _processors(problem: Problem) -> int:
    """Return the number of multiprocessors; of an H200 for plans that are made without a GPU."""
    device = problem.query.device
    return processors(device) if device.type == "cuda" else 132


def _busy(stripe: int, problem: Problem) -> float:
    """Return which part of the multiprocessors is busy, on average, with programs that take the same time."""
    programs = problem.key.size(0) * problem.key.size(1) * -(-problem.N // stripe)
    waves = programs / _processors(problem)
    return waves / math.ceil(waves) if programs else 0.0
