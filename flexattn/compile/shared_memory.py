"""shared_memory: how much shared memory a plan needs, and the largest tile that fits.

What Triton's kernels keep in shared memory depends on the units that compute the products. Each unit has a function
here, which adds up the peak of the inner loop. The rules were read off the buffers that Triton allocates. 3.6 and 3.7
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from flexattn.compile.fixed_reference import flag_bytes
from flexattn.compile.head_dims import split_head_dim
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.mod_plan import ModPlan
from flexattn.compile.scatter import adds_along_diagonals
from flexattn.errors import CompileError, message
from flexattn.graph.dependence import PAIR_INDICES
from flexattn.process.frozen_class import frozen

_FEWEST_ROWS = 8
_ALIGNMENT = 1024  # bytes; of wgmma and tcgen05 operands


@frozen
class _Tiles:
    """Bytes of the tiles of a portable kernel's program; tuples have one entry per part of a head dim."""

    held: tuple[int, ...]  # kept for the whole loop: q, in dQ also dO, in dK/dV k and v
    first: tuple[int, ...]  # streamed, for the scores: k, in dK/dV q
    second: tuple[int, ...]  # streamed: v, in dK/dV dO
    scores: int  # weights or their gradient, as an operand of the next product
    rows: int  # lse or delta of the rows that dK/dV streams
    stages: int  # 1: loads are not pipelined

    @property
    def parts(self) -> tuple[int, ...]:
        return self.first + self.second

    @property
    def streamed(self) -> int:
        return sum(self.parts)


def _tiles(plan: KernelPlan, size: int) -> _Tiles:
    """Return the tiles of a plan whose operands have `size` bytes per element in shared memory."""
    t, own, streamed = plan.tile, own_rows(plan), streamed_rows(plan)
    dims = [tuple(size * p.width for p in split_head_dim(d)) for d in (plan.D, plan.Dv)]
    held = dims[0] if plan.is_forward else dims[0] + dims[1]
    if "values_in_keys" in plan.features:
        dims[1] = (0,)
    arrays = 2 if plan.target.pipelines_both_rows else 1
    return _Tiles(
        tuple(own * n for n in held), tuple(streamed * n for n in dims[0]), tuple(streamed * n for n in dims[1]),
        scores=own * streamed * size, rows=4 * streamed * arrays if plan.transposed else 0,
        stages=t.num_stages if _loads_ahead(plan) else 1,
    )  # fmt: skip


def _read_again(plan: KernelPlan, t: _Tiles) -> tuple[tuple[int, ...], ...]:
    """Return the streamed tiles that are operands of the last products, which update the accumulators."""
    return (t.second,) if plan.is_forward else (t.first, t.second) if plan.transposed else (t.first,)


def own_rows(plan: KernelPlan) -> int:
    return plan.tile.BLOCK_N if plan.transposed else plan.tile.BLOCK_M


def streamed_rows(plan: KernelPlan) -> int:
    return plan.tile.BLOCK_M if plan.transposed else plan.tile.BLOCK_N


def _loads_ahead(plan: KernelPlan) -> bool:
    """Whether loads of tiles are pipelined. Most GPUs need at least 4 contiguous bytes per load for that."""
    return plan.target.loads_ahead and _copies(plan)


def _copies(plan: KernelPlan) -> bool:
    """Whether tiles can be copied to shared memory without passing through registers."""
    return plan.tma or plan.aligned or plan.dtype.itemsize >= 4 or plan.target.loads_elements_ahead


def _fma(plan: KernelPlan) -> int:
    """Products without matrix units. All operands are float32 and pass through shared memory."""
    t = _tiles(plan, 4)
    first, second, held, exchanged = sum(t.first), sum(t.second), sum(t.held), _exchanged(plan)
    ahead = (t.stages - 1) * (t.streamed + t.rows)
    if ahead and plan.tma:  # tiles that are also read transposed are copied once more
        copied = first if plan.is_forward else max(first, second) + t.scores if plan.transposed else first + second
        return held + ahead + max(copied, t.scores) + _barriers(plan) + exchanged
    if ahead:
        return held + ahead + t.scores + 4 * own_rows(plan) + exchanged
    if plan.dtype.itemsize < 4:  # converted just before each product
        # The scores stay live for the second part of the next product.
        scores = (t.scores + part[0] for part in _read_again(plan, t) if len(part) > 1)
        return held + max(*t.parts, *scores, t.scores)
    if plan.is_forward:
        return held + max(first, t.scores + max(t.second), exchanged) + 4 * own_rows(plan)
    if not plan.transposed:
        before, pairs = _exchanged_before(plan), own_rows(plan) * streamed_rows(plan)
        beside = before if pairs <= 256 else 0  # 16 x 16 tiles: exchanged while the last operand is live
        return held + first + max(second + beside, t.scores + _exchanged_after(plan), before) + _barriers(plan)
    # If rows have 16 bytes for each thread, they are already in the register layout of the last products.
    if max(t.parts) // streamed_rows(plan) >= 512 * plan.tile.num_warps and not plan.tma:
        return held + max(first, second) + max(t.scores, exchanged)
    at_once = t.first[0] + max(first - t.first[0], max(t.second)) if plan.tma else first + second
    return held + at_once + max(t.scores, exchanged) + _barriers(plan)


