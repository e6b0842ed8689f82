"""debug: raw scores, scores, masks, weights and gradients at positions are those of dense attention in float64."""

from __future__ import annotations

import doctest
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import elsewhere, there
from test_gpu_float64 import cases, drawn, moved, posed
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import BlockMask, create_block_mask, debug, debugging, mods
from flexattn.errors import ArgumentError, IndexRangeError, MutationError
from flexattn.reference import over_all_pairs

B, Hq, Hkv, M, N, D, Dv = 2, 4, 2, 37, 45, 8, 12


def inputs(dtype: torch.dtype = torch.float64, batch: int = B) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Hq, M, D), (batch, Hkv, N, D), (batch, Hkv, N, Dv), (B, Hq, M, Dv)
    query, key, value, d_out = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return query, key, value, d_out


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Some rows of query have no pair."""
    return (kv_idx - q_idx > 2 * h - 7) & (kv_idx < 30 + b) & (q_idx > 3)


TABLE = torch.randn(Hq, M + N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SCORES: dict[str, Any] = {
    "none": None,
    "softcap": mods.softcap(2.0),
    "table": lambda score, b, h, q_idx, kv_idx: score * 0.5 + TABLE[h, q_idx - kv_idx + N],
    "constant": lambda score, b, h, q_idx, kv_idx: 0.5,
    "masks": lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx % 3 == 0, score, -float("inf")),
}


def masks() -> dict[str, Any]:
    window_mask = create_block_mask(window, B, Hq, M, N, device="cpu", BLOCK_SIZE=(16, 8))
    return {
        "none": None,
        "causal": create_block_mask(mods.causal, None, None, M, N, device="cpu", BLOCK_SIZE=8),
        "window": window_mask,
        "by hand": BlockMask.from_kv_blocks(
            window_mask.kv_num_blocks, window_mask.kv_indices, BLOCK_SIZE=(16, 8), seq_lengths=(M, N)
        ),
        "torch": upstream.create_block_mask(window, B, Hq, M, N, device="cpu", BLOCK_SIZE=16),
    }


def kept_pairs(mask: Any) -> Tensor:
    """Return what a mask computes, bool [B, Hq, M, N]."""
    if mask is None:
        return torch.ones(B, Hq, M, N, dtype=torch.bool)
    dense = flexattn.block_mask.dense.dense_blocks(flexattn.block_mask.from_torch(mask))
    rows, columns = mask.BLOCK_SIZE
    partial, full = (x.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :M, :N] for x in dense)
    keep = over_all_pairs(mask.mask_mod, torch.Size((B, Hq, M, N)), device=torch.device("cpu"))
    return (full | (partial & keep)).expand(B, Hq, M, N)


def dense(
    query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, score_mod: Any, kept: Tensor, sink: Tensor | None
) -> dict[str, Tensor]:
    """Return the fields of all pairs in float64, by autograd."""
    key, value = (x.double().expand(B, *x.shape[1:]).repeat_interleave(Hq // Hkv, 1) for x in (key, value))
    raw = (query.double() @ key.mT / math.sqrt(D)).requires_grad_()
    score = raw if score_mod is None else over_all_pairs(score_mod, raw.shape, raw).double()
    masked = torch.where(kept, score, -math.inf)
    if sink is not None:
        masked = torch.cat([masked, sink.double()[..., None, None].expand(B, Hq, M, 1)], -1)
    weight = torch.softmax(masked, -1)[..., :N].nan_to_num()
    weight = torch.where(kept & (score != -math.inf), weight, 0.0)
    (gradient,) = torch.autograd.grad((weight @ value * d_out).sum() + 0 * raw.sum(), raw)
    return {"raw": raw.detach(), "score": score.detach(), "weight": weight.detach(), "gradient": gradient.nan_to_num()}


def positions(count: int) -> list[tuple[int, int, int, int]]:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.stack([torch.randint(n, (count,), generator=generator) for n in (B, Hq, M, N)], 1).tolist()
    corners = list(itertools.product((0, B - 1), (0, Hq - 1), (0, M - 1), (0, N - 1)))
    return [(b, h, q, kv) for b, h, q, kv in [*corners, *drawn]]


@pytest.mark.parametrize("mask", ["none", "causal", "window", "by hand", "torch"])
@pytest.mark.parametrize("score", list(SCORES))
@pytest.mark.parametrize("sink", [None, "heads"])
def test_fields_are_those_of_dense_attention(score: str, mask: str, sink: str | None) -> None:
    query, key, value, d_out = inputs()
    sinks = None if sink is None else torch.linspace(-1, 2, Hq, dtype=torch.float64)
    block_mask, at = masks()[mask], positions(40)
    kept = kept_pairs(block_mask)
    expected = dense(query, key, value, d_out, SCORES[score], kept, sinks)
    found = debug(query, key, value, SCORES[score], block_mask, enable_gqa=True, at=at, sink=sinks, d_out=d_out)
    assert len(found) == len(at)
    for row, place in zip(found, at, strict=True):
        assert (row.b, row.h, row.q_idx, row.kv_idx) == place
        assert row.kept == bool(kept[place])
        for name, x in expected.items():
            assert getattr(row, name) == pytest.approx(float(x[place]), rel=1e-9, abs=1e-12), (name, place)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_and_shared_keys(dtype: torch.dtype) -> None:
    query, key, value, d_out = inputs(dtype, batch=1)
    mask = masks()["window"]
    expected = dense(query, key, value, d_out.double(), SCORES["softcap"], kept_pairs(mask), None)
    found = debug(query, key, value, SCORES["softcap"], mask, enable_gqa=True, at=positions(20), d_out=d_out)
    for row, place in zip(found, positions(20), strict=True):
        for name, x in expected.items():
            assert getattr(row, name) == pytest.approx(float(x[place]), rel=1e-4, abs=1e-5), (name, place)


def test_the_weights_of_a_row_give_the_output_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its keys are in many tiles."""
    monkeypatch.setattr(debugging, "_ELEMENTS", 5 * Dv)
    query, key, value, d_out = inputs()
    mask, score_mod = masks()["causal"], SCORES["table"]
    found = debug(
        query, key, value, score_mod, mask, enable_gqa=True, at=[(1, 3, 30, j) for j in range(N)], d_out=d_out
    )
    query.requires_grad_()
    out = flexattn.flex_attention(query, key, value, score_mod, mask, enable_gqa=True)
    (d_query,) = torch.autograd.grad(out, query, d_out)
    weights = torch.tensor([row.weight for row in found], dtype=torch.float64)
    torch.testing.assert_close(weights @ value[1, 1], out[1, 3, 30].detach())
    gradients = torch.tensor([row.gradient for row in found], dtype=torch.float64)
    torch.testing.assert_close(gradients @ key[1, 1] / math.sqrt(D), d_query[1, 3, 30])


