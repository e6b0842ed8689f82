"""dense_form: a problem with a layout -> an equal problem without one, in torch operations.

Engines that compute in torch operations run this form, and so do derivatives beyond first gradients. It gathers pages,
adds the lengths to the mask, and takes the rows of the BlockMask at the offsets. On a GPU it waits for the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask, run_lists_of
from flexattn.block_mask.dense import all_partial, dense_blocks
from flexattn.call.layout import Layout
from flexattn.call.positions import used_keys
from flexattn.call.problem import Problem
from flexattn.call.wide_dtype import wide_dtype
from flexattn.mods.combine import noop_mask
from flexattn.torch_state.transforms import outside


def dense_form(problem: Problem, clean: bool = True) -> Problem:
    """Return the problem without its layout. `clean`: set keys and values that are not used to 0, in case of NaN."""
    layout = problem.layout
    if layout is None:
        return problem
    M, N, mask = problem.query.size(2), problem.N, problem.mask
    if layout.is_quantized:
        problem = _dequantized(problem, layout)
    if layout.block_table is not None:
        table = layout.block_table.clamp(0, problem.key.size(0) - 1)
        key, value = (_gathered(x, table)[:, :, :N] for x in (problem.key, problem.value))
        problem = problem.with_fields(key=key, value=value)
    blocks = problem.block_mask
    if layout.seqused_k is not None:
        mask = used_keys(mask, layout)
        if clean:
            unused = (torch.arange(N, device=mask.captures[-1].device) >= layout.seqused_k[:, None])[:, None, :, None]
            key, value = (x.masked_fill(unused, 0.0) for x in (problem.key, problem.value))
            problem = problem.with_fields(key=key, value=value)
        blocks = all_partial(M, N, problem.query.device) if blocks is None else blocks
    if blocks is not None:
        blocks = _rows_at(blocks, layout.q_offsets, layout.seqused_k, M, N, problem.batch_invariant)
    return replace(problem, mask=mask, block_mask=blocks, layout=None)


def _dequantized(problem: Problem, layout: Layout) -> Problem:
    """Return the problem with key and value in the dtype of query."""
    wide = wide_dtype(problem.query)
    key, value = (
        (x.to(wide) * descale.to(wide)[..., None, None]).to(problem.query.dtype)
        for x, descale in ((problem.key, layout.k_descale), (problem.value, layout.v_descale))
        if descale is not None
    )
    return problem.with_fields(key=key, value=value)


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """Return the pages [pages, H, page_size, D] of each sequence, [B, H, columns * page_size, D]."""
    return pages[table.long()].transpose(1, 2).flatten(2, 3)


@torch.no_grad()
def _rows_at(
    blocks: BlockMask, offsets: Tensor | None, used: Tensor | None, M: int, N: int, invariant: bool
) -> BlockMask:
    """Return the blocks of M rows from an offset on, for each sequence. Keys from `used` on are in no full block.

    If the offset is inside of a block, a row of blocks of the result covers parts of two rows of the mask.
    """
    with outside():
        (rows, columns), device = blocks.BLOCK_SIZE, blocks.device
        # [B or 1, H or 1, rows of blocks, columns of blocks]
        partial, full = (x[..., : -(-N // columns)] for x in dense_blocks(blocks))
        some = partial | full
        begin = torch.arange(0, M, rows, device=device) + (
            torch.zeros(1, 1, dtype=torch.int64, device=device) if offsets is None else offsets.long()[:, None]
        )  # [B or 1, rows of blocks]: the first position
        last = torch.minimum(begin + rows, begin[:, :1] + M) - 1
        ends = torch.stack((begin, last)).div(rows, rounding_mode="floor").clamp(0, some.size(2) - 1)
        batch = torch.arange(some.size(0), device=device)[:, None]
        (some_first, some_last), (full_first, full_last) = (
            [x[batch, :, at].transpose(1, 2) for at in ends] for x in (some, full)
        )
        live, whole = some_first | some_last, full_first & full_last  # [B or 1, H or 1, rows, columns]
        if invariant:  # one class of blocks; see batch_invariant.py
            whole = torch.zeros_like(whole)
        if used is not None:
            starts = torch.arange(0, N, columns, device=device)
            live = live & (starts < used[:, None])[:, None, None]
            whole = whole & ((starts + columns).clamp(max=N) <= used[:, None])[:, None, None]
        lists = [run_lists_of(x & ~y, y) for x, y in ((live, whole & live), (live.mT, (whole & live).mT))]
        return BlockMask.from_runs(
            lists[0], lists[1], live.size(0), live.size(1), (M, N), blocks.BLOCK_SIZE, noop_mask,
            separate_full_blocks=True, full_overhangs=bool(M % rows or N % columns),
        )  # fmt: skip
