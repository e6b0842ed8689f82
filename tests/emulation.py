"""Run calls with CPU tensors as on a GPU that is not present: kernels are compiled for it and their PTX is emulated."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ptx
import torch
from ptx_hopper import HANDLES, Box
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

from flexattn import api
from flexattn.compile import scalars
from flexattn.engines import triton
from flexattn.explanation import target_named
from flexattn.machine.triton_versions import LaunchFunction, Request
from flexattn.process.config import settings
from flexattn.runtime import build as build_module
from flexattn.runtime import launch, load
from flexattn.runtime.build import Loader, build


def load_in_emulator(request: Request, files: dict[str, Path]) -> LaunchFunction:
    """Load a kernel for emulation of its PTX, program by program. This is a loader for `build`."""
    program = ptx.parse(files["ptx"].read_text())
    metadata = json.loads(files["json"].read_text())
    threads, shared = program.threads or 32 * metadata["num_warps"], metadata["shared"]
    cta = ptx.Cta(program, threads, shared)
    is_described = [kind.startswith("tensordesc") for _, kind in request.signature]
    forms = metadata.get("tensordesc_meta") or []

    def launch(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        parameters: list[int] = []
        boxes: dict[int, Box] = {}
        for described, argument in zip(is_described, arguments, strict=True):
            if described:
                handle = HANDLES + len(boxes)
                boxes[handle] = _box(argument, forms[len(boxes)])
                parameters += [handle, *argument.shape, *argument.strides]
            else:
                parameters.append(_bits(argument))
        memory = ptx.Memory([a for a in arguments if isinstance(a, Tensor)], boxes)
        parameters += [0, 0]  # Triton's scratch memory, which these kernels do not use
        for index in range(programs):
            cta.run(parameters, index, programs, memory)

    return launch


def _box(descriptor: Any, form: dict[str, Any]) -> Box:
    """Return what a launch passes as a TensorDescriptor, with the form that the kernel was compiled for."""
    shape, strides, base = descriptor.shape, descriptor.strides, descriptor.base
    if not isinstance(base, Tensor):  # an address
        size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        memory = (ctypes.c_byte * (size * base.dtype.itemsize)).from_address(base.data_ptr())
        base = torch.frombuffer(memory, dtype=base.dtype)
    return Box(
        base.as_strided(shape, strides, base.storage_offset()),
        tuple(form["block_size"]),
        (0, 32, 64, 128)[form["swizzle"]],
    )


def _bits(argument: Tensor | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return int(np.float32(argument).view(np.uint32)) if isinstance(argument, float) else int(argument)


@contextlib.contextmanager
def emulated(card: str) -> Iterator[None]:
    """Run calls with CPU tensors as on this GPU. It must have no tensor descriptors, or calls set USE_TMA=False."""
    target = target_named(card)
    with (
        not_assembled(),
        kernels_loaded_by(load_in_emulator),
        patch.object(api, "engine_of", lambda problem: api.triton),
        patch.object(scalars, "l2_bytes", lambda device: 40 << 20),
        patch.object(triton, "target_of", lambda device: target),
        patch.multiple(launch, target_of=lambda device: target, processors=lambda device: 100),
    ):
        yield


@contextlib.contextmanager
def not_assembled() -> Iterator[None]:
    """Leave out ptxas, which takes a third of the time that Triton takes. Such kernels have a cache of their own."""
    ours = settings().cache_dir
    assert ours is not None
    folder = str(ours.with_name(f"{ours.name}-emulated"))
    with (
        patch.dict(os.environ, FLEXATTN_CACHE_DIR=folder, FLEXATTN_COMPILE_PROCESSES="0"),
        patch.object(CUDABackend, "make_cubin", lambda *_, **__: b"not assembled"),
    ):
        settings.cache_clear()
        yield
    settings.cache_clear()


@contextlib.contextmanager
def kernels_loaded_by(loader: Loader) -> Iterator[None]:
    """Load kernels with `loader`, and do not keep these launches.

    The current device is 0, because torch with CUDA raises without a GPU.
    """

    def forget() -> None:
        launch.forget_launches()
        load.load.cache_clear()

    forget()
    with (
        patch.object(load, "build", functools.partial(build, loader=loader)),
        patch.multiple(build_module, current_device=lambda: 0, current_stream=lambda device: 0, _LARGEST_TEXT=1 << 26),
    ):
        yield
    forget()
