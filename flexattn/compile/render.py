"""render: KernelPlan -> KernelSource. The templates are rendered with the plan's constants and lowered mods."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from functools import lru_cache

from flexattn.compile.constants import constants_of
from flexattn.compile.head_dims import HeadDimPart, split_head_dim
from flexattn.compile.hopper_roles import hopper_names
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.lower import Dialect, early_loads, lower, lower_early_loads, lower_score
from flexattn.compile.operands import streamed_descriptors
from flexattn.compile.row_bounds import lower_row_interval
from flexattn.compile.scatter import (
    adds_along_diagonals,
    contribution_names,
    lower_additions,
    lower_contributions,
    lower_scatter,
    lower_sizes,
    scatter_arguments,
    scatter_loads,
    scatter_values,
    size_names,
)
from flexattn.compile.templates import environment
from flexattn.graph.dependence import loads_by


@lru_cache(512)
def render(plan: KernelPlan) -> KernelSource:
    """Return the source of a plan's kernel, with its compile options."""
    # hopper_names lowers the mods by hopper_mods, _triton_names by _triton_mods.
    names = _names(plan) | (hopper_names(plan) if plan.is_hopper else _triton_names(plan))
    text = environment().get_template(f"{plan.spec.name}.py.jinja").render(names)
    arguments = plan.spec.arguments(plan)
    return KernelSource(
        name=plan.name, text=text, header=tuple(repr(plan).splitlines()),
        signature=tuple((a.name, a.type) for a in arguments),
        divisible=tuple(a.name for a in arguments if a.divisible), num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages, maxnreg=_most_registers(plan), fp_fusion=not plan.batch_invariant,
    )  # fmt: skip


def _names(plan: KernelPlan) -> dict[str, object]:
    """Return the variables of the templates of a plan's kernel."""
    score = plan.score.argument_names() if plan.score else ()
    mask = plan.mask.argument_names() if plan.mask else ()
    return {
        "name": plan.name,  # of the kernel function
        # What the kernel computes.
        "has_score": plan.score is not None,  # score_mod is called
        "has_mask": plan.mask_of_pairs is not None,  # mask_mod is called for partial runs
        "intervals": plan.intervals,  # each query attends to an interval of keys, which row_interval returns
        "has_blocks": plan.blocks is not None,  # the kernel iterates over the block lists of a BlockMask
        "features": plan.features,  # names of the optional parts that the kernel has
        "loads_sequence": bool({"seqused_k", "q_offsets"} & set(plan.features)),  # by sequence.py.jinja
        "paged": bool(plan.page_size),
        "scales_gradient": plan.scales_gradient,  # score_grad is called
        "early_score": bool(plan.score and early_loads(plan.score)),  # score_loads is called before the product
        "early_grad": bool(plan.grad and plan.scales_gradient and early_loads(plan.grad)),  # and grad_loads
        "loads_by_batch": bool(plan.score and loads_by(plan.score.graph, "b")),  # score_loads depends on b
        # How tiles are loaded.
        "tma": plan.tma,  # through tensor descriptors
        "full_tail": plan.cuts_runs,  # the last tile of a full run may be partial
        "qk_parts": split_head_dim(plan.D), "v_parts": split_head_dim(plan.Dv),  # of the head dims
        "in_tiles": plan.token_tile is not None,  # tensors hold a row-major grid of tokens, computed tile by tile
        "one_loop": plan.one_loop,  # of forward_split
        "reads_column_pairs": plan.reads_column_pairs,  # two columns of float8 values are loaded as one element
        "accumulators": _accumulators(plan),  # of the inner loop of the forward
        # Names of arguments.
        "parameters": _parameters(plan),  # of the kernel
        "scale": plan.scale,
        "score_arguments": score, "mask_arguments": mask,
        "mod_arguments": (*score, *(mask if plan.mask_of_pairs else ())),  # of the inner loop
        "interval_arguments": ("first_key", "row_lo", "row_hi") if plan.intervals else (),  # of the inner loop
        "dropout_arguments": _dropout_arguments(plan),  # of the inner loop
        "stream_arguments": _stream_arguments(plan),  # of the inner loop: addresses of streamed tiles
        "partial_arguments": _stream_arguments(plan, partial=plan.has_partial_step),  # the same in partial runs
        **_scatter_names(plan),
        # Functions that format lists of names.
        "each": _each, "names": _joined,
    }  # fmt: skip


def _triton_names(plan: KernelPlan) -> dict[str, object]:
    """Return the additional variables of Triton templates."""
    return {"constants": constants_of(plan), "mods": _triton_mods(plan)}


