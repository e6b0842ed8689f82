"""events: what the user may want to know about a process: slower ways that were taken, and a log.

The logger is `flexattn`, with a child for each stage (`flexattn.build`). It has no handlers and no level of its own, so
`logging.basicConfig(level=logging.DEBUG)` shows everything. FLEXATTN_DEBUG=1 prints the same on stderr.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

from flexattn.process.config import settings
from flexattn.process.forks import Lock

LOGGER = logging.getLogger("flexattn")
LOGGER.addHandler(logging.NullHandler())

_MOST_REASONS = 1000
_fallbacks: Counter[str] = Counter()
_lock = Lock()


def is_logging() -> bool:
    """Return whether anybody reads the log."""
    return settings().debug or LOGGER.isEnabledFor(logging.DEBUG)


def debug(stage: str, detail: object) -> None:
    """Log what a stage did."""
    if settings().debug:
        print(f"flexattn {stage}: {detail}", file=sys.stderr, flush=True)
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.getChild(stage).debug("%s", detail)


def fallback(what: str, reason: str) -> None:
    """Count that a slower way was taken, and log it once as INFO."""
    text = f"{what}: {reason}"
    with _lock:
        if text not in _fallbacks and len(_fallbacks) >= _MOST_REASONS:
            text = "other reasons"
        _fallbacks[text] += 1
        is_first = _fallbacks[text] == 1
    if is_first:
        LOGGER.getChild("fallback").info("%s", text)


def fallbacks() -> dict[str, int]:
    """Return how often each slower way was taken."""
    with _lock:
        return dict(_fallbacks)


def forget_fallbacks() -> None:
    """Start counting from zero."""
    with _lock:
        _fallbacks.clear()