def _mma(plan: KernelPlan) -> int:
    """mma.sync: operands are read from tiles in shared memory into registers. Other loads are stored there first."""
    t = _tiles(plan, plan.dtype.itemsize)
    first, second, held = sum(t.first), sum(t.second), sum(t.held)
    scores, exchanged = _scores_of_warps(plan, t), _exchanged(plan)
    # Tiles loaded element by element are converted in pieces: 16 bytes per thread, 32 if warps share rows.
    of_threads = (32 if scores else 16) * plan.target.warp_size * plan.tile.num_warps
    piece = max(t.parts) if _copies(plan) else max(t.scores, of_threads)
    widest = min(max(t.parts), piece)
    # Without TMA, a float32 tile that is also read transposed needs two layouts. Its load is not pipelined.
    twice = not plan.is_forward and plan.dtype.itemsize == 4 and not plan.tma
    if t.stages > 1 and not twice:
        return held + (t.stages - 1) * (t.streamed + t.rows) + scores + exchanged + _barriers(plan)
    ahead = (plan.tile.num_stages - 1) * t.rows + (0 if plan.transposed else (t.stages - 1) * second)
    if plan.is_forward:
        return held + max(widest, max(t.second) + scores, exchanged) + _barriers(plan)
    if plan.tma:
        return held + max(widest + scores if plan.transposed else max(widest, scores), exchanged) + _barriers(plan)
    if plan.transposed:
        copied = max(t.second) + scores if twice else max(min(max(t.second), piece), scores)
        return held + ahead + first + max(min(max(t.first), piece), second + copied, exchanged)
    return held + ahead + first + max(max(t.first) if ahead else widest, scores, exchanged)


def _wgmma(plan: KernelPlan) -> int:
    """wgmma: operands are in shared memory, so a stage is free only after its product."""
    t = _tiles(plan, plan.dtype.itemsize)
    return _aligned(t.stages * t.streamed + max(1, t.stages - 1) * t.rows + _barriers(plan)) + sum(t.held)


def _tcgen05(plan: KernelPlan) -> int:
    """Like wgmma. Tiles that a later product reads again stay one step longer, plus one for each part after them."""
    t = _tiles(plan, plan.dtype.itemsize)
    again = () if plan.is_forward else _read_again(plan, t)
    ahead = t.stages * t.streamed + max(1, t.stages - 1) * t.rows + _barriers(plan) + 256
    if t.stages > 1:
        ahead += sum(n * (len(part) - i) for part in again for i, n in enumerate(part))
    if plan.dtype.itemsize == 4:
        ahead += t.streamed
    if plan.is_forward and plan.tile.num_warps > 4:
        ahead += 8192
    return _aligned(ahead) + sum(t.held)


def _mfma(plan: KernelPlan) -> int:
    """AMD: operands are in registers. Tiles pass through shared memory one at a time unless their loads are pipelined.

    Whether scores are exchanged depends on the instruction shape that Triton chooses for each product.
    """
    t = _tiles(plan, plan.dtype.itemsize)
    pairs, threads = own_rows(plan) * streamed_rows(plan), plan.target.warp_size * plan.tile.num_warps
    diagonals = plan.sums and plan.grad is not None and adds_along_diagonals(plan.grad.graph)
    scores = t.scores if plan.dtype.itemsize < 4 or not _one_layout(plan) else 0
    dropped = plan.has_dropout and (plan.dtype.itemsize == 4 or not plan.transposed)
    scores = max(scores, 4 * pairs if diagonals or dropped or _exchanges_sums(plan) else 0)
    addresses = 20 * threads if plan.sums else 0  # per thread: a small tile has several threads per element
    if plan.sums and not diagonals:
        scores = max(scores, 8 * pairs)
    if t.stages > 1:
        scores += (t.stages - 1) * t.streamed
    zeros_and_ones = 1024 * plan.dtype.itemsize if diagonals else 0  # operand of diagonal sums, live in the whole loop
    return max(*t.held, addresses, max(*t.parts, scores) + zeros_and_ones) + 4 * own_rows(plan)


