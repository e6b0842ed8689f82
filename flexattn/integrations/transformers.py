"""transformers: flexattn as an attention implementation of Hugging Face's transformers.

`register()` adds it under a name. Models then take `attn_implementation="flexattn"`. Written against transformers 5.24.

transformers calls `mask` once per forward and kind of layer, and `attention` in each layer with its result. A mask of
many queries is a BlockMask, so that empty blocks are skipped. A mask of few queries, as in a step of decoding, is a
dense tensor that a score_mod reads: it is cheaper than its block lists, and the next step needs no new trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.api import flex_attention
from flexattn.block_mask import BlockMask
from flexattn.errors import ArgumentError, DtypeError, UnsupportedError, message
from flexattn.graph.nodes import short_dtype
from flexattn.mask_build.create import create_block_mask
from flexattn.mods import shifted
from flexattn.mods.causal import causal

Mod = Callable[..., Any]
_FEW_QUERIES = 16


def register(name: str = "flexattn") -> None:
    """Let models of transformers use flexattn: `AutoModel.from_pretrained(..., attn_implementation="flexattn")`.

    It covers causal, sliding, chunked, packed and bidirectional masks, padding, dynamic and static caches, grouped
    heads, softcap, attention sinks, position biases and dropout. Attention weights are not returned.

    Args:
        name: the name of the implementation.

    Raises ImportError if transformers is not installed.

    Example:
        >>> from flexattn.integrations import transformers
        >>> transformers.register()  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flexattn")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__  # type: ignore
    from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        found, fix = f"version {__version__}", "Upgrade it: pip install -U transformers."
        raise UnsupportedError(message("transformers", found, "one whose masks take q_offset, as 5.24", fix))
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, mask_function: Mod = causal,
    attention_mask: Tensor | None = None, device: torch.device | str = "cpu", use_vmap: bool = False,
    local_size: int | None = None, allow_is_causal_skip: bool = False, allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> BlockMask | Tensor | None:  # fmt: skip
    """Return the mask of a forward of a model. transformers calls it once per forward and kind of layer.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: position of the first query and key in the sequence. A static cache passes the first as a
            tensor.
        mask_function: mask_mod of positions in the sequence.
        attention_mask: bool [batch_size, keys in the sequence], false for padding.
        device: of the model.
        use_vmap: whether mask_function needs scalars, and not tensors of positions.
        local_size: length of the window or chunk, None if keys of any distance are attended.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether mask_function is no more than causal, or all true.

    Returns:
        A BlockMask. None for one query that attends to all keys. For few queries, and in a graph that is compiled,
        where a BlockMask cannot be built: bool [batch_size, 1, q_length, kv_length].
    """
    if torch.compiler.is_compiling() or q_length <= _FEW_QUERIES:  # in this order: a comparison is a guard
        from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]

        one = q_length == 1  # a mask of more queries that transformers skips is causal from the top left
        return sdpa_mask(  # by name: the order of its parameters differs between versions of transformers
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=one and allow_is_causal_skip,
            allow_is_bidirectional_skip=one and allow_is_bidirectional_skip, use_vmap=use_vmap, device=device,
        )  # fmt: skip
    length, first_query = kv_offset + kv_length, int(q_offset)  # the cache changes its tensor in place
    keys = None if attention_mask is None else _padded(attention_mask, length)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = kv_idx + kv_offset
        found = mask_function(b, h, q_idx + first_query, key)
        if keys is None:
            return found
        return found & (keys[b, key] if isinstance(keys, Tensor) else key < keys)

    return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device=device)


