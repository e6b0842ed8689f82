"""sinks: attention sinks, an additional term of each softmax sum without a value (Xiao et al., arXiv:2309.17453)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.call.arguments import as_float
from flexattn.call.wide_dtype import wide_dtype
from flexattn.errors import ArgumentError, DeviceError, DtypeError, message
from flexattn.torch_state.lasting import cached_on_device
from flexattn.torch_state.subclasses import check_plain
from flexattn.torch_state.transforms import outside


def check_sink(sink: object, query: Tensor, plain: bool = True) -> Tensor | None:
    """Return the sink as a differentiable tensor [B or 1, Hq or 1] of float32 (float64 for float64).

    `plain`: reject fake tensors and other subclasses.
    """
    if sink is None:
        return None
    wide = wide_dtype(query)
    if not isinstance(sink, Tensor):
        return _constant(number_of_sink(sink), wide, query.device)
    if plain:
        check_plain("sink", sink)
    B, Hq = query.shape[:2]
    if not sink.is_floating_point():
        raise DtypeError(message("sink", sink.dtype, "a floating dtype", "Convert it: sink.float()."))
    if sink.device != query.device:
        raise DeviceError(
            message("sink", sink.device, f"that of query, {query.device}", "Move it: sink.to(query.device).")
        )
    if sink.shape not in ((Hq,), (1, Hq), (B, Hq)):
        fix = "Give one number for each query head, or for each batch and query head."
        raise ArgumentError(message("sink", f"shape {list(sink.shape)}", f"[{Hq}] or [{B}, {Hq}]", fix))
    return sink.to(wide).view(-1, Hq)


def constant_sink(number: float, query: Tensor) -> Tensor:
    """Return a number as a sink of this query."""
    return _constant(number, wide_dtype(query), query.device)


def number_of_sink(sink: object) -> float:
    """Return a sink that is not a tensor as a number."""
    number = as_float("sink", sink, "a tensor or a number", "Pass sink=0.0 for softmax off by one.")
    if math.isnan(number) or number == math.inf:
        raise ArgumentError(message("sink", number, "a number below infinity", "Pass None for no sink."))
    return number


@cached_on_device
def _constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), outside():
        return torch.full((1, 1), number, device=device, dtype=dtype)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of a sink from lse and delta = d_lse - rowsum(out * d_out), both [B, Hq, M].

    The sink acts like a key whose value is 0.
    """
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(sink[..., None] - lse))
    return (weight * delta).sum(-1).sum_to_size(sink.shape).to(sink.dtype)


def weight_of_keys(sink: Tensor, lse: Tensor) -> Tensor:
    """Return an upper bound of the sum of a row's weights without the sink's weight, float32, 0-d, at most 1.

    The bound is tight up to the rounding of lse [B, Hq, M], which is 2**-15 if lse is 30.
    """
    rounding = 2.0**-20 * (1 + lse.abs())
    weights = rounding - torch.expm1(sink[..., None] - lse)
    return weights.nan_to_num(1.0).clamp(max=1.0).amax().float()
