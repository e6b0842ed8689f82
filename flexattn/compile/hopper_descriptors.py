"""hopper_descriptors: the TMA descriptors of Hopper kernels."""

from __future__ import annotations

import torch

from flexattn.compile.head_dims import HeadDimPart, split_head_dim
from flexattn.compile.kernel_plan import HOPPER_ROWS as ROWS
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.operands import DescriptorOperand


def forward_descriptors(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    t, (D, Dv) = plan.tile, plan.widths
    parts = split_head_dim(D)
    queries_and_keys = [(x, rows, p) for x, rows in (("q", ROWS), ("k", t.BLOCK_N)) for p in parts]
    return (
        *(_tile(plan, f"{x}_desc_{p.index}", x, rows, p.width) for x, rows, p in queries_and_keys),
        _tile(plan, "v_desc", "v", t.BLOCK_N, Dv),
        _tile(plan, "o_desc", "o", ROWS, Dv),
    )


def latent_descriptors(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    parts = split_head_dim(plan.widths[0])
    return tuple(_tile(plan, f"k_desc_{p.index}", "k", plan.tile.BLOCK_N, p.width) for p in parts)


def dq_descriptors(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    t, (D, Dv) = plan.tile, plan.widths
    tiles = (("q", ROWS, D), ("do", ROWS, Dv), ("k", t.BLOCK_N, D), ("v", t.BLOCK_N, Dv), ("dq", ROWS, D))
    return _in_columns(plan, tiles)


def key_descriptors(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    """Return the descriptors of kernels whose programs own keys."""
    return (*_in_columns(plan, _of_keys(plan)), *_of_rows(plan))


def stripe_descriptors(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    """Return the descriptors of hopper_backward_stripes, which also writes dq, 64 columns at a time."""
    return (*key_descriptors(plan), _tile(plan, "dq_rows_desc", "dq", plan.tile.BLOCK_M, 64))


def _in_columns(plan: KernelPlan, tiles: tuple[tuple[str, int, int], ...]) -> tuple[DescriptorOperand, ...]:
    """Return one descriptor per part of each (tensor, rows of a tile, its width)."""
    return tuple(
        _tile(plan, f"{name}_desc_{p.index}", name, rows, p.width)
        for name, rows, width in tiles
        for p in columns(width)
    )


def columns(width: int) -> tuple[HeadDimPart, ...]:
    """Split a width into powers of two of at most 128 columns."""
    return split_head_dim(width) if width != 256 else (HeadDimPart(0, 0, 128, 128), HeadDimPart(1, 128, 128, 128))


def _of_keys(plan: KernelPlan) -> tuple[tuple[str, int, int], ...]:
    """Return (tensor, rows of a tile, its width): first the streamed tensors, then those that programs own."""
    D, Dv = plan.widths
    streamed = (("q", D), ("do", Dv))
    owned = (("k", D), ("v", Dv), ("dk", D), ("dv", Dv))
    return (
        *((name, plan.tile.BLOCK_M, width) for name, width in streamed),
        *((name, ROWS, width) for name, width in owned),
    )


def _of_rows(plan: KernelPlan) -> tuple[DescriptorOperand, ...]:
    """Return the descriptors of float32 arrays with a row per query: lse, delta and the accumulator of dq."""
    rows = plan.tile.BLOCK_M
    numbers = (_array("shift_desc", "shift_ptr", (rows,)), _array("delta_desc", "delta_ptr", (rows,)))
    return (*numbers, _array("dq_desc", "dq_sum_ptr", (rows, 32))) if plan.adds_dq else numbers


def _tile(plan: KernelPlan, argument: str, tensor: str, rows: int, width: int) -> DescriptorOperand:
    of_rows = (rows,) if plan.token_tile is None else (rows // plan.token_tile[1], plan.token_tile[1])
    block = (1, 1, *of_rows, width)
    layout = _shared_layout(block, plan.dtype)
    return DescriptorOperand(argument, tensor, block, layout=layout, is_grid=plan.token_tile is not None)


def _array(argument: str, array: str, block: tuple[int, ...]) -> DescriptorOperand:
    return DescriptorOperand(argument, array, block, torch.float32, _shared_layout(block, torch.float32))


def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return the layout of a tile in shared memory, swizzled by at most 128 bytes."""
    swizzle = min(128, block[-1] * dtype.itemsize) if len(block) > 1 else 0
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={dtype.itemsize * 8}, rank={len(block)})"
