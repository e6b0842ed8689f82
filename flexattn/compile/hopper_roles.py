"""hopper_roles: the roles and buffers of Hopper kernels, and other variables of their templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexattn.block_mask.bits import BITS_BLOCK, COUNTED, HALF
from flexattn.compile import fixed_reference
from flexattn.compile.head_dims import HeadDimPart, pieces_of, split_head_dim
from flexattn.compile.hopper import (
    CONSUMER_REGISTERS,
    FORWARD_REGISTERS,
    KEYS_REGISTERS,
    PRODUCER_REGISTERS,
    QUERIES_REGISTERS,
)
from flexattn.compile.hopper_descriptors import columns
from flexattn.compile.hopper_mods import as_gluon, ends_of, has_intervals_only, hopper_mods
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernels import BITS, HALVES
from flexattn.compile.lower import loads_where_live
from flexattn.compile.mod_plan import TRITON_DTYPE
from flexattn.compile.operands import MaskLists
from flexattn.compile.scalars import FEW_SPLITS
from flexattn.compile.templates import environment
from flexattn.process.frozen_class import frozen


def hopper_names(plan: KernelPlan) -> dict[str, object]:
    """Return the additional variables of Hopper templates."""
    tile = plan.tile
    constants: list[tuple[str, object]] = [
        ("BLOCK_M", tile.BLOCK_M), ("BLOCK_N", tile.BLOCK_N), ("STAGES", tile.num_stages),
        ("D", plan.widths[0]), ("Dv", plan.widths[1]),
    ]  # fmt: skip
    if HALVES.name in plan.features:
        constants.append(("BOTH", 3))  # needs of both warpgroups
    if plan.blocks:
        constants += [("SPARSE_Q", plan.blocks[0]), ("SPARSE_KV", plan.blocks[1]), ("TILES", plan.tiles_per_block)]
    if plan.token_tile:
        constants += [("TILE_TOKENS", plan.token_tile[0] * plan.token_tile[1]), ("TILE_COLUMNS", plan.token_tile[1])]
    lists = tuple(a.name for operand in (MaskLists(), BITS, HALVES) for a in operand.arguments(plan))
    gradient = plan.grad if plan.scales_gradient else None
    names: dict[str, object] = {
        "mods": hopper_mods(plan), "ends": ends_of(plan), "list_arguments": lists, "adds_dq": plan.adds_dq,
        "owns_dq": plan.spec.owns_dq, "fixed_reference": plan.fixed_reference, "dq_pieces": pieces_of(plan.D),
        "reads_bits": BITS.name in plan.features, "BITS_BLOCK": BITS_BLOCK,
        "skips_halves": HALVES.name in plan.features, "HALF": HALF, "COUNTED": COUNTED,
        "token_tiles": as_gluon(environment().get_template("token_tiles.py.jinja").render()),
        "prelude": as_gluon(environment().get_template("mod_functions.py.jinja").render(scatter_arguments=())),
        "loads_per_pair": any(loads_where_live(mod) for mod in (plan.score, plan.mask, gradient) if mod),
        "bytes": lambda text, parts: " + ".join(f"{text}.block_type.nbytes".replace("%", str(p.index)) for p in parts),
    }  # fmt: skip
    own = _OWN[plan.spec.name](plan)
    arguments = plan.spec.arguments(plan)
    descriptors = tuple(a.name for a in arguments if a.is_descriptor)
    others = tuple(a.name for a in arguments if not a.is_descriptor)
    return names | own.names | {
        "constants": [*constants, *own.constants], "arguments": (*descriptors, *others),
        "role_arguments": (*descriptors, *own.buffers, *others), "pairs": plan.pairs,
        # Each pair claims tiles like a program. The first one of each is known.
        "claimers": "gl.num_programs(0)" if plan.pairs == 1 else f"{plan.pairs} * gl.num_programs(0)",
        "first_claimed": "gl.program_id(0)" if plan.pairs == 1 else "first_tile",
        "arguments_of": lambda pair: (
            *descriptors, *(name if pair == 0 else f"{name}_pair_{pair}" for name in own.buffers), *others
        ),
    }  # fmt: skip


@frozen
class _Own:
    """The variables of one Hopper template."""

    constants: list[tuple[str, object]]
    buffers: tuple[str, ...]
    names: dict[str, object]


# The next tile is claimed when this many streamed tiles are left to load. In the forward, 6 works as well, and with 2 a
# sliding window is 4 % slower.
EARLY = 3
# Slots of the ring from scheduler to producer. Tiles of at most EARLY streamed tiles are looked up this far ahead.
RECORDS = 2
# Tiles per program at the end that are claimed late even if they have at most EARLY streamed tiles.
TAIL = 2
# With two buffers of keys and values, the first TRAIL tiles of values are loaded with their keys, later ones after the
# next keys. Causal, D 128, 2,048 tokens: 264 -> 255 us. With 0, a window of 1,024 is 2 % slower. With three buffers, at
# D 64, this order is 1 to 3 % slower.
TRAIL = 2


def _hopper_forward_names(plan: KernelPlan) -> _Own:
    consumers, pairs, registers = plan.consumers, plan.pairs, FORWARD_REGISTERS[plan.consumers * plan.pairs]
    skips, trails = HALVES.name in plan.features, plan.tile.num_stages == consumers == 2
    assert not (skips and trails), "a tile that skips halves has more buffers"
    shared_lists = (*(["starts"] if plan.blocks else []), *(["halves"] if skips else []))
    parts = split_head_dim(plan.widths[0])
    buffers = (
        *(f"{x}_bufs_{p.index}" for x in ("q", "k") for p in parts), "v_bufs", "o_bufs", "q_full", "q_empty", "k_full",
        "k_empty", "v_full", "v_empty", "tile_numbers", *shared_lists, "work", "work_full", "work_empty",
        *(("bad_rows", "handed_out", "done") if plan.fixed_reference else ()), *(["first_tile"] if pairs > 1 else []),
    )  # fmt: skip
    again = ["again"] if plan.fixed_reference else []
    bits = ["bits"] if BITS.name in plan.features else []
    numbers = ["b", "h", "m0", *(["partial", "full"] if plan.blocks else []), *again, *bits]  # of a tile, for consumers
    listed = () if not plan.blocks else ("full",) if skips else ("partial", "full")
    runs = [f"{kind}_{place}" for kind in listed for place in ("run", "end")]
    return _Own(
        [
            ("CONSUMERS", consumers), ("Q_STAGES", plan.tiles_of_queries), ("SAFE", plan.score is not None),
            ("RECORDS", RECORDS), ("EARLY", EARLY), ("TAIL", TAIL), *([("TRAIL", TRAIL)] if trails else []),
            *fixed_reference.constants(plan),
        ],
        buffers,
        {
            "maximum": _maximum(plan), "exponent": _exponent(plan),
            "parts": parts, "with_sink": as_gluon(environment().get_template("with_sink.py.jinja").render()),
            "is_interval": has_intervals_only(plan), "numbers": numbers,
            "recorded": [*numbers, "b_kv", "h_kv", *runs, *(["first_half"] if skips else [])],
            "consumers": consumers, "shared_lists": shared_lists, "shares_output": plan.shares_output,
            "values_trail": trails,
            # (function, pair)
            "roles": [
                *((f"consumer_{i}", pair) for pair in range(pairs) for i in range(consumers)),
                *((role, pair) for pair in range(pairs) for role in ("producer", "scheduler")),
            ],
            "worker_warps": [4] * (consumers * pairs - 1) + [1, 1] * pairs,
            "worker_registers": [registers.consumer] * (consumers * pairs - 1) + [registers.other] * 2 * pairs,
            "weights_form": plan.weights_form, "dtype": TRITON_DTYPE[plan.dtype],
            "rounding": _PACKING[plan.dtype].replace("$2, $1", "$3, $2"),  # of two outputs
        },
    )  # fmt: skip


def _maximum(plan: KernelPlan) -> str:
    """Return the expression of what the forward keeps of a tile's scores, in the exp2 domain: their reference."""
    times_scale = "" if plan.score else " * qk_scale"
    return f"gl.max(s, 1){times_scale}{' + HEADROOM' if plan.fixed_reference else ''}"


