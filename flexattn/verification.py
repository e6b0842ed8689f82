"""verification: verify, which compares sampled rows of a call and of its gradients with float64.

The mods are called as Python functions, under vmap: nothing of the tracer, the compiler and the kernels is used for the
expected values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.api import AuxRequest, flex_attention
from flexattn.block_mask import BlockMask
from flexattn.block_mask.dense import dense_blocks
from flexattn.block_mask.from_torch import from_torch
from flexattn.call.call import Mod
from flexattn.call.pose import autocast
from flexattn.call.unknown_arguments import refuse_unknown
from flexattn.call.validate import check_tensors
from flexattn.errors import ArgumentError, DtypeError, UnsupportedError, message
from flexattn.options import option
from flexattn.process.frozen_class import frozen
from flexattn.reference import IndexByTensor
from flexattn.torch_state.uncompiled import uncompiled

_FACTOR = 3.0  # allowed error relative to that of a dense computation of the same rows in the same dtype
_ULPS = 4.0  # allowed in any case, of what rounding affects
_TF32 = 2.0**-10  # eps of products of float32, if torch allows TF32
_LSE_ERROR = 2.0**-10  # relative error of a weight, from that of the lse of the call, from which lse is computed again
_PAIRS = 2**20  # at a time
_APPROXIMATION = 2.0**-11  # of tanh.approx in half precision on GPUs (PTX ISA)


@frozen
class Comparison:
    """The sampled row of one result whose error is largest relative to the bound of this row."""

    name: str  # out, lse, dq, dk or dv
    error: float
    bound: float
    at: tuple[int, ...]  # batch, head and row
    nan_rows: int = 0  # sampled rows with NaN in the same elements as float64, which are no errors

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound, and with it those of all sampled rows. It is not if it is NaN."""
        return self.error <= self.bound


@frozen
class Verification:
    """What `verify` found. It is true if all errors are within their bounds, and prints as a table."""

    comparisons: tuple[Comparison, ...]

    def __bool__(self) -> bool:
        return all(c.passed for c in self.comparisons)

    def __str__(self) -> str:
        lines = [f"{'':4}  {'error':>9}  {'bound':>9}  batch, head, row of the largest error / bound"]
        for c in self.comparisons:
            verdict = "" if c.passed else "  TOO LARGE"
            if c.nan_rows:
                verdict += f"  {c.nan_rows} row{'s are' if c.nan_rows > 1 else ' is'} NaN in both"
            lines.append(f"{c.name:4}  {c.error:9.2e}  {c.bound:9.2e}  {', '.join(map(str, c.at))}{verdict}")
        return "\n".join(lines)


