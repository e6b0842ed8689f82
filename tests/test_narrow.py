"""narrow: integers of mods are int32 in graphs if that fits every value, and results equal torch's int64 ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mod_grammar import classify_boxes
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.errors import FlexAttentionError, ModError
from flexattn.graph.interval_bounds import bound
from flexattn.graph.mod_graph import ModGraph
from flexattn.trace.trace import trace

N = 96
BITS = torch.randint(-(2**62), 2**62, (N,), generator=torch.Generator().manual_seed(0))


def int64s(graph: ModGraph) -> list[str]:
    """Return the int64 operations of a graph, except numbers, which are converted."""
    return [n.op for n in graph.nodes if n.dtype == torch.int64 and n.op != "number"]


def with_number(n: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: q - k < n


LARGE: dict[str, Callable[..., Any]] = {
    "no window": with_number(sys.maxsize), "literal": lambda b, h, q, k: q - k < 9223372036854775807,
    "below": lambda b, h, q, k: q - k > -(2**40), "product": lambda b, h, q, k: (q * 2**40 + k) % 7 < 3,
    "product of indices": lambda b, h, q, k: (q * 100_000 * (k * 100_000)) % 11 < 5,
    "shift": lambda b, h, q, k: ((1 << (k % 64)) & BITS[q]) != 0,
    "shift out": lambda b, h, q, k: (BITS[q] >> k) + (1 << k) < q,
    "power": lambda b, h, q, k: (3**k.long()) % 5 == (q % 5), "powers": lambda b, h, q, k: q ** (k % 13) % 1000 > 300,
    "sign": lambda b, h, q, k: (-1) ** (q - k) > 0, "number": with_number(2**31),
    "sum": lambda b, h, q, k: q + (2**31 - 2) > k + 2**31,
}  # fmt: skip


def by_torch(mask: Callable[..., Any]) -> Tensor:
    """Run a mask on int64 indices, as torch's eager flex_attention does."""
    return mask(0, 0, torch.arange(N)[:, None], torch.arange(N)[None, :]).expand(N, N)


@pytest.mark.parametrize("name", LARGE)
def test_large_integers(name: str) -> None:
    """The graph, its bounds at points, the mask builder and the CPU engine agree with torch."""
    mask, wanted = LARGE[name], by_torch(LARGE[name])
    traced = trace(mask, "mask")
    q, k = torch.arange(N, dtype=torch.int32)[:, None], torch.arange(N, dtype=torch.int32)[None, :]
    zero = torch.zeros((), dtype=torch.int32)
    assert torch.equal(traced(zero, zero, q, k).expand(N, N), wanted)
    points = torch.tensor([[0, 0, 0, 0, i, i, j, j] for i in range(0, N, 5) for j in range(0, N, 3)])
    classes = torch.from_numpy(
        classify_boxes(bound(traced.graph), traced.captures, traced.numbers, points.numpy()).copy()
    )
    decided = classes < 2
    assert torch.equal(classes[decided] == 1, wanted[points[:, 4], points[:, 6]][decided])
    built = create_block_mask(mask, 1, 1, N, N, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(built.to_dense().bool()[0, 0], wanted.view(6, 16, 6, 16).any(3).any(1))
    x = torch.randn(1, 1, N, 8, dtype=torch.float64)
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, wanted).nan_to_num()  # rows without a key: 0
    torch.testing.assert_close(flex_attention(x, x, x, block_mask=built), dense, rtol=1e-9, atol=1e-9)


def test_ordinary_masks_are_int32() -> None:
    window, documents = 7, torch.arange(N, dtype=torch.int32) // 9
    for mask in (
        mods.causal, mods.sliding_window(16), mods.prefix_lm(5), mods.natten_2d(8, 12, 3),
        lambda b, h, q, k: q // 128 == k // 128,
        lambda b, h, q, k: (q - k).abs() <= window, lambda b, h, q, k: (q + window) - (k + 2 * window) >= 0,
        lambda b, h, q, k: documents[q] == documents[k], lambda b, h, q, k: (q * 2 - k * 2 < 9) & (q % 4 == k % 4),
    ):  # fmt: skip
        assert not int64s(trace(mask, "mask").graph)
    scores = (lambda s, b, h, q, k: s + (q - k) * 0.5, lambda s, b, h, q, k: s + torch.log((q - k).abs() + 1.0))
    for score in scores:
        assert not int64s(trace(score, "score").graph)


def test_numbers_of_another_size_make_another_graph() -> None:
    small, large = (trace(with_number(n), "mask").graph for n in (7, 2**40))
    assert not int64s(small) and int64s(large)
    assert trace(with_number(8), "mask").graph == small


def test_a_number_beyond_the_dtype_of_a_captured_tensor() -> None:
    ids = torch.arange(N, dtype=torch.int32)

    def of(n: int) -> Callable[..., Tensor]:
        return lambda b, h, q, k: ids[q] < n

    trace(of(2**31 - 1), "mask")
    with pytest.raises(ModError, match=r"captured number `n`.*2147483648.*Convert the tensor"):
        trace(of(2**31), "mask")
    with pytest.raises(FlexAttentionError, match=r"2147483648 in torch.int32"):
        trace(lambda b, h, q, k: ids[q] < 2147483648, "mask")


@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.int8, 128), (torch.uint8, 256), (torch.uint8, -3), (torch.int16, 40000)]
)
def test_a_divisor_beyond_the_dtype_of_a_captured_tensor(dtype: torch.dtype, n: int) -> None:
    ids = torch.arange(N).to(dtype)
    for mod in (lambda b, h, q, k: ids[q] % n == 0, lambda b, h, q, k: ids[q] // n == 0):
        with pytest.raises(FlexAttentionError, match=rf"of {n} in {dtype}, which cannot hold it"):
            trace(mod, "mask")


@pytest.mark.parametrize("n", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_a_number_beyond_int64(n: int) -> None:
    with pytest.raises(ModError, match=str(n)):
        trace(lambda b, h, q, k: q < n, "mask")


def test_a_literal_beyond_int64() -> None:
    with pytest.raises(ModError, match="36893488147419103232"):
        trace(lambda b, h, q, k: q < 36893488147419103232, "mask")
