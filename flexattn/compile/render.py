"""render: KernelPlan -> KernelSource, the templates filled with the plan's constants and its lowered mods."""

from __future__ import annotations

import textwrap
from functools import lru_cache

import torch

from flexattn.call.dropout import KEYS, QUERIES, ROUNDS
from flexattn.compile.head_dims import Part, pieces_of, split_head_dim
from flexattn.compile.hopper_roles import hopper_names
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.lower import Dialect, early_loads, lower, lower_early_loads, lower_score
from flexattn.compile.mod_plan import TRITON_DTYPE
from flexattn.compile.scatter import (
    LARGEST_UNITS,
    adds_along_diagonals,
    contribution_names,
    lower_additions,
    lower_contributions,
    lower_scatter,
    lower_sizes,
    needs_live,
    scatter_arguments,
    scatter_loads,
    scatter_values,
    size_names,
)
from flexattn.compile.templates import environment
from flexattn.graph.dependence import loads_by


@lru_cache(512)
def render(plan: KernelPlan) -> KernelSource:
    """Return the source of a plan's kernel: a Python file that reads as a Triton program, and how to compile it."""
    names = _names(plan) | (hopper_names(plan) if plan.is_hopper else {})
    text = environment().get_template(f"{plan.kernel}.py.jinja").render(names)
    arguments = plan.spec.arguments(plan)
    header = tuple(line for line in repr(plan).splitlines())
    return KernelSource(
        name=plan.name, text=text, header=header, signature=tuple((a.name, a.type) for a in arguments),
        divisible=tuple(a.name for a in arguments if a.divisible), num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages, maxnreg=_most_registers(plan), fp_fusion=not plan.batch_invariant,
    )  # fmt: skip


def _names(plan: KernelPlan) -> dict[str, object]:
    """Return what the templates refer to."""
    constants: list[tuple[str, object]] = [
        ("BLOCK_M", plan.tile.BLOCK_M), ("BLOCK_N", plan.tile.BLOCK_N), ("UNIT", plan.unit),
        ("PRECISION", repr(plan.precision)),
    ]  # fmt: skip
    if plan.sums:
        constants.append(("DTYPE", f"tl.{TRITON_DTYPE[plan.dtype]}"))
    if plan.sums == "integer":
        constants.append(("LARGEST_UNITS", LARGEST_UNITS))
    if plan.has_dropout:
        constants.append(("PHILOX_ROUNDS", ROUNDS))
    if plan.kernel == "backward_dq_rows":
        pieces = pieces_of(plan.D)
        constants += [("D", plan.D), ("PIECES", pieces), ("STEP", 32 if pieces % 2 else 64)]
    if plan.kernel == "backward_dkdv":
        constants.append(("PARTIAL_M", plan.tile.partial_m))
    if plan.blocks:
        constants += [("SPARSE_Q", plan.blocks[0]), ("SPARSE_KV", plan.blocks[1]), ("TILES", plan.tiles_per_block)]
    score = plan.score.argument_names() if plan.score else ()
    mask = plan.mask.argument_names() if plan.mask else ()
    return {
        "name": plan.name, "constants": constants, "mods": _mods(plan),
        "qk_parts": split_head_dim(plan.D), "v_parts": split_head_dim(plan.Dv),
        "has_score": plan.score is not None, "scales_gradient": plan.scales_gradient,
        "early_score": bool(plan.score and early_loads(plan.score)),
        "loads_by_batch": bool(plan.score and loads_by(plan.score.graph, "b")),
        "early_grad": bool(plan.grad and plan.scales_gradient and early_loads(plan.grad)),
        "has_mask": plan.mask is not None, "has_blocks": plan.blocks is not None,
        "full_tail": plan.cuts_blocks or plan.full_overhangs, "max_scores": "max_scores" in plan.features,
        "has_dlse": "dlse" in plan.features, "has_sink": "sink" in plan.features, "transposed": plan.transposed,
        "parameters": _parameters(plan),
        "batch_invariant": plan.batch_invariant,
        "has_dropout": plan.has_dropout, "keys_together": _keys_together(plan),
        "settles": _settles(plan),
        "dropout_arguments": _dropout_arguments(plan),
        "scale": plan.scale,
        "natural": plan.exact, "to_exp2": _to_exp2(plan), "exponent": _exponent(plan),
        "score_arguments": score, "mask_arguments": mask, "mod_arguments": (*score, *mask),
        **_scatter_names(plan), "scatter_live": lambda loop: _scatter_live(plan, loop),
        "opaque": lambda first: _opaque(plan, first), "far": lambda *a: _far(plan, *a),
        "inside": lambda loop: _inside(plan, loop), "tma": plan.tma, "products_first": plan.tile.PRODUCTS_FIRST,
        "add_product": lambda *a: _add_product(plan, *a),
        "stream": lambda *a: _stream(plan, *a), "stream_arguments": _stream_arguments(plan),
        "stream_descriptors": tuple(d for d in _stream_descriptors(plan) if "partial" not in d),
        "partial_descriptors": tuple(d for d in _stream_descriptors(plan) if "partial" in d),
        "partial_arguments": tuple(_partial_name(plan, n) for n in _stream_arguments(plan)),
        "each": _each, "names": _joined, "tile": _tile, "guard": _guard, "store_guard": _store_guard,
    }  # fmt: skip


