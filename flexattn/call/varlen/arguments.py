"""arguments: the arguments of packed sequences -> Packed: checked, with their packing and block lists."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.arguments import as_int, fix_of_int
from flexattn.call.layout import check_integers
from flexattn.call.varlen.block_lists import mask_of_rows
from flexattn.call.varlen.memory import Memory
from flexattn.call.varlen.mods import mask_at_rows, packed_mask
from flexattn.call.varlen.packing import LONGEST, Packing, packing_of
from flexattn.errors import ArgumentError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.transforms import outside

packings, masks = Memory(), Memory()
Masks = dict[object, tuple[BoundMod, BlockMask]]  # packed masks without mask_mod, and their lists


class PackedArguments(NamedTuple):
    """The arguments of `varlen_attn` that describe packed sequences, unchecked."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    window_size: tuple[int, int] = (-1, -1)
    mask_mod: Any = None
    seqused_q: Tensor | None = None  # rows of query from there on are holes, without keys
    seqused_k: Tensor | None = None

    def in_ints(self) -> PackedArguments:
        """Return them with max_q and max_k as ints, if one is an integer of numpy."""
        max_q, max_k = as_int(self.max_q), as_int(self.max_k)
        if max_q is None or max_k is None or type(self.max_q) is type(self.max_k) is int:
            return self
        return self._replace(max_q=max_q, max_k=max_k)


def rows_in(x: Tensor) -> int:
    """Return the rows of [rows, H, D] or [1, H, rows, D]."""
    return x.size(0 if x.dim() == 3 else 2)


def batch_of_rows(x: Tensor) -> Tensor:
    """Return [rows, H, D] as [1, H, rows, D]."""
    return x.transpose(0, 1)[None]


def rows_of_batch(x: Tensor) -> Tensor:
    """Return [1, H, rows, D] as [rows, H, D]."""
    return x.squeeze(0).transpose(0, 1)  # the backward of [0] would copy


def check_packed(given: PackedArguments, query: Tensor, key: Tensor) -> None:
    """Check lengths and offsets against query [1, Hq, T_q, D] and key [1, Hkv, T_k, D]."""
    check_packed_forms(given, query, key)
    check_packed_values(given, query.size(2), key.size(2), query.size(1), key.size(1))


def check_packed_forms(given: PackedArguments, query: Tensor, key: Tensor) -> None:
    """Check all but the values of the tensors, which may be fake."""
    for name, cu, rows in (("cu_seq_q", given.cu_seq_q, query.size(2)), ("cu_seq_k", given.cu_seq_k, key.size(2))):
        check_integers(name, cu, query, 1)
        if cu.size(0) < 2 or cu.size(0) != given.cu_seq_q.size(0):
            found = f"{cu.size(0)} entries"
            expected = "one more than sequences, at least 2" if name == "cu_seq_q" else f"{given.cu_seq_q.size(0)}"
            raise ArgumentError(message(name, found, expected, "Give 0 and the end of each sequence."))
        if rows > LONGEST:
            fix = "Split the batch."
            raise ArgumentError(
                message("query" if name == "cu_seq_q" else "key", f"{rows} rows", f"at most {LONGEST}", fix)
            )
    check_longest("max_q", given.max_q)
    check_longest("max_k", given.max_k)
    check_window(given.window_size)
    if given.seqused_k is not None:
        check_integers("seqused_k", given.seqused_k, query, 1)
        if given.seqused_k.size(0) != given.cu_seq_k.size(0) - 1:
            found, expected = f"shape {list(given.seqused_k.shape)}", f"[{given.cu_seq_k.size(0) - 1}]"
            raise ArgumentError(message("seqused_k", found, expected, "Give one length per sequence."))


def check_longest(name: str, most: Any) -> None:
    """Check max_q or max_k, which may be a symbol."""
    is_int = isinstance(most, (int, torch.SymInt)) and not isinstance(most, bool)  # Dynamo: a symbol is an int
    size = most if is_int else as_int(most)
    if size is None or size < 0:
        fix = fix_of_int(name, most, "Pass an int.")
        raise ArgumentError(message(name, repr(most), "the length of the longest sequence", fix))


def check_packed_values(given: PackedArguments, T_q: int, T_k: int, Hq: int = 0, Hkv: int = 0) -> None:
    """Check values on the CPU. On a GPU a kernel of `packing_of` asserts them, which the host does not wait for.

    The heads are for messages: they may be the rows.
    """
    _check_ascending("cu_seq_q", given.cu_seq_q, T_q, Hq)
    _check_ascending("cu_seq_k", given.cu_seq_k, T_k, Hkv)
    for name, most, cu in (("max_q", given.max_q, given.cu_seq_q), ("max_k", given.max_k, given.cu_seq_k)):
        longest = int(cu.diff().max()) if cu.is_cpu else 0
        if longest > most:
            fix = f"Pass {name}={longest}, or any larger number."
            raise ArgumentError(message(name, most, f"at least the length of the longest sequence, {longest}", fix))
    if given.seqused_k is not None:
        _check_used(given.seqused_k, given.cu_seq_k)


def check_window(window: Any) -> None:
    """Check window_size: how many keys before and after its own a query attends to, -1 for all."""
    good = isinstance(window, (tuple, list)) and len(window) == 2
    if not good or any(not isinstance(x, int) or isinstance(x, bool) or x < -1 for x in window):
        fix = "(-1, 0) is causal, (255, 0) a causal window of 256."
        raise ArgumentError(message("window_size", repr(window), "two ints from -1 on", fix))


