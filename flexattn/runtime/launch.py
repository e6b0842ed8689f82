"""launch: run one kernel of a problem on its tensors.

All arguments of a launch except the addresses depend only on shapes, strides, alignment, mods and numbers. They are
computed once per key and cached, so an equal launch is not planned again: only its addresses are filled in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexattn.block_mask import BlockMask
from flexattn.call.layout import Layout
from flexattn.call.problem import Problem
from flexattn.compile.arguments import (
    Argument,
    DescriptorOf,
    FromProblem,
    FromShapes,
    FromTensors,
    RedoneTiles,
    Tensors,
    TileCounter,
)
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import DELTA
from flexattn.compile.scalars import tiles_of
from flexattn.compile.schedule import (
    KernelProblems,
    backward_kernels,
    expected_backward,
    plan_best_form,
    prepared_arrays,
    wants_backward,
)
from flexattn.graph.bound_mod import BoundMod
from flexattn.machine.target import processors, target_of
from flexattn.process.events import fallback
from flexattn.process.frozen_class import frozen
from flexattn.runtime.build import Kernel
from flexattn.runtime.load import load, load_ahead
from flexattn.runtime.redone import count_on

_REMEMBERED = 4096

V = TypeVar("V")
Filler = Callable[[Problem, Tensors], Any]  # returns an argument that differs between launches
FillerSource = FromTensors | FromProblem | DescriptorOf | TileCounter | RedoneTiles


@frozen
class Launch:
    """A kernel and its arguments. `fillers` provide the arguments that differ between launches, by position."""

    kernel: Kernel
    programs: int
    arguments: tuple[Any, ...]
    fillers: tuple[tuple[int, Filler], ...]
    sources: tuple[FillerSource, ...] = ()  # of the arguments that fillers provide, in the same order
    shares_tiles: bool = False  # programs take several tiles each, from a counter

    def __call__(self, problem: Problem, tensors: Tensors) -> None:
        if not self.programs:
            return
        arguments = list(self.arguments)
        for position, fill in self.fillers:
            arguments[position] = fill(problem, tensors)
        device = problem.query.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.kernel.launch(self.programs, tuple(arguments))
        else:
            self.kernel.launch(self.programs, tuple(arguments))


_launches: OrderedDict[tuple[object, ...], Launch] = OrderedDict()


def run_kernel(spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
    """Run a kernel, for tuning and tests. The arguments are those of `launch_of`."""
    launch_of(spec, problem, tensors, arrays)(problem, {**tensors, **arrays})


def launch_of(
    spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors, compile_backward_of: Problem | None = None
) -> Launch:
    """Return the launch of a kernel, cached by key.

    Args:
        spec: the kernel.
        problem: its variant of a problem (`KernelProblems.seen_by`).
        tensors: the spec's tensors, [B, H, rows, D] with a last stride of 1.
        arrays: contiguous arrays that are passed only by address (lse_ptr, ...).
        compile_backward_of: the problem of the forward. If its launch is not cached, and query, key or value require a
            gradient (`wants_backward`), the backward's kernels are compiled in other processes while the forward's is
            compiled here.
    """
    key = launch_key(spec, problem, tensors, arrays)
    launch = _launches.get(key)
    if launch is None:
        target = target_of(problem.query.device)
        plan, reason = plan_best_form(spec, problem, target, tensors, arrays)
        if reason is not None and target.is_hopper:
            fallback(f"{spec.name} without its Hopper kernel", reason)
        if compile_backward_of is not None and spec.products and wants_backward(compile_backward_of):
            expected = expected_backward(compile_backward_of, tensors, target)
            load_ahead(sorted(expected, key=lambda p: not p.spec.products), here=plan)  # the longest compiles first
        launch = prepare(plan, problem, tensors)
        remember(_launches, key, launch)
    return launch


def remember(cache: OrderedDict[tuple[object, ...], V], key: tuple[object, ...], value: V) -> None:
    """Add an entry, and drop the oldest if there are too many."""
    cache[key] = value
    if len(cache) > _REMEMBERED:
        cache.popitem(last=False)


def launch_key(spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Iterable[str]) -> tuple[object, ...]:
    """Return the cache key of a launch: everything that its plan and its scalar arguments depend on.

    Of `arrays` the names matter.
    """
    blocks, q, k = problem.block_mask, problem.query, problem.key
    return (
        spec, q.dtype, q.device, q.shape, k.shape, problem.value.shape, problem.scale,
        math.copysign(1.0, problem.scale),  # because 0.0 == -0.0
        problem.options, problem.values_in_keys, problem.in_tiles,
        problem.max_scores, tuple(arrays), allows_tf32(), problem.score_grad,
        None if problem.sink is None else (problem.sink.shape, problem.sink.stride()),
        None if problem.dropout is None else (problem.dropout.drop_below, problem.dropout.place),
        is_deterministic(),
        None if blocks is None else _mask_key(blocks),
        None if problem.layout is None else _layout_key(problem.layout, blocks),
        *[(t.stride(), t.data_ptr() & 15) for t in tensors.values()],
        *_mod_key(problem.score), *_mod_key(problem.mask),
    )  # fmt: skip


def _mask_key(blocks: BlockMask) -> tuple[object, ...]:
    tiles = blocks.in_tiles
    return (
        blocks.B, blocks.H, blocks.BLOCK_SIZE, blocks.full_overhangs, blocks.is_built, blocks.reach,
        blocks.bits is not None, blocks.skips_halves,
        None if tiles is None else (tiles.grid, tiles.mask.bits is not None, tiles.mask.skips_halves),
    )  # fmt: skip


def _layout_key(layout: Layout, blocks: BlockMask | None) -> tuple[object, ...]:
    table = layout.block_table
    pages = None if table is None else table.shape  # the size of a page is in the shape of key
    descales = [x.dim() for x in (layout.k_descale, layout.v_descale) if x is not None]
    return (layout.names, pages, *descales, None if blocks is None else blocks.seq_lengths)


def _mod_key(mod: BoundMod | None) -> tuple[object, ...]:
    if mod is None:
        return (None,)
    return (mod.graph, mod.numbers, *[(t.shape, t.stride(), t.data_ptr() & 15) for t in mod.captures])


# The settings of torch, read without the Python functions around them.
allows_tf32: Callable[[], bool] = torch._C._get_cublas_allow_tf32
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def prepare(wanted: KernelPlan, problem: Problem, tensors: Tensors) -> Launch:
    """Load a plan's kernel and compute the arguments that are the same for equal keys."""
    loaded = load(wanted)
    plan = loaded.plan
    assert problem.in_tiles == (plan.token_tile is not None), plan
    tiles = tiles_of(plan, problem)
    programs = min(tiles, processors(problem.query.device)) if plan.spec.persistent else tiles
    arguments: list[Any] = []
    fillers: list[tuple[int, Filler]] = []
    sources: list[FillerSource] = []
    for position, argument in enumerate(loaded.arguments):
        value = None
        if isinstance(argument.source, FromShapes):
            value = argument.source.value(problem, tensors)
        else:
            filler = _filler(argument, shared=programs < tiles)
            fillers.append((position, filler))
            sources.append(argument.source)
        arguments.append(value)
    return Launch(loaded.kernel, programs, tuple(arguments), tuple(fillers), tuple(sources), programs < tiles)


