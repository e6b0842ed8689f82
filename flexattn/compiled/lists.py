"""lists: the BlockMask of an operator's arguments, and the check that its lists are those of its captured values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.block_mask import BlockMask
from flexattn.block_mask.packed import unpack
from flexattn.block_mask.prepared import MaskForm, Recorded
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.mods.combine import noop_mask

_known = WeakTensorKeyDictionary()  # lists -> {form and sizes: BlockMask}


def mask_of_lists(lists: Tensor, form: MaskForm, query: Tensor, key: Tensor) -> BlockMask:
    """Return the mask whose lists are in a packed tensor. It is cached as long as that tensor lives."""
    B, Hq, M, _ = query.shape
    N = key.shape[2]
    cached = _known.get(lists)
    if cached is None:
        cached = _known[lists] = {}
    sizes = (form, B, Hq, M, N)
    mask = cached.get(sizes)
    if mask is None:
        mask = cached[sizes] = _mask(lists, *sizes)
    return mask


def _mask(lists: Tensor, form: MaskForm, B: int, Hq: int, M: int, N: int) -> BlockMask:
    B, H = B if form.per_batch else 1, Hq if form.per_head else 1
    block_size = form.BLOCK_SIZES[0]
    rows = [-(-n // size) for n, size in zip((M, N), block_size, strict=True)]
    # Views of another tensor with the same memory: views of `lists` would keep it alive, and with it this entry.
    own = torch.empty(0, dtype=lists.dtype, device=lists.device).set_(lists.detach())
    directions = unpack(own, B * H, rows if form.both else rows[:1], exact=lists.is_cpu)
    by_key = directions[1] if form.both else None
    mask = BlockMask._of_runs(directions[0], by_key, B, H, (M, N), block_size, noop_mask, True, form.full_overhangs)
    mask._built_from_mod = form.is_built
    return mask


def check_recorded(lists: Tensor, form: MaskForm, mask: BoundMod) -> None:
    """Raise MutationError if values that mask_mod captures changed since the lists were built.

    Lists that a graph creates, or that come from a file, have no record.
    """
    recorded = Recorded.of(lists)
    if recorded is not None and not (lists.is_cuda and torch.cuda.is_current_stream_capturing()):
        recorded.check(mask)


def equal_runs_of(lists: Sequence[Tensor], form: MaskForm, mask: BoundMod) -> tuple[EqualRuns, ...]:
    """Return the runs of equal elements in captured tensors, if the graph is the one that they were found for."""
    recorded = Recorded.of(lists[0])
    same = mask.graph.digest == form.graph if recorded is None else recorded.is_graph_of(mask)
    if not form.runs or not same:
        return ()
    return tuple(EqualRuns(i, places) for i, places in zip(form.runs, lists[len(form.BLOCK_SIZES) :], strict=True))
