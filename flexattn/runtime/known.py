"""known: a forward or backward whose launches are known from an equal call.

A call of a known kind plans nothing. It computes one key, makes its allocations, collects the tensors that its kernels
read and write in one list, and launches each kernel with addresses from that list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.arguments import PARTS, DescriptorOf, FromProblem, FromTensors, Part, Tensors
from flexattn.compile.kernel_plan import KernelSpec
from flexattn.runtime.build import Kernel
from flexattn.runtime.launch import Launch, Source, descriptor_maker, launch_key, launch_of

COUNTER = "counter_ptr"  # the name of the counter from which programs take tiles
Address = Tensor | int


def known_key(
    spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: tuple[str, ...], needs: tuple[bool, ...]
) -> tuple[object, ...]:
    """Return the key of a direction, whose first kernel is `spec`: everything that its launches depend on.

    Of `tensors` only those are needed that the caller provides. The layout of the others follows from these.
    """
    runs = [
        (r.capture, r.places.shape, r.places.stride(), r.starts.data_ptr() & 15, r.ends.data_ptr() & 15)
        for r in problem.equal_runs
    ]
    return (launch_key(spec, problem, tensors, arrays), needs, *runs)


class Recorder:
    """Runs kernels as `run_kernel` does, and keeps their launches."""

    def __init__(self, trained: Problem | None = None) -> None:
        self.trained = trained  # see run_kernel
        self.launches: list[Launch] = []

    def __call__(self, spec: KernelSpec, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
        launch = launch_of(spec, problem, tensors, arrays, self.trained)
        launch(problem, {**tensors, **arrays})
        self.launches.append(launch)

    @property
    def counts(self) -> bool:
        """Whether programs of a kernel take their tiles from a counter."""
        return any(launch.shares_tiles for launch in self.launches)


@dataclass(frozen=True)
class Step:
    """The launch of one kernel. `slots` and `described` are (position of an argument, index of its tensor, ...)."""

    kernel: Kernel
    programs: int
    arguments: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]
    described: tuple[tuple[int, int, Callable[[Tensor], Any]], ...]  # with the function that makes a descriptor


@dataclass(frozen=True)
class KnownKernels:
    """The kernels of one direction, in order.

    Their arguments are in one list: the tensors that the engine names, in its order, then those of `parts`.
    """

    steps: tuple[Step, ...]
    parts: tuple[Callable[[Problem], tuple[Tensor, ...]], ...]

    @staticmethod
    def of(launches: Sequence[Launch], names: Sequence[str], problem: Problem) -> KnownKernels:
        """Return the kernels of recorded launches of a problem."""
        index: dict[str | tuple[Part, int], int] = {name: i for i, name in enumerate(names)}
        used: dict[Part, None] = {
            s.part: None for launch in launches for s in launch.sources if isinstance(s, FromProblem)
        }
        for part in used:
            for i in range(len(PARTS[part](problem))):
                index[part, i] = len(index)
        steps = tuple(_step(launch, index) for launch in launches if launch.programs)
        return KnownKernels(steps, tuple(PARTS[part] for part in used))

    def run(self, problem: Problem, tensors: list[Tensor | None]) -> None:
        """Launch the kernels. `tensors` are those that the engine names; None for those that no kernel needs."""
        for part in self.parts:
            tensors += part(problem)
        device = problem.query.device
        if device.type != "cuda":
            self._launch(tensors, [t if t is None or not t.requires_grad else t.detach() for t in tensors])
        elif device.index == torch.cuda.current_device():
            # An address saves a driver call per pointer.
            self._launch(tensors, [0 if t is None else t.data_ptr() for t in tensors])
        else:
            with torch.cuda.device(device):
                self._launch(tensors, [0 if t is None else t.data_ptr() for t in tensors])

    def _launch(self, tensors: Sequence[Any], addresses: Sequence[Any]) -> None:
        for step in self.steps:
            arguments = list(step.arguments)
            for position, i in step.slots:
                arguments[position] = addresses[i]
            for position, i, describe in step.described:
                arguments[position] = describe(tensors[i])
            step.kernel.launch(step.programs, tuple(arguments))


def _step(launch: Launch, index: dict[str | tuple[Part, int], int]) -> Step:
    slots: list[tuple[int, int]] = []
    described: list[tuple[int, int, Callable[[Tensor], Any]]] = []
    for (position, _), source in zip(launch.fillers, launch.sources, strict=True):
        i = index[_place(source, launch.shares_tiles)]
        if isinstance(source, DescriptorOf):
            described.append((position, i, descriptor_maker(source.block)))
        else:
            slots.append((position, i))
    return Step(launch.kernel, launch.programs, launch.arguments, tuple(slots), tuple(described))


def _place(source: Source, counted: bool) -> str | tuple[Part, int]:
    match source:
        case FromTensors(name) | DescriptorOf(name):
            return name
        case FromProblem(part, i):
            return part, i
    return COUNTER if counted else "lse_ptr"  # any address: it is not read
