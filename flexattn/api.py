"""flex_attention, explain and tune: the only module that knows the whole sequence of stages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask, from_torch
from flexattn.call.batch_invariant import in_one_class
from flexattn.call.dropout import check_dropout
from flexattn.call.problem import Problem
from flexattn.call.sinks import check_sink
from flexattn.call.validate import (
    DEVICES,
    DTYPES,
    check_block_mask,
    check_mask_reads,
    check_scale,
    check_tensors,
    place_captures,
)
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.plan import tile_origin
from flexattn.compile.render import render
from flexattn.engines import cpu, empty, gpu_float64, triton
from flexattn.engines.autograd import Engine, attention
from flexattn.errors import ArgumentError, DtypeError, MaskError, OptionError, UnsupportedError, message
from flexattn.explain import Explanation, target_named
from flexattn.graph.bound import bound as bounds_of
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.capture_axes import places_last
from flexattn.graph.differentiate import differentiate
from flexattn.graph.facts import analyze
from flexattn.graph.nodes import Const
from flexattn.graph.tables_by_distance import by_distance
from flexattn.machine.target import Target, target_of
from flexattn.machine.triton_versions import is_interpreting
from flexattn.mask_build.create import create_block_mask
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.launch_plan import sources
from flexattn.options import option, tile_options, validate_options
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.transforms import is_transforming
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace
from flexattn.tuning.report import Tuning
from flexattn.tuning.search import TUNED, Effort, tune_problem

Mod = Callable[..., object]


class AuxRequest(NamedTuple):
    """What flex_attention returns besides the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was requested; None where it was not."""

    lse: Tensor | None = None  # [B, Hq, M] float32 (float64 for float64), natural logarithm, differentiable
    max_scores: Tensor | None = None  # [B, Hq, M] float32, largest score of each row, not differentiable


@uncompiled
@undisturbed("flex_attention")
def flex_attention(
    query: Tensor,  # [B, Hq, M, D]
    key: Tensor,  # [B or 1, Hkv, N, D]
    value: Tensor,  # [B or 1, Hkv, N, Dv]
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: AuxRequest | upstream.AuxRequest | None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Return attention of query over key and value, its scores changed by `score_mod` and masked by `block_mask`.

    Args:
        query: [B, Hq, M, D], float16, bfloat16, float32 or float64.
        key: [B or 1, Hkv, N, D], of the same dtype and device.
        value: [B or 1, Hkv, N, Dv].
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, plain Python on scalars; it may read any tensor.
        block_mask: from `create_block_mask`, or PyTorch's own; None attends everywhere.
        scale: factor of the scores before score_mod, 1 / sqrt(D) where None.
        enable_gqa: let groups of Hq // Hkv query heads share a key head.
        return_lse: deprecated, use return_aux=AuxRequest(lse=True).
        kernel_options: how to compute; see FlexKernelOptions.
        return_aux: what to return besides the output, as (out, AuxOutput).
        sink: one more term exp(sink) of each row's sum of exponentials, which takes weight and has no value: [Hq] or
            [B, Hq] of any floating dtype, with gradient, or a number (0.0: softmax off by one). lse has it in it.
        dropout_p: part of the weights that is dropped, from 0 to 1 in steps of 1 / 65536; those kept are divided by
            1 - dropout_p, lse is that before. It draws one number from torch's generator of the device, and
            `dropout_mask` gives the same mask from the same state.

    Returns:
        The output [B, Hq, M, Dv] in the dtype of query; a row whose keys are all masked is 0, its lse -inf or the sink.
        It is differentiable to any order, by forward mode and by torch.func too; beyond first gradients in plain torch.

    Example:
        >>> import flexattn
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
        >>> flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20), mask).shape
        torch.Size([1, 2, 64, 32])
    """
    request = _request(return_lse, return_aux)
    problem = _pose(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, request.max_scores, sink, dropout_p
    )
    out, lse, max_scores = attention(_engine(problem), problem)
    if return_aux is not None:
        return out, AuxOutput(lse if request.lse else None, max_scores)
    return (out, lse) if return_lse else out


