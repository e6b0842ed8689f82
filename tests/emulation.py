"""Calls with tensors on a CPU, planned and compiled for a card that is not here, their kernels run as PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import ptx
from torch import Tensor

from flexattn import api
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.render import render
from flexattn.compile.shared_memory import fit
from flexattn.explain import target_named
from flexattn.runtime import launch
from flexattn.runtime.build import Kernel, build


class Emulated:
    """A kernel whose launches run here."""

    def __init__(self, source: KernelSource, built: Kernel) -> None:
        self.source, self.shared = source, built.shared
        self.program = ptx.parse(built.ptx)

    def launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        memory = ptx.Memory([a for a in arguments if isinstance(a, Tensor)])
        parameters = [_bits(a) for a in arguments] + [0, 0]  # Triton's own scratch memory, of which it asks nothing
        for index in range(programs):
            ptx.run(self.program, parameters, index, memory, 32 * self.source.num_warps, self.shared)


def _bits(argument: Tensor | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return int(np.float32(argument).view(np.uint32)) if isinstance(argument, float) else int(argument)


def _built(plan: KernelPlan) -> tuple[KernelPlan, KernelSource, Emulated]:
    source = render(fit(plan))
    return plan, source, Emulated(source, build(source, plan.target))


@contextlib.contextmanager
def emulated(card: str) -> Iterator[None]:
    """Let calls with tensors on a CPU run as on a card that has no tensor descriptors, or is told so."""
    target = target_named(card)
    launch.forget_launches()
    with (
        patch.object(api, "_engine", lambda problem: api.triton),
        patch.multiple(
            launch, built_kernel=_built, target_of=lambda device: target, l2_bytes=lambda device: 40 << 20,
            processors=lambda device: 100,
        ),
    ):  # fmt: skip
        yield
    launch.forget_launches()
