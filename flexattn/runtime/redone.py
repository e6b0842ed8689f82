"""redone: how many tiles hopper_forward computed again, because their sums overflowed with a fixed reference."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.torch_state.lasting import is_capturing, lasting

_counts: dict[torch.device, Tensor] = {}


def count_on(device: torch.device) -> Tensor:
    """Return the count of a device, int32 [1]. A graph that is captured before any other call has one of its own."""
    found = _counts.get(device)
    if found is None:
        if is_capturing(device):
            return torch.zeros(1, dtype=torch.int32, device=device)
        found = _counts[device] = lasting(device, lambda: torch.zeros(1, dtype=torch.int32, device=device))
    return found


def is_counted(device: torch.device) -> bool:
    """Return whether the device has a count that lasts."""
    return device in _counts


def tiles_redone() -> int:
    """Return how many tiles all devices computed again in this process. This waits for the devices.

    A Hopper forward in bfloat16 with 2,048 keys or more computes most weights relative to an earlier maximum
    (docs/numerics.md). A tile of queries whose sums overflow is computed again, which takes as long as with all maxima.
    So is one with a row without any key, if the mask has bits and its empty halves of blocks are skipped.

    Example:
        >>> flexattn.tiles_redone()
        0
    """
    return sum(int(count) for count in _counts.values())
