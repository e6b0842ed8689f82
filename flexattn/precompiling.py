"""precompiling: precompile, which compiles the kernels of calls into the cache directory, for any GPU architecture."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.api import flex_attention
from flexattn.block_mask import BlockMask
from flexattn.call.call import Call
from flexattn.call.layout import LayoutArguments
from flexattn.compile.kernel_source import KernelSource
from flexattn.errors import ArgumentError, message
from flexattn.explanation import explain_call, mask_sources, target_named
from flexattn.machine.kernel_store import open_store
from flexattn.machine.target import Target
from flexattn.mask_build.on_target import as_on_target
from flexattn.process.config import settings
from flexattn.process.frozen_class import frozen
from flexattn.runtime import compile_workers
from flexattn.runtime.build import build, build_ahead, is_on_disk
from flexattn.runtime.load import first_source
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace

_LAYOUT = ("seqused_k", "q_offsets", "kv_positions", "block_table", "kv_layout", "k_descale", "v_descale")
_ARGUMENTS = frozenset(inspect.signature(flex_attention).parameters) - {"unknown"}


@frozen
class Precompiled:
    """What `precompile` did. Print it for a summary."""

    target: str
    compiled: tuple[str, ...]  # the names of kernels that were compiled
    found: tuple[str, ...]  # and of those that were there already
    seconds: float
    folder: Path  # the cache directory

    def __str__(self) -> str:
        count, there = len(self.compiled), len(self.found)
        return (
            f"{count} kernel{'' if count == 1 else 's'} compiled for {self.target} in {self.seconds:.1f} s, "
            f"{there} there already: {self.folder}"
        )


@uncompiled
@undisturbed("precompile")
def precompile(
    calls: Mapping[str, Any] | Iterable[Mapping[str, Any]], target: str = "sm_90", processes: int | None = None
) -> Precompiled:
    """Compile the kernels of calls of flex_attention into the cache directory, on any machine.

    A later process with the same versions of flexattn, torch and Triton compiles nothing for these calls.

    Args:
        calls: the arguments of each call, by name, and possibly `return_aux`. Tensors may be on the device "meta", or
            on a CPU. Only their shapes, strides, dtypes and `requires_grad` matter. Masks are built with device="cpu".
        target: the architecture of the GPU.
        processes: how many processes compile, at most one per core, which is the default.

    The kernels that build the mask on a GPU are compiled too. So are those of the backward, if a tensor requires a
    gradient. Then query, key and value are assumed to receive one, laid out like the tensor, and lse none. Tensors are
    assumed to begin at multiples of 16 bytes, as new ones do. Settings that choose kernels are those of this process:
    tf32, deterministic algorithms, FLEXATTN_WITHOUT and tuned tiles.

    Raises ArgumentError if the cache directory cannot be written, and what flex_attention raises.

    Example:
        >>> import torch
        >>> q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 1024, 1024, device="cpu")
        >>> print(precompile([dict(query=q, key=q, value=q, block_mask=mask)], target="sm_90"))  # doctest: +SKIP
        5 kernels compiled for sm_90 in 9.1 s, 0 there already: /home/me/.cache/flexattn
    """
    start = time.monotonic()
    chosen, folder, most = target_named(target), _folder(), _processes(processes)
    given: list[Any] = [calls] if isinstance(calls, Mapping) else list(calls)
    built = cache(partial(as_on_target, target=chosen))  # a mask of several calls is built once
    sources = dict.fromkeys(source for call in given for source in _sources(call, target, chosen, built))
    found = [source for source in sources if is_on_disk(source, chosen)]
    missing = sorted(sources.keys() - set(found), key=lambda source: -len(source.text))  # the longest compile first
    with compile_workers.at_most(most - 1):  # and this process, which begins at the other end
        build_ahead(missing, chosen)
        for source in reversed(missing):
            build(source, chosen)
    seconds = time.monotonic() - start
    return Precompiled(str(chosen), _names(missing), _names(found), seconds, folder)


def _names(sources: Iterable[KernelSource]) -> tuple[str, ...]:
    return tuple(sorted(source.name for source in sources))


def _folder() -> Path:
    """Return the cache directory. Raise an ArgumentError if kernels cannot be kept there."""
    store = open_store(settings().cache_dir)
    if store is None or not os.access(store.root, os.W_OK):
        found = f"{settings().cache_dir}, where no kernels can be kept"
        fix = "Set it to a folder that you own and may write."
        raise ArgumentError(message("FLEXATTN_CACHE_DIR", found, "a folder for kernels", fix))
    return store.root


def _processes(wanted: int | None) -> int:
    if wanted is None:
        return compile_workers.cores()
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise ArgumentError(message("processes", repr(wanted), "an int >= 1 or None", "Leave it out."))
    return wanted


def _sources(
    arguments: Mapping[str, Any], name: str, target: Target, built: Callable[[BlockMask], tuple[BlockMask, ...]]
) -> Iterator[KernelSource]:
    """Yield the kernels of a call, and those that build its mask. `built` returns a mask as it is built there."""
    call, masks = _call_of(arguments), ()
    if isinstance(call.block_mask, BlockMask):
        masks = built(call.block_mask)
        call = replace(call, block_mask=masks[0])
    has_backward = _has_backward(call)
    for plan in explain_call(call, name).plans:
        if plan.is_forward or has_backward:
            yield first_source(plan)
    for mask in masks:
        yield from mask_sources(mask, target)


def _has_backward(call: Call) -> bool:
    captured = () if call.score_mod is None else trace(call.score_mod, "score").reached
    tensors = (call.query, call.key, call.value, call.sink, *captured)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _call_of(arguments: Mapping[str, Any]) -> Call:
    """Return the call with these arguments, with tensors on a CPU."""
    if not isinstance(arguments, Mapping):
        found, fix = f"a {type(arguments).__name__}", "Write dict(query=q, key=k, value=v)."
        raise ArgumentError(message("calls", found, "a dict of the arguments of flex_attention for each call", fix))
    if unknown := sorted(arguments.keys() - _ARGUMENTS):
        fix = f"The names are {', '.join(sorted(_ARGUMENTS))}."
        raise ArgumentError(message("calls", f"an argument {unknown[0]!r}", "those of flex_attention", fix))
    given = {name: _with_memory(value) for name, value in arguments.items()}
    layout = LayoutArguments(**{name: given[name] for name in _LAYOUT if given.get(name) is not None})
    get = given.get
    return Call(
        get("query"), get("key"), get("value"), get("score_mod"), get("block_mask"), get("scale"),
        get("enable_gqa", False), get("kernel_options"), get("sink"), get("dropout_p", 0.0),
        getattr(get("return_aux"), "max_scores", False), None if layout.is_empty else layout,
    )  # fmt: skip


def _with_memory(value: Any) -> Any:
    """Return a meta tensor as one on a CPU. Its memory is not touched, so it is not there."""
    if not isinstance(value, Tensor) or value.device.type != "meta":
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return made.requires_grad_(value.requires_grad)
