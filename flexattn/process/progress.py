"""progress: progress lines on stderr for work that takes unexpectedly long."""

from __future__ import annotations

import sys
import time

_PATIENCE = 2.0  # seconds before the first line; the interval then doubles


_MOST_PAIRS = 2**39  # a GPU evaluates this many within about _PATIENCE


def announce(blocks: int, pairs: int) -> None:
    """Report that a GPU is about to evaluate many pairs, if that takes long."""
    if pairs > _MOST_PAIRS:
        text = f"{blocks:,} blocks are evaluated pair by pair, {pairs:,} pairs"
        print(f"flexattn create_block_mask: {text}", file=sys.stderr, flush=True)


class Progress:
    """The number of blocks of a mask decided so far."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.decided = self.evaluated = 0
        self.start = time.monotonic()
        self.next = _PATIENCE

    def advance(self, decided: int, evaluated: int = 0) -> None:
        """Count decided blocks, and print a line if it is time."""
        self.decided += decided
        self.evaluated += evaluated
        passed = time.monotonic() - self.start
        if passed < self.next:
            return
        self.next = 2 * passed
        done = min(1.0, self.decided / max(self.blocks, 1))
        text = f"{done:.0%} of {self.blocks:,} blocks after {passed:.0f} s, {self.evaluated:,} evaluated pair by pair"
        print(f"flexattn create_block_mask: {text}", file=sys.stderr, flush=True)
