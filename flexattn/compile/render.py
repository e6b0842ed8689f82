"""render: KernelPlan -> KernelSource, the templates filled with the plan's constants and its lowered mods."""

from __future__ import annotations

import ast
from functools import lru_cache

import torch

from flexattn.call.dropout import KEYS, QUERIES, ROUNDS
from flexattn.compile.hopper_context import hopper_descriptors, hopper_names, shared_layout
from flexattn.compile.kernel_plan import (
    BATCH_CAPTURES,
    CAPTURES,
    SCATTERS,
    SIZES,
    KernelPlan,
    Part,
    pieces_of,
    split_head_dim,
)
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.lower import (
    TRITON_DTYPE,
    TRITON_POINTER,
    Dialect,
    early_loads,
    lower,
    lower_early_loads,
    lower_score,
)
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
from flexattn.graph.mod_graph import ModGraph


@lru_cache(512)
def render(plan: KernelPlan) -> KernelSource:
    """Return the source of a plan's kernel: a Python file that reads as a Triton program, and how to compile it."""
    names = _names(plan) | (hopper_names(plan) if plan.is_hopper else {})
    text = environment().get_template(f"{plan.kernel}.py.jinja").render(names)
    arguments = _kernel_arguments(text, plan.name)
    types = _argument_types(plan)
    signature = tuple((a, types[a] if a in types else _default_type(a, plan)) for a in arguments)
    header = tuple(line for line in repr(plan).splitlines())
    return KernelSource(
        name=plan.name, text=text, header=header, signature=signature,
        divisible=_divisible(plan, signature), num_warps=plan.tile.num_warps, num_stages=plan.tile.num_stages,
        maxnreg=_most_registers(plan), fp_fusion=not plan.batch_invariant,
    )  # fmt: skip


def _names(plan: KernelPlan) -> dict[str, object]:
    """Return what the templates of a plan's kernel refer to."""
    mods = _mods(plan)
    score = plan.score.argument_names() if plan.score else ()
    mask = plan.mask.argument_names() if plan.mask else ()
    return {
        # The file: the kernel's name, its constants and its lowered mods.
        "name": plan.name, "constants": _constants(plan, mods), "mods": mods,
        # What the kernel computes.
        "has_score": plan.score is not None,  # score_mod is called
        "has_mask": plan.mask is not None,  # mask_mod is called for partial runs
        "has_blocks": plan.blocks is not None,  # the lists of a BlockMask are walked
        "has_dropout": plan.has_dropout, "has_sink": plan.has_sink, "has_dlse": plan.has_dlse,
        "max_scores": plan.max_scores,  # the forward stores the maximum of each row too
        "scales_gradient": plan.scales_gradient,  # score_grad is called
        "early_score": bool(plan.score and early_loads(plan.score)),  # score_loads is called before the product
        "early_grad": bool(plan.grad and plan.scales_gradient and early_loads(plan.grad)),  # and grad_loads
        "loads_by_batch": bool(plan.score and _loads_by_batch(plan.score.graph)),  # score_loads depends on b
        # How tiles are loaded.
        "tma": plan.tma,  # through tensor descriptors
        "full_tail": plan.cuts_blocks or plan.full_overhangs,  # the last tile of a full run may be partial
        "qk_parts": split_head_dim(plan.D), "v_parts": split_head_dim(plan.Dv),  # of the head dims
        # Names of arguments.
        "scale": "qk_scale" if _scales_to_exp2(plan) else "sm_scale",
        "score_arguments": score, "mask_arguments": mask, "mod_arguments": (*score, *mask),
        "dropout_parameters": ("seed_ptr", "drop_below", "keep_scale") if plan.has_dropout else (),  # of the kernel
        "dropout_arguments": _dropout_arguments(plan),  # of the inner loop
        "stream_arguments": _stream_arguments(plan),  # of the inner loop: addresses of streamed tiles
        "partial_arguments": tuple(_partial_name(plan, n) for n in _stream_arguments(plan)),  # the same in partial runs
        "stream_descriptors": tuple(d for d, _ in stream_descriptors(plan) if "partial" not in d),  # of the kernel
        "partial_descriptors": tuple(d for d, _ in stream_descriptors(plan) if "partial" in d),
        **_scatter_names(plan),
        # Lists of names as text.
        "each": _each, "names": _joined,
    }  # fmt: skip


_INNER_LOOPS = ("forward", *SCATTERS, "backward_dkdv")  # Triton kernels that walk runs of tiles


