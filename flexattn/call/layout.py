"""layout: where the keys of each sequence are stored, and at which positions its queries are.

By default sequence b has all N keys of its batch entry, and its queries are at positions 0 to M - 1. A Layout replaces
these constants by int32 tensors on the device, so a cache grows without a new mask, a compilation or a host wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flexattn.call.unknown_arguments import MISSING
from flexattn.errors import ArgumentError, DeviceError, DtypeError, MaskError, UnsupportedError, message
from flexattn.graph.nodes import short_dtype
from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.lasting import cached_on_device
from flexattn.torch_state.subclasses import check_plain, has_no_values
from flexattn.torch_state.transforms import is_batched, outside

KVLayout = Literal["NHD", "HND"]
SMALLEST_PAGE = 16  # tokens
FARTHEST = INDEX_LIMIT // 2  # offset; sums of it and indices stay below 2**31


class LayoutArguments(NamedTuple):
    """The arguments of flex_attention that describe sequences, unchecked."""

    seqused_k: Tensor | None = None
    q_offsets: Tensor | None = None
    kv_positions: Tensor | None = None
    block_table: Tensor | None = None
    kv_layout: KVLayout = "NHD"
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    mask_mod: Any = None  # of a call without a block_mask: it decides in all blocks

    @property
    def is_empty(self) -> bool:
        """Whether the call does not use them."""
        return self.kv_layout == "NHD" and self.mask_mod is None and all(x is None for x in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self[:4], self.k_descale, self.v_descale)


@frozen(eq=False)
class Layout:
    """The checked layout of a call. Tensors are contiguous int32, descales float32; None means the default."""

    seqused_k: Tensor | None = None  # [B], number of keys of each sequence
    q_offsets: Tensor | None = None  # [B], position of the first query of each sequence
    kv_positions: Tensor | None = None  # [B or 1, N], position of the token in each slot, negative for an empty slot
    block_table: Tensor | None = None  # [B, pages], the page with keys i * page_size to (i + 1) * page_size - 1
    k_descale: Tensor | None = None  # [Hkv] or [pages, Hkv], what float8 keys are multiplied by
    v_descale: Tensor | None = None
    page_size: int = 0  # 0 without a block_table
    capacity: int = 0  # the most keys of a sequence

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that are given."""
        return tuple(name for name in _TENSORS if getattr(self, name) is not None)

    @property
    def is_quantized(self) -> bool:
        """Whether key and value are float8."""
        return self.k_descale is not None

    @property
    def has_page_descales(self) -> bool:
        """Whether a descale is given by page and head, and not only by head."""
        return any(x is not None and x.dim() == 2 for x in (self.k_descale, self.v_descale))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def read_by_engines(self, query: Tensor, lengths: tuple[int, int] | None) -> Layout | None:
        """Return what engines read besides the mods, which are already at positions; None for nothing.

        `lengths` are those of the mask: N is at most its second. If it has more rows than query, the rows need an
        offset.
        """
        offsets = self.q_offsets if lengths is not None and self.kv_positions is None else None
        if offsets is None and lengths is not None and lengths[0] != query.size(2):
            offsets = _zeros(query.size(0), query.device)
        if offsets is None and self.seqused_k is None and self.block_table is None and not self.is_quantized:
            return None
        most = self.capacity if lengths is None else min(self.capacity, lengths[1])
        return replace(self, q_offsets=offsets, kv_positions=None, capacity=most)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Layout:
        """Return the layout with other tensors, in the order of `tensors`."""
        return replace(self, **dict(zip(self.names, tensors, strict=True)))


@cached_on_device
def _zeros(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), outside():
        return torch.zeros(count, dtype=torch.int32, device=device)


_DESCALES = ("k_descale", "v_descale")
_TENSORS = ("seqused_k", "q_offsets", "kv_positions", "block_table", *_DESCALES)
FLOAT8 = torch.float8_e4m3fn


def paged(key: object, value: object, given: LayoutArguments) -> tuple[Any, Any]:
    """Return key and value as [pages, Hkv, page_size, D], if there is a block_table."""
    if given.block_table is None:
        if given.kv_layout != "NHD":
            fix = "Leave it out: without pages, keys are [B, Hkv, N, D]."
            raise ArgumentError(message("kv_layout", repr(given.kv_layout), "a block_table with it", fix))
        return key, value
    if given.kv_layout not in get_args(KVLayout):
        fix = "NHD is [pages, page_size, Hkv, D], HND is [pages, Hkv, page_size, D]."
        raise ArgumentError(message("kv_layout", repr(given.kv_layout), "'NHD' or 'HND'", fix))
    if not isinstance(key, Tensor) or not isinstance(value, Tensor):
        name, x = ("value", value) if isinstance(key, Tensor) else ("key", key)
        raise DtypeError(message(name, f"a {type(x).__name__}", "a torch.Tensor", "Pass a tensor of pages."))
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 4:
            found = f"shape {list(tensor.shape)}"
            raise ArgumentError(message(name, found, "4 dimensions, pages first", "See kv_layout."))
    return (key, value) if given.kv_layout == "HND" else (key.transpose(1, 2), value.transpose(1, 2))


