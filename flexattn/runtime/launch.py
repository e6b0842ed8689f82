"""launch: run one kernel of a problem on its tensors.

Everything of a launch but the addresses follows from shapes, strides, alignment, mods and numbers. It is worked out
once for each such signature and remembered, so that a repeated call plans nothing and only fills in addresses.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.call.problem import Problem
from flexattn.compile.capture_sums import has_known_bounds, sums_integers
from flexattn.compile.hopper import hopper_backward, hopper_dkdv, hopper_dq, hopper_forward
from flexattn.compile.kernel_plan import BATCH_CAPTURES, CAPTURES, FUSED, PAIR, SCATTERS, SIZES, TRANSPOSED, KernelPlan
from flexattn.compile.lower import ModPlan, layout_unit
from flexattn.compile.plan import heads_per_group, plan_kernel
from flexattn.compile.render import KernelSource, described, render, stream_descriptors
from flexattn.compile.scatter import same_in_all_batches, scatter_captures, without_sites
from flexattn.compile.shared_memory import fit, smaller_tiles
from flexattn.compile.tiles import Tile
from flexattn.errors import CompileError, UnsupportedError, message
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import with_runs
from flexattn.machine.target import Target, l2_bytes, processors, target_of
from flexattn.options import LARGEST_TILE, option
from flexattn.runtime.build import Kernel, OutOfResources, build

LOG2E = math.log2(math.e)
PADDING = LARGEST_TILE  # rows after the last query that backward kernels may read
_REMEMBERED = 4096

Tensors = Mapping[str, Tensor]  # by the names that templates give them: q, k, v, o, do, dq, dk, dv
# Those that a kernel reads and writes.
TENSORS: dict[str, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "o"),
    "backward_delta": ("o", "do"),
    "backward_dq": ("q", "k", "v", "do", "dq"),
    "backward_dkdv": ("q", "k", "v", "do", "dk", "dv"),
    "hopper_backward": ("q", "k", "v", "do", "dk", "dv"),
    "backward_dq_rows": ("dq",),
    **dict.fromkeys((CAPTURES, SIZES, BATCH_CAPTURES), ("q", "k", "v", "do")),
}
Values = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A kernel with all arguments but its tensors: `fillers` put those in, each at its position."""

    kernel: Kernel
    programs: int
    arguments: tuple[Any, ...]
    fillers: tuple[tuple[int, Callable[[Tensors], Any]], ...]

    def __call__(self, tensors: Tensors, device: torch.device) -> None:
        if not self.programs:
            return
        arguments = list(self.arguments)
        for position, fill in self.fillers:
            arguments[position] = fill(tensors)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.kernel.launch(self.programs, tuple(arguments))
        else:
            self.kernel.launch(self.programs, tuple(arguments))


_launches: OrderedDict[tuple[object, ...], Launch] = OrderedDict()


def run(kernel: str, problem: Problem, tensors: Tensors, arrays: Tensors) -> None:
    """Run the kernel `kernel` (one of TENSORS).

    `tensors` are [B, H, rows, D] with any strides but 1 for the last; `arrays` are contiguous and known by address
    alone (lse_ptr, ...), those of the mask and the mods are found in the problem.
    """
    problem = _for_kernel(kernel, problem)
    key = _signature(kernel, problem, tensors, arrays)
    launch = _launches.get(key)
    if launch is None:
        launch = _prepare(kernel, problem, tensors, arrays)
        _launches[key] = launch
        if len(_launches) > _REMEMBERED:
            _launches.popitem(last=False)
    launch({**tensors, **arrays, **_arrays_of(kernel, problem)}, problem.query.device)


def _signature(kernel: str, problem: Problem, tensors: Tensors, arrays: Tensors) -> tuple[object, ...]:
    """Return all that the plan and the plain arguments of a launch depend on, cheaply."""
    mask, q, k = problem.block_mask, problem.query, problem.key
    return (
        kernel, q.dtype, q.device, q.shape, k.shape, problem.value.shape, problem.scale, problem.options,
        problem.max_scores, tuple(arrays), torch.backends.cuda.matmul.allow_tf32, problem.score_grad,
        None if problem.sink is None else (problem.sink.shape, problem.sink.stride()),
        None if problem.dropout is None else problem.dropout.drop_below,
        torch.are_deterministic_algorithms_enabled(),
        None if mask is None else (mask.B, mask.H, mask.BLOCK_SIZE, mask.full_overhangs),
        *((t.stride(), t.data_ptr() & 15) for t in tensors.values()),
        *_mod_signature(problem.score), *_mod_signature(problem.mask),
    )  # fmt: skip


