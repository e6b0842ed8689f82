"""jagged: nested tensors of layout torch.jagged -> packed sequences, and results back to nested tensors.

A nested tensor [B, H, lengths, D] stores its rows end to end, as [H, rows, D] with the offsets of the sequences. With
`lengths`, as torch.nested.narrow returns it, there are holes between sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.varlen.arguments import PackedArguments
from flexattn.call.varlen.memory import Memory, assert_once
from flexattn.errors import ArgumentError, MaskError, UnsupportedError, message
from flexattn.torch_state.modes import unstored

_FIX = "Make it with torch.nested.nested_tensor(..., layout=torch.jagged) as [B, lengths, H, D], and .transpose(1, 2)."


@unstored
def from_jagged(query: Any, key: Any, value: Any, block_mask: Any) -> tuple[Tensor, Tensor, Tensor, PackedArguments]:
    """Return query, key and value as [1, H, rows, D], and their sequences."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
            found = "a nested tensor of layout torch.strided" if getattr(x, "is_nested", False) else "a dense tensor"
            expected = "a nested tensor of layout torch.jagged" + ", like query" * (name != "query")
            raise UnsupportedError(message(name, found, expected, _FIX))
        if x.dim() != 4 or x._ragged_idx != 2:  # type: ignore[attr-defined]
            raise ArgumentError(message(name, f"shape {tuple(x.shape)}", "[B, H, lengths, D]", _FIX))
    if key.size(0) != query.size(0):
        fix = "Give each sequence its keys."
        raise ArgumentError(message("key", f"{key.size(0)} sequences", f"those of query, {query.size(0)}", fix))
    _check_same_sequences(key, value)
    rows = [x.values() for x in (query, key, value)]  # [H, rows, D], differentiable
    T_q, T_k = rows[0].size(1), rows[1].size(1)
    sequences = PackedArguments(
        _int32(query.offsets()), _int32(key.offsets()), T_q, T_k, (-1, -1), _mask_mod(block_mask),
        None if query.lengths() is None else _int32(query.lengths()),
        None if key.lengths() is None else _int32(key.lengths()),
    )  # fmt: skip
    return rows[0][None], rows[1][None], rows[2][None], sequences


def _check_same_sequences(key: Any, value: Any) -> None:
    """Check that keys and values are those of the same tokens. On a GPU a kernel asserts what the host cannot see."""
    fix = "Make one from the other: torch.nested.nested_tensor_from_jagged(values, key.offsets(), key.lengths())."
    error = ArgumentError(message("value", "sequences of other lengths", "those of key", fix))
    pairs = (key.offsets(), value.offsets()), (key.lengths(), value.lengths())
    for ours, theirs in pairs:
        if ours is theirs:
            continue
        if ours is None or theirs is None or ours.shape != theirs.shape:
            raise error
        if not ours.is_cpu:
            assert_once("jagged: value must have the sequences of key", (ours, theirs), lambda x, y: (x == y).all())
        elif not torch.equal(ours, theirs):
            raise error


def to_jagged(rows: Tensor, query: Any) -> Tensor:
    """Return [1, H, rows, ...] as a nested tensor [B, H, lengths, ...] with the sequences of query."""
    nested = torch.nested.nested_tensor_from_jagged(rows.squeeze(0).transpose(0, 1), query.offsets(), query.lengths())
    return nested.transpose(1, 2)


def _mask_mod(block_mask: Any) -> Any:
    """Return the mask_mod of a mask, whose positions are those in a sequence."""
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask) or not block_mask.is_built:
        fix = "Make one with flexattn.create_block_mask(mask_mod, None, None, longest, longest)."
        raise MaskError(message("block_mask", "other block lists", "a mask of positions in a sequence", fix))
    return block_mask.mask_mod


def _int32(x: Tensor) -> Tensor:
    """Return the tensor as int32: the same object for the same tensor, so that its packing is found again."""
    if x.dtype == torch.int32 and x.is_contiguous():
        return x
    return _converted.get("int32", (x,), lambda: x.to(torch.int32).contiguous())


_converted = Memory()
