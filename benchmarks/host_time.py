"""Host time of small calls, without waiting for the device: called from Python, and as part of a compiled function.

The peer "nothing" is an autograd Function that allocates the tensors of a call and launches nothing. No call with a
backward can take less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.harness import Config, Result, Run, host_sample, measure
from benchmarks.masks import documents, failure
from benchmarks.peers import PEERS, Attend
from benchmarks.works import WORKS, Inputs, Mods, Work, make_inputs
from flexattn.torch_compile import operators

MOST_LAUNCHES = 100  # between two waits for the device, so that its queue is never full
FEW, MANY = 2, 10  # calls of the compiled functions
# Peers by the function that a graph of torch.compile contains.
IN_GRAPH = {"flexattn": "flexattn", "torch_flex": "torch_flex_eager", "sdpa": "sdpa"}
SEEDS = itertools.count()  # for document masks, so that no two are equal
ONE_THREAD = "forward + backward, one thread"  # autograd calls the backward in the thread of the forward


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


class _Nothing(Function):
    """Allocates what attention returns and saves what it saves."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Nothing.apply(q, k, v)[0]


def calls(peers: Sequence[str], length: int, device: torch.device, dtype: torch.dtype, rounds: int) -> list[Result]:
    """Time calls from Python: forward, with a backward, and with a backward in the same thread."""
    every, notes = works(length, device), list[Result]()
    plain = make_inputs(every["plain"][0], device, dtype)
    runs = _with_one_thread(_directions(Config("call, plain", "nothing", "forward"), _nothing, plain))
    for name, (work, mods) in every.items():
        inputs = make_inputs(work, device, dtype)
        for peer in peers:
            config = Config(f"call, {name}", peer, "forward")
            try:
                runs |= _with_one_thread(_directions(config, PEERS[peer](work, mods, device), inputs))
            except Exception as error:
                notes.append(Result(config, note=failure(peer, error)))
    return [*_measured(runs, device, rounds), *notes]


def _with_one_thread(runs: dict[Config, Run]) -> dict[Config, Run]:
    """Return the runs, and those with a backward also without autograd's threads."""

    def alone(run: Run) -> Run:
        def run_alone() -> object:
            with torch.autograd.set_multithreading_enabled(False):
                return run()

        return run_alone

    with_backward = {config: run for config, run in runs.items() if config.direction != "forward"}
    return runs | {replace(config, direction=ONE_THREAD): alone(run) for config, run in with_backward.items()}


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
                    found |= _chained(config, torch.compile(_chain(attend), fullgraph=True), inputs, count)
            except Exception as error:
                notes.append(Result(config, note=failure(peer, error)))
    every = {replace(c, work=f"{count} {c.work}"): run for count, found in runs.items() for c, run in found.items()}
    samples = {result.config: result for result in _measured(every, device, rounds)}
    return [*(_difference(config, samples) for config in runs[MANY]), *notes]


def operator_calls(
    peers: Sequence[str], length: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> list[Result]:
    """Time what Inductor's code calls for one attention, and for its backward."""
    runs: dict[Config, Run] = {}
    for name, (work, mods) in works(length, device).items():
        inputs = make_inputs(work, device, dtype)
        config = Config(f"operator in a compiled function, {name}", "flexattn", "forward")
        if "flexattn" in peers:
            runs |= _operators(config, PEERS["flexattn"](work, mods, device), inputs)
        native = work.native(work)
        if "sdpa" in peers and device.type == "cuda" and native is not None:
            runs |= _flash_operators(replace(config, peer="sdpa"), native.causal, inputs)
    return _measured(runs, device, rounds)


def _operators(config: Config, attend: Attend, inputs: Inputs) -> dict[Config, Run]:
    """Return the calls of flexattn's functions that a compiled function makes."""
    runs: dict[Config, Run] = {}
    function = torch.compile(attend, fullgraph=True)
    torch.autograd.grad(function(*inputs.qkv), inputs.qkv, inputs.d_out)
    for direction, operator, name in (
        ("forward", operators.forward, "_repeated_forward"),
        ("backward", operators.backward, "_repeated_backward"),
    ):
        with patch.object(operators, name, wraps=getattr(operators, name)) as called:
            torch.autograd.grad(function(*inputs.qkv), inputs.qkv, inputs.d_out)
        given = called.call_args.args
        runs[replace(config, direction=direction)] = lambda operator=operator, given=given: operator(*given)
    return runs


def _flash_operators(config: Config, causal: bool, inputs: Inputs) -> dict[Config, Run]:
    """Return calls of the operators of SDPA's flash backend."""
    aten: Any = torch.ops.aten
    q, k, v, d_out = (x.detach() for x in (*inputs.qkv, inputs.d_out))

    def forward() -> tuple[Any, ...]:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)

    out, lse, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = forward()
    state = starts_q, starts_k, longest_q, longest_k, 0.0, causal, seed, offset

    def backward() -> object:
        return aten._scaled_dot_product_flash_attention_backward(d_out, q, k, v, out, lse, *state)

    return {config: forward, replace(config, direction="backward"): backward}


def _chain(attend: Attend) -> Callable[..., Tensor]:
    def function(q: Tensor, *stored: Tensor) -> Tensor:
        """Compute one call for each key and value: two calls with the same ones would also sum their gradients."""
        for k, v in zip(stored[::2], stored[1::2], strict=True):
            q = attend(q, k, v)
        return q

    return function


def _chained(config: Config, function: Callable[..., Any], inputs: Inputs, count: int) -> dict[Config, Run]:
    query, *stored = inputs.qkv
    copies = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(count) for x in stored]
    return _of_tensors(config, function, (query, *copies), inputs.d_out)


def _directions(config: Config, attend: Callable[..., Any], inputs: Inputs) -> dict[Config, Run]:
    return _of_tensors(config, attend, inputs.qkv, inputs.d_out)


def _of_tensors(
    config: Config, function: Callable[..., Any], tensors: Sequence[Tensor], d_out: Tensor
) -> dict[Config, Run]:
    """Call once in each direction, and return the functions to time."""

    def forward() -> Tensor:
        return function(*tensors)

    def both() -> object:
        return torch.autograd.grad(forward(), tensors, d_out)

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
