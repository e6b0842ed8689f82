"""Dense attention in plain torch: the specification of flexattn's results, and the reference of its tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexattn.errors import DtypeError, message


def attention(
    query: Tensor,  # [B, Hq, M, D]
    key: Tensor,  # [B or 1, Hkv, N, D]
    value: Tensor,  # [B or 1, Hkv, N, Dv]
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    sink: Tensor | float | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # [B, Hq, M, Dv], [B, Hq, M]
    """Return the output and the logsumexp (natural logarithm), both in `dtype`.

    `mask_mod` is a function of (b, h, q_idx, kv_idx) or a bool tensor that broadcasts to [B, Hq, M, N]. With dtype
    None, matrix products use the dtype of the inputs. Everything between them, and lse, is at least float32.
    `sink` ([Hq], [B, Hq] or a number) adds a term to each row's sum of exponentials. Weights are multiplied by
    `dropout`, which broadcasts to [B, Hq, M, N].

    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> out, lse = attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    """
    dtype = dtype or query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    group = query.shape[1] // max(1, key.shape[1])
    query = query.to(dtype)
    key, value = (x.to(dtype).repeat_interleave(group, dim=1) for x in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    score = ((query @ key.mT) * scale).to(wide)  # [B, Hq, M, N]
    if score_mod is not None:
        score = over_all_pairs(score_mod, score.shape, score).to(wide)
    if mask_mod is not None:
        live = mask_mod if isinstance(mask_mod, Tensor) else over_all_pairs(mask_mod, score.shape, device=score.device)
        score = torch.where(live, score, -math.inf)
    if sink is not None:  # a key with value 0 that every row attends to
        sink = torch.as_tensor(sink, dtype=wide, device=score.device)
        score = torch.cat([score, sink[..., None, None].expand(*score.shape[:3], 1)], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    if value.shape[-2] == 0:
        return query.new_zeros((*score.shape[:3], value.shape[-1])), score.new_full(score.shape[:3], -math.inf)
    largest = score.detach().amax(-1, keepdim=True)
    weight = torch.exp(score - largest.masked_fill(largest == -math.inf, 0.0))
    total = weight.sum(-1, keepdim=True)
    empty = total == 0  # rows without an attended key
    total = total.masked_fill(empty, 1.0)
    lse = torch.where(largest == math.inf, largest, largest + total.log()).squeeze(-1)
    weight = weight / total
    if dropout is not None:
        weight = weight[..., : key.shape[-2]] * dropout.to(wide)
    return weight.to(dtype) @ value[..., : weight.shape[-1], :], lse


def over_all_pairs(
    mod: Callable[..., Any], shape: torch.Size, score: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Return mod(score, b, h, q_idx, kv_idx) over [B, H, M, N]. If score is None, the mod is called without it."""

    device = device if score is None else score.device
    if not callable(mod):
        name = "mask_mod" if score is None else "score_mod"
        fix = "Pass mask_mod=block_mask.mask_mod." if hasattr(mod, "mask_mod") else "Pass a function."
        raise DtypeError(message(name, f"a {type(mod).__name__}", "a function", fix))

    def scalar(*args: Tensor) -> Tensor:
        found = mod(*args)
        return found if isinstance(found, Tensor) else torch.as_tensor(found, device=device)

    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=device) if score is None else score
    indices = [torch.arange(n, dtype=torch.int64, device=device) for n in shape]
    for over in (3, 2, 1, 0):
        dims: list[int | None] = [0 if over == i else None for i in range(4)]
        scalar = torch.vmap(scalar, in_dims=tuple(dims if score is None else [0, *dims]))
    with IndexByTensor():
        return scalar(*indices) if score is None else scalar(score, *indices)


class IndexByTensor(TorchFunctionMode):
    """Keeps `table[h]` from converting a 0-d tensor to a Python int, which vmap does not support."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            source, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in index):
                return _index(source, index)
        return func(*args, **(kwargs or {}))


def _index(source: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return source[index]: first apply slices, numbers, None and ..., then all tensors at once."""
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        missing = source.ndim - sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    rest = source[tuple(slice(None) if isinstance(i, Tensor) else i for i in index)]
    kept = [i for i in index if not isinstance(i, int)]
    return torch.ops.aten.index(rest, [i if isinstance(i, Tensor) else None for i in kept])
