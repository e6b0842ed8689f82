"""schedule: which kernels a forward and a backward run, in which order, and whether as portable or Hopper kernels."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexattn.call.memory_order import empty_in_order
from flexattn.call.problem import Problem
from flexattn.compile.arguments import NO_ARRAYS, Tensors
from flexattn.compile.capture_sums import has_known_bounds, sums_integers
from flexattn.compile.hopper import DKDV_TILES, FORMS, fused_backward, hopper_form
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import (
    BATCH_CAPTURES,
    CAPTURES,
    DELTA,
    DKDV,
    DQ_ROWS,
    FORWARD,
    FUSED,
    FUSED_STRIPES,
    HALVES,
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_STRIPES,
    HOPPER_BACKWARD_WIDE,
    PAIR,
    SIZES,
    SMALL,
    SPLIT,
)
from flexattn.compile.plan import plan_kernel
from flexattn.compile.scalars import pays_to_split
from flexattn.compile.scatter import same_in_all_batches, without_sites
from flexattn.compile.small_backward import is_small
from flexattn.compile.tiles import Tile
from flexattn.errors import UnsupportedError, message
from flexattn.graph.equal_runs import with_runs
from flexattn.machine.target import Target
from flexattn.options import option
from flexattn.process.frozen_class import frozen


@frozen
class KernelProblems:
    """One problem, in a variant for each group of kernels.

    If runs of equal elements are known, mask_mod reads them for the axis that programs own. Gradients of captured
    tensors that are summed over the batch are computed by separate kernels.
    """

    owns_queries: Problem
    owns_keys: Problem
    capture_gradients: Problem  # `owns_queries` itself if the batch is not summed

    @staticmethod
    def of(problem: Problem) -> KernelProblems:
        """Return the variants of a problem."""
        if not problem.equal_runs and problem.score_grad is None:
            return KernelProblems(problem, problem, problem)  # most forwards
        by_query, by_key = (_with_runs(problem, by_key) for by_key in (False, True))
        if not sums_over_batch(problem):
            return KernelProblems(by_query, by_key, by_query)
        return KernelProblems(_without_capture_gradients(by_query), _without_capture_gradients(by_key), by_query)

    def seen_by(self, spec: KernelSpec) -> Problem:
        """Return the variant for a kernel."""
        if spec.only_captures:
            return self.capture_gradients
        return self.owns_keys if spec.owns_keys else self.owns_queries


def _with_runs(problem: Problem, by_key: bool) -> Problem:
    if not problem.equal_runs or problem.mask is None:
        return problem
    return replace(problem, mask=with_runs(problem.mask, problem.equal_runs, by_key), equal_runs=())


def _without_capture_gradients(problem: Problem) -> Problem:
    assert problem.score_grad is not None
    return replace(problem, score_grad=without_sites(problem.score_grad))


def sums_over_batch(problem: Problem) -> bool:
    """Whether captured tensors receive a gradient per (q, kv) pair, in elements that all batches share."""
    graph, blocks = problem.score_grad, problem.block_mask
    if graph is None or not graph.sites or problem.query.size(0) == 1 or problem.dropout is not None:
        return False  # the common case, checked in each forward and backward
    if problem.layout is not None:  # sequences differ in length and position
        return False
    one_mask = blocks is None or (blocks.B == 1 and problem.mask is not None and not problem.mask.graph.reads("b"))
    return one_mask and same_in_all_batches(graph)


LONGEST_SPLIT = 128  # queries


def forward_kernels(problem: Problem) -> tuple[KernelSpec, ...]:
    """Return the kernels of the forward, in order: SPLIT for short queries, else FORWARD.

    Raises UnsupportedError if BACKEND is "TRITON_DECODE" and the call cannot be split.
    """
    reason = _refusal_of_split(problem)
    if option(problem.options, "BACKEND", "fwd") == "TRITON_DECODE":
        if reason is not None:
            found = f"BACKEND='TRITON_DECODE' with {reason}"
            fix = "Leave BACKEND out."
            raise UnsupportedError(message("kernel_options", found, "a call that can split its keys", fix))
        return SPLIT
    automatic = (option(problem.options, "BACKEND", "fwd") or "AUTO") == "AUTO"
    forced = option(problem.options, "FORCE_USE_FLEX_ATTENTION", "fwd") is True
    return SPLIT if automatic and not forced and reason is None and pays_to_split(problem) else (FORWARD,)


def _refusal_of_split(problem: Problem) -> str | None:
    """Return why the keys of a call cannot be split; None if they can."""
    (_, Hq, M, _), Hkv, blocks = problem.query.shape, problem.key.shape[1], problem.block_mask
    if M > LONGEST_SPLIT:
        return f"{M} queries, more than {LONGEST_SPLIT}"
    if problem.batch_invariant or problem.max_scores or problem.dropout is not None:
        return "BATCH_INVARIANT, max_scores or dropout"
    if option(problem.options, "PROFILE") is True:
        return "PROFILE"
    if blocks is not None and blocks.H > 1 and Hq != Hkv:
        return "a mask by head and heads that share keys"
    return None


def backward_kernels(problems: KernelProblems, tensors: Tensors, target: Target) -> tuple[KernelSpec, ...]:
    """Return the kernels of a backward, in order: SMALL, or DELTA and then FUSED or FUSED_STRIPES, or the kernels of
    PAIR whose outputs are in `tensors`.

    Gradients of captured tensors are computed by DQ or by a separate kernel. SIZES runs first if they are summed as
    integers and have no known bound.
    """
    possible = tuple(spec for spec in PAIR if tensors.keys() >= set(spec.tensors))
    captures = problems.capture_gradients
    if captures.score_grad is not None and captures.score_grad.sites:
        sizes = (SIZES,) if sums_integers(captures) and not has_known_bounds(captures) else ()
        if captures is not problems.owns_queries:  # summed over the batch, by a kernel of its own
            return (DELTA, *sizes, BATCH_CAPTURES, *_fused_or_pair(problems, possible, tensors, target))
        return (DELTA, *sizes, *(() if "dq" in tensors else (CAPTURES,)), *possible)
    if possible == PAIR and is_small(problems.owns_keys, tensors, target):
        return (SMALL,)
    return (DELTA, *_fused_or_pair(problems, possible, tensors, target))


def prepared_arrays(kernels: tuple[KernelSpec, ...], target: Target) -> tuple[str, ...]:
    """Return the arrays that DELTA prepares for later kernels.

    It sets the sums of dq and the count of claimed tiles to zero, and stores the spans of stripes. A launch takes more
    host time than they take on the device.
    """
    return (
        *(("dq_sum_ptr",) if DQ_ROWS in kernels else ()),
        *(("spans_ptr",) if HOPPER_BACKWARD_STRIPES in kernels else ()),
        *(("counter_ptr",) if DELTA in kernels and target.is_hopper else ()),
    )


def _fused_or_pair(
    problems: KernelProblems, possible: tuple[KernelSpec, ...], tensors: Tensors, target: Target
) -> tuple[KernelSpec, ...]:
    if possible != PAIR:
        return possible
    fused = _plan_fused(problems.owns_keys, target, tensors)
    if not isinstance(fused, KernelPlan) or _pair_is_faster(fused, problems, tensors, target):
        return PAIR
    return FUSED_STRIPES if fused.spec is HOPPER_BACKWARD_STRIPES else FUSED


def _pair_is_faster(fused: KernelPlan, problems: KernelProblems, tensors: Tensors, target: Target) -> bool:
    """Return whether separate kernels for dq and for dk and dv are faster than the fused kernel.

    HOPPER_BACKWARD_WIDE is limited by its atomic adds to dq in L2 (docs/kernels.md). With softcap the pair is 2 %
    slower.
    """
    if fused.spec is not HOPPER_BACKWARD_WIDE or fused.widths not in DKDV_TILES:
        return False
    forms = (_form_of(spec, problems.seen_by(spec), tensors, target) for spec in PAIR)
    return all(isinstance(form, KernelPlan) for form in forms)


def _form_of(spec: KernelSpec, problem: Problem, tensors: Tensors, target: Target) -> KernelPlan | str:
    """Return the Hopper form of a kernel, or the reason why it has none."""
    tensors = {name: tensors[name] for name in spec.tensors}
    return hopper_form(plan_kernel(spec, problem, target, tensors), problem, tensors)


def plan_best_form(
    spec: KernelSpec, problem: Problem, target: Target, tensors: Tensors, arrays: Tensors = NO_ARRAYS
) -> tuple[KernelPlan, str | None]:
    """Plan one kernel, as a Hopper kernel if possible. Also return the reason if not.

    The reason is None for a Hopper kernel, and for kernels that have no Hopper form.
    The plan of a Hopper kernel has another spec than `spec`. `problem` is the kernel's variant
    (`KernelProblems.seen_by`). Raises UnsupportedError if BACKEND is "HOPPER" and no Hopper kernel can compute it.
    """
    if spec in (HOPPER_BACKWARD, HOPPER_BACKWARD_STRIPES):
        fused = _plan_fused(problem, target, tensors)
        assert isinstance(fused, KernelPlan), fused
        return fused, None
    plan = plan_kernel(spec, problem, target, tensors, arrays)
    if spec not in FORMS or (FORMS[spec].others_are_portable and (plan.D, plan.Dv) not in FORMS[spec].tiles):
        return plan, None
    form = hopper_form(plan, problem, tensors)
    if isinstance(form, KernelPlan):
        return form, None
    if option(problem.options, "BACKEND", spec.phase) == "HOPPER":
        found = f"BACKEND='HOPPER', but {form}"
        raise UnsupportedError(message("kernel_options", found, "what Hopper kernels support", "Leave BACKEND out."))
    return plan, form


def wants_backward(problem: Problem) -> bool:
    """Whether query, key or value require a gradient, so that a backward is likely to follow a forward."""
    return problem.query.requires_grad or problem.key.requires_grad or problem.value.requires_grad


def with_expected_gradients(problem: Problem, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a forward and those of its backward.

    These include the required gradients, or all gradients if none is required. Gradients are assumed to be laid out
    like their tensors, and d_out like the output.
    """
    q, k, v = problem.query.requires_grad, problem.key.requires_grad, problem.value.requires_grad
    learns = problem.score_grad is not None and bool(problem.score_grad.sites)
    learns = learns or (problem.sink is not None and problem.sink.requires_grad)
    everything = not (q or k or v or learns)
    of_queries = {"dq": tensors["q"]} if q or everything else {}
    of_keys = {"dk": tensors["k"], "dv": tensors["v"]} if k or v or everything else {}
    return {**tensors, "do": tensors["o"], **of_queries, **of_keys}


