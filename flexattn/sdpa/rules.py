"""rules: which calls of PyTorch's flash attention operators are handled, as tables of reasons why not.

The forward and the backward of one attention must have the same provider. So RULES read only a Case, which both see.
INFERENCE_RULES read what only the forward sees. Where a gradient may follow, such a call is refused with an error: the
backward cannot know of it, and neither PyTorch's nor ours would compute the right gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.call.layout import SMALLEST_PAGE
from flexattn.call.validate import DEVICES, DTYPES
from flexattn.call.varlen.packing import LONGEST
from flexattn.errors import UnsupportedError, message

WIDEST = 256  # head dim; the limit of PyTorch's flash kernels too
NO_GRADIENT = "a gradient with ALiBi, seqused_k, block_table, cum_seq_q without cum_seq_k, or the debug mask of dropout"
Shape = tuple[int, ...]


class Unhandled(UnsupportedError):
    """A call that the provider leaves to PyTorch's own kernel. Raised before anything is computed."""


class Case(NamedTuple):
    """What forward and backward both see of a call, besides the values of tensors."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device, torch.device]
    query: Shape  # [B, Hq, M, D], or [T_q, Hq, D] if packed
    key: Shape
    value: Shape
    packed: bool
    dropout_p: float

    @property
    def heads(self) -> tuple[int, int, int]:
        """The heads of query, key and value."""
        return self.query[1], self.key[1], self.value[1]

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of key and value."""
        axis = 0 if self.packed else 2
        return self.key[axis], self.value[axis]


class InferenceCase(NamedTuple):
    """What only the forward sees of a call."""

    packed: tuple[bool, bool]
    dropout_p: float
    alibi: bool = False
    debug_mask: bool = False
    seqused: bool = False
    page_size: int | None = None  # None without a block_table

    @property
    def is_plain(self) -> bool:
        """Whether the backward can compute the gradient of the call."""
        return self.has_plain_keys and not (self.alibi or (self.debug_mask and self.dropout_p > 0.0))

    @property
    def has_plain_keys(self) -> bool:
        """Whether all keys are attended to, and are stored as the queries are."""
        return not self.seqused and self.page_size is None and self.packed[0] == self.packed[1]


def _is_page_size(tokens: int) -> bool:
    return tokens >= SMALLEST_PAGE and tokens.bit_count() == 1


class Rule(NamedTuple):
    """A kind of call that is not handled."""

    name: str
    applies: Callable[[Any], bool]
    reason: str


RULES = (
    Rule("device", lambda c: len(set(c.devices)) > 1 or c.devices[0].type not in DEVICES,
         "query, key and value must be on one device, CUDA or CPU"),
    Rule("dtype", lambda c: len(set(c.dtypes)) > 1 or c.dtypes[0] not in DTYPES,
         "query, key and value must have one dtype of float16, bfloat16, float32 and float64"),
    Rule("rank", lambda c: {len(c.query), len(c.key), len(c.value)} != {3 if c.packed else 4},
         "query, key and value must have 4 dims, or 3 dims if they are packed"),
    Rule("head dim", lambda c: len({c.query[-1], c.key[-1], c.value[-1]}) > 1,
         "query, key and value must have one head dim: PyTorch's schema gives the output the shape of query"),
    Rule("wide", lambda c: not 0 < c.query[-1] <= WIDEST,
         f"head dims must be 1 to {WIDEST}"),
    Rule("batch", lambda c: not c.packed and len({c.query[0], c.key[0], c.value[0]}) > 1,
         "query, key and value must have one batch size"),
    Rule("heads", lambda c: c.heads[1] != c.heads[2] or c.heads[1] == 0 or c.heads[0] % c.heads[1] != 0,
         "the heads of query must be a multiple of those of key and value"),
    Rule("rows", lambda c: c.rows[0] != c.rows[1],
         "each key needs one value"),
    Rule("long", lambda c: max(c.query[0 if c.packed else 2], *c.rows) > LONGEST,
         f"a call has at most {LONGEST} rows of query and of key"),
    Rule("dropout", lambda c: not 0.0 <= c.dropout_p <= 1.0,
         "dropout_p must be 0 to 1"),
)  # fmt: skip

INFERENCE_RULES = (
    Rule("alibi", lambda c: c.alibi,
         "ALiBi slopes are only in the schema of the forward"),
    Rule("debug mask", lambda c: c.debug_mask and c.dropout_p > 0.0,
         "the debug mask of dropout has the format of PyTorch's own kernel"),
    Rule("inference dropout", lambda c: c.dropout_p > 0.0 and not c.has_plain_keys,
         "dropout with seqused_k, pages or cum_seq_q alone has no seed that could be returned"),
    Rule("page size", lambda c: c.page_size is not None and not _is_page_size(c.page_size),
         f"pages must have a power of two of tokens, from {SMALLEST_PAGE} on"),
    Rule("used lengths", lambda c: c.page_size is not None and not c.seqused,
         "a block_table needs seqused_k"),
    Rule("only keys packed", lambda c: c.packed == (False, True),
         "cum_seq_k needs cum_seq_q"),
)  # fmt: skip