class _Call(NamedTuple):
    """A call, its results, and which pairs attend."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Mod | None
    mask: BlockMask | None
    scale: float
    out: Tensor
    lse: Tensor
    d_out: Tensor | None  # None: gradients are not compared
    blocks: tuple[Tensor, Tensor] | None  # partial and full, bool [B, H, blocks, blocks]
    approximation: float  # relative error of tanh and similar functions of score_mod (docs/limits.md)

    @property
    def group(self) -> int:
        """The query heads that share a key head."""
        return self.query.size(1) // self.key.size(1)

    def precisions(self, dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
        """Return the dtype of scores computed in `dtype`, and eps of the call's own dtype and of that of its scores."""
        own = self.query.dtype
        if own == torch.float32 and self.query.is_cuda and torch.backends.cuda.matmul.allow_tf32:
            return _wide(dtype), _TF32, _TF32
        return _wide(dtype), torch.finfo(own).eps, torch.finfo(_wide(own)).eps

    @property
    def least(self) -> float:
        """What may be lost of a number that is too small for all bits of its dtype, or that a device takes for 0."""
        own, wide = (torch.finfo(d) for d in (self.query.dtype, _wide(self.query.dtype)))
        return own.tiny * own.eps + wide.tiny / wide.eps


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@uncompiled
def verify(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    rows: int = 32,
    gradients: bool = True,
    seed: int = 0,
    **unknown: Never,
) -> Verification:
    """Run a call, and its backward with a random gradient of the output, and compare sampled rows with float64.

    Sampled are rows of query for out, lse and dq, and rows of key for dk and dv, among them the first and the last, and
    those with the largest element, or NaN, of each result. A row costs as much as one row of attention in plain torch.
    The error of a row may be 3 times that of a dense computation of this row in the same dtype, whose scores are at
    least float32, and a few units in the last place of what it is computed from. The row with the largest error
    relative to its bound is shown. Blocks of block_mask decide what is skipped, as in the call.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options: as in flex_attention.
        rows: how many rows of query and of key are sampled, besides those with the largest elements. At least 1.
        gradients: whether to compare the gradients of query, key and value too.
        seed: of the sampled rows and of the gradient of the output.

    Returns:
        A Verification, which is true if everything is within its bounds. `print` shows the errors, and how many rows
        are NaN both in the call and in float64, as with NaN in query.

    Raises:
        What flex_attention raises, ArgumentError for other `rows`, ArgumentError or DtypeError for other seeds, and
        DeviceError or UnsupportedError for tensors without values and nested tensors.

    Example:
        >>> import torch
        >>> import flexattn
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
        >>> bool(verify(q, k, v, flexattn.mods.softcap(20.0), mask))
        True
    """
    if unknown:
        refuse_unknown(verify, unknown)
    if type(rows) is not int or rows < 1:
        raise ArgumentError(message("rows", repr(rows), "an int from 1 on", "Leave it out, for 32 rows."))
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise DtypeError(message("seed", repr(seed), "an int", "Leave it out, for 0."))
    if not -(2**63) <= seed < 2**64:
        raise ArgumentError(message("seed", seed, "an int of 64 bits", "Leave it out, for 0."))
    if getattr(query, "is_nested", False):
        fix = "Verify a call with the tensors of one sequence, [1, H, length, D]."
        raise UnsupportedError(message("query", "a nested tensor", "a dense tensor", fix))
    query, key, value = check_tensors(*autocast(query, key, value), enable_gqa)  # as the call
    with torch.inference_mode(False), torch.autocast(query.device.type, enabled=False):
        return _verified(
            query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, rows, gradients, int(seed)
        )  # fmt: skip


