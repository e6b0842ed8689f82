"""plan: from a problem to the KernelPlan of each kernel: tile, alignment, what loads need no guard."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.capture_sums import sums_integers
from flexattn.compile.kernel_plan import BATCH_CAPTURES, FUSED, SCATTERS, SIZES, TRANSPOSED, KernelPlan
from flexattn.compile.lower import CaptureLayout, ModPlan
from flexattn.compile.scatter import without_sites
from flexattn.compile.shared_memory import fit
from flexattn.compile.tile_choice import choose
from flexattn.compile.tiles import Tile, TileKey
from flexattn.errors import OptionError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.dependence import adds_to_score, loads_by, loads_each_place
from flexattn.graph.magnitudes import FLOAT_INDEX_LIMIT
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.ranges import Range, index_ranges
from flexattn.machine.target import Target
from flexattn.options import LARGEST_TILE, option

# Rows of a program where they are not aligned to 16 bytes. Fewer than 64 rows keep Triton from wgmma: fed from
# registers it read outside of shared memory (H200, triton 3.6; D 33, 64, 130).
_UNALIGNED_ROWS = 32

# kernel_options that set a kernel's tile, as PyTorch names them.
_TILE_OPTIONS = {
    "forward": ("BLOCK_M", "BLOCK_N"),
    "backward_dkdv": ("BLOCK_M1", "BLOCK_N1"),
    **dict.fromkeys(SCATTERS, ("BLOCK_M2", "BLOCK_N2")),
}


def plan_kernel(
    kernel: str, problem: Problem, target: Target, tensors: list[Tensor], has_dlse: bool, tile: Tile | None = None
) -> KernelPlan:
    """Plan one kernel of a problem; `tensors` are those [B, H, rows, D] that it reads and writes.

    `tile` takes the place of the one in the tables, and is changed as that would be.
    """
    if kernel == "backward_delta":
        Dv = problem.value.size(-1)
        aligned = all(is_aligned(t) for t in tensors)
        tile = _tile(kernel, problem, target, Dv, Dv, aligned)
        return KernelPlan(
            kernel, target, problem.query.dtype, Dv, Dv, tile, aligned, exact=_exact(problem), has_dlse=has_dlse,
            batch_invariant=_batch_invariant(kernel, problem),
        )  # fmt: skip
    D, Dv = problem.query.size(-1), problem.value.size(-1)
    aligned = all(is_aligned(t) for t in tensors)
    if kernel == "backward_dq_rows":
        return KernelPlan(kernel, target, problem.query.dtype, D, Dv, Tile(64, 64, 4, 1), aligned)
    blocks = problem.block_mask.BLOCK_SIZE if problem.block_mask is not None else None
    score = _mod_plan(problem.score, "score", problem)
    grad = None
    if kernel.startswith("backward") and score is not None and problem.score_grad is not None:
        graph = problem.score_grad if kernel in SCATTERS else without_sites(problem.score_grad)
        assert problem.score is not None
        grad = _mod_plan(replace(problem.score, graph=graph), "score", problem)
    plan = KernelPlan(
        kernel=kernel, target=target, dtype=problem.query.dtype, D=D, Dv=Dv,
        tile=_tile(kernel, problem, target, D, Dv, aligned, tile), aligned=aligned,
        wide_rows=any(t.stride(2) >= 1 << 23 for t in tensors),
        score=score, grad=grad, mask=_mod_plan(problem.mask, "mask", problem), blocks=blocks,
        float_index=max(problem.query.size(2), problem.key.size(2)) <= FLOAT_INDEX_LIMIT,
        precision=_precision(problem, target), exact=_exact(problem),
        max_scores=problem.max_scores and kernel == "forward",
        has_sink=problem.sink is not None and kernel == "forward", has_dropout=problem.dropout is not None,
        batch_invariant=_batch_invariant(kernel, problem),
        integer_sums=kernel in SCATTERS and kernel != SIZES and sums_integers(problem),
    )  # fmt: skip
    plan = fit(plan)
    if _may_stream(kernel, problem, plan):
        streamed = [problem.query, tensors[3]] if kernel == "backward_dkdv" else [problem.key, problem.value]
        # A descriptor has no guard of rows: where a tile passes the end of a block, it would bring in rows that no
        # list reaches (NaN, perhaps). At the end of the tensor it brings zeros.
        plan = replace(plan, tma=not plan.cuts_blocks and all(has_descriptor(t) for t in streamed))
    plan = replace(plan, full_overhangs=problem.block_mask is not None and problem.block_mask.full_overhangs)
    return fit(plan)  # descriptors have buffers of their own


def _may_stream(kernel: str, problem: Problem, plan: KernelPlan) -> bool:
    """Tell whether tiles may come through tensor descriptors: Hopper or later, aligned rows, no user against it.

    Nor where calls must be alike, since a descriptor hangs on strides and on the size of blocks.
    """
    wanted = option(problem.options, "USE_TMA", "fwd" if kernel == "forward" else "bwd")
    capable = plan.target.backend == "cuda" and int(plan.target.arch) >= 90 and not plan.batch_invariant
    return capable and plan.aligned and kernel not in ("backward_delta", BATCH_CAPTURES) and wanted is not False


@lru_cache(512)
def tile_key(plan: KernelPlan) -> TileKey:
    """Return what the tile of a plan of the Triton engine is chosen by."""
    graph = None if plan.score is None else plan.score.graph
    masked = plan.blocks is not None
    return _tile_key(plan.kernel, plan.dtype, plan.precision, plan.D, plan.Dv, graph, masked, plan.aligned)


def tile_origin(plan: KernelPlan) -> str:
    """Return where the tile of a plan comes from, in words."""
    if plan.is_hopper or plan.kernel in FUSED:
        return "measured on sm_90"
    choice = choose(tile_key(plan), plan.target, tuned=not plan.batch_invariant)
    changed = plan.kernel in _TILE_OPTIONS and plan.tile != choice.tile
    return f"instead of {choice.tile}, {choice.origin}" if changed else choice.origin


def _tile_key(
    kernel: str, dtype: torch.dtype, precision: str, D: int, Dv: int, score: ModGraph | None, masked: bool,
    aligned: bool,
) -> TileKey:  # fmt: skip
    products = precision if dtype == torch.float32 and precision != "ieee" else str(dtype).removeprefix("torch.")
    kind = "unaligned" if not aligned else "none" if score is None else score_kind(score)
    return TileKey("backward_dq" if kernel in SCATTERS else kernel, products, D, Dv, kind, masked)


def _tile(
    kernel: str, problem: Problem, target: Target, D: int, Dv: int, aligned: bool, tile: Tile | None = None
) -> Tile:
    """Choose the tile: as given or from the tables, then as kernel_options ask, then as the compiler does right."""
    if tile is None:
        score = None if problem.score is None else problem.score.graph
        precision, masked = _precision(problem, target), problem.block_mask is not None
        key = _tile_key(kernel, problem.query.dtype, precision, D, Dv, score, masked, aligned)
        tile = choose(key, target, tuned=not _batch_invariant(kernel, problem)).tile
    if kernel not in _TILE_OPTIONS:
        return tile
    tile = _as_asked(tile, kernel, problem)
    if not aligned:
        rows = "BLOCK_N" if kernel == "backward_dkdv" else "BLOCK_M"
        tile = replace(tile, **{rows: min(getattr(tile, rows), _UNALIGNED_ROWS)})
    if problem.dropout is not None and kernel == "backward_dkdv":  # with more D 256 has 1.3 to 2.4 KB of spills
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, 32), PARTIAL_M=0)
    if problem.score is not None and loads_by(problem.score.graph, "score"):
        # A load whose address depends on a product cannot be pipelined: Triton 3.6 fails on it.
        tile = replace(tile, num_stages=1)
    return tile


def _as_asked(tile: Tile, kernel: str, problem: Problem) -> Tile:
    names, phase = _TILE_OPTIONS[kernel], "fwd" if kernel == "forward" else "bwd"
    fields = (("BLOCK_M", names[0]), ("BLOCK_N", names[1]), ("num_warps", "num_warps"), ("num_stages", "num_stages"))
    given = {field: option(problem.options, name, phase) for field, name in fields}
    chosen = {k: v for k, v in given.items() if v is not None}
    return replace(tile, **chosen, PARTIAL_M=0) if "BLOCK_M" in chosen else replace(tile, **chosen)


@lru_cache(512)
def score_kind(graph: ModGraph) -> str:
    """Return which of KINDS a score_mod is."""
    (output,) = graph.outputs
    if output is None or not adds_to_score(graph, output):
        return "transforms"
    return "gathers" if loads_each_place(graph) else "adds"


def _batch_invariant(kernel: str, problem: Problem) -> bool:
    """Tell whether rows of a kernel may hang on nothing beside them; dk and dv are sums over all queries as it is."""
    return problem.batch_invariant and kernel not in TRANSPOSED


def _precision(problem: Problem, target: Target) -> str:
    given = option(problem.options, "FLOAT32_PRECISION")
    if given is not None and given not in target.precisions:
        mend = f"Leave it out: {target} computes in {' or '.join(target.precisions)}."
        raise OptionError(message("kernel_options['FLOAT32_PRECISION']", repr(given), f"what {target} has", mend))
    if given is not None:
        return str(given)
    wanted = problem.query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if wanted and "tf32" in target.precisions else "ieee"


def _exact(problem: Problem) -> bool:
    """Tell whether functions shall be as exact as torch's: as asked for, else for float32, whose users count digits."""
    given = option(problem.options, "EXACT")
    return problem.query.dtype == torch.float32 if given is None else bool(given)


