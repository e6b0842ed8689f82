"""sequences: the operators that describe packed sequences in graphs.

    pack_rows   cu_seq_q, cu_seq_k -> the columns of a Packing (call/varlen/packing.py)
    list_rows   the columns and the mask -> the tensors of its block lists

They are operators of their own, so that calls of a graph with the same sequences can share them, and the backward keeps
their results. Wrong values on a CPU raise when pack_rows runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.call.varlen.arguments import PackedArguments, assertions, check_packed_values
from flexattn.call.varlen.block_lists import BLOCK, flat_lists, flat_sizes, mask_of_rows
from flexattn.call.varlen.mods import packed_mask
from flexattn.call.varlen.packing import Packing, packed_columns, width_of
from flexattn.torch_compile.spec import bound_to, loads

_LIBRARY = torch.library.Library("flexattn", "FRAGMENT")
_LIBRARY.define(
    "pack_rows(Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_q, Tensor? seqused_k, SymInt T_q, SymInt T_k, "
    "SymInt max_q, SymInt max_k) -> Tensor"
)
_LIST_ROWS = (
    "(Tensor columns, Tensor[] captures, SymInt[] ints, Tensor[] floats, SymInt T_q, SymInt T_k, SymInt heads, "
    "SymInt longest, bool both, str spec) -> Tensor[]"
)
_LIBRARY.define(f"list_rows{_LIST_ROWS}")
_LIBRARY.define(f"list_rows.floats{_LIST_ROWS}", tags=(torch.Tag.cudagraph_unsafe,))
_OPS = torch.ops.flexattn


def pack_rows(given: PackedArguments, T_q: int, T_k: int) -> Tensor:
    """Return the columns of the Packing of sequences, in any mode and inside of torch.compile."""
    return _OPS.pack_rows(
        given.cu_seq_q, given.cu_seq_k, given.seqused_q, given.seqused_k, T_q, T_k, given.max_q, given.max_k
    )


def list_rows(
    columns: Tensor, captures: list[Tensor], ints: list[Any], floats: list[Tensor], sizes: tuple[Any, ...], both: bool,
    spec: str,
) -> list[Tensor]:  # fmt: skip
    """Return the tensors of the lists of queries, and of those of keys for a backward (`both`).

    `spec` is a Spec with the mask and the form of the sequences. `sizes` are T_q, T_k, the heads of query, and the
    length of the longest sequence.
    """
    overload = _OPS.list_rows.floats if floats else _OPS.list_rows.default
    return overload(columns, captures, ints, floats, *sizes, both, spec)


def _pack_rows(
    cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None, T_q: int, T_k: int,
    max_q: int, max_k: int,
) -> Tensor:  # fmt: skip
    given = PackedArguments(cu_seq_q, cu_seq_k, max_q, max_k, seqused_q=seqused_q, seqused_k=seqused_k)
    check_packed_values(given, T_q, T_k)
    return packed_columns(cu_seq_q, cu_seq_k, seqused_q, seqused_k, (T_q, T_k), assertions(T_q, T_k))


def _list_rows(
    columns: Tensor, captures: list[Tensor] | None, ints: list[int] | None, floats: list[Tensor] | None, T_q: int,
    T_k: int, heads: int, longest: int, both: bool, spec: str,
) -> list[Tensor]:  # fmt: skip
    parsed = loads(spec)
    form, packing = parsed.sequences, Packing.of_columns(columns, T_q)
    numbers = (x.item() for x in floats or ())  # AOTInductor passes empty lists as None
    assert form is not None and form.window is not None
    mask = packed_mask(bound_to(parsed.mask, captures or (), iter(ints or ()), numbers), packing, form.window)
    window = form.window if parsed.mask is None else None
    blocks = mask_of_rows(mask, packing, window, (T_q, T_k), heads, both, longest)
    return flat_lists(blocks)


def _fake_pack_rows(cu_seq_q: Tensor, *rest: Any) -> Tensor:
    return cu_seq_q.new_empty(5, width_of(rest[3]), dtype=torch.int32)


def _fake_list_rows(columns: Tensor, *rest: Any) -> list[Tensor]:
    *_, T_q, T_k, heads, _, both, spec = rest
    mask = loads(spec).mask
    H = heads if mask is not None and mask.reads("h") else 1
    lengths = (T_q, T_k) if both else (T_q,)
    return [columns.new_empty(size) for T in lengths for size in flat_sizes(H * ((T + BLOCK - 1) // BLOCK))]


for _name, _kernel, _fake in (
    ("pack_rows", _pack_rows, _fake_pack_rows), ("list_rows", _list_rows, _fake_list_rows),
    ("list_rows.floats", _list_rows, _fake_list_rows),
):  # fmt: skip
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"flexattn::{_name}", _fake, lib=_LIBRARY)