def _mod_signature(mod: BoundMod | None) -> tuple[object, ...]:
    if mod is None:
        return (None,)
    return (mod.graph, mod.numbers, *((t.shape, t.stride(), t.data_ptr() & 15) for t in mod.captures))


def _prepare(kernel: str, problem: Problem, tensors: Tensors, arrays: Tensors) -> Launch:
    target = target_of(problem.query.device)
    wanted, _ = plan_launch(kernel, problem, target, list(tensors.values()), "dlse_ptr" in arrays)
    return _launch_of(wanted, problem, tensors)


def _launch_of(wanted: KernelPlan, problem: Problem, tensors: Tensors) -> Launch:
    plan, source, built = built_kernel(wanted)
    values: Values = _plain_values(plan, problem)
    for name, tensor in tensors.items():
        values |= _strides(plan, name, tensor)
    for mod, bound in ((plan.score, problem.score), (plan.mask, problem.mask)):
        if mod is not None and bound is not None:
            values |= _mod_values(mod, bound)
    if plan.sums and plan.grad is not None and problem.score is not None:
        values |= _buffer_strides(plan.grad, problem.score)
    descriptors = dict(stream_descriptors(plan))
    arguments: list[Any] = []
    fillers: list[tuple[int, Callable[[Tensors], Any]]] = []
    for position, (name, _) in enumerate(source.signature):
        if name in descriptors:
            fillers.append((position, _descriptor(described(name, descriptors[name]), descriptors[name])))
        elif name == "counter_ptr":
            fillers.append((position, _counter(values["tiles"] > processors(problem.query.device))))
        elif name.endswith("_ptr"):
            fillers.append((position, _array(name if name not in _TENSOR_POINTERS else name.removesuffix("_ptr"))))
        arguments.append(values.get(name))
    return Launch(built, _programs(plan, values, problem.query.device), tuple(arguments), tuple(fillers))


def runner(plan: KernelPlan, problem: Problem, tensors: Tensors, arrays: Tensors) -> Callable[[], None]:
    """Return what runs the kernel of any plan for these tensors, named as for `run`, again and again."""
    problem = _for_kernel(plan.kernel, problem)
    launch = _launch_of(plan, problem, tensors)
    everything = {**tensors, **arrays, **_arrays_of(plan.kernel, problem)}
    return lambda: launch(everything, problem.query.device)


def forget_launches() -> None:
    """Let every kernel be planned anew, as when there is another tile for it."""
    _launches.clear()


def plan_with_tile(
    kernel: str, problem: Problem, target: Target, tensors: list[Tensor], tile: Tile
) -> KernelPlan | None:
    """Plan a kernel of the Triton engine with this tile; None where it cannot have it."""
    plan = plan_kernel(kernel, _for_kernel(kernel, problem), target, tensors, False, tile)
    return plan if plan.tile == tile else None


# What may stand for a kernel of the Triton engine.
_HOPPER_FORMS = {
    "forward": hopper_forward, **dict.fromkeys(SCATTERS, hopper_dq), "backward_dkdv": hopper_dkdv,
}  # fmt: skip


def plan_launch(
    kernel: str, problem: Problem, target: Target, tensors: list[Tensor], has_dlse: bool = False
) -> tuple[KernelPlan, str | None]:
    """Plan one kernel for the engine that serves it best; return also why it is not Hopper's, None where it is."""
    problem = _for_kernel(kernel, problem)  # as it is where that was done
    if kernel == "hopper_backward":
        fused = _plan_fused(problem, target, tensors)
        assert isinstance(fused, KernelPlan), fused
        return fused, None
    plan = plan_kernel(kernel, problem, target, tensors, has_dlse)
    if kernel not in _HOPPER_FORMS:
        return plan, None
    return _unless_forced(problem, plan, _HOPPER_FORMS[kernel](plan, problem, tensors))


