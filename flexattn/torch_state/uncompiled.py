"""What torch.compile leaves alone: a call of flexattn inside of a compiled function is one graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "flexattn traces score_mod and mask_mod itself and runs kernels of its own, which torch.compile cannot see into: "
    "each call of flexattn is one graph break. Leave fullgraph=True out, or compile the parts around the call"
)


def uncompiled(function: F) -> F:
    """Mark a function as one that torch.compile must call and not trace, as `torch.compiler.disable` does.

    That imports Dynamo and puts a wrapper around each call. Here the function itself gets what the wrapper has: the
    attributes that stop Dynamo where it traces a call, and a code object whose frames, and all frames below, it skips.
    A call costs nothing more.
    """
    try:
        dynamo: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # these names are torch's own; the public way needs none of them
        return torch.compiler.disable(function, reason=_REASON)  # type: ignore[return-value]

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = _REASON
    # What torch.compile(function) compiles instead: a frame with a call of it, which can say the reason.
    marks._torchdynamo_orig_callable = call
    marks._torchdynamo_wrapper_id = id(function)
    return function
