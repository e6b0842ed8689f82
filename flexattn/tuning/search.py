"""search: finds the fastest tiles of a problem's Triton kernels by measuring them on its own tensors and mask.

Candidates are the current tile, tiles one step away from it, and all tiles in the table for the kernel. They are
compiled in parallel, checked against the results of the current tile, and timed in rounds of random order.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import Tensors
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.plan import tile_key
from flexattn.compile.render import render
from flexattn.compile.schedule import plan_best_form, plan_with_tile
from flexattn.compile.tile_choice import remember, remembered_rows, tiles_in_table
from flexattn.compile.tiles import Tile
from flexattn.engines import triton
from flexattn.engines.autograd import wants_gradient
from flexattn.errors import CompileError
from flexattn.machine.target import target_of
from flexattn.options import LARGEST_TILE
from flexattn.process.frozen_class import frozen
from flexattn.runtime.build import OutOfResources, build
from flexattn.runtime.compile_processes import build_apart
from flexattn.runtime.launch import forget_launches, run_kernel, runner
from flexattn.tuning.report import KernelTuning, Trial, Tuning

TUNED = ("forward", "backward_dq", "backward_dkdv")
SLOW = 2.0  # a tile slower than the fastest by this factor in the first measurement is not timed in rounds
SPILLS = 512  # bytes of stack per thread above which a candidate is discarded
SAMPLE_MS = 5.0  # minimum duration of a sample
COVER_CYCLES = 2_000_000  # about 1 ms in which the host enqueues a sample, so that host time is not measured
# Relative rmse from the results of the current tile, to detect tiles that Triton miscompiles.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 3e-3}

# Fields that may be halved and doubled, alone or together, and their limits.
_STEPS = (("BLOCK_M",), ("BLOCK_N",), ("num_warps",), ("BLOCK_M", "num_warps"), ("BLOCK_N", "num_warps"))
_LIMITS = {"BLOCK_M": (16, LARGEST_TILE), "BLOCK_N": (16, LARGEST_TILE), "num_warps": (4, 8)}
_STAGES = (1, 4)


@frozen
class Effort:
    """What to measure, and how much."""

    kernels: tuple[str, ...]  # a subset of TUNED
    seconds: float  # time limit for compiling; unfinished candidates are discarded
    processes: int  # parallel compile processes
    rounds: int


@frozen
class _Call:
    """One kernel of a problem, as the engine would launch it."""

    spec: KernelSpec
    problem: Problem  # as the kernel sees it
    tensors: Tensors
    arrays: Tensors
    plan: KernelPlan

    @property
    def kernel(self) -> str:
        return self.spec.name

    @property
    def has_one_tile(self) -> bool:
        return self.plan.is_hopper or self.spec.fixed_tile is not None

    def run(self) -> None:
        run_kernel(self.spec, self.problem, self.tensors, self.arrays)

    def results(self) -> dict[str, Tensor]:
        """Return the outputs of the kernel by name."""
        written = ("o", "lse_ptr") if self.plan.is_forward else self.spec.gradients
        everything = {**self.tensors, **self.arrays}
        return {name: t for name, t in everything.items() if name in written or name.endswith("_grad_ptr")}


def tune_problem(problem: Problem, effort: Effort, keep: bool) -> Tuning:
    """Measure candidates for each kernel of a problem, and store the best if `keep` is set."""
    if keep:
        remembered_rows()  # raises before anything is measured if the table cannot be read
    with_backward = wants_gradient(problem)
    with torch.no_grad(), _current(problem.query.device):
        calls = _calls(problem, with_backward)
        tuned = [call for call in calls if call.kernel in effort.kernels and not call.has_one_tile]
        plans = {call.kernel: candidates(call.plan, call.problem, call.tensors) for call in tuned}
        needed = [*(call.plan for call in calls), *(plan for some in plans.values() for plan in some)]
        notes = build_apart(list(map(render, needed)), needed[0].target, effort.processes, effort.seconds)
        for call in calls:
            call.run()
        kernels = tuple(_tune(call, plans[call.kernel], notes, effort) for call in tuned)
    fixed = tuple(call.kernel for call in calls if call.spec.products and call.has_one_tile)
    tuning = Tuning(_device_name(problem.query.device), kernels, fixed)
    if keep and kernels:
        tuning = replace(tuning, file=remember(tuning.rows()))
        forget_launches()
    return tuning


def candidates(plan: KernelPlan, problem: Problem, tensors: Tensors) -> tuple[KernelPlan, ...]:
    """Return plans that differ from `plan` only in their tiles, all of which may fit; the first is `plan` itself."""
    tiles = dict.fromkeys((*_near(plan), *tiles_in_table(plan.spec.name)))
    tiles.pop(plan.tile, None)
    others = (plan_with_tile(plan.spec, problem, plan.target, tensors, tile) for tile in tiles)
    return plan, *(other for other in others if other is not None)


def _near(plan: KernelPlan) -> Iterator[Tile]:
    """Yield the tiles one step away from a plan's tile."""
    tile = plan.tile
    for names in _STEPS:
        for factor in (0.5, 2):
            sizes = {name: int(getattr(tile, name) * factor) for name in names}
            if all(_LIMITS[name][0] <= size <= _LIMITS[name][1] for name, size in sizes.items()):
                other = replace(tile, **sizes)
                yield replace(other, PARTIAL_M=0 if other.PARTIAL_M >= other.BLOCK_M else other.PARTIAL_M)
    for stages in (tile.num_stages - 1, tile.num_stages + 1):
        if _STAGES[0] <= stages <= _STAGES[1]:
            yield replace(tile, num_stages=stages)
    if not plan.is_forward:
        yield replace(tile, PRODUCTS_FIRST=not tile.PRODUCTS_FIRST)
    if plan.transposed and plan.blocks is not None and tile.BLOCK_M > 32:
        yield replace(tile, PARTIAL_M=0 if tile.PARTIAL_M else 32)


