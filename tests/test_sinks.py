"""Sinks on the CPU engine: results and gradients against the reference, what is refused, rows without a key."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, flex_attention, mods
from flexattn.call.sinks import weight_of_keys
from flexattn.errors import ArgumentError, DtypeError
from flexattn.reference import attention


def inputs(M: int = 33, N: int = 40, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, M, 8), (2, 2, N, 8), (2, 2, N, 5))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def ours(leaves: list[Tensor], sink: Tensor | float | None, mask=None, score_mod=None) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(*leaves, score_mod, mask, enable_gqa=True, sink=sink, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("score_mod", [None, mods.softcap(3.0)])
def test_results_and_gradients(shape: tuple[int, ...], score_mod) -> None:
    leaves, sink = inputs(), (2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    late = lambda b, h, i, j: (i >= j) & (i > 3)  # noqa: E731
    mask = create_block_mask(late, None, None, 33, 40, device="cpu", BLOCK_SIZE=16)
    found = ours(leaves, sink, mask, score_mod)
    want = attention(*leaves, score_mod, late, sink=sink)
    cotangents = [torch.randn_like(x) for x in want]
    grads, wanted = (torch.autograd.grad(pair, [*leaves, sink], cotangents) for pair in (found, want))
    torch.testing.assert_close([*found, *grads], [*want, *wanted])


def test_gradcheck() -> None:
    leaves, sink = inputs(5, 6), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: ours(list(x[:3]), x[3]), (*leaves, sink))


def test_softmax_off_by_one() -> None:
    leaves = inputs()
    zero = torch.zeros(2, 2, 1, 8, dtype=torch.float64), torch.zeros(2, 2, 1, 5, dtype=torch.float64)
    keys, values = (torch.cat([x, z], 2) for x, z in zip(leaves[1:], zero, strict=True))
    torch.testing.assert_close(ours(leaves, 0.0), ours([leaves[0], keys, values], None))  # exp(0) is a score of 0


def test_no_sink_and_one_of_no_weight_agree() -> None:
    leaves = inputs(dtype=torch.float32)
    for sink in (-math.inf, torch.full((4,), -math.inf)):
        torch.testing.assert_close(ours(leaves, sink), ours(leaves, None), rtol=0, atol=0)


@pytest.mark.parametrize("N", [40, 0])
def test_rows_without_a_key_have_the_sink_as_lse(N: int) -> None:
    leaves, sink = inputs(N=N), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: j < 0, None, None, 33, N, device="cpu") if N else None
    out, lse = ours(leaves, sink, mask)
    assert not out.any()
    torch.testing.assert_close(lse, sink[..., None].expand(lse.shape))
    (grad,) = torch.autograd.grad(lse.sum(), sink)
    torch.testing.assert_close(grad, torch.full_like(grad, 33.0))


def test_rows_with_neither_a_key_nor_a_sink() -> None:
    """Beside rows that have a key, so that their strip is computed."""
    leaves = inputs()
    mask = create_block_mask(lambda b, h, i, j: i > 5, None, None, 33, 40, device="cpu", BLOCK_SIZE=16)
    out, lse = ours(leaves, -math.inf, mask)
    torch.testing.assert_close((out, lse), ours(leaves, None, mask))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_only_the_sink_learns() -> None:
    leaves = [x.detach() for x in inputs()]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(leaves, sink)[0].sum(), sink)
    (want,) = torch.autograd.grad(attention(*leaves, sink=sink)[0].sum(), sink)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize(
    ("sink", "error", "says"),
    [
        (torch.zeros(3), ArgumentError, r"sink: found shape \[3\], expected \[4\] or \[2, 4\]"),
        (torch.zeros(4, dtype=torch.int32), DtypeError, "sink: found torch.int32"),
        ("zero", DtypeError, "sink: found a str"),
        (True, DtypeError, "sink: found a bool"),
        (math.nan, ArgumentError, "sink: found nan"),
        (math.inf, ArgumentError, "sink: found inf"),
    ],
)
def test_what_is_refused(sink, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ours(inputs(), sink)


def test_what_a_sink_leaves_to_keys() -> None:
    """The bound is far below 1 where a sink outweighs all keys, never below the truth, and 1 where it is small."""
    exact = torch.randn(2, 4, 33, dtype=torch.float64) * 3
    for sink in (-math.inf, -90.0, 0.0, 12.0, 40.0, 1e30):
        sinks = torch.full((1, 4), sink, dtype=torch.float64)
        lse = torch.logaddexp(exact, sinks[..., None])
        want = float(torch.exp(exact - lse).max())
        got = float(weight_of_keys(sinks.float(), lse.float()))
        assert min(want, 1.0) <= got <= min(1.0, want + 2.0**-19 * (1 + float(lse.max())))
    for missing in (-math.inf, math.nan):  # rows without a key, or of no numbers
        assert weight_of_keys(torch.full((1, 4), -math.inf), torch.full((2, 4, 3), missing)) == 1