def _check_ascending(name: str, cu: Tensor, rows: int, heads: int) -> None:
    if cu.is_cpu:
        first, last, ascends = int(cu[0]), int(cu[-1]), bool((cu.diff() >= 0).all())
        if first != 0 or last > rows or not ascends:
            found = (
                f"values that start at {first}" if first else f"an end at {last}" if ascends else "descending values"
            )
            fix = "Pass the cumulative sum of the lengths, with 0 in front."
            if ascends and first == 0 and last <= heads:
                fix = (
                    "query, key and value are [T, H, D]. If yours are [H, T, D], pass query.transpose(0, 1) and so on, "
                    "and transpose the output back."
                )
            raise ArgumentError(message(name, found, f"ascending values from 0 to at most {rows}", fix))


def assertions(T_q: int, T_k: int) -> tuple[str, str] | None:
    """Return messages of assertions about cu_seq_q and cu_seq_k; None in a CUDA graph, where nothing is asserted."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return (
        f"varlen_attn: cu_seq_q must ascend from 0 to at most {T_q}",
        f"varlen_attn: cu_seq_k must ascend from 0 to at most {T_k}",
    )


def _check_used(used: Tensor, cu: Tensor) -> None:
    if used.is_cpu and bool(((used < 0) | (used > cu.diff())).any()):
        fix = "A sequence cannot use more keys than it has."
        raise ArgumentError(message("seqused_k", "an entry out of range", "0 to the lengths in cu_seq_k", fix))


@frozen(eq=False)
class Packed:
    """The checked arguments of packed sequences."""

    packing: Packing
    window: tuple[int, int]
    longest: int  # no sequence has more queries, or keys
    used_rows: Tensor | None  # bool [T_k]: which rows of key hold a token that is used; None: all
    kept: Masks = field(default_factory=dict)

    @staticmethod
    def of(given: PackedArguments, query: Tensor, key: Tensor) -> Packed:
        """Check the arguments and compute the packing, once for the same tensors."""
        check_packed(given, query, key)
        given = given.in_ints()
        used_q, used_k = given.seqused_q, given.seqused_k
        tensors = tuple(t for t in (given.cu_seq_q, given.cu_seq_k, used_q, used_k) if t is not None)
        T_q, T_k = query.size(2), key.size(2)

        def make() -> tuple[Packing, Tensor | None, Masks]:
            packing = packing_of(given.cu_seq_q, given.cu_seq_k, used_q, used_k, (T_q, T_k), assertions(T_q, T_k))
            with outside(), torch.no_grad():
                return packing, None if used_k is None else used_rows(given.cu_seq_k, used_k, T_k), {}

        packing, rows, kept = packings.get(_sizes_of(given, (T_q, T_k)), tensors, make)
        window: Any = tuple(given.window_size)
        return Packed(packing, window, max(given.max_q, given.max_k), rows, kept)

    @staticmethod
    def recalled(given: PackedArguments, query: Tensor, key: Tensor) -> Packed | None:
        """Return the packing, without checks if it is known; None for calls with used lengths.

        `query` and `key` may also be [rows, H, D].
        """
        window = given.window_size
        if given.seqused_q is not None or given.seqused_k is not None:
            return None
        if type(window) is not tuple or [type(x) for x in (*window, given.max_q, given.max_k)] != [int] * 4:
            plain = given.in_ints()
            return None if plain is given else Packed.recalled(plain, query, key)
        if not isinstance(given.cu_seq_q, Tensor) or not isinstance(given.cu_seq_k, Tensor):
            return None
        lengths = rows_in(query), rows_in(key)
        found = packings.known(_sizes_of(given, lengths), (given.cu_seq_q, given.cu_seq_k))
        if found is not None:
            packing, _, kept = found[0]
            return Packed(packing, window, max(given.max_q, given.max_k), None, kept)
        return Packed.of(given, *[batch_of_rows(x) if x.dim() == 3 else x for x in (query, key)])

    def tensors_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value with 0 in rows that are not used."""
        return (key, value) if self.used_rows is None else without_unused(key, value, self.used_rows)

    def masked(
        self, mask_mod: BoundMod | None, lengths: tuple[int, int], H: int, both: bool
    ) -> tuple[BoundMod, BlockMask]:
        """Return the packed mask and its block lists. Without mask_mod they are found without looking at tensors."""
        key = self.window, H, both
        found = self.kept.get(key) if mask_mod is None else None
        if found is None:
            mask = packed_mask(mask_mod, self.packing, self.window)
            found = mask, self.blocks_of(mask, lengths, H, both)
            if mask_mod is None:
                self.kept[key] = found
        return found

    def blocks_of(self, mask: BoundMod, lengths: tuple[int, int], H: int, both: bool) -> BlockMask:
        """Return the block lists of a packed mask, computed once for the same tensors."""
        window = self.window if mask.graph == mask_at_rows(None, self.window) else None
        wanted = lengths, H, both, self.longest
        make = partial(mask_of_rows, mask, self.packing, window, *wanted)
        return masks.get((mask.graph, mask.numbers, *wanted), mask.captures, make)


def _sizes_of(given: PackedArguments, lengths: tuple[int, int]) -> tuple[object, ...]:
    """Return what the checks and the packing depend on besides tensors."""
    return *lengths, given.seqused_q is None, given.seqused_k is None, given.max_q, given.max_k


def used_rows(cu: Tensor, used: Tensor, rows: int) -> Tensor:
    """Return bool [rows]: which rows of key hold a token that is used."""
    row = torch.arange(rows, dtype=torch.int32, device=cu.device)
    index = torch.searchsorted(cu[1:], row, right=True)
    last = cu.size(0) - 2
    exists, index = index <= last, index.clamp(max=last)
    return exists & (row - cu[index] < used[index])


def without_unused(key: Tensor, value: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with 0 in rows that are not used. They may be NaN, and share tiles with used rows."""
    unused = ~used[:, None]
    return key.masked_fill(unused, 0.0), value.masked_fill(unused, 0.0)