@uncompiled
@undisturbed("explain")
def explain(
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    mask_mod: Mod | None = None,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    target: str | None = None,
) -> Explanation:
    """Return every stage of the call with these arguments, without running it: print the result to read it.

    Without tensors, score_mod and mask_mod are explained alone: as graphs, what is proved about them, and of a mask_mod
    the graph that bounds it over boxes of places. With lengths its BlockMask is built too, and what that took is shown.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink: as in flex_attention.
        dropout_p: as there; nothing is drawn from torch's generator.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, to be explained without tensors.
        B, H, Q_LEN, KV_LEN, BLOCK_SIZE: as in create_block_mask, to build the mask of mask_mod with its default device;
            without Q_LEN and KV_LEN none is built.
        target: a GPU architecture ("sm_90") to show the kernels for, on any machine.

    Raises what flex_attention and create_block_mask raise, and ArgumentError where arguments do not go together.

    Example:
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> explain(q, k, v, lambda score, b, h, q_idx, kv_idx: -score).score
        def score_mod(score, b, h, q_idx, kv_idx):
            t0 = neg(score)  # f32
            return t0
        >>> explain(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, Q_LEN=512, KV_LEN=512).block_mask.counts()
        (6, 4, 6)
    """
    sizes = {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    if query is None and key is None and value is None and block_mask is None:
        return _explain_mods(score_mod, mask_mod, sizes, BLOCK_SIZE)
    if mask_mod is not None:
        mend = "Pass block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) instead."
        raise ArgumentError(message("mask_mod", "one beside other arguments", "score_mod and mask_mod alone", mend))
    _refuse_sizes(sizes, "a mask_mod without tensors", "Leave it out: the tensors and block_mask have it.")
    problem = _pose(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, False, sink, dropout_p,
        shown=True, on_gpu=target is not None,
    )  # fmt: skip
    score, mask = problem.score, problem.mask
    if score is not None and problem.score_grad is None:
        problem = replace(problem, score_grad=differentiate(score.graph, ()))
    engine = _engine_of_gpu(problem) if target else _engine(problem)
    plans = (
        triton.plans(problem, target_named(target) if target else target_of(problem.query.device))
        if engine is triton
        else ()
    )
    return Explanation(
        score=None if score is None else score.graph,
        gradient=problem.score_grad,
        mask=None if mask is None else mask.graph,
        score_facts=None if score is None else analyze(score.graph),
        mask_facts=None if mask is None else analyze(mask.graph),
        block_mask=problem.block_mask,
        engine=engine.__name__.rpartition(".")[2],  # type: ignore[attr-defined]
        plans=tuple(plan for plan, _ in plans),
        origins=tuple(tile_origin(plan) for plan, _ in plans),
        reasons=tuple(reason for _, reason in plans),
        sources=tuple(render(plan) for plan, _ in plans),
        mask_sources=_mask_sources(problem, plans[0][0].target) if plans else (),
        batch_invariant=problem.batch_invariant,
    )


@uncompiled
@undisturbed("tune")
def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    kernels: Sequence[str] = TUNED,
    seconds: float = 120.0,
    processes: int | None = None,
    rounds: int = 10,
    remember: bool = True,
) -> Tuning:
    """Measure which tiles make the Triton kernels of this call fastest on this GPU, and remember them.

    Later calls, in this process and others, take a remembered tile where architecture, kernel, dtype, head dims, kind
    of score_mod, and whether there is a mask, are the same; `explain` then says so. The backward is measured too where
    a tensor wants a gradient. Calling it again searches on from the best. Hopper's own kernels have one tile each.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa: as in flex_attention; nothing of them is changed.
        kernel_options: as there, without those that choose a tile; {"BACKEND": "TRITON"} for the kernels that Hopper's
            own stand for.
        kernels: which to tune, of forward, backward_dq and backward_dkdv.
        seconds: how long candidates may compile; those that are not ready then are left out.
        processes: how many compile side by side; where None, one for each core, at most 8.
        rounds: how often each candidate is timed; medians are compared.
        remember: keep the best tiles in tiles.json, in the folder of the kernels. To forget them, delete the file.

    Raises:
        What flex_attention raises; UnsupportedError where no Triton kernel runs, OptionError for an option that chooses
        a tile, ArgumentError for other kernels, or where the file of tiles cannot be read.

    Example:
        >>> q = k = v = torch.randn(1, 2, 64, 32, device="cuda", requires_grad=True)  # doctest: +SKIP
        >>> print(tune(q, k, v))  # doctest: +SKIP
    """
    if unknown := set(kernels) - set(TUNED):
        raise ArgumentError(message("kernels", sorted(unknown), f"names of {', '.join(TUNED)}", "Leave them out."))
    problem = _pose(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, False)
    if _engine(problem) is not triton:
        found = f"{str(query.dtype).removeprefix('torch.')} {tuple(query.shape)} on {query.device}"
        mend = "Pass tensors of float32 or less on a GPU."
        raise UnsupportedError(message("query", found, "what a Triton kernel computes", mend))
    if names := tile_options(problem.options):
        mend = "Leave it out: tune finds it."
        raise OptionError(message("kernel_options", ", ".join(names), "none that choose a tile", mend))
    effort = Effort(tuple(kernels), seconds, processes or min(8, os.cpu_count() or 1), rounds)
    return tune_problem(problem, effort, remember)


