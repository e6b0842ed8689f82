"""known: a forward or backward whose launches are known from an equal one.

Nothing is planned for it. Its kernels get their pointers from one list: the tensors that the engine names, then those
of the problem (block lists, captures, sink, seed; see `arguments.PARTS`). A pointer is an address on a GPU, and a
tensor elsewhere.

Caches, outermost first: `repeated_calls._calls` (a whole call), `repeated_operators._known` (an operator in a graph),
`triton._forwards` and `_backwards` (one pass), `launch._backward_schedules` (which kernels a backward runs),
`launch._launches` (one kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import PARTS, DescriptorOf, FromProblem, FromTensors, Part, RedoneTiles, Tensors
from flexattn.compile.kernel_plan import KernelSpec
from flexattn.machine.triton_versions import FlatLaunch, launches_are_watched
from flexattn.process.frozen_class import frozen
from flexattn.runtime import build
from flexattn.runtime.build import Kernel
from flexattn.runtime.launch import (
    Address,
    DescriptorLayout,
    FillerSource,
    Launch,
    launch_key,
    launch_of,
    layout_described,
)

COUNTER, REDONE = "counter_ptr", "redone_ptr"  # the counter from which programs take tiles, and that of redone tiles
Pointer = Tensor | int
Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]  # (shape, strides, dtype) -> Tensor


def known_key(
    spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: tuple[str, ...], needs: tuple[bool, ...]
) -> tuple[object, ...]:
    """Return the key of a pass: everything that its launches depend on. `spec` stands for it: FORWARD or DELTA.

    Of `tensors` only those are needed that the caller provides. The layout of the others follows from these.
    """
    runs = [
        (r.capture, r.places.shape, r.places.stride(), r.starts.data_ptr() & 15, r.ends.data_ptr() & 15)
        for r in problem.equal_runs
    ]
    return (launch_key(spec, problem, tensors, arrays), needs, *runs)


def pointer_of(device: torch.device) -> Callable[[Tensor], Pointer]:
    """Return the function from a tensor to what kernels on a device take as its pointer."""
    return Tensor.data_ptr if takes_addresses(device) else Tensor.detach


def empty_of(device: torch.device) -> Empty:
    """Return a function that allocates a tensor on the current device of a type.

    It is the one that Inductor's code calls, which takes half the host time of torch.empty_strided.
    """
    found = getattr(_private._dynamo.guards, f"_empty_strided_{device.type}", None)
    if found is not None:
        return found
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device.type)


_private: Any = torch._C


def takes_addresses(device: torch.device) -> bool:
    """Return whether kernels on a device take addresses. An address saves a driver call for each pointer."""
    return device.type == "cuda"


class LaunchLog:
    """Runs kernels, and keeps their launches with the layouts of the tensors that their TMA descriptors describe."""

    def __init__(self, compile_backward_of: Problem | None = None) -> None:
        self.compile_backward_of = compile_backward_of  # see launch_of
        self.launches: list[tuple[Launch, dict[str, DescriptorLayout]]] = []

    def __call__(self, spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
        launch = launch_of(spec, problem, tensors, arrays, self.compile_backward_of)
        everything = {**tensors, **arrays}
        launch(problem, everything)
        sources = {s.name: s for s in launch.sources if isinstance(s, DescriptorOf)}
        layouts = {name: layout_described(source, problem, everything) for name, source in sources.items()}
        self.launches.append((launch, layouts))

    @property
    def counts(self) -> bool:
        """Whether programs of a kernel take their tiles from a counter."""
        return any(launch.shares_tiles for launch, _ in self.launches)

    @property
    def redoes(self) -> bool:
        """Whether a kernel may compute tiles again."""
        return any(isinstance(s, RedoneTiles) for launch, _ in self.launches for s in launch.sources)


@frozen
class Step:
    """The launch of one kernel. `slots` are (position of an argument, index of its pointer).

    `described` has the same for descriptors, then the tensor's layout and the tile's shape.
    """

    kernel: Kernel
    programs: int
    arguments: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]
    described: tuple[tuple[int, int, DescriptorLayout, tuple[int, ...]], ...]


_MOST_ADDRESSES = 128  # sets of addresses that a pass keeps the arguments of, and addresses of a descriptor


@frozen
class FlatStep:
    """A step on one device, with each descriptor replaced by what the launcher takes in its place."""

    flat: FlatLaunch
    programs: int
    arguments: list[Any]
    slots: tuple[tuple[int, int], ...]
    described: tuple[tuple[int, int, int, Callable[[Pointer], list[Any]]], ...]  # (begin, end, index, its arguments)

    def filled(self, pointers: Sequence[Pointer], stream: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Return a function and the arguments with which it launches the kernel."""
        arguments = self.arguments.copy()
        for position, i in self.slots:
            arguments[position] = pointers[i]
        for begin, end, i, expanded in self.described:
            arguments[begin:end] = expanded(pointers[i])
        return self.flat.launch, self.flat.complete(self.programs, stream, arguments)


@frozen
class FlatPass:
    """The steps of a pass on one device, and their arguments for recent sets of addresses.

    A training loop repeats its addresses, because the allocator reuses memory.
    """

    steps: tuple[FlatStep, ...]
    _filled: dict[tuple[Pointer, ...], list[tuple[Callable[..., None], tuple[Any, ...]]]] = field(default_factory=dict)

    def run(self, pointers: Sequence[Pointer], stream: int) -> None:
        """Launch all steps on a stream."""
        key = (stream, *pointers)
        filled = self._filled.get(key)
        if filled is None:
            filled = [step.filled(pointers, stream) for step in self.steps]
            if type(pointers[0]) is int:  # a tensor would be kept alive
                if len(self._filled) >= _MOST_ADDRESSES:
                    self._filled.clear()
                self._filled[key] = filled
        for launch, arguments in filled:
            launch(*arguments)


