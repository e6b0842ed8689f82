"""api: flex_attention.

It calls these stages. Indented stages are called by the stage above them.

    repeated                    engines/repeated_calls.py   a call of the same kind as an earlier one launches its
                                                     kernels; the stages further below are skipped
        kind_of                 engines/call_kind.py     the guards of the mods run; the key of the call
        RepeatedCall            engines/repeated_calls.py   through _RepeatedAttention if a backward may follow.
                                                     If d_out must be copied, engines/triton.py runs the backward
            KnownForward, KnownBackward  engines/triton.py   allocate, and collect the pointers
                KnownKernels.run    runtime/known.py     fills in the arguments of each kernel
                    FlatLaunch      machine/triton_versions.py   Triton's C launcher, which Kernel.launch calls too
    Call                        call/call.py         the arguments, as given
    pose                        call/pose.py         Call -> Problem: checked, traced, differentiated
        trace                   trace/trace.py       score_mod, mask_mod -> BoundMod
        complete                call/pose.py         mods in the form that engines compute
            differentiate       graph/differentiate.py   ModGraph -> ModGraph of gradients
    engine_of                   engines/choice.py    which engine computes the problem
    form_for                    engines/choice.py    the problem itself if the engine computes its layout, else:
        dense_form              call/dense_form.py   Problem -> Problem without seqused_k, q_offsets, ...
    attention                   engines/autograd.py  the differentiable operation around the engine
        forward, backward       engines/triton.py    a pass whose launches are known runs them (runtime/known.py).
                                                     Otherwise it allocates the arrays, and runs each kernel
                                                     through a LaunchLog
            KernelProblems      compile/schedule.py  the problem, in a variant for each group of kernels
            scheduled_backward  runtime/launch.py    the backward's kernels, cached for equal calls
                backward_kernels    compile/schedule.py  chooses them, in order
                    fused_backward      compile/hopper.py    dQ, dK and dV in one kernel, if possible
            forward_kernels     compile/schedule.py  FORWARD, or FORWARD_SPLIT and MERGE_SPLITS for short queries
            LaunchLog           runtime/known.py     runs one kernel, and keeps its Launch
                launch_of           runtime/launch.py    the cached Launch of an equal kernel. On a miss:
                    plan_best_form  compile/schedule.py  Problem -> KernelPlan, for the Hopper or the portable kernel
                        plan_kernel     compile/plan.py      the portable KernelPlan; each ModGraph -> ModPlan
                        hopper_form     compile/hopper.py    its Hopper form, or the reason why it has none
                    load_ahead      runtime/load.py      starts compiling the backward in other processes
                    prepare         runtime/launch.py    KernelPlan -> Launch: the arguments that equal calls share
                        load        runtime/load.py      KernelPlan -> loaded kernel, with a smaller tile if necessary
                            render  compile/render.py    KernelPlan -> KernelSource
                                lower, lower_score  compile/lower.py  ModPlan -> the text of a function
                            build   runtime/build.py     KernelSource -> Kernel: compiled, or from the disk cache
                            Kernel.load     runtime/build.py     its files -> a function that calls Triton's C launcher
                Launch              runtime/launch.py    called with the tensors: fills in what differs,
                                                         and calls Kernel.launch (runtime/build.py)
    keep                        engines/repeated_calls.py   keeps the call for `repeated`

Inside torch.compile, Dynamo traces flex_attention and traced_call (torch_compile/call.py). The mods and the call
become one node of Dynamo's graph (torch_compile/higher_order.py), which AOTAutograd replaces by the operators
flexattn::forward and flexattn::backward (torch_compile/attention.py, operators.py). An operator launches the kernels of
an equal earlier one (torch_compile/repeated_operators.py). Otherwise it makes a Problem, chooses the engine with
engine_of and calls engine.forward or engine.backward itself, without `attention`. Packed sequences are described by
operators of their own (torch_compile/sequences.py). make_fx, torch.export and fake tensors record the same operators
(torch_compile/recorded.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.blocks_read import blocks_read
from flexattn.call.call import Call, Mod
from flexattn.call.jagged import from_jagged, to_jagged
from flexattn.call.layout import KVLayout, LayoutArguments
from flexattn.call.pose import pose
from flexattn.call.unknown_arguments import refuse_unknown
from flexattn.call.varlen.arguments import batch_of_rows, rows_of_batch
from flexattn.engines import triton
from flexattn.engines.autograd import attention
from flexattn.engines.choice import engine_of, form_for
from flexattn.engines.repeated_calls import keep, keep_rows, repeated
from flexattn.errors import ArgumentError, DtypeError, message
from flexattn.torch_compile.call import traced_call
from flexattn.torch_compile.recorded import recorded_call
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.subclasses import has_no_values
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.follow.libraries import frames_of_ours


class AuxRequest(NamedTuple):
    """What flex_attention returns besides the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The requested outputs; None if not requested."""

    lse: Tensor | None = None  # [B, Hq, M] float32 (float64 for float64), natural logarithm, differentiable
    max_scores: Tensor | None = None  # [B, Hq, M] float32, largest score of each row, not differentiable


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: Mapping[str, object] | None = None,
    return_aux: None = None,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    return_aux: AuxRequest | upstream.AuxRequest,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...


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
    dropout_p: float = 0,  # no 0.0: Dynamo makes a symbol of a default that is a float (dynamic=True)
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Compute attention with scores modified by `score_mod` and masked by `block_mask`.

    Args:
        query: [B, Hq, M, D], float16, bfloat16, float32 or float64. Or a nested tensor of layout torch.jagged, with key
            and value; then b is the sequence, q_idx and kv_idx are positions in it, and results are nested.
        key: [B or 1, Hkv, N, D], same dtype and device as query.
        value: [B or 1, Hkv, N, Dv].
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, plain Python on scalars. It may read any tensor.
        block_mask: from `create_block_mask`, or PyTorch's BlockMask. If None, every pair attends.
        scale: factor of the scores before score_mod, 1 / sqrt(D) if None.
        enable_gqa: let groups of Hq // Hkv query heads share a key head.
        return_lse: deprecated, use return_aux=AuxRequest(lse=True).
        kernel_options: see FlexKernelOptions.
        return_aux: what to return besides the output, as (out, AuxOutput).
        sink: adds a term exp(sink) without a value to each row's softmax sum. [Hq] or [B, Hq] of any floating dtype,
            differentiable, or a number (0.0: softmax off by one). lse includes it.
        dropout_p: fraction of the weights that is dropped, from 0 to 1 in steps of 1 / 65536. Kept weights are divided
            by 1 - dropout_p. lse is computed before dropout. The seed is one number from the device's generator, and
            `dropout_mask` returns the same mask for the same generator state.
        seqused_k: [B] int32, number of keys of each sequence. Keys from there on are not read. None: all N.
        q_offsets: [B] int32, position of the first query of each sequence. Mods see q_idx from there on, and block_mask
            is read from that row on. Each entry plus M is at most the rows of block_mask, also if the last of the M
            queries are padding. So build the mask with Q_LEN = N + M - 1 or more. None: 0.
        kv_positions: [B or 1, N] int32, position of the token in each slot of key, as in a ring buffer; negative for an
            empty slot. Mods see it as kv_idx. Only the mask_mod of block_mask is used.
        block_table: [B, pages] int32, the pages of each sequence in order. key is then [pages, page_size, Hkv, D] and
            value [pages, page_size, Hkv, Dv], with a page_size that is a power of two from 16 on. N is the number of
            tokens that the columns hold.
        kv_layout: dims of pages, "NHD", or "HND" for [pages, Hkv, page_size, D].
        k_descale, v_descale: float32 [Hkv], or [pages, Hkv] with a block_table. key and value are then float8_e4m3fn
            and are multiplied by it.

        The tensors among the last seven arguments may change in place between calls, also in a CUDA graph. Wrong values
        raise on the CPU; on a GPU, where that would wait, the sequence's output is NaN.

    Returns:
        The output [B, Hq, M, Dv] in the dtype of query. A row whose keys are all masked is 0, and its lse is -inf or
        the sink. The output is differentiable to any order, also in forward mode and with torch.func. Beyond first
        gradients, derivatives are computed in plain torch.

    Example:
        >>> import flexattn, torch
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
        >>> flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20), mask).shape
        torch.Size([1, 2, 64, 32])
    """
    if unknown:
        refuse_unknown(flex_attention, unknown)
    request = _NOTHING_ELSE if return_aux is None and not return_lse else _request(return_lse, return_aux)
    if getattr(query, "is_nested", False):
        compute = _jagged
    elif torch.compiler.is_dynamo_compiling():
        compute = traced_call  # Dynamo continues to trace there
    else:
        compute = _compute
    layout = None
    if (  # as LayoutArguments.is_empty, without making one for each call
        seqused_k is not None
        or q_offsets is not None
        or kv_positions is not None
        or block_table is not None
        or kv_layout != "NHD"
        or k_descale is not None
        or v_descale is not None
    ):
        layout = LayoutArguments(
            seqused_k, q_offsets, kv_positions, block_table, kv_layout, k_descale, v_descale
        )  # fmt: skip
    elif getattr(block_mask, "_for_hopper", None) is not None and isinstance(query, Tensor):
        block_mask = blocks_read(block_mask, query, kernel_options)  # type: ignore[arg-type]
    out, lse, max_scores = compute(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink, dropout_p,
        request.max_scores, layout,
    )  # fmt: skip
    if return_aux is not None:
        return out, AuxOutput(lse if request.lse else None, max_scores if request.max_scores else None)
    return (out, lse) if return_lse else out


