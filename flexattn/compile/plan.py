"""plan: Problem -> KernelPlan of each kernel: its tile, its alignment, and which loads need no mask."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import NO_ARRAYS, Tensors
from flexattn.compile.capture_sums import sums_integers
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec, Phase
from flexattn.compile.mod_plan import CaptureLayout, ModPlan
from flexattn.compile.scalars import SPLIT_ROWS
from flexattn.compile.scatter import without_sites
from flexattn.compile.shared_memory import fit
from flexattn.compile.tile_choice import choose
from flexattn.compile.tiles import Tile, TileKey
from flexattn.errors import OptionError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.dependence import adds_to_score, loads_by, loads_per_pair
from flexattn.graph.magnitudes import FLOAT_INDEX_LIMIT
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.ranges import Range, index_ranges
from flexattn.graph.row_bounds import is_interval, moves_with_queries, row_bounds
from flexattn.machine.target import Target
from flexattn.options import LARGEST_TILE, option

# Maximum rows per program when rows are not aligned to 16 bytes. Below 64 rows Triton does not use wgmma. With operands
# from registers, wgmma read out of bounds of shared memory (H200, triton 3.6; D 33, 64, 130).
_UNALIGNED_ROWS = 32


def plan_kernel(
    spec: KernelSpec, problem: Problem, target: Target, tensors: Tensors, arrays: Tensors = NO_ARRAYS,
    tile: Tile | None = None,
) -> KernelPlan:  # fmt: skip
    """Plan one kernel of a problem. `tensors` are the spec's tensors, `arrays` are the engine's other buffers.

    `tile` replaces the tile from the tables. Options and limits still apply to it.
    """
    dims = {"q": problem.query.size(-1), "v": problem.value.size(-1)}
    D, Dv = (dims[name] for name in spec.dims)
    aligned = all(is_aligned(t) for t in tensors.values())
    plan = KernelPlan(
        spec, target, problem.query.dtype, D, Dv, _tile(spec, problem, target, D, Dv, aligned, tile), aligned,
        exact=_exact(problem), features=tuple(f.name for f in spec.features if f.wanted(problem, arrays)),
        batch_invariant=_batch_invariant(spec, problem),
        token_tile=token_tile(problem) if spec.token_tiles and not spec.products else None,
    )  # fmt: skip
    return _with_products(plan, problem, tensors) if spec.products else plan


def _with_products(plan: KernelPlan, problem: Problem, tensors: Tensors) -> KernelPlan:
    """Return the plan of a kernel that computes scores, with mods, a mask, and a tile that fits in shared memory."""
    blocks, spec = problem.block_mask, plan.spec
    score, grad = _mod_plan(problem.score, "score", problem), None
    if spec.phase == "bwd" and problem.score is not None and problem.score_grad is not None:
        graph = problem.score_grad if spec.captures else without_sites(problem.score_grad)
        # The role is "score" and not "grad", because the arguments are those of the score_mod.
        grad = _mod_plan(replace(problem.score, graph=graph), "score", problem)
    if _has_intervals(spec, problem):
        plan, blocks = plan.with_fields(intervals=True), None  # its lists are not read
    plan = plan.with_fields(
        wide_rows=any(t.stride(2) >= 1 << 23 for t in tensors.values()), score=score, grad=grad,
        mask=_mod_plan(problem.mask, "mask", problem), blocks=None if blocks is None else blocks.BLOCK_SIZE,
        float_index=max(problem.query.size(2), problem.N) <= FLOAT_INDEX_LIMIT,
        precision=_precision(problem, plan.target),
        integer_sums=spec.captures in ("adds", "adds over batch") and sums_integers(problem),
    )  # fmt: skip
    plan = fit(plan)
    if _may_stream(plan, problem):
        # A descriptor load cannot mask rows. Past the end of the tensor it loads zeros, but past the end of a block
        # it loads rows that are in no list and may be NaN.
        plan = plan.with_fields(tma=not plan.cuts_blocks and all(has_descriptor(tensors[n]) for n in spec.streams))
    plan = plan.with_fields(full_overhangs=blocks is not None and blocks.full_overhangs, page_size=_page_size(problem))
    return fit(plan)  # descriptor loads need more shared memory


def token_tile(problem: Problem) -> tuple[int, int] | None:
    """Return (rows, columns) of the tiles of tokens that a problem is computed in, None if it is not."""
    if not problem.in_tiles:
        return None
    rows, columns = problem.tiles.grid.tile
    return rows, columns


def _has_intervals(spec: KernelSpec, problem: Problem) -> bool:
    """Whether a kernel reads the keys between the bounds of the mask's rows, instead of those in its block lists.

    The blocks must have been computed from the mask_mod, because lists that a user provides take precedence over it.
    A program reads all keys from the first to the last that one of its queries attends to. So the bounds of neighboring
    queries must be neighbors: q_idx plus what is the same for all queries.
    """
    blocks, mask = problem.block_mask, problem.mask
    if not (spec.splits_keys and blocks is not None and blocks.is_built and mask is not None):
        return False
    interval = row_bounds(mask.graph, "kv_idx")
    return is_interval(interval) and (problem.query.size(2) == 1 or moves_with_queries(mask.graph, interval))


def _page_size(problem: Problem) -> int:
    return 0 if problem.layout is None else problem.layout.page_size


def _may_stream(plan: KernelPlan, problem: Problem) -> bool:
    """Whether tiles may be loaded through TMA: on Hopper or later, with aligned rows, unless USE_TMA is False.

    Batch-invariant kernels do not use TMA, because its use depends on strides and on the block size.
    """
    wanted = option(problem.options, "USE_TMA", plan.spec.phase)
    if problem.layout is not None:  # a descriptor cannot end at a length on the device
        return False
    capable = plan.target.backend == "cuda" and int(plan.target.arch) >= 90 and not plan.batch_invariant
    return capable and plan.aligned and bool(plan.spec.streams) and wanted is not False


@lru_cache(512)
def tile_key(plan: KernelPlan) -> TileKey:
    """Return the key that selects the tile of a portable plan."""
    graph = None if plan.score is None else plan.score.graph
    masked = plan.blocks is not None
    return _tile_key(plan.spec, plan.dtype, plan.precision, plan.D, plan.Dv, graph, masked, plan.aligned)


def tile_origin(plan: KernelPlan, problem: Problem) -> str:
    """Return a description of where the tile of a plan for a problem comes from."""
    if plan.spec.splits_keys:
        tile, origin = _split_tile(problem, plan.D, plan.Dv), "by the number of rows"
        return origin if plan.tile == tile else f"instead of {tile}, {origin}"
    if plan.spec.owns_both:
        return "chosen by its registers on sm_90"
    if plan.is_hopper or plan.spec.fixed_tile:
        return "measured on sm_90"
    choice = choose(tile_key(plan), plan.target, tuned=not plan.batch_invariant)
    changed = plan.spec.tile_options is not None and plan.tile != choice.tile
    return f"instead of {choice.tile}, {choice.origin}" if changed else choice.origin


def _tile_key(
    spec: KernelSpec, dtype: torch.dtype, precision: str, D: int, Dv: int, score: ModGraph | None, masked: bool,
    aligned: bool,
) -> TileKey:  # fmt: skip
    products = precision if dtype == torch.float32 and precision != "ieee" else str(dtype).removeprefix("torch.")
    kind = "unaligned" if not aligned else "none" if score is None else score_kind(score)
    return TileKey(spec.tiled_as or spec.name, products, D, Dv, kind, masked)


def _tile(
    spec: KernelSpec, problem: Problem, target: Target, D: int, Dv: int, aligned: bool, tile: Tile | None
) -> Tile:
    """Return `tile` or the tile from the tables, changed by kernel_options and limited to what Triton compiles."""
    if spec.fixed_tile is not None:
        return spec.fixed_tile
    if spec.splits_keys and tile is None:
        tile = _split_tile(problem, D, Dv)
    if tile is None:
        score = None if problem.score is None else problem.score.graph
        precision, masked = _precision(problem, target), problem.block_mask is not None
        key = _tile_key(spec, problem.query.dtype, precision, D, Dv, score, masked, aligned)
        tile = choose(key, target, tuned=not _batch_invariant(spec, problem)).tile
    if spec.tile_options is None:
        return tile
    tile = _with_options(tile, spec.tile_options, spec.phase, problem)
    if not aligned:
        rows = "BLOCK_N" if spec.owns_keys else "BLOCK_M"
        tile = replace(tile, **{rows: min(getattr(tile, rows), _UNALIGNED_ROWS)})
    if problem.dropout is not None and spec.owns_keys:  # larger tiles spill 1.3 to 2.4 KB at D 256
        tile = replace(tile, BLOCK_M=min(tile.BLOCK_M, 32), PARTIAL_M=0)
    if problem.score is not None and loads_by(problem.score.graph, "score"):
        # Triton 3.6 cannot pipeline a load whose address depends on a dot product.
        tile = replace(tile, num_stages=1)
    if problem.score is not None and spec.owns_keys and target.is_hopper and _ignores_score(problem.score.graph):
        # The weights then depend on no product of the loop, and Triton pipelines the products of dv. These may still
        # read weights from registers when the next iteration overwrites them: dv is wrong in the emulator at Dv 96.
        tile = replace(tile, num_stages=1)
    return tile


def _ignores_score(graph: ModGraph) -> bool:
    """Return whether the result of a score_mod does not depend on the score."""
    output = graph.outputs[0]
    return output is not None and "score" not in graph.dependence[output]


def _split_tile(problem: Problem, D: int, Dv: int) -> Tile:
    """Return the tile of forward_split: as few rows as hold the queries of a group, at most SPLIT_ROWS."""
    rows = problem.query.size(2) * (problem.query.size(1) // problem.key.size(1))
    BLOCK_M = min(SPLIT_ROWS, max(16, 1 << (rows - 1).bit_length()))
    width = max(D, Dv) * problem.query.element_size()
    if width > 512:
        # 64 x 64 with 8 warps, keys read once: 299 TFLOP/s, 64 x 32: 251 (D 576, Dv 512, 64 x 8192 keys, H200).
        return Tile(BLOCK_M, 64 if problem.values_in_keys else 32, 8 if BLOCK_M == SPLIT_ROWS else 4, 2)
    if problem.layout is not None and problem.layout.is_quantized and width <= 256:
        return Tile(BLOCK_M, 128, 4, 3)
    BLOCK_N = 64 if width <= 256 else 32
    return Tile(BLOCK_M, BLOCK_N, 4, 3)


def _with_options(tile: Tile, names: tuple[str, str], phase: Phase, problem: Problem) -> Tile:
    fields = (("BLOCK_M", names[0]), ("BLOCK_N", names[1]), ("num_warps", "num_warps"), ("num_stages", "num_stages"))
    given = {field: option(problem.options, name, phase) for field, name in fields}
    chosen = {k: v for k, v in given.items() if v is not None}
    return replace(tile, **chosen, PARTIAL_M=0) if "BLOCK_M" in chosen else replace(tile, **chosen)


@lru_cache(512)
def score_kind(graph: ModGraph) -> str:
    """Return the kind of a score_mod, one of tiles.KINDS."""
    (output,) = graph.outputs
    if output is None or not adds_to_score(graph, output):
        return "transforms"
    return "gathers" if loads_per_pair(graph) else "adds"


def _batch_invariant(spec: KernelSpec, problem: Problem) -> bool:
    """Whether a row's result must not depend on other rows. dK/dV sum over all queries, so never there."""
    return problem.batch_invariant and not spec.owns_keys


