"""Conversion of a torch BlockMask to a flexattn BlockMask, cached."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.mask import METADATA, BlockMask
from flexattn.errors import ArgumentError, message
from flexattn.mods.combine import noop_mask
from flexattn.torch_state.lasting import kept_for_graphs

Values = tuple[tuple[int, Tensor], ...]  # (position, copy) of tensors that do not count changes in place


class _Converted:
    """Kept in an attribute of torch's mask: the state of that mask, the values of its lists, the converted mask.

    A dict with weak keys would keep a mask for ever whose mask_mod refers to it. Copies and pickles have an empty set
    in its place, which torch.load accepts with weights_only.
    """

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()


def from_torch(mask: Any) -> BlockMask:
    """Return a torch BlockMask as a flexattn BlockMask. It is converted again only if it or its tensors changed."""
    lists, state = _torch_state(mask)
    device = mask.kv_indices.device
    kept = getattr(mask, _NAME, None)
    known = kept.kept if isinstance(kept, _Converted) else ()
    if known and _same_state(known[0], state) and have_values(lists, known[1]):
        return kept_for_graphs(device, known[2])
    mod = mask.mask_mod
    if getattr(mod, "__module__", "") == "torch.nn.attention.flex_attention" and mod.__name__ == "noop_mask":
        mod = noop_mask
    fields: dict[str, Any] = dict(zip(LISTS, lists, strict=True))
    fields |= {name: getattr(mask, name) for name in ("seq_lengths", "BLOCK_SIZE")}
    fields |= {name: getattr(mask, name, None) for name in (*METADATA, "dq_kv_order_spt")}
    converted = BlockMask(**fields, mask_mod=mod)
    setattr(mask, _NAME, _Converted(state, values_of(lists), converted))
    return kept_for_graphs(device, converted)


_NAME = "_flexattn_converted"
LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def _torch_state(mask: Any) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    """Return the lists of a mask, and what tells whether it changed."""
    try:
        lists = [getattr(mask, name) for name in LISTS]
        rest = (tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE), mask.mask_mod)
    except AttributeError as error:
        fix = "Build one with create_block_mask."
        raise ArgumentError(message("block_mask", type(mask).__name__, "a BlockMask", fix)) from error
    return lists, (*(None if t is None else (weakref.ref(t), version(t)) for t in lists), *rest)


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def values_of(tensors: Sequence[Tensor | None]) -> Values:
    """Return copies of the tensors on a CPU that were made in inference_mode: they do not count changes in place.

    On a GPU the host would wait to compare them.
    """
    return tuple([(i, t.clone()) for i, t in enumerate(tensors) if t is not None and t.is_cpu and t.is_inference()])


def have_values(tensors: Sequence[Tensor | None], values: Values) -> bool:
    """Return whether the tensors that `values_of` copied have the same values."""
    found = ((tensors[i], value) for i, value in values)
    return all(t is not None and torch.equal(t, value) for t, value in found)


def _same_state(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return all(_same(a, b) for a, b in zip(before, now, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and a and isinstance(a[0], weakref.ref):
        return a[0]() is b[0]() and a[1] == b[1]
    return a is b or (isinstance(a, tuple) and a == b)
