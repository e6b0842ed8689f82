"""triton: the Triton engine. It runs the kernels of forward and backward on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from flexattn.call.problem import Gradients, Needs, Problem
from flexattn.call.sinks import sink_gradient, weight_of_keys
from flexattn.compile.arguments import Tensors
from flexattn.compile.capture_sums import CaptureSums, largest_of_rows, sums_integers
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import DELTA, DQ_ROWS, FORWARD, SIZES
from flexattn.compile.plan import has_descriptor, is_aligned
from flexattn.compile.scalars import padded
from flexattn.compile.scatter import capture_sum_name
from flexattn.compile.schedule import KernelProblems, backward_kernels, plan_best_form
from flexattn.machine.target import Target
from flexattn.runtime.launch import run_kernel, scheduled_backward

# Runs one kernel, as launch.run_kernel does. Tuning and profile pass functions that also record the calls.
Run = Callable[[KernelSpec, Problem, Tensors, Tensors], None]
_FORWARD_OUTPUTS = tuple((f.wanted, f.outputs) for f in FORWARD.features if f.outputs is not None)


def forward(problem: Problem, run: Run = run_kernel) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out [B, Hq, M, Dv], lse [B, Hq, M] and, if requested, the largest score of each row [B, Hq, M]."""
    problem = _with_rows(problem)
    q, v = problem.query, problem.value
    out = _like_strides(q, v.size(-1))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arrays = {"lse_ptr": lse}
    for wanted, outputs in _FORWARD_OUTPUTS:
        if wanted(problem, arrays):
            arrays |= outputs(problem)
    seen = KernelProblems.of(problem).seen_by(FORWARD)
    tensors = {"q": q, "k": problem.key, "v": v, "o": out}
    if run is run_kernel:
        run_kernel(FORWARD, seen, tensors, arrays, problem)
    else:
        run(FORWARD, seen, tensors, arrays)
    return out, lse, arrays.get("max_ptr")


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs,
    run: Run = run_kernel,
) -> Gradients:  # fmt: skip
    """Return the gradients of query, key, value, captured tensors and the sink; None if not needed."""
    problem, d_out = _with_rows(problem), _rows(d_out, problem.batch_invariant)
    q, k, v = problem.query, problem.key, problem.value
    tensors = {"q": q, "k": k, "v": v, "o": out, "do": d_out}
    if needs[0]:
        tensors["dq"] = _like_strides(q, q.size(-1))
    if needs[1] or needs[2]:
        tensors |= {"dk": _like_strides(k, k.size(-1)), "dv": _like_strides(v, v.size(-1))}
    count = q.size(0) * q.size(1) * padded(q.size(2))
    delta, shift = (q.new_empty(count, dtype=torch.float32) for _ in range(2))
    arrays = {"delta_ptr": delta, "shift_ptr": shift}
    problems = KernelProblems.of(problem)

    def step(spec: KernelSpec, given: Tensors) -> None:
        run(spec, problems.seen_by(spec), {name: tensors[name] for name in spec.tensors}, given)

    step(DELTA, {"lse_ptr": lse} | ({} if d_lse is None else {"dlse_ptr": d_lse.float().contiguous()}) | arrays)
    kernels = scheduled_backward(problems, tensors)
    sums = CaptureSums.of(problem, sums_integers(problem))
    # Integer sums need a bound of what they add: measured by SIZES, or known from d_out and value.
    if SIZES in kernels:
        step(SIZES, arrays | _capture_arrays(problem, sums, size=sums.sizes))
    largest = _largest_of_rows(problem, lse, d_out, delta) if sums.sizes and SIZES not in kernels else None
    scales = sums.scales(problem, largest)
    arrays |= _capture_arrays(problem, sums, grad=sums.buffers.values(), scale=scales, lost=sums.lost)
    if DQ_ROWS in kernels:
        arrays["dq_sum_ptr"] = q.new_zeros((count * pieces_of(q.size(-1)), 32), dtype=torch.float32)
    for spec in kernels:
        if spec is not SIZES:
            step(spec, arrays)
    dq, dk, dv = (tensors[name] if need else None for name, need in zip(("dq", "dk", "dv"), needs[:3], strict=True))
    d_sink = None
    if problem.sink is not None and needs[3]:
        B, Hq, M, _ = q.shape
        d_sink = sink_gradient(problem.sink.detach(), lse, delta.view(B, Hq, -1)[..., :M])
    return dq, dk, dv, sums.gradients(problem, scales), d_sink


