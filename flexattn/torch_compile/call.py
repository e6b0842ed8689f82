"""call: flex_attention as torch.compile traces it.

Only attributes of the mask are read, and each mod is called once, on 0-d placeholder tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.layout import LayoutArguments, paged
from flexattn.call.pose import autocast
from flexattn.call.ready_heads import heads_of
from flexattn.call.varlen.arguments import batch_of_rows, rows_of_batch
from flexattn.call.wide_dtype import wide_dtype
from flexattn.torch_compile.call_arguments import option_texts
from flexattn.torch_compile.call_marker import CALL_MARKER
from flexattn.torch_compile.graph_break import call_in_a_transform, call_with_graph_break, prepared, refused
from flexattn.torch_compile.sequence_form import described
from flexattn.torch_compile.torch_mask import torch_mask

try:
    import numpy

    _NUMPY: tuple[type, ...] = (numpy.ndarray, numpy.generic)
except ImportError:
    _NUMPY = ()


# Dynamo of torch 2.11 cannot ask a function that is defined in a graph for its module.
_READS_ATTRIBUTES = torch.__version__ >= "2.13"  # a TorchVersion, which compares numbers


def traced_call(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool,
    kernel_options: Any, sink: Any, dropout_p: float, max_scores: bool, layout: Any = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return out, lse and, if requested, the row maxima."""
    # It imports Dynamo, which takes a second. Dynamo itself runs this import while it traces the call.
    from flexattn.torch_compile.higher_order import HOP, REVISION

    in_a_transform = torch._C._are_functorch_transforms_active()
    if HOP is None or in_a_transform:
        return (call_in_a_transform if in_a_transform else call_with_graph_break)(
            query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink, dropout_p, max_scores,
            layout,
        )  # fmt: skip
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    if isinstance(layout, LayoutArguments):
        key, value = paged(key, value, layout)
        layout = LayoutArguments(*layout[:4], "NHD" if layout.block_table is None else "HND", *layout[5:])
    device = query.device
    dtype = wide_dtype(query)
    score = torch.empty((), dtype=dtype, device=device)
    indices = [torch.empty((), dtype=torch.int64, device=device) for _ in range(4)]
    seed = None
    if dropout_p != 0.0:  # Dynamo does not trace random_
        seed = torch.ops.aten.random.default(torch.empty(1, dtype=torch.int64, device=device))
    lists, sizes, form, mask_mod = (), (), None, None if layout is None else layout.mask_mod
    if block_mask is not None:
        if not isinstance(block_mask, upstream.BlockMask):
            refused(block_mask)
        if not isinstance(block_mask, BlockMask):
            lists, sizes, form = torch_mask(block_mask)
            mask_mod = block_mask.mask_mod
        else:
            if block_mask._prepared is None:
                block_mask = prepared(block_mask)
            ready: Any = block_mask._prepared
            lists, form = ready.tensors, ready.text
            sizes = (*block_mask.seq_lengths, block_mask.B, block_mask.H)
            mask_mod = block_mask._mask_mod
    options = option_texts(kernel_options)
    ready: Any = heads_of(score_mod) if _READS_ATTRIBUTES else ([], [], None)
    scale = _without_numpy(scale)

    def body(query: Tensor, key: Tensor, value: Tensor, score: Tensor, *indices: Tensor) -> Any:
        result = score if score_mod is None else score_mod(score, *indices)
        keep = None if mask_mod is None else mask_mod(*indices)
        is_tensor = isinstance(sink, Tensor)
        wrong = _wrong("score", score_mod, result) + _wrong("mask", mask_mod, keep)
        return tuple(CALL_MARKER(  # in the order of _FIELDS in call_marker.py
            _as_tensor(result, score), _as_tensor(keep, score), [score, *indices], wrong, *ready, REVISION,
            query, key, value, lists, sizes, form, scale, enable_gqa, options, sink if is_tensor else None,
            None if is_tensor else _without_numpy(sink), dropout_p, seed, max_scores,
            *described(layout, isinstance(block_mask, BlockMask)),
        ))  # fmt: skip

    out, lse, *largest = HOP(body, query, key, value, score, *indices)
    return out, lse, largest[0] if max_scores else None


def traced_rows(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return out [T_q, Hq, Dv] and lse [Hq, T_q] of packed sequences, whose query, key and value are [rows, H, D]."""
    out, lse, _ = traced_call(batch_of_rows(query), batch_of_rows(key), batch_of_rows(value), *arguments)
    return rows_of_batch(out), lse.squeeze(0)


def _without_numpy(number: Any) -> Any:
    """Return a number of numpy, which Dynamo passes as an array, as a float."""
    return float(number) if _is_number_of_numpy(number) else number


def _is_number_of_numpy(value: Any) -> bool:
    return isinstance(value, _NUMPY) and value.ndim == 0


def _wrong(kind: str, mod: Any, result: Any) -> list[str]:
    """Return the kind of a mod and the type of its result, if that is neither a tensor nor a number."""
    if mod is None or isinstance(result, (Tensor, bool, int, float)) or _is_number_of_numpy(result):
        return []
    return [kind, "ndarray" if isinstance(result, _NUMPY) else type(result).__name__]


def _as_tensor(result: Any, score: Tensor) -> Any:
    """Return the result of a mod as a tensor; a mod may return a Python number. None: it is neither."""
    if isinstance(result, (bool, int, float)):
        return torch.full((), result, device=score.device)
    if _is_number_of_numpy(result):
        return torch.as_tensor(result, device=score.device)
    return result if isinstance(result, Tensor) else None