def test_kinds_of_blocks_and_the_printed_table() -> None:
    ones = torch.ones(1, 1, 32, 16)
    mask = create_block_mask(mods.causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=8)
    at = [(0, 0, 20, 3), (0, 0, 20, 17), (0, 0, 20, 23), (0, 0, 20, 31)]
    found = debug(ones, ones, ones, None, mask, at=at)
    assert [(row.block, row.kept) for row in found] == [
        ("full", True), ("partial", True), ("partial", False), ("empty", False)
    ]  # fmt: skip
    lines = str(found).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["b", "h", "q_idx", "kv_idx", "raw", "score", "block", "kept", "weight", "gradient"]
    assert lines[4].split() == ["0", "0", "20", "31", "4", "4", "empty", "no", "0", "-"]
    assert found[1].weight == pytest.approx(1 / 21) and found[1].gradient is None
    alone = debug(ones, ones, ones, at=at[:1])
    assert alone[0].block == "" and str(alone).splitlines()[1].split()[6] == "-"
    assert str(debug(ones, ones, ones, at=[])).split() == lines[0].split()


def test_a_captured_tensor_that_a_masked_pair_indexes_out_of_range() -> None:
    ones, short = torch.ones(1, 1, 32, 16), torch.zeros(16)
    mask = create_block_mask(mods.padding(torch.tensor([16])), 1, None, 32, 32, device="cpu", BLOCK_SIZE=8)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + short[kv_idx]

    found = debug(ones, ones, ones, score_mod, mask, at=[(0, 0, 0, 20), (0, 0, 0, 3)])
    assert math.isnan(found[0].score) and not found[0].kept and found[1].score == 4.0
    with pytest.raises(IndexRangeError, match="captured tensor `short`"):
        debug(ones, ones, ones, score_mod, at=[(0, 0, 0, 20)])


def test_nan_of_masked_keys_does_not_count() -> None:
    query, key, value, d_out = inputs()
    mask = create_block_mask(mods.causal, None, None, M, N, device="cpu", BLOCK_SIZE=64)
    expected = debug(query, key, value, None, mask, enable_gqa=True, at=[(0, 0, 5, 4)], d_out=d_out)
    key[:, :, 6:], value[:, :, 6:] = torch.nan, torch.nan
    assert debug(query, key, value, None, mask, enable_gqa=True, at=[(0, 0, 5, 4)], d_out=d_out) == expected


