"""operators: PyTorch's flash attention operators, with the schemas of ATen, as functions of tensors on a GPU or a CPU.

Each raises Unhandled before it computes anything if PyTorch's own kernel should compute the call (rules.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from flexattn.api import AuxRequest
from flexattn.call.dropout import Dropout, check_dropout, drop_below
from flexattn.call.varlen.arguments import PackedArguments
from flexattn.errors import ArgumentError, message
from flexattn.sdpa.passes import Form, Window, backward, forward, repeated_backward, repeated_forward
from flexattn.sdpa.rules import case_of, case_of_rows, check, check_inference, inference_case, wants_gradient
from flexattn.varlen import varlen_attn

P = ParamSpec("P")
R = TypeVar("R")
Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # out, lse, rng_state, unused, debug mask
Dense = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


def below_autograd(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function record no gradients, and not cast. PyTorch does both around the operators."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return function(*args, **kwargs)

    return called


def scaled_dot_product_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Dense:  # fmt: skip
    """Compute `aten::_scaled_dot_product_flash_attention`.

    Args:
        query: [B, Hq, M, D], float16, bfloat16, float32 or float64.
        key, value: [B, Hkv, N, D]. Hq is a multiple of Hkv.
        dropout_p: fraction of the weights that is dropped, in steps of 1 / 65536.
        is_causal: align the last query with the last key, and attend to no later key.
        return_debug_mask: not handled with dropout.
        scale: factor of the scores, 1 / sqrt(D) if None.

    Returns:
        out like query, lse [B, Hq, M] float32, None, None, M, N, rng_state uint64 [2] (the seed and 0), an unused
        tensor, and an empty debug mask. Rows without keys are 0, and their lse is -inf.

    Raises Unhandled for calls that `why_not` names.

    Example:
        >>> query = key = value = torch.randn(1, 2, 16, 32)
        >>> out, lse, *_ = scaled_dot_product_flash_attention(query, key, value, is_causal=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 16, 32]), torch.Size([1, 2, 16]))
    """
    if return_debug_mask:
        inference = inference_case(key, None, None, dropout_p, return_debug_mask, None, None, None)
        check_inference(inference, wants_gradient(query, key, value))
    form = Form(_window(is_causal, None, None), scale, None)
    known = None if dropout_p else repeated_forward(query, key, value, form)
    if known is None:
        check(case_of(query, key, value, False, dropout_p))
        out, lse, *others = _forward(query, key, value, form, dropout_p)
    else:
        out, lse, *others = _like(known[0], query), known[1], *_auxiliary(query, None)
    return out, lse, None, None, query.size(2), key.size(2), others[0], others[1], others[2]


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `aten::_scaled_dot_product_flash_attention_backward`: dq, dk and dv, like query, key and value.

    `philox_seed` is the rng_state of the forward.

    Example:
        >>> query = key = value = torch.randn(1, 2, 16, 32)
        >>> out, lse, *lengths, state, unused, _ = scaled_dot_product_flash_attention(query, key, value)
        >>> given = torch.ones_like(out), query, key, value, out, lse, *lengths, 0.0, False, state, unused
        >>> [x.shape for x in scaled_dot_product_flash_attention_backward(*given)]
        [torch.Size([1, 2, 16, 32]), torch.Size([1, 2, 16, 32]), torch.Size([1, 2, 16, 32])]
    """
    form = Form(_window(is_causal, None, None), scale, None)
    known = None if dropout_p else repeated_backward(query, key, value, form, out, logsumexp, grad_out)
    if known is not None:
        return _like(known[0], query), _like(known[1], key), _like(known[2], value)
    check(case_of(query, key, value, False, dropout_p))
    return _gradients(query, key, value, form, dropout_p, philox_seed, out, logsumexp, grad_out)


def flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Forward:  # fmt: skip
    """Compute `aten::_flash_attention_forward`.

    Args:
        query: [B, M, Hq, D]; with cum_seq_q [T_q, Hq, D].
        key, value: [B, N, Hkv, D]; with cum_seq_k [T_k, Hkv, D]; with a block_table [pages, page_size, Hkv, D].
        cum_seq_q, cum_seq_k: int32 [sequences + 1], where each sequence begins, and the end of the last.
        max_q, max_k: lengths of the longest sequences, or more.
        dropout_p, is_causal, return_debug_mask, scale: as in `scaled_dot_product_flash_attention`.
        window_size_left, window_size_right: keys before and after its own that a query attends to; None or -1: all. The
            last query and the last key of a sequence are aligned.
        seqused_k: int32 [B], number of keys of each sequence that are used.
        alibi_slopes: not handled.
        block_table: int32 [B, pages], the pages of each sequence.
        num_splits: 1: the bits of a row do not depend on other sequences. More: the splits of the keys.

    Returns:
        out like query, lse [B, Hq, M] float32 ([Hq, T_q] with cum_seq_q), rng_state uint64 [2], an unused tensor, and
        an empty debug mask.

    Raises Unhandled for calls that `why_not` names, and UnsupportedError if a gradient is required of one that the
    backward cannot compute: with alibi_slopes, seqused_k, block_table, or a debug mask of dropout.

    Example:
        >>> query = key = value = torch.randn(7, 2, 16)  # sequences of 4 and 3 tokens
        >>> cum_seq = torch.tensor([0, 4, 7], dtype=torch.int32)
        >>> out, lse, *_ = flash_attention_forward(query, key, value, cum_seq, cum_seq, 4, 4, 0.0, True, False)
        >>> out.shape, lse.shape
        (torch.Size([7, 2, 16]), torch.Size([2, 7]))
    """
    inference = inference_case(
        key, cum_seq_q, cum_seq_k, dropout_p, return_debug_mask, seqused_k, alibi_slopes, block_table
    )
    check_inference(inference, wants_gradient(query, key, value))
    window = _window(is_causal, window_size_left, window_size_right)
    if not inference.has_plain_keys:
        check(case_of_rows(query, key, value, dropout_p))
        return _through_varlen(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, window, seqused_k, block_table, num_splits
        )
    if cum_seq_q is None or cum_seq_k is None:
        q, k, v = map(_heads_first, (query, key, value))
        check(case_of(q, k, v, False, dropout_p))
        found = _forward(q, k, v, Form(window, scale, None, _options(num_splits)), dropout_p)
        return _like(found[0].transpose(1, 2), query), *found[1:]
    check(case_of(query, key, value, True, dropout_p))
    if num_splits and not dropout_p:
        return _through_varlen(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, window, None, None, num_splits
        )
    packed = PackedArguments(cum_seq_q, cum_seq_k, max_q, max_k, window)
    return _forward(query, key, value, Form(window, scale, packed), dropout_p)