def _one_layout(plan: KernelPlan) -> bool:
    """Whether float32 scores need no layout conversion for the last products: all use the same instruction shape."""
    own, dims = own_rows(plan), (plan.Dv,) if plan.is_forward else (plan.D,)
    widths = [p.width for d in (*dims, *((plan.Dv,) if plan.transposed else ())) for p in split_head_dim(d)]
    sides = {32 if min(own, other) >= 32 else 16 for other in (streamed_rows(plan), *widths)}
    if plan.is_forward:
        return plan.precision == "tf32" and sides == {16}
    return sides == {32} or (plan.precision == "tf32" and sides == {16})


def _exchanges_sums(plan: KernelPlan) -> bool:
    """Whether scores are exchanged before they are rounded: a mod loads per (q, kv) pair, or dQ has a mask."""
    masked = not plan.is_forward and not plan.transposed and plan.blocks is not None
    masked &= plan.dtype.itemsize < 4 and _loads_ahead(plan)
    return masked or any(load.per_pair for mod in (plan.score, plan.mask_of_pairs) if mod for load in _loads(mod))


def _scores_of_warps(plan: KernelPlan, t: _Tiles) -> int:
    """Return the bytes to exchange a tile of scores between warps, 0 if warps do not share rows.

    Warps share rows if the result of the last product has more columns than rows.
    """
    own, width = own_rows(plan), split_head_dim(plan.Dv if plan.is_forward else plan.D)[-1].width
    return 0 if own >= width else t.scores + _reductions(plan)


def _barriers(plan: KernelPlan) -> int:
    """Return the bytes of the TMA barriers: 8 per tile in flight, rounded up."""
    parts = len(split_head_dim(plan.D)) + len(split_head_dim(plan.Dv))
    return 16 * max(2, plan.tile.num_stages) * parts if plan.tma else 0