@pytest.mark.parametrize(
    ("at", "error", "text"),
    [
        ([(0, 0, 0)], ArgumentError, r"at: found \(0, 0, 0\), expected positions \(b, h, q_idx, kv_idx\)"),
        ([(0, 0, 0, 1.0)], ArgumentError, "at: found"),
        ([3], ArgumentError, "at: found 3"),
        ([(0, 4, 0, 0)], IndexRangeError, r"at: found h = 4 in \(0, 4, 0, 0\), expected 0 <= h < 4"),
        ([(0, 0, 0, -1)], IndexRangeError, "at: found kv_idx = -1"),
        (torch.zeros(1, 4).int(), ArgumentError, r"at: found tensor.*Call \.tolist\(\) of the positions"),
        ([(0, 0, 0, True)], ArgumentError, "at: found"),
    ],
)
def test_positions_that_are_not_there(at: Any, error: type[Exception], text: str) -> None:
    query, key, value, _ = inputs()
    with pytest.raises(error, match=text):
        debug(query, key, value, enable_gqa=True, at=at)


def test_errors_of_the_call() -> None:
    query, key, value, d_out = inputs()
    with pytest.raises(ArgumentError, match=r"d_out: found shape \[2, 4, 37, 11\], expected \[2, 4, 37, 12\]"):
        debug(query, key, value, enable_gqa=True, at=[], d_out=d_out[..., 1:])
    with pytest.raises(ArgumentError, match="key: found 2 heads"):
        debug(query, key, value, at=[])
    limit = torch.tensor([20, 30])
    mask = create_block_mask(mods.padding(limit), B, None, M, N, device="cpu")
    limit += 1
    with pytest.raises(MutationError):
        debug(query, key, value, None, mask, enable_gqa=True, at=[])


@pytest.mark.parametrize("name", ["plain", "mask", "documents", "bias", "indices", "sink"])
def test_every_tensor_stays_on_the_device(name: str) -> None:
    problem, d_out = posed(cases()[name]), drawn(2, 4, 37, 6, seed=5)
    at = positions(9)
    with torch.no_grad():
        expected = debugging._table(problem, at, d_out)
        with elsewhere():
            found = debugging._table(moved(problem, there), at, there(d_out))
    for row, other in zip(found, expected, strict=True):
        assert (row.block, row.kept) == (other.block, other.kept)
        for field in ("raw", "score", "weight", "gradient"):
            assert getattr(row, field) == pytest.approx(getattr(other, field), rel=1e-11, abs=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    query, key, value, d_out = inputs(dtype)
    masks_of = {
        device: create_block_mask(window, B, Hq, M, N, device=device, BLOCK_SIZE=16) for device in ("cpu", "cuda")
    }
    expected, found = (
        debug(
            *(x.to(device) for x in (query, key, value)),
            mods.softcap(2.0),
            mask,
            enable_gqa=True,
            at=positions(20),
            d_out=d_out.to(device),
        )
        for device, mask in masks_of.items()
    )
    for row, other in zip(found, expected, strict=True):
        assert (row.block, row.kept) == (other.block, other.kept)
        for field in ("raw", "score", "weight", "gradient"):
            assert getattr(row, field) == pytest.approx(getattr(other, field), rel=1e-4, abs=1e-5)


def test_contexts() -> None:
    query, key, value, d_out = (x.float() for x in inputs())
    at = positions(3)
    expected = debug(query, key, value, None, enable_gqa=True, at=at, d_out=d_out)
    with torch.inference_mode():
        assert debug(query, key, value, None, enable_gqa=True, at=at, d_out=d_out) == expected
    query.requires_grad_()
    with torch.device("meta"):
        assert debug(query, key, value, None, enable_gqa=True, at=at, d_out=d_out) == expected
    with torch.autocast("cpu", torch.bfloat16):
        cast = debug(query, key, value, None, enable_gqa=True, at=at)
    halves = (x.detach().bfloat16() for x in (query, key, value))
    assert cast == debug(*halves, None, enable_gqa=True, at=at)


def test_examples_in_the_documentation() -> None:
    failed, attempted = doctest.testmod(debugging)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize("number", [np.int64, torch.tensor], ids=["numpy", "tensor"])
def test_positions_of_other_types(number: Any) -> None:
    query, key, value, _ = inputs()
    expected = debug(query, key, value, enable_gqa=True, at=[(0, 1, 2, 3)])
    assert debug(query, key, value, enable_gqa=True, at=[tuple(map(number, (0, 1, 2, 3)))]) == expected
