"""Kernels for short queries in Triton's interpreter: splits of the keys, heads of a group in one tile, the merge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle import assert_close_to_oracle
from quick import slow_unless
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, mods, reference
from flexattn.compile.scalars import _splits
from flexattn.errors import UnsupportedError
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places
SLOPES = torch.linspace(0.01, 0.2, 8)
Mod = Callable[..., Tensor]


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx + 150) & (kv_idx > q_idx + 40)


def holes(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx % 50 < 9) | ((q_idx == 2) & (kv_idx > 180))


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 10 * h + 10 * b


@dataclass(frozen=True)
class Case:
    """A call with short queries."""

    M: int = 3
    N: int = 200
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    heads: int | None = None  # of the mask
    batches: int | None = None
    by_hand: bool = False  # the block lists are the user's
    sink: bool = False
    splits: int = 3
    dtype: torch.dtype = torch.float32
    B: int = 2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.Hq, self.M, self.D), (self.Hkv, self.N, self.D), (self.Hkv, self.N, self.Dv))
        q, k, v = (torch.randn(self.B, *shape, generator=generator).to(self.dtype) for shape in shapes)
        return q, k, v

    def mask(self) -> flexattn.BlockMask | None:
        if self.mask_mod is None:
            return None
        mask = create_block_mask(self.mask_mod, self.batches, self.heads, self.M, self.N, BLOCK_SIZE=(128, 16))
        if self.by_hand:
            mask.mask_mod = self.mask_mod
        return mask

    def run(self, *tensors: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        sink = torch.linspace(-2, 3, self.Hq) if self.sink else None
        out, aux = flex_attention(
            *tensors, self.score_mod, self.mask(), enable_gqa=True, sink=sink, kernel_options=options,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        return out, aux.lse

    def decode(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(*tensors, BACKEND="TRITON_DECODE", SPLIT_KV=self.splits)


CASES = {
    "one query": Case(M=1),
    "plain": Case(),
    "one split": Case(splits=1),
    "more splits than tiles": Case(splits=40),
    "window and ALiBi": Case(score_mod=alibi, mask_mod=window),
    "lists of the user": Case(score_mod=alibi, mask_mod=window, by_hand=True),
    "partial blocks, other head dims": Case(M=5, D=24, Dv=40, score_mod=alibi, mask_mod=holes, splits=7),
    "mask by head and batch": Case(M=2, Hq=2, mask_mod=by_head, heads=2, batches=2),
    "nothing attends": Case(score_mod=alibi, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx < 0) & (q_idx >= 0)),
    "groups of three, several tiles": Case(M=40, Hq=6, score_mod=mods.softcap(3.0), mask_mod=window, splits=2),
    "sink": Case(sink=True, mask_mod=window),
    "half": Case(dtype=torch.float16, score_mod=alibi),
    "shorter than a tile": Case(N=5),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("one query", "window and ALiBi"), CASES))
def test_against_float64(name: str) -> None:
    case = CASES[name]
    tensors = case.tensors()
    out, lse = case.decode(*tensors)
    exact, exact_lse = case.run(*(x.double() for x in tensors))
    bound = 4e-6 if case.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), exact, atol=bound, rtol=bound)
    torch.testing.assert_close(lse.double(), exact_lse, atol=bound, rtol=bound)


@pytest.mark.slow
def test_gradients_after_a_split_forward() -> None:
    case = Case(score_mod=alibi, mask_mod=window, sink=True)
    found, exact = (
        torch.autograd.grad(run(*leaves)[0].square().sum(), leaves)
        for run, leaves in (
            (case.decode, [x.requires_grad_() for x in case.tensors()]),
            (case.run, [x.double().requires_grad_() for x in case.tensors()]),
        )
    )
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def test_keys_in_empty_blocks_may_be_nan() -> None:
    case = Case(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx >= 48) & (kv_idx < 96))
    q, k, v = case.tensors()
    expected = case.decode(q, k, v)
    for x in (k, v):
        x[:, :, :48], x[:, :, 96:] = math.nan, math.inf
    assert all(torch.equal(a, b) for a, b in zip(case.decode(q, k, v), expected, strict=True))


@pytest.mark.slow
def test_infinite_scores() -> None:
    """A row with a score of +inf is NaN and its lse +inf, as in the other kernels."""
    case = Case(score_mod=lambda s, b, h, q_idx, kv_idx: torch.where((q_idx == 1) & (kv_idx == 77), math.inf, s))
    out, lse = case.decode(*case.tensors())
    assert out[:, :, 1].isnan().all() and (lse[:, :, 1] == math.inf).all()
    assert out[:, :, ::2].isfinite().all() and lse[:, :, ::2].isfinite().all()


def test_repeated_calls_and_layouts() -> None:
    case = Case(mask_mod=window)
    tensors = case.tensors()
    expected = case.decode(*tensors)
    launch.forget_launches()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(case.decode(*tensors), expected, strict=True))
    others = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    out, _ = case.decode(*others)
    assert torch.equal(out, expected[0]) and out.stride() == others[0].stride()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(M=129), "129 queries, more than 128"),
        (Case(mask_mod=by_head, heads=4, batches=2), "a mask by head and heads that share keys"),
    ],
)
def test_calls_that_cannot_be_split(case: Case, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"found BACKEND='TRITON_DECODE' with {reason}"):
        case.decode(*case.tensors())


@pytest.mark.parametrize("by_hand", [False, True])
def test_several_blocks_of_queries(by_hand: bool) -> None:
    case = Case(M=20)
    mask = create_block_mask(mods.causal, None, None, 20, 200, BLOCK_SIZE=16)
    if by_hand:
        mask.mask_mod = mods.causal
    q, k, v = case.tensors()
    out = flex_attention(q, k, v, None, mask, enable_gqa=True, kernel_options={"BACKEND": "TRITON_DECODE"})
    dense, _ = reference.attention(q, k, v, mask_mod=mods.causal, dtype=None)
    assert_close_to_oracle("out", out, dense, reference.attention(q, k, v, mask_mod=mods.causal)[0])


def test_kernels_that_explain_shows() -> None:
    def kernels(case: Case, **options: Any) -> list[str]:
        q, k, v = case.tensors()
        found = flexattn.explain(q, k, v, enable_gqa=True, kernel_options=options, target="sm_90")
        return [plan.spec.name for plan in found.plans if plan.is_forward]

    long = replace(Case(M=1), N=2048)
    assert kernels(long) == ["forward_split", "merge_splits"]
    assert "forward_split" not in kernels(long, FORCE_USE_FLEX_ATTENTION=True)
    assert "forward_split" not in kernels(long, BATCH_INVARIANT=True)
    assert "forward_split" not in kernels(replace(long, M=129))
    assert "forward_split" in kernels(replace(long, M=32)) and "forward_split" not in kernels(replace(long, M=33))
    assert "forward_split" not in kernels(replace(long, N=512))


@pytest.mark.parametrize(
    ("programs", "resident", "most"), [(256, 396, 64), (8, 396, 256), (1, 264, 64), (1000, 264, 9)]
)
def test_the_last_wave_is_nearly_full(programs: int, resident: int, most: int) -> None:
    splits = _splits(programs, resident, most)
    waves = programs * splits / resident
    assert 1 <= splits <= most and (splits == most or waves / math.ceil(waves) > 0.9)