def is_aligned(tensor: Tensor) -> bool:
    """Tell whether rows of the tensor can be read 16 bytes at a time."""
    unit = 16 // tensor.element_size()
    strides = tensor.stride()
    return all(s % unit == 0 for s in strides[:-1]) and tensor.data_ptr() % 16 == 0


def has_descriptor(tensor: Tensor) -> bool:
    """Tell whether TMA can address the tensor: no dim of several elements is an expanded one."""
    return all(n == 1 or 0 < s < 1 << 38 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _mod_plan(mod: BoundMod | None, role: str, problem: Problem) -> ModPlan | None:
    if mod is None:
        return None
    layouts = tuple(_layout(t) for t in mod.captures)
    plan = ModPlan(mod.graph, role, layouts, tuple(number_type(n) for n in mod.numbers))
    # Only for loads of each place: a guard of rows or columns costs nothing, and a bit more would be a kernel more.
    loads = loads_each_place(mod.graph)
    if not loads:
        return plan
    # A tile may pass the last row or column by less than its own size.
    B, H, M, N = *problem.query.shape[:3], problem.key.size(2)
    whole = problem.block_mask is None or not any(size % LARGEST_TILE for size in problem.block_mask.BLOCK_SIZE)
    tiled = [n if whole and n % LARGEST_TILE == 0 else n + LARGEST_TILE - 1 for n in (M, N)]
    valid, touched = (index_ranges(mod.graph, mod.numbers, (B, H, *lengths)) for lengths in ((M, N), tiled))
    sizes = {i: mod.captures[mod.graph.loads[i].capture].shape for i in loads}
    indices = {a for i in loads for a in mod.graph.nodes[i].args}
    return replace(
        plan,
        nonnegative=tuple(sorted(a for a in indices if (r := valid[a]) is not None and r[0] >= 0)),
        inside=tuple(
            i
            for i in loads
            if all(_within(touched[a], n) for a, n in zip(mod.graph.nodes[i].args, sizes[i], strict=True))
        ),
    )


def _within(found: Range, size: int) -> bool:
    return found is not None and found[0] >= 0 and found[1] < size


def _layout(tensor: Tensor) -> CaptureLayout:
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = tensor.ndim == 0 or tensor.stride(-1) == 1
    unit = max(1, 16 // tensor.element_size())
    aligned = dense and (tensor.ndim == 0 or tensor.data_ptr() % 16 == 0)
    aligned = aligned and all(s % unit == 0 for s in tensor.stride()[:-1])
    return CaptureLayout(dense, aligned, reach >= 1 << 31)


def number_type(number: int | float) -> str:
    """Return the Triton type that a lifted number is passed as."""
    if isinstance(number, float):
        return "fp32"
    return "i32" if -(1 << 31) <= number < 1 << 31 else "i64"


def heads_per_group(head_bytes: int, l2: int, heads: int) -> int:
    """Return how many heads to work on at a time, so that what they stream stays in L2.

    Groups are about even: of 16 heads in groups of 3 the last one alone would leave most programs idle at the end.
    """
    most = max(1.0, l2 * 0.6 / max(1, head_bytes))
    groups = max(1, round(heads / most))
    return -(-heads // groups)
