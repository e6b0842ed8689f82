"""Conversion between PyTorch's index lists (per row, a count and block indices) and dense arrays of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import DeviceError, DtypeError, MaskError, message

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def blocks_of(num_blocks: Tensor, indices: Tensor, columns: int, names: tuple[str, str]) -> Tensor:
    """Return bool [..., rows, columns]. Indices may be unordered or repeated; entries past the count are ignored.

    `names` are the field names for errors.
    """
    _check_lists(num_blocks, indices, names)
    width = indices.shape[-1]
    counted = torch.arange(width, device=indices.device) < num_blocks.unsqueeze(-1)
    bad_count = ((num_blocks < 0) | (num_blocks > width)).any()
    bad_index = (counted & ((indices < 0) | (indices >= columns))).any()
    for bad, name, expected in zip(
        torch.stack((bad_count, bad_index)).tolist(),
        names,
        (f"counts in [0, {width}], the width of {names[1]}", f"indices in [0, {columns}), the blocks of the sequence"),
        strict=True,
    ):
        if bad:
            raise MaskError(message(name, "an entry out of range", expected, "Pass seq_lengths if they are longer."))
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    blocks.scatter_(-1, torch.where(counted, indices, columns).long(), True)  # the last column takes ignored entries
    return blocks[..., :columns]


def lists_of(blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return num_blocks int32 [..., rows] and indices int32 [..., rows, width], ascending; absent blocks come last."""
    indices = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices[..., :width].int().contiguous()


def read_lists(
    prefix: str,
    num_blocks: Tensor | None,
    indices: Tensor | None,
    full_num_blocks: Tensor | None,
    full_indices: Tensor | None,
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor | None]:
    """Return partial and full blocks of the lists named `prefix`, dense bool [..., rows, columns]."""
    found: list[Tensor | None] = []
    for name, first, second in ((prefix, num_blocks, indices), (f"full_{prefix}", full_num_blocks, full_indices)):
        names = (f"{name}_num_blocks", f"{name}_indices")
        if (first is None) != (second is None):
            missing = names[first is not None]
            raise MaskError(
                f"{names[0]} and {names[1]} must be both provided or omitted: {missing} is None. Pass both."
            )
        if first is None or second is None:
            if name == prefix:
                raise MaskError(f"{names[0]} and {names[1]} must be provided: found None. Pass both.")
            found.append(None)
            continue
        found.append(blocks_of(first, second, columns, names))
        if second.shape[-2] != rows:
            fix = "Pass the seq_lengths and BLOCK_SIZE that match these lists."
            raise MaskError(message(names[1], f"{second.shape[-2]} rows", f"{rows}, the blocks of seq_lengths", fix))
    partial, full = found
    assert partial is not None
    if full is not None:
        if partial.device != full.device:
            raise DeviceError(message(f"full_{prefix}_indices", full.device, f"{partial.device}", "Move it there."))
        if partial.shape != full.shape:
            shapes = (tuple(full.shape[:-2]), tuple(partial.shape[:-2]))
            raise MaskError(
                message(f"full_{prefix}_indices", f"batch and heads {shapes[0]}", f"{shapes[1]}", "Expand it.")
            )
    return partial, full


_TRANSPOSE_FIX = "BlockMask.from_kv_blocks computes them."


def check_transposed(partial: Tensor, full: Tensor | None, found: tuple[Tensor, Tensor | None]) -> None:
    """Reject query block lists that are not the transpose of the key block lists. Gradients would be wrong."""
    for name, forward, transposed in (("q_indices", partial, found[0]), ("full_q_indices", full, found[1])):
        if (forward is None) != (transposed is None):
            have = "blocks" if forward is None else "None"
            raise MaskError(
                message(name, have, f"what full_kv_indices {'lacks' if forward is None else 'has'}", _TRANSPOSE_FIX)
            )
        if forward is None or transposed is None:
            continue
        turned = transposed.transpose(-1, -2)
        if turned.shape != forward.shape or turned.device != forward.device or not torch.equal(turned, forward):
            raise MaskError(
                message(name, "other blocks", f"the transpose of {name.replace('q', 'kv', 1)}", _TRANSPOSE_FIX)
            )


def _check_lists(num_blocks: Tensor, indices: Tensor, names: tuple[str, str]) -> None:
    for name, tensor in zip(names, (num_blocks, indices), strict=True):
        if not isinstance(tensor, Tensor):
            raise MaskError(message(name, type(tensor).__name__, "a tensor of block counts or indices", "Pass both."))
        if tensor.dtype not in _INTEGERS:
            raise DtypeError(message(name, tensor.dtype, "an integer dtype", "Convert it with .int()."))
    if indices.dim() < 2:
        raise MaskError(
            message(names[1], f"{indices.dim()} dimensions", "[B, H, rows, width]", "BlockMask must have at least 2.")
        )
    if indices.dim() > 4:
        raise MaskError(message(names[1], f"{indices.dim()} dimensions", "at most 4", "Fold leading ones into B."))
    if num_blocks.shape != indices.shape[:-1]:
        raise MaskError(
            message(
                names[0], f"shape {tuple(num_blocks.shape)}", f"{tuple(indices.shape[:-1])}", f"It counts {names[1]}."
            )
        )
    if num_blocks.device != indices.device:
        raise DeviceError(message(names[1], indices.device, f"{num_blocks.device}", f"Move it to that of {names[0]}."))
