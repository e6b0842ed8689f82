"""triton: the Triton engine. It runs the kernels of forward and backward on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexattn.call.memory_order import dense_strides, empty_in_order
from flexattn.call.problem import Gradients, Needs, Problem
from flexattn.call.sinks import sink_gradient, weight_of_keys
from flexattn.compile.arguments import Tensors
from flexattn.compile.capture_sums import CaptureSums, largest_of_rows, sums_integers
from flexattn.compile.head_dims import pieces_of
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import DELTA, FORWARD, SIZES, SMALL, SPLIT
from flexattn.compile.plan import has_descriptor, is_aligned
from flexattn.compile.scalars import padded, splits_of
from flexattn.compile.scatter import capture_sum_name, scatter_captures
from flexattn.compile.schedule import (
    KernelProblems,
    backward_in_best_order,
    backward_kernels,
    forward_in_best_order,
    forward_kernels,
    plan_best_form,
    prepared_arrays,
    with_expected_gradients,
)
from flexattn.layout import TiledGrid
from flexattn.machine.target import Target, target_of
from flexattn.options import option
from flexattn.process.events import fallback
from flexattn.process.frozen_class import frozen
from flexattn.runtime import build
from flexattn.runtime.known import COUNTER, REDONE, KnownKernels, LaunchLog, Pointer, known_key
from flexattn.runtime.launch import CACHES, remember, scheduled_backward
from flexattn.runtime.redone import count_on, is_counted

# Runs one kernel, as LaunchLog does. Tuning and profile pass functions that also record the calls. If one is
# given, a cached KnownForward or KnownBackward is not used.
Run = Callable[[KernelSpec, Problem, Tensors, Tensors], None]
_FORWARD_OUTPUTS = tuple((f.wanted, f.outputs) for f in FORWARD.features if f.outputs is not None)


# The tensors of a forward in the order of its pointers.
_FORWARD = ("q", "k", "v", "o", "lse_ptr", "max_ptr", COUNTER, REDONE, "part_ptr", "part_lse_ptr")
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # the shape of a tensor and its strides


@frozen
class KnownForward:
    """A forward whose launches are known."""

    out: Sizes
    lse: Sizes
    returns_largest: bool  # of each row of scores
    splits: tuple[int, int]  # elements of the results of splits and of their lse, 0 without splits
    counts: bool  # tiles are taken from a counter
    redone: Tensor | None  # the device's count of tiles that were computed again, if a kernel counts them
    kernels: KnownKernels

    @staticmethod
    def of(problem: Problem, recorded: LaunchLog, out: Tensor, arrays: Tensors) -> KnownForward:
        """Return the forward that was recorded, with these arrays."""
        kernels = KnownKernels.of(recorded.launches, _FORWARD, problem)
        shape = tuple(out.shape)
        rows = shape[:3], (shape[1] * shape[2], shape[2], 1)
        splits = arrays["part_ptr"].numel() if "part_ptr" in arrays else 0, len(arrays.get("part_lse_ptr", ()))
        redone = count_on(out.device) if recorded.redoes else None
        return KnownForward((shape, out.stride()), rows, problem.max_scores, splits, recorded.counts, redone, kernels)

    def for_rows(self) -> KnownForward:
        """Return the same forward for tensors [rows, H, D]."""
        return replace(self, out=rows_of(self.out), lse=(self.lse[0][1:], self.lse[1][1:]))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, parts: Iterable[Pointer]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute out, lse and row maxima. `parts` are pointers to what `kernels.parts` names."""
        kernels = self.kernels
        empty, pointer, device = kernels.empty, kernels.pointer, -1
        if kernels.on_gpu:
            device = query.get_device()
            if device != build.current_device():
                with torch.cuda.device(device):
                    return self(query, key, value, parts)
        out, lse = empty(*self.out, query.dtype), empty(*self.lse, torch.float32)
        largest = torch.empty_like(lse) if self.returns_largest else None
        # A new counter for each launch: a CUDA graph captures the zeroing, and concurrent launches must not share one.
        counter = lse.new_zeros(1, dtype=torch.int32) if self.counts else lse
        at_lse = pointer(lse)  # also in the place of arrays that no kernel reads or writes
        at_redone = at_lse if self.redone is None else pointer(self.redone)
        splits: list[Pointer] = [at_lse, at_lse]
        if self.splits[0]:
            memory = empty((sum(self.splits),), (1,), torch.float32)
            at = pointer(memory)
            splits = [at, *_parts_of(memory, self.splits[:1], at)]
        kernels.run(
            [
                pointer(query), pointer(key), pointer(value), pointer(out), at_lse,
                at_lse if largest is None else pointer(largest), pointer(counter), at_redone, *splits,
                *parts,
            ],
            device,
        )  # fmt: skip
        return out, lse, largest


