"""Functions that torch.compile does not trace: a call inside of a compiled function is one graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "this function of flexattn runs in Python and reads values of tensors, which torch.compile cannot trace: each call "
    "is one graph break. Call it before the compiled function and pass its result, or remove fullgraph=True"
)


def uncompiled(function: F, reason: str = _REASON) -> F:
    """Make torch.compile call a function without tracing it, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports Dynamo and wraps each call. Here the function itself gets the attributes that such
    a wrapper has. Dynamo stops tracing at a function with them. Its code object is marked so that Dynamo skips its
    frame and all frames below. This adds no cost to a call.
    """
    try:
        private: Any = torch._C
        dynamo = private._dynamo.eval_frame
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # these names are private to torch; the public way does not need them
        return torch.compiler.disable(function, reason=reason)  # type: ignore[return-value]

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = reason
    # torch.compile(function) compiles this instead: a frame that calls it, for which Dynamo can report the reason.
    marks._torchdynamo_orig_callable = call
    marks._torchdynamo_wrapper_id = id(function)
    return function
