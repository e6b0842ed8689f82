"""BlockMask: PyTorch's block-sparse mask, stored as runs of blocks."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream
from torch.utils._pytree import GetAttrKey

from flexattn.block_mask import page, picture, plot, stored, svg
from flexattn.block_mask.assigned import assigned_by, computed
from flexattn.block_mask.bits import MaskBits
from flexattn.block_mask.lists import check_transposed, lists_of, read_lists
from flexattn.block_mask.one_tensor import pack, savable
from flexattn.block_mask.pairs import Pairs, count_useful
from flexattn.block_mask.prepared import MaskForm, MaskNumbers, Origin, Prepared
from flexattn.block_mask.record import BuildCounts, CaptureRecord, Shell, lift, move
from flexattn.block_mask.runs import RunLists, Runs, run_lists_of
from flexattn.block_mask.slices import SlicedMod, as_tensor, offset_of, positions, sliced_length
from flexattn.errors import ArgumentError, DeviceError, IndexRangeError, MaskError, UnsupportedError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.frozen import FrozenMod, compact, freeze, thawed
from flexattn.layout import TiledGrid
from flexattn.mods.combine import noop_mask
from flexattn.torch_state.modes import undisturbed, unstored
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Lists = tuple[Tensor, Tensor]

NO_BITS = "its blocks were given, cut, moved or edited"


class InTiles(NamedTuple):
    """A mask of tokens in the order of tiles of a grid of two dims. Kernels read its lists and bits."""

    grid: TiledGrid
    mask: BlockMask


def _cut_to(mask: BlockMask, lengths: tuple[int, int]) -> None:
    """Change the lengths of a mask in place, or not at all if that fails."""
    lengths = _pair("seq_lengths", lengths, 0)
    ends = mask._grid[0] * mask.BLOCK_SIZE[0], mask._grid[1] * mask.BLOCK_SIZE[1]
    if any(new > end for new, end in zip(lengths, ends, strict=True)):
        fix = "Build a mask for these lengths with create_block_mask."
        raise MaskError(message("seq_lengths", lengths, f"at most {ends}, where the mask's blocks end", fix))
    if lengths == mask.seq_lengths:
        return
    kept = copy.copy(mask)
    if any(new > old for new, old in zip(lengths, mask.seq_lengths, strict=True)):
        kept._was_edited()
        kept.__dict__["seq_lengths"] = ends
    if lengths != kept.seq_lengths:
        kept = kept._adjust(*lengths)
    mask.__dict__.update(kept.__dict__ | {"build_counts": None, "reach": None})


def _refuse_block_size(mask: BlockMask, size: object) -> None:
    fix = "Build a mask with create_block_mask(..., BLOCK_SIZE=...)."
    found = f"{size} assigned to a mask with blocks of {mask.BLOCK_SIZE}"
    raise MaskError(message("BLOCK_SIZE", found, "no assignment, because the lists are in these blocks", fix))


class BlockMask(upstream.BlockMask):
    """Which blocks of queries and keys attend: full (every pair), partial (where mask_mod is true), or empty.

    It is a `torch.nn.attention.flex_attention.BlockMask`, with its arguments, fields and methods. The stored form is
    `kv_runs` (for each block of queries, runs of blocks of keys) and `q_runs` (the transpose, for the backward, or
    None). PyTorch's index lists are computed from them on each access.

    A mask built from a mask_mod raises an error when it is used after a value that its mask_mod reads has changed.
    Copies of the mask check what their own mask_mod reads. A pickle contains the captured values, and the mask that is
    loaded from it has a frozen mask_mod (`FrozenMod`). Flattening the mask as a pytree drops the check.

    >>> import torch
    >>> count, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 0], [0, 1]]]])
    >>> mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=128)
    >>> mask.shape, mask.sparsity()
    ((1, 1, 256, 256), 25.0)
    """

    # Queries, keys. Assigning fewer cuts the lists. Assigning more is possible up to the end of the last blocks. Such a
    # mask counts as user-supplied: its lists take precedence over mask_mod.
    seq_lengths: tuple[int, int] = assigned_by(_cut_to)
    BLOCK_SIZE: tuple[int, int] = assigned_by(_refuse_block_size)  # queries, keys
    _q_runs: RunLists | None
    _kv_runs: RunLists
    # A full block may extend past seq_lengths: only in user-supplied lists, or in rows at an offset (dense_form).
    full_overhangs: bool
    dq_write_order: Tensor | None
    dq_write_order_full: Tensor | None
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    build_counts: BuildCounts | None = None  # set by create_block_mask; None for any other mask
    # Programs take rows near each other at the same time, and these read about this many rows of the other side.
    # None: all of them, as with lists that are sorted by length.
    reach: int | None = None
    _bits: MaskBits | None = None
    _no_bits: str = NO_BITS  # why it has none
    _prepared: Prepared | None = None
    _slice_record: CaptureRecord | None = None  # of the mod of a slice, once the slice is prepared
    _for_hopper: BlockMask | None = None  # the same mask in the blocks that Hopper kernels read
    _in_tiles: InTiles | None = None  # the same mask in an order of tokens in which it has fewer blocks
    _counted: Any = None  # of a FlopCounterMode (engines/watched.py)
    _state: Any = None  # what repeated calls need of it: a MaskState (engines/mask_state.py)

    @uncompiled
    @undisturbed("BlockMask", hidden=True)
    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: int | tuple[int, int] = (128, 128),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        if dq_write_order_full is not None and dq_write_order is None:
            raise ArgumentError("dq_write_order_full requires dq_write_order: found None. Pass both or neither.")
        lengths, block_size = _pair("seq_lengths", seq_lengths, 0), _pair("BLOCK_SIZE", BLOCK_SIZE, 1)
        rows, columns = (-(-n // size) for n, size in zip(lengths, block_size, strict=True))
        partial, full = read_lists("kv", kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, rows, columns)
        if q_num_blocks is not None or q_indices is not None:
            found = read_lists("q", q_num_blocks, q_indices, full_q_num_blocks, full_q_indices, columns, rows)
            check_transposed(partial, full, found)
        self._fill(
            partial, full, lengths, block_size, mask_mod,
            batch_dims=tuple(kv_indices.shape[:-2]),
            widths=(kv_indices.shape[-1], None if full_kv_indices is None else full_kv_indices.shape[-1]),
            compute_q_blocks=q_num_blocks is not None,
        )  # fmt: skip
        self.full_overhangs = full is not None and _cuts_blocks(lengths, block_size)
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    @classmethod
    @uncompiled
    @unstored
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Self:
        """Build a mask from lists of key blocks, one list per block of queries.

        The lists take precedence: mask_mod is applied only in `kv_indices`, and nothing outside of the lists attends.
        They may be in any order and narrower than the sequence. Entries past the counts are ignored.
        """
        if dq_kv_order is not None and not isinstance(dq_kv_order, bool | Tensor):
            raise ArgumentError(f"dq_kv_order must be a bool, Tensor, or None: found {type(dq_kv_order).__name__}.")
        if seq_lengths is None:
            shape = getattr(kv_indices, "shape", ())
            if len(shape) < 2:
                raise MaskError(message("kv_indices", f"{len(shape)} dimensions", "at least 2", "[B, H, rows, width]."))
            sizes = _pair("BLOCK_SIZE", BLOCK_SIZE, 1)
            seq_lengths = (shape[-2] * sizes[0], shape[-1] * sizes[1])
        mask = cls(
            seq_lengths, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, None, None, None, None,
            BLOCK_SIZE, noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order, dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )  # fmt: skip
        if compute_q_blocks:
            mask.q_runs = run_lists_of(*(blocks.transpose(-1, -2) for blocks in mask._blocks()))
        return mask

    @classmethod
    @uncompiled
    @undisturbed("BlockMask", hidden=True)
    def from_blocks(
        cls,
        partial: Tensor,
        full: Tensor | None,
        seq_lengths: tuple[int, int],
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod = noop_mask,
        compute_q_blocks: bool = True,
    ) -> Self:
        """Build a mask from dense bool [B, H, query blocks, key blocks], which are disjoint; `full` may be None."""
        self = cls.__new__(cls)
        lengths, block_size = _pair("seq_lengths", seq_lengths, 0), _pair("BLOCK_SIZE", BLOCK_SIZE, 1)
        grid = tuple(-(-n // size) for n, size in zip(lengths, block_size, strict=True))
        for name, blocks in (("partial", partial), ("full", full)):
            if blocks is not None and (blocks.dtype != torch.bool or blocks.dim() != 4 or blocks.shape[2:] != grid):
                found = f"{blocks.dtype} {list(blocks.shape)}"
                raise MaskError(
                    message(name, found, f"torch.bool [B, H, {grid[0]}, {grid[1]}]", "Or pass matching seq_lengths.")
                )
        self._fill(partial, full, lengths, block_size, mask_mod, tuple(partial.shape[:2]), None, compute_q_blocks)
        self.full_overhangs = full is not None and _cuts_blocks(lengths, block_size)
        return self

    @classmethod
    def from_runs(
        cls,
        kv_runs: RunLists,
        q_runs: RunLists | None,
        B: int,
        H: int,
        seq_lengths: tuple[int, int],
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod = noop_mask,
        *,
        separate_full_blocks: bool = True,
        full_overhangs: bool = True,
    ) -> Self:
        """Build a mask from its stored form. Only the row counts are checked."""
        lengths, block_size = _pair("seq_lengths", seq_lengths, 0), _pair("BLOCK_SIZE", BLOCK_SIZE, 1)
        self = cls._of_runs(kv_runs, q_runs, B, H, lengths, block_size, mask_mod, separate_full_blocks, full_overhangs)
        for name, lists, blocks in (("kv_runs", kv_runs, self._grid[0]), ("q_runs", q_runs, self._grid[1])):
            if lists is not None and (lists.partial.rows, lists.full.rows) != (B * H * blocks,) * 2:
                found = f"{lists.partial.rows} and {lists.full.rows} rows"
                raise MaskError(message(name, found, f"B * H * {blocks} = {B * H * blocks}", "Check B, H and lengths."))
        return self

    @classmethod
    def _of_runs(
        cls, kv_runs: RunLists, q_runs: RunLists | None, B: int, H: int, seq_lengths: tuple[int, int],
        BLOCK_SIZE: tuple[int, int], mask_mod: MaskMod, separate_full_blocks: bool, full_overhangs: bool,
    ) -> Self:  # fmt: skip
        """Build a mask from arguments that are known to be valid."""
        self = cls.__new__(cls)
        self._fill_fields(seq_lengths, BLOCK_SIZE, mask_mod, (B, H), separate_full_blocks, None)
        self.kv_runs = kv_runs
        self.q_runs = q_runs
        self.full_overhangs = full_overhangs
        return self

    def _fill(
        self,
        partial: Tensor,
        full: Tensor | None,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        mask_mod: MaskMod,
        batch_dims: tuple[int, ...],
        widths: tuple[int, int | None] | None,
        compute_q_blocks: bool,
    ) -> None:
        self._fill_fields(seq_lengths, block_size, mask_mod, batch_dims, full is not None, widths)
        partial = partial.reshape(self.B, self.H, *self._grid)
        full = torch.zeros_like(partial) if full is None else full.reshape(self.B, self.H, *self._grid)
        self.kv_runs = run_lists_of(partial & ~full, full)
        if compute_q_blocks:
            self.q_runs = run_lists_of((partial & ~full).transpose(-1, -2), full.transpose(-1, -2))

    def _fill_fields(
        self,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        mask_mod: MaskMod,
        batch_dims: tuple[int, ...],
        separate: bool,
        widths: tuple[int, int | None] | None,
    ) -> None:
        """Set everything except the runs, which the caller sets."""
        self.__dict__.update(seq_lengths=seq_lengths, BLOCK_SIZE=block_size)
        self.q_runs = None
        self.full_overhangs = False
        self.dq_write_order = self.dq_write_order_full = self.dq_kv_order = self.dq_kv_order_spt = None
        self._batch_dims = batch_dims  # as given: PyTorch's lists may omit B and H
        self._separate = separate  # whether PyTorch's full_* fields exist
        self._widths = widths  # widths of the given lists; None: as wide as the sequence
        self.mask_mod = mask_mod

    # Properties of the mask.

    @property
    def mask_mod(self) -> MaskMod:
        """Applied in partial blocks. Assigning a new one keeps the blocks and disables the check for changed values."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod) -> None:
        if not callable(mask_mod):
            found = type(mask_mod).__name__
            raise ArgumentError(message("mask_mod", found, "a function of (b, h, q_idx, kv_idx)", "Or use noop_mask."))
        self._mask_mod = mask_mod
        self._record: CaptureRecord | None = None
        self._was_edited()

    @property
    def kv_runs(self) -> RunLists:
        """Rows are query blocks, runs of key blocks. A mask to which other lists are assigned is one made by hand."""
        return self._kv_runs

    @kv_runs.setter
    def kv_runs(self, lists: RunLists) -> None:
        self._kv_runs = lists
        self._was_edited()

    @property
    def q_runs(self) -> RunLists | None:
        """Rows are key blocks, runs of query blocks, for the backward. Assigning others is as for `kv_runs`."""
        return self._q_runs

    @q_runs.setter
    def q_runs(self, lists: RunLists | None) -> None:
        self._q_runs = lists
        self._was_edited()

    def _was_edited(self) -> None:
        """Forget what was derived from the lists and the mod. The lists are no longer those of the mod."""
        self._built_from_mod = False
        self._forget_derived()

    def _forget_derived(self) -> None:
        self._prepared = self._state = self._counted = self._bits = self._for_hopper = self._in_tiles = None
        self._no_bits = NO_BITS

    @property
    def B(self) -> int:
        return self._batch_dims[-2] if len(self._batch_dims) > 1 else 1

    @property
    def H(self) -> int:
        return self._batch_dims[-1] if self._batch_dims else 1

    @property
    def device(self) -> torch.device:
        return self.kv_runs.order.device

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, queries, keys)."""
        return (*self._batch_dims, *self.seq_lengths)

    @property
    def ndim(self) -> int:
        """The number of dimensions, as of the dense mask."""
        return len(self.shape)

    @property
    def _grid(self) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        (queries, keys), (rows, columns) = self.seq_lengths, self.BLOCK_SIZE
        return -(-queries // rows), -(-keys // columns)

    def numel(self) -> int:
        """Return the number of (query, key) pairs, masked or not."""
        return math.prod(self.shape)

    @uncompiled
    @unstored
    def counts(self) -> tuple[int, int, int]:
        """Return how many blocks are full, partial and empty."""
        full, partial = (int((r.runs[:, 1] - r.runs[:, 0]).sum()) for r in (self.kv_runs.full, self.kv_runs.partial))
        return full, partial, self.B * self.H * math.prod(self._grid) - full - partial

    @uncompiled
    @unstored
    def sparsity(self) -> float:
        """Return the percentage of pairs in empty blocks, in [0, 100]. Pairs past the sequence lengths do not count."""
        pairs = self.numel()
        executed = self._pairs_in(self.kv_runs.full) + self._pairs_in(self.kv_runs.partial)
        return 100 * (pairs - executed) / pairs if pairs else 0.0

    @uncompiled
    @unstored
    def pairs(self) -> Pairs:
        """Return (executed, useful): the number of pairs in non-empty blocks, and the number of those that attend.

        Both are counted over the mask's own B and H, without pairs past the sequence lengths. Full blocks need no
        evaluation. mask_mod is evaluated at every pair of the partial blocks, on the device of the mask, about 2
        million pairs at a time (16 million on a GPU). Equal batches or heads are evaluated once. The call takes about
        as long as evaluating a dense mask of `counts()[1]` blocks.

        Raises MutationError if a value that mask_mod captured has changed since the mask was built, and DeviceError if
        one is not on the device of the mask.

        >>> import torch
        >>> count, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 0], [0, 1]]]])
        >>> BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=2, mask_mod=lambda b, h, q, kv: q >= kv).pairs()
        Pairs(executed=12, useful=10)
        """
        return self.pairs_of(None)

    def pairs_of(self, bound: BoundMod | None) -> Pairs:
        """Return the same for another mod in the place of mask_mod, None for mask_mod itself."""
        full, partial = self._pairs_in(self.kv_runs.full), self._pairs_in(self.kv_runs.partial)
        if not partial:
            return Pairs(full, full)
        bound = bound or self._checked_mod()
        heads = [self._rows_of(head)[0] for head in range(self.B * self.H)]
        return Pairs(full + partial, full + count_useful(bound, heads, self.H, self.seq_lengths, self.BLOCK_SIZE))

    def _pairs_in(self, runs: Runs) -> int:
        """Return the number of pairs in some blocks, without pairs past the lengths."""
        if self.numel() == 0:
            return 0
        overhang = self._grid[1] * self.BLOCK_SIZE[1] - self.seq_lengths[1]
        keys = runs.count().long() * self.BLOCK_SIZE[1]
        last = ((runs.runs[:, 1] == self._grid[1]) & (runs.runs[:, 0] < runs.runs[:, 1])).long()  # runs may be empty
        ends = torch.nn.functional.pad(last.cumsum(0), (1, 0))
        keys -= (ends[runs.row_ptr[1:].long()] - ends[runs.row_ptr[:-1].long()]) * overhang
        return sum((keys.view(-1, self._grid[0]) * self._heights()).sum(1).tolist())

    def _rows_of(self, head: int) -> tuple[Runs, Runs]:
        """Return the partial and the full runs of the pair (b, h) at b * H + h."""
        start, stop = head * self._grid[0], (head + 1) * self._grid[0]
        return self.kv_runs.partial.between(start, stop), self.kv_runs.full.between(start, stop)

    def _heights(self) -> Tensor:
        """Return the number of queries in each block of queries."""
        starts = torch.arange(self._grid[0], device=self.device) * self.BLOCK_SIZE[0]
        return (self.seq_lengths[0] - starts).clamp(max=self.BLOCK_SIZE[0])

    def check_captures(self, bound: BoundMod) -> None:
        """Raise MutationError if values that mask_mod captures (now `bound`) changed since the mask was built."""
        if self._record is not None:
            self._record.check(bound if self._record.mod is self._mask_mod else trace(self._record.mod, "mask"))

    @property
    def is_built(self) -> bool:
        """Whether the blocks were computed from mask_mod, as opposed to given as lists."""
        return self._built_from_mod

    def equal_runs(self) -> tuple[EqualRuns, ...]:
        """Return the runs of equal elements in captured tensors, if building the mask found them."""
        return () if self._record is None or self._record.mod is not self._mask_mod else self._record.runs

    @property
    def bits(self) -> MaskBits | None:
        """Which pairs of partial blocks attend, for kernels that read it instead of mask_mod; None if not computed."""
        return self._bits

    @property
    def no_bits(self) -> str:
        """Why the mask has no bits; "" if it has."""
        return "" if self.bits is not None else self._no_bits or NO_BITS

    @property
    def skips_halves(self) -> bool:
        """Whether kernels that read `bits` also skip the empty halves of blocks."""
        bits = self.bits
        return bits is not None and bits.skips_halves

    @property
    def in_tiles(self) -> InTiles | None:
        """The same mask in an order of tokens in which it has fewer blocks, for kernels that read bits."""
        return self._in_tiles

    def _remember(self, bound: BoundMod, runs: tuple[EqualRuns, ...] = ()) -> None:
        """Record that the blocks were computed from mask_mod with the values of `bound`."""
        self._record = CaptureRecord.of(self._mask_mod, bound, runs)
        self._built_from_mod = True

    @uncompiled
    @undisturbed("BlockMask.prepare", hidden=True)
    def prepare(self) -> Self:
        """Make the tensors that compiled graphs take, and return the mask.

        create_block_mask prepares its masks. Any other mask (a slice, a copy on another device, one of
        `from_kv_blocks`) must be prepared before it is used in a region compiled with fullgraph=True. Without
        fullgraph, the first use prepares it outside of the graph.

        >>> import torch
        >>> BlockMask.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool), None, (300, 300), 128).prepare().shape
        (1, 1, 300, 300)
        """
        if self._prepared is not None:
            return self
        lists, *others = self._packed()
        runs, record, tiles = self.equal_runs(), self._own_record(), self.in_tiles
        form = MaskForm(
            self.BLOCK_SIZE, self.q_runs is not None, self.B > 1, self.H > 1, self.full_overhangs,
            self._built_from_mod, tuple(r.capture for r in runs), has_bits=self.bits is not None,
            tile=None if tiles is None else tiles.grid.tile,
        )  # fmt: skip
        origin = Origin(record)
        numbers = MaskNumbers(
            origin.digest if form.has_bits or runs else 0,  # a graph with new numbers takes 0.5 to 5 ms
            self.skips_halves,
            tiles is not None and tiles.mask.skips_halves,
            1 if tiles is None else tiles.grid.shape[1],
        )
        if tiles is not None:
            others += tiles.mask._packed()
        sizes = numbers.as_sizes(lists.device)
        tensors = tuple(map(savable, (lists, sizes, *others, *(r.places for r in runs))))
        origin.keep(tensors[0])
        self._prepared = Prepared(tensors, form.dumps())
        return self

    def _own_record(self) -> CaptureRecord | None:
        """Return the record of this mask's own mod. The mod of a slice also captures offsets."""
        if self._record is None or self._record.mod is self._mask_mod:
            return self._record
        if self._slice_record is None or self._slice_record.mod is not self._mask_mod:
            bound = trace(self._mask_mod, "mask")
            self.check_captures(bound)
            self._slice_record = CaptureRecord.of(self._mask_mod, bound, ())
        return self._slice_record

    def _packed(self) -> list[Tensor]:
        """Return the lists as one tensor, and the tensors of the bits."""
        lists = pack([self.kv_runs] if self.q_runs is None else [self.kv_runs, self.q_runs])
        return [lists, *(() if self.bits is None else self.bits.tensors)]

    # PyTorch's fields, computed on access.

    def _blocks(self, transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return the partial and the full blocks, dense bool [B, H, rows, columns]."""
        lists, grid = (self.q_runs, self._grid[::-1]) if transposed else (self.kv_runs, self._grid)
        assert lists is not None
        partial, full = (r.dense(grid[1]).view(self.B, self.H, *grid) for r in (lists.partial, lists.full))
        return partial, full

    def _lists(self, transposed: bool, full: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
        lists, grid = (self.q_runs, self._grid[::-1]) if transposed else (self.kv_runs, self._grid)
        if lists is None or (full and not self._separate):
            return None, None
        runs = lists.full if full else lists.partial
        width = None if transposed or self._widths is None else self._widths[full]
        blocks = runs.dense(grid[1]).view(*self._batch_dims, *grid)
        return lists_of(blocks, grid[1] if width is None else width)

    @computed
    def kv_num_blocks(self) -> Tensor:
        return self.kv_runs.partial.count().view(*self._batch_dims, self._grid[0])

    @computed
    def kv_indices(self) -> Tensor:
        _, indices = self._lists(transposed=False, full=False)
        assert indices is not None
        return indices

    @computed
    def full_kv_num_blocks(self) -> Tensor | None:
        return self.kv_runs.full.count().view(*self._batch_dims, self._grid[0]) if self._separate else None

    @computed
    def full_kv_indices(self) -> Tensor | None:
        return self._lists(transposed=False, full=True)[1]

    @computed
    def q_num_blocks(self) -> Tensor | None:
        return None if self.q_runs is None else self.q_runs.partial.count().view(*self._batch_dims, self._grid[1])

    @computed
    def q_indices(self) -> Tensor | None:
        return self._lists(transposed=True, full=False)[1]

    @computed
    def full_q_num_blocks(self) -> Tensor | None:
        if self.q_runs is None or not self._separate:
            return None
        return self.q_runs.full.count().view(*self._batch_dims, self._grid[1])

    @computed
    def full_q_indices(self) -> Tensor | None:
        return self._lists(transposed=True, full=True)[1]

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Return the constructor's arguments in PyTorch's order: 17 with the pairs flattened, else 15."""
        q_lists = (*self._lists(True, False), *self._lists(True, True))
        return (
            *(self.seq_lengths if flatten else (self.seq_lengths,)),
            *(*self._lists(False, False), *self._lists(False, True), *q_lists),
            *(self.dq_write_order, self.dq_write_order_full, self.dq_kv_order, self.dq_kv_order_spt),
            *(self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)),
            self.mask_mod,
        )

    @unstored
    def to_dense(self) -> Tensor:
        """Return int32 [B, H, query blocks, key blocks]: 1 where a block is partial or full."""
        partial, full = self._blocks()
        return (partial | full).int().view(*self._batch_dims, *self._grid)

    # Masks derived from this one.

    @uncompiled
    @unstored
    def __getitem__(self, index: Any) -> Self:
        """Return the mask of some batches, heads and query blocks, each an int, a slice, or a 1-D tensor.

        An int keeps its axis, with size 1. The result's mask_mod maps its indices to those of this mask, so the result
        computes the same pairs.

        >>> import torch
        >>> mask = BlockMask.from_blocks(torch.ones(2, 4, 3, 3, dtype=torch.bool), None, (300, 300), 128)
        >>> mask[0, 1:3].shape, mask[:, :, -1].shape
        ((1, 2, 300, 300), (2, 4, 44, 300))
        """
        self._refuse_dq_kv_order("Slicing")
        sizes = (*self._batch_dims, self._grid[0])
        given = positions(index, sizes, self.device)
        taken = [range(1)] * (3 - len(given)) + given
        heads = as_tensor(taken[0], self.device)[:, None] * self.H + as_tensor(taken[1], self.device)
        kept = type(self).__new__(type(self))
        length = sliced_length(taken[2], self.seq_lengths[0], self.BLOCK_SIZE[0])
        kept._fill_fields(
            (length, self.seq_lengths[1]), self.BLOCK_SIZE, self._sliced_mod(taken),
            tuple(len(t) for t in given[:-1]), self._separate, self._widths,
        )  # fmt: skip
        kept.kv_runs, kept.q_runs = self.kv_runs.take(heads.flatten()), None
        if self.q_runs is not None and taken[2] == range(self._grid[0]):
            kept.q_runs = self.q_runs.take(heads.flatten())
        elif taken[2] != range(self._grid[0]):
            rows = as_tensor(taken[2], self.device)
            dense = [
                r.dense(self._grid[1]).view(-1, *self._grid)[:, rows] for r in (kept.kv_runs.partial, kept.kv_runs.full)
            ]
            shape = (kept.B, kept.H, *kept._grid)
            kept._set_blocks(dense[0].reshape(shape), dense[1].reshape(shape), self.q_runs is not None)
        return kept._inherit(self)

    def _sliced_mod(self, taken: list[Tensor | range]) -> MaskMod:
        b, h, q = (offset_of(t, self.device) for t in taken)
        if isinstance(q, int):
            q *= self.BLOCK_SIZE[0]
        if self._mask_mod is noop_mask or (b is None and h is None and q is None):
            return self._mask_mod
        if isinstance(self._mask_mod, FrozenMod):
            return self._mask_mod.sliced(b, h, q, self.BLOCK_SIZE[0])
        return SlicedMod(self._mask_mod, b, h, q, self.BLOCK_SIZE[0])

    @uncompiled
    @unstored
    def _adjust(self, new_q_len: int, new_kv_len: int) -> Self:
        """Return the mask of the first `new_q_len` queries and `new_kv_len` keys."""
        self._refuse_dq_kv_order("Adjusting")
        lengths = _pair("new lengths", (new_q_len, new_kv_len), 0)
        if any(new > old for new, old in zip(lengths, self.seq_lengths, strict=True)):
            fix = "Build a mask for the longer sequence with create_block_mask."
            raise ArgumentError(message("new lengths", lengths, f"at most those of the mask, {self.seq_lengths}", fix))
        kept = type(self).__new__(type(self))
        kept._fill_fields(lengths, self.BLOCK_SIZE, self._mask_mod, self._batch_dims, self._separate, self._widths)
        rows, columns = kept._grid
        if kept._widths is not None:
            partial_width, full_width = kept._widths
            kept._widths = (min(partial_width, columns), None if full_width is None else min(full_width, columns))
        partial, full = (blocks[..., :rows, :columns].clone() for blocks in self._blocks())
        if self._built_from_mod:  # full blocks past the new end become partial, as in a mask built for these lengths
            for axis, length in ((-2, lengths[0]), (-1, lengths[1])):
                if length % self.BLOCK_SIZE[axis]:
                    cut = full.narrow(axis, full.shape[axis] - 1, 1)
                    partial.narrow(axis, full.shape[axis] - 1, 1).logical_or_(cut)
                    cut.zero_()
        kept._set_blocks(partial, full, self.q_runs is not None)
        kept = kept._inherit(self)
        kept.full_overhangs = self._separate and not self._built_from_mod and _cuts_blocks(lengths, self.BLOCK_SIZE)
        return kept

    @uncompiled
    @unstored
    def expand(self, B: int, H: int) -> Self:
        """Return the mask with an axis of size 1 repeated to B batches or H heads."""
        return self._expand(B, H, is_exact=False)

    def _expand(self, B: int, H: int, is_exact: bool) -> Self:
        """Return the expanded mask. The host does not wait if no list has unused runs at its end (`is_exact`)."""
        if (B, H) == (self.B, self.H):
            return self
        for name, have, wanted in (("B", self.B, B), ("H", self.H, H)):
            if have not in (1, wanted):
                raise MaskError(message(name, wanted, f"{have}, which the mask has", "Only size 1 can be expanded."))
            if have < wanted and self._record is not None and self._record.graph.reads(name.lower()):
                fix = f"Build it with create_block_mask(..., {name}={wanted}, ...)."
                raise MaskError(message(name, wanted, f"1, as the mask_mod reads {name.lower()}", fix))
        heads = torch.arange(self.B * self.H, device=self.device).view(self.B, self.H).expand(B, H).flatten()
        kept = type(self).__new__(type(self))
        kept._fill_fields(self.seq_lengths, self.BLOCK_SIZE, self._mask_mod, (B, H), self._separate, self._widths)
        times = len(heads) // (self.B * self.H) if is_exact else None
        kept.kv_runs = self.kv_runs.take(heads, times)
        kept.q_runs = None if self.q_runs is None else self.q_runs.take(heads, times)
        kept._bits = None if self._bits is None else self._bits.repeated(heads, self.B * self.H)
        kept._no_bits = self._no_bits
        return kept._inherit(self)

    @uncompiled
    @unstored
    def to(self, device: torch.device | str) -> Self:
        """Return the mask on a device. Tensors captured by its mask_mod are moved too, if they can be found.

        They are found in closures, globals, default arguments, partials, and attributes that the mod names. The user's
        own objects do not change: the new mask has a copy of the mod.

        Raises MutationError if a value that mask_mod captured has changed since the mask was built, DeviceError if
        there is no such device, and UnsupportedError if mask_mod reads a tensor that is an attribute of a class.
        """
        try:
            device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            fix = 'Write device="cuda" or device="cpu".'
            raise DeviceError(message("device", repr(device), "a device of torch", fix)) from error
        moved = copy.copy(self)
        moved._forget_derived()
        moved._mask_mod = move(self._mask_mod, device)
        if self._record is not None and moved._mask_mod is not self._mask_mod:
            self.check_captures(trace(self._mask_mod, "mask"))
            moved._remember(trace(moved._mask_mod, "mask"))
            moved._built_from_mod = self._built_from_mod  # lists may have been assigned since
        moved._kv_runs = self.kv_runs.map(lambda t: t.to(device))
        moved._q_runs = None if self.q_runs is None else self.q_runs.map(lambda t: t.to(device))
        for name in METADATA:
            value = getattr(self, name)
            setattr(moved, name, value if value is None else value.to(device))
        return moved

    def _set_blocks(self, partial: Tensor, full: Tensor, transposed: bool) -> None:
        self.kv_runs = run_lists_of(partial, full)
        self.q_runs = run_lists_of(partial.transpose(-1, -2), full.transpose(-1, -2)) if transposed else None

    def _inherit(self, whole: BlockMask) -> Self:
        """Copy the fields that also apply to a part of a mask from the whole mask."""
        self._record, self._built_from_mod = whole._record, whole._built_from_mod
        self.full_overhangs = whole.full_overhangs
        self.dq_kv_order_spt = whole.dq_kv_order_spt
        if whole.dq_write_order is not None and self.q_runs is not None:
            self._set_dq_write_order(bool(whole.dq_kv_order_spt))
        return self

    def _refuse_dq_kv_order(self, doing: str) -> None:
        if self.dq_kv_order is not None:
            raise UnsupportedError(
                f"{doing} BlockMask with tensor dq_kv_order is not supported: found one for the whole "
                "mask. Construct a new BlockMask with matching precomputed dq_write_order metadata."
            )

    def _set_dq_write_order(self, spt: bool) -> None:
        """Set PyTorch's metadata: for each entry of q_indices, its rank among the key blocks of that query row."""
        partial, full = self._blocks()
        live = (partial | full).int()
        before = live.cumsum(-1, dtype=torch.int32) - live
        turn = (live.sum(-1, keepdim=True, dtype=torch.int32) - 1 - before if spt else before).transpose(-1, -2)
        turn = turn.reshape(*self._batch_dims, *self._grid[::-1])
        (_, partial_q), (_, full_q) = self._lists(True, False), self._lists(True, True)
        assert partial_q is not None
        self.dq_write_order = turn.gather(-1, partial_q.long())
        self.dq_write_order_full = None if full_q is None else turn.gather(-1, full_q.long())
        self.dq_kv_order_spt = spt

    # Printing.

    @uncompiled
    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Return a picture for each of the first `limit` batches and heads: █ full, ░ mixed, blank empty.

        `grid_size` is the maximum number of cells down and across; -1 means one cell per block. A cell of several
        blocks is full if all of them are full, and empty if all of them are empty.

        >>> import torch
        >>> eye = torch.eye(2, dtype=torch.bool)[None, None]
        >>> BlockMask.from_blocks(eye, ~eye, (256, 256)).to_string().splitlines()
        ['(0, 0)', '░░██', '██░░']
        """
        grid = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        pictures = []
        for place in itertools.islice(itertools.product(*map(range, self._batch_dims)), limit):
            pictures.append("\n".join((str(place), *self._draw(place, grid))) + "\n")
        if math.prod(self._batch_dims) > limit:
            pictures += [
                "...",
                "To print out more, set BlockMask.to_string(limit=N)",
                "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
            ]
        return "\n".join(pictures)

    @uncompiled
    def plot(self, ax: Any = None, b: int = 0, h: int = 0, *, pairs: bool = False, legend: bool = True) -> Any:
        """Draw batch `b` and head `h` with matplotlib, an optional extra, and return the Axes.

        Keys go across and queries down, in tokens. There are at most 2,000 x 2,000 cells. A cell of several blocks, or
        of several pairs, has their mean color.

        Args:
            ax: the Axes to draw into, None for a new figure.
            b, h: the batch and head of the mask.
            pairs: whether to draw pairs instead of blocks: those of full blocks, and those of partial blocks that
                attend or do not. mask_mod is evaluated at every pair of the partial blocks, as in `pairs()`.
            legend: whether to add a legend of the colors. It may cover cells of a small Axes.

        Raises ImportError if matplotlib is missing (`pip install flexattn[plot]`), IndexRangeError if the mask has no
        such batch or head, and with `pairs` what `pairs()` raises.

        >>> import torch
        >>> mask = BlockMask.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool), None, (300, 300), 128)
        >>> mask.plot().figure.savefig("mask.png")  # doctest: +SKIP
        """
        partial, full = self._rows_at(b, h)
        if pairs:
            cells, tokens = plot.image_of_pairs(
                self._checked_mod(), (b, h), partial, full, self.seq_lengths, self.BLOCK_SIZE
            )
            return plot.plot(ax, cells, tokens, self.seq_lengths, plot.OF_PAIRS, legend)
        cells, step = plot.image(partial, full, self._grid[1])
        tokens = (step[0] * self.BLOCK_SIZE[0], step[1] * self.BLOCK_SIZE[1])
        return plot.plot(ax, cells, tokens, self.seq_lengths, plot.COLOURS, legend)

    @uncompiled
    def html(self, path: str | os.PathLike[str], b: int = 0, h: int = 0, *, max_pairs: int = 2**29) -> None:
        """Write a page of batch `b` and head `h` that zooms from blocks to pairs, at up to millions of tokens.

        The page is one file, needs no network, and works on a phone. It contains the runs of blocks of each row, and
        the bits of partial blocks, those of equal blocks once. What the limits leave out is written in the page: such
        blocks are drawn without their pairs.

        Args:
            path: the file to write, which is replaced if it exists.
            b, h: the batch and head of the mask.
            max_pairs: how many pairs mask_mod is evaluated at, 0 or more. The first partial blocks come first.

        Raises IndexRangeError if the mask has no such batch or head, ArgumentError for another max_pairs, what
        `pairs()` raises, and OSError if the file cannot be written.

        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/mask.html"
        >>> BlockMask.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool), None, (300, 300), 128).html(path)
        """
        if type(max_pairs) is not int or max_pairs < 0:
            raise ArgumentError(message("max_pairs", repr(max_pairs), "an int >= 0", "Leave it out, for 2**29 pairs."))
        rows, line = self._rows_at(b, h), f"{self._line()} at b={b}, h={h}"
        bound = self._checked_mod()
        text = page.html(bound, (b, h), *rows, self.seq_lengths, self.BLOCK_SIZE, line, max_pairs)
        Path(path).write_text(text, encoding="utf-8")

    def _rows_at(self, b: int, h: int) -> tuple[Runs, Runs]:
        """Return the partial and the full runs of one batch and head. Raise IndexRangeError if there is none."""
        for name, at, size in (("b", b, self.B), ("h", h, self.H)):
            if not 0 <= at < size:
                fix = f"Omit {name} for the first; a mask with {name.upper()}=1 has no other."
                raise IndexRangeError(message(name, at, f"0 <= {name} < {size}, as the mask has", fix))
        return self._rows_of(b * self.H + h)

    def _checked_mod(self) -> BoundMod:
        """Trace mask_mod. Raise MutationError if a value that it captures has changed since the mask was built."""
        bound = trace(self._mask_mod, "mask")
        self.check_captures(bound)
        return bound

    def _draw(self, place: tuple[int, ...], grid: tuple[int, int]) -> list[str]:
        b, h = (0,) * (2 - len(place)) + place
        down, across = (blocks if most == -1 else most for blocks, most in zip(self._grid, grid, strict=True))
        return picture.draw(*self._rows_of(b * self.H + h), self._grid[1], (down, across))

    def _summary(self) -> str:
        full, partial, empty = self.counts()
        return f"full={full}, partial={partial}, empty={empty}, sparsity={_percent(self.sparsity())}%"

    @uncompiled
    def __str__(self) -> str:
        frozen = ", frozen" if isinstance(self._mask_mod, FrozenMod) else ""
        head = f"BlockMask(shape={self.shape}, {self._summary()}{frozen}, \n"
        return head + self.to_string().strip("\n") + "\n)"

    @uncompiled
    def __repr__(self) -> str:
        head = self._line()
        if 0 in self._batch_dims:
            return head
        first = (0,) * len(self._batch_dims)
        lines = self._draw(first, (16, 16))
        if lines and self.B * self.H > 1:
            lines.insert(0, str(first))  # only this batch and head is drawn
        return "\n".join((head, *(f"    {line}".rstrip() for line in lines)))

    @uncompiled
    def _repr_html_(self) -> str:
        """Return the picture that notebooks show: the blocks of the first batch and head, and a line of text."""
        note = f"batch 0, head 0 of {self.B} x {self.H}" if self.B * self.H > 1 else ""
        columns = 0 if 0 in self._batch_dims else self._grid[1]  # no head, no picture
        return svg.html(*self._rows_of(0), columns, self._line(), note)

    def _line(self) -> str:
        """Return the name of mask_mod, the sizes and the counts of blocks in one line."""
        name = getattr(self._mask_mod, "__name__", type(self._mask_mod).__name__)
        q_length, kv_length = self.seq_lengths
        return (
            f"BlockMask({name}, B={self.B}, H={self.H}, Q_LEN={q_length}, KV_LEN={kv_length}, "
            f"BLOCK_SIZE={self.BLOCK_SIZE}, {self._summary()})"
        )

    # Pytree and pickling.

    def _flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the tensors, including those captured by mask_mod, and the rest, which compares by value."""
        pairs, context = self._flatten_with_keys()
        return tuple(value for _, value in pairs), context

    def _flatten_with_keys(self) -> tuple[tuple[tuple[GetAttrKey, Any], ...], tuple[Any, ...]]:
        """Return the same as `_flatten`, with the name of each tensor."""
        named = {f"kv_runs_{i}": t for i, t in enumerate(self.kv_runs.tensors)}
        named |= {} if self.q_runs is None else {f"q_runs_{i}": t for i, t in enumerate(self.q_runs.tensors)}
        named |= {name: getattr(self, name) for name in METADATA if getattr(self, name) is not None}
        values, shell = lift(self._mask_mod)
        context = (*(getattr(self, name) for name in _CONTEXT), tuple(named), shell)
        named |= {f"_closure_{i}": value for i, value in enumerate(values)}
        return tuple((GetAttrKey(name), value) for name, value in named.items()), context

    @classmethod
    def _unflatten(cls, leaves: tuple[Any, ...], context: tuple[Any, ...]) -> Self:
        """Inverse of `_flatten`."""
        leaves = tuple(leaves)
        *fields, names, shell = context
        assert isinstance(shell, Shell)
        named = dict(zip(names, leaves[: len(names)], strict=True))
        self = cls.__new__(cls)
        self.__dict__.update(zip(_CONTEXT, fields, strict=True))
        self._mask_mod, self._record = shell.fill(leaves[len(names) :]), None
        self._forget_derived()
        self._kv_runs = RunLists.from_tensors(tuple(named[f"kv_runs_{i}"] for i in range(5)))
        transposed = tuple(named[f"q_runs_{i}"] for i in range(5)) if "q_runs_0" in named else None
        self._q_runs = None if transposed is None else RunLists.from_tensors(transposed)
        for name in METADATA:
            setattr(self, name, named.get(name))
        return self

    @uncompiled
    @undisturbed("BlockMask", hidden=True)
    def __getstate__(self) -> dict[str, Any]:
        """Return plain data and tensors. mask_mod is stored as its graph with the values that it captures now.

        Raises MutationError if one of these has changed since the mask was built.
        """
        bound = None if self._mask_mod is noop_mask else trace(self._mask_mod, "mask")
        if bound is not None:
            self.check_captures(bound)
        return {
            "format": stored.FORMAT,
            **{name: getattr(self, name) for name in _CONTEXT},
            **{name: getattr(self, name) for name in METADATA},
            "kv_runs": stored.packed_lists(self.kv_runs),
            "q_runs": stored.packed_lists(self.q_runs),
            "mask_mod": None if bound is None else freeze(bound).__getstate__(),
            "equal_runs": tuple((r.capture, compact(r.places)) for r in self.equal_runs()),
            "is_whole": self._record is not None and self._record.mod is self._mask_mod,
        }

    @uncompiled
    @undisturbed("BlockMask", hidden=True)
    def __setstate__(self, state: dict[str, Any]) -> None:
        stored.check_format(state)
        fields = stored.read_fields(state, _CONTEXT)
        mod = noop_mask if state.get("mask_mod") is None else thawed(state["mask_mod"])
        sizes = (fields[name] for name in ("seq_lengths", "BLOCK_SIZE", "_batch_dims", "_separate", "_widths"))
        lengths, block_size, *rest = sizes
        self._fill_fields(lengths, block_size, mod, *rest)
        heads, (rows, columns) = self.B * self.H, self._grid
        self.kv_runs = stored.read_lists("kv_runs", state.get("kv_runs"), heads, rows, columns)
        if state.get("q_runs") is not None:
            self.q_runs = stored.read_lists("q_runs", state["q_runs"], heads, columns, rows)
        for name in METADATA:
            setattr(self, name, stored.read_tensor(name, state.get(name)))
        self.full_overhangs, self.dq_kv_order_spt = fields["full_overhangs"], fields["dq_kv_order_spt"]
        if isinstance(mod, FrozenMod) and fields["_built_from_mod"]:
            self._remember(mod.bound, stored.read_runs(state.get("equal_runs"), mod))
            if not state.get("is_whole"):  # the mask is a part of the one that was built
                self._mask_mod = mod.with_captures(mod.captures)
        self._built_from_mod = fields["_built_from_mod"]
        self.prepare()

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        records = ("_record", "_slice_record")
        derived = ("_prepared", "_state", "_counted")
        copied.__dict__.update(copy.deepcopy(self.__dict__ | dict.fromkeys((*records, *derived)), memo))
        for name in records:
            record = getattr(self, name)
            setattr(copied, name, None if record is None else record.deepcopied(memo))
        return copied if self._prepared is None else copied.prepare()


METADATA = ("dq_write_order", "dq_write_order_full", "dq_kv_order")
_CONTEXT = (
    "seq_lengths", "BLOCK_SIZE", "full_overhangs", "dq_kv_order_spt", "_batch_dims", "_separate", "_widths",
    "_built_from_mod",
)  # fmt: skip


def _cuts_blocks(lengths: tuple[int, int], block_size: tuple[int, int]) -> bool:
    return any(n % size for n, size in zip(lengths, block_size, strict=True))


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """Return an int or a pair as two ints, each at least `least`."""
    given = (value, value) if least and isinstance(value, Integral) else value
    pair = tuple(given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= least for n in pair):
        what = "an int or a pair of ints" if least else "a pair of ints"
        raise ArgumentError(message(name, repr(value), f"{what}, each >= {least}", "They are (query, key)."))
    first, second = pair
    return int(first), int(second)


def _percent(value: float) -> str:
    """Return a percentage with two digits, or with more if two digits would round to 0 or 100."""
    digits = 2
    while value not in (0, 100) and float(f"{value:.{digits}f}") in (0, 100):
        digits += 1
    return f"{value:.{digits}f}"