def _exponent(plan: KernelPlan) -> str:
    """Return the expression of the forward's scores minus their reference, in the exp2 domain."""
    if plan.score is not None:
        return "s - reference[:, None]"
    if plan.batch_invariant:  # FMA contraction is off, so a separate product would be rounded
        return "gl.fma(s, qk_scale, -reference[:, None])"
    return "s * qk_scale - reference[:, None]"


def _hopper_latent_names(plan: KernelPlan) -> _Own:
    return _Own([("UNIT", plan.unit), ("FEW_SPLITS", FEW_SPLITS)], (), {"v_width": plan.widths[1]})


# PTX that converts two numbers to half precision and back.
_PACKING = {torch.bfloat16: "cvt.rn.bf16x2.f32 $0, $2, $1;", torch.float16: "cvt.rn.f16x2.f32 $0, $2, $1;"}
_UNPACKING = {
    torch.bfloat16: "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
    torch.float16: "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
}


def _hopper_dq_names(plan: KernelPlan) -> _Own:
    q_parts, v_parts = map(columns, plan.widths)
    return _Own(
        [("K_STAGES", plan.key_stages)],
        (*_tiles_of(q_parts, v_parts), "q_full", "k_full", "k_empty", "v_full", "v_empty"),
        {
            "parts": q_parts, "v_parts": v_parts,
            "roles": ["queries_0", "queries_1", "producer"], "worker_warps": [4, 1],
            "worker_registers": [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        },
    )  # fmt: skip


# Roles of kernels whose programs own keys.
_FUSED_ROLES: dict[str, object] = {
    "roles": ["keys_0", "keys_1", "queries", "producer", "scheduler"], "worker_warps": [4, 4, 1, 1],
    "worker_registers": [KEYS_REGISTERS, QUERIES_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
}  # fmt: skip
_KEY_ROLES: dict[str, dict[str, object]] = {
    "hopper_backward": _FUSED_ROLES,
    "hopper_backward_stripes": _FUSED_ROLES,
    "hopper_backward_wide": _FUSED_ROLES | {"roles": ["values", "keys", "queries", "producer", "scheduler"]},
    "hopper_dkdv": {
        "roles": ["keys_0", "keys_1", "producer", "scheduler"], "worker_warps": [4, 1, 1],
        "worker_registers": [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    },
}  # fmt: skip


def _hopper_backward_names(plan: KernelPlan) -> _Own:
    own, numbers = _of_keys(plan), ["b_kv", "h_kv", "n0", "partial", "full"]  # of a tile of keys
    return replace(
        own,
        # FILLED: tiles of queries that fit in both rings. They are loaded before their keys, whose buffer is still in
        # use.
        constants=[
            *own.constants, ("RECORDS", RECORDS), ("EARLY", EARLY), ("TAIL", TAIL),
            ("FILLED", min(plan.rings.queries, plan.tile.num_stages)), ("KEY_STAGES", plan.rings.keys),
        ],
        buffers=(
            *own.buffers, "k_full", "k_empty", "v_full", "v_empty",
            *(("ds_rows", "k_read" if plan.prefetches_keys else "dk_stored") if plan.adds_dq else ()),
            *(("sum_full",) if plan.spec.owns_dq else ()),
            "work", "work_full", "work_empty", "tile_numbers", "query_numbers",
        ),
        names=own.names | {
            "key_stages": plan.rings.keys, "prefetches_keys": plan.prefetches_keys, "counts_rows": False,
            # Expressions. With one buffer for keys, its phase is that of the values.
            "k_slot": "k_slot" if plan.rings.keys > 1 else "0",
            "k_phase": "k_phase" if plan.rings.keys > 1 else "v_phase",
            "numbers": numbers,
            "recorded": [
                *numbers, *(["block"] if plan.blocks else []),
                *(["first_query", "end_query"] if plan.trims_runs else []),
            ],
            "trims_runs": plan.trims_runs,
            "of_queries": ["b", "h", "m0", *(["bits"] if BITS.name in plan.features else [])],
        },
    )  # fmt: skip


def _tiles_of(q_parts: Sequence[HeadDimPart], v_parts: Sequence[HeadDimPart]) -> list[str]:
    """Return the names of the buffers of queries, keys, values and dO."""
    owned = zip(("q", "k", "v", "do"), (q_parts, q_parts, v_parts, v_parts), strict=True)
    return [f"{x}_bufs_{p.index}" for x, parts in owned for p in parts]


def _of_keys(plan: KernelPlan) -> _Own:
    """Return the variables that both kernels for dq, dk and dv have."""
    q_parts, v_parts = map(columns, plan.widths)
    one_more = plan.rings.queries > plan.tile.num_stages
    assert one_more or not plan.scores_ahead, "queries of the tile before are read in each step"
    return _Own(
        [("Q_STAGES", plan.rings.queries), *(_dq_constants(plan) if plan.adds_dq else [])],
        (*_tiles_of(q_parts, v_parts), *_rows(plan), *(_OF_DQ if plan.adds_dq else ())),
        {
            "parts": q_parts, "v_parts": v_parts,
            "dtype": TRITON_DTYPE[plan.dtype], "packing": _PACKING[plan.dtype], "unpacking": _UNPACKING[plan.dtype],
            "delayed": plan.delays_dk, "ahead": plan.scores_ahead, "keeps_keys": plan.keeps_keys,
            "frees_queries": plan.frees_queries,
            **_KEY_ROLES[plan.spec.name],
        },
    )  # fmt: skip


def _rows(plan: KernelPlan) -> list[str]:
    q_empty = ["q_empty"] if plan.frees_queries else []
    return ["shift_bufs", "delta_bufs", "q_full", *q_empty, "do_full", "do_empty"]


def _dq_constants(plan: KernelPlan) -> list[tuple[str, object]]:
    # Pieces of 32 columns, and groups of 64 columns.
    return [("DQ_BUFFERS", plan.rings.dq), ("DQ_PIECES", pieces_of(plan.D)), ("DQ_COLUMNS", -(-plan.widths[0] // 64))]


_OF_DQ = ("ds_bufs", "dq_bufs", "ds_full", "ds_empty")


def _hopper_wide_names(plan: KernelPlan) -> _Own:
    own = _hopper_backward_names(plan)
    # ds_rows is a ring of its own: here a tile of dO may be free before dS of an earlier one is read.
    constants = [("DS_STAGES", plan.rings.ds), ("DS_ROWS", 8)]
    return replace(
        own,
        constants=[*own.constants, *constants],
        buffers=(
            *(name for name in own.buffers if name != "dk_stored"), "p_bufs", "p_full", "p_empty", "k_read", "v_read"
        ),
        names=own.names | {"counts_rows": True},
    )  # fmt: skip


_OWN = {
    "hopper_forward": _hopper_forward_names,
    "hopper_latent": _hopper_latent_names,
    "hopper_backward": _hopper_backward_names,
    "hopper_backward_stripes": _hopper_backward_names,
    "hopper_backward_wide": _hopper_wide_names,
    "hopper_dq": _hopper_dq_names,
    "hopper_dkdv": _hopper_backward_names,
}
