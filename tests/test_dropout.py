"""Dropout on the CPU engine: which weights stay, results and gradients against the reference, torch's generator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, dropout_mask, explain, flex_attention, mods
from flexattn.call.dropout import Dropout, _philox
from flexattn.engines import cpu_tiles
from flexattn.errors import ArgumentError, DtypeError
from flexattn.reference import attention

HALF = torch.tensor([12345], dtype=torch.int64)


def inputs(M: int = 33, N: int = 42, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, M, 8), (2, 2, N, 8), (2, 2, N, 5))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def ours(leaves: list[Tensor], p: float, mask=None, score_mod=None, seed: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    out, aux = flex_attention(*leaves, score_mod, mask, enable_gqa=True, dropout_p=p, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0x03707344A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E), None),
    ],
)
def test_philox(key: int, counter: tuple[int, int, int], words: tuple[int, ...] | None) -> None:
    """The first is a known answer of Random123, the second that of the algorithm in Python's integers."""
    found = tuple(int(w) for w in _philox(torch.tensor([key]), *(torch.tensor([c]) for c in counter)))
    assert found == (words or _philox_of_integers(key, *counter))


def _philox_of_integers(key: int, c0: int, c1: int, c2: int) -> tuple[int, ...]:
    c3, word = 0, 2**32
    k0, k1 = key % word, key // word
    for _ in range(7):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = odd // word ^ c1 ^ k0, odd % word, even // word ^ c3 ^ k1, even % word
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return c0, c1, c2, c3


@pytest.mark.parametrize("p", [0.02, 0.25, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for(p: float) -> None:
    torch.manual_seed(1)
    mask = dropout_mask(p, (2, 3, 128, 256))
    dropped = (mask == 0).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(dropped.mean()) - p) < 4 * sigma / dropped.numel() ** 0.5
    for dim in range(4):  # uniform along every axis
        rest = [d for d in range(4) if d != dim]
        share = dropped.mean(rest)
        assert float((share - p).abs().max()) < 5 * sigma / (dropped.numel() / len(share)) ** 0.5
    neighbours = float(((dropped[..., 1:] - p) * (dropped[..., :-1] - p)).mean()) / sigma**2
    assert abs(neighbours) < 5 / dropped.numel() ** 0.5
    assert float(mask.max()) == pytest.approx(1 / (1 - p), rel=2e-4)


@pytest.mark.parametrize("span", [(0, 42), (3, 5), (7, 40), (16, 24)])
def test_a_part_of_the_keys(span: tuple[int, int]) -> None:
    dropout, rows = Dropout(20_000, HALF), torch.arange(6)[:, None]
    zero, two = torch.tensor(0), torch.tensor(2)
    whole = dropout.keep(zero, two, 4, rows, [(0, 42)])
    assert torch.equal(dropout.keep(zero, two, 4, rows, [span]), whole[:, slice(*span)])


def test_a_part_of_a_larger_call() -> None:
    whole = Dropout(20_000, HALF)
    part = Dropout(20_000, HALF, q_offset=32, kv_offset=64, bh_offset=2 * 8 + 3, heads=8)
    rows = torch.arange(40)[:, None]
    for b, h in ((0, 0), (1, 2)):
        found = part.keep(torch.tensor(b), torch.tensor(h), 4, rows, [(0, 30)])
        wanted = whole.keep(torch.tensor(2 + b), torch.tensor(3 + h), 8, rows + 32, [(64, 94)])
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("score_mod", [None, mods.softcap(3.0)])
@pytest.mark.parametrize("p", [0.2, 1.0])
def test_results_and_gradients(p: float, score_mod) -> None:
    leaves = inputs()
    late = lambda b, h, i, j: (i >= j) & (i > 3)  # noqa: E731
    mask = create_block_mask(late, None, None, 33, 42, device="cpu", BLOCK_SIZE=16)
    found = ours(leaves, p, mask, score_mod)
    torch.manual_seed(3)
    weights = dropout_mask(p, (2, 4, 33, 42), dtype=torch.float64)
    want = attention(*leaves, score_mod, late, dropout=weights)
    cotangents = [torch.randn_like(want[0]), torch.randn_like(want[1])]
    grads, wanted = (torch.autograd.grad(pair, leaves, cotangents) for pair in (found, want))
    torch.testing.assert_close([*found, *grads], [*want, *wanted])
    assert p < 1 or not found[0].any()


def test_tiles_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = inputs(65, 131)
    results = []
    for block in (16, 24, 128):
        monkeypatch.setattr(cpu_tiles, "_SCORES", 64 * block)
        mask = create_block_mask(mods.sliding_window(40), None, None, 65, 131, device="cpu", BLOCK_SIZE=block)
        results.append(ours(leaves, 0.3, mask)[0])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_the_generator_decides() -> None:
    leaves = inputs()
    one, same, other = (ours(leaves, 0.3, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    torch.manual_seed(1)
    flex_attention(*leaves, enable_gqa=True)
    flex_attention(*leaves, enable_gqa=True, dropout_p=0.0)
    assert torch.equal(flex_attention(*leaves, enable_gqa=True, dropout_p=0.3), one), "without dropout nothing is drawn"
    assert not torch.equal(flex_attention(*leaves, enable_gqa=True, dropout_p=0.3), one), "each call draws anew"


def test_lse_is_that_before() -> None:
    leaves = inputs()
    torch.testing.assert_close(ours(leaves, 0.4)[1], ours(leaves, 0.0)[1])


def test_checkpointing_drops_the_same() -> None:
    leaves = inputs()
    torch.manual_seed(4)
    plain = flex_attention(*leaves, enable_gqa=True, dropout_p=0.3).square().sum()
    torch.manual_seed(4)
    again = torch.utils.checkpoint.checkpoint(
        lambda *x: flex_attention(*x, enable_gqa=True, dropout_p=0.3).square().sum(), *leaves, use_reentrant=False
    )
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (plain, again)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("p", "error", "says"),
    [
        (-0.1, ArgumentError, "dropout_p: found -0.1, expected a number from 0 to 1"),
        (1.5, ArgumentError, "dropout_p: found 1.5"),
        (float("nan"), ArgumentError, "dropout_p: found nan"),
        (True, DtypeError, "dropout_p: found a bool"),
        (torch.tensor(0.1), DtypeError, "dropout_p: found a Tensor"),
    ],
)
def test_what_is_refused(p, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ours(inputs(), p)


def test_explain_shows_it_and_draws_nothing() -> None:
    q = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    before = torch.get_rng_state()
    made = explain(q, q, q, dropout_p=0.25, target="sm_90")
    assert torch.equal(torch.get_rng_state(), before)
    assert [plan.has_dropout for plan in made.plans if "delta" not in plan.spec.name] == [True, True, True]
    assert "it does not support dropout" in str(made) and "dropout  by Philox" in made.full()
    with pytest.raises(ArgumentError, match=r"dropout_p: found 1\.5"):
        explain(q, q, q, dropout_p=1.5)