def _padded(attention_mask: Tensor, length: int) -> Tensor | int | None:
    """Return which of `length` keys are attended: a bool per sequence and key, a number if it is the first so many.

    None stands for all. Keys after the end of attention_mask are not written yet.
    """
    keys = attention_mask.bool()
    known = keys.shape[1]
    if keys.all():  # The mask then has no captured tensor, and its lists come from a cache.
        return None if known >= length else known
    return torch.nn.functional.pad(keys, (0, length - known)) if known < length else keys


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, is_causal: bool | None = None, output_attentions: bool | None = None,
    kernel_options: Mapping[str, object] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the attention of one layer.

    Args:
        module: the layer. Its `is_causal` applies where there is no mask, and dropout only in training.
        query, key, value: [B, H, rows, D], with fewer heads of keys and values.
        attention_mask: from `mask`, PyTorch's BlockMask, or dense [B or 1, H or 1, queries or 1, keys], bool or to be
            added.
        scaling: factor of the scores.
        dropout: fraction of the weights that is dropped.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: attention sinks, [H].
        position_bias: [1 or B, H, queries, keys], added to the scores.
        is_causal: overrides that of the module.
        output_attentions: must not be true.
        kernel_options: see FlexKernelOptions. Models pass it on: `model(tokens, kernel_options={...})`.

    Returns:
        The output [B, queries, H, D], and None in place of the weights.
    """
    if output_attentions:
        fix = 'Load the model with attn_implementation="eager" to see the weights.'
        raise UnsupportedError(message("output_attentions", "True", "False: weights are never stored", fix))
    block_mask, dense = None, None
    if isinstance(attention_mask, upstream.BlockMask):
        block_mask = attention_mask
    elif attention_mask is not None:
        dense = _dense(attention_mask, query, key)
    elif (getattr(module, "is_causal", False) if is_causal is None else is_causal) and query.shape[2] > 1:
        block_mask, dense = _causal(query, key)
    out = flex_attention(
        query, key, value, _score_mod(softcap, position_bias, dense), block_mask, scaling, enable_gqa=True,
        kernel_options=kernel_options, sink=s_aux, dropout_p=dropout if module.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _dense(attention_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask of 4 dimensions without the columns after the last key."""
    if not isinstance(attention_mask, Tensor):
        fix = "Pass a BlockMask or a tensor."
        raise DtypeError(message("attention_mask", f"a {type(attention_mask).__name__}", "a mask", fix))
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        fix = "Write attention_mask.bool() if 1 means that a key is attended."
        raise DtypeError(message("attention_mask", short_dtype(attention_mask.dtype), "bool or a float to add", fix))
    sizes = (*query.shape[:3], key.shape[2])
    found = attention_mask[..., : sizes[3]] if attention_mask.dim() == 4 else attention_mask
    fits = found.dim() == 4 and found.shape[3] == sizes[3]
    if not fits or any(n != 1 and n != size for n, size in zip(found.shape, sizes, strict=True)):
        fix = "Give it the sizes of query and key, or 1 for the same in all batches, heads or queries."
        expected = f"[{sizes[0]}, {sizes[1]}, {sizes[2]}, {sizes[3]}] or 1 in the first three"
        raise ArgumentError(message("attention_mask", f"shape {list(attention_mask.shape)}", expected, fix))
    return found


def _causal(query: Tensor, key: Tensor) -> tuple[BlockMask | None, Tensor | None]:
    """Return the causal mask whose last query is at the last key; dense in a graph that is compiled."""
    M, N = query.shape[2], key.shape[2]
    if torch.compiler.is_compiling():
        every = torch.ones(M, N, dtype=torch.bool, device=query.device)
        return None, every.tril(N - M)[None, None]
    mod = causal if M == N else shifted(causal, N - M)
    return create_block_mask(mod, None, None, M, N, device=query.device), None


def _score_mod(softcap: float | None, bias: Tensor | None, dense: Tensor | None) -> Mod | None:
    """Return the score_mod of a layer, None if it changes nothing."""
    if softcap is None and bias is None and dense is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + _element(bias, b, h, q_idx, kv_idx)
        if dense is not None:
            element = _element(dense, b, h, q_idx, kv_idx)
            score = torch.where(element, score, -float("inf")) if dense.dtype == torch.bool else score + element
        return score

    return score_mod


def _element(table: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the element of a pair. Dimensions of size 1 are the same for all."""
    indices = (b, h, q_idx)
    first = tuple(i if n > 1 else 0 for i, n in zip(indices, table.shape[:3], strict=True))
    return table[(*first, kv_idx)]