def expected_backward(problem: Problem, tensors: Tensors, target: Target) -> tuple[KernelPlan, ...]:
    """Return the plans of a backward, given the tensors of the forward."""
    tensors = with_expected_gradients(problem, tensors)
    return _backward_plans(backward_in_best_order(problem, tensors, target), tensors, target)


def _backward_plans(problem: Problem, tensors: Tensors, target: Target) -> tuple[KernelPlan, ...]:
    """Return the plans of a backward, which reads and writes these tensors."""
    problems = KernelProblems.of(problem)
    kernels = backward_kernels(problems, tensors, target)
    arrays = dict.fromkeys(prepared_arrays(kernels, target), tensors["q"])
    return tuple(
        plan_best_form(spec, problems.seen_by(spec), target, {name: tensors[name] for name in spec.tensors}, arrays)[0]
        for spec in kernels
    )


def forward_in_best_order(problem: Problem, target: Target) -> Problem:
    """Return the problem in the order of tiles of a grid, if its mask has one and the forward's kernel reads it."""
    tiled = _in_tiles(problem)
    if tiled is None or forward_kernels(problem) != (FORWARD,):
        return problem
    q, k, v = problem.query, problem.key, problem.value
    tensors = {"q": q, "k": k, "v": v, "o": empty_in_order(q, v.size(-1))}
    return tiled if _is_faster(plan_best_form(FORWARD, tiled, target, tensors)[0], tiled) else problem


