"""How large the terms of each gradient are: where they cancel, their rounding is what is left."""

from __future__ import annotations

import math

import torch
from kernel_cases import given
from torch import Tensor

from flexattn.reference import over_all_pairs
from fuzz.compare import Posed, Results

_SAMPLES = 3


def sizes_of_terms(posed: Posed, exact: Results) -> dict[str, Tensor]:
    """Return, for each gradient, the sum of the absolute values of its terms, in float64.

    A term is p (dO v^T - delta) times the derivatives of the score; p carries the rounding of its exponent too.
    """
    call, case, out, lse = posed.call, posed.case, exact["out"], exact["lse"]
    assert out is not None and lse is not None
    d_out, d_lse = given(call, out, lse)
    key, value = (x.detach().double().repeat_interleave(case.group, 1).abs() for x in (call.key, call.value))
    scale = case.D**-0.5 if call.scale is None else call.scale
    plain = (call.query.detach().double() @ call.key.detach().double().repeat_interleave(case.group, 1).mT) * scale
    with torch.enable_grad():
        plain.requires_grad_()
        score = plain if call.score_mod is None else over_all_pairs(call.score_mod, plain.shape, plain)
        live = score.detach() if call.mask_mod is None else torch.where(call.mask_mod, score.detach(), -math.inf)
        p = torch.exp(live - lse[..., None].masked_fill(lse[..., None] == -math.inf, 0.0))
        delta = (out.abs() * d_out.abs()).sum(-1, keepdim=True) + d_lse.abs()[..., None] * case.lse_gradient
        kept = 1.0 if case.dropout_p in (0.0, 1.0) else 1.0 / (1.0 - case.dropout_p)
        terms = p * (1 + live.nan_to_num(0.0, 0.0, 0.0).abs()) * (kept * d_out.double().abs() @ value.mT + delta)
        slope = _derivatives(score, [plain], torch.ones_like(terms))[0].abs()
        learned = [x for x in call.learned if x.requires_grad]
        samples = [torch.ones_like(terms), *(_signs(terms, n) for n in range(_SAMPLES))]
        captured = [_derivatives(score, learned, terms * sign) for sign in samples]
    ds = (terms * slope).nan_to_num(0.0, 0.0, 0.0) * abs(scale)
    sizes = {"dq": ds @ key}
    sizes["dk"] = _of_keys(ds.mT @ call.query.detach().double().abs(), call.key)
    sizes["dv"] = _of_keys(kept * p.mT @ d_out.double().abs(), call.value)
    for i, x in enumerate(call.learned):
        at = next((n for n, y in enumerate(learned) if y is x), None)
        if at is not None:
            sizes[f"d(capture {i})"] = torch.stack([found[at].double().abs() for found in captured]).amax(0)
    return sizes


def _signs(like: Tensor, seed: int) -> Tensor:
    """Return random signs: derivatives of either sign do not cancel in a sum of them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like)


def _derivatives(score: Tensor, of: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the gradients of the weighted sum of all finite scores."""
    if not score.requires_grad or not of:
        return [torch.zeros_like(x) for x in of]
    weights = torch.where(score.isfinite(), weights, 0.0)
    found = torch.autograd.grad(score, of, weights.to(score.dtype), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)]


def _of_keys(x: Tensor, like: Tensor) -> Tensor:
    """Sum what is there for each query head over the groups, and over the batch where keys are shared."""
    grouped = x.unflatten(1, (like.shape[1], -1)).sum(2)
    return grouped if like.shape[0] == x.shape[0] else grouped.sum(0, keepdim=True)
