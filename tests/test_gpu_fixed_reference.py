"""hopper_forward's fixed reference: scores whose maximum rises in every way, against float64.

With --fixed-reference, all GPU tests use it also for few keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, explain, flex_attention, mods, tiles_redone
from flexattn.process.config import settings
from flexattn.runtime.launch import forget_launches

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="not an sm_90 GPU"
    ),
]

H, S = 3, 2304
HOPPER: dict[str, Any] = {"BACKEND": "HOPPER"}
Tensors = tuple[Tensor, Tensor, Tensor]


def all_maxima(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Any:
    """Call flex_attention without the fixed reference."""
    with monkeypatch.context() as patch:
        patch.setenv("FLEXATTN_WITHOUT", "fixed_reference")
        settings.cache_clear()
        forget_launches()
        found = flex_attention(*args, **options)
    settings.cache_clear()
    forget_launches()
    return found


def normal(D: int, deviation: float = 1.0) -> Tensors:
    """Return query, key and value whose scores have this standard deviation."""
    generator = torch.Generator("cuda").manual_seed(D)
    q, k, v = (torch.randn(1, H, S, D, device="cuda", generator=generator) for _ in range(3))
    return (q * deviation).bfloat16(), k.bfloat16(), v.bfloat16()


def with_sink(D: int, nats: float, *keys: int) -> Tensors:
    """Return tensors with keys whose scores are about `nats`, and those of the others about 0."""
    q, k, v = (x.float() for x in normal(D))
    q[..., 0], k[..., 0] = D**0.25, 0.0
    k[:, :, keys, 0] = nats * D**0.25
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def rising(per_key: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score + per_key * kv_idx


def far(per_key: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score + per_key * (q_idx - kv_idx)


def both_sides(per_key: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score - per_key * (q_idx - kv_idx).abs()


def documents(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Rows of one warpgroup that have their first keys in different tiles."""
    own, other = ((x >= 1000).int() + (x >= 1030).int() + (x >= 1800).int() for x in (q_idx, kv_idx))
    return torch.where(own == other, score, -float("inf"))