def _verified(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, block_mask: BlockMask | upstream.BlockMask | None,
    scale: float | None, enable_gqa: bool, kernel_options: Mapping[str, object] | None, rows: int, gradients: bool,
    seed: int,
) -> Verification:  # fmt: skip
    generator = torch.Generator("cpu").manual_seed(seed)
    inputs = (x.clone() if x.is_inference() else x.detach() for x in (query, key, value))
    q, k, v = (x.requires_grad_(gradients) for x in inputs)
    with torch.set_grad_enabled(gradients):
        out, aux = flex_attention(
            q, k, v, score_mod, block_mask, scale, enable_gqa, kernel_options=kernel_options,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        found, d_out = {"out": out.detach(), "lse": aux.lse.detach()}, None
        if gradients:
            d_out = torch.randn(out.shape, generator=generator, device="cpu").to(out)
            of_inputs = torch.autograd.grad(out, (q, k, v), d_out)
            found |= dict(zip(("dq", "dk", "dv"), of_inputs, strict=True))
    mask = from_torch(block_mask) if type(block_mask) is upstream.BlockMask else block_mask
    assert mask is None or isinstance(mask, BlockMask)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    call = _Call(
        q.detach(), k.detach(), v.detach(), score_mod, mask, scale, found["out"], found["lse"], d_out,
        None if mask is None else dense_blocks(mask), _approximation(query, score_mod, kernel_options),
    )  # fmt: skip
    of_queries = {name: found[name] for name in (("out", "lse", "dq") if gradients else ("out", "lse"))}
    comparisons = _compared(of_queries, call, _sample(query, of_queries, rows, generator), _row_of_query)
    if gradients:
        of_keys = {name: found[name] for name in ("dk", "dv")}
        comparisons += _compared(of_keys, call, _sample(key, of_keys, rows, generator), _row_of_key)
    return Verification(comparisons)


def _approximation(query: Tensor, score_mod: Mod | None, options: Mapping[str, object] | None) -> float:
    exact = score_mod is None or option(tuple((options or {}).items()), "EXACT", "fwd") is True
    return 0.0 if exact or not query.is_cuda or query.dtype.itemsize != 2 else _APPROXIMATION


def _sample(
    tensor: Tensor, found: Mapping[str, Tensor], rows: int, generator: torch.Generator
) -> list[tuple[int, int, int]]:
    """Return (batch, head, row) of sampled rows of [B, H, rows, D], among them the first, the last and the largest."""
    B, H, n = tensor.shape[:3]
    if 0 in (B, H, n):
        return []
    sizes = (B, H, n)
    drawn = [torch.randint(size, (max(rows - 2, 0),), generator=generator, device="cpu") for size in sizes]
    corners = [(0, 0, 0), (B - 1, H - 1, n - 1)][:rows]
    largest = [_largest(x if name == "lse" else x.abs()) for name, x in found.items()]  # lse may be -inf
    return list(dict.fromkeys((*corners, *largest, *((b, h, i) for b, h, i in torch.stack(drawn, 1).tolist()))))


def _largest(x: Tensor) -> tuple[int, int, int]:
    """Return batch, head and row of the first NaN, or else of the largest element."""
    b, h, i = (int(index) for index in torch.unravel_index(x.argmax(), x.shape)[:3])
    return b, h, i


class _Value(NamedTuple):
    """A row of a result."""

    row: Tensor
    rounding: float  # an estimate of what one rounding of each number that it is computed from changes


Row = Callable[["_Call", tuple[int, int, int], torch.dtype], tuple[_Value, ...]]


def _compared(
    found: Mapping[str, Tensor], call: _Call, at: list[tuple[int, int, int]], row: Row
) -> tuple[Comparison, ...]:
    """Compare sampled rows of results with those that `row` computes in float64 and in the dtype of the call."""
    exact, dense = ([row(call, place, d) for place in at] for d in (torch.float64, call.query.dtype))
    comparisons = []
    for i, (name, result) in enumerate(found.items()):
        largest, worst = -1.0, Comparison(name, 0.0, 0.0, ())
        nan_rows = 0
        for place, expected, other in zip(at, exact, dense, strict=True):
            wanted, rounding = expected[i]
            error, own = (_distance(x, wanted) for x in (result[place], other[i].row))
            bound = _FACTOR * _finite(own) + _ULPS * (_finite(rounding) + call.least)  # what overflows allows nothing
            if error / bound > largest:
                largest, worst = error / bound, Comparison(name, error, bound, place)
            nan_rows += bool((result[place].isnan() & wanted.isnan()).any())
        comparisons.append(replace(worst, nan_rows=nan_rows))
    return tuple(comparisons)


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 0.0


def _distance(x: Tensor, exact: Tensor) -> float:
    """Return the largest difference. It is 0 for equal infinities, and infinite for NaN in one of both."""
    x = x.double()
    same = (x == exact) | (x.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (x - exact).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(difference.max()) if x.numel() else 0.0


def _size(x: Tensor) -> float:
    """Return the largest finite magnitude."""
    return float(torch.where(x.isfinite(), x, 0.0).abs().max()) if x.numel() else 0.0


def _magnitude(x: Tensor, y: Tensor, wide: torch.dtype) -> Tensor:
    """Return the size of x @ y if its terms do not cancel."""
    return x.to(wide).abs() @ y.to(wide).abs()


def _squares(weights: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of squares of the terms of weights @ x. The weights are no less than normal numbers of `dtype`.

    Its root is the size of the sum if the signs of the terms are random, as those of rounding errors are.
    """
    return torch.where(weights == 0, 0.0, weights.abs().clamp(min=torch.finfo(dtype).tiny)).square() @ x.square()


def _norm(x: Tensor) -> float:
    """Return the root of the sum of the finite squares."""
    return float(torch.where(x.isfinite(), x, 0.0).norm())


def _row_of_query(call: _Call, at: tuple[int, int, int], dtype: torch.dtype) -> tuple[_Value, ...]:
    """Return out, lse and dq of one row of query."""
    b, h, i = at
    wide, eps, eps_wide = call.precisions(dtype)
    own, query = call.query.dtype, call.query[at].to(dtype)
    key, value = (x[b if x.size(0) > 1 else 0, h // call.group].to(dtype) for x in (call.key, call.value))
    kv_idx = torch.arange(key.size(0), device=query.device)
    raw = ((key.to(wide) @ query.to(wide)) * call.scale).requires_grad_()  # [N]
    with torch.enable_grad():
        modified = _modified(call, raw, (b, h), torch.full_like(kv_idx, i), kv_idx)
    score, slope = modified.detach(), _slope(call, modified, raw)
    lse = torch.logsumexp(score, 0) if score.numel() else score.new_tensor(-math.inf)
    weight = torch.where(lse == -math.inf, 0.0, torch.exp(score - lse))
    out = weight.to(dtype) @ value
    of_score = 1.0 + _size(score) + _size(lse) + _size(slope * _magnitude(key, query, wide)) * abs(call.scale)
    of_mod = call.approximation * (_size(score) + _size(raw.detach()))
    exponent = eps_wide * of_score + of_mod  # relative error of a weight
    of_out = eps * (_size(out) + _size(_squares(weight, value.to(wide), own).sqrt()))
    values = (
        _Value(out, of_out + exponent * _size(_magnitude(weight, value, wide))),
        _Value(lse, eps_wide * of_score + of_mod),
    )
    if call.d_out is None:
        return values
    if lse == -math.inf:
        return *values, _Value(torch.zeros_like(query), 0.0)
    d_out = call.d_out[at].to(wide)
    terms = out.to(wide) * d_out
    d_score = torch.where(weight == 0, 0.0, weight * (value.to(wide) @ d_out - terms.sum()))
    d_raw, mean = (_gradient(modified, raw, x) for x in (d_score, weight))
    dq = ((d_raw.to(dtype) @ key).to(wide) * call.scale).to(dtype)
    of_sum = _size(mean @ key.to(wide)) * _norm(terms) + _size(_squares(d_raw, key.to(wide), own).sqrt())
    of_d_score = terms.abs().sum() + _magnitude(value, d_out, wide)
    of_terms = _magnitude(weight, value, wide) @ d_out.abs()  # its weights have errors too
    of_d_raw = exponent * d_raw.abs() + mean.abs() * (eps_wide * of_d_score + exponent * of_terms)
    of_dq = (eps * of_sum + _size(_magnitude(of_d_raw, key, wide))) * abs(call.scale)
    return *values, _Value(dq, eps * _size(dq) + of_dq)


def _row_of_key(call: _Call, at: tuple[int, int, int], dtype: torch.dtype) -> tuple[_Value, ...]:
    """Return dk and dv of one row of key, from the lse and the output of the call."""
    b_kv, h_kv, j = at
    assert call.d_out is not None
    wide, eps, eps_wide = call.precisions(dtype)
    key, value = call.key[at].to(wide), call.value[at].to(wide)
    dk, dv, of_dk, of_dv, dk_squares, dv_squares = (torch.zeros_like(x) for x in (key, value) * 3)
    q_idx = torch.arange(call.query.size(2), device=key.device)
    batches = [b_kv] if call.key.size(0) == call.query.size(0) else range(call.query.size(0))
    for b in batches:
        for h in range(h_kv * call.group, (h_kv + 1) * call.group):
            query, d_out = call.query[b, h].to(dtype), call.d_out[b, h].to(dtype)
            lse, terms = _lse(call, (b, h), dtype), call.out[b, h].to(wide) * d_out.to(wide)
            raw = ((query.to(wide) @ key) * call.scale).requires_grad_()  # [M]
            with torch.enable_grad():
                modified = _modified(call, raw, (b, h), q_idx, torch.full_like(q_idx, j))
            score, slope = modified.detach(), _slope(call, modified, raw)
            weight = torch.where(lse == -math.inf, 0.0, torch.exp(score - lse))
            d_score = torch.where(weight == 0, 0.0, weight * (d_out.to(wide) @ value - terms.sum(-1)))
            d_raw = _gradient(modified, raw, d_score)
            dv += (weight.to(dtype) @ d_out).to(wide)
            dk += (d_raw.to(dtype) @ query).to(wide) * call.scale
            of_score = 1.0 + sum(torch.where(x.isfinite(), x, 0.0).abs() for x in (score, lse))
            of_score += (slope * call.scale).abs() * _magnitude(query, key, wide)
            of_mod = call.approximation * (_size(score) + _size(raw.detach()))
            exponent = eps_wide * of_score + of_mod  # relative error of a weight
            of_d_score = terms.abs().sum(-1) + _magnitude(d_out, value, wide)
            of_d_raw = exponent * d_raw.abs() + (slope * weight).abs() * (
                eps_wide * of_d_score + exponent * terms.abs().sum(-1)
            )
            of_dv += _magnitude(exponent * weight, d_out, wide)
            of_dk += _magnitude(of_d_raw, query, wide) * abs(call.scale)
            dk_squares += _squares(d_raw, query.to(wide), call.query.dtype) * call.scale**2
            dv_squares += _squares(weight, d_out.to(wide), call.query.dtype)
    sums = (dk, dk_squares, of_dk), (dv, dv_squares, of_dv)
    dk_value, dv_value = (
        _Value(x.to(dtype), eps * (_size(x) + _size(squares.sqrt())) + _size(rounding)) for x, squares, rounding in sums
    )
    return dk_value, dv_value


def _lse(call: _Call, head: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the lse of a head, [M]: that of the call, or in float64 if its last bits matter to weights of `dtype`."""
    lse = call.lse[head]
    if dtype != torch.float64 or _size(lse) * torch.finfo(lse.dtype).eps < _LSE_ERROR:
        return lse.to(_wide(dtype))
    b, h = head
    key = call.key[b if call.key.size(0) > 1 else 0, h // call.group].to(dtype)
    rows, columns = torch.arange(len(lse), device=key.device), torch.arange(len(key), device=key.device)
    parts = []
    for some in rows.split(max(1, _PAIRS // len(key))):
        raw = (call.query[head][some].to(dtype) @ key.mT * call.scale).flatten()
        pairs = some.repeat_interleave(len(columns)), columns.repeat(len(some))
        parts.append(torch.logsumexp(_modified(call, raw, head, *pairs).unflatten(0, (len(some), -1)), 1))
    return torch.cat(parts)


def _gradient(y: Tensor, x: Tensor, d_y: Tensor) -> Tensor:
    """Return the gradient of x, 0 if y does not depend on it."""
    found = torch.autograd.grad(y, x, d_y, allow_unused=True, retain_graph=True)[0] if y.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def _slope(call: _Call, modified: Tensor, raw: Tensor) -> Tensor:
    """Return what a rounding error of a score is multiplied by in score_mod. It is 1 if gradients are not compared."""
    ones = torch.ones_like(raw)
    return ones if call.d_out is None else _gradient(modified, raw, ones).nan_to_num(0.0, 0.0, 0.0)


def _modified(call: _Call, raw: Tensor, head: tuple[int, int], q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the scores of pairs (q_idx, kv_idx) of (b, h) after score_mod, -inf where they do not attend."""
    b, h = head
    at = torch.tensor(head, device=raw.device)
    score = raw
    if call.score_mod is not None:
        score = _over_pairs(call.score_mod, (0, None, None, 0, 0), raw, at[0], at[1], q_idx, kv_idx).to(raw.dtype)
    if call.mask is None or call.blocks is None:
        return score
    rows, columns = (x // size for x, size in zip((q_idx, kv_idx), call.mask.BLOCK_SIZE, strict=True))
    partial, full = (x[b if x.size(0) > 1 else 0, h if x.size(1) > 1 else 0][rows, columns] for x in call.blocks)
    keep = _over_pairs(call.mask.mask_mod, (None, None, 0, 0), at[0], at[1], q_idx, kv_idx)
    return torch.where(full | (partial & keep), score, -math.inf)


def _over_pairs(mod: Callable[..., Any], dims: tuple[int | None, ...], *arguments: Tensor) -> Tensor:
    """Call a mod for each pair."""

    def scalar(*args: Tensor) -> Tensor:
        found = mod(*args)
        return found if isinstance(found, Tensor) else torch.as_tensor(found, device=args[-1].device)

    if not arguments[-1].numel():
        return arguments[0] if arguments[0].dim() else torch.zeros_like(arguments[-1], dtype=torch.bool)
    with IndexByTensor():
        return torch.vmap(scalar, in_dims=dims)(*arguments)