def backward_in_best_order(problem: Problem, tensors: Tensors, target: Target) -> Problem:
    """Return the same for a backward: all of its kernels must read that order."""
    tiled = _in_tiles(problem)
    if problem.score_grad is not None and problem.score_grad.sites:  # those of gradients of captured tensors do not
        return problem
    if tiled is None or not all(_is_faster(plan, tiled) for plan in _backward_plans(tiled, tensors, target)):
        return problem
    return tiled


def _is_faster(plan: KernelPlan, tiled: Problem) -> bool:
    """Return whether a kernel reads the order of tiles, and skips the halves of blocks that are empty in it.

    Tiles have fewer halves, but may have more blocks: 1.6 times as many for windows of 5 x 5 in a grid of 128 x 128.
    """
    skips = not plan.spec.products or HALVES.name in plan.features or not tiled.tiles.mask.skips_halves
    return plan.token_tile is not None and skips


def _in_tiles(problem: Problem) -> Problem | None:
    """Return the problem in the order of tiles, None if its mask has none or positions of pairs are needed.

    In that order, kernels know which pairs attend only from the bits of the mask.
    """
    blocks, score = problem.block_mask, problem.score
    tiles = None if blocks is None else blocks.in_tiles
    if tiles is None or problem.layout is not None or problem.dropout is not None or problem.batch_invariant:
        return None
    if score is not None and (score.graph.reads("q_idx") or score.graph.reads("kv_idx")):
        return None
    if not problem.query.size(2) == problem.key.size(2) == tiles.grid.tokens:
        return None
    return problem.with_fields(in_tiles=True, equal_runs=())


def plan_with_tile(
    spec: KernelSpec, problem: Problem, target: Target, tensors: Tensors, tile: Tile
) -> KernelPlan | None:
    """Plan a portable kernel with this tile. Return None if options or limits change the tile."""
    plan = plan_kernel(spec, problem, target, tensors, tile=tile)
    return plan if plan.tile == tile else None


def _plan_fused(problem: Problem, target: Target, tensors: Tensors) -> KernelPlan | str:
    tensors = {name: tensors[name] for name in DKDV.tensors}
    return fused_backward(plan_kernel(DKDV, problem, target, tensors), problem, tensors)
