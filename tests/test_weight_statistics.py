"""statistics: entropies, largest weights and masses are those of dense attention in float64, in bounded memory."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest
import torch
from elsewhere import back, elsewhere, there
from operations import Largest
from test_debugging import SCORES, B, D, Hq, M, N, dense, inputs, kept_pairs, masks
from test_gpu_float64 import cases, moved, posed
from torch import Tensor

from flexattn import create_block_mask, mods, statistics, weight_statistics
from flexattn.engines import cpu_tiles
from flexattn.errors import ArgumentError
from flexattn.reference import over_all_pairs
from flexattn.weight_statistics import Statistics

K = 3


def check(found: Statistics, weight: Tensor, sink: Tensor | None, block: int, tolerance: float) -> None:
    """Compare with dense weights, float64 [B, Hq, M, N]."""
    every = weight if sink is None else torch.cat([weight, 1 - weight.sum(-1, keepdim=True)], -1)
    logs = every.clamp_min(1e-300).log()
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(found.entropy, -(every * logs).sum(-1), **close)
    expected = weight.topk(K, -1).values
    torch.testing.assert_close(found.weights, expected, **close)
    there = found.keys >= 0
    assert torch.equal(there, expected > 0)
    torch.testing.assert_close(weight.gather(-1, found.keys.clamp_min(0)) * there, expected, **close)
    padded = torch.nn.functional.pad(weight, (0, -N % block)).unflatten(-1, (-1, block))
    torch.testing.assert_close(found.mass, padded.sum((2, 4)), **close)
    if sink is None:
        assert found.sink is None
    else:
        assert found.sink is not None
        torch.testing.assert_close(found.sink, every[..., -1], **close)


@pytest.mark.parametrize("mask", ["none", "causal", "window", "by hand", "torch"])
@pytest.mark.parametrize("score", list(SCORES))
@pytest.mark.parametrize("sink", [None, "heads"])
def test_statistics_are_those_of_dense_attention(score: str, mask: str, sink: str | None) -> None:
    query, key, value, d_out = inputs()
    sinks = None if sink is None else torch.linspace(-1, 2, Hq, dtype=torch.float64)
    block_mask = masks()[mask]
    weight = dense(query, key, value, d_out, SCORES[score], kept_pairs(block_mask), sinks)["weight"]
    found = statistics(query, key, value, SCORES[score], block_mask, enable_gqa=True, sink=sinks, largest=K)
    check(found, weight, sinks, N if block_mask is None else block_mask.BLOCK_SIZE[1], 1e-9)
    rows = weight.sum(-1) > 0
    assert torch.equal(found.lse != -math.inf, rows if sinks is None else torch.ones_like(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_and_shared_keys(dtype: torch.dtype) -> None:
    query, key, value, d_out = inputs(dtype, batch=1)
    mask = masks()["window"]
    weight = dense(query, key, value, d_out.double(), SCORES["softcap"], kept_pairs(mask), None)["weight"]
    found = statistics(query, key, value, SCORES["softcap"], mask, enable_gqa=True, largest=K)
    assert found.entropy.dtype == found.weights.dtype == found.mass.dtype == torch.float32
    check(found, weight, None, 8, 2e-5)


def test_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weights of a row may be in different tiles."""
    monkeypatch.setattr(cpu_tiles, "_SCORES", 64)
    monkeypatch.setattr(cpu_tiles, "_OPERAND", 64)
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 2, 200, D, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = create_block_mask(mods.sliding_window(150), None, None, 200, 200, device="cpu", BLOCK_SIZE=32)
    found = statistics(query, key, key, mods.alibi(2), mask, largest=K)
    score = query @ key.mT / math.sqrt(D)
    score = over_all_pairs(mods.alibi(2), score.shape, score)
    kept = over_all_pairs(mods.sliding_window(150), score.shape, device=score.device)
    weight = torch.softmax(score.masked_fill(~kept, -math.inf), -1)
    torch.testing.assert_close(found.weights, weight.topk(K, -1).values)
    torch.testing.assert_close(weight.gather(-1, found.keys.clamp_min(0)) * (found.keys >= 0), found.weights)
    torch.testing.assert_close(found.mass, torch.nn.functional.pad(weight, (0, 24)).unflatten(-1, (-1, 32)).sum((2, 4)))