def flash_attention_forward_no_dropout_inplace(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `aten::_flash_attention_forward_no_dropout_inplace`: write into `out`, and return lse.

    The arguments are those of `flash_attention_forward`, with dropout_p 0. The result is computed first and copied.

    Raises ArgumentError if `out` differs from query in shape, dtype or device, or if dropout_p is not 0.

    Example:
        >>> query = key = value = torch.randn(1, 16, 2, 32)
        >>> out = torch.empty_like(query)
        >>> sizes = None, None, 16, 16, 0.0, True, False
        >>> flash_attention_forward_no_dropout_inplace(out, query, key, value, *sizes).shape
        torch.Size([1, 2, 16])
    """
    _check_out(out, query, dropout_p)
    found, lse, *_ = flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    with torch.no_grad():
        out.copy_(found)
    return lse


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `aten::_flash_attention_backward`: dq, dk and dv, like query, key and value.

    The arguments are those of `flash_attention_forward`, and what it returned.

    Example:
        >>> query = key = value = torch.randn(1, 16, 2, 32)
        >>> sizes = None, None, 16, 16, 0.0, True
        >>> out, lse, state, unused, _ = flash_attention_forward(query, key, value, *sizes, False)
        >>> given = torch.ones_like(out), query, key, value, out, lse, *sizes, state, unused
        >>> [x.shape for x in flash_attention_backward(*given)]
        [torch.Size([1, 16, 2, 32]), torch.Size([1, 16, 2, 32]), torch.Size([1, 16, 2, 32])]
    """
    window = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is not None and cum_seq_k is not None:
        check(case_of(query, key, value, True, dropout_p))
        form = Form(window, scale, PackedArguments(cum_seq_q, cum_seq_k, max_q, max_k, window))
        return _gradients(query, key, value, form, dropout_p, rng_state, out, logsumexp, grad_out)
    q, k, v, o, d_o = map(_heads_first, (query, key, value, out, grad_out))
    check(case_of(q, k, v, False, dropout_p))
    found = _gradients(q, k, v, Form(window, scale, None), dropout_p, rng_state, o, logsumexp, d_o)
    dq, dk, dv = [_like(g.transpose(1, 2), x) for g, x in zip(found, (query, key, value), strict=True)]
    return dq, dk, dv


@below_autograd
def _forward(query: Tensor, key: Tensor, value: Tensor, form: Form, dropout_p: float) -> Forward:
    dropout = check_dropout(dropout_p, query.device) if dropout_p else None
    out, lse = forward(query, key, value, form, dropout)
    return _like(out, query), lse.float(), *_auxiliary(query, dropout)


@below_autograd
def _gradients(
    query: Tensor, key: Tensor, value: Tensor, form: Form, dropout_p: float, state: Tensor, out: Tensor, lse: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_results(query, form, out, lse, d_out)
    dropout = _dropout_of(dropout_p, state, query.device) if dropout_p else None
    found = backward(query, key, value, form, dropout, out, lse, d_out)
    dq, dk, dv = [_like(g, x) for g, x in zip(found, (query, key, value), strict=True)]
    return dq, dk, dv


@below_autograd
def _through_varlen(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, scale: float | None, window: Window, seqused_k: Tensor | None, block_table: Tensor | None,
    num_splits: int | None,
) -> Forward:  # fmt: skip
    """Compute a call of which no gradient follows."""
    rows, cu = query, cum_seq_q
    if cu is None:  # [B, M, Hq, D]: each batch is a sequence of M queries
        B, M = query.shape[:2]
        if B * M == 0:
            return torch.empty_like(query), _lse_without_rows(query), *_auxiliary(query, None)
        rows, max_q = query.flatten(0, 1), M
        cu = torch.arange(0, (B + 1) * M, M, dtype=torch.int32, device=query.device)
    found = varlen_attn(
        rows, key, value, cu, cum_seq_k, max_q, max_k, return_aux=AuxRequest(lse=True), scale=scale,
        window_size=window, enable_gqa=True, seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    assert isinstance(found, tuple)
    out, lse = found
    if cum_seq_q is None:
        out, lse = out.unflatten(0, query.shape[:2]), lse.unflatten(1, query.shape[:2]).transpose(0, 1)
    return _like(out, query), lse.float().contiguous(), *_auxiliary(query, None)


def _check_out(out: Tensor, query: Tensor, dropout_p: float) -> None:
    if dropout_p:
        fix = "Call _flash_attention_forward."
        raise ArgumentError(message("dropout_p", dropout_p, "0 in _flash_attention_forward_no_dropout_inplace", fix))
    kinds = [f"{x.dtype} {list(x.shape)} on {x.device}" for x in (out, query)]
    if kinds[0] != kinds[1]:
        raise ArgumentError(message("out", kinds[0], f"that of query, {kinds[1]}", "Pass torch.empty_like(query)."))


def _check_results(query: Tensor, form: Form, out: Tensor, lse: Tensor, d_out: Tensor) -> None:
    """Check what a backward is given besides the call: kernels would read past the end of a smaller tensor."""
    of_lse = query.shape[:3] if form.packed is None else query.shape[1::-1]
    for name, x, dtype, shape in (
        ("out", out, query.dtype, query.shape), ("logsumexp", lse, lse.dtype, of_lse),
        ("grad_out", d_out, query.dtype, query.shape),
    ):  # fmt: skip
        if x.dtype != dtype or x.shape != shape or x.device != query.device:
            found, wanted = f"{x.dtype} {list(x.shape)} on {x.device}", f"{dtype} {list(shape)} on {query.device}"
            raise ArgumentError(message(name, found, wanted, "Pass what the forward returned, and its gradient."))


def _lse_without_rows(query: Tensor) -> Tensor:
    """Return the empty lse [B, Hq, M] of query [B, M, Hq, D]."""
    return query.new_empty((query.size(0), query.size(2), query.size(1)), dtype=torch.float32)


def _window(is_causal: bool, left: int | None, right: int | None) -> Window:
    """Return the window of a call. As in PyTorch's kernels, negative numbers mean all, and causal has no later key."""
    return -1 if left is None else max(left, -1), 0 if is_causal else -1 if right is None else max(right, -1)


def _options(num_splits: int | None) -> tuple[tuple[str, object], ...]:
    """Return num_splits as kernel_options of a dense call."""
    if not num_splits:
        return ()
    return (("BATCH_INVARIANT", True),) if num_splits == 1 else (("SPLIT_KV", num_splits),)


def _heads_first(x: Tensor) -> Tensor:
    """Return [B, S, H, D] as [B, H, S, D]. Other ranks are returned as they are, for `check`."""
    return x.transpose(1, 2) if x.dim() == 4 else x


def _auxiliary(query: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return rng_state, the unused tensor and the debug mask. Without dropout nobody reads their values."""
    if dropout is None:
        state = query.new_empty(2, dtype=torch.uint64)
    else:
        state = torch.nn.functional.pad(dropout.seed, (0, 1)).view(torch.uint64)
    return state, query.new_empty((), dtype=torch.uint64), query.new_empty(0)


def _dropout_of(dropout_p: float, state: Tensor, device: torch.device) -> Dropout | None:
    """Return the dropout of the forward that returned this rng_state."""
    below = drop_below(dropout_p)
    return None if below is None else Dropout(below, state.view(torch.int64)[:1].to(device))


def _like(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the strides of torch.empty_like(like), which PyTorch's compiler assumes. It is rarely a copy."""
    strides = _strides_of_empty(like.shape, like.stride())
    if x.stride() == strides:
        return x
    if all(a == b for a, b, size in zip(x.stride(), strides, x.shape, strict=True) if size > 1):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@lru_cache(4096)
def _strides_of_empty(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
