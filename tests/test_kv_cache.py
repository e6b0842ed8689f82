"""PagedKVCache on the CPU: its tokens next to a model, pages that run out, forks, rotary embedding and errors."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from cache_cases import ModelledCache, stored
from torch import Tensor

import flexattn
from flexattn import PagedKVCache, flex_attention
from flexattn.errors import ArgumentError, CacheFullError
from flexattn.kv_cache.append import FLOAT8


@pytest.mark.parametrize("options", [{}, {"kv_layout": "HND"}, {"page_size": 32}], ids=["NHD", "HND", "32"])
def test_random_operations(options: dict[str, Any]) -> None:
    """After any operations, or errors, the cache holds the same tokens as the lists."""
    choose = random.Random(0)
    model = ModelledCache(**options)
    full = 0
    for _ in range(150):
        row = choose.randrange(4)
        length = len(model.tokens[row])
        operation = choose.choice(("append", "append", "append", "some", "erase", "fork"))
        try:
            if operation == "append":
                model.append([choose.randrange(12) for _ in range(4)] if choose.random() < 0.5 else [1] * 4)
            elif operation == "some":
                rows = choose.sample(range(4), 2)
                model.append([choose.randrange(1, 40) for _ in rows], rows)
            elif operation == "erase":
                model.erase([row], [choose.choice((0, length // 2, length))])
            elif (targets := [i for i, tokens in enumerate(model.tokens) if not len(tokens)]) and length:
                model.erase(targets, [0] * len(targets))
                model.fork(row, targets)
        except CacheFullError:
            full += 1
            model.check()
            model.erase([row], [0])
        model.check()
    assert full > 3, "the pool should have been too small at times"


def test_pages_are_shared_until_they_are_written() -> None:
    model = ModelledCache(4, 200, 20)
    model.append([40], [0])  # 2 full pages, and one with 8 tokens
    model.fork(0, [1, 2, 3])
    assert model.cache.free_pages == 17
    model.append([1], [2])
    assert model.cache.free_pages == 16  # a copy of the last page
    model.append([1, 1], [0, 1])
    assert model.cache.free_pages == 14
    model.append([1], [3])
    assert model.cache.free_pages == 14  # no other sequence has this page by now
    model.check()
    model.erase([3], [10])
    model.append([5], [3])
    assert model.cache.free_pages == 14  # the third page was given back, the first was copied
    model.check()
    model.erase([0, 1, 2, 3], [0] * 4)
    assert model.cache.free_pages == 20


def test_reserved_pages_are_used_first() -> None:
    model = ModelledCache(2, 80, 6)
    model.cache.reserve([40, 0])
    assert model.cache.free_pages == 3
    model.append([40, 1])
    assert model.cache.free_pages == 2
    with pytest.raises(CacheFullError, match="pages: found 3 needed, expected at most 2, which are free"):
        model.cache.reserve([8, 48])
    model.append([8, 31])
    model.check()


def test_nothing_is_lost_if_there_are_too_few_pages() -> None:
    model = ModelledCache(2, 90, 4)
    model.append([30, 20])
    with pytest.raises(
        CacheFullError, match=r"pages: found 1 needed, expected at most 0, which are free\. Erase sequences"
    ):
        model.append([2, 13])
    model.check()
    model.append([2, 12])
    with pytest.raises(CacheFullError, match="max_tokens: found 91 tokens of sequence 0, expected at most 90"):
        model.append([59, 0])
    model.check()


def test_numbers_of_tokens_on_the_device() -> None:
    """The host knows only their bounds. It reads the lengths where it must."""
    model = ModelledCache(2, 64, 8)
    for _ in range(6):
        new = torch.randn(2, 2, 10, 20)
        counts = torch.tensor([10, 3], dtype=torch.int32)
        model.cache.append(*new.split((8, 12), -1), lengths=counts)
        for row, n in enumerate((10, 3)):
            model.tokens[row] = torch.cat((model.tokens[row], new[row].transpose(0, 1)[:n]))
        assert model.cache.seqused_k.tolist() == [len(tokens) for tokens in model.tokens]
    model.check()
    model.erase([1], [5])
    model.append([0, 40])
    model.check()


def tables(positions: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 10000 ** (-torch.arange(half) / half)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("half", [4, 2])
def test_rotary(interleaved: bool, half: int) -> None:
    """Rotations are products of complex numbers."""
    cache = PagedKVCache(2, 50, pages=8, heads=2, head_dim=8, dtype=torch.float64, device="cpu")
    first = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    cache.append(first, first, lengths=[7, 2])
    key, query = torch.randn(2, 2, 5, 8, dtype=torch.float64), torch.randn(2, 6, 5, 8, dtype=torch.float64)
    cos, sin = tables(50, half, torch.float64)
    rotated = cache.append(key, key, query=query, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    for b, start in enumerate((7, 2)):
        turns = torch.complex(cos, sin)[start : start + 5]

        def turned(x: Tensor, turns: Tensor = turns) -> Tensor:
            x, rest = x[..., : 2 * half], x[..., 2 * half :]
            pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
            found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
            return torch.cat(((found if interleaved else found.mT).flatten(-2), rest), -1)

        k, v = stored(cache, b)
        torch.testing.assert_close(k[start:], turned(key[b]).transpose(0, 1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(v[start:], key[b].transpose(0, 1))
        torch.testing.assert_close(rotated[b], turned(query[b]), rtol=1e-6, atol=1e-6)
    assert torch.equal(cache.q_offsets, torch.tensor([7, 2], dtype=torch.int32))


def test_float8_pages() -> None:
    largest = torch.tensor([3.0, 20.0])
    cache = PagedKVCache(
        1,
        40,
        pages=4,
        heads=2,
        head_dim=8,
        dtype=FLOAT8,
        device="cpu",
        k_descale=largest / 448,
        v_descale=largest / 448,
    )
    x = torch.randn(1, 2, 20, 8).clamp(-3, 3) * torch.tensor([1.0, 6.0])[:, None, None]
    cache.append(x, 9 * x)
    k, v = (t.float() * (largest / 448)[:, None] for t in stored(cache, 0))
    torch.testing.assert_close(k, x[0].transpose(0, 1), rtol=2**-4, atol=0.02)
    assert v.abs().amax((0, 2)).tolist() == pytest.approx([3.0, 20.0])  # saturated


def test_a_call_reads_what_was_appended() -> None:
    model = ModelledCache(3, 60, 20)
    model.append([20, 0, 33])
    model.fork(2, [1])
    model.append([1, 1, 1])
    q = torch.randn(3, 4, 1, 8)
    out = flex_attention(q, model.cache.key, model.cache.value, enable_gqa=True, **model.cache.arguments())
    for b, tokens in enumerate(model.tokens):
        k, v = tokens.transpose(0, 1)[None].split((8, 12), -1)
        expected, _ = flexattn.reference.attention(q[b : b + 1], k, v)
        torch.testing.assert_close(out[b : b + 1], expected.float())
    some = flex_attention(
        q[[2, 0]], model.cache.key, model.cache.value, enable_gqa=True, **model.cache.arguments([2, 0])
    )  # fmt: skip
    torch.testing.assert_close(some, out[[2, 0]])


def make(**changes: Any) -> PagedKVCache:
    options = {"pages": 8, "heads": 2, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
    return PagedKVCache(**{"sequences": 2, "max_tokens": 60, **options, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sequences": 0}, "sequences: found 0"),
        ({"pages": 2.5}, "pages: found 2.5"),
        ({"page_size": 24}, "page_size: found 24, expected a power of two from 16 on"),
        ({"page_size": 8}, "page_size: found 8"),
        ({"max_tokens": 1 << 30}, "max_tokens: found 1073741824"),
        ({"dtype": torch.int8}, "dtype: found torch.int8"),
        ({"kv_layout": "DNH"}, "kv_layout: found 'DNH'"),
        ({"dtype": FLOAT8}, "k_descale: found None, expected float32"),
        ({"k_descale": torch.ones(2)}, "k_descale: found a tensor, expected None"),
    ],
)
def test_errors_of_the_constructor(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**changes)


X = torch.randn(2, 2, 3, 8)
COS, SIN = tables(60, 4)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"key": X[:1]}, ValueError, r"key: found shape \[1, 2, 3, 8\], expected \[2, 2, any, 8\]"),
        ({"key": X.mT}, ValueError, r"expected \[2, 2, any, 8\]\. It is \[B, heads, tokens, head_dim\]: .*transpose"),
        ({"value": X[:, :, :2]}, ValueError, "value: found shape"),
        ({"key": X[0]}, ValueError, "key: found shape"),
        ({"key": None}, TypeError, "key: found a NoneType"),
        ({"key": X.half()}, TypeError, "key: found f16, expected f32"),
        ({"value": X.to("meta")}, RuntimeError, "value: found device meta"),
        ({"query": X[..., :4]}, ValueError, "query: found shape"),
        ({"lengths": [1, 4]}, ValueError, "lengths: found 4, expected at most the length of key, 3"),
        ({"lengths": [1]}, ValueError, "lengths: found"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths: found i64"),
        ({"sequences": [0, 0]}, ValueError, r"sequences: found \[0, 0\], expected different ints from 0 to 1"),
        ({"sequences": [0, 2]}, ValueError, "sequences: found"),
        ({"rotary_cos": COS}, TypeError, "rotary_sin: found None"),
        ({"rotary_cos": COS, "rotary_sin": SIN[:4]}, ValueError, "rotary_sin: found shape"),
        ({"rotary_cos": torch.ones(60, 5), "rotary_sin": SIN}, ValueError, "rotary_cos: found shape"),
        ({"rotary_cos": COS.clone().requires_grad_(), "rotary_sin": SIN}, NotImplementedError, "rotary_cos: found a"),
        ({"rotary_cos": COS, "rotary_sin": SIN, "rotary_interleaved": "no"}, TypeError, "rotary_interleaved: found"),
    ],
)  # fmt: skip
def test_errors_of_append(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    cache = make()
    with pytest.raises(error, match=text):
        cache.append(**{"key": X, "value": X, **changes})
    assert cache.free_pages == 8 and cache.synchronize() == [0, 0]


def test_tokens_that_need_a_gradient() -> None:
    cache, x = make(), X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="key: found a tensor that requires a gradient"):
        cache.append(x, x)
    with torch.no_grad():
        cache.append(x, x)


def test_errors_of_erase_and_fork() -> None:
    cache = make()
    cache.append(X, X, lengths=[3, 0])
    with pytest.raises(ValueError, match="keep: found 4, expected the length of sequence 0, 3"):
        cache.erase([0], 4)
    with pytest.raises(ValueError, match="targets: found"):
        cache.fork(0, [0])
    cache.append(X, X)
    with pytest.raises(ValueError, match="targets: found 3 tokens of 1, expected empty sequences"):
        cache.fork(0, [1])


def test_its_text() -> None:
    cache = make()
    cache.append(X, X, lengths=[3, 0])
    cache.append(X, X, lengths=torch.tensor([1, 2], dtype=torch.int32))
    assert repr(cache) == "PagedKVCache(2 of 8 pages of 16 tokens, lengths [3..6, 0..3])"


def test_wrong_types_and_lengths_name_the_argument_and_change_nothing() -> None:
    model = ModelledCache()
    key, value = torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 12)
    calls: list[tuple[str, Any]] = [
        ("lengths", lambda: model.cache.append(key, value, lengths=torch.tensor([6, 0, 0, 0], dtype=torch.int32))),
        ("lengths", lambda: model.cache.append(key, value, lengths=torch.tensor([-1, 0, 0, 0], dtype=torch.int32))),
        ("lengths", lambda: model.cache.append(key, value, lengths=1.5)),  # type: ignore[arg-type]
        ("sequences", lambda: model.cache.erase(0)),  # type: ignore[arg-type]
        ("targets", lambda: model.cache.fork(0, 1)),  # type: ignore[arg-type]
        ("tokens", lambda: model.cache.reserve(1.5)),  # type: ignore[arg-type]
        ("keep", lambda: model.cache.erase([0], 1.5)),  # type: ignore[arg-type]
        ("tokens", lambda: model.cache.reserve(torch.tensor(2))),  # type: ignore[arg-type]
        ("keep", lambda: model.cache.erase([0], torch.tensor(0))),  # type: ignore[arg-type]
    ]
    for name, call in calls:
        with pytest.raises(flexattn.errors.ArgumentError, match=f"^{name}: found"):
            call()
    model.check()
    assert model.cache.free_pages == 24


@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_tokens_keep_their_bits_and_positions_without_an_angle_are_nan(interleaved: bool) -> None:
    cache = PagedKVCache(1, 64, pages=4, heads=1, head_dim=8, dtype=torch.float64, device="cpu")
    x, angles = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    rotated = cache.append(x, x, query=x, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    assert rotated is not None
    key, value = stored(cache, 0)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    expected = x[0, 0].clone()
    expected[4, :4] = torch.nan
    for i, (a, b) in enumerate(pairs):
        expected[:4, a] = x[0, 0, :4, a] * cos[:, i] - x[0, 0, :4, b] * sin[:, i]
        expected[:4, b] = x[0, 0, :4, b] * cos[:, i] + x[0, 0, :4, a] * sin[:, i]
    for found in (key[:, 0], rotated[0, 0]):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14, equal_nan=True)
    assert torch.equal(value[:, 0], x[0, 0])


def test_nan_stays_nan_in_float8() -> None:
    scale = torch.ones(1)
    cache = PagedKVCache(
        1, 64, pages=4, heads=1, head_dim=8, dtype=FLOAT8, device="cpu", k_descale=scale, v_descale=scale
    )
    x = torch.tensor([torch.nan, 1.0, 1000.0, -torch.inf]).repeat(2)[None, None, None]
    cache.append(x, x)
    for found in stored(cache, 0):
        expected = torch.tensor([torch.nan, 1.0, 448.0, -448.0]).repeat(2)
        torch.testing.assert_close(found[0, 0].float(), expected, rtol=0, atol=0, equal_nan=True)


def test_tokens_of_another_dtype() -> None:
    cache = PagedKVCache(1, 64, pages=4, heads=2, head_dim=16, device="cpu")
    key = torch.zeros(1, 2, 3, 16)
    text = r"key: found f32, expected bf16.*key\.to\(torch\.bfloat16\), or make the cache with .*dtype=torch\.float32"
    with pytest.raises(flexattn.FlexAttentionError, match=text):
        cache.append(key, key)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_reads_what_is_appended_to_it(layout: Any, copied: Any) -> None:
    cache = PagedKVCache(1, 64, pages=4, heads=2, head_dim=16, dtype=torch.float32, device="cpu", kv_layout=layout)
    x, y, q = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 1, 16)
    cache.append(x, x)
    for other in (copied(cache), cache):
        other.append(y, y)
        found = flex_attention(q, other.key, other.value, **other.arguments())
        keys = torch.cat([x, y], 2)
        torch.testing.assert_close(found, flex_attention(q, keys, keys))


def test_bools_are_no_sequences() -> None:
    cache = PagedKVCache(2, 64, pages=4, heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    with pytest.raises(ArgumentError, match=r"sequences: found \[True, False\], expected different ints"):
        cache.erase([True, False])
    with pytest.raises(ArgumentError, match="targets: found 1, expected different ints"):
        cache.fork(0, 1)  # type: ignore[arg-type]