def _constants(plan: KernelPlan, mods: list[str]) -> list[tuple[str, object]]:
    """Return (name, value) of the kernel file's tl.constexpr constants."""
    found: list[tuple[str, object]] = [
        ("BLOCK_M", plan.tile.BLOCK_M), ("BLOCK_N", plan.tile.BLOCK_N),
        ("UNIT", plan.unit),  # elements in the unit that strides are passed in
        ("PRECISION", repr(plan.precision)),  # of float32 products
    ]  # fmt: skip
    if plan.blocks:
        found += [("SPARSE_Q", plan.blocks[0]), ("SPARSE_KV", plan.blocks[1]), ("TILES", plan.tiles_per_block)]
    if plan.kernel in (*_INNER_LOOPS[1:], "backward_delta"):
        found.append(("EXACT", plan.exact))  # shift is lse itself, not lse in the exp2 domain
    if plan.kernel in _INNER_LOOPS:
        found += [
            ("PTX", plan.target.backend == "cuda"),  # inline PTX may be called
            ("FMA_PRODUCTS", plan.dtype == torch.float32 and plan.precision == "ieee"),
            # A mod loads from a captured tensor per score and must not do so outside of the lengths. Without such loads
            # the rows that a program owns need no mask but that of the store.
            ("READS_EACH_PLACE", any("mask=live" in text or ", live)" in text for text in mods)),
        ]
    if plan.kernel == "forward":
        found += [
            ("HAS_SCORE", plan.score is not None), ("BATCH_INVARIANT", plan.batch_invariant),
            ("SCORES_IN_EXP2", plan.score is not None and not plan.exact),  # as score_mod returns them
        ]  # fmt: skip
    if plan.kernel in ("backward_dq", CAPTURES, SIZES, "backward_dkdv"):
        found.append(("PRODUCTS_FIRST", plan.tile.PRODUCTS_FIRST))
    if plan.kernel == "backward_dkdv":
        found += [("PARTIAL_M", plan.tile.partial_m), ("CUTS_BLOCKS", plan.cuts_blocks)]
    if plan.sums:
        found.append(("DTYPE", f"tl.{TRITON_DTYPE[plan.dtype]}"))
        # score_scatter is told which scores count. Otherwise the contributions of all others are 0 already.
        found.append(("SUMS_ASK_LIVE", plan.grad is not None and needs_live(plan.grad)))
    if plan.sums == "integer":
        found.append(("LARGEST_UNITS", LARGEST_UNITS))
    if plan.has_dropout:
        found += [
            ("PHILOX_ROUNDS", ROUNDS), ("TRANSPOSED", plan.transposed), ("KEYS_TOGETHER", _keys_together(plan)),
            ("SETTLES", _settles(plan)),
        ]  # fmt: skip
    if plan.kernel == "backward_dq_rows":
        pieces = pieces_of(plan.D)
        found += [("D", plan.D), ("PIECES", pieces), ("STEP", 32 if pieces % 2 else 64)]
    return found


def _loads_by_batch(graph: ModGraph) -> bool:
    """Tell whether what a mod reads differs between batches."""
    return any(node.op == "load" and "b" in graph.dependence[i] for i, node in enumerate(graph.nodes))


def _scatter_names(plan: KernelPlan) -> dict[str, object]:
    """Return what the templates refer to for gradients of captured tensors.

    sums: float, integer or sizes (scatter.SUMS). scatter_arguments: of the kernel; scatter_values: the same as lowered
    functions take them, and scatter_loads: (value, pointer) of those that are loaded once. sizes and contributions:
    names of sums over a row and over the batch. carried: accumulators of the inner loop.
    """
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


def _scales_to_exp2(plan: KernelPlan) -> bool:
    """Whether q k^T is brought into the exp2 domain by its own scale: no score_mod wants to see it."""
    return plan.score is None and not (plan.exact and plan.kernel != "forward")


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
    elif plan.grad and plan.sums and plan.kernel == BATCH_CAPTURES:
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


def _each(pattern: str, parts: tuple[Part, ...]) -> str:
    """Return the pattern for each part of a head dim, with the part's number in place of %."""
    return ", ".join(pattern.replace("%", str(p.index)) for p in parts)


def _joined(names: tuple[str, ...]) -> str:
    """Return arguments of a list that goes on."""
    return "".join(f"{n}, " for n in names)


