"""unknown_arguments: what to write instead of the arguments of other attention functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from flexattn.errors import UnknownArgumentError, message
from flexattn.torch_state.uncompiled import uncompiled

_CAUSAL = "block_mask=create_block_mask(mods.causal, None, None, Q_LEN, KV_LEN)"
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
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _DENSE,
    "attn_bias": _DENSE,
    "attention_mask": _DENSE,
    "key_padding_mask": "block_mask=create_block_mask(mods.padding(lengths), B, None, Q_LEN, KV_LEN)",
    "mask_mod": "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
    "window_size": "block_mask=create_block_mask(mods.band(left, right), None, None, Q_LEN, KV_LEN)",
    "softcap": "score_mod=mods.softcap(cap)",
    "alibi_slopes": "score_mod=mods.distance_decay(alibi_slopes)",
    "softmax_scale": "scale",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "learnable_sink": "sink",
    "s_aux": "sink",
    "return_softmax_lse": _LSE,
    "return_attn_probs": "return_aux=AuxRequest(lse=True), as weights are never stored,",
    "cu_seqlens_q": "varlen_attn",
    "cu_seqlens_k": "varlen_attn",
    "deterministic": "torch.use_deterministic_algorithms(True)",
}
_OF_VARLEN = {
    "is_causal": "window_size=(-1, 0)",
    "causal": "window_size=(-1, 0)",
    "block_mask": "mask_mod=, whose q_idx and kv_idx are positions in the sequence,",
    "attn_mask": "mask_mod",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "page_table": "block_table",
    "return_lse": _LSE,
}
_OF_MASKS = {
    "is_causal": "create_block_mask(mods.causal, None, None, Q_LEN, KV_LEN)",
    "causal": "create_block_mask(mods.causal, None, None, Q_LEN, KV_LEN)",
    "window_size": "create_block_mask(mods.band(left, right), None, None, Q_LEN, KV_LEN)",
    "key_padding_mask": "create_block_mask(mods.padding(lengths), B, None, Q_LEN, KV_LEN)",
    "score_mod": "flex_attention(..., score_mod=score_mod)",
}
_OWN = {"varlen_attn": _INSTEAD | _OF_VARLEN, "create_block_mask": _OF_MASKS}
_NOT_OF_CALLS = {
    "return_lse": "Leave it out: {function} returns no output of attention.",
    "return_aux": "Leave it out: {function} returns no output of attention.",
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
}


def _refuse_unknown(function: Callable[..., Any], names: Iterable[str]) -> NoReturn:
    """Raise the error for keyword arguments that a function does not have."""
    name = next(iter(names))
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    called = getattr(function, "__name__", "")
    instead = _OWN.get(called, _INSTEAD)
    near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.upper(), known, n=1)
    if name in instead:
        fix = f"Write {instead[name]} instead."
    elif near:
        fix = f"Did you mean {near[0]}?"
    elif name in _NOT_OF_CALLS:
        fix = _NOT_OF_CALLS[name].format(function=called)
    elif called not in ("flex_attention", "create_block_mask"):
        fix = f"Leave it out: its arguments are {', '.join(known)}."
    else:
        fix = "Leave it out."
    raise UnknownArgumentError(message(called, f"the keyword argument {name}", "one that it has", fix))


# It raises, because Dynamo cannot raise what a function returns after a graph break (torch 2.11).
refuse_unknown = uncompiled(
    _refuse_unknown,
    "it has no such keyword argument. Without torch.compile, the error names it and says what to write instead",
)
