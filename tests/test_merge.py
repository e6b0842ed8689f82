"""merge_attention: attention over parts of the keys equals attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, flex_attention, merge_attention
from flexattn.errors import ArgumentError, DtypeError, FlexAttentionError

CUTS = ((0, 5), (5, 6), (6, 20))


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 8, dtype=dtype).requires_grad_() for n in (7, 20, 20)]


def attend(q: Tensor, k: Tensor, v: Tensor, begin: int = 0, end: int = 20) -> tuple[Tensor, Tensor]:
    """Keys from 9 on do not attend to the first two queries."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where((q_idx < 2) & (kv_idx + begin < 9), -math.inf, score * (1 + h))

    out, aux = flex_attention(q, k[:, :, begin:end], v[:, :, begin:end], score_mod, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out, aux.lse


def merged(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    parts = [attend(*tensors, *cut) for cut in CUTS]
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts])


def test_out_lse_and_gradients() -> None:
    tensors = leaves()
    (out, lse), (whole, whole_lse) = merged(*tensors), attend(*tensors)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    roots = [(out.square().sum() + lse.sin().sum()), (whole.square().sum() + whole_lse.sin().sum())]
    for a, b in zip(*(torch.autograd.grad(root, tensors) for root in roots), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_without_keys() -> None:
    out = torch.full((1, 1, 2, 4), math.nan, requires_grad=True)
    lse = torch.tensor([-math.inf, -math.inf]).view(1, 1, 2).requires_grad_()
    other, other_lse = torch.ones(1, 1, 2, 4), torch.tensor([0.5, -math.inf]).view(1, 1, 2)
    found, found_lse = merge_attention([out, other], [lse, other_lse])
    assert found[0, 0].tolist() == [[1.0] * 4, [0.0] * 4] and found_lse.flatten().tolist() == [0.5, -math.inf]
    gradients = torch.autograd.grad(found.sum(), (out, lse))
    assert all(not g.any() for g in gradients)


def test_gradcheck() -> None:
    outs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge_attention(x[:3], x[3:]), (*outs, *lses))


def test_half_and_large_values() -> None:
    q, k, v = (x.detach().to(torch.float16) for x in leaves(torch.float32))
    parts = [attend(q, k, v, *cut) for cut in CUTS]
    out, lse = merge_attention([o for o, _ in parts], [x + 300 for _, x in parts])
    whole, whole_lse = attend(q, k, v)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    torch.testing.assert_close(out, whole, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, whole_lse + 300)


def test_a_causal_mask_in_two_parts() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    request = AuxRequest(lse=True)
    causal = lambda s, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, s, -math.inf)  # noqa: E731
    late = lambda s, b, h, q_idx, kv_idx: causal(s, b, h, q_idx, kv_idx + 32)  # noqa: E731
    parts = [
        flex_attention(q, k[:, :, :32], v[:, :, :32], causal, return_aux=request),
        flex_attention(q, k[:, :, 32:], v[:, :, 32:], late, return_aux=request),
    ]
    out, _ = merge_attention([o for o, _ in parts], [aux.lse for _, aux in parts])
    torch.testing.assert_close(out, flex_attention(q, k, v, causal), atol=1e-5, rtol=1e-5)


def test_errors_name_the_argument() -> None:
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for outs, lses, error, text in (
        ([], [], ArgumentError, "outs: found no tensor"),
        ([out], [], ArgumentError, "lses: found 0 tensors"),
        ([out, out[..., :2]], [lse, lse], ArgumentError, r"outs\[1\]: found shape"),
        ([out, out], [lse, lse[..., :2]], ArgumentError, r"lses\[1\]: found shape"),
        ([out, out.half()], [lse, lse], DtypeError, r"outs\[1\]: found torch.float16"),
        ([out.int(), out.int()], [lse, lse], DtypeError, r"outs\[0\]: found torch.int32"),
        ([out, out], [lse, lse.half()], DtypeError, r"lses\[1\]: found torch.float16"),
    ):
        with pytest.raises(error, match=text):
            merge_attention(outs, lses)


@pytest.mark.parametrize(
    ("outs", "lses", "name"),
    [
        ([1], [2], "outs"),
        (torch.zeros(2, 1, 1, 1, 4), torch.zeros(2, 1, 1, 1), "outs"),
        ([torch.zeros(1, 1, 1, 4)], [None], "lses"),
        ([torch.zeros(1, 1, 1, 4)], [torch.zeros(1, 1, 1, device="meta")], r"lses\[0\]"),
        ([], [torch.zeros(1, 1, 1)], "outs"),
    ],
)
def test_parts_that_are_no_tensors_of_one_device(outs: object, lses: object, name: str) -> None:
    with pytest.raises(FlexAttentionError, match=f"^{name}: found"):
        merge_attention(outs, lses)  # type: ignore[arg-type]