@lru_cache(1024)
def reason_for(case: Case) -> str | None:
    """Return why a call is not handled, or None."""
    return _first(RULES, case)


@lru_cache(1024)
def inference_reason_for(case: InferenceCase) -> str | None:
    """Return why a call is not handled because of what only the forward sees, or None."""
    return _first(INFERENCE_RULES, case)


def _first(rules: tuple[Rule, ...], case: object) -> str | None:
    return next((rule.reason for rule in rules if rule.applies(case)), None)


def case_of(query: Tensor, key: Tensor, value: Tensor, packed: bool, dropout_p: float) -> Case:
    """Return the case of a call with query [B, Hq, M, D], or [T_q, Hq, D] if packed."""
    return Case(
        (query.dtype, key.dtype, value.dtype), (query.device, key.device, value.device),
        query.shape, key.shape, value.shape, packed, dropout_p,
    )  # fmt: skip


def inference_case(
    key: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, dropout_p: float, return_debug_mask: bool,
    seqused_k: Tensor | None, alibi_slopes: Tensor | None, block_table: Tensor | None,
) -> InferenceCase:  # fmt: skip
    """Return what only the forward sees of a call. Pages of key are [pages, page_size, Hkv, D]."""
    page_size = None if block_table is None else key.size(1)
    packed = cum_seq_q is not None, cum_seq_k is not None
    return InferenceCase(
        packed, dropout_p, alibi_slopes is not None, return_debug_mask, seqused_k is not None, page_size
    )


def check(case: Case) -> None:
    """Raise Unhandled if a call is not handled."""
    reason = reason_for(case)
    if reason is not None:
        raise Unhandled(reason)


def check_inference(case: InferenceCase, gradient: bool) -> None:
    """Raise UnsupportedError for a call whose gradient would be wrong, and Unhandled for one that is not handled."""
    if gradient and not case.is_plain:
        fix = "Call it under torch.no_grad(), or leave the argument out."
        raise UnsupportedError(message("query", NO_GRADIENT, "what the schema of the backward has too", fix))
    reason = inference_reason_for(case)
    if reason is not None:
        raise Unhandled(reason)


def case_of_rows(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Case:
    """Return the case of a call without plain keys, as if packed. Tensors are [B, S, H, D], pages, or [T, H, D]."""
    case = case_of(query, key, value, True, dropout_p)
    return case._replace(query=_rows_of(case.query), key=_rows_of(case.key), value=_rows_of(case.value))


def _rows_of(shape: Shape) -> Shape:
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == 4 else shape


def wants_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd records a call with these tensors. Below autograd they still require their gradients."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    cum_seq_q: Tensor | None = None, cum_seq_k: Tensor | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, return_debug_mask: bool = False,
) -> str | None:  # fmt: skip
    """Return why the provider would leave a call to PyTorch's own kernel, or None if flexattn computes it.

    It answers for calls that reach PyTorch's flash attention operators. Whether scaled_dot_product_attention chooses
    them is PyTorch's decision (torch.backends.cuda.can_use_flash_attention).

    Args:
        query, key, value: [B, H, S, D] as for scaled_dot_product_attention; [T, H, D] with cum_seq_q and cum_seq_k.
            With a block_table key and value are pages, [pages, page_size, Hkv, D].
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as for scaled_dot_product_attention.
        cum_seq_q, cum_seq_k, seqused_k, alibi_slopes, block_table, return_debug_mask: as for the operator
            `_flash_attention_forward`.

    Example:
        >>> import torch
        >>> query = key = value = torch.randn(1, 2, 16, 32)
        >>> why_not(query, key, value, is_causal=True) is None
        True
        >>> why_not(query, key, value.double())
        'query, key and value must have one dtype of float16, bfloat16, float32 and float64'
    """
    if attn_mask is not None:
        return "PyTorch's flash attention operators take no attn_mask: call flexattn.flex_attention with a mask_mod"
    inference = inference_case(
        key, cum_seq_q, cum_seq_k, dropout_p, return_debug_mask, seqused_k, alibi_slopes, block_table
    )
    if wants_gradient(query, key, value) and not inference.is_plain:
        return NO_GRADIENT
    reason = inference_reason_for(inference)
    if reason is not None:
        return reason
    if inference.has_plain_keys:
        return reason_for(case_of(query, key, value, cum_seq_q is not None, dropout_p))
    if cum_seq_q is None:  # [B, H, S, D]
        query = query.transpose(1, 2)
        key, value = (x if block_table is not None else x.transpose(1, 2) for x in (key, value))
    return reason_for(case_of_rows(query, key, value, dropout_p))
