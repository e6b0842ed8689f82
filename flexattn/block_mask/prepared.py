"""prepared: a mask as the arguments of an operator in a compiled graph: tensors, and its form as text.

torch.compile guards the text by value and the tensors by kind, so masks of equal form share a graph.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.block_mask.record import CaptureRecord


@dataclass(frozen=True)
class MaskForm:
    """What kernels need to know about a mask besides its lists and its mod."""

    BLOCK_SIZES: tuple[tuple[int, int], ...]  # of each set of lists; the first is that of the mask
    both: bool  # whether each set has lists of key rows too, for the backward
    per_batch: bool  # whether batches have lists of their own
    per_head: bool
    full_overhangs: bool
    is_built: bool
    graph: str = ""  # digest of the graph that the mask was built from
    runs: tuple[int, ...] = ()  # its captures with known runs of equal elements, whose places follow the lists

    def dumps(self) -> str:
        return json.dumps(list(asdict(self).values()))

    @staticmethod
    @lru_cache(256)
    def loads(text: str) -> MaskForm:
        sizes, *rest, runs = json.loads(text)
        return MaskForm(tuple(map(tuple, sizes)), *rest, tuple(runs))


@dataclass(frozen=True)
class Prepared:
    """The arguments of operators for a mask."""

    tensors: tuple[Tensor, ...]  # each set of lists as one tensor (see packed.py), then the places of equal runs
    text: str  # a MaskForm


class Recorded:
    """What the lists of a mask were built from, for checks by an operator, which is given the lists alone."""

    def __init__(self, record: CaptureRecord, is_whole: bool) -> None:
        self.record = record
        self.is_whole = is_whole  # False for a slice of a mask: its mod captures other tensors

    @staticmethod
    def of(lists: Tensor) -> Recorded | None:
        """Return the record of packed lists, if they have one."""
        return _recorded.get(lists)

    def keep(self, lists: Tensor) -> None:
        _recorded[lists] = self


_recorded = WeakTensorKeyDictionary()
