"""Mods for a part of a sequence: decoding with a cache, chunks of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from flexattn.mods.arguments import with_heads_of
from flexattn.mods.kinds import MaskMod, is_score_mod, named


def shifted(mod: Callable[..., Any], q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0) -> Callable[..., Any]:
    """Return a mask_mod or score_mod whose query (key) 0 is query `q_offset` (key `kv_offset`) of `mod`.

    An offset is an int, or an integer tensor [B] with one per sequence. The mask of a decoding step then covers only
    its few queries, whatever the length of the cache. New offsets never cause a recompile.

    >>> import torch
    >>> from flexattn import create_block_mask
    >>> from flexattn.mods import causal
    >>> lengths = torch.tensor([300, 70])  # of each sequence's cache so far
    >>> step = create_block_mask(shifted(causal, lengths), 2, None, 1, 512, device="cpu")
    >>> step.counts()  # full, partial, empty
    (0, 4, 4)
    """

    q_offset, kv_offset = _offset(q_offset), _offset(kv_offset)

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(score, b, h, _moved(q_idx, q_offset, b), _moved(kv_idx, kv_offset, b))

    if not is_score_mod(mod):
        return shifted_mask(mod, q_offset, kv_offset)
    return with_heads_of(mod, named(score, _name(mod)))


def shifted_mask(mod: Callable[..., Any], q_offset: int | Tensor = 0, kv_offset: int | Tensor = 0) -> MaskMod:
    """Return `shifted` of a mask_mod. Unlike `shifted`, torch.compile can trace it."""

    q_offset, kv_offset = _offset(q_offset), _offset(kv_offset)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b, h, _moved(q_idx, q_offset, b), _moved(kv_idx, kv_offset, b))

    return named(mask, _name(mod))


def _name(mod: Callable[..., Any]) -> str:
    return f"shifted_{getattr(mod, '__name__', 'mod')}"


def _offset(by: int | Tensor) -> int | Tensor:
    """Return an offset, that of numpy as an int: torch.compile would make a tensor of it."""
    return int(by) if isinstance(by, np.integer) else by


def _moved(index: Tensor, by: int | Tensor, b: Tensor) -> Tensor:
    return index + (by[b] if isinstance(by, Tensor) else by)
