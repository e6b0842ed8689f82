"""hopper_names: what the templates of Hopper's kernels refer to, beside what all templates do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexattn.compile.hopper import (
    CONSUMER_REGISTERS,
    KEYS_REGISTERS,
    PRODUCER_REGISTERS,
    QUERIES_REGISTERS,
    ROWS,
    as_gluon,
    hopper_mods,
)
from flexattn.compile.kernel_plan import KernelPlan, Part, pieces_of, split_head_dim
from flexattn.compile.lower import TRITON_DTYPE
from flexattn.compile.templates import environment

_LISTS = tuple(f"%_{n}_ptr" for n in ("partial", "partial_runs", "full", "full_runs", "order"))


def hopper_names(plan: KernelPlan) -> dict[str, object]:
    """Return what Hopper's templates refer to besides."""
    tile, side = plan.tile, "q" if plan.transposed else "kv"
    constants: list[tuple[str, object]] = [
        ("BLOCK_M", tile.BLOCK_M), ("BLOCK_N", tile.BLOCK_N), ("STAGES", tile.num_stages),
        ("D", plan.widths[0]), ("Dv", plan.widths[1]),
    ]  # fmt: skip
    if plan.blocks:
        constants += [("SPARSE_Q", plan.blocks[0]), ("SPARSE_KV", plan.blocks[1]), ("TILES", plan.tiles_per_block)]
    lists = (*(n.replace("%", side) for n in _LISTS), "stride_mask_b", "stride_mask_h") if plan.blocks else ()
    mods = [a for m in (plan.score, plan.mask) if m for a in m.argument_names()]
    lowered = hopper_mods(plan)
    names: dict[str, object] = {
        "mods": lowered, "list_arguments": lists, "adds_dq": plan.adds_dq,
        "prelude": as_gluon(environment().get_template("prelude.py.jinja").render(scatter_arguments=())),
        "reads_each_place": any(", mask=live" in text for text in lowered),
        "bytes": lambda text, parts: " + ".join(f"{text}.block_type.nbytes".replace("%", str(p.index)) for p in parts),
    }  # fmt: skip
    own = _OWN[plan.kernel](plan)
    descriptors = tuple(name for name, _ in hopper_descriptors(plan))
    scalars = (*own.scalars, "sm_scale" if plan.score else "qk_scale", *lists, *mods)
    return names | own.names | {
        "constants": [*constants, *own.constants], "arguments": (*descriptors, *scalars),
        "role_arguments": (*descriptors, *own.buffers, *scalars),
    }  # fmt: skip


@dataclass(frozen=True)
class _Own:
    """What one of Hopper's templates adds."""

    constants: list[tuple[str, object]]
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    names: dict[str, object]


def _hopper_forward_names(plan: KernelPlan) -> _Own:
    consumers = plan.tile.BLOCK_M // ROWS
    shared_lists = ("starts",) if plan.blocks else ()
    parts = split_head_dim(plan.widths[0])
    buffers = (
        *(f"{x}_bufs_{p.index}" for x in ("q", "k") for p in parts), "v_bufs", "o_bufs", "q_full", "q_empty", "k_full",
        "k_empty", "v_full", "v_empty", "own", *shared_lists,
    )  # fmt: skip
    return _Own(
        [("CONSUMERS", consumers), ("Q_STAGES", plan.tiles_of_queries), ("SAFE", plan.score is not None)],
        buffers,
        ("tiles", "counter_ptr", "lse_ptr", *(("max_ptr",) if plan.max_scores else ()),
         *(("sink_ptr", "stride_sink_b", "stride_sink_h") if plan.has_sink else ()), "M", "N", "heads", "heads_q",
         "group_size", "heads_per_group", "batch_shares_keys"),
        {
            "to_exp2": "" if plan.score else " * qk_scale", "exponent": _exponent(plan),
            "parts": parts, "with_sink": as_gluon(environment().get_template("with_sink.py.jinja").render()),
            "numbers": ["b", "h", "m0", *(["partial", "full"] if plan.blocks else [])],
            "consumers": consumers, "shared_lists": shared_lists, "shares_output": plan.shares_output,
            "roles": [*(f"consumer_{i}" for i in range(consumers)), "producer"],
            "worker_warps": [4] * (consumers - 1) + [1],
            "worker_registers": [CONSUMER_REGISTERS] * (consumers - 1) + [PRODUCER_REGISTERS],
        },
    )  # fmt: skip


def _exponent(plan: KernelPlan) -> str:
    """Return the forward's scores less the maximum, in the exp2 domain."""
    if plan.score is not None:
        return "s - m_safe[:, None]"
    if plan.batch_invariant:  # where nothing is fused the product would be rounded
        return "gl.fma(s, qk_scale, -m_safe[:, None])"
    return "s * qk_scale - m_safe[:, None]"


# Conversions of two numbers at a time to half precision and back.
_PACKING = {torch.bfloat16: "cvt.rn.bf16x2.f32 $0, $2, $1;", torch.float16: "cvt.rn.f16x2.f32 $0, $2, $1;"}
_UNPACKING = {
    torch.bfloat16: "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
    torch.float16: "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
}


