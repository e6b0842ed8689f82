"""interpreted: torch versions of libdevice and inline PTX functions, which Triton's interpreter does not support."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

_NAMES = {"nearbyint": "round"}  # libdevice name -> torch name, if they differ


class _Libdevice:
    """Replaces triton.language.extra.libdevice."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        name = _NAMES.get(name, name)
        return _on_blocks(getattr(torch, name, None) or getattr(torch.special, name))


@cache
def replaced_globals() -> dict[str, Any]:
    """Return replacements for globals of a generated file, by name."""
    return {"libdevice": _Libdevice(), "fast_tanh": _on_blocks(torch.tanh)}


def _on_blocks(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Wrap a torch function to take the interpreter's blocks and Python numbers."""

    def compute(*operands: Any) -> Any:
        from triton.language import core
        from triton.runtime.interpreter import TensorHandle

        blocks: list[Any] = [x for x in operands if isinstance(x, core.tensor)]
        dtype = blocks[0].handle.data.dtype
        arrays = [np.asarray(x.handle.data if isinstance(x, core.tensor) else x, dtype) for x in operands]
        result = function(*(torch.from_numpy(np.array(a)) for a in np.broadcast_arrays(*arrays))).numpy()
        scalar = blocks[0].dtype
        shapes = [x.shape for x in blocks if isinstance(x.type, core.block_type)]
        kind = core.block_type(scalar, list(np.broadcast_shapes(*map(tuple, shapes)))) if shapes else scalar
        return core.tensor(TensorHandle(result, scalar), kind)

    return compute