def _reductions(plan: KernelPlan) -> int:
    return 4 * own_rows(plan) * plan.tile.num_warps


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def delta_bytes(plan: KernelPlan) -> int:
    """One partial sum per row and warp. A thread reads 16 bytes of a row if aligned, otherwise one element."""
    widest = plan.dtype.itemsize * max(p.width for p in split_head_dim(plan.Dv))
    of_warp = plan.target.warp_size * (16 if plan.aligned else plan.dtype.itemsize)
    return 4 * plan.tile.BLOCK_M * min(plan.tile.num_warps, -(-widest // of_warp))


def _ahead_of_mods(plan: KernelPlan) -> int:
    """Return the bytes of the mods' pipelined loads: one element per streamed row, or per score for loads of rows."""
    own, streamed = own_rows(plan), streamed_rows(plan)
    steps = plan.tile.num_stages - 1 if plan.target.loads_ahead else 0
    ahead = 0
    for mod in (plan.score, plan.mask_of_pairs):
        for load in () if mod is None else _loads(mod):
            if load.reads_rows and (load.size >= 4 or load.aligned):
                ahead += steps * own * streamed * load.size
            elif load.varies and not load.per_pair:
                ahead += steps * streamed * max(4, load.size)
    return ahead


def _of_dropout(plan: KernelPlan) -> int:
    """Shared memory for dropout: exchanging random words if no thread has a counter's positions, plus dK/dV's delta."""
    if not plan.has_dropout:
        return 0
    pairs = own_rows(plan) * streamed_rows(plan)
    if not plan.transposed:
        return 4 * pairs if units(plan) == "tcgen05" else 0
    apart = units(plan) == "tcgen05" or (units(plan) == "mma" and plan.tile.num_warps > 4)
    return 8 * streamed_rows(plan) + (2 * pairs if apart else 0)


def _exchanged(plan: KernelPlan) -> int:
    """Return the bytes of conversions between the layout of the scores and that of the mods' loads or gradient sums."""
    return max(_exchanged_before(plan), _exchanged_after(plan))


def _exchanged_before(plan: KernelPlan) -> int:
    """Return the bytes of the mods' loads per (q, kv) pair that are converted to the layout of the scores."""
    ahead = plan.tile.num_stages > 1 and plan.target.loads_ahead
    late = not ahead and (units(plan) != "mma" or not plan.is_forward or not _copies(plan))
    loads = _per_pair(plan, plan.score, plan.mask_of_pairs)
    read = [load for load in loads if load.size < 4 or (load.reads_rows and late)]
    return max((min(4, max(2, load.size)) * own_rows(plan) * streamed_rows(plan) for load in read), default=0)


def _exchanged_after(plan: KernelPlan) -> int:
    """Return the bytes of gradients of captured tensors that are converted before they are added."""
    if not plan.sums or _converts_scores(plan):
        return 0
    wide = units(plan) == "fma" or plan.dtype.itemsize == 4
    added = [4 if load.reads_rows or wide else 2 for load in _per_pair(plan, plan.score)]
    pairs = own_rows(plan) * streamed_rows(plan)
    apart = units(plan) == "mma" and own_rows(plan) >= 16 * plan.tile.num_warps  # each warp has rows of its own
    return max(added, default=0) * pairs + (0 if apart or 4 in added else 2 * _reductions(plan))


def _converts_scores(plan: KernelPlan) -> bool:
    """Whether scores pass through shared memory anyway, because half-precision products use float32 operands."""
    return not plan.target.loads_ahead and plan.dtype.itemsize < 4


def _per_pair(plan: KernelPlan, *mods: ModPlan | None) -> list[_Load]:
    """Return the mods' loads per (q, kv) pair that are exchanged through shared memory."""
    return [] if _converts_scores(plan) else [load for mod in mods if mod for load in _loads(mod) if load.per_pair]


@frozen
class _Load:
    """How a mod reads a captured tensor."""

    size: int  # bytes per element
    aligned: bool
    varies: bool  # with rows or columns
    per_pair: bool  # with both
    reads_rows: bool  # adjacent scores of a row read adjacent elements


@lru_cache(1024)
def _loads(mod: ModPlan) -> tuple[_Load, ...]:
    graph, found = mod.graph, []
    for position, node in graph.loads.items():
        capture, indices = node.capture, PAIR_INDICES & graph.dependence[position]
        layout, per_pair = mod.layouts[capture], len(indices) == 2
        rows = per_pair and layout.dense and "q_idx" not in graph.dependence[node.args[-1]]
        found.append(_Load(graph.captures[capture].dtype.itemsize, layout.aligned, bool(indices), per_pair, rows))
    return tuple(found)


_UNITS: dict[str, Callable[[KernelPlan], int]] = {
    "fma": _fma, "mma": _mma, "wgmma": _wgmma, "tcgen05": _tcgen05, "mfma": _mfma,
}  # fmt: skip


def units(plan: KernelPlan) -> str:
    """Return the units that compute the products of a portable plan, a key of _UNITS."""
    found = plan.target.matrix_units
    if found not in ("fma", "mfma") and plan.dtype == torch.float32 and plan.precision == "ieee":
        return "fma"
    warpgroups = own_rows(plan) % 64 == 0 and plan.tile.num_warps % 4 == 0
    return "mma" if found in ("wgmma", "tcgen05") and not warpgroups else found


def product_bytes(plan: KernelPlan) -> int:
    unit = units(plan)
    taken = _UNITS[unit](plan) + _of_dropout(plan)
    if unit == "mfma":
        return taken
    taken += _ahead_of_mods(plan) + (0 if unit in ("mma", "fma") else _exchanged(plan))
    if plan.precision != "tf32x3" or unit == "fma":
        return taken
    t = _tiles(plan, 4)  # each operand is split into two TF32 numbers
    return taken + t.streamed + (0 if plan.is_forward else 2 * t.scores)


def small_bytes(plan: KernelPlan) -> int:
    """Programs that own keys need the most: they stream queries, dO and out."""
    return product_bytes(plan) + plan.tile.BLOCK_M * plan.dtype.itemsize * sum(p.width for p in split_head_dim(plan.Dv))


def batch_capture_bytes(plan: KernelPlan) -> int:
    """All four tiles are streamed, batch by batch. Then the sums change their layout to be added."""
    t, size = plan.tile, plan.dtype.itemsize
    pairs = [(t.BLOCK_M + t.BLOCK_N) * size * sum(p.width for p in split_head_dim(d)) for d in (plan.D, plan.Dv)]
    ahead = t.num_stages - (units(plan) not in ("wgmma", "tcgen05"))
    streamed = ahead * sum(pairs) if t.num_stages > 1 and _loads_ahead(plan) else max(pairs)
    return max(streamed + 256, 8 * t.BLOCK_M * t.BLOCK_N)


def hopper_forward_bytes(plan: KernelPlan) -> int:
    """Queries, an output tile unless it shares a buffer with them, rings of keys and values, and flags of rows."""
    t, (D, Dv) = plan.tile, plan.widths
    queries = t.BLOCK_M * (D * plan.tiles_of_queries + (0 if plan.shares_output else Dv))
    barriers = 32 * t.num_stages  # two of 8 bytes for keys, two for values
    tiles = (queries + t.num_stages * t.BLOCK_N * (D + Dv)) * plan.dtype.itemsize
    return plan.pairs * (tiles + flag_bytes(plan) + barriers + 960)


def hopper_latent_bytes(plan: KernelPlan) -> int:
    """Queries, two tiles of keys, and the weights of one."""
    t, (D, _) = plan.tile, plan.widths
    return (t.BLOCK_M * (D + t.BLOCK_N) + t.num_stages * t.BLOCK_N * D) * plan.dtype.itemsize + 1024


def hopper_dq_bytes(plan: KernelPlan) -> int:
    """Queries and dO, and rings of keys and values."""
    t, (D, Dv) = plan.tile, plan.widths
    tiles = t.BLOCK_M * (D + Dv) + t.BLOCK_N * (D * plan.key_stages + Dv * t.num_stages)
    return tiles * plan.dtype.itemsize + 1024


def hopper_keys_bytes(plan: KernelPlan) -> int:
    """Keys and values, rings of queries, dO, lse and delta, and rings of dS and dQ if it computes dQ."""
    t, size, ring, (D, Dv) = plan.tile, plan.dtype.itemsize, plan.rings, plan.widths
    rows = (ring.queries + ring.gradients) * t.BLOCK_M * 4
    tiles = t.BLOCK_N * (D * ring.keys + Dv) + t.BLOCK_M * (D * ring.queries + Dv * ring.gradients)
    for_dq = (ring.ds * size + ring.dq) * 128 * t.BLOCK_M
    return tiles * size + rows + (for_dq if plan.adds_dq else 0) + 1536


def dq_rows_bytes(plan: KernelPlan) -> int:
    return 64 * plan.tile.BLOCK_M


def shared_bytes(plan: KernelPlan) -> int:
    """Return an upper bound of the kernel's shared memory in bytes."""
    return plan.spec.shared_bytes(plan)


def smaller_tiles(plan: KernelPlan) -> Iterator[KernelPlan]:
    """Yield the plan. For a portable kernel, also yield smaller and smaller tiles, down to 16 x 16 with one stage.

    Without matrix units, the axis that a program owns goes down to 8 rows: its tiles are held for the whole loop.
    Hopper kernels have one tile. With fewer stages, their warps could deadlock.
    """
    yield plan
    if plan.spec.gluon:
        return
    while (smaller := _smaller(plan)) is not None:
        plan = smaller
        yield plan


def _smaller(plan: KernelPlan) -> KernelPlan | None:
    t, own = plan.tile, "BLOCK_N" if plan.transposed else "BLOCK_M"
    if t.num_stages > 1:
        fewer = plan.with_fields(tile=replace(t, num_stages=t.num_stages - 1))
        if shared_bytes(fewer) < shared_bytes(plan):  # without pipelining a plan may need more
            return fewer
    if t.BLOCK_N >= t.BLOCK_M and t.BLOCK_N > 16:
        t = replace(t, BLOCK_N=t.BLOCK_N // 2)
    elif t.BLOCK_M > 16:
        t = replace(t, BLOCK_M=t.BLOCK_M // 2, PARTIAL_M=min(t.PARTIAL_M, t.BLOCK_M // 2))
    elif own_rows(plan) > _FEWEST_ROWS and not plan.is_hopper and units(plan) == "fma":
        t = replace(t, **{own: own_rows(plan) // 2})
        t = replace(t, PARTIAL_M=min(t.PARTIAL_M, t.BLOCK_M))
    else:
        return None
    return plan.with_fields(tile=t)


def fit(plan: KernelPlan) -> KernelPlan:
    """Return the plan with its largest tile that fits in the target's shared memory, at most its own.

    If no tile fits with TF32, ieee products are used. They read their operands in fewer layouts.
    """
    for precision in dict.fromkeys((plan.precision, "ieee")):
        for smaller in smaller_tiles(plan.with_fields(precision=precision)):
            if shared_bytes(smaller) <= plan.target.shared_memory:
                return smaller
    found = f"D {plan.D}, Dv {plan.Dv} in {plan.dtype}"
    raise CompileError(
        message("head dims", found, f"ones that fit {plan.target}", "Use the CPU engine or smaller head dims.")
    )
