"""progress: progress lines on stderr for work that takes unexpectedly long.

FLEXATTN_PROGRESS=0 silences them. So does a level of the logger `flexattn` above WARNING.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from flexattn.process.config import settings
from flexattn.process.events import LOGGER
from flexattn.process.forks import Lock

_PATIENCE = 2.0  # seconds before the first line; the interval then doubles
_PAUSE = 1.0  # seconds between two waits that count as one

_MOST_PAIRS = 2**39  # a GPU evaluates this many within about _PATIENCE


def tell(stage: str, text: str) -> None:
    """Print a progress line, unless the user silenced them."""
    if settings().progress and LOGGER.isEnabledFor(logging.WARNING):
        print(f"flexattn {stage}: {text}", file=sys.stderr, flush=True)


def announce(blocks: int, pairs: int) -> None:
    """Report that a GPU is about to evaluate many pairs, if that takes long."""
    if pairs > _MOST_PAIRS:
        tell("create_block_mask", f"{blocks:,} blocks are evaluated pair by pair, {pairs:,} pairs")


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
        tell("create_block_mask", text)


class Waiting:
    """Work in several steps that the user waits for, such as the kernels of a first call.

    Steps that follow each other within _PAUSE seconds count as one wait.
    """

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.start = self.end = self.next = 0.0
        self._lock = Lock()

    @contextlib.contextmanager
    def step(self, text: Callable[[], str]) -> Iterator[None]:
        """Print a line if the wait takes long before the end of the block. `text` says what the block does."""
        now = time.monotonic()
        with self._lock:
            if now - self.end > _PAUSE:
                self.start, self.next = now, _PATIENCE
            due = max(0.0, self.start + self.next - now)
        timer = threading.Timer(due, self._tell, (text,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started, as at the interpreter's end
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self.end = time.monotonic()

    def _tell(self, text: Callable[[], str]) -> None:
        with self._lock:
            passed = time.monotonic() - self.start
            self.next = 2 * passed
        tell(self.stage, f"{text()}, {passed:.0f} s so far")