def _plan_fused(problem: Problem, target: Target, tensors: list[Tensor]) -> KernelPlan | str:
    problem = _for_kernel("hopper_backward", problem)
    return hopper_backward(plan_kernel("backward_dkdv", problem, target, tensors, False), problem, tensors)


def _for_kernel(kernel: str, problem: Problem) -> Problem:
    """Return the problem as a kernel sees it.

    Its mask asks for runs, where these are known, of what the kernel's rows are; gradients of captured tensors that
    have a kernel of their own are not those of others.
    """
    if kernel not in (BATCH_CAPTURES, SIZES) and sums_over_batch(problem):
        assert problem.score_grad is not None
        problem = replace(problem, score_grad=without_sites(problem.score_grad))
    if not problem.runs or problem.mask is None:
        return problem
    return replace(problem, mask=with_runs(problem.mask, problem.runs, kernel in TRANSPOSED), runs=())


_backwards: dict[tuple[object, ...], tuple[str, ...]] = {}


def backward_kernels(problem: Problem, tensors: Tensors, target: Target | None = None) -> tuple[str, ...]:
    """Return the kernels that follow delta, in order: FUSED, or those of PAIR whose gradients are among `tensors`.

    Gradients of captured tensors come with dq, or have a kernel of their own, and before it one for their sizes where
    these must be known and nothing bounds them. The target is that of the query's device if none is given.
    """
    target = target or target_of(problem.query.device)
    key = (*_signature("backward", problem, tensors, tensors), target)
    if key not in _backwards:
        if len(_backwards) > _REMEMBERED:
            _backwards.clear()
        _backwards[key] = _choose_backward(problem, target, tensors)
    return _backwards[key]


def _choose_backward(problem: Problem, target: Target, tensors: Tensors) -> tuple[str, ...]:
    possible = tuple(kernel for kernel in PAIR if tensors.keys() >= set(TENSORS[kernel]))
    if problem.score_grad is not None and problem.score_grad.sites:
        measures = (SIZES,) if sums_integers(problem) and not has_known_bounds(problem) else ()
        if sums_over_batch(problem):
            others = replace(problem, score_grad=without_sites(problem.score_grad))
            return (*measures, BATCH_CAPTURES, *_choose_backward(others, target, tensors))
        return (*measures, *(() if "dq" in tensors else (CAPTURES,)), *possible)
    if possible != PAIR:
        return possible
    fused = _plan_fused(problem, target, [tensors[name] for name in TENSORS["hopper_backward"]])
    return FUSED if isinstance(fused, KernelPlan) else PAIR


def sums_over_batch(problem: Problem) -> bool:
    """Tell whether captured tensors receive all that they do at each place, in cells that no batch has for itself."""
    graph, mask = problem.score_grad, problem.block_mask
    if graph is None or not graph.sites or problem.query.size(0) == 1 or problem.dropout is not None:
        return False  # most calls, at each launch
    one_mask = mask is None or (mask.B == 1 and problem.mask is not None and not problem.mask.graph.reads("b"))
    return one_mask and same_in_all_batches(graph)


def _unless_forced(problem: Problem, plan: KernelPlan, hopper: KernelPlan | str) -> tuple[KernelPlan, str | None]:
    """Return Hopper's plan, or the other with the reason; raise where the user wants Hopper's alone."""
    if isinstance(hopper, KernelPlan):
        return hopper, None
    phase = "fwd" if plan.kernel == "forward" else "bwd"
    if option(problem.options, "BACKEND", phase) == "HOPPER":
        found = f"BACKEND='HOPPER', and {hopper}"
        raise UnsupportedError(message("kernel_options", found, "what it can compute", "Leave BACKEND out."))
    return plan, hopper