def _parameters(plan: KernelPlan) -> str:
    """Return the kernel's parameters as the lines of its definition."""
    names = [f"{a.name}," for a in plan.spec.arguments(plan)]
    return textwrap.fill(" ".join(names), 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _scatter_names(plan: KernelPlan) -> dict[str, object]:
    """Return what the templates refer to of gradients of captured tensors."""
    makes_dq = plan.kernel == "backward_dq"
    parts = tuple(f"dq_{p.index}" for p in split_head_dim(plan.D)) if makes_dq else ()
    found: dict[str, object] = {
        "sums": plan.sums, "makes_dq": makes_dq, "scatter_arguments": (), "scatter_values": (), "scatter_loads": (),
        "sizes": (), "carried": parts, "contributions": (),
    }  # fmt: skip
    if plan.grad is None or not plan.sums:
        return found
    sizes = size_names(plan.grad) if plan.sums == "sizes" else ()
    return found | {
        "scatter_arguments": tuple(n for n, _ in scatter_arguments(plan.grad, plan.sums)),
        "scatter_values": scatter_values(plan.grad, plan.sums), "scatter_loads": scatter_loads(plan.grad, plan.sums),
        "sizes": sizes, "carried": (*parts, *sizes), "contributions": contribution_names(plan.grad),
    }  # fmt: skip


# Scores are kept in the exp2 domain where the factor log2(e) can join others. Where a plan is exact its rounding would
# be felt: the score of a score_mod, and in the backward any score, is then kept as it is.


def _to_exp2(plan: KernelPlan) -> str:
    """Return what takes the forward's scores into the exp2 domain."""
    return " * qk_scale" if plan.score is None else " * LOG2E" if plan.exact else ""


def _exponent(plan: KernelPlan) -> str:
    """Return the forward's scores less the maximum, in the exp2 domain."""
    factor = _to_exp2(plan).removeprefix(" * ")
    if plan.batch_invariant and factor:  # the compiler, which may fuse nothing there, would round the product
        return f"{'gl' if plan.is_hopper else 'tl'}.fma(s, {factor}, -m_safe[:, None])"
    return f"s{_to_exp2(plan)} - m_safe[:, None]"


def _add_product(plan: KernelPlan, acc: str, a: str, b: str, part: Part) -> str:
    """Return acc + a @ b, the name of each part's tensor with a % for its number.

    In float32 a product on the FMA units adds each of its terms to what it is given. The sum over all keys would be
    rounded at every key; so each tile is summed by itself first (dq of 490 keys: rmse 8e-8 before, dense 5e-8). Written
    as a sum, Triton would join the two again.
    """
    acc, a, b = (x.replace("%", str(part.index)) for x in (acc, a, b))
    if plan.dtype == torch.float32 and plan.precision == "ieee":
        return f"tl.fma(tl.dot({a}, {b}, input_precision=PRECISION), 1.0, {acc})"
    return f"tl.dot({a}, {b}, {acc}, input_precision=PRECISION)"


def _mods(plan: KernelPlan) -> list[str]:
    dialect = Dialect(plan.exact, plan.target.backend == "cuda", plan.float_index)
    found = []
    if plan.mask:
        found.append(lower(plan.mask, "mask_mod", dialect.of_masks(dialect.ptx)))
    for mod, function in ((plan.score, "score_loads"), (plan.grad if plan.scales_gradient else None, "grad_loads")):
        if mod and early_loads(mod):
            found.append(lower_early_loads(mod, function, dialect, _streamed(plan)))
    if plan.score:
        found.append(lower_score(plan.score, "score_mod", dialect))
    if plan.grad and plan.scales_gradient:
        found.append(lower(plan.grad, "score_grad", dialect))
    if plan.grad and plan.sums == "sizes":
        found.append(lower_sizes(plan.grad, "score_sizes", dialect))
    elif plan.grad and plan.sums and plan.spec.captures == "adds over batch":
        found.append(lower_contributions(plan.grad, "score_contributions", dialect))
        found.append(lower_additions(plan.grad, "score_additions", dialect, plan.sums))
    elif plan.grad and plan.sums:
        found.append(lower_scatter(plan.grad, "score_scatter", dialect, plan.sums))
    return found


def _most_registers(plan: KernelPlan) -> int | None:
    """Return the limit of a thread's registers, None where the compiler is free.

    With 168 three programs of 4 warps share a multiprocessor. Integer sums along diagonals would take 181 at D 64:
    T5's dQ took 2.06 ms with them (8x32x2048, H200), with the limit 1.6.
    """
    if plan.sums != "integer" or plan.grad is None or not adds_along_diagonals(plan.grad.graph):
        return None
    fits = plan.tile.num_warps == 4 and plan.tile.BLOCK_M * plan.tile.BLOCK_N <= 4096 and max(plan.D, plan.Dv) <= 64
    return 168 if fits and str(plan.target) == "sm_90" else None


def _keys_together(plan: KernelPlan) -> int:
    """Return how many keys' numbers a tile makes at once; 0 where tiles may begin within a group of dropout's counters.

    A product's transpose has two of the four keys of a counter in one thread.
    """
    blocks = plan.blocks or (QUERIES, KEYS)
    if blocks[0] % QUERIES or blocks[1] % (KEYS // 2):
        return 0
    return KEYS // 2 if plan.transposed or plan.tile.BLOCK_N % KEYS or blocks[1] % KEYS else KEYS


def _settles(plan: KernelPlan) -> bool:
    """Tell whether products of a tile have 16 terms, and one of their operands is made of joined numbers."""
    terms = min(plan.tile.BLOCK_M, plan.tile.partial_m) if plan.transposed else plan.tile.BLOCK_N
    return plan.target.backend == "cuda" and plan.has_dropout and terms == 16 and _keys_together(plan) > 0


def _dropout_arguments(plan: KernelPlan) -> tuple[str, ...]:
    """Return what the inner loop needs to know which weights are dropped, beside places."""
    first = ("n0",) if plan.transposed else ("m0",) if plan.kernel == "forward" else ()
    return ("seed", *first, "drop_below", "keep_scale", "heads_q") if plan.has_dropout else ()


def _streamed(plan: KernelPlan) -> str:
    """Return the index that grows in the inner loop."""
    return "q_idx" if plan.transposed else "kv_idx"


def _opaque(plan: KernelPlan, first: str) -> str:
    """Return the first streamed index of a tile such that no address is kept from step to step."""
    return f"opaque({first})" if plan.target.backend == "cuda" else first


def _far(plan: KernelPlan, first: str, offsets: str) -> str:
    """Return the streamed indices of a tile as addresses need them."""
    start = f"{_opaque(plan, first)}.to(tl.int64)" if plan.target.backend == "cuda" else first
    return f"({start} + {offsets})[None, :]"


def _scatter_live(plan: KernelPlan, loop: str) -> str:
    """Return which places count in the gradients of captured tensors; None where those of all others are 0 already."""
    if plan.grad is None or not needs_live(plan.grad):
        return "None"
    return "live & (q_idx < row_end)" if loop == "cut" else "(q_idx < row_end)"


def _inside(plan: KernelPlan, loop: str) -> str:
    """Return which places of a tile are inside of the lengths, or None where nothing depends on knowing it.

    Rows that a program owns are computed alone and stored under a guard, so they need no check unless a captured tensor
    is read for each place. In a "full" loop streamed rows are inside too; in a "cut" one the last may pass the end.
    """
    transposed = plan.kernel == "backward_dkdv"
    own = "(kv_idx < key_end)" if transposed else "(q_idx < row_end)"
    streamed = "(q_idx < hi)" if transposed else "(kv_idx < hi)"
    reads = _reads_each_place(plan)
    if loop == "full":
        return own if reads else "None"
    if reads:
        return f"{own} & {streamed}"
    # Queries past the end have lse +inf and need no check, but those of the next run do where blocks cut tiles.
    return streamed if not transposed or plan.cuts_blocks else "None"


def _reads_each_place(plan: KernelPlan) -> bool:
    return any("mask=live" in mod or ", live)" in mod for mod in _mods(plan))


def _each(pattern: str, parts: tuple[Part, ...]) -> str:
    return ", ".join(pattern.replace("%", str(p.index)) for p in parts)


def _joined(names: tuple[str, ...]) -> str:
    return "".join(f"{n}, " for n in names)


def _tile(base: str, rows: str, stride: str, part: Part) -> str:
    """Return the addresses of a tile [rows, part.width]."""
    columns = f"tl.arange(0, {part.width})[None, :]"
    if part.offset:
        columns = f"({part.offset} + {columns})"
    return f"{base} + {rows}[:, None] * ({stride} * UNIT) + {columns}"


def _stream_descriptors(plan: KernelPlan) -> tuple[str, ...]:
    """Return the arguments that are tensor descriptors."""
    return tuple(a.name for a in plan.spec.arguments(plan) if a.is_descriptor)


def _partial_name(plan: KernelPlan, argument: str) -> str:
    return argument.replace("_desc_", "_desc_partial_") if plan.transposed and plan.has_partial_step else argument


def _stream_arguments(plan: KernelPlan) -> tuple[str, ...]:
    """Return what the inner loop needs to address the tiles that it streams."""
    first, second, rows = ("q", "do", "m") if plan.kernel == "backward_dkdv" else ("k", "v", "n")
    if plan.tma:
        head = ("b", "h") if plan.kernel == "backward_dkdv" else ("b_kv", "h_kv")
        names = tuple(d for d in _stream_descriptors(plan) if "partial" not in d)
        return names if head == ("b", "h") else (*names, *head)
    return f"{first}_base", f"{second}_base", f"stride_{first}{rows}", f"stride_{second}{rows}"


def _stream(plan: KernelPlan, tensor: str, rows: str, part: Part) -> str:
    """Return the load of one streamed tile; the TMA unit fills zeros outside of the tensor, so it needs no guard."""
    if plan.tma:
        head = "b, h" if plan.kernel == "backward_dkdv" else "b_kv, h_kv"
        size = "STEP" if plan.kernel == "backward_dkdv" else f"BLOCK_{rows.upper()}"
        load = f"{tensor}_desc_{part.index}.load([{head}, {rows}0, {part.offset}])"
        return f"{load}.reshape({size}, {part.width})"
    address = _tile(f"{tensor}_base + {rows}0 * {tensor}_step", f"offs_{rows}", f"stride_{tensor}{rows}", part)
    return f"tl.load({address}, {_guard('BOUNDED', f'({rows}0 + offs_{rows}) < hi', part)})"


def _guard(condition: str, rows: str, part: Part) -> str:
    """Return the arguments of a load: rows are checked where `condition` holds, padding columns always."""
    row_mask, columns = f"({rows})[:, None]", f"(tl.arange(0, {part.width}) < {part.used})[None, :]"
    padded = part.used < part.width
    if condition == "True":
        return f"mask={row_mask}{f' & {columns}' if padded else ''}, other=0.0"
    if padded:
        return f"mask={row_mask} & {columns} if {condition} else {columns}, other=0.0"
    return f"mask={row_mask} if {condition} else None, other=0.0 if {condition} else None"


def _store_guard(rows: str, part: Part) -> str:
    padded = part.used < part.width
    return f"mask=({rows})[:, None]{f' & (tl.arange(0, {part.width}) < {part.used})[None, :]' if padded else ''}"
