"""call: flex_attention as torch.compile traces it. Only attributes of the mask are read, and each mod is called once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.call.pose import autocast
from flexattn.compiled.given import option_texts
from flexattn.compiled.higher_order import VEHICLE
from flexattn.compiled.join import JOIN
from flexattn.compiled.spec import FORMAT


def traced_call(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool,
    kernel_options: Any, sink: Any, dropout_p: float, max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, lse and the row maxima, which are empty if not requested."""
    query, key, value = autocast(query, key, value)
    device = query.device
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    score = torch.empty((), dtype=dtype, device=device)
    places = [torch.empty((), dtype=torch.int64, device=device) for _ in range(4)]
    seed = torch.empty(1, dtype=torch.int64, device=device)
    seed = torch.ops.aten.random.default(seed) if dropout_p != 0.0 else None  # Dynamo does not trace random_
    lists, sizes, form, mask_mod = (), (), None, None
    if block_mask is not None:
        block_mask = block_mask if block_mask._prepared is not None else block_mask.prepare()  # a graph break
        lists, form, mask_mod = block_mask._prepared.tensors, block_mask._prepared.text, block_mask._mask_mod
        sizes = (*block_mask.seq_lengths, block_mask.B, block_mask.H)
    options = option_texts(kernel_options)
    sink_tensor, sink_number = (sink, None) if isinstance(sink, Tensor) else (None, sink)

    def body(query: Tensor, key: Tensor, value: Tensor, score: Tensor, *places: Tensor) -> Any:
        result = score if score_mod is None else score_mod(score, *places)
        keep = None if mask_mod is None else mask_mod(*places)
        return JOIN(
            _as_tensor(result, score), _as_tensor(keep, score), [score, *places], str(FORMAT),
            query, key, value, lists, sizes, form, scale, enable_gqa, options, sink_tensor, sink_number, dropout_p,
            seed, max_scores,
        )  # fmt: skip

    return VEHICLE(body, query, key, value, score, *places)


def _as_tensor(result: Any, score: Tensor) -> Any:
    """Return the result of a mod as a tensor; a mod may return a Python number."""
    return torch.full((), result, device=score.device) if isinstance(result, (bool, int, float)) else result