@frozen
class KnownKernels:
    """The kernels of one pass, in order. `parts` are those of the problem that they read."""

    steps: tuple[Step, ...]
    parts: tuple[Part, ...]
    pointer: Callable[[Tensor], Pointer]  # of a tensor
    empty: Empty
    on_gpu: bool
    _flat: dict[int, FlatPass] = field(default_factory=dict)  # by device

    @staticmethod
    def of(
        launches: Sequence[tuple[Launch, dict[str, DescriptorLayout]]], names: Sequence[str], problem: Problem
    ) -> KnownKernels:
        """Return the kernels of recorded launches of a problem, whose engine's tensors have these names."""
        index: dict[str | tuple[Part, int], int] = {name: i for i, name in enumerate(names)}
        used: dict[Part, None] = {
            s.part: None for launch, _ in launches for s in launch.sources if isinstance(s, FromProblem)
        }
        # All variants of a problem have the same number of tensors in each part: `_mask` (compile/arguments.py) appends
        # the bounds of runs.
        for part in used:
            for i in range(len(PARTS[part](problem))):
                index[part, i] = len(index)
        steps = tuple(_step(launch, forms, index) for launch, forms in launches if launch.programs)
        device = problem.query.device
        return KnownKernels(steps, tuple(used), pointer_of(device), empty_of(device), device.type == "cuda")

    def pointers(self, problem: Problem) -> list[Pointer]:
        """Return the pointers to the parts of a problem."""
        return [self.pointer(t) for part in self.parts for t in PARTS[part](problem)]

    def run(self, pointers: Sequence[Pointer], device: int) -> None:
        """Launch the kernels on the current stream of the current GPU; -1 if there is none."""
        if launches_are_watched():
            self._run_whole(pointers)
            return
        flat = self._flat.get(device)
        if flat is None:
            flat = self._flat[device] = FlatPass(tuple([_flat(step, pointers) for step in self.steps]))
        flat.run(pointers, build.current_stream(device) if self.on_gpu else 0)

    def _run_whole(self, pointers: Sequence[Pointer]) -> None:
        """Launch the kernels with whole descriptors, so that profilers see them."""
        for step in self.steps:
            arguments = list(step.arguments)
            for position, i in step.slots:
                arguments[position] = pointers[i]
            for position, i, form, tile in step.described:
                arguments[position] = form.descriptor(pointers[i], tile)
            step.kernel.launch(step.programs, tuple(arguments))


def _step(launch: Launch, forms: dict[str, DescriptorLayout], index: dict[str | tuple[Part, int], int]) -> Step:
    slots: list[tuple[int, int]] = []
    described: list[tuple[int, int, DescriptorLayout, tuple[int, ...]]] = []
    for (position, _), source in zip(launch.fillers, launch.sources, strict=True):
        i = index[_place(source, launch.shares_tiles)]
        if isinstance(source, DescriptorOf):
            described.append((position, i, forms[source.name], source.block))
        else:
            slots.append((position, i))
    return Step(launch.kernel, launch.programs, launch.arguments, tuple(slots), tuple(described))


def _place(source: FillerSource, counted: bool) -> str | tuple[Part, int]:
    match source:
        case FromTensors(name) | DescriptorOf(name):
            return name
        case FromProblem(part, i):
            return part, i
        case RedoneTiles():
            return REDONE
    return COUNTER if counted else "lse_ptr"  # any address: it is not read


def _flat(step: Step, pointers: Sequence[Pointer]) -> FlatStep:
    """Return a step for the current device. Arguments behind a descriptor move by the number of those replacing it."""
    flat = step.kernel.flat()
    arguments: list[Any] = []
    moved: dict[int, int] = {}
    described = []
    found = {position: (n, i, form, block) for n, (position, i, form, block) in enumerate(step.described)}
    for position, argument in enumerate(step.arguments):
        moved[position] = begin = len(arguments)
        if position in found:
            n, i, form, block = found[position]
            expanded = _expander(flat, n, form, block, pointers[i])
            arguments += expanded(pointers[i])
            described.append((begin, len(arguments), i, expanded))
        else:
            arguments.append(argument)
    slots = tuple([(moved[position], i) for position, i in step.slots])
    return FlatStep(flat, step.programs, arguments, slots, tuple(described))


def _expander(
    flat: FlatLaunch, n: int, form: DescriptorLayout, block: tuple[int, ...], first: Pointer
) -> Callable[[Pointer], list[Any]]:
    """Return a function that gives the arguments for the n-th descriptor, encoded once for each address.

    Triton checks a descriptor when it is made, which takes as long as encoding it. All addresses of a pass are aligned
    alike (call_kind.py), so only the descriptor of the first is made in this way. The others are copies of it.
    """
    known: dict[int, list[Any]] = {}
    checked = form.descriptor(first.data_ptr() if isinstance(first, Tensor) else first, block)

    def expanded(pointer: Pointer) -> list[Any]:
        address = pointer.data_ptr() if isinstance(pointer, Tensor) else pointer
        found = known.get(address)
        if found is None:
            if len(known) >= _MOST_ADDRESSES:
                known.clear()
            descriptor = object.__new__(type(checked))
            descriptor.__dict__.update(checked.__dict__, base=Address(address, form.dtype))
            found = known[address] = flat.expand(n, descriptor)
        return found

    return expanded