_TENSOR_POINTERS = {f"{name}_ptr" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv")}


def _counter(needed: bool) -> Callable[[Tensors], Any]:
    """Return what makes a zero for programs that share tiles; without it, any address serves, as it is not used.

    One for each launch: in a CUDA graph zeroing is a node too, and what runs beside it has a counter of its own.
    """
    if not needed:
        return lambda tensors: tensors["lse_ptr"]
    return lambda tensors: tensors["lse_ptr"].new_zeros(1, dtype=torch.int32)


def _array(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[name]


@lru_cache(1)
def _descriptor_kinds() -> tuple[type[Any], type[Any]]:
    """Return Triton's tensor descriptor without and with its checks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Checked(TensorDescriptor):
        def __post_init__(self) -> None: ...

    return Checked, TensorDescriptor


def _descriptor(name: str, tile: tuple[int, ...]) -> Callable[[Tensors], Any]:
    """Return what makes the tensor descriptor of a launch, checked by Triton the first time alone.

    Shape and strides are those of the launch. Triton's checks take 7 us of the host, nine times in a backward.
    """
    Checked, TensorDescriptor = _descriptor_kinds()
    known: list[tuple[list[int], list[int]]] = []

    def make(tensors: Tensors) -> Any:
        tensor = tensors[name]
        if known:
            return Checked(tensor, *known[0], list(tile))
        # The stride of a dim of one element means nothing to torch, but TMA wants a multiple of 16 bytes.
        step = -(-tensor.size(-1) * tensor.element_size() // 16) * 16 // tensor.element_size()
        strides = [s if n > 1 else step for n, s in zip(tensor.shape[:-1], tensor.stride(), strict=False)]
        made = TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], list(tile))
        known.append((made.shape, made.strides))
        return made

    return make


@lru_cache(1024)
def built_kernel(plan: KernelPlan) -> tuple[KernelPlan, KernelSource, Kernel]:
    """Build the plan's kernel; where the device refuses it for its resources, that of the next smaller tile."""
    problems: list[OutOfResources] = []
    for candidate in smaller_tiles(fit(plan)):
        source = render(candidate)
        kernel = build(source, candidate.target)
        try:
            if candidate.target.backend != "interpreter":
                kernel.load()
        except OutOfResources as error:
            problems.append(error)
            continue
        return candidate, source, kernel
    raise CompileError(f"no tile of {plan.name} fits: {problems[-1]}")


def _tiles(plan: KernelPlan, problem: Problem) -> int:
    """Return the tiles of one head that programs own."""
    rows = (problem.key if plan.transposed else problem.query).size(2)
    if plan.kernel == "backward_delta":
        return _padded(rows) // plan.tile.BLOCK_M
    return -(-rows // plan.outer[0]) * plan.tiles_per_block


def _programs(plan: KernelPlan, values: Values, device: torch.device) -> int:
    """Return how many programs run: one for each tile, or as many as there is room for, which share the tiles."""
    stay = plan.kernel == "hopper_forward"
    return min(values["tiles"], processors(device)) if stay else values["tiles"]


def _padded(rows: int) -> int:
    return -(-rows // PADDING) * PADDING + PADDING


def padded_rows(problem: Problem) -> int:
    """Return how many rows each head has in the arrays that backward kernels read without a guard."""
    return _padded(problem.query.size(2))


def _plain_values(plan: KernelPlan, problem: Problem) -> Values:
    """Return lengths, heads and scales."""
    q, k = problem.query, problem.key
    (B, Hq, M, D), (Bkv, Hkv, N, _), Dv = q.shape, k.shape, problem.value.size(3)
    transposed = plan.transposed
    heads = Bkv * Hkv if transposed else Hq if plan.kernel == BATCH_CAPTURES else B * Hq
    streamed = (M * (Hq // Hkv) if transposed else N) * (D + Dv) * q.element_size()
    scale = problem.scale
    # The forward's maximum needs a positive factor: the sign, or a scale of zero, is applied to q there.
    qk_scale = (abs(scale) * LOG2E or 1.0) if plan.kernel.endswith("forward") else scale * LOG2E
    values: Values = {
        "tiles": _tiles(plan, problem) * heads, "M": M, "N": N, "M_padded": _padded(M), "heads": heads, "B": B,
        "heads_q": Hq, "heads_kv": Hkv, "group_size": Hq // Hkv,
        "batch_repeats": B // max(1, Bkv), "batch_shares_keys": int(Bkv == 1),
        "heads_per_group": heads_per_group(streamed, l2_bytes(q.device), heads),
        "sm_scale": scale, "dq_scale": scale, "dk_scale": scale, "qk_scale": qk_scale,
        "q_sign": float((scale > 0) - (scale < 0)),
    }  # fmt: skip
    if problem.sink is not None:
        (of_batch, of_head), (batches, heads) = problem.sink.stride(), problem.sink.shape
        values |= {"stride_sink_b": of_batch if batches > 1 else 0, "stride_sink_h": of_head if heads > 1 else 0}
    if problem.dropout is not None:
        values |= {"drop_below": problem.dropout.drop_below, "keep_scale": problem.dropout.keep_scale}
    mask = problem.block_mask
    if mask is not None:
        blocks = -(-(N if transposed else M) // mask.BLOCK_SIZE[transposed])
        values["stride_mask_h"] = blocks if mask.H > 1 else 0
        values["stride_mask_b"] = blocks * mask.H if mask.B > 1 else 0
    return values


def _strides(plan: KernelPlan, name: str, tensor: Tensor) -> Values:
    """Return the strides of a tensor [B, H, rows, D] in the plan's unit."""
    batch, head, row, _ = tensor.stride()
    if tensor.size(0) == 1:
        batch = 0  # keys that the batch shares
    rows = "n" if name in ("k", "v", "dk", "dv") else "m"
    unit = plan.unit
    return {f"stride_{name}b": batch // unit, f"stride_{name}h": head // unit, f"stride_{name}{rows}": row // unit}


def _mod_values(mod: ModPlan, bound: BoundMod) -> Values:
    values: Values = {}
    for i, (tensor, layout) in enumerate(zip(bound.captures, mod.layouts, strict=True)):
        name = mod.capture_name(i)
        unit = layout_unit(tensor.dtype) if layout.aligned else 1
        for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            values[f"{name}_size{d}"] = size
            values[f"{name}_stride{d}"] = stride // unit
    for i, number in enumerate(bound.numbers):
        values[mod.number_name(i)] = number
    return values


def _buffer_strides(mod: ModPlan, bound: BoundMod) -> Values:
    values: Values = {}
    for i in scatter_captures(mod.graph):
        stride = 1
        for d in reversed(range(bound.captures[i].ndim)):
            values[f"{mod.capture_name(i)}_grad_stride{d}"] = stride
            stride *= bound.captures[i].size(d)
    return values


def _arrays_of(kernel: str, problem: Problem) -> dict[str, Tensor]:
    """Return the arrays of the mask and the mods by the names of their arguments."""
    found: dict[str, Tensor] = {}
    if kernel in ("backward_delta", "backward_dq_rows"):
        return found
    if problem.dropout is not None:
        found["seed_ptr"] = problem.dropout.seed
    mask = problem.block_mask
    if mask is not None:
        side, lists = ("q", mask.q_runs) if kernel in TRANSPOSED else ("kv", mask.kv_runs)
        assert lists is not None
        found |= {
            f"{side}_partial_ptr": lists.partial.row_ptr, f"{side}_partial_runs_ptr": lists.partial.runs,
            f"{side}_full_ptr": lists.full.row_ptr, f"{side}_full_runs_ptr": lists.full.runs,
            f"{side}_order_ptr": lists.order,
        }  # fmt: skip
    for bound, role in ((problem.score, "score"), (problem.mask, "mask")):
        if bound is not None:
            names = _capture_names(bound.graph, role)
            found.update((name, tensor.detach()) for name, tensor in zip(names, bound.captures, strict=True))
    return found


@lru_cache(1024)
def _capture_names(graph: Any, role: str) -> tuple[str, ...]:
    mod = ModPlan(graph, role, (), ())
    return tuple(f"{mod.capture_name(i)}_ptr" for i in range(len(graph.captures)))


def capture_argument(problem: Problem, capture: int, argument: str) -> str:
    """Return the name of an argument (grad, scale, lost, size) of a captured tensor of the score_mod."""
    assert problem.score is not None
    return f"{_capture_names(problem.score.graph, 'score')[capture].removesuffix('_ptr')}_{argument}_ptr"
