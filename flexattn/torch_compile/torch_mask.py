"""torch_mask: PyTorch's own BlockMask inside of torch.compile. An operator of the graph packs its lists.

The operator reads the lists, so it runs at each call. It keeps what it packed for lists that did not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flexattn.block_mask import BlockMask
from flexattn.block_mask.from_torch import LISTS, have_values, values_of, version
from flexattn.block_mask.one_tensor import most_runs, pack, packed_size
from flexattn.block_mask.prepared import MaskForm
from flexattn.torch_state.lasting import kept_for_graphs

_LIBRARY = torch.library.Library("flexattn", "FRAGMENT")
_LIBRARY.define(
    "pack_lists(Tensor kv_num_blocks, Tensor kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, "
    "Tensor? q_num_blocks, Tensor? q_indices, Tensor? full_q_num_blocks, Tensor? full_q_indices, "
    "SymInt[] seq_lengths, int[] BLOCK_SIZE) -> Tensor"
)
_PACK_LISTS = torch.ops.flexattn.pack_lists
# Texts of MaskForms by (both, per_batch, per_head, full_overhangs), because Dynamo cannot trace MaskForm.dumps.
_FORMS: dict[tuple[int, ...], str] = {
    flags: MaskForm((0, 0), *map(bool, flags), is_built=False, is_torchs=True).dumps()
    for flags in itertools.product((0, 1), repeat=4)
}
_NO_SIZES = "[0, 0]"  # in the place of BLOCK_SIZE
_packed: Any = WeakTensorKeyDictionary()  # kv_indices -> (versions, ids, sizes), packed lists, other lists, values


def torch_mask(mask: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...], str]:
    """Return lists, sizes and form (see CallArguments) of a torch BlockMask. Dynamo traces this function."""
    lengths = tuple(mask.seq_lengths)
    block_size = [range(n).stop for n in mask.BLOCK_SIZE]  # a number instead of a symbol: it is part of the text
    packed = _PACK_LISTS(*[getattr(mask, name) for name in LISTS], lengths, block_size)
    B, H = _batch_dims(mask.kv_indices)
    cuts = lengths[0] % block_size[0] != 0 or lengths[1] % block_size[1] != 0
    overhangs = mask.full_kv_indices is not None and cuts
    flags = tuple([1 if flag else 0 for flag in (mask.q_indices is not None, B > 1, H > 1, overhangs)])
    form = _FORMS[flags].replace(_NO_SIZES, f"[{block_size[0]}, {block_size[1]}]")
    return (packed,), (*lengths, B, H), form


def _batch_dims(indices: Tensor) -> tuple[int, int]:
    """Return B and H, which PyTorch's lists may omit."""
    dims = indices.dim()
    return indices.shape[-4] if dims > 3 else 1, indices.shape[-3] if dims > 2 else 1


def _pack_lists(*arguments: Any) -> Tensor:
    lists, (lengths, block_size) = arguments[: len(LISTS)], arguments[len(LISTS) :]
    state = (*_states(lists), tuple(lengths), tuple(block_size))
    known = _packed.get(lists[1])
    if known is None or known[0] != state or not have_values(lists, known[3]):
        mask = BlockMask(tuple(lengths), *lists, BLOCK_SIZE=tuple(block_size))
        directions = [mask.kv_runs] if mask.q_runs is None else [mask.kv_runs, mask.q_runs]
        # The other lists are kept, so that another tensor cannot have the id of one of them.
        packed = pack(directions, most_runs(mask.B * mask.H, *_grid(lengths, block_size)))
        known = _packed[lists[1]] = (state, packed, (lists[0], *lists[2:]), values_of(lists))
    # A copy, because compiled code may reuse the memory of an operator's result.
    return kept_for_graphs(lists[1].device, known[1]).clone()


def _states(lists: Sequence[Tensor | None]) -> list[tuple[int, int] | None]:
    return [None if x is None else (id(x), version(x)) for x in lists]


def _grid(lengths: Sequence[int], block_size: Sequence[int]) -> tuple[int, int]:
    return -(-lengths[0] // block_size[0]), -(-lengths[1] // block_size[1])


def _fake(*arguments: Any) -> Tensor:
    kv_indices, q_indices, lengths, block_size = arguments[1], arguments[5], *arguments[-2:]
    B, H = _batch_dims(kv_indices)
    grid = _grid(lengths, block_size)
    rows = grid[:1] if q_indices is None else grid
    return kv_indices.new_empty(packed_size(B * H, rows, most_runs(B * H, *grid)), dtype=torch.int32)


_LIBRARY.impl("pack_lists", _pack_lists, "CompositeExplicitAutograd")
torch.library.register_fake("flexattn::pack_lists", _fake, lib=_LIBRARY)
