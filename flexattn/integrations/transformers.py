"""transformers: flexattn as an attention implementation of Hugging Face's transformers.

`register()` adds it under a name. Models then take `attn_implementation="flexattn"`. Written against transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.api import flex_attention
from flexattn.block_mask import BlockMask
from flexattn.errors import DtypeError, message
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import shifted
from flexattn.mods.causal import causal

Mod = Callable[..., Any]


def register(name: str = "flexattn") -> None:
    """Let models of transformers use flexattn: `AutoModel.from_pretrained(..., attn_implementation="flexattn")`.

    It covers dense batches with causal, sliding, chunked, packed and bidirectional masks, padding, grouped heads,
    softcap, attention sinks, position biases and dropout. Attention weights are not returned.

    Args:
        name: the name of the implementation.

    Raises ImportError if transformers is not installed.

    Example:
        >>> from flexattn.integrations import transformers
        >>> transformers.register()  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flexattn")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # type: ignore[import-not-found]

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, mask_function: Mod = causal,
    attention_mask: Tensor | None = None, device: torch.device | str = "cpu", **_: Any,
) -> BlockMask:  # fmt: skip
    """Return the mask of a forward of a model. transformers calls it once per forward and kind of layer.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: position of the first query and key in the sequence.
        mask_function: mask_mod of positions in the sequence.
        attention_mask: bool [batch_size, keys in the sequence], false for padding.
        device: of the model.
    """
    keys = None if attention_mask is None else _padded(attention_mask, kv_offset + kv_length)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return found if keys is None else found & keys[b, kv_idx + kv_offset]

    return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device=device)


def _padded(attention_mask: Tensor, length: int) -> Tensor:
    """Return the mask of keys as bool of some length. Keys after the end are not yet written, and never attended."""
    keys = attention_mask.bool()
    return torch.nn.functional.pad(keys, (0, length - keys.shape[1])) if keys.shape[1] < length else keys


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the attention of one layer.

    Args:
        module: the layer. Its `is_causal` applies where there is no mask, and dropout only in training.
        query, key, value: [B, H, rows, D], with fewer heads of keys and values.
        attention_mask: from `mask`, PyTorch's BlockMask, or dense [B, 1 or H, queries, keys], bool or to be added.
        scaling: factor of the scores.
        dropout: fraction of the weights that is dropped.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: attention sinks, [H].
        position_bias: [1 or B, H, queries, keys], added to the scores.
        is_causal: overrides that of the module.

    Returns:
        The output [B, queries, H, D], and None in place of the weights.
    """
    block_mask, added = None, None
    if isinstance(attention_mask, upstream.BlockMask):
        block_mask = attention_mask
    elif isinstance(attention_mask, Tensor):
        added = attention_mask[..., : key.shape[2]]
    elif attention_mask is not None:
        fix = "Pass a BlockMask or a tensor."
        raise DtypeError(message("attention_mask", f"a {type(attention_mask).__name__}", "a mask", fix))
    elif (getattr(module, "is_causal", False) if is_causal is None else is_causal) and query.shape[2] > 1:
        block_mask = _causal(query, key)
    score_mod = _score_mod(softcap, position_bias, added)
    out = flex_attention(
        query, key, value, score_mod, block_mask, scaling, enable_gqa=True, sink=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor) -> BlockMask:
    """Return the causal mask whose last query is at the last key."""
    M, N = query.shape[2], key.shape[2]
    mod = causal if M == N else shifted(causal, N - M)
    return create_block_mask(mod, None, None, M, N, device=query.device)


def _score_mod(softcap: float | None, bias: Tensor | None, added: Tensor | None) -> Mod | None:
    """Return the score_mod of a layer, None if it changes nothing."""
    if softcap is None and bias is None and added is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b if bias.shape[0] > 1 else 0, h, q_idx, kv_idx]
        if added is not None:
            element = added[b if added.shape[0] > 1 else 0, h if added.shape[1] > 1 else 0, q_idx, kv_idx]
            score = torch.where(element, score, -float("inf")) if added.dtype == torch.bool else score + element
        return score

    return score_mod
