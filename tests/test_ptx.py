"""Kernels as Triton compiles them for cards that are not here, run as PTX and compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from kernel_cases import Setting, check_case
from torch import Tensor

from flexattn import api, launch
from flexattn.build import Kernel, KernelSource, build
from flexattn.kernel_plan import KernelPlan
from flexattn.render import render
from flexattn.shared_memory import fit
from flexattn.target import Target

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

CARDS = {name: Target("cuda", int(name[3:]), 32) for name in ("sm_80", "sm_90")}


class Emulated:
    """A kernel whose launches run here."""

    def __init__(self, source: KernelSource, built: Kernel) -> None:
        self.source, self.shared = source, built.shared
        self.program = ptx.parse(built.ptx)

    def launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        memory = ptx.Memory(tensors)
        parameters = [_bits(a) for a in arguments] + [0, 0]  # Triton's own scratch memory, of which it asks nothing
        for index in range(programs):
            ptx.run(self.program, parameters, index, memory, 32 * self.source.num_warps, self.shared)


def _bits(argument: Tensor | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return int(np.float32(argument).view(np.uint32)) if isinstance(argument, float) else int(argument)


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let calls with CPU tensors be planned for a card, and run here."""
    target = CARDS[request.param]

    def built(plan: KernelPlan) -> tuple[KernelPlan, KernelSource, Emulated]:
        source = render(fit(plan))
        return plan, source, Emulated(source, build(source, plan.target))

    monkeypatch.setattr(api, "_engine", lambda problem: api.triton)
    for name, value in (
        ("built_kernel", built), ("target_of", lambda device: target), ("l2_bytes", lambda device: 40 << 20),
        ("processors", lambda device: 100),
    ):  # fmt: skip
        monkeypatch.setattr(launch, name, value)
    launch.forget_launches()
    yield request.param
    launch.forget_launches()


# Dropout joins numbers; with a mask of bytes beside it Triton lays out products otherwise, and 16 terms came out wrong.
@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
@pytest.mark.parametrize("name", ["dropout_unaligned"])
def test_unaligned_rows(card: str, name: str) -> None:
    check_case(name, Setting("cpu", torch.float16, options=(("USE_TMA", False),)))


@pytest.mark.parametrize("card", ["sm_80"], indirect=True)
@pytest.mark.parametrize("name", ["dropout_tile-32x16-captured", "mask_softcap-causal"])
def test_ampere(card: str, name: str) -> None:
    check_case(name, Setting("cpu", torch.float16))
