"""The kernel that appends to a paged cache, in Triton's interpreter, next to torch operations."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import test_kv_cache
import torch
from cache_cases import ModelledCache
from torch import Tensor

from flexattn import PagedKVCache
from flexattn.kv_cache.append import FLOAT8

pytest.importorskip("triton")
append = importlib.import_module("flexattn.kv_cache.append")


@pytest.mark.parametrize("options", [{}, {"kv_layout": "HND"}], ids=["NHD", "HND"])
def test_tokens(options: dict[str, Any]) -> None:
    model = ModelledCache(**options)
    model.append([40, 3, 0, 16])
    model.append([2, 33], [3, 1])
    model.fork(0, [2])
    for _ in range(3):
        model.append([1, 1, 1, 1])
    model.erase([1], [20])
    model.append([5, 7, 0, 1])
    model.check()
    assert not model.cache._pages.arrived.any()


def both(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tokens: dict[str, Any]) -> list[Tensor]:
    """Return the pages and the rotated query by the kernel, and the same in torch operations."""
    found: list[Tensor] = []
    for interpreting in (True, False):
        monkeypatch.setattr(append, "is_interpreting", lambda interpreting=interpreting: interpreting)
        cache = PagedKVCache(2, 60, pages=8, heads=2, head_dim=12, value_head_dim=8, device="cpu", **options)
        for x in (cache.key, cache.value):
            x.zero_()
        cache.append(tokens["key"], tokens["value"], lengths=[5, 19])
        query = cache.append(**tokens)
        found += [cache.key, cache.value, cache.seqused_k, cache.q_offsets, *([] if query is None else [query])]
    return found


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("half", [6, 2])
def test_rotary(interleaved: bool, half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    angle = torch.arange(60)[:, None] * 100 ** (-torch.arange(half) / half)
    tokens = {
        "key": torch.randn(2, 19, 2, 12).transpose(1, 2), "value": torch.randn(2, 2, 19, 8),
        "query": torch.randn(2, 4, 19, 12), "lengths": torch.tensor([19, 7], dtype=torch.int32),
        "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": interleaved,
    }  # fmt: skip
    found = both(monkeypatch, {"dtype": torch.float32}, tokens)
    for x, y in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor([2.0**-8, 2.0**-5])

    def exact(*shape: int) -> Tensor:
        """Return numbers that are not rounded: the interpreter rounds some to half of what they are."""
        return torch.randn(*shape).mul(9).to(FLOAT8).float() * scale[:, None, None]

    tokens = {"key": exact(2, 2, 19, 12), "value": 64 * exact(2, 2, 19, 8)}  # some values saturate
    found = both(monkeypatch, {"dtype": FLOAT8, "k_descale": scale, "v_descale": scale}, tokens)
    for x, y in zip(found[:4], found[4:], strict=True):
        assert torch.equal(x.float(), y.float())


def test_replays_without_room_write_nothing() -> None:
    """The kernel alone, as a CUDA graph runs it, without the host that takes pages."""
    model = ModelledCache(2, 60, 8)
    model.append([30, 10])
    model.cache.reserve([2, 6])
    pages = model.cache._pages
    for _ in range(3):
        x = torch.randn(2, 2, 1, 20)
        key, value = x.split((8, 12), -1)
        append.append(pages, append.Tokens(key, value, None, None, None, None, None, True))
        model.tokens = [torch.cat((t, x[b].transpose(0, 1))) for b, t in enumerate(model.tokens)]
    assert pages.lengths.tolist() == [-33, 13]
    model.tokens[0] = model.tokens[0][:32]
    with pytest.raises(RuntimeError, match=r"sequences: found \[0\] without room in a CUDA graph"):
        model.cache.synchronize()
    model.check()


@pytest.mark.parametrize("interleaved", [False, True])
def test_float64(interleaved: bool) -> None:
    test_kv_cache.test_float64_tokens_keep_their_bits_and_positions_without_an_angle_are_nan(interleaved)


def test_no_tokens() -> None:
    """q_offsets follow, as after each append."""
    cache = PagedKVCache(2, 60, pages=8, heads=2, head_dim=12, dtype=torch.float32, device="cpu")
    tokens = torch.randn(2, 2, 19, 12)
    cache.append(tokens, tokens, lengths=[5, 19])
    assert cache.q_offsets.tolist() == [0, 0]
    query = cache.append(tokens[:, :, :0], tokens[:, :, :0], query=tokens[:, :, :0])
    assert query is not None and query.shape == (2, 2, 0, 12)
    assert cache.q_offsets.tolist() == cache.seqused_k.tolist() == [5, 19]
