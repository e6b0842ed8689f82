"""verification: verify, which compares sampled rows of a call and of its gradients with float64.

The mods are called as Python functions, under vmap: nothing of the tracer, the compiler and the kernels is used for the
expected values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.api import AuxRequest, flex_attention
from flexattn.block_mask import BlockMask
from flexattn.block_mask.dense import dense_blocks
from flexattn.block_mask.from_torch import from_torch
from flexattn.call.call import Mod
from flexattn.process.frozen_class import frozen
from flexattn.reference import IndexByTensor
from flexattn.torch_state.uncompiled import uncompiled

_FACTOR = 3.0  # allowed error relative to that of a dense computation of the same rows in the same dtype
_ULPS = 4.0  # allowed in any case, of the largest expected value


@frozen
class Comparison:
    """The largest error of one result over the sampled rows."""

    name: str  # out, lse, dq, dk or dv
    error: float
    bound: float
    at: tuple[int, ...]  # batch, head and row of the largest error

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound. It is not if the error is NaN."""
        return self.error <= self.bound


@frozen
class Verification:
    """What `verify` found. It is true if all errors are within their bounds, and prints as a table."""

    comparisons: tuple[Comparison, ...]

    def __bool__(self) -> bool:
        return all(c.passed for c in self.comparisons)

    def __str__(self) -> str:
        lines = [f"{'':4}  {'error':>9}  {'bound':>9}  batch, head, row of the largest error"]
        for c in self.comparisons:
            verdict = "" if c.passed else "  TOO LARGE"
            lines.append(f"{c.name:4}  {c.error:9.2e}  {c.bound:9.2e}  {', '.join(map(str, c.at))}{verdict}")
        return "\n".join(lines)