def _hopper_dq_names(plan: KernelPlan) -> _Own:
    return _Own(
        [("K_STAGES", plan.key_stages)],
        ("q_bufs", "do_bufs", "k_bufs", "v_bufs", "q_full", "k_full", "k_empty", "v_full", "v_empty"),
        ("shift_ptr", "delta_ptr", "M", "M_padded", "N", "heads", "heads_q", "group_size", "heads_per_group",
         "batch_shares_keys", "dq_scale"),
        {
            "roles": ["queries_0", "queries_1", "producer"], "worker_warps": [4, 1],
            "worker_registers": [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        },
    )  # fmt: skip


# Who runs where programs own keys.
_KEY_ROLES: dict[str, dict[str, object]] = {
    "hopper_backward": {
        "roles": ["keys_0", "keys_1", "queries", "producer"], "worker_warps": [4, 4, 1],
        "worker_registers": [KEYS_REGISTERS, QUERIES_REGISTERS, PRODUCER_REGISTERS],
    },
    "hopper_backward_wide": {
        "roles": ["values", "keys", "queries", "producer"], "worker_warps": [4, 4, 1],
        "worker_registers": [KEYS_REGISTERS, QUERIES_REGISTERS, PRODUCER_REGISTERS],
    },
    "hopper_dkdv": {
        "roles": ["keys_0", "keys_1", "producer"], "worker_warps": [4, 1],
        "worker_registers": [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    },
}  # fmt: skip


def _hopper_backward_names(plan: KernelPlan) -> _Own:
    return _Own(
        [("Q_STAGES", plan.rings.queries), *(_dq_constants(plan) if plan.adds_dq else [])],
        ("q_bufs", "k_bufs", "v_bufs", "do_bufs", *_ROWS, *(_OF_DQ if plan.adds_dq else ())),
        ("M", "M_padded", "N", "heads", "heads_q", "heads_kv", "group_size", "batch_repeats", "heads_per_group",
         "dk_scale"),
        {
            "dtype": TRITON_DTYPE[plan.dtype], "packing": _PACKING[plan.dtype], "unpacking": _UNPACKING[plan.dtype],
            # With a derivative there is enough to do while dk waits for its own dS (tanh: 4 % faster, D 128).
            "delayed": not plan.scales_gradient or plan.widths[0] == 64,
            "keeps_keys": plan.widths == (64, 64),
            **_KEY_ROLES[plan.kernel],
        },
    )  # fmt: skip


def _dq_constants(plan: KernelPlan) -> list[tuple[str, object]]:
    return [("DQ_BUFFERS", plan.rings.dq), ("DQ_PIECES", pieces_of(plan.D))]


_ROWS = ("shift_bufs", "delta_bufs", "kv_full", "q_full", "q_empty", "do_full", "do_empty")
_OF_DQ = ("ds_bufs", "dq_bufs", "ds_full", "ds_empty")


def _hopper_wide_names(plan: KernelPlan) -> _Own:
    own, (q_parts, v_parts) = _hopper_backward_names(plan), map(_columns, plan.widths)
    tiles = (f"{x}_bufs_{p.index}" for x, parts in zip("qkv", (q_parts, q_parts, v_parts), strict=True) for p in parts)
    gradients = (f"do_bufs_{p.index}" for p in v_parts)
    return replace(
        own,
        constants=[*own.constants, ("DS_STAGES", plan.rings.ds)],
        buffers=(*tiles, *gradients, *_ROWS, *_OF_DQ, "p_bufs", "p_full", "p_empty", "finished"),
        names=own.names | {"parts": q_parts, "v_parts": v_parts},
    )


def _columns(width: int) -> tuple[Part, ...]:
    """Split a width into parts of at most 128 columns."""
    return tuple(Part(i, 128 * i, n, n) for i in range(-(-width // 128)) if (n := min(128, width - 128 * i)))


_OWN = {
    "hopper_forward": _hopper_forward_names,
    "hopper_backward": _hopper_backward_names,
    "hopper_backward_wide": _hopper_wide_names,
    "hopper_dq": _hopper_dq_names,
    "hopper_dkdv": _hopper_backward_names,
}


def hopper_descriptors(plan: KernelPlan) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (argument, shape of a tile) of each tensor descriptor of a kernel."""
    t, (D, Dv) = plan.tile, plan.widths
    if plan.kernel == "hopper_forward":
        parts = [(x, rows, p) for x, rows in (("q", ROWS), ("k", t.BLOCK_N)) for p in split_head_dim(D)]
        found = [(f"{x}_desc_{p.index}", (1, 1, rows, p.width)) for x, rows, p in parts]
        return (*found, ("v_desc", (1, 1, t.BLOCK_N, Dv)), ("o_desc", (1, 1, ROWS, Dv)))
    if plan.kernel == "hopper_dq":
        tiles = {"q": (ROWS, D), "do": (ROWS, Dv), "k": (t.BLOCK_N, D), "v": (t.BLOCK_N, Dv), "dq": (ROWS, D)}
        return tuple((f"{name}_desc", (1, 1, *tile)) for name, tile in tiles.items())
    held, streamed = (("k", D), ("v", Dv), ("dk", D), ("dv", Dv)), (("q", D), ("do", Dv))
    rows = [*((x, t.BLOCK_M, width) for x, width in streamed), *((x, ROWS, width) for x, width in held)]
    split = [(f"{x}_desc", n, width) for x, n, width in rows]
    if plan.kernel == "hopper_backward_wide":
        split = [(f"{x}_desc_{p.index}", n, p.width) for x, n, width in rows for p in _columns(width)]
    sums = (("shift_desc", (t.BLOCK_M,)), ("delta_desc", (t.BLOCK_M,)), ("dq_desc", (t.BLOCK_M, 32)))
    return (
        *((name, (1, 1, n, width)) for name, n, width in split),
        *(sums if plan.adds_dq else sums[:2]),
    )


def shared_layout(tile: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return how a tile lies in shared memory: rows of 128 bytes or more are swizzled, for products and reductions."""
    swizzle = min(128, tile[-1] * dtype.itemsize) if len(tile) > 1 else 0
    return f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={dtype.itemsize * 8}, rank={len(tile)})"