def stream_descriptors(plan: KernelPlan) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (argument, shape of a tile) of each tensor descriptor that the kernel streams tiles through."""
    if plan.is_hopper:
        return hopper_descriptors(plan)
    if not plan.tma:
        return ()
    t = plan.tile
    tensors, rows = (("q", "do"), t.BLOCK_M) if plan.transposed else (("k", "v"), t.BLOCK_N)
    dims = (split_head_dim(plan.D), split_head_dim(plan.Dv))
    parts = [(tensor, p) for tensor, d in zip(tensors, dims, strict=True) for p in d]
    found = [(f"{tensor}_desc_{p.index}", (1, 1, rows, p.width)) for tensor, p in parts]
    if _has_partial_step(plan):
        found += [(f"{tensor}_desc_partial_{p.index}", (1, 1, t.partial_m, p.width)) for tensor, p in parts]
    return tuple(found)


def described(descriptor: str, tile: tuple[int, ...]) -> str:
    """Return the tensor [B, H, rows, D], or the array of sums of rows, that a descriptor's argument describes."""
    name = descriptor.partition("_desc")[0]
    if len(tile) == 4:
        return name
    return "dq_sum_ptr" if name == "dq" else f"{name}_ptr"


def _has_partial_step(plan: KernelPlan) -> bool:
    return plan.kernel == "backward_dkdv" and plan.blocks is not None and plan.tile.partial_m != plan.tile.BLOCK_M


def _partial_name(plan: KernelPlan, argument: str) -> str:
    return argument.replace("_desc_", "_desc_partial_") if _has_partial_step(plan) else argument


def _stream_arguments(plan: KernelPlan) -> tuple[str, ...]:
    """Return what the inner loop needs to address the tiles that it streams."""
    first, second, rows = ("q", "do", "m") if plan.kernel == "backward_dkdv" else ("k", "v", "n")
    if plan.tma:
        head = ("b", "h") if plan.kernel == "backward_dkdv" else ("b_kv", "h_kv")
        names = tuple(d for d, _ in stream_descriptors(plan) if "partial" not in d)
        return names if head == ("b", "h") else (*names, *head)
    return f"{first}_base", f"{second}_base", f"stride_{first}{rows}", f"stride_{second}{rows}"


def _kernel_arguments(text: str, name: str) -> list[str]:
    """Return the parameters of the kernel as the rendered file has them: the template is their one place."""
    (kernel,) = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name]
    return [a.arg for a in kernel.args.args]


def _argument_types(plan: KernelPlan) -> dict[str, str]:
    found: dict[str, str] = {}
    for mod in (plan.score, plan.mask):
        if mod:
            found.update(mod.arguments())
    if plan.grad and plan.sums:
        found.update(scatter_arguments(plan.grad, plan.sums))
    return found


_FLOAT_POINTERS = {"dq_sum_ptr", "lse_ptr", "sink_ptr", "shift_ptr", "max_ptr", "delta_ptr", "dlse_ptr"}
_SCALES = {"keep_scale", "sm_scale", "qk_scale", "q_sign", "dq_scale", "dk_scale"}
_ROW_STRIDES = {f"stride_{t}{d}" for t in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for d in ("m", "n")}


def _default_type(argument: str, plan: KernelPlan) -> str:
    """Return the Triton type of an argument that is not a mod's."""
    if argument in (descriptors := dict(stream_descriptors(plan))):
        tile = descriptors[argument]
        dtype = torch.float32 if described(argument, tile).endswith("_ptr") else plan.dtype
        layout = f",{shared_layout(tile, dtype)}" if plan.is_hopper else ""
        return f"tensordesc<{TRITON_POINTER[dtype][1:]}{list(tile)}{layout}>"
    if argument in _FLOAT_POINTERS:
        return "*fp32"
    if argument in _SCALES:
        return "fp32"
    if argument == "seed_ptr":
        return "*i64"
    if argument.endswith("_ptr"):
        is_index = argument.startswith(("kv_", "q_partial", "q_full", "q_order", "counter"))
        return "*i32" if is_index else TRITON_POINTER[plan.dtype]
    if argument.startswith("stride_mask"):
        return "i32"
    if argument in _ROW_STRIDES:
        return "i64" if plan.wide_rows else "i32"
    return "i64" if argument.startswith("stride_") else "i32"


def _divisible(plan: KernelPlan, signature: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the pointers that are multiples of 16 bytes; strides carry their alignment by being passed in units."""
    found = []
    ours = {"shift_ptr", "delta_ptr"}  # allocated by the engine
    own = {"q_ptr", "k_ptr", "v_ptr", "do_ptr", "o_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
    aligned_captures = {
        f"{mod.capture_name(i)}_ptr"
        for mod in (plan.score, plan.mask)
        if mod
        for i, layout in enumerate(mod.layouts)
        if layout.aligned and mod.graph.captures[i].ndim
    }
    for name, kind in signature:
        if kind.startswith("*") and (name in ours or (name in own and plan.aligned) or name in aligned_captures):
            found.append(name)
    return tuple(found)
