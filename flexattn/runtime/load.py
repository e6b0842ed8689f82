"""load: KernelPlan -> LoadedKernel, with a smaller tile if the device has too few resources."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from flexattn.compile.arguments import Argument
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.render import render
from flexattn.compile.shared_memory import fit, smaller_tiles
from flexattn.errors import CompileError
from flexattn.process.events import fallback
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen
from flexattn.runtime import compile_workers
from flexattn.runtime.build import Kernel, OutOfResources, build, build_ahead


@frozen
class LoadedKernel:
    """A kernel, and the plan and source that it was built from."""

    plan: KernelPlan
    source: KernelSource
    kernel: Kernel

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The runtime arguments of the kernel, in order."""
        return self.plan.spec.arguments(self.plan)


@lru_cache(1024)
def load(wanted: KernelPlan) -> LoadedKernel:
    """Build and load the plan's kernel. Try smaller tiles while the device has too few resources for it."""
    failures: list[OutOfResources] = []
    for plan in smaller_tiles(fit(wanted)):  # Hopper tiles and kernels without products are checked here
        source = render(plan)
        kernel = build(source, plan.target)
        try:
            if not plan.target.is_interpreter:
                kernel.load()
        except OutOfResources as error:
            failures.append(error)
            fallback(f"{wanted.spec.name} with a smaller tile", "the device has too few resources for its first tile")
            continue
        return LoadedKernel(plan, source, kernel)
    raise CompileError(f"no tile of {wanted.name} fits: {failures[-1]}")


def load_ahead(plans: Sequence[KernelPlan], here: KernelPlan) -> None:
    """Start compiling in other processes what `load` will build for these plans. `here` is compiled by this process."""
    if compile_workers.processes():
        build_ahead([first_source(plan) for plan in plans], here.target, [first_source(here)])


def first_source(wanted: KernelPlan) -> KernelSource:
    """Return the source of the tile that `load` tries first."""
    return render(next(iter(smaller_tiles(fit(wanted)))))
