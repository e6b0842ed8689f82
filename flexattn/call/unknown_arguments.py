"""unknown_arguments: what to write instead of the arguments of other attention functions."""

from __future__ import annotations

from collections.abc import Iterable

from flexattn.errors import UnknownArgumentError, message

_CAUSAL = "block_mask=create_block_mask(mods.causal, None, None, Q_LEN, KV_LEN)"
_DENSE = (
    "block_mask=create_block_mask(lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx], ...), or add floats in a score_mod,"
)
# The arguments of scaled_dot_product_attention, FlashAttention and xformers, and frequent mistakes.
_INSTEAD = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _DENSE,
    "attn_bias": _DENSE,
    "mask_mod": "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
    "window_size": "block_mask=create_block_mask(mods.band(left, right), None, None, Q_LEN, KV_LEN)",
    "softcap": "score_mod=mods.softcap(cap)",
    "alibi_slopes": "score_mod=mods.distance_decay(alibi_slopes)",
    "softmax_scale": "scale",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "learnable_sink": "sink",
    "s_aux": "sink",
    "return_softmax_lse": "return_aux=AuxRequest(lse=True)",
    "return_attn_probs": "return_aux=AuxRequest(lse=True), as weights are never stored,",
    "cu_seqlens_q": "varlen_attn",
    "cu_seqlens_k": "varlen_attn",
    "deterministic": "torch.use_deterministic_algorithms(True)",
}


def unknown_arguments(names: Iterable[str]) -> UnknownArgumentError:
    """Return the error for keyword arguments that flex_attention does not have."""
    name = next(iter(names))
    fix = f"Write {_INSTEAD[name]} instead." if name in _INSTEAD else "Leave it out."
    return UnknownArgumentError(message("flex_attention", f"the keyword argument {name}", "one that it has", fix))
