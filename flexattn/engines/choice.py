"""choice: select the engine for a problem.

Hopper kernels belong to the Triton engine. compile/schedule.py chooses between them and the portable kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.call.dense_form import dense_form
from flexattn.call.problem import Problem
from flexattn.engines import cpu, empty, gpu_float64, triton
from flexattn.engines.autograd import Engine, wants_gradient
from flexattn.errors import OptionError, message
from flexattn.machine.triton_versions import is_interpreting
from flexattn.options import Options, option
from flexattn.process.events import fallback
from flexattn.torch_state.modes import unstored
from flexattn.torch_state.transforms import is_transforming

ON_TRITON = frozenset(("TRITON", "HOPPER", "TRITON_DECODE"))  # values of BACKEND


def engine_of(problem: Problem) -> Engine:
    """Return the engine for a problem, by emptiness, device, dtype and kernel_options["BACKEND"]."""
    query, backend = problem.query, option(problem.options, "BACKEND") or "AUTO"
    if is_empty(problem):
        return empty
    if query.device.type == "cuda":
        engine = gpu_engine_of(problem)
        if engine is gpu_float64:
            fallback("engine", "float64 on a GPU is computed block by block in torch operations")
        return engine if engine is gpu_float64 else _checked_triton(query.device, str(backend))
    return _checked_triton(query.device, str(backend)) if backend in ON_TRITON else cpu


def is_empty(problem: Problem) -> bool:
    """Whether there is nothing to compute: no kernel runs."""
    return problem.query.numel() == 0 or problem.N == 0


@unstored
def form_for(engine: Engine, problem: Problem) -> Problem:
    """Return the problem as an engine computes it: with its layout, or in dense form (call/dense_form.py)."""
    if _reads_layout(engine, problem):
        return problem
    return dense_form(problem, clean=engine is not cpu)  # the CPU engine does not let NaN of unused keys through


def _reads_layout(engine: Engine, problem: Problem) -> bool:
    """Whether an engine computes the problem's layout.

    Triton kernels do, except for what has only a formula in torch operations: function transforms, and gradients of
    pages and of float8 keys.
    """
    if problem.layout is None:
        return True
    if engine is not triton or is_transforming():
        return False
    if not wants_gradient(problem):
        return True
    if problem.layout.is_quantized:
        return False
    blocks = problem.block_mask
    if blocks is not None and blocks.seq_lengths[1] != problem.N:  # its lists of query blocks have more rows than key
        return False
    shared = problem.key.size(0) == 1 < problem.query.size(0)
    by_sequence = problem.layout.seqused_k is not None or problem.layout.q_offsets is not None
    return not problem.is_paged and not (shared and by_sequence)  # dK/dV reads one length and one offset


def lse_dtype_of(query: Tensor, options: Options) -> torch.dtype:
    """Return the dtype of the lse that the engine returns. The CPU engine keeps more bits of it, for its backward."""
    on_cpu = query.device.type == "cpu" and (option(options, "BACKEND") or "AUTO") not in ON_TRITON
    return torch.float64 if on_cpu or query.dtype == torch.float64 else torch.float32


def gpu_engine_of(problem: Problem) -> Engine:
    if problem.query.dtype != torch.float64:
        return triton
    for name, value in problem.options:
        if name in ("BACKEND", "fwd_BACKEND", "bwd_BACKEND") and value != "AUTO":
            found = f"{name}={value!r} with float64 on a GPU"
            raise OptionError(message("kernel_options", found, "AUTO", f"Leave {name} out."))
    return gpu_float64


def _checked_triton(device: torch.device, backend: str) -> Engine:
    if backend == "CPU":
        fix = "Leave BACKEND out, or move the tensors to the CPU."
        raise OptionError(message("kernel_options", f"BACKEND='CPU' with tensors on {device}", "AUTO or TRITON", fix))
    if device.type == "cpu" and not is_interpreting():
        fix = "Leave BACKEND out, or set TRITON_INTERPRET=1 before Python starts to run kernels in the interpreter."
        found = f"BACKEND={backend!r} with tensors on the CPU"
        raise OptionError(message("kernel_options", found, "AUTO or CPU", fix))
    return triton