_PAGES = "With a block_table, key is [pages, page_size, Hkv, D], or [pages, Hkv, page_size, D] with kv_layout='HND'."


def check_pages(query: object, key: Tensor, value: Tensor) -> None:
    """Check that key and value, [pages, Hkv, page_size, D], are pages, as many of one as of the other."""
    page_size = key.size(2)
    if page_size < SMALLEST_PAGE or page_size & (page_size - 1):
        fix = f"{_PAGES} Choose pages of 16, 32, 64, ... tokens."
        raise ArgumentError(message("key", f"pages of {page_size}", "a power of two from 16 on", fix))
    if isinstance(query, Tensor) and query.dim() == 4 and key.size(1) > query.size(1):
        fix = f"{_PAGES} Leave the block_table out if key is [B, Hkv, N, D]."
        raise ArgumentError(message("key", f"{key.size(1)} heads", f"at most those of query, {query.size(1)}", fix))
    if key.size(0) == 0:
        raise ArgumentError(message("key", "no pages", "at least one, as there is a block_table", "Allocate pages."))
    if key.size(0) != value.size(0):
        fix = "One page holds the keys and the values of the same tokens."
        raise ArgumentError(message("value", f"{value.size(0)} pages", f"those of key, {key.size(0)}", fix))


def check_layout(given: LayoutArguments, query: Tensor, key: Tensor) -> Layout:
    """Check the arguments. `key` is [B or 1, Hkv, N, D] or, with a block_table, [pages, Hkv, page_size, D]."""
    layout = layout_of(given, query, key)
    _check_layout_values(layout, key)
    return layout


def layout_of(given: LayoutArguments, query: Tensor, key: Tensor) -> Layout:
    """Check all but the values of the tensors, which may be fake."""
    B = query.size(0)
    table, page_size, N = given.block_table, 0, key.size(2)
    if table is not None:
        table, page_size = check_integers("block_table", table, query, 2), key.size(2)
        if table.size(0) != B:
            fix = "Give one row of pages for each sequence."
            raise ArgumentError(message("block_table", f"{table.size(0)} rows", f"the batch of query, {B}", fix))
        N = table.size(1) * page_size
        if N > INDEX_LIMIT:
            fix = "Pass the columns that are used."
            raise ArgumentError(message("block_table", f"{N} tokens per sequence", f"at most {INDEX_LIMIT}", fix))
    used = offsets = positions = None
    if given.seqused_k is not None:
        used = check_integers("seqused_k", given.seqused_k, query, 1)
        _check_rows("seqused_k", used, (B,), "one length per sequence")
    if given.q_offsets is not None:
        offsets = check_integers("q_offsets", given.q_offsets, query, 1)
        _check_rows("q_offsets", offsets, (B,), "one offset per sequence")
    if given.kv_positions is not None:
        if table is not None:
            fix = "Pass one of them: pages hold their tokens in order."
            raise ArgumentError(message("kv_positions", "a tensor", "None with a block_table", fix))
        positions = check_integers("kv_positions", given.kv_positions, query, 2)
        if tuple(positions.shape) not in ((B, N), (1, N)):
            fix = "Give the position of the token in each slot of key."
            found = f"shape {list(positions.shape)}"
            raise ArgumentError(message("kv_positions", found, f"[{B}, {N}] or [1, {N}]", fix))
    k_descale, v_descale = (_check_descale(name, getattr(given, name), key, table is not None) for name in _DESCALES)
    return Layout(used, offsets, positions, table, k_descale, v_descale, page_size, N)


def _check_layout_values(layout: Layout, key: Tensor) -> None:
    used, table, N = layout.seqused_k, layout.block_table, layout.capacity
    if used is not None:
        what = "the length of key" if table is None else "the capacity of block_table"
        _check_values("seqused_k", used, 0, N, what)
    if layout.q_offsets is not None:
        _check_values("q_offsets", layout.q_offsets, 0, FARTHEST, "the largest position")
    if layout.kv_positions is not None:
        _check_values("kv_positions", layout.kv_positions, -(2**31), INDEX_LIMIT, "the largest position")
    if table is not None and table.is_cpu:
        read = table if used is None else table[torch.arange(table.size(1)) * layout.page_size < used[:, None]]
        _check_values("block_table", read, 0, key.size(0) - 1, "the last page of key")


def check_mask_layout(lengths: tuple[int, int], layout: Layout, M: int) -> None:
    """Check that a mask covers the positions of queries and keys: it was built for the capacity of the cache."""
    (rows, columns), N = lengths, layout.capacity
    if layout.kv_positions is not None:
        return  # only its mask_mod is used
    least = N if layout.page_size == 0 else N - layout.page_size + 1  # the last page need not be filled
    if columns < least or rows < M:
        fix = f"Build it once for all positions: create_block_mask(mask_mod, B, H, {max(M, N)}, {N})."
        found, expected = f"lengths {lengths}", f"at least ({M}, {least}), to cover queries and keys"
        raise MaskError(message("block_mask", found, expected, fix))


