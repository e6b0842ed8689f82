"""watched: what profilers, FlopCounterMode and selective checkpointing see of an engine: one operation, with its name.

Without them, a call pays for one test of a flag and one of a count.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flexattn.call.problem import Needs, Problem
from flexattn.torch_state.modes import is_storing

Direction = Literal["forward", "backward"]
_dispatch_modes = torch._C._len_torch_dispatch_stack
_COUNTS = frozenset(("_FlopCounterMode", "FlopCounterMode"))

_LIBRARY = torch.library.Library("flexattn", "FRAGMENT")
for _name in ("attention", "attention_backward"):
    _LIBRARY.define(f"{_name}(int flops) -> ()")
    _LIBRARY.impl(_name, lambda flops: None, "CompositeExplicitAutograd")
_OPERATORS = {"forward": torch.ops.flexattn.attention, "backward": torch.ops.flexattn.attention_backward}


def is_watched() -> bool:
    """Return whether a profiler or a dispatch mode is active."""
    return profiler._is_profiler_enabled or _dispatch_modes() > 0


def watched(direction: Direction, problem: Problem, function: Callable[..., Any], *args: Any) -> Any:
    """Call an engine's forward or backward: as a named range of the profiler, and as one operator for counters.

    The last argument of a backward is `needs`.
    """
    with ExitStack() as stack:
        if profiler._is_profiler_enabled:
            stack.enter_context(torch.profiler.record_function(range_name(problem, direction)))
        hidden = _hidden(problem, direction, args[-1] if direction == "backward" else None)
        if hidden is not None:
            stack.enter_context(hidden)
        return function(*args)


def range_name(problem: Problem, direction: Direction) -> str:
    """Return the name of a pass of a problem in profiles: flexattn.forward(score_mod=alibi, mask_mod=causal)."""
    mods = {"score_mod": problem.score, "mask_mod": problem.mask}
    named = ", ".join(f"{kind}={mod.graph.name}" for kind, mod in mods.items() if mod is not None)
    return f"flexattn.{direction}({named})"


def _hidden(problem: Problem, direction: Direction, needs: Needs | None) -> AbstractContextManager[object] | None:
    """Count the operations for each FlopCounterMode, and return the context that hides the engine's own operators."""
    modes = _get_current_dispatch_mode_stack() if _dispatch_modes() else []
    counters: list[Any] = [mode for mode in modes if type(mode).__name__ in _COUNTS]
    if counters:
        operator = _OPERATORS[direction]
        for mode in counters:
            registry = getattr(mode, "counter", mode).flop_registry  # the mode itself before torch 2.5
            registry.setdefault(operator, _given)
        operator(flops(problem, needs))
    elif not is_storing():
        return None
    return _disable_current_modes()


def _given(count: int, *, out_val: object = None, **_: object) -> int:
    """The formula of the operators above: their argument is the result."""
    return count


def flops(problem: Problem, needs: Needs | None) -> int:
    """Return the floating point operations of the matrix products for the pairs that attend.

    `needs` says which gradients a backward computes; None: the forward. A product of the forward or the backward takes
    two operations per pair and dim, as PyTorch counts them. The backward computes the scores again.
    """
    D, Dv = problem.query.shape[3], problem.value.shape[3]
    if needs is None:
        dims = D + Dv
    else:
        dq, dk, dv, _ = needs
        captured = problem.score_grad is not None and len(problem.score_grad.sites) > 0
        dims = D + Dv * dv + Dv * (dq or dk or captured) + D * dq + D * dk
    return 2 * dims * attending_pairs(problem)


def attending_pairs(problem: Problem) -> int:
    """Return how many pairs of a query and a key attend, over all batches and heads of the query.

    The values of a layout are not read, because they may be on a GPU. Without a mask, each query is counted with N
    keys, used or not. With a mask, all its rows are counted, also those that q_offsets leave out. Of packed sequences,
    the pairs of each sequence are counted.
    """
    B, H, M, _ = problem.query.shape
    blocks = problem.block_mask
    if blocks is None:
        return B * H * M * problem.N
    mask = problem.mask if problem.layout is None else None
    of = blocks.mask_mod, blocks.seq_lengths, blocks.kv_runs, None if mask is None else mask.graph
    known = blocks._counted
    if known is None or any(x is not y for x, y in zip(known[0], of, strict=True)):
        with _disable_current_modes():
            known = blocks._counted = of, blocks.pairs_of(mask).useful
    return known[1] * (B // blocks.B) * (H // blocks.H)