def test_more_weights_than_keys_and_no_keys() -> None:
    query = torch.zeros(1, 2, 5, D)
    found = statistics(query, query[:, :, :3], query[:, :, :3], largest=8)
    assert found.keys.shape == (1, 2, 5, 8) and found.keys[0, 0, 0].sort().values.tolist() == [-1] * 5 + [0, 1, 2]
    none = statistics(query, query[:, :, :0], query[:, :, :0])
    assert none.mass.shape == (1, 2, 0) and not none.weights.any() and (none.keys == -1).all()
    assert (none.lse == -math.inf).all() and not none.entropy.any()
    with_sink = statistics(query, query[:, :, :0], query[:, :, :0], sink=1.0)
    assert with_sink.sink is not None and (with_sink.sink == 1).all() and not with_sink.entropy.any()
    empty = statistics(query[:, :, :0], query, query)
    assert empty.entropy.shape == (1, 2, 0) and not empty.mass.any()
    for statistic in (found, none, with_sink, empty):
        assert len(str(statistic).splitlines()) == 4


def test_memory_is_that_of_rows_not_of_pairs() -> None:
    query = torch.randn(1, 1, 8192, 16)
    mask = create_block_mask(mods.sliding_window(64), None, None, 8192, 8192, device="cpu")
    for block_mask in (mask, None):
        with Largest() as largest:
            statistics(query, query, query, None, block_mask)
        assert 0 < largest.numel <= 2**19


def test_printed() -> None:
    query, key, value, _ = inputs()
    text = str(statistics(query, key, value, None, masks()["window"], enable_gqa=True, sink=0.0))
    lines = text.splitlines()
    assert len(lines) == 2 + B * Hq
    assert "sink weight" in lines[1] and "8: " in lines[2]
    assert lines[2].split()[:3] == ["0", "0", "5"]
    many = statistics(torch.zeros(3, 8, 2, D), torch.zeros(3, 8, 2, D), torch.zeros(3, 8, 2, D))
    assert str(many).endswith("... 8 more heads")


@pytest.mark.parametrize("largest", [0, -1, 1.0, True])
def test_largest_that_keeps_nothing(largest: Any) -> None:
    with pytest.raises(ArgumentError, match="largest: found"):
        statistics(*inputs()[:3], enable_gqa=True, largest=largest)


@pytest.mark.parametrize("name", ["plain", "mask", "documents", "bias", "indices", "sink"])
def test_every_tensor_stays_on_the_device(name: str) -> None:
    problem = posed(cases()[name])
    with torch.no_grad():
        expected = weight_statistics._statistics(problem, K)
        with elsewhere():
            found = weight_statistics._statistics(moved(problem, there), K)
    for field in ("lse", "entropy", "weights", "mass", *(["sink"] if name == "sink" else [])):
        torch.testing.assert_close(back(getattr(found, field)), getattr(expected, field), rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    tensors = inputs(dtype)[:3]
    score_mod, mask_mod = mods.softcap(2.0), mods.sliding_window(9)
    expected, found = (
        statistics(
            *(x.to(device) for x in tensors),
            score_mod,
            create_block_mask(mask_mod, None, None, M, N, device=device, BLOCK_SIZE=16),
            enable_gqa=True,
            sink=0.5,
        )
        for device in ("cpu", "cuda")
    )
    for field in ("lse", "entropy", "weights", "mass", "sink"):
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(getattr(found, field).cpu(), getattr(expected, field), **close)
    assert str(found).splitlines()[:2] == str(expected).splitlines()[:2]


def test_contexts_and_gradients() -> None:
    query, key, value, _ = (x.float() for x in inputs())
    expected = statistics(query, key, value, enable_gqa=True)
    query.requires_grad_()
    with torch.device("meta"):
        found = statistics(query, key, value, enable_gqa=True)
    assert not found.entropy.requires_grad and torch.equal(found.entropy, expected.entropy)
    with torch.autocast("cpu", torch.bfloat16):
        cast = statistics(query, key, value, enable_gqa=True)
    halves = (x.detach().bfloat16() for x in (query, key, value))
    assert torch.equal(cast.mass, statistics(*halves, enable_gqa=True).mass)


def test_examples_in_the_documentation() -> None:
    failed, attempted = doctest.testmod(weight_statistics)
    assert (failed, attempted > 0) == (0, True)