def late(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Rows without a score in their first tiles."""
    return torch.where(kv_idx < 1000, -float("inf"), score)


CASES: dict[str, tuple[Callable[[int], Tensors], Callable[..., Tensor] | None]] = {
    **{f"deviation {x}": (lambda D, x=x: normal(D, x), None) for x in (1, 10, 25, 50)},
    **{f"sink {x} at {i}": (lambda D, x=x, i=i: with_sink(D, x, i), None) for x in (20, 100, 150) for i in (0, 1500)},
    # The second key is in the first tile of a chunk, whose maximum is far above that of the chunk before.
    **{f"two sinks {x}": (lambda D, x=x: with_sink(D, x, 1500, 2100), None) for x in (80, 90, 95, 104)},
    **{f"both sides {x}": (normal, both_sides(x)) for x in (0.03, 0.055, 0.0625, 0.25)},
    "documents": (normal, documents),
    **{f"rising {x}": (normal, rising(x)) for x in (0.02, 0.3, 3.0)},
    **{f"far {x}": (normal, far(x)) for x in (0.02, 0.3)},
    "late": (normal, late),
    "softcap": (lambda D: normal(D, 20), mods.softcap(30.0)),
}


def scores(q: Tensor, k: Tensor, score_mod: Any, causal: bool) -> Tensor:
    """Return the scores in float64, [H, S, S]."""
    s = (q[0].double() @ k[0].double().mT) * q.shape[-1] ** -0.5
    row, column = torch.arange(S, device="cuda")[:, None], torch.arange(S, device="cuda")
    if score_mod is not None:
        s = score_mod(s, 0, 0, row, column)
    return s.masked_fill(column > row, -torch.inf) if causal else s


def causal_mask() -> Any:
    return create_block_mask(mods.causal, None, None, S, S, device="cuda")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, D: int, causal: bool) -> None:
    make, score_mod = CASES[name]
    q, k, v = make(D)
    mask = causal_mask() if causal else None
    assert explain(q, k, v, score_mod, mask, kernel_options=HOPPER).plans[0].fixed_reference
    out, aux = flex_attention(q, k, v, score_mod, mask, kernel_options=HOPPER, return_aux=AuxRequest(lse=True))
    s = scores(q, k, score_mod, causal)
    weights = s.softmax(-1).nan_to_num(0.0)
    expected = weights @ v[0].double()
    # Weights and the result are rounded to bfloat16, each by up to 2^-8.
    bound = 1.02 * 2.0**-7 * (weights @ v[0].double().abs()) + 1e-6
    assert ((out[0].double() - expected).abs() <= bound).all()
    approximate_tanh = 5e-4 if name == "softcap" else 0.0
    torch.testing.assert_close(aux.lse[0].double(), s.logsumexp(-1), rtol=5e-6, atol=2e-5 + approximate_tanh)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_tiles_that_overflow_are_computed_again_and_counted(causal: bool) -> None:
    mask = causal_mask() if causal else None
    before = tiles_redone()
    flex_attention(*normal(128), block_mask=mask, kernel_options=HOPPER)
    flex_attention(*with_sink(128, 100, 1500), block_mask=mask, kernel_options=HOPPER)
    assert tiles_redone() == before
    call = with_sink(128, 150, 1500)
    first = flex_attention(*call, block_mask=mask, kernel_options=HOPPER)
    found = tiles_redone() - before
    # Tiles of 128 queries; with a causal mask only those that have the tile of key 1500 as a full one.
    assert found == (H * sum(m >= 1536 for m in range(0, S, 128)) if causal else H * S // 128)
    assert torch.equal(first, flex_attention(*call, block_mask=mask, kernel_options=HOPPER))


def test_products_that_overflow_while_sums_do_not() -> None:
    q, k, v = with_sink(128, 90, 1500)
    v = v * 1e25
    out = flex_attention(q, k, v, kernel_options=HOPPER)
    expected = scores(q, k, None, False).softmax(-1) @ v[0].double()
    torch.testing.assert_close(out[0].double(), expected, rtol=2e-2, atol=1e23)


@pytest.mark.parametrize("power", [10, 16, 20, 22, 24, 25, 26, 28])
def test_large_scores(power: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a power of two, where a reference is rounded otherwise than the maximum that it is HEADROOM above."""
    q, k, v = normal(128)
    wanted = torch.rand(S, device="cuda", generator=torch.Generator("cuda").manual_seed(power))
    table = (2.0**power + 80.0 * (wanted - 0.5)) * math.log(2)  # nats
    given = q * 0.0, k, v, lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]
    options: Any = {"kernel_options": HOPPER, "return_aux": AuxRequest(lse=True)}
    (out, aux), (expected, expected_aux) = flex_attention(*given, **options), all_maxima(monkeypatch, *given, **options)
    torch.testing.assert_close(out, expected, rtol=2.0**-6, atol=2.0**-7)
    torch.testing.assert_close(aux.lse, expected_aux.lse, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("nats", [60, 100, 105])
def test_an_attention_sink_far_above_a_sum_that_is_large(nats: float) -> None:
    q, k, v = with_sink(128, nats, 1500)
    sink = torch.full((H,), nats + 25.0, device="cuda")
    out = flex_attention(q, k, v, sink=sink, kernel_options=HOPPER)
    s = scores(q, k, None, False)
    weights = (s - torch.logaddexp(s.logsumexp(-1), sink.double()[:, None])[..., None]).exp()
    expected = weights @ v[0].double()
    assert ((out[0].double() - expected).abs() <= 1.02 * 2.0**-7 * (weights @ v[0].double().abs())).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_changes_no_other_row(bad: float) -> None:
    q, k, v = normal(128)
    expected = flex_attention(q, k, v, kernel_options=HOPPER)
    q = q.clone()
    q[0, 1, 700, 3] = bad
    out = flex_attention(q, k, v, kernel_options=HOPPER)
    others = torch.ones(S, dtype=torch.bool, device="cuda")
    others[700] = False
    # Its tile is computed again, with all maxima.
    torch.testing.assert_close(out[0, 1, others], expected[0, 1, others], rtol=2e-2, atol=2e-2)
    assert torch.equal(out[0, 0], expected[0, 0])
    assert out[0, 1, 700].isnan().all()


def test_replays_of_a_graph_compute_tiles_again() -> None:
    q, k, v = normal(128)
    flex_attention(q, k, v, kernel_options=HOPPER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(q, k, v, kernel_options=HOPPER)
    for x, y in zip((q, k, v), with_sink(128, 150, 1500), strict=True):
        x.copy_(y)
    before = tiles_redone()
    graph.replay()
    assert tiles_redone() - before == H * S // 128
    assert torch.equal(out, flex_attention(q, k, v, kernel_options=HOPPER))
