"""merge: attention over a set of keys from the results over parts of it.

Users call it on the results of several calls. It is not part of flex_attention, whose kernel MERGE_SPLITS merges the
splits of one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.errors import ArgumentError, DeviceError, DtypeError, message

_OUTS = "Pass the outputs of flex_attention over each part of the keys."
_LSES = "Pass their lse, from return_aux=AuxRequest(lse=True)."


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention over all keys, from those over disjoint parts of the keys.

    Args:
        outs: one output [B, Hq, M, Dv] for each part, all of one dtype and device.
        lses: the logsumexp [B, Hq, M] of each part, natural logarithm, float32 or float64. A row without keys in a part
            has lse -inf there, and its out is ignored.

    Returns:
        out [B, Hq, M, Dv] in the dtype of `outs` and lse [B, Hq, M] in that of `lses`. Rows without keys in any part
        are 0, and their lse is -inf. Both are differentiable. A sink belongs to one of the parts only.

    Raises:
        ArgumentError if the numbers or shapes of `outs` and `lses` do not match, DtypeError if they are not
        lists of tensors of one dtype, DeviceError if their devices differ.

    Example:
        >>> import torch, flexattn
        >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
        >>> request = flexattn.AuxRequest(lse=True)
        >>> whole, _ = flexattn.flex_attention(q, k, v, return_aux=request)
        >>> parts = [flexattn.flex_attention(q, k[:, :, s], v[:, :, s], return_aux=request)
        ...          for s in (slice(0, 3), slice(3, 8))]
        >>> out, lse = flexattn.merge_attention([o for o, _ in parts], [aux.lse for _, aux in parts])
        >>> torch.allclose(out, whole, atol=1e-5)
        True

    Source: Dao et al., Flash-Decoding (2023); the merge is that of online softmax (Milakov and Gimelshein, 2018).
    """
    _check(outs, lses)
    stacked = torch.stack(tuple(lses))  # [parts, B, Hq, M]
    top = stacked.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -torch.inf, top + total.log())
    lse = torch.where(top == torch.inf, top, lse)  # a score of +inf: out is NaN
    merged = torch.zeros((), dtype=lse.dtype, device=lse.device)
    for part, (out, weight) in enumerate(zip(outs, weights, strict=True)):
        share = torch.where(stacked[part] == -torch.inf, 0.0, weight / total)[..., None]
        kept = torch.where(stacked[part][..., None] == -torch.inf, 0.0, out.to(lse.dtype))
        merged = merged + share * kept
    return merged.to(outs[0].dtype), lse


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, parts, fix in (("outs", outs, _OUTS), ("lses", lses, _LSES)):
        if not isinstance(parts, (list, tuple)) or not all(isinstance(x, Tensor) for x in parts):
            found = f"a {type(parts).__name__}" if not isinstance(parts, (list, tuple)) else "other objects"
            raise DtypeError(message(name, found, "a list of tensors", fix))
    if not outs:
        raise ArgumentError(message("outs", "no tensor", "at least one", _OUTS))
    if len(outs) != len(lses):
        raise ArgumentError(message("lses", f"{len(lses)} tensors", f"as many as outs, {len(outs)}", _LSES))
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x in (("outs", out), ("lses", lse)):
            if x.device != outs[0].device:
                expected = f"that of outs[0], {outs[0].device}"
                raise DeviceError(message(f"{name}[{i}]", f"device {x.device}", expected, "Move it."))
        if out.shape != outs[0].shape:
            expected = f"that of outs[0], {tuple(outs[0].shape)}"
            raise ArgumentError(message(f"outs[{i}]", f"shape {tuple(out.shape)}", expected, _OUTS))
        if lse.shape != out.shape[:-1]:
            expected = f"that of outs[{i}] without its last dim, {tuple(out.shape[:-1])}"
            raise ArgumentError(message(f"lses[{i}]", f"shape {tuple(lse.shape)}", expected, _LSES))
        if not out.is_floating_point():
            raise DtypeError(message(f"outs[{i}]", out.dtype, "a floating-point dtype", _OUTS))
        if out.dtype != outs[0].dtype:
            raise DtypeError(message(f"outs[{i}]", out.dtype, f"that of outs[0], {outs[0].dtype}", "Cast it."))
        if lse.dtype not in (torch.float32, torch.float64) or lse.dtype != lses[0].dtype:
            raise DtypeError(message(f"lses[{i}]", lse.dtype, "float32 or float64, the same for all", _LSES))
