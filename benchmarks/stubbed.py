"""The host time of known calls without a GPU: plans are made for an H200 and launches are left out.

Arguments are those of a launch on the GPU, with addresses of CPU tensors. Memory is set to zero by the CPU here, so
lengths are short.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

import flexattn
from benchmarks.harness import Config, Result
from flexattn import api, mods
from flexattn.compile import scalars
from flexattn.compile.shared_memory import fit
from flexattn.machine.target import Target
from flexattn.machine.triton_versions import FlatLaunch
from flexattn.runtime import known, launch
from flexattn.runtime.load import LoadedKernel

H200 = Target("cuda", 90, 32)
LENGTH, HEADS, HEAD_DIM = 64, 8, 64


class Unlaunched:
    """A kernel that counts its launches."""

    launches = 0  # of all kernels

    def launch(self, programs: int, arguments: tuple[Any, ...], stream: int | None = None) -> None:
        Unlaunched.launches += 1

    def flat(self) -> FlatLaunch:
        """A descriptor is replaced by itself, its shape and its strides, as for Triton's C launcher."""
        return FlatLaunch(self._launch_flat, lambda *launch: launch, lambda n, descriptor: [descriptor] * 9)

    def _launch_flat(self, programs: int, stream: int, arguments: list[Any]) -> None:
        Unlaunched.launches += 1


@contextlib.contextmanager
def launches_left_out() -> Iterator[None]:
    """Plan calls with CPU tensors for an H200, and launch nothing. Nothing is compiled."""
    launch.forget_launches()
    with (
        patch.multiple(
            launch,
            load=lambda plan: LoadedKernel(fit(plan), None, Unlaunched()),
            target_of=lambda device: H200,
            processors=lambda device: 132,
        ),
        patch.object(scalars, "l2_bytes", lambda device: 50 << 20),
        patch.object(known, "takes_addresses", lambda device: True),
        patch.object(api, "engine_of", lambda problem: api.triton),
    ):
        yield
    launch.forget_launches()


def calls() -> dict[str, Callable[[], object]]:
    """Return calls of flex_attention by name: forward, then forward and backward."""
    sizes = (None, None, LENGTH, LENGTH)
    causal = flexattn.create_block_mask(mods.causal, *sizes, device="cpu")
    documents = flexattn.create_block_mask(mods.document_causal(torch.arange(LENGTH) // 20), *sizes, device="cpu")
    arguments: dict[str, tuple[Any, ...]] = {
        "plain": (),
        "causal": (None, causal),
        "alibi + causal": (mods.alibi(HEADS), causal),
        "alibi + documents": (mods.alibi(HEADS), documents),
    }
    q, k, v = (torch.randn(1, HEADS, LENGTH, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
    learned = tuple(x.clone().requires_grad_() for x in (q, k, v))

    def both(given: tuple[Any, ...]) -> object:
        return torch.autograd.grad(flexattn.flex_attention(*learned, *given), learned, q)

    found: dict[str, Callable[[], object]] = {}
    for name, given in arguments.items():
        found[f"{name}, forward"] = lambda given=given: flexattn.flex_attention(q, k, v, *given)
        found[f"{name}, forward + backward"] = lambda given=given: both(given)
    return found


def stubbed(rounds: int, calls_per_round: int = 100) -> list[Result]:
    """Time known calls on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with launches_left_out():
            runs = calls()
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for run in runs.values():
                run()
            for _ in range(rounds):
                for name, run in runs.items():
                    start = time.perf_counter()
                    for _ in range(calls_per_round):
                        run()
                    taken[name].append((time.perf_counter() - start) * 1e3 / calls_per_round)
    finally:
        torch.set_num_threads(threads)
    return [
        Result(Config(f"stubbed launches, {name}", "flexattn", "known call"), tuple(ms)) for name, ms in taken.items()
    ]