def _parameters(plan: KernelPlan) -> str:
    """Return the kernel's parameter list, wrapped to the line length."""
    names = " ".join(f"{a.name}," for a in plan.spec.arguments(plan))
    return textwrap.fill(names, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _scatter_names(plan: KernelPlan) -> dict[str, object]:
    """Return the template variables for gradients of captured tensors.

    - sums: "float", "integer" or "sizes" (KernelPlan.sums).
    - scatter_arguments: arguments of the kernel. scatter_values: the same as passed to the lowered functions.
      scatter_loads: (value, pointer) of the arguments that are loaded once.
    - sizes and contributions: names of sums over a row and over the batch.
    - carried: accumulators of the inner loop.
    """
    makes_dq = "dq" in plan.spec.gradients
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


def _triton_mods(plan: KernelPlan) -> list[str]:
    dialect = Dialect(plan.exact, plan.target.backend == "cuda", plan.float_index)
    found = []
    if plan.mask:
        of_masks = dialect.of_masks(dialect.ptx)
        found.append(
            lower_row_interval(plan.mask, "row_interval", replace(of_masks, columns="kv_idx"))
            if plan.intervals
            else lower(plan.mask, "mask_mod", of_masks)
        )
    for mod, function in ((plan.score, "score_loads"), (plan.grad if plan.scales_gradient else None, "grad_loads")):
        if mod and early_loads(mod):
            found.append(lower_early_loads(mod, function, dialect, _streamed(plan)))
    if plan.score:
        found.append(lower_score(plan.score, "score_mod", dialect))
    if plan.grad and plan.scales_gradient:
        found.append(lower(plan.grad, "score_grad", dialect))
    if plan.grad and plan.sums == "sizes":
        found.append(lower_sizes(plan.grad, "score_sizes", dialect))
    elif plan.grad and plan.sums and plan.spec.sums_over_batch:
        found.append(lower_contributions(plan.grad, "score_contributions", dialect))
        found.append(lower_additions(plan.grad, "score_additions", dialect, plan.sums))
    elif plan.grad and plan.sums:
        found.append(lower_scatter(plan.grad, "score_scatter", dialect, plan.sums))
    return found


def _most_registers(plan: KernelPlan) -> int | None:
    """Return the limit on registers per thread, or None for no limit.

    With 168 registers, three programs of 4 warps fit on an SM. Without a limit, sums along diagonals use 175 to 213 at
    D 64. T5's dQ with integer sums took 2.06 ms without the limit and 1.6 ms with it (8x32x2048, H200). The backward of
    relative_bias with float sums and a causal mask takes 0.97 of its time.
    """
    if plan.reads_column_pairs and plan.spec.splits_keys and plan.tile.num_warps == 4 and plan.tile.BLOCK_M <= 32:
        return 168
    if plan.sums not in ("integer", "float") or plan.grad is None or not adds_along_diagonals(plan.grad.graph):
        return None
    fits = plan.tile.num_warps == 4 and plan.tile.BLOCK_M * plan.tile.BLOCK_N <= 4096 and max(plan.D, plan.Dv) <= 64
    return 168 if fits and plan.target.is_hopper else None


def _accumulators(plan: KernelPlan) -> tuple[str, ...]:
    """Return the names of the sums of weighted values."""
    parts = [f"acc_{p.index}" for p in split_head_dim(plan.Dv)]
    return tuple([f"{part}_{half}" for part in parts for half in ("even", "odd")] if plan.reads_column_pairs else parts)


def _dropout_arguments(plan: KernelPlan) -> tuple[str, ...]:
    """Return the inner loop's arguments for dropout, besides the positions."""
    first = ("n0",) if plan.transposed else ("m0",) if plan.is_forward else ()
    place = ("drop_q", "drop_kv", "drop_bh", "drop_heads")
    return ("seed", *first, "drop_below", "keep_scale", *place) if plan.has_dropout else ()


def _streamed(plan: KernelPlan) -> str:
    """Return the index that the inner loop iterates over."""
    return "q_idx" if plan.transposed else "kv_idx"


def _each(pattern: str, parts: tuple[HeadDimPart, ...]) -> str:
    """Return the pattern for each part of a head dim, comma-separated, with % replaced by the part's index."""
    return ", ".join(pattern.replace("%", str(p.index)) for p in parts)


def _joined(names: tuple[str, ...]) -> str:
    """Return the names for the start of an argument list, each followed by a comma."""
    return "".join(f"{n}, " for n in names)


def _stream_arguments(plan: KernelPlan, partial: bool = False) -> tuple[str, ...]:
    """Return the inner loop's arguments that address the streamed tiles. `partial`: those of partial blocks."""
    first, second, rows = ("q", "do", "m") if plan.transposed else ("k", "v", "n")
    if plan.tma:
        names = tuple(d.argument for d in streamed_descriptors(plan, 0, partial and plan.transposed))
        return names if plan.transposed else (*names, "b_kv", "h_kv")
    strides = f"stride_{first}{rows}", f"stride_{second}{rows}"
    sign = ("q_sign",) if plan.one_loop and plan.score is None else ()
    pages = ("pages", "stride_kb", "stride_vb", "num_pages") if plan.page_size else ()
    descales: tuple[str, ...] = ("s_scale",) if "descales" in plan.features else ()
    if "page_descales" in plan.features:
        descales += ("k_descale", "stride_k_descale", "v_descale", "stride_v_descale")
    return f"{first}_base", f"{second}_base", *strides, *sign, *pages, *descales