def runner(plan: KernelPlan, problem: Problem, tensors: Tensors, arrays: Tensors) -> Callable[[], None]:
    """Return a function that runs a plan's kernel on these tensors."""
    launch = prepare(plan, problem, tensors)
    everything = {**tensors, **arrays}
    return lambda: launch(problem, everything)


def forget_launches() -> None:
    """Clear the caches of launches, for example after tiles have changed."""
    for cache in CACHES:
        cache.clear()


Schedule = tuple[tuple[KernelSpec, ...], tuple[str, ...]]
_backward_schedules: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()


def scheduled_backward(problems: KernelProblems, tensors: Tensors) -> Schedule:
    """Return the kernels of a backward, in order, and the arrays that DELTA prepares. Cached by key."""
    # The names of `tensors` say which gradients are requested, so they are part of the key, like those of arrays.
    key = launch_key(DELTA, problems.capture_gradients, tensors, tensors)
    schedule = _backward_schedules.get(key)
    if schedule is None:
        target = target_of(problems.capture_gradients.query.device)
        kernels = backward_kernels(problems, tensors, target)
        schedule = kernels, prepared_arrays(kernels, target)
        remember(_backward_schedules, key, schedule)
    return schedule


CACHES: list[MutableMapping[Any, Any]] = [_launches, _backward_schedules]


def _filler(argument: Argument, shared: bool) -> Filler:
    """Return the filler of an argument. `shared`: programs take several tiles each, from a counter."""
    match argument.source:
        case FromTensors(name):
            return lambda problem, tensors: tensors[name]
        case FromProblem() as source:
            return lambda problem, tensors: source.tensor(problem).detach()
        case DescriptorOf(name, block) as source:
            return lambda problem, tensors: layout_described(source, problem, tensors).descriptor(tensors[name], block)
        case TileCounter():
            return _counter if shared else _no_counter
        case RedoneTiles():
            return lambda problem, tensors: count_on(problem.query.device)
    raise AssertionError(argument)


def _counter(problem: Problem, tensors: Tensors) -> Tensor:
    # A new counter for each launch: a CUDA graph captures the zeroing, and concurrent launches must not share one.
    return tensors["lse_ptr"].new_zeros(1, dtype=torch.int32)


def _no_counter(problem: Problem, tensors: Tensors) -> Tensor:
    return tensors["lse_ptr"]  # any address: it is not read


@frozen
class DescriptorLayout:
    """What a tensor descriptor says of a tensor besides its address."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor, grid: tuple[int, ...] = ()) -> DescriptorLayout:
        """Return what a descriptor says of a tensor, whose rows have the dims `grid` there, if it is not empty.

        A dim of size 1 may have any stride in torch, but TMA requires multiples of 16 bytes.
        """
        if grid:
            tensor = tensor.unflatten(2, grid)
        step = -(-tensor.size(-1) * tensor.element_size() // 16) * 16 // tensor.element_size()
        strides = [s if n > 1 else step for n, s in zip(tensor.shape[:-1], tensor.stride(), strict=False)]
        return DescriptorLayout(tensor.dtype, tuple(tensor.shape), (*strides, 1))

    def descriptor(self, base: Tensor | int, tile: tuple[int, ...]) -> Any:
        """Return Triton's descriptor of a tensor, or of what is at an address. Raises if TMA cannot address it."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        where = Address(base, self.dtype) if isinstance(base, int) else base
        return TensorDescriptor(where, list(self.shape), list(self.strides), list(tile))


def layout_described(source: DescriptorOf, problem: Problem, tensors: Tensors) -> DescriptorLayout:
    """Return the layout that a descriptor of one of these tensors says."""
    return DescriptorLayout.of(tensors[source.name], problem.tiles.grid.shape if source.is_grid else ())


class Address:
    """The part of a tensor that a descriptor needs. It does not keep the tensor's memory."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address