def _record(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return recorded_call(Call(*arguments))


@uncompiled
def _compute(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    return repeated(*arguments) or _through_all_stages(*arguments)


@uncompiled
def attend_call(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return out, lse and row maxima."""
    return _compute(*vars(call).values())


@uncompiled
def attend_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Return out [T_q, Hq, Dv] and lse [Hq, T_q] of packed sequences, whose query, key and value are [rows, H, D]."""
    rows = tuple(vars(call).values())
    found = repeated(*rows)
    if found is None:
        arguments = (*map(batch_of_rows, rows[:3]), *rows[3:])
        out, lse, _ = _compute(*arguments)
        keep_rows(rows, arguments)
        return rows_of_batch(out), lse.squeeze(0)
    return found[:2]


def _attend_jagged(query: Any, key: Any, value: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute a call with nested tensors, as packed sequences."""
    score_mod, block_mask, *rest, layout = arguments
    if layout is not None:
        fix = "Leave out seqused_k, q_offsets, kv_positions and block_table."
        raise ArgumentError(message("query", "a nested tensor", "a dense one with other layouts", fix))
    q, k, v, sequences = from_jagged(query, key, value, block_mask)
    results = attend_call(Call(q, k, v, score_mod, None, *rest, layout=sequences))
    out, lse, largest = (None if x is None else to_jagged(x, query) for x in results)
    assert out is not None and lse is not None
    return out, lse, largest


_jagged = uncompiled(
    _attend_jagged,
    "a call of flex_attention with nested tensors is one graph break. Remove fullgraph=True, or call varlen_attn with "
    "x.values() and x.offsets()",
)


@undisturbed("flex_attention", when_recording=_record)
def _through_all_stages(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    call = Call(*arguments)
    if isinstance(call.query, Tensor) and has_no_values(call.query):
        return recorded_call(call)
    problem = pose(call)
    engine = engine_of(problem)
    problem = form_for(engine, problem)
    result = attention(engine, problem)
    if engine is triton:
        keep(arguments, problem)
    return result


_NOTHING_ELSE = AuxRequest()


def _request(return_lse: bool, return_aux: AuxRequest | upstream.AuxRequest | None) -> AuxRequest:
    """Return the requested outputs, if there are some. PyTorch's AuxRequest is accepted too."""
    if return_aux is None:
        if not torch.compiler.is_dynamo_compiling():  # Dynamo does not trace warnings.warn
            _warn_return_lse()
        return AuxRequest(lse=True)
    if return_lse:
        fix = "Keep return_aux=AuxRequest(lse=True)."
        raise ArgumentError(message("return_lse", "True with return_aux", "one of the two", fix))
    if not isinstance(return_aux, (AuxRequest, upstream.AuxRequest)):
        fix = "Write return_aux=AuxRequest(lse=True)."
        raise DtypeError(message("return_aux", f"a {type(return_aux).__name__}", "an AuxRequest", fix))
    return AuxRequest(*return_aux)


@cache
def _warn_return_lse() -> None:
    """Warn once per process."""
    text = "return_lse is deprecated: use return_aux=AuxRequest(lse=True), which returns (out, AuxOutput)."
    warnings.warn(text, FutureWarning, stacklevel=frames_of_ours())