def _mask_sources(problem: Problem, target: Target) -> tuple[KernelSource, ...]:
    """Return the kernels that build the mask of a problem on a GPU; none where it is built otherwise."""
    mask = problem.block_mask
    if mask is None or not mask.is_built or target.backend != "cuda":
        return ()
    bound = trace(mask.mask_mod, "mask")
    plan = plan_mask(bound, target)
    evaluates = mask.build_counts is not None and mask.build_counts.blocks > 0
    return () if plan is None else sources(plan, bound, (mask.B, mask.H, *mask.seq_lengths), mask.BLOCK_SIZE, evaluates)


def _explain_mods(
    score_mod: Mod | None, mask_mod: Mod | None, sizes: Mapping[str, int | None], block_size: int | tuple[int, int]
) -> Explanation:
    if score_mod is None and mask_mod is None:
        mend = "Pass query, key and value, or score_mod or mask_mod."
        raise ArgumentError(message("explain", "nothing", "tensors or mods", mend))
    B, H, Q_LEN, KV_LEN = sizes.values()
    if mask_mod is None:
        _refuse_sizes(sizes, "a mask_mod, of which a mask is built", "Pass mask_mod, or leave it out.")
    elif Q_LEN is None or KV_LEN is None:
        _refuse_sizes(sizes, "both Q_LEN and KV_LEN beside it", "Pass both to build the mask, or leave it out.")
    score = None if score_mod is None else trace(score_mod, "score").graph
    mask = None if mask_mod is None else trace(mask_mod, "mask").graph
    blocks = None
    if mask_mod is not None and Q_LEN is not None and KV_LEN is not None:
        blocks = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=block_size)
    return Explanation(
        score=score,
        gradient=None if score is None else differentiate(score, tuple(range(len(score.captures)))),
        mask=mask,
        score_facts=None if score is None else analyze(score),
        mask_facts=None if mask is None else analyze(mask),
        block_mask=blocks,
        mask_bounds=None if mask is None else bounds_of(mask),
    )


def _refuse_sizes(sizes: Mapping[str, int | None], expected: str, mend: str) -> None:
    for name, size in sizes.items():
        if size is not None:
            raise ArgumentError(message(name, size, expected, mend))


def _pose(
    query: Tensor | None, key: Tensor | None, value: Tensor | None, score_mod: Mod | None,
    block_mask: BlockMask | upstream.BlockMask | None, scale: float | None, enable_gqa: bool,
    kernel_options: Mapping[str, object] | None, max_scores: bool, sink: Tensor | float | None = None,
    dropout_p: float = 0.0, shown: bool = False, on_gpu: bool = False,
) -> Problem:  # fmt: skip
    """Turn the arguments of a call into a Problem: everything before the engine, stage by stage.

    `shown`: nothing will run. `on_gpu`: as it would be for tensors of a GPU, wherever these are.
    """
    query, key, value = check_tensors(*_autocast(query, key, value), enable_gqa)
    options = validate_options(kernel_options)
    scale = check_scale(scale, query.shape[3])
    score = _score(score_mod, query)  # Python -> BoundMod
    invariant = option(options, "BATCH_INVARIANT") is True
    if score is not None and not invariant:  # whether a table by distance is small enough hangs on the lengths
        score = by_distance(score, query.shape[2], key.shape[2])  # BoundMod -> BoundMod
        if on_gpu or not query.is_cpu:
            score = places_last(score)  # BoundMod -> BoundMod
    captures = () if score is None else score.captures
    checked_sink = check_sink(sink, query)
    learnable = (query, key, value, *captures, *(() if checked_sink is None else (checked_sink,)))
    transformed = is_transforming()  # then any tensor may be differentiated
    gradient = transformed or (torch.is_grad_enabled() and any(x.requires_grad for x in learnable))
    blocks = _blocks(block_mask)  # PyTorch's BlockMask -> BlockMask
    mask = None
    if blocks is not None:
        check_block_mask(blocks, query, key, backward=gradient)
        by_hand = blocks is block_mask and not blocks.is_built
        mask = _mask(blocks, query, by_hand)  # Python -> BoundMod
    learned = tuple(i for i, c in enumerate(captures) if c.requires_grad or (transformed and c.is_floating_point()))
    score_grad = differentiate(score.graph, learned) if gradient and score is not None else None  # ModGraph -> ModGraph
    runs = () if mask is None or blocks is None else blocks.equal_runs()
    dropout = check_dropout(dropout_p, query.device, seeded=not shown)  # last: a call that is refused draws nothing
    problem = Problem(
        query, key, value, scale, score, mask, blocks, score_grad, runs, options, checked_sink, dropout, max_scores
    )
    return in_one_class(problem) if invariant else problem


def _autocast(query: object, key: object, value: object) -> tuple[object, object, object]:
    """Cast to the dtype of the autocast region around the call, as scaled_dot_product_attention does."""
    kind = query.device.type if isinstance(query, Tensor) else ""
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)


