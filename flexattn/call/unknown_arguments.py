"""unknown_arguments: what to write instead of the arguments of other attention functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn, TypeVar

from flexattn.errors import UnknownArgumentError, message
from flexattn.torch_state.uncompiled import uncompiled

F = TypeVar("F", bound=Callable[..., Any])

_TOP_LEFT = "create_block_mask(mods.causal, None, None, Q_LEN, KV_LEN)"  # as scaled_dot_product_attention
_LOWER_RIGHT = "create_block_mask(mods.causal_lower_right(Q_LEN, KV_LEN), None, None, Q_LEN, KV_LEN)"  # FlashAttention
_WINDOW = "create_block_mask(mods.shifted(mods.band(left, right), KV_LEN - Q_LEN), None, None, Q_LEN, KV_LEN)"
_SLIDING = "create_block_mask(mods.sliding_window(window), None, None, Q_LEN, KV_LEN)"
_PADDING = "create_block_mask(mods.padding(lengths), B, None, Q_LEN, KV_LEN)"
_TABLE = "create_block_mask(lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx], None, None, Q_LEN, KV_LEN)"
_BIAS = "score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]"
_DENSE = (
    "block_mask=create_block_mask(lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx], ...), or add floats in a score_mod,"
)
_LSE = "return_aux=AuxRequest(lse=True)"
_WEIGHTS = (
    "Weights are never stored. flexattn.statistics returns their entropy and the largest ones, flexattn.debug those of "
    "single pairs."
)
# The arguments of scaled_dot_product_attention, FlashAttention, xformers and nn.MultiheadAttention, and mistakes.
_INSTEAD = {
    "is_causal": f"block_mask={_TOP_LEFT}",
    "causal": f"block_mask={_LOWER_RIGHT}",
    "mask": f"block_mask={_TABLE}",
    "attn_mask": _DENSE,
    "attn_bias": _DENSE,
    "attention_mask": _DENSE,
    "bias": _BIAS,
    "key_padding_mask": f"block_mask={_PADDING}",
    "mask_mod": "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
    "window_size": f"block_mask={_WINDOW}",
    "sliding_window": f"block_mask={_SLIDING}",
    "head_mask": "flex_attention(...) * head_mask[:, None, None]",
    "softcap": "score_mod=mods.softcap(cap)",
    "alibi_slopes": (
        "score_mod=lambda score, b, h, q_idx, kv_idx: score - alibi_slopes[h] * (q_idx + N - M - kv_idx).abs(), with "
        "the lengths M and N of query and key,"
    ),
    "softmax_scale": "scale",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "learnable_sink": "sink",
    "s_aux": "sink",
    "return_softmax_lse": _LSE,
    "return_attn_probs": "return_aux=AuxRequest(lse=True), as weights are never stored,",
    "cache_seqlens": "seqused_k= for the lengths and q_offsets= for the positions of the first queries",
    "page_table": "block_table",
    "cu_seqlens": "varlen_attn",
    "cu_seqlens_q": "varlen_attn",
    "cu_seqlens_k": "varlen_attn",
    "num_splits": 'kernel_options={"SPLIT_KV": num_splits}',
    "deterministic": "torch.use_deterministic_algorithms(True)",
}
_OF_VARLEN = {
    "is_causal": "window_size=(-1, 0)",
    "causal": "window_size=(-1, 0)",
    "sliding_window": "window_size=(window - 1, 0)",
    "block_mask": "mask_mod=, whose q_idx and kv_idx are positions in the sequence,",
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), "mask_mod"),
    "attn_bias": _BIAS,
    "key_padding_mask": "seqused_k",
    "alibi_slopes": "score_mod=mods.distance_decay(alibi_slopes), if each sequence has as many queries as keys,",
    "head_mask": "varlen_attn(...) * head_mask[:, None]",
    "cu_seqlens": "cu_seq_q= and cu_seq_k=",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "max_seqlen": "max_q= and max_k=",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "cache_seqlens": "seqused_k",
    "return_lse": _LSE,
}
_OF_MASKS = {
    "is_causal": _TOP_LEFT,
    "causal": _LOWER_RIGHT,
    "window_size": _WINDOW,
    "sliding_window": _SLIDING,
    "key_padding_mask": _PADDING,
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), _TABLE),
    "score_mod": "flex_attention(..., score_mod=score_mod)",
    **dict.fromkeys(("batch", "batch_size"), "B"),
    **dict.fromkeys(("heads", "num_heads", "n_heads"), "H"),
}
_OF_CACHES = {
    **dict.fromkeys(("batch", "batch_size", "max_batch_size"), "sequences"),
    **dict.fromkeys(("max_seqlen", "max_seq_len", "max_length"), "max_tokens"),
    "num_blocks": "pages",
    "block_size": "page_size",
    **dict.fromkeys(("num_heads", "num_kv_heads", "n_heads"), "heads"),
}
_OWN = {"varlen_attn": _INSTEAD | _OF_VARLEN, "create_block_mask": _OF_MASKS, "PagedKVCache": _OF_CACHES}
_NOT_OF_CALLS = {
    "return_lse": "Leave it out: {function} returns no output of attention.",
    "return_aux": "Leave it out: {function} returns no output of attention.",
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
}


class MissingArgument:
    """The type of MISSING. Checks name it as what they found."""

    def __repr__(self) -> str:
        return "no argument"


MISSING: Final = MissingArgument()


def refuses_unknown(function: F) -> F:
    """Let a function with a parameter **unknown be called without required arguments, so that it can refuse the others.

    Python refuses the call before the function runs, without a hint, if the names of another library are in place of
    required ones. So these get the default MISSING, which no check accepts. This adds no cost to a call, and neither
    type checkers nor inspect.signature show it.
    """
    changed: Any = function
    changed.__signature__ = signature = inspect.signature(function)
    required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    by_name = {p.name: MISSING for p in required if p.kind is p.KEYWORD_ONLY}
    changed.__defaults__ = (MISSING,) * (len(required) - len(by_name)) + (function.__defaults__ or ())
    changed.__kwdefaults__ = (function.__kwdefaults__ or {}) | by_name
    return function


def _refuse_unknown(function: Callable[..., Any], names: Iterable[str]) -> NoReturn:
    """Raise the error for keyword arguments that a function does not have."""
    name = next(iter(names))
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and not p.name.startswith("_")]
    called = getattr(function, "__name__", "")
    instead = _OWN.get(called, _INSTEAD)
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.upper(), known, n=1)
    if name in instead:
        fix = f"Write {instead[name]} instead."
    elif near:
        fix = f"Did you mean {near[0]}?"
    elif name in _NOT_OF_CALLS:
        fix = _NOT_OF_CALLS[name].format(function=called)
    else:
        fix = f"Its arguments are {', '.join(known)}."
    raise UnknownArgumentError(message(called, f"the keyword argument {name}", "one that it has", fix))


# It raises, because Dynamo cannot raise what a function returns after a graph break (torch 2.11).
refuse_unknown = uncompiled(
    _refuse_unknown,
    "it has no such keyword argument. Without torch.compile, the error names it and says what to write instead",
)
