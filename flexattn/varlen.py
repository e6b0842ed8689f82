"""varlen: attention over sequences of different lengths, packed end to end or in jagged nested tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from flexattn.api import attend_call, attend_rows
from flexattn.call.call import Call, Mod
from flexattn.call.layout import KVLayout, LayoutArguments
from flexattn.call.unknown_arguments import refuse_unknown, refuses_unknown
from flexattn.call.varlen.arguments import PackedArguments, check_packed_forms
from flexattn.errors import ArgumentError, DtypeError, UnsupportedError, message
from flexattn.mods import and_masks, band
from flexattn.mods.padding import queries_before
from flexattn.mods.shifted import shifted_mask
from flexattn.torch_compile.call import traced_call, traced_rows
from flexattn.torch_compile.sequences import pack_rows
from flexattn.torch_state.modes import is_recording
from flexattn.torch_state.subclasses import has_no_values


@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    kernel_options: Mapping[str, object] | None = None,
    kv_layout: KVLayout = "NHD",
) -> Tensor: ...


@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    kernel_options: Mapping[str, object] | None = None,
    kv_layout: KVLayout = "NHD",
) -> Tensor | tuple[Tensor, Tensor]: ...


@refuses_unknown
def varlen_attn(
    query: Tensor,  # [T_q, Hq, D]
    key: Tensor,  # [T_k, Hkv, D]
    value: Tensor,  # [T_k, Hkv, Dv]
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0,  # no 0.0: Dynamo makes a symbol of a default that is a float (dynamic=True)
    kernel_options: Mapping[str, object] | None = None,
    kv_layout: KVLayout = "NHD",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within each of several sequences that are packed end to end, without padding.

    A superset of torch.nn.attention.varlen.varlen_attn, with the same names and defaults.

    Args:
        query: [T_q, Hq, D], float16, bfloat16, float32 or float64.
        key: [T_k, Hkv, D]; with cu_seq_k None [sequences, N, Hkv, D]; with block_table pages, see `kv_layout`.
        value: [T_k, Hkv, Dv], or as key.
        cu_seq_q: int32 [sequences + 1], the row of query at which each sequence begins, and the end of the last.
        cu_seq_k: the same for key. None: each sequence has its own row of key, or its pages.
        max_q, max_k: lengths of the longest sequences, or more.
        return_aux: torch's AuxRequest, or flexattn's without max_scores. With lse=True the result is (out, lse), lse
            [Hq, T_q] float32.
        scale: factor of the scores before score_mod, 1 / sqrt(D) if None.
        window_size: (left, right), how many keys before and after its own a query attends to, -1 for all. The last
            query and the last key of a sequence are aligned. (-1, 0) is causal.
        enable_gqa: let groups of Hq // Hkv query heads share a key head.
        seqused_k: int32 [sequences], number of keys of each sequence that are used; None: all.
        block_table: int32 [sequences, pages], as in flex_attention. Requires seqused_k.
        num_splits: 1: bits of a row do not depend on other sequences, as with kernel_options={"BATCH_INVARIANT": True}.
            This pads the sequences. Other numbers are the splits of the keys where these are split (SPLIT_KV).
        score_mod, mask_mod: with b the sequence, and q_idx and kv_idx positions in the sequence, from 0 on.
        sink, dropout_p, kernel_options: as in flex_attention.
        kv_layout: as in flex_attention.

    Returns:
        [T_q, Hq, Dv]. Rows without keys are 0, and so are rows after the last sequence, whose lse is -inf. All
        derivatives that flex_attention has. For gradients on a GPU, the rows of query after the last sequence must be
        finite.

    Raises ArgumentError for wrong lengths: on the CPU. On a GPU, a device-side assertion names cu_seq_q or cu_seq_k.

    Example:
        >>> import torch
        >>> query = key = value = torch.randn(7, 2, 16)  # sequences of 4 and 3 tokens
        >>> cu_seq = torch.tensor([0, 4, 7], dtype=torch.int32)
        >>> varlen_attn(query, key, value, cu_seq, cu_seq, 4, 4, window_size=(-1, 0)).shape
        torch.Size([7, 2, 16])
    """
    if unknown:
        refuse_unknown(varlen_attn, unknown)
    if return_aux is not None and not hasattr(return_aux, "lse"):
        fix = "Write return_aux=AuxRequest(lse=True)."
        raise DtypeError(message("return_aux", f"a {type(return_aux).__name__}", "an AuxRequest", fix))
    if getattr(return_aux, "max_scores", False):
        fix = "Only flex_attention returns the row maxima."
        raise UnsupportedError(message("return_aux", "max_scores=True", "AuxRequest(lse=True)", fix))
    given = _Given(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa, seqused_k, block_table,
        score_mod, mask_mod, sink, dropout_p, _options(kernel_options, num_splits), kv_layout,
    )  # fmt: skip
    _check_ranks(given)
    _check_keys(given)
    invariant = given.kernel_options.get("BATCH_INVARIANT") is True
    if given.cu_seq_k is None or given.block_table is not None or invariant:
        out, lse = _padded(given)
    else:
        out, lse = _packed(given)
        if return_aux is not None and return_aux.lse and sink is not None:
            lse = _without_rows_after(lse, cu_seq_q)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn_out(out: Tensor, query: Tensor, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Write the result of `varlen_attn` into `out`, [T_q, Hq, Dv], and return what varlen_attn returns.

    The result is computed first and copied, so this saves no memory. It has no gradient.

    Example:
        >>> import torch
        >>> query = torch.randn(7, 2, 16)
        >>> cu_seq = torch.tensor([0, 4, 7], dtype=torch.int32)
        >>> out = torch.empty_like(query)
        >>> varlen_attn_out(out, query, query, query, cu_seq, cu_seq, 4, 4) is out
        True
    """
    with torch.no_grad():
        found = varlen_attn(query, *args, **options)
    result, lse = found if isinstance(found, tuple) else (found, None)
    if not isinstance(out, Tensor) or out.shape != result.shape or out.dtype != result.dtype:
        what = f"{out.dtype} {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        fix = "Pass torch.empty of this shape and dtype."
        raise ArgumentError(message("out", what, f"{result.dtype} {list(result.shape)}", fix))
    out.copy_(result)
    return out if lse is None else (out, lse)


class _Given(NamedTuple):  # Dynamo traces it
    """The arguments of varlen_attn."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    max_q: int
    max_k: int
    scale: float | None
    window_size: tuple[int, int]
    enable_gqa: bool
    seqused_k: Tensor | None
    block_table: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | None
    sink: Tensor | float | None
    dropout_p: float
    kernel_options: dict[str, object]
    kv_layout: KVLayout


def _options(kernel_options: Mapping[str, object] | None, num_splits: int | None) -> dict[str, object]:
    """Return kernel_options with num_splits as one of them."""
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        found, fix = f"a {type(kernel_options).__name__}", "See FlexKernelOptions."
        raise DtypeError(message("kernel_options", found, "a dict", fix))
    options = dict(kernel_options or {})
    if num_splits is None:
        return options
    if not isinstance(num_splits, int) or isinstance(num_splits, bool) or num_splits < 0:
        raise ArgumentError(message("num_splits", repr(num_splits), "an int from 0 on, or None", "0 is None."))
    if num_splits == 1:
        return {"BATCH_INVARIANT": True, **options}
    return {"SPLIT_KV": num_splits, **options} if num_splits else options


def _check_ranks(given: _Given) -> None:
    pages = given.block_table is not None
    if pages and not isinstance(given.block_table, Tensor):
        found, fix = f"a {type(given.block_table).__name__}", "Pass an int32 tensor [sequences, pages]."
        raise DtypeError(message("block_table", found, "a torch.Tensor", fix))
    if isinstance(given.block_table, Tensor) and given.block_table.dim() != 2:
        found = f"shape {list(given.block_table.shape)}"
        raise ArgumentError(message("block_table", found, "[sequences, pages]", "Reshape it."))
    dims = 3 if given.cu_seq_k is not None and not pages else 4
    what = "[T_k, Hkv, D]" if dims == 3 else "pages of 4 dims" if pages else "[sequences, N, Hkv, D]"
    for name, x, rank, expected in (
        ("query", given.query, 3, "[T_q, Hq, D]"), ("key", given.key, dims, what), ("value", given.value, dims, what),
    ):  # fmt: skip
        if not isinstance(x, Tensor):
            raise DtypeError(message(name, f"a {type(x).__name__}", "a torch.Tensor", "Pass a tensor."))
        if x.dim() != rank:
            raise ArgumentError(message(name, f"shape {list(x.shape)}", expected, "Reshape it."))
    if not pages and given.kv_layout != "NHD":
        fix = "Leave it out: it describes pages."
        raise ArgumentError(message("kv_layout", repr(given.kv_layout), "a block_table with it", fix))
    if pages and given.seqused_k is None:
        fix = "Pass the number of tokens of each sequence: its last page may not be full."
        raise ArgumentError(message("seqused_k", "None", "a tensor with block_table", fix))


def _check_keys(given: _Given) -> None:
    """Check the rows of value and the sequences of key, before key and value are gathered."""
    key, value, cu = given.key, given.value, given.cu_seq_q
    if given.block_table is not None:
        return
    if given.cu_seq_k is not None and value.size(0) != key.size(0):
        fix = "Give each key its value."
        raise ArgumentError(message("value", f"{value.size(0)} rows", f"those of key, {key.size(0)}", fix))
    if given.cu_seq_k is None and isinstance(cu, Tensor) and cu.dim() == 1 and key.size(0) != cu.size(0) - 1:
        fix = "Give each sequence its keys: key.expand(sequences, -1, -1, -1) if they share them."
        raise ArgumentError(message("key", f"{key.size(0)} sequences", f"those of cu_seq_q, {cu.size(0) - 1}", fix))


def _packed(given: _Given) -> tuple[Tensor, Tensor]:
    """Compute the sequences as one row of a batch, with a mask that separates them."""
    arguments = _arguments(given, given.query, given.key, given.value, _sequences(given))
    return traced_rows(*arguments) if torch.compiler.is_dynamo_compiling() else attend_rows(Call(*arguments))


def _without_rows_after(lse: Tensor, cu_seq_q: Tensor) -> Tensor:
    """Return lse [Hq, T_q] with -inf in the rows after the last sequence, where the kernels write the sink."""
    return torch.where(torch.arange(lse.size(1), device=lse.device) < cu_seq_q[-1], lse, -torch.inf)


def _arguments(given: _Given, query: Tensor, key: Tensor, value: Tensor, layout: Any) -> tuple[Any, ...]:
    """Return the arguments of a Call. Dynamo traces this function."""
    return (
        query, key, value, given.score_mod, None, given.scale, given.enable_gqa, given.kernel_options, given.sink,
        given.dropout_p, False, layout,
    )  # fmt: skip


def _sequences(given: _Given) -> PackedArguments:
    assert given.cu_seq_k is not None
    return PackedArguments(
        given.cu_seq_q, given.cu_seq_k, given.max_q, given.max_k, given.window_size, given.mask_mod, None,
        given.seqused_k,
    )  # fmt: skip


def _padded(given: _Given) -> tuple[Tensor, Tensor]:
    """Compute the sequences as rows of a batch, padded to max_q."""
    query, cu, columns = given.query, given.cu_seq_q, _columns(given)
    T_q, sequences = query.size(0), cu.size(0) - 1
    M = min(max(given.max_q, 1), T_q)
    key, value, used = _keys_by_sequence(given)
    whole = _are_all(cu, M, T_q)
    if whole:
        padded = query.unflatten(0, (sequences, M))
    else:
        rows = cu[:-1, None] + torch.arange(M, device=cu.device)
        own = rows < cu[1:, None]  # the others are 0: a NaN of another sequence would reach the gradient of a key
        padded = torch.where(own[..., None, None], query[rows.clamp(max=T_q - 1).long()], 0.0)
    N = key.size(2) if given.block_table is None else 0
    if given.block_table is not None:
        N = given.block_table.size(1) * key.size(1 if given.kv_layout == "NHD" else 2)
    mask_mod = _mask_mod(given, used, N, whole)
    layout = LayoutArguments(used, None, None, given.block_table, given.kv_layout, mask_mod=mask_mod)
    arguments = _arguments(given, padded.transpose(1, 2), key, value, None if layout.is_empty else layout)
    compiling = torch.compiler.is_dynamo_compiling()
    found, found_lse, _ = traced_call(*arguments) if compiling else attend_call(Call(*arguments))
    out, lse = found.transpose(1, 2), found_lse.transpose(1, 2)  # [sequences, M, Hq, Dv], [..., Hq]
    if whole:
        return out.flatten(0, 1), lse.flatten(0, 1).mT
    sequence, position = columns[0, :T_q].long(), columns[1, :T_q].long()
    exists = torch.arange(T_q, device=cu.device) < cu[-1]
    out = torch.where(exists[:, None, None], out[sequence, position], 0.0)
    return out, torch.where(exists[:, None], lse[sequence, position], -torch.inf).mT


def _are_all(cu: Tensor, M: int, T_q: int) -> bool:
    """Return whether each sequence is known to have M rows. The host knows no lengths on a GPU, and none in a graph."""
    if torch.compiler.is_dynamo_compiling() or is_recording() or not cu.is_cpu or has_no_values(cu):
        return False
    return T_q == (cu.size(0) - 1) * M and bool((cu.diff() == M).all())


def _columns(given: _Given) -> Tensor:
    """Return the columns of the Packing of the sequences, checked."""
    query, key, cu = given.query, given.key, given.cu_seq_q
    one_row = query.transpose(0, 1)[None]
    packed = PackedArguments(cu, cu, given.max_q, given.max_q, given.window_size)
    one_row_of_key, T_k = one_row, query.size(0)
    if given.cu_seq_k is not None and given.block_table is None:
        packed, one_row_of_key, T_k = _sequences(given), key.transpose(0, 1)[None], key.size(0)
    check_packed_forms(packed._replace(seqused_k=given.seqused_k), one_row, one_row_of_key)
    return pack_rows(packed, query.size(0), T_k)


def _keys_by_sequence(given: _Given) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return key and value with a row per sequence (or as pages), and the used lengths."""
    if given.block_table is not None:
        return given.key, given.value, given.seqused_k
    if given.cu_seq_k is None:
        return given.key.transpose(1, 2), given.value.transpose(1, 2), given.seqused_k
    cu = given.cu_seq_k
    T_k = given.key.size(0)
    rows = (cu[:-1, None] + torch.arange(min(given.max_k, T_k), device=cu.device)).clamp(max=T_k - 1).long()
    key, value = given.key[rows].transpose(1, 2), given.value[rows].transpose(1, 2)
    return key, value, cu.diff() if given.seqused_k is None else given.seqused_k


def _mask_mod(given: _Given, used: Tensor | None, N: int, whole: bool) -> Mod | None:
    """Return the mask_mod of the window, of the call, and of the rows of each sequence. It is applied to all keys."""
    left, right = given.window_size
    window = None if left < 0 and right < 0 else band(left, right)
    lengths = given.cu_seq_q.diff()
    if window is not None:
        window = shifted_mask(window, (N - lengths if used is None else used - lengths).int())
    # Mods may index a tensor that has no elements for the rows of the padding.
    has_mods = given.score_mod is not None or given.mask_mod is not None
    rows = queries_before(lengths) if has_mods and not whole else None
    asked: list[Any] = [mod for mod in (rows, window, given.mask_mod) if mod is not None]
    return and_masks(*asked) if asked else None