def _cast(x: object, dtype: torch.dtype) -> object:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES and x.dtype != torch.float64 else x


def _score(score_mod: Mod | None, query: Tensor) -> BoundMod | None:
    """Trace score_mod for scores of this query; None where it returns its score unchanged."""
    if score_mod is None:
        return None
    bound = trace(score_mod, "score", torch.float64 if query.dtype == torch.float64 else torch.float32)
    if bound.graph.is_input(bound.graph.output, "score"):
        return None
    return place_captures(bound, query.device, "score_mod")


def _mask(blocks: BlockMask, query: Tensor, by_hand: bool) -> BoundMod | None:
    """Trace the mod of a mask, whose lists may be made by hand; None where it is true everywhere."""
    bound = trace(blocks.mask_mod, "mask")
    result = bound.graph.nodes[bound.graph.output]
    if isinstance(result, Const) and result.value:
        return None
    check_mask_reads(blocks, bound, query, by_hand)
    blocks.check_captures(bound)
    return place_captures(bound, query.device, "mask_mod")


def _blocks(block_mask: BlockMask | upstream.BlockMask | None) -> BlockMask | None:
    """Return the mask as ours; PyTorch's stand-in for "no mask", a single boundless block, becomes None."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if not isinstance(block_mask, upstream.BlockMask):
        mend = "Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
        raise DtypeError(message("block_mask", f"a {type(block_mask).__name__}", "a BlockMask or None", mend))
    boundless = upstream._LARGE_SPARSE_BLOCK_SIZE
    if tuple(block_mask.BLOCK_SIZE) == (boundless, boundless) and block_mask.mask_mod is upstream.noop_mask:
        return None
    if block_mask.mask_mod is getattr(upstream, "_sliced_mask_mod_error", None):
        mend = "Slice flexattn's own mask: its mask_mod follows."
        raise MaskError(message("block_mask", "a slice of PyTorch's BlockMask", "a mask with its mask_mod", mend))
    return from_torch(block_mask)


def _engine(problem: Problem) -> Engine:
    """Choose who runs the problem: by the device, or as kernel_options["BACKEND"] says."""
    query, backend = problem.query, option(problem.options, "BACKEND") or "AUTO"
    if query.numel() == 0 or problem.key.shape[2] == 0:
        return empty
    if query.device.type == "cuda":
        engine = _engine_of_gpu(problem)
        return engine if engine is gpu_float64 else _triton(query.device, str(backend))
    return _triton(query.device, str(backend)) if backend in ("TRITON", "HOPPER") else cpu


def _engine_of_gpu(problem: Problem) -> Engine:
    if problem.query.dtype != torch.float64:
        return triton
    for name, value in problem.options:
        if name in ("BACKEND", "fwd_BACKEND", "bwd_BACKEND") and value != "AUTO":
            found = f"{name}={value!r} with float64 on a GPU"
            raise OptionError(message("kernel_options", found, "AUTO", f"Leave {name} out."))
    return gpu_float64


def _triton(device: torch.device, backend: str) -> Engine:
    if backend == "CPU":
        mend = "Leave BACKEND out, or move the tensors to the CPU."
        raise OptionError(message("kernel_options", f"BACKEND='CPU' with tensors on {device}", "AUTO or TRITON", mend))
    if device.type == "cpu" and not is_interpreting():
        mend = "Leave BACKEND out, or set TRITON_INTERPRET=1 before Python starts to run kernels in the interpreter."
        found = f"BACKEND={backend!r} with tensors on the CPU"
        raise OptionError(message("kernel_options", found, "AUTO or CPU", mend))
    return triton


def _request(return_lse: bool, return_aux: AuxRequest | upstream.AuxRequest | None) -> AuxRequest:
    """Return what is asked for besides the output; PyTorch's own AuxRequest is understood too."""
    if return_aux is None:
        if return_lse:
            _warn_return_lse()
        return AuxRequest(lse=bool(return_lse))
    if return_lse:
        mend = "Keep return_aux=AuxRequest(lse=True)."
        raise ArgumentError(message("return_lse", "True beside return_aux", "one of the two", mend))
    if not isinstance(return_aux, (AuxRequest, upstream.AuxRequest)):
        mend = "Write return_aux=AuxRequest(lse=True)."
        raise DtypeError(message("return_aux", f"a {type(return_aux).__name__}", "an AuxRequest", mend))
    return AuxRequest(*return_aux)


@cache
def _warn_return_lse() -> None:
    """Warn once in a process."""
    text = "return_lse is deprecated: use return_aux=AuxRequest(lse=True), which returns (out, AuxOutput)."
    warnings.warn(text, FutureWarning, stacklevel=5)