class _Inputs(NamedTuple):
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

    @property
    def group(self) -> int:
        """The query heads that share a key head."""
        return self.query.size(1) // self.key.size(1)


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
) -> Verification:
    """Run a call, and its backward with a random gradient of the output, and compare sampled rows with float64.

    Sampled are rows of query for out, lse and dq, and rows of key for dk and dv, among them the first and the last. A
    row costs as much as one row of attention in plain torch. An error may be 3 times that of a dense computation of the
    same rows in the same dtype. Blocks of block_mask decide what is skipped, as in the call.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options: as in flex_attention.
        rows: how many rows of query and of key are sampled.
        gradients: whether to compare the gradients of query, key and value too.
        seed: of the sampled rows and of the gradient of the output.

    Returns:
        A Verification, which is true if everything is within its bounds. `print` shows the errors.

    Raises:
        What flex_attention raises.

    Example:
        >>> import torch
        >>> import flexattn
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
        >>> bool(verify(q, k, v, flexattn.mods.softcap(20.0), mask))
        True
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (x.detach().requires_grad_(gradients) for x in (query, key, value))
    with torch.set_grad_enabled(gradients):
        out, aux = flex_attention(
            q, k, v, score_mod, block_mask, scale, enable_gqa, kernel_options=kernel_options,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        found, d_out = {"out": out.detach(), "lse": aux.lse.detach()}, None
        if gradients:
            d_out = torch.randn(out.shape, generator=generator).to(out)
            of_inputs = torch.autograd.grad(out, (q, k, v), d_out)
            found |= dict(zip(("dq", "dk", "dv"), of_inputs, strict=True))
    mask = from_torch(block_mask) if type(block_mask) is upstream.BlockMask else block_mask
    assert mask is None or isinstance(mask, BlockMask)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    inputs = _Inputs(
        q.detach(), k.detach(), v.detach(), score_mod, mask, scale, found["out"], found["lse"], d_out,
        None if mask is None else dense_blocks(mask),
    )  # fmt: skip
    of_queries = _sample(query, rows, generator)
    comparisons = _compared(("out", "lse", "dq")[: 3 if gradients else 2], found, inputs, of_queries, _row_of_query)
    if gradients:
        of_keys = _sample(key, rows, generator)
        comparisons += _compared(("dk", "dv"), found, inputs, of_keys, _row_of_key)
    return Verification(comparisons)


def _sample(tensor: Tensor, rows: int, generator: torch.Generator) -> list[tuple[int, int, int]]:
    """Return (batch, head, row) of sampled rows of [B, H, rows, D], among them the first and the last."""
    B, H, n = tensor.shape[:3]
    if 0 in (B, H, n):
        return []
    drawn = torch.stack([torch.randint(size, (max(rows - 2, 0),), generator=generator) for size in (B, H, n)], 1)
    corners = [(0, 0, 0), (B - 1, H - 1, n - 1)][:rows]
    return [*corners, *((int(b), int(h), int(i)) for b, h, i in drawn.tolist())]


Row = Callable[[_Inputs, tuple[int, int, int], torch.dtype], tuple[Tensor, ...]]


def _compared(
    names: tuple[str, ...], found: Mapping[str, Tensor], inputs: _Inputs, at: list[tuple[int, int, int]], row: Row
) -> tuple[Comparison, ...]:
    """Compare sampled rows of results with those that `row` computes in float64 and in the dtype of the call."""
    dtype = inputs.query.dtype
    exact, dense = ([row(inputs, place, d) for place in at] for d in (torch.float64, dtype))
    comparisons = []
    for i, name in enumerate(names):
        largest, worst, allowed, magnitude = 0.0, at[0] if at else (), 0.0, 0.0
        for place, expected, other in zip(at, exact, dense, strict=True):
            error = _distance(found[name][place], expected[i])
            if not error <= largest:  # also if it is NaN
                largest, worst = error, place
            allowed = max(allowed, _distance(other[i], expected[i]))
            finite = expected[i][expected[i].isfinite()]
            magnitude = max(magnitude, float(finite.abs().max())) if finite.numel() else magnitude
        eps = torch.finfo(dtype if name != "lse" else torch.float32).eps
        comparisons.append(Comparison(name, largest, _FACTOR * allowed + _ULPS * eps * magnitude, worst))
    return tuple(comparisons)


def _distance(x: Tensor, exact: Tensor) -> float:
    """Return the largest difference. It is 0 for equal infinities, and infinite for NaN in one of both."""
    x = x.double()
    same = (x == exact) | (x.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, (x - exact).abs()).nan_to_num(nan=math.inf).max()) if x.numel() else 0.0


def _row_of_query(inputs: _Inputs, at: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return out, lse and dq of one row of query."""
    b, h, i = at
    query, d_out = inputs.query[at].to(dtype), inputs.d_out
    key, value = (x[b if x.size(0) > 1 else 0, h // inputs.group].to(dtype) for x in (inputs.key, inputs.value))
    kv_idx = torch.arange(key.size(0), device=query.device)
    with torch.enable_grad():
        query.requires_grad_()
        raw = ((key @ query) * inputs.scale).to(torch.promote_types(dtype, torch.float32))  # [N]
        score = _modified(inputs, raw, (b, h), torch.full_like(kv_idx, i), kv_idx)
        lse = torch.logsumexp(score, 0) if score.numel() else score.new_tensor(-math.inf)
        weight = torch.where(lse == -math.inf, 0.0, torch.exp(score - lse))
        out = weight.to(dtype) @ value
        if d_out is None:
            return out.detach(), lse.detach()
        if lse == -math.inf:
            return out.detach(), lse.detach(), torch.zeros_like(query)
        dq = _gradient(out, query, d_out[at].to(dtype))
    return out.detach(), lse.detach(), dq


def _row_of_key(inputs: _Inputs, at: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return dk and dv of one row of key, from the lse and the output of the call."""
    b_kv, h_kv, j = at
    assert inputs.d_out is not None
    key, value = inputs.key[at].to(dtype), inputs.value[at].to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    dk, dv = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    q_idx = torch.arange(inputs.query.size(2), device=key.device)
    batches = [b_kv] if inputs.key.size(0) == inputs.query.size(0) else range(inputs.query.size(0))
    for b in batches:
        for h in range(h_kv * inputs.group, (h_kv + 1) * inputs.group):
            query, d_out = inputs.query[b, h].to(dtype), inputs.d_out[b, h].to(dtype)
            lse = inputs.lse[b, h].to(wide)
            delta = (inputs.out[b, h].to(wide) * d_out.to(wide)).sum(-1)
            raw = ((query @ key) * inputs.scale).to(wide).requires_grad_()  # [M]
            with torch.enable_grad():
                score = _modified(inputs, raw, (b, h), q_idx, torch.full_like(q_idx, j))
            weight = torch.where(lse == -math.inf, 0.0, torch.exp(score.detach() - lse))
            d_score = weight * ((d_out @ value).to(wide) - delta)
            d_raw = _gradient(score, raw, torch.where(weight == 0, 0.0, d_score))
            dv += (weight.to(dtype) @ d_out).to(wide)
            dk += (d_raw.to(dtype) @ query).to(wide) * inputs.scale
    return dk.to(dtype), dv.to(dtype)


def _gradient(y: Tensor, x: Tensor, d_y: Tensor) -> Tensor:
    """Return the gradient of x, 0 if y does not depend on it."""
    found = torch.autograd.grad(y, x, d_y, allow_unused=True)[0] if y.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def _modified(inputs: _Inputs, raw: Tensor, head: tuple[int, int], q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return the scores of pairs (q_idx, kv_idx) of (b, h) after score_mod, -inf where they do not attend."""
    b, h = head
    at = torch.tensor(head, device=raw.device)
    score = raw
    if inputs.score_mod is not None:
        score = _over_pairs(inputs.score_mod, (0, None, None, 0, 0), raw, at[0], at[1], q_idx, kv_idx).to(raw.dtype)
    if inputs.mask is None or inputs.blocks is None:
        return score
    rows, columns = (x // size for x, size in zip((q_idx, kv_idx), inputs.mask.BLOCK_SIZE, strict=True))
    partial, full = (x[b if x.size(0) > 1 else 0, h if x.size(1) > 1 else 0][rows, columns] for x in inputs.blocks)
    keep = _over_pairs(inputs.mask.mask_mod, (None, None, 0, 0), at[0], at[1], q_idx, kv_idx)
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
