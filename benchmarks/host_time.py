"""Host time of small calls, without waiting for the device: called from Python, and as part of a compiled function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Config, Result, Run, host_sample, measure
from benchmarks.masks import documents, failure
from benchmarks.peers import PEERS, Attend
from benchmarks.works import WORKS, Inputs, Mods, Work, make_inputs

MOST_LAUNCHES = 100  # between two waits for the device, so that its queue is never full
FEW, MANY = 2, 10  # calls of the compiled functions
# Peers by the function that a graph of torch.compile contains.
IN_GRAPH = {"flexattn": "flexattn", "torch_flex": "torch_flex_eager", "sdpa": "sdpa"}
SEEDS = itertools.count()  # for document masks, so that no two are equal


def works(length: int, device: torch.device) -> dict[str, tuple[Work, Mods]]:
    """Return small workloads: no captures; numbers only; a captured tensor; captured tensors in both mods."""
    size = {"batch": 1, "heads": 8, "length": length, "head_dim": 64}
    plain, causal, alibi = (replace(WORKS[name], **size) for name in ("full_d64", "causal_d64", "alibi"))
    of_alibi = alibi.mods(alibi, device)
    return {
        "plain": (plain, Mods()),
        "causal": (causal, causal.mods(causal, device)),
        "alibi + causal": (alibi, of_alibi),
        "alibi + documents": (alibi, Mods(of_alibi.score_mod, documents(length, next(SEEDS), device))),
    }


def calls(peers: Sequence[str], length: int, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Result]:
    """Time calls from Python, forward and with a backward."""
    runs: dict[Config, Run] = {}
    notes: list[Result] = []
    for name, (work, mods) in works(length, device).items():
        inputs = make_inputs(work, device, dtype)
        for peer in peers:
            config = Config(f"call, {name}", peer, "forward")
            try:
                runs |= _directions(config, PEERS[peer](work, mods, device), inputs)
            except Exception as error:
                notes.append(Result(config, note=failure(peer, error)))
    return [*_measured(runs, device, rounds), *notes]


def compiled_calls(
    peers: Sequence[str], length: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> list[Result]:
    """Time one more call in a compiled function: a function of MANY calls minus one of FEW, per call."""
    runs: dict[int, dict[Config, Run]] = {FEW: {}, MANY: {}}
    notes: list[Result] = []
    for name, (work, mods) in works(length, device).items():
        inputs = make_inputs(work, device, dtype)
        for peer in (peer for peer in peers if peer in IN_GRAPH):
            config = Config(f"one more call in a compiled function, {name}", peer, "forward")
            try:
                attend = PEERS[IN_GRAPH[peer]](work, mods, device)
                for count, found in runs.items():
                    found |= _directions(config, torch.compile(_chain(attend, count), fullgraph=True), inputs)
            except Exception as error:
                notes.append(Result(config, note=failure(peer, error)))
    every = {replace(c, work=f"{count} {c.work}"): run for count, found in runs.items() for c, run in found.items()}
    samples = {result.config: result for result in _measured(every, device, rounds)}
    return [*(_difference(config, samples) for config in runs[MANY]), *notes]


def _chain(attend: Attend, count: int) -> Attend:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(count):
            q = attend(q, k, v)
        return q

    return function


def _directions(config: Config, attend: Callable[..., Any], inputs: Inputs) -> dict[Config, Run]:
    """Call once in each direction, and return the functions to time."""

    def forward() -> Tensor:
        return attend(*inputs.qkv)

    def both() -> object:
        return torch.autograd.grad(forward(), inputs.qkv, inputs.d_out)

    runs: dict[Config, Run] = {config: forward}
    if forward().requires_grad:
        both()
        runs[replace(config, direction="forward + backward")] = both
    return runs


def _measured(runs: Mapping[Config, Run], device: torch.device, rounds: int) -> list[Result]:
    return list(measure(runs, device, rounds, clock=host_sample, most_launches=MOST_LAUNCHES).values())


def _difference(config: Config, samples: Mapping[Config, Result]) -> Result:
    few, many = (samples[replace(config, work=f"{count} {config.work}")] for count in (FEW, MANY))
    if few.note or many.note:
        return Result(config, note=few.note or many.note)
    rounds = zip(few.milliseconds, many.milliseconds, strict=True)
    return Result(config, tuple((long - short) / (MANY - FEW) for short, long in rounds))