def check_positions(lengths: tuple[int, int], layout: Layout, M: int) -> None:
    """Check that a mask of these lengths covers the positions of all queries and the used keys."""
    rows, columns = lengths
    if layout.kv_positions is not None:
        return
    if layout.seqused_k is not None and columns < layout.capacity:
        _check_values("seqused_k", layout.seqused_k, 0, columns, f"the columns of block_mask, {columns}")
    if layout.q_offsets is not None:
        fix = (
            f"The rows of block_mask ({rows}) are positions, and query has {M} row{'s' * (M != 1)} for each sequence. "
        )
        if rows < columns + M - 1:
            fix += f"Build the mask with Q_LEN >= KV_LEN + M - 1, which is {columns + M - 1}."
        else:
            fix += f"The position of a query is below KV_LEN ({columns}): build the mask for more keys."
        _check_values("q_offsets", layout.q_offsets, 0, rows - M, "", fix)


def check_integers(name: str, x: Tensor, query: Tensor, dims: int) -> Tensor:
    """Return a contiguous int32 tensor on the device of the query."""
    if not isinstance(x, Tensor):
        fix = f"Pass torch.tensor({name}, dtype=torch.int32, device=query.device)."
        found = repr(x) if x is MISSING else f"a {type(x).__name__}"
        raise DtypeError(message(name, found, "a torch.Tensor", fix))
    if not has_no_values(query):
        check_plain(name, x)
    if not torch.compiler.is_dynamo_compiling() and is_batched(x):
        fix = "Call it for one entry after the other, or put the entries into the batch."
        found = "a tensor that differs between the entries of torch.vmap"
        raise UnsupportedError(message(name, found, "one for all entries", fix))
    if x.dtype != torch.int32:
        fix = f"Convert it once, outside of the loop: {name}.int()."
        raise DtypeError(message(name, short_dtype(x.dtype), "i32", fix))
    if x.device != query.device:
        fix = f"Move it: {name}.to(query.device)."
        raise DeviceError(message(name, f"device {x.device}", f"that of query, {query.device}", fix))
    if x.dim() != dims:
        raise ArgumentError(
            message(name, f"shape {list(x.shape)}", f"{dims} dimension{'s' * (dims > 1)}", "Reshape it.")
        )
    return x.contiguous()


def _check_descale(name: str, x: object, key: Tensor, paged: bool) -> Tensor | None:
    """Return a contiguous float32 tensor, [Hkv] or [pages, Hkv]."""
    if key.dtype != FLOAT8:
        if x is None:
            return None
        fix = "Leave it out: only float8 keys and values are multiplied by it."
        raise ArgumentError(message(name, "a tensor", f"None with {short_dtype(key.dtype)} key", fix))
    fix = "Pass the factor of each head: the largest absolute value / 448 if key was divided by that."
    if not isinstance(x, Tensor):
        raise DtypeError(message(name, f"a {type(x).__name__}", "a torch.Tensor with float8 key", fix))
    if not has_no_values(key):
        check_plain(name, x)
    if x.dtype != torch.float32:
        raise DtypeError(message(name, short_dtype(x.dtype), "f32", f"Convert it: {name}.float()."))
    if x.device != key.device:
        raise DeviceError(
            message(name, f"device {x.device}", f"that of key, {key.device}", f"Move it: {name}.to(...).")
        )
    pages, Hkv = key.shape[:2]
    if tuple(x.shape) != (Hkv,) and not (paged and tuple(x.shape) == (pages, Hkv)):
        expected = f"[{Hkv}]" + (f" or [{pages}, {Hkv}]" if paged else "")
        raise ArgumentError(message(name, f"shape {list(x.shape)}", expected, fix))
    refuse_learned(name, x)
    return x.contiguous()


def refuse_learned(name: str, x: Tensor, fix: str = "Detach it.") -> None:
    """Raise UnsupportedError for a tensor that would need a gradient, which the call does not compute."""
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(message(name, "a tensor that requires a gradient", "one that does not", fix))


def _check_rows(name: str, x: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(x.shape) != shape:
        raise ArgumentError(message(name, f"shape {list(x.shape)}", f"{list(shape)}", f"Give {what}."))


def _check_values(name: str, x: Tensor, low: int, high: int, what: str = "", fix: str = "") -> None:
    """Check values on the CPU. On a GPU this would wait: there kernels return NaN for a sequence with a wrong value."""
    if not x.is_cpu or x.numel() == 0:
        return
    least, most = (int(v) for v in torch.aminmax(x))
    if least < low or most > high:
        fix = (fix or f"Pass values up to {what}.") if most > high else f"Pass values from {low} on."
        found = f"an entry {most if most > high else least}"
        raise ArgumentError(message(name, found, f"entries from {low} to {high}", fix))