def plans(problem: Problem, target: Target) -> tuple[tuple[KernelPlan, str | None], ...]:
    """Return the plans that explain shows, each with the reason why it is not a Hopper kernel."""
    problem = _with_rows(problem)
    q, k, v = problem.query, problem.key, problem.value
    out = _like_strides(q, v.size(-1))
    tensors = {"q": q, "k": k, "v": v, "o": out, "do": out, "dq": q, "dk": k, "dv": v}
    problems = KernelProblems.of(problem)
    kernels = (FORWARD, DELTA, *backward_kernels(problems, tensors, target))
    return tuple(
        plan_best_form(spec, problems.seen_by(spec), target, {name: tensors[name] for name in spec.tensors})
        for spec in kernels
    )


def _largest_of_rows(problem: Problem, lse: Tensor, d_out: Tensor, delta: Tensor) -> Tensor:
    """Return an upper bound of sum(|d score|) over a row, float32, 0-d."""
    kept = 1.0 if problem.dropout is None else problem.dropout.keep_scale
    largest = largest_of_rows(d_out, problem.value, delta, kept)
    return largest if problem.sink is None else largest * weight_of_keys(problem.sink.detach(), lse)


def _capture_arrays(problem: Problem, sums: CaptureSums, **arrays: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return one tensor per captured tensor that requires a gradient, by the names of the kernels' arguments."""
    if problem.score is None:
        return {}
    return {
        capture_sum_name(problem.score.graph, i, argument): tensor
        for argument, tensors in arrays.items()
        for i, tensor in zip(sums.buffers, tensors, strict=False)
    }


def _rows(tensor: Tensor, alike: bool) -> Tensor:
    """Return the tensor with contiguous rows. A last stride other than 1 (as in an expanded gradient) requires a copy.

    With `alike` a tensor is also copied if its alignment or TMA support differs from its copy's. The choice of kernels
    then depends only on the head dim, not on strides.
    """
    whole = tensor.stride(-1) == 1 or tensor.size(-1) == 1
    aligns = tensor.size(-1) * tensor.element_size() % 16 == 0
    if whole and (not alike or (is_aligned(tensor) == aligns and (has_descriptor(tensor) or not aligns))):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _with_rows(problem: Problem) -> Problem:
    """Return the problem with contiguous rows."""
    q, k, v, alike = problem.query, problem.key, problem.value, problem.batch_invariant
    rows = _rows(q, alike), _rows(k, alike), _rows(v, alike)
    if rows[0] is q and rows[1] is k and rows[2] is v:
        return problem
    return replace(problem, query=rows[0], key=rows[1], value=rows[2])


def _like_strides(tensor: Tensor, width: int) -> Tensor:
    """Return an empty [B, H, rows, width] with the dim order of `tensor` in memory, the last dim innermost."""
    B, H, rows, _ = tensor.shape
    strides = tensor.stride()
    order = [0, 1, 2] if 0 in strides[:3] else sorted(range(3), key=lambda d: -strides[d])
    if order == [0, 1, 2]:
        return torch.empty((B, H, rows, width), dtype=tensor.dtype, device=tensor.device)
    shape = [(B, H, rows)[d] for d in order]
    out = torch.empty((*shape, width), dtype=tensor.dtype, device=tensor.device)
    return out.permute(*(order.index(d) for d in range(3)), 3)
