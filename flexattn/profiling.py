"""profiling: profile, the clock cycles of each tile of a forward on the GPU, and its number of (q, kv) pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask, Runs
from flexattn.call.call import Call, Mod
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.compile.arguments import Tensors
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.schedule import plan_best_form
from flexattn.engines import triton
from flexattn.engines.choice import engine_of
from flexattn.errors import UnsupportedError, message
from flexattn.machine.target import Target, target_of
from flexattn.process.frozen_class import frozen
from flexattn.runtime.launch import prepare
from flexattn.runtime.load import load
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled

_MOST_SHOWN = 16  # tiles of a printed profile


@frozen(eq=False)
class Profile:
    """The tiles of a forward, in the order of their queries. Print it for a summary."""

    plan: KernelPlan
    first_row: Tensor  # [tiles] int64, the first query of each tile
    cycles: Tensor  # [B, Hq, tiles] int64, clock cycles of the multiprocessor
    pairs: Tensor  # [B, Hq, tiles] int64, (q, kv) pairs of the tile's partial and full blocks

    def __str__(self) -> str:
        """Write a summary and the slowest tiles."""
        total, pairs = self.cycles.double(), self.pairs.double()
        mean = float(total.mean()) or 1.0
        lines = [
            f"Profile of {self.plan.name}, tile {self.plan.tile}",
            f"    {self.cycles.numel():,} tiles, {mean:,.0f} cycles on average, {float(total.max()):,.0f} at most",
            f"    {float(pairs.sum()):,.0f} pairs, {mean / max(1.0, float(pairs.mean())):.3f} cycles per pair",
            f"    {'b':>4} {'h':>4} {'first query':>12} {'cycles':>12} {'of mean':>8} {'pairs':>12}",
        ]
        order = self.cycles.flatten().argsort(descending=True)[:_MOST_SHOWN].tolist()
        Hq, tiles = self.cycles.shape[1:]
        for i in order:
            b, h, tile = i // (Hq * tiles), i // tiles % Hq, i % tiles
            cycles, own = int(self.cycles[b, h, tile]), int(self.pairs[b, h, tile])
            row = int(self.first_row[tile])
            lines.append(f"    {b:>4} {h:>4} {row:>12} {cycles:>12,} {cycles / mean:>8.2f} {own:>12,}")
        return "\n".join(lines)


@uncompiled
@undisturbed("profile")
def profile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
) -> Profile:
    """Run the forward twice and return the clock cycles and the pairs of each tile of the second run.

    The kernel is the portable Triton kernel, also where a Hopper kernel would run. Cycles include waiting for other
    programs on the same multiprocessor.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink, dropout_p: as in
            flex_attention.

    Raises:
        What flex_attention raises; UnsupportedError where no Triton kernel runs on an NVIDIA GPU.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 64, 32, device="cuda")  # doctest: +SKIP
        >>> print(profile(q, k, v))  # doctest: +SKIP
    """
    options = {**(kernel_options or {}), "PROFILE": True}
    problem = pose(Call(query, key, value, score_mod, block_mask, scale, enable_gqa, options, sink, dropout_p))
    if engine_of(problem) is not triton or target_of(problem.query.device).backend != "cuda":
        found = f"{str(query.dtype).removeprefix('torch.')} {tuple(query.shape)} on {query.device}"
        fix = "Pass tensors of float32 or less on an NVIDIA GPU."
        raise UnsupportedError(message("query", found, "one that a Triton kernel on an NVIDIA GPU supports", fix))
    return profile_problem(problem, target_of(query.device))


def profile_problem(problem: Problem, target: Target) -> Profile:
    """Profile a problem that has the option PROFILE, on its device, which is of this target."""
    kept: list[tuple[KernelPlan, Tensor]] = []

    def run(spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
        wanted, _ = plan_best_form(spec, problem, target, tensors, arrays)
        prepare(wanted, problem, tensors)(problem, {**tensors, **arrays})
        kept.append((load(wanted).plan, arrays["cycles_ptr"]))

    with torch.no_grad():
        for _ in range(2):  # the first run loads the kernel and fills the caches
            triton.forward(problem, run)
    plan, cycles = kept[-1]
    B, Hq, M, _ = problem.query.shape
    first_row = _first_rows(plan, M)
    rows = torch.diff(first_row, append=torch.tensor([M]))
    if plan.blocks is not None:  # the last tile of a block ends with the block
        rows = torch.minimum(rows, (first_row // plan.blocks[0] + 1) * plan.blocks[0] - first_row)
    rows = rows.clamp(max=plan.tile.BLOCK_M)
    keys = _keys_of_blocks(problem).expand(B, Hq, -1)
    block = first_row // plan.blocks[0] if plan.blocks is not None else torch.zeros_like(first_row)
    return Profile(
        plan, first_row, cycles.view(B, Hq, M)[..., first_row.to(cycles.device)].cpu(), keys[..., block] * rows
    )


def _first_rows(plan: KernelPlan, M: int) -> Tensor:
    """Return the first query of each tile: [tiles] int64."""
    block, tile = plan.outer
    starts = torch.arange(0, -(-M // block) * block, block)[:, None] + torch.arange(0, block, tile)
    return starts[starts < M]


def _keys_of_blocks(problem: Problem) -> Tensor:
    """Return the keys in the partial and full blocks of each row of blocks: [B or 1, Hq or 1, rows of blocks] int64."""
    blocks, N = problem.block_mask, problem.key.size(2)
    if blocks is None:
        return torch.full((1, 1, 1), N)
    lists = blocks.kv_runs
    keys = sum(_keys_of_rows(runs, blocks.BLOCK_SIZE[1], N) for runs in (lists.partial, lists.full))
    assert isinstance(keys, Tensor)
    return keys.view(blocks.B, blocks.H, -1).cpu()


def _keys_of_rows(runs: Runs, block: int, N: int) -> Tensor:
    ends = (runs.runs.long() * block).clamp(max=N)
    return torch.zeros(runs.rows, dtype=torch.int64, device=ends.device).index_add_(
        0, runs.owners(), ends[:, 1] - ends[:, 0]
    )
