"""Random problems, forward and backward, against the dense reference in float64: what must hold for every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_close_to_oracle
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, flex_attention, mods, reference

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """A step of a score mod: the shapes of the tensors that it learns, and what it does to the score."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    step: Callable[..., Tensor]  # step(score, b, h, q_idx, kv_idx, *tensors)

    def __repr__(self) -> str:
        return self.name


PIECES = (
    Piece("softcap", (), lambda s, b, h, q, kv: 3 * torch.tanh(s / 3)),
    Piece("square", (), lambda s, b, h, q, kv: 0.2 * s * s),
    Piece("half_after", (), lambda s, b, h, q, kv: torch.where(q >= kv, s, s * 0.5)),
    Piece("forget_score", (), lambda s, b, h, q, kv: (q - kv) * 0.05),
    Piece("bias_2d", ((8, 5),), lambda s, b, h, q, kv, t: s + t[h, q % 5]),
    Piece("bias_view", ((5, 8),), lambda s, b, h, q, kv, t: s + t.T[h][kv % 5]),
    Piece("bias_of_batch", ((3, 2),), lambda s, b, h, q, kv, t: s + t[b, 0] * t[b, -1]),
    Piece("table", ((7,),), lambda s, b, h, q, kv, t: s + t[(q - kv) % 7] - t[q % 3]),
    Piece("gate", ((8,),), lambda s, b, h, q, kv, t: s * torch.sigmoid(t)[h]),
    Piece("temperature", ((),), lambda s, b, h, q, kv, t: s * torch.exp(0.1 * t)),
    Piece("product", ((8, 6), (6,)), lambda s, b, h, q, kv, t, u: s + t[h, kv % 6] * u[q % 6]),
)
MASKS: dict[str, MaskMod] = {
    "causal": mods.causal,
    "window": mods.sliding_window(6),
    "ahead": lambda b, h, q_idx, kv_idx: kv_idx > q_idx + 2,
    "blocks": lambda b, h, q_idx, kv_idx: q_idx // 11 == kv_idx // 11,
    "heads": lambda b, h, q_idx, kv_idx: (q_idx + h) % 3 != kv_idx % 3,
    "batches": lambda b, h, q_idx, kv_idx: kv_idx < 4 + 9 * b,
    "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0,
    "late": lambda b, h, q_idx, kv_idx: (q_idx > 7) | (kv_idx == 100),
}


WIDER = {torch.float32: {"factor": 1.4}}


@dataclass(frozen=True)
class Case:
    """One random problem."""

    sizes: tuple[int, int, int, int, int, int, int, int]  # B, Bkv, Hkv, G, M, N, D, Dv
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    masks: tuple[str, ...]
    block: tuple[int, int]
    scale: float | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length, batch = st.integers(1, 40), draw(st.integers(1, 3))
    kv_batch = draw(st.sampled_from([batch, batch, 1]))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]))
    dims = draw(st.sampled_from([(8, 8), (4, 12), (7, 3), (16, 1)]))
    return Case(
        (batch, kv_batch, *heads, draw(length), draw(length), *dims),
        draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])),
        tuple(draw(st.lists(st.sampled_from(PIECES), max_size=3))),
        tuple(draw(st.lists(st.sampled_from(sorted(MASKS)), max_size=2))),
        draw(st.sampled_from([(16, 16), (8, 32), (5, 7), (128, 128)])),
        draw(st.sampled_from([None, None, 0.0, -0.7, 1.5])),
        draw(st.integers(0, 1000)),
    )


def score_mod_of(pieces: tuple[Piece, ...], learned: list[Tensor]) -> Callable[..., Tensor] | None:
    if not pieces:
        return None
    ends = [sum(len(p.shapes) for p in pieces[: i + 1]) for i in range(len(pieces))]
    taken = [learned[end - len(p.shapes) : end] for p, end in zip(pieces, ends, strict=True)]

    def score_mod(score, b, h, q_idx, kv_idx):
        for piece, tensors in zip(pieces, taken, strict=True):
            score = piece.step(score, b, h, q_idx, kv_idx, *tensors)
        return score

    return score_mod


def results(case: Case, leaves: list[Tensor], dense: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return out, lse and the gradient of each leaf, for a loss over both results."""
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in leaves]
    q, k, v, *learned = leaves
    score_mod = score_mod_of(case.pieces, learned)
    mask_mod = reduce(mods.and_masks, (MASKS[name] for name in case.masks)) if case.masks else None
    if dense:
        out, lse = reference.attention(q, k, v, score_mod, mask_mod, case.scale, dtype)
    else:
        B, H, M, N = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        mask = mask_mod and create_block_mask(mask_mod, B, H, M, N, device="cpu", BLOCK_SIZE=case.block)
        out, aux = flex_attention(
            q, k, v, score_mod, mask, case.scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        lse = aux.lse
    generator = torch.Generator().manual_seed(case.seed)
    weight, weight_of_lse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    loss = (out.double() * weight).sum() + (lse.masked_fill(lse == -torch.inf, 0).double() * weight_of_lse).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, lse, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def compare(case: Case, check: Callable[..., None]) -> None:
    """Compute the case three times (ours, dense, dense in float64) and check each result."""
    B, Bkv, Hkv, G, M, N, D, Dv = case.sizes
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(B, Hkv * G, M, D), (Bkv, Hkv, N, D), (Bkv, Hkv, N, Dv), *(s for p in case.pieces for s in p.shapes)]
    leaves = [torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes]
    ours = results(case, leaves, dense=False)
    same_dtype = results(case, leaves, dense=True)
    exact = results(case, leaves, dense=True, dtype=torch.float64)
    names = ["out", "lse", "dq", "dk", "dv", *(f"d(captured {i})" for i in range(len(shapes) - 3))]
    for name, result, dense, oracle in zip(names, ours, same_dtype, exact, strict=True):
        check(name, result, dense, oracle, name if name in ("out", "lse") else "grad")


def assert_right(name: str, got: Tensor, dense: Tensor, oracle: Tensor, _: str) -> None:
    """Raise unless a result is right; how exact it is, larger tensors tell.

    A few values may be the small sum of many terms of about 1, which leave rounding errors of their own size.
    """
    assert torch.equal(got.isinf(), oracle.isinf()), f"{name}: infinities are not where they belong"
    eps = torch.finfo(got.dtype).eps
    got, dense, oracle = (x.double().masked_fill(x.isinf(), 0) for x in (got, dense, oracle))
    error, error_of_dense = ((x - oracle).abs().max() for x in (got, dense))
    bound = 4 * error_of_dense + 32 * eps * oracle.abs().max().clamp(min=1)
    assert error <= bound, f"{name}: largest error {error:.3g}, allowed {bound:.3g}"


@settings(max_examples=60)
@given(cases())
def test_random_problems_match_the_reference(case: Case) -> None:
    compare(case, assert_right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_results_are_as_exact_as_dense_ones(piece: Piece, dtype: torch.dtype) -> None:
    """In float32 the backward from a rounded out, without the weights, costs up to twice the error of a dense one."""
    case = Case((2, 2, 2, 2, 96, 80, 32, 32), dtype, (piece,), ("causal",), (32, 32), None, 0)
    compare(case, partial(assert_close_to_oracle, **WIDER.get(dtype, {})))