def rows_of(sizes: Sizes) -> Sizes:
    """Return the sizes of [rows, H, D] from those of the same tensor as [1, H, rows, D]."""
    (_, H, rows, D), (_, of_head, of_row, of_column) = sizes
    return (rows, H, D), (of_row, of_head, of_column)


def _parts_of(memory: Tensor, begins: Sequence[int], pointer: Pointer) -> list[Pointer]:
    """Return pointers to the parts of float32 memory that begin at these elements, from the pointer to all of it."""
    if isinstance(pointer, int):
        return [pointer + 4 * begin for begin in begins]
    return [memory[begin:] for begin in begins]


# The tensors of a backward in the order of its pointers.
_BACKWARD = (
    "q", "k", "v", "o", "do", "dq", "dk", "dv", "lse_ptr", "dlse_ptr", "delta_ptr", "shift_ptr", "dq_sum_ptr",
    "spans_ptr", COUNTER,
)  # fmt: skip


@frozen
class KnownBackward:
    """A backward whose launches are known. Arrays that are not returned are parts of one allocation of float32."""

    rows: int  # elements of delta, of shift, and of each column of the sums of dq
    spans: int  # elements of all of these
    memory: int  # elements of the spans of stripes too, and of a counter at the end; both are int32. 0: one kernel
    learned: tuple[int, ...]  # the captured tensors that receive a gradient
    captured: tuple[None, ...]  # None for each tensor that score_mod captures
    results: tuple[Sizes | None, Sizes | None, Sizes | None]  # of dq, dk and dv; None if no kernel writes it
    grid: TiledGrid | None  # the order of the rows of delta, None if it is that of the query
    needs: Needs
    kernels: KnownKernels

    @staticmethod
    def of(problem: Problem, recorded: LaunchLog, arrays: Iterable[str], needs: Needs) -> KnownBackward:
        """Return the backward that was recorded, with these arrays."""
        learned = _learned(problem)
        sums = [] if problem.score is None else [capture_sum_name(problem.score.graph, i, "grad") for i in learned]
        names = (*_BACKWARD, *sums)
        kernels = KnownKernels.of(recorded.launches, names, problem)
        q, k, v = problem.query, problem.key, problem.value
        columns = 32 * pieces_of(q.size(-1)) if "dq_sum_ptr" in arrays else 0
        captured = (None,) * len(_captures(problem))
        written = (q, needs[0]), (k, needs[1] or needs[2]), (v, needs[1] or needs[2])
        of_q, of_k, of_v = [(tuple(x.shape), dense_strides(x.shape, x.stride())) if w else None for x, w in written]
        rows = _padded_rows(q) if "delta_ptr" in arrays else 0
        spans = rows * (2 + columns)
        memory = spans + (_spans(rows) if "spans_ptr" in arrays else 0) + 1 if rows else 0
        results = of_q, of_k, of_v
        return KnownBackward(rows, spans, memory, learned, captured, results, _grid(problem), needs, kernels)

    def for_rows(self) -> KnownBackward:
        """Return the same backward for tensors [rows, H, D]."""
        of_q, of_k, of_v = (None if sizes is None else rows_of(sizes) for sizes in self.results)
        return replace(self, results=(of_q, of_k, of_v))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], parts: Iterable[Pointer],
        out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
    ) -> tuple[Gradients, Tensor]:  # fmt: skip
        """Compute the gradients except that of a sink. Return them, and memory that begins with delta [rows]."""
        kernels = self.kernels
        empty, pointer, device = kernels.empty, kernels.pointer, -1
        if kernels.on_gpu:
            device = query.get_device()
            if device != build.current_device():
                with torch.cuda.device(device):
                    return self(query, key, value, captures, parts, out, lse, d_out, d_lse)
        of_q, of_k, of_v = self.results
        dtype = query.dtype
        dq = dk = dv = dlse = lse  # in the place of tensors that no kernel reads or writes
        if d_lse is not None:
            dlse = d_lse.float().contiguous()
        if of_q is not None:
            dq = empty(*of_q, dtype)
        if of_k is not None and of_v is not None:
            dk, dv = empty(*of_k, dtype), empty(*of_v, dtype)
        memory, rows = empty((self.memory,), (1,), torch.float32) if self.memory else lse, self.rows
        sums: list[Tensor] = []
        if self.learned:
            sums = [torch.zeros(captures[i].shape, dtype=torch.float32, device=lse.device) for i in self.learned]
        pointers = [*map(pointer, (query, key, value, out, d_out, dq, dk, dv, lse, dlse, memory))]
        pointers += _parts_of(memory, (rows, 2 * rows, self.spans, self.memory - 1 if rows else 0), pointers[-1])
        if sums:
            pointers += map(pointer, sums)
        pointers += parts
        kernels.run(pointers, device)
        need_q, need_k, need_v, _ = self.needs
        captured = self._captured(captures, sums) if sums else self.captured
        return (dq if need_q else None, dk if need_k else None, dv if need_v else None, captured, None), memory

    def _captured(self, captures: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = list(self.captured)
        for i, gradient in zip(self.learned, sums, strict=True):
            found[i] = gradient.to(captures[i].dtype)
        return tuple(found)


_forwards: OrderedDict[tuple[object, ...], KnownForward] = OrderedDict()
_backwards: OrderedDict[tuple[object, ...], KnownBackward] = OrderedDict()
CACHES.extend((_forwards, _backwards))


def forward(problem: Problem, run: Run | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out [B, Hq, M, Dv], lse [B, Hq, M] and, if requested, the largest score of each row [B, Hq, M]."""
    problem = _with_rows(problem)
    if run is not None:
        return _forward(problem, run)[0]
    key = known_key(FORWARD, problem, {"q": problem.query, "k": problem.key, "v": problem.value}, (), ())
    known = _forwards.get(key)
    if known is not None:
        return known(problem.query, problem.key, problem.value, known.kernels.pointers(problem))
    recorded = LaunchLog(compile_backward_of=problem)
    found, arrays = _forward(forward_in_best_order(problem, target_of(problem.query.device)), recorded)
    lasts = not recorded.redoes or is_counted(problem.query.device)  # False in a capture before any other call
    if lasts and not option(problem.options, "PROFILE"):
        remember(_forwards, key, KnownForward.of(problem, recorded, found[0], arrays))
    return found


def known_forward(problem: Problem) -> KnownForward | None:
    """Return the cached forward, or None if there is none or if a tensor must be copied first."""
    if _with_rows(problem) is not problem:
        return None
    return _forwards.get(
        known_key(FORWARD, problem, {"q": problem.query, "k": problem.key, "v": problem.value}, (), ())
    )


def _forward(problem: Problem, run: Run) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensors]:
    """Return the results, and the arrays that kernels wrote besides them."""
    q, v = problem.query, problem.value
    out = empty_in_order(q, v.size(-1))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arrays = {"lse_ptr": lse}
    for wanted, outputs in _FORWARD_OUTPUTS:
        if wanted(problem, arrays):
            arrays |= outputs(problem)
    seen = KernelProblems.of(problem).seen_by(FORWARD)
    tensors = {"q": q, "k": problem.key, "v": v, "o": out}
    kernels = forward_kernels(problem)
    if kernels == SPLIT:
        arrays |= _split_arrays(problem)
    for spec in kernels:
        run(spec, seen, {name: tensors[name] for name in spec.tensors}, arrays)
    return (out, lse, arrays.get("max_ptr")), arrays


def _split_arrays(problem: Problem) -> dict[str, Tensor]:
    """Return the arrays for the results of splits and their lse, as parts of one allocation."""
    rows, splits, Dv = problem.query.shape[:3].numel(), splits_of(problem), problem.value.size(3)
    memory = problem.query.new_empty(rows * splits * (Dv + 1), dtype=torch.float32)
    part, part_lse = memory.split_with_sizes((rows * splits * Dv, rows * splits))
    return {"part_ptr": part, "part_lse_ptr": part_lse}


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs,
    run: Run | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of query, key, value, captured tensors and the sink; None if not needed."""
    problem, d_out = _with_rows(problem), _rows(d_out, problem.batch_invariant)
    out = _rows(out, False)  # that of scaled_dot_product_attention has the strides of query
    if run is not None:
        return _backward(problem, _of_backward(problem, out, d_out, needs), lse, d_lse, needs, run)[0]
    key = _backward_key(problem, out, d_out, d_lse is not None, needs)
    known = _backwards.get(key)
    if known is not None:
        q, k, v, captures = problem.query, problem.key, problem.value, _captures(problem)
        parts = known.kernels.pointers(problem)
        (dq, dk, dv, captured, _), memory = known(q, k, v, captures, parts, out, lse, d_out, d_lse)
        return dq, dk, dv, captured, _sink_gradient(problem, lse, memory[: known.rows], needs, known.grid)
    recorded, tensors = LaunchLog(), _of_backward(problem, out, d_out, needs)
    in_order = backward_in_best_order(problem, tensors, target_of(problem.query.device))
    found, arrays = _backward(in_order, tensors, lse, d_lse, needs, recorded)
    if not sums_integers(problem):
        remember(_backwards, key, KnownBackward.of(in_order, recorded, arrays, needs))
    return found


def known_backward(problem: Problem, out: Tensor, d_out: Tensor, has_d_lse: bool, needs: Needs) -> KnownBackward | None:
    """Return the cached backward, or None if there is none or if a tensor must be copied first."""
    if _with_rows(problem) is not problem or _rows(d_out, problem.batch_invariant) is not d_out:
        return None
    if _rows(out, False) is not out:
        return None
    return _backwards.get(_backward_key(problem, out, d_out, has_d_lse, needs))


def _backward_key(problem: Problem, out: Tensor, d_out: Tensor, has_d_lse: bool, needs: Needs) -> tuple[object, ...]:
    tensors = {"q": problem.query, "k": problem.key, "v": problem.value, "o": out, "do": d_out}
    return known_key(DELTA, problem, tensors, ("dlse_ptr",) if has_d_lse else (), needs)


def _of_backward(problem: Problem, out: Tensor, d_out: Tensor, needs: Needs) -> dict[str, Tensor]:
    """Return the tensors that the kernels of a backward read, and new ones that they write."""
    q, k, v = problem.query, problem.key, problem.value
    tensors = {"q": q, "k": k, "v": v, "o": out, "do": d_out}
    if needs[0]:
        tensors["dq"] = empty_in_order(q, q.size(-1))
    if needs[1] or needs[2]:
        tensors |= {"dk": empty_in_order(k, k.size(-1)), "dv": empty_in_order(v, v.size(-1))}
    return tensors


def _backward(
    problem: Problem, tensors: Tensors, lse: Tensor, d_lse: Tensor | None, needs: Needs, run: Run
) -> tuple[Gradients, Iterable[str]]:
    """Return the gradients, and the names of the arrays of the last kernels. `tensors` are those of `_of_backward`."""
    q, d_out = problem.query, tensors["do"]
    problems = KernelProblems.of(problem)
    rows = {"lse_ptr": lse} if d_lse is None else {"lse_ptr": lse, "dlse_ptr": d_lse.float().contiguous()}

    def step(spec: KernelSpec, given: Tensors) -> None:
        run(spec, problems.seen_by(spec), {name: tensors[name] for name in spec.tensors}, given)

    kernels, prepared = scheduled_backward(problems, tensors)
    dq, dk, dv = (tensors.get(name) if need else None for name, need in zip(("dq", "dk", "dv"), needs, strict=False))
    if kernels == (SMALL,):
        step(SMALL, rows)
        return (dq, dk, dv, (None,) * len(_captures(problem)), None), ()
    count = _padded_rows(q)
    delta, shift = (q.new_empty(count, dtype=torch.float32) for _ in range(2))
    arrays = {"delta_ptr": delta, "shift_ptr": shift}
    if "spans_ptr" in prepared:
        arrays["spans_ptr"] = q.new_empty(_spans(count), dtype=torch.int32)
    if "dq_sum_ptr" in prepared:
        arrays["dq_sum_ptr"] = q.new_empty((count * pieces_of(q.size(-1)), 32), dtype=torch.float32)
    if COUNTER in prepared:
        arrays[COUNTER] = q.new_empty(1, dtype=torch.int32)
    step(DELTA, rows | arrays)
    sums = CaptureSums.of(problem, sums_integers(problem))
    # Integer sums need a bound of what they add: measured by SIZES, or known from d_out and value.
    if SIZES in kernels:
        step(SIZES, arrays | _capture_arrays(problem, sums, size=sums.sizes))
    largest = _largest_of_rows(problem, lse, d_out, delta) if sums.sizes and SIZES not in kernels else None
    scales = sums.scales(problem, largest)
    arrays |= _capture_arrays(problem, sums, grad=sums.buffers.values(), scale=scales, lost=sums.lost)
    for spec in kernels:
        if spec not in (DELTA, SIZES):
            step(spec, arrays)
    of_sink = _sink_gradient(problem, lse, delta, needs, _grid(problem))
    return (dq, dk, dv, sums.gradients(problem, scales), of_sink), arrays


def _padded_rows(query: Tensor) -> int:
    """Return the elements of an array of rows that kernels read without a mask."""
    return query.size(0) * query.size(1) * padded(query.size(2))


def _spans(rows: int) -> int:
    """Return the elements of the spans of an array of rows: two for each 64 rows."""
    return rows // 32


def _captures(problem: Problem) -> tuple[Tensor, ...]:
    return () if problem.score is None else problem.score.captures


def _learned(problem: Problem) -> tuple[int, ...]:
    """Return the positions of the captured tensors that receive a gradient."""
    return () if problem.score_grad is None else scatter_captures(problem.score_grad)


def _grid(problem: Problem) -> TiledGrid | None:
    """Return the order of the rows of delta and shift, None if it is that of the query."""
    return problem.tiles.grid if problem.in_tiles else None


def _sink_gradient(
    problem: Problem, lse: Tensor, delta: Tensor, needs: Needs, grid: TiledGrid | None
) -> Tensor | None:  # fmt: skip
    """`grid`: the order of the rows of `delta`."""
    if problem.sink is None or not needs[3]:
        return None
    B, Hq, M, _ = problem.query.shape
    rows = delta.view(B, Hq, -1)[..., :M]
    return sink_gradient(problem.sink.detach(), lse, rows if grid is None else grid.restore(rows, 2))


def plans(problem: Problem, target: Target) -> tuple[tuple[KernelPlan, str | None], ...]:
    """Return the plans that explain shows, each with the reason why it is not a Hopper kernel."""
    problem = _with_rows(problem)
    q, k, v = problem.query, problem.key, problem.value
    out = empty_in_order(q, v.size(-1))
    tensors = with_expected_gradients(problem, {"q": q, "k": k, "v": v, "o": out})
    steps = [(spec, forward_in_best_order(problem, target)) for spec in forward_kernels(problem)]
    if problem.layout is None or not (problem.is_paged or problem.layout.is_quantized):
        in_order = backward_in_best_order(problem, tensors, target)
        kernels = backward_kernels(KernelProblems.of(in_order), tensors, target)
        steps += [(spec, in_order) for spec in kernels]
    arrays = dict.fromkeys(prepared_arrays(tuple(spec for spec, _ in steps), target), out)
    return tuple(
        plan_best_form(
            spec, KernelProblems.of(seen).seen_by(spec), target, {name: tensors[name] for name in spec.tensors}, arrays
        )
        for spec, seen in steps
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
    whole = (tensor.stride(-1) == 1 or tensor.size(-1) == 1) and not tensor.is_neg()
    aligns = tensor.size(-1) * tensor.element_size() % 16 == 0
    if whole and (not alike or (is_aligned(tensor) == aligns and (has_descriptor(tensor) or not aligns))):
        return tensor
    fallback("copied tensor", "the stride of its last dim is not 1, or its rows are not aligned as in other batches")
    return tensor.clone(memory_format=torch.contiguous_format)


def _with_rows(problem: Problem) -> Problem:
    """Return the problem with contiguous rows."""
    q, k, v, alike = problem.query, problem.key, problem.value, problem.batch_invariant
    rows = _rows(q, alike), _rows(k, alike), _rows(v, alike)
    if rows[0] is q and rows[1] is k and rows[2] is v:
        return problem
    return replace(problem, query=rows[0], key=rows[1], value=rows[2])
