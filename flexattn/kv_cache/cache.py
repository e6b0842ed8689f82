"""cache: PagedKVCache, keys and values of growing sequences in pages of one pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor

from flexattn.call.arguments import as_int, fix_of_int
from flexattn.call.layout import SMALLEST_PAGE, KVLayout, refuse_learned
from flexattn.call.unknown_arguments import refuse_unknown, refuses_unknown
from flexattn.errors import ArgumentError, CacheFullError, DeviceError, DtypeError, message
from flexattn.graph.nodes import short_dtype
from flexattn.graph.ranges import INDEX_LIMIT
from flexattn.kv_cache.append import FLOAT8, Pages, Tokens, append
from flexattn.kv_cache.page_pool import Changes, Need, PagePool
from flexattn.torch_state.lasting import is_capturing
from flexattn.torch_state.subclasses import check_plain
from flexattn.torch_state.transforms import outside
from flexattn.torch_state.uncompiled import uncompiled

_ORDER = "It is [B, heads, tokens, head_dim]: from [B, tokens, heads, head_dim] write {name}.transpose(1, 2)."
_NO_GRAD = "Call append under torch.no_grad(), or detach it."
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, FLOAT8)


class PagedKVCache:
    """Keys and values of growing sequences, in pages that sequences take from one pool as they need them.

    Pass it to flex_attention with `flex_attention(query, cache.key, cache.value, ..., **cache.arguments())`. Lengths,
    offsets and the page table are on the device and change in-place, so a step compiles nothing and does not wait. Make
    one cache for each layer of a model. One cache is used by one stream and one thread at a time.

    Args:
        sequences: how many sequences there may be at a time, the batch of the calls.
        max_tokens: the most tokens of a sequence. Together with `page_size` it sets the columns of the page table.
        pages: pages in the pool, for all sequences together.
        heads: heads of key and value, Hkv.
        head_dim: of key, D.
        page_size: tokens in a page, a power of two from 16 on.
        value_head_dim: of value, Dv; None: as key.
        dtype: of the pages. With float8_e4m3fn, pass k_descale and v_descale.
        device: of the pages; None: torch's default device.
        kv_layout: "NHD" stores [pages, page_size, Hkv, D], "HND" stores [pages, Hkv, page_size, D].
        k_descale, v_descale: float32 [Hkv], what stored float8 numbers are multiplied by.

    Attributes:
        key: the pages of keys, as flex_attention takes them with a block_table.
        value: the pages of values.
        block_table: int32 [sequences, columns], -1 where a sequence has no page.
        seqused_k: int32 [sequences], lengths of the sequences.
        q_offsets: int32 [sequences], lengths before the latest append: the position of the first of its tokens.

    Raises ArgumentError or DtypeError for arguments that do not fit together, and CacheFullError if there are too few
    pages. Nothing has changed then.

    Example:
        >>> import torch
        >>> from flexattn import PagedKVCache, create_block_mask, flex_attention, mods
        >>> cache = PagedKVCache(2, 256, pages=16, heads=4, head_dim=32, dtype=torch.float32, device="cpu")
        >>> causal = create_block_mask(mods.causal, None, None, 256, 256, device="cpu")
        >>> k = v = torch.randn(2, 4, 100, 32)
        >>> _ = cache.append(k, v, lengths=[100, 30])  # the prompts
        >>> q = k = v = torch.randn(2, 4, 1, 32)
        >>> _ = cache.append(k, v)
        >>> flex_attention(q, cache.key, cache.value, None, causal, **cache.arguments()).shape
        torch.Size([2, 4, 1, 32])
    """

    @refuses_unknown
    def __init__(
        self,
        sequences: int,
        max_tokens: int,
        *,
        pages: int,
        heads: int,
        head_dim: int,
        page_size: int = 16,
        value_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        kv_layout: KVLayout = "NHD",
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(PagedKVCache, unknown)
        sizes = {
            "sequences": sequences, "max_tokens": max_tokens, "pages": pages, "heads": heads, "head_dim": head_dim,
            "page_size": page_size, "value_head_dim": head_dim if value_head_dim is None else value_head_dim,
        }  # fmt: skip
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                fix = fix_of_int(name, size, f"Pass int({name})." if (as_int(size) or 0) > 0 else "Pass a size.")
                raise ArgumentError(message(name, repr(size), "an int from 1 on", fix))
        if page_size < SMALLEST_PAGE or page_size & (page_size - 1):
            fix = "Choose 16, 32, 64, ... tokens."
            raise ArgumentError(message("page_size", page_size, "a power of two from 16 on", fix))
        if max_tokens > INDEX_LIMIT - page_size:
            fix = "Keep fewer tokens."
            raise ArgumentError(message("max_tokens", max_tokens, f"at most {INDEX_LIMIT - page_size}", fix))
        if dtype not in _DTYPES:
            fix = "Choose bfloat16."
            raise DtypeError(message("dtype", dtype, ", ".join(map(str, _DTYPES)), fix))
        if kv_layout not in ("NHD", "HND"):
            raise ArgumentError(message("kv_layout", repr(kv_layout), "'NHD' or 'HND'", "See PagedKVCache."))
        self.page_size, self.max_tokens, self.kv_layout = page_size, max_tokens, kv_layout
        columns = -(-max_tokens // page_size)
        with torch.inference_mode(False), torch.no_grad(), outside():

            def integers(*shape: int, value: int = 0) -> Tensor:
                return torch.full(shape, value, dtype=torch.int32, device=device)

            shape = (pages, page_size, heads) if kv_layout == "NHD" else (pages, heads, page_size)
            self.key, self.value = (
                torch.empty(*shape, width, dtype=dtype, device=device) for width in (head_dim, sizes["value_head_dim"])
            )
            self.block_table = integers(sequences, columns, value=-1)
            self.seqused_k, self.q_offsets = integers(sequences), integers(sequences)
            arrived = integers(sequences)
        self.k_descale, self.v_descale = (
            _checked_scale(name, x, self.key, heads) for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
        )
        self._pages = Pages(
            self._by_token(self.key),
            self._by_token(self.value),
            self.block_table,
            self.seqused_k,
            self.q_offsets,
            arrived,
            self.k_descale,
            self.v_descale,
        )
        self._pool = PagePool(pages, sequences)
        # What the host knows of the lengths: exactly, unless numbers of tokens were on the device.
        self._least, self._most = [0] * sequences, [0] * sequences
        self._is_captured = False  # a CUDA graph appends, and may have been replayed since

    def _by_token(self, pages: Tensor) -> Tensor:
        """Return pages as [pages, page_size, Hkv, D]."""
        return pages if self.kv_layout == "NHD" else pages.transpose(1, 2)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without views: a pickle would give each its own memory."""
        return self.__dict__ | {"_pages": replace(self._pages, key=self.key, value=self.value)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        by_token = map(self._by_token, (self.key, self.value))
        self._pages = replace(self._pages, **dict(zip(("key", "value"), by_token, strict=True)))

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return len(self._pool.free)

    def __repr__(self) -> str:
        used = len(self._pool.uses) - self.free_pages
        lengths = ", ".join(str(x) if x == y else f"{x}..{y}" for x, y in zip(self._least, self._most, strict=True))
        return f"PagedKVCache({used} of {len(self._pool.uses)} pages of {self.page_size} tokens, lengths [{lengths}])"

    def arguments(self, sequences: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the keyword arguments with which flex_attention reads the cache, for these sequences or all."""
        found = {"seqused_k": self.seqused_k, "q_offsets": self.q_offsets, "block_table": self.block_table}
        if sequences is not None:
            rows = self._on_device(self._checked(sequences))
            found = {name: x.index_select(0, rows) for name, x in found.items()}
        scales = {} if self.k_descale is None else {"k_descale": self.k_descale, "v_descale": self.v_descale}
        return {**found, **scales, "kv_layout": self.kv_layout}

    @uncompiled
    def reserve(self, tokens: int | Sequence[int], sequences: Sequence[int] | None = None) -> None:
        """Take pages for this many more tokens of each sequence, so that as many can be appended without a change.

        Call it before a CUDA graph that appends is captured or replayed.
        """
        rows = self._checked(sequences)
        self._reserve(rows, _numbers("tokens", tokens, len(rows)))

    @uncompiled
    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        query: Tensor | None = None,
        lengths: int | Sequence[int] | Tensor | None = None,
        sequences: Sequence[int] | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = True,
    ) -> Tensor | None:
        """Append tokens to sequences by one kernel, after taking the pages that they need.

        Args:
            key: [B, Hkv, M, D], the new tokens of each sequence.
            value: [B, Hkv, M, Dv].
            query: [B, Hq, M, D] of the same tokens, to be rotated too. It is not stored.
            lengths: how many of the M tokens each sequence appends; None: all. With a tensor, int32 [B] on the device,
                pages are taken for M tokens. A GPU uses entries from 0 to M; others raise on the CPU.
            sequences: which sequences, in the order of key's batch; None: all.
            rotary_cos, rotary_sin: [positions, R / 2]. The first R columns of key and query are rotated by the angles
                of their positions. Positions beyond the last give NaN.
            rotary_interleaved: rotate columns (0, 1), (2, 3), ... and not (0, R / 2), (1, R / 2 + 1), ...

        Returns:
            The rotated query, or None without one.

        Raises CacheFullError if there are too few pages or a sequence would have more than max_tokens, and
        ArgumentError, DtypeError or DeviceError for tensors that do not fit. Nothing has changed then.
        """
        rows = self._checked(sequences)
        self._check_tokens(key, value, query, len(rows))
        cos, sin = self._check_rotary(rotary_cos, rotary_sin)
        if not isinstance(rotary_interleaved, bool):
            raise DtypeError(message("rotary_interleaved", repr(rotary_interleaved), "a bool", "Pass True or False."))
        M = key.size(2)
        counts, on_device = self._counts(lengths, len(rows), M)
        self._reserve(rows, counts)
        tokens = Tokens(
            key, value, query, None if sequences is None else self._on_device(rows), on_device, cos, sin,
            rotary_interleaved,
        )  # fmt: skip
        rotated = append(self._pages, tokens)
        exact = not isinstance(lengths, Tensor)
        for row, count in zip(rows, counts, strict=True):
            self._most[row] += count
            self._least[row] += count if exact else 0
        return rotated

    @uncompiled
    @torch.no_grad()
    def erase(self, sequences: Sequence[int] | None = None, keep: int | Sequence[int] = 0) -> None:
        """Remove the tokens of sequences from the `keep`-th on, and give their pages back."""
        self._refresh()
        rows = self._checked(sequences)
        kept = _numbers("keep", keep, len(rows))
        if any(n > self._least[row] for row, n in zip(rows, kept, strict=True)):
            self.synchronize()
        for row, n in zip(rows, kept, strict=True):
            if n > self._least[row]:
                fix = "Keep at most the tokens that it has."
                raise ArgumentError(message("keep", n, f"the length of sequence {row}, {self._least[row]}", fix))
        entries = []
        for row, n in zip(rows, kept, strict=True):
            columns = -(-n // self.page_size)
            entries += [(row, column, -1) for column in range(columns, len(self._pool.of[row]))]
            self._pool.shrink(row, columns)
            self._least[row] = self._most[row] = n
        self._apply(Changes(entries))
        self._set_lengths(rows, kept)

    @uncompiled
    @torch.no_grad()
    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Make empty sequences continue `source`. Pages are shared until one of the sequences writes to them."""
        self._refresh()
        (source,), rows = self._checked([source], "source"), self._checked(targets, "targets")
        if source in rows:
            raise ArgumentError(message("targets", rows, f"other sequences than source, {source}", "Leave it out."))
        for row in rows:
            if self._pool.of[row] or self._most[row]:
                fix = f"Remove its tokens and pages with erase([{row}])."
                raise ArgumentError(message("targets", f"{self._most[row]} tokens of {row}", "empty sequences", fix))
        if self._least[source] != self._most[source]:
            self.synchronize()
        length = self._least[source]
        columns = -(-length // self.page_size)
        needs = []
        if self._is_captured:  # replays write without asking
            needs = [Need(row, length // self.page_size, columns) for row in rows]
            short = len(rows) * (columns - length // self.page_size) - self.free_pages
            if short > 0:
                raise self._full(short)
        self._apply(self._pool.share(source, rows, columns))
        self._apply(self._pool.grow(needs))
        for row in rows:
            self._least[row] = self._most[row] = length
        self._set_lengths(rows, [length] * len(rows))

    @torch.no_grad()
    def synchronize(self) -> list[int]:
        """Wait for the device and return the lengths.

        Raises CacheFullError if a CUDA graph was replayed more often than there was room for. The lengths are then
        those before the first append without room, whose tokens are not in the cache.
        """
        found = self.seqused_k.tolist()
        full = [row for row, length in enumerate(found) if length < 0]
        lengths = [-length - 1 if length < 0 else length for length in found]
        self._least, self._most = list(lengths), list(lengths)
        if full:
            self._set_lengths(full, [lengths[row] for row in full])
            fix = "Call reserve for all tokens of the replays before the first one. Append the missing tokens again."
            raise CacheFullError(message("sequences", f"{full} without room in a CUDA graph", "reserved pages", fix))
        return lengths

    def _refresh(self) -> None:
        """Read the lengths from the device, if the host cannot know them."""
        if self._is_captured:
            self.synchronize()

    def _reserve(self, rows: list[int], tokens: list[int]) -> None:
        if is_capturing(self.key.device):
            self._is_captured = True
            for row, n in zip(rows, tokens, strict=True):
                if self._most[row] + n > len(self._pool.of[row]) * self.page_size:
                    fix = f"Call reserve({n}) before the capture, with the tokens of all replays."
                    room = len(self._pool.of[row]) * self.page_size - self._most[row]
                    raise CacheFullError(message("key", f"{n} tokens", f"at most {room}, which are reserved", fix))
            return
        self._refresh()
        needs = self._needs(rows, tokens)
        if self._exceeds(rows, tokens) or self._pool.missing(needs) > 0:
            if self._least != self._most:
                self.synchronize()
                needs = self._needs(rows, tokens)
            if row := self._exceeds(rows, tokens):
                fix = "Make the cache with a larger max_tokens, or erase tokens."
                found = f"{row[1]} tokens of sequence {row[0]}"
                raise CacheFullError(message("max_tokens", found, f"at most {self.max_tokens}", fix))
            if (short := self._pool.missing(needs)) > 0:
                raise self._full(short)
        self._apply(self._pool.grow(needs))

    def _needs(self, rows: list[int], tokens: list[int]) -> list[Need]:
        size = self.page_size
        return [
            Need(row, self._least[row] // size, -(-(self._most[row] + n) // size))
            for row, n in zip(rows, tokens, strict=True)
            if n
        ]

    def _exceeds(self, rows: list[int], tokens: list[int]) -> tuple[int, int] | None:
        """Return a sequence that would be too long, and its length."""
        lengths = ((row, self._most[row] + n) for row, n in zip(rows, tokens, strict=True))
        return next((found for found in lengths if found[1] > self.max_tokens), None)

    def _full(self, short: int) -> CacheFullError:
        fix = "Erase sequences, or make the cache with more pages."
        free = self.free_pages
        return CacheFullError(message("pages", f"{free + short} needed", f"at most {free}, which are free", fix))

    @torch.no_grad()
    def _apply(self, changes: Changes) -> None:
        """Copy pages and change the table, in the order of the current stream."""
        if changes.copies:
            old, new = self._on_device(list(zip(*changes.copies, strict=True)))
            for pages in (self.key, self.value):
                pages[new] = pages[old]
        if changes.entries:
            row, column, page = self._on_device(list(zip(*changes.entries, strict=True)))
            self.block_table[row, column] = page.int()

    def _set_lengths(self, rows: list[int], lengths: list[int]) -> None:
        where, new = self._on_device([rows, lengths])
        self.seqused_k[where] = new.int()
        self.q_offsets[where] = new.int()

    def _on_device(self, numbers: Any) -> Tensor:
        """Return int64 numbers on the device, without a wait."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.key.device, non_blocking=True)

    def _checked(self, sequences: Sequence[int] | None, name: str = "sequences") -> list[int]:
        """Return the sequences as a list."""
        most = len(self._most)
        if sequences is None:
            return list(range(most))
        fix, expected = "Pass a list of Python ints.", f"different ints from 0 to {most - 1}"
        if not isinstance(sequences, Iterable):
            raise ArgumentError(message(name, repr(sequences), expected, fix))
        rows = list(sequences)
        are_ints = all(isinstance(row, int) and not isinstance(row, bool) for row in rows)
        if not are_ints or not all(0 <= row < most for row in rows) or len(set(rows)) < len(rows):
            raise ArgumentError(message(name, rows, expected, fix))
        return rows

    def _check_tokens(self, key: object, value: object, query: object, B: int) -> None:
        Hkv, D, Dv = self._pages.key.size(2), self.key.size(-1), self.value.size(-1)
        wanted: dict[str, tuple[object, tuple[int | None, ...]]] = {
            "key": (key, (B, Hkv, None, D)),
            "value": (value, (B, Hkv, None, Dv)),
        }
        if query is not None:
            wanted["query"] = query, (B, None, None, D)
        M = key.size(2) if isinstance(key, Tensor) and key.dim() == 4 else None
        for name, (x, shape) in wanted.items():
            if not isinstance(x, Tensor):
                raise DtypeError(message(name, f"a {type(x).__name__}", "a torch.Tensor", "Pass a tensor."))
            check_plain(name, x)
            expected = [n if d != 2 else M for d, n in enumerate(shape)]
            if x.dim() != 4 or any(n not in (None, size) for n, size in zip(expected, x.shape, strict=True)):
                text = ", ".join("any" if n is None else str(n) for n in (shape if name == "key" else expected))
                fix = _ORDER.format(name=name)
                raise ArgumentError(message(name, f"shape {list(x.shape)}", f"[{text}]", fix))
            if x.device != self.key.device:
                fix = f"Move it: {name}.to(cache.key.device)."
                raise DeviceError(message(name, f"device {x.device}", f"that of the cache, {self.key.device}", fix))
            allowed = _DTYPES[:-1] if self.key.dtype == FLOAT8 else (self.key.dtype,)
            if x.dtype not in allowed:
                found, expected_dtype = short_dtype(x.dtype), " or ".join(map(short_dtype, allowed))
                fix = f"Cast it: {name}.to({allowed[0]})."
                if x.dtype in _DTYPES and self.key.dtype != FLOAT8:
                    fix = f"{fix[:-1]}, or make the cache with PagedKVCache(..., dtype={x.dtype})."
                raise DtypeError(message(name, found, f"{expected_dtype}, for this cache", fix))
            refuse_learned(name, x, _NO_GRAD)

    def _check_rotary(self, cos: object, sin: object) -> tuple[Tensor | None, Tensor | None]:
        if cos is None and sin is None:
            return None, None
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                found = "None" if x is None else str(getattr(x, "dtype", type(x).__name__))
                raise DtypeError(message(name, found, "a floating-point tensor", "Pass both tables."))
            D = self.key.size(-1)
            if x.dim() != 2 or 2 * x.size(1) > D or x.size(0) == 0 or x.size(1) == 0:
                expected = f"[positions, R / 2] with R up to the head dim, {D}"
                raise ArgumentError(message(name, f"shape {list(x.shape)}", expected, "See PagedKVCache.append."))
            if x.device != self.key.device:
                fix = f"Move it: {name}.to(cache.key.device)."
                raise DeviceError(message(name, f"device {x.device}", f"that of the cache, {self.key.device}", fix))
            refuse_learned(name, x, _NO_GRAD)
        assert isinstance(cos, Tensor) and isinstance(sin, Tensor)
        if cos.shape != sin.shape:
            fix = "Give both the same shape."
            raise ArgumentError(message("rotary_sin", f"shape {list(sin.shape)}", f"{list(cos.shape)}", fix))
        return cos, sin

    def _counts(self, lengths: Any, B: int, M: int) -> tuple[list[int], Tensor | None]:
        """Return the most tokens of each sequence, and the numbers on the device, None if they are all M."""
        if lengths is None:
            return [M] * B, None
        if isinstance(lengths, Tensor):
            if lengths.dtype != torch.int32 or tuple(lengths.shape) != (B,) or lengths.device != self.key.device:
                found = f"{short_dtype(lengths.dtype)} {list(lengths.shape)} on {lengths.device}"
                expected = f"i32 [{B}] on {self.key.device}"
                raise ArgumentError(message("lengths", found, expected, "Or pass a list of ints."))
            if lengths.is_cpu and bool(((lengths < 0) | (lengths > M)).any()):
                fix = "Append at most the tokens that key has."
                raise ArgumentError(message("lengths", lengths.tolist(), f"entries from 0 to {M}", fix))
            return [M] * B, lengths.contiguous()
        counts = _numbers("lengths", lengths, B)
        if any(n > M for n in counts):
            fix = "Append at most the tokens that key has."
            raise ArgumentError(message("lengths", max(counts), f"at most the length of key, {M}", fix))
        return counts, None if all(n == M for n in counts) else self._on_device(counts).int()


def _numbers(name: str, given: Any, count: int) -> list[int]:
    """Return one number for each sequence."""
    is_one = isinstance(given, Tensor) or not isinstance(given, Iterable)
    numbers: list[Any] = [given] * count if is_one else list(given)
    if len(numbers) != count or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
        fix = "Pass Python ints."
        raise ArgumentError(message(name, repr(given), f"an int from 0 on, or one for each of {count}", fix))
    return numbers


def _checked_scale(name: str, scale: object, key: Tensor, heads: int) -> Tensor | None:
    if key.dtype != FLOAT8:
        if scale is None:
            return None
        raise ArgumentError(
            message(name, "a tensor", f"None, as the cache is {short_dtype(key.dtype)}", "Leave it out.")
        )
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or tuple(scale.shape) != (heads,):
        found = "None" if scale is None else f"{getattr(scale, 'dtype', '')} {list(getattr(scale, 'shape', ()))}"
        fix = "Pass the largest absolute value of each head, divided by 448."
        raise ArgumentError(message(name, found, f"float32 [{heads}] for a float8 cache", fix))
    if scale.device != key.device:
        raise DeviceError(message(name, f"device {scale.device}", f"{key.device}", f"Move it: {name}.to(device)."))
    return scale.contiguous()