def _calls(problem: Problem, with_backward: bool) -> tuple[_Call, ...]:
    """Return the kernels of a forward, and of a backward if the problem needs gradients, without running any."""
    target, calls = target_of(problem.query.device), []

    def keep(spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
        plan, _ = plan_best_form(spec, problem, target, tensors, arrays)
        calls.append(_Call(spec, problem, tensors, arrays, plan))

    out, lse, _ = triton.forward(problem, keep)
    if with_backward:
        generator = torch.Generator(out.device).manual_seed(0)
        d_out = torch.empty_like(out).normal_(generator=generator)
        triton.backward(problem, out, lse, d_out, None, (True, True, True, False), keep)
    return tuple(calls)


def _tune(call: _Call, plans: Sequence[KernelPlan], notes: Mapping[KernelSource, str], effort: Effort) -> KernelTuning:
    trials: dict[Tile, Trial] = {}
    runs: dict[Tile, Callable[[], None]] = {}
    expected: dict[str, Tensor] = {}
    for plan in plans:
        own = plan is plans[0]
        note = "" if own else notes.get(render(plan), "") or _refusal(plan)
        if not note:
            runs[plan.tile] = runner(plan, call.problem, call.tensors, call.arrays)
            found = _results(call, runs[plan.tile])
            expected = found if own else expected
            note = _difference(found, expected, plan.dtype)
        trials[plan.tile] = Trial(plan.tile, note=note)
    able = {tile: runs[tile] for tile, trial in trials.items() if not trial.note}
    for tile, milliseconds in _time(able, call.problem.query.device, effort).items():
        trials[tile] = Trial(tile, milliseconds)
    _results(call, runs[plans[0].tile])  # later kernels read these results
    return KernelTuning(str(call.plan.target), tile_key(call.plan), tuple(trials.values()))


def _refusal(plan: KernelPlan) -> str:
    """Return why a compiled candidate is not worth running, or cannot run."""
    try:
        kernel = build(render(plan), plan.target)
        if not plan.target.is_interpreter:
            kernel.load()
    except OutOfResources as error:
        return f"takes {error.asked} of {error.resource}, there are {error.available}"
    except CompileError as error:
        return str(error).splitlines()[0][:160]
    return f"spills {kernel.spills} bytes" if kernel.spills > SPILLS else ""


def _results(call: _Call, run: Callable[[], None]) -> dict[str, Tensor]:
    """Run a kernel and return copies of its outputs."""
    for name, tensor in call.results().items():
        tensor.fill_(0.0 if name.endswith("_grad_ptr") else math.nan)  # gradients of captured tensors are accumulated
    run()
    return {name: tensor.clone() for name, tensor in call.results().items()}


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Return what differs from the expected results by more than rounding, or ""."""
    for name, tensor in found.items():
        ours, theirs = tensor.float(), expected[name].float()
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        distance = torch.where(same, 0.0, ours - theirs).norm()
        scale = theirs[theirs.isfinite()].norm().clamp_min(1e-30)
        if not (error := float(distance / scale)) <= TOLERANCE.get(dtype, 0.0):  # true for nan
            return f"wrong: {name.removesuffix('_ptr')} is {error:.1e} from that of the current tile"
    return ""


def _time(
    runs: Mapping[Tile, Callable[[], None]], device: torch.device, effort: Effort
) -> dict[Tile, tuple[float, ...]]:
    """Return milliseconds per round, in random order. Slow tiles in the first measurement get only one round."""
    first = {tile: min(sample(run, 1, device) for _ in range(3)) for tile, run in runs.items()}
    limit = SLOW * min(first.values())
    samples = {tile: [once] if once > limit else [] for tile, once in first.items()}
    quick = [tile for tile, once in first.items() if once <= limit]
    launches = {tile: max(1, math.ceil(SAMPLE_MS / max(first[tile], 1e-3))) for tile in quick}
    shuffle = random.Random(0).shuffle
    for _ in range(effort.rounds):
        shuffle(quick)
        for tile in quick:
            samples[tile].append(sample(runs[tile], launches[tile], device))
    return {tile: tuple(found) for tile, found in samples.items()}


def sample(run: Callable[[], object], launches: int, device: torch.device) -> float:
    """Return milliseconds per run, over `launches` consecutive runs."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(launches):
            run()
        return (time.perf_counter() - start) * 1e3 / launches
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(COVER_CYCLES)
    begin.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