def _precision(problem: Problem, target: Target) -> str:
    given = option(problem.options, "FLOAT32_PRECISION")
    if given is not None and given not in target.precisions:
        fix = f"Leave it out: {target} computes in {' or '.join(target.precisions)}."
        raise OptionError(message("kernel_options['FLOAT32_PRECISION']", repr(given), f"one that {target} has", fix))
    if given is not None:
        return str(given)
    wanted = problem.query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if wanted and "tf32" in target.precisions else "ieee"


def _exact(problem: Problem) -> bool:
    """Return whether functions are as accurate as torch's: the EXACT option, by default True for float32 only."""
    given = option(problem.options, "EXACT")
    return problem.query.dtype == torch.float32 if given is None else bool(given)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether rows of the tensor can be read 16 bytes at a time."""
    unit = 16 // tensor.element_size()
    strides = tensor.stride()
    return all(s % unit == 0 for s in strides[:-1]) and tensor.data_ptr() % 16 == 0


def has_descriptor(tensor: Tensor) -> bool:
    """Return whether TMA can address the tensor: no dim with more than one element is expanded."""
    return all(n == 1 or 0 < s < 1 << 38 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _mod_plan(mod: BoundMod | None, role: str, problem: Problem) -> ModPlan | None:
    if mod is None:
        return None
    layouts = tuple(_memory_form(t) for t in mod.captures)
    plan = ModPlan(mod.graph, role, layouts, tuple(number_type(n) for n in mod.numbers))
    # Only for loads per (q, kv) pair. Masking a load per row or per column is free, and each distinct value of these
    # fields compiles another kernel.
    loads = loads_per_pair(mod.graph)
    if not loads:
        return plan
    B, H, M, N = *problem.query.shape[:3], problem.N
    blocks = (LARGEST_TILE, LARGEST_TILE) if problem.block_mask is None else problem.block_mask.BLOCK_SIZE
    whole = not any(size % LARGEST_TILE for size in blocks)
    tiled = [_end_of_tiles(n, size, whole) for n, size in zip((M, N), blocks, strict=True)]
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


def _end_of_tiles(n: int, block: int, whole: bool) -> int:
    """Return the end of the last tile of `n` rows or columns. `whole`: blocks are whole tiles.

    A tile may extend past the last row by less than its own size. Hopper kernels also compute the tiles of the last
    block that are past the end.
    """
    if not whole:
        return n + LARGEST_TILE - 1
    return max(-(-n // block) * block, n if n % LARGEST_TILE == 0 else n + LARGEST_TILE - 1)


def _within(found: Range, size: int) -> bool:
    return found is not None and found[0] >= 0 and found[1] < size


def _memory_form(tensor: Tensor) -> CaptureLayout:
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    dense = tensor.ndim == 0 or tensor.stride(-1) == 1
    unit = max(1, 16 // tensor.element_size())
    aligned = dense and (tensor.ndim == 0 or tensor.data_ptr() % 16 == 0)
    aligned = aligned and all(s % unit == 0 for s in tensor.stride()[:-1])
    return CaptureLayout(dense, aligned, reach >= 1 << 31)


def number_type(number: int | float) -> str:
    """Return the Triton type of a lifted number."""
    if isinstance(number, float):
        return "fp32"
    return "i32" if -(1 << 31) <= number < 1 << 31 else "i64"
