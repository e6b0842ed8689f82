"""The specification against torch's own attention, and its promises on rows without a key."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_close_to_oracle

from flexattn import create_block_mask
from flexattn.errors import DtypeError
from flexattn.mods import causal
from flexattn.reference import attention, over_all_pairs


def _inputs(B=2, Hq=4, Hkv=2, M=9, N=13, D=8, Dv=6, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def test_equals_scaled_dot_product_attention():
    q, k, v = _inputs()
    out, lse = attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_mods_see_batch_head_and_positions():
    bias = torch.randn(2, 4, 9, 13, dtype=torch.float64, requires_grad=True)
    q, k, v = _inputs()
    out, _ = attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j], lambda b, h, i, j: (i + h) >= j - b)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in bias.shape), indexing="ij")
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, torch.where(i + h >= j - b, bias, -math.inf), enable_gqa=True
    )
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v, bias)), strict=True):
        torch.testing.assert_close(got, want)


def test_captured_tensors_are_indexed_in_any_pattern():
    table = torch.randn(3, 4, 5, 13, dtype=torch.float64)
    q, k, v = _inputs()
    expected, _ = attention(q, k, v, lambda s, b, h, i, j: s + table[0, h, 2, j])
    for read in (
        lambda h, j: table[0][h][2][j],
        lambda h, j: table[0, :, 2][h, j],
        lambda h, j: table[:, h, 2, j][0],
        lambda h, j: table[0, h, ..., j][2],
        lambda h, j: table[..., 2, j][0, h],
        lambda h, j: table.transpose(0, 1)[h, 0, 2, j - 13],
    ):
        out, _ = attention(q, k, v, lambda s, b, h, i, j, read=read: s + read(h, j))
        assert torch.equal(out, expected)


def test_a_bool_tensor_is_a_mask():
    q, k, v = _inputs()
    mask = over_all_pairs(lambda b, h, i, j: (i * j + h) % 3 != 0, torch.Size((2, 4, 9, 13)))
    out, lse = attention(q, k, v, mask_mod=mask)
    same, same_lse = attention(q, k, v, mask_mod=lambda b, h, i, j: (i * j + h) % 3 != 0)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)


def test_a_row_with_an_infinite_score_is_that_of_softmax():
    q, k, v = _inputs()
    infinite = lambda score, b, h, i, j: torch.where((i == 1) & (j == 2), math.inf, score)  # noqa: E731
    out, lse = attention(q, k, v, infinite)
    score = over_all_pairs(
        infinite, torch.Size((2, 4, 9, 13)), q @ k.repeat_interleave(2, 1).mT / math.sqrt(q.shape[-1])
    )
    torch.testing.assert_close(lse, score.logsumexp(-1))
    torch.testing.assert_close(out, score.softmax(-1) @ v.repeat_interleave(2, 1), equal_nan=True)
    assert (lse[:, :, 1] == math.inf).all() and out[:, :, 1].isnan().all()


def test_rows_without_a_key_are_zero_with_zero_gradients():
    q, k, v = _inputs()
    table = torch.randn(13, dtype=torch.float64, requires_grad=True)
    out, lse = attention(q, k, v, lambda s, b, h, i, j: s * table[j], lambda b, h, i, j: (i >= 4) & (j >= 2))
    assert (out[:, :, :4] == 0).all() and (lse[:, :, :4] == -math.inf).all()
    finite = lse[:, :, 4:]
    dq, dk, dv, dt = torch.autograd.grad(out.sum() + finite.sum(), (q, k, v, table))
    assert (dq[:, :, :4] == 0).all() and (dk[:, :, :2] == 0).all() and (dv[:, :, :2] == 0).all()
    assert (dt[:2] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv, dt))


def test_gradients_are_derivatives():
    q, k, v = _inputs(B=1, Hq=2, Hkv=1, M=3, N=4, D=2, Dv=2)
    scale = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, scale):
        return attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) * scale[h], lambda b, h, i, j: i >= j)

    assert torch.autograd.gradcheck(run, (q, k, v, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computes_in_the_dtype_of_the_inputs_when_told(dtype):
    q, k, v = (x.detach() for x in _inputs(dtype=dtype))
    out, lse = attention(q, k, v, dtype=None)
    exact, exact_lse = attention(q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 20 * torch.finfo(dtype).eps
    assert (lse - exact_lse).abs().max() < 20 * torch.finfo(dtype).eps


def test_batch_of_keys_is_broadcast_and_empty_sizes_run():
    q, k, v = _inputs()
    out, _ = attention(q, k[:1], v[:1])
    torch.testing.assert_close(out, attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))[0])
    for empty in ({"B": 0}, {"M": 0}, {"N": 0}, {"Hq": 0, "Hkv": 0}):
        q, k, v = _inputs(**empty)
        out, lse = attention(q, k, v, lambda s, b, h, i, j: s + 1, lambda b, h, i, j: i >= j)
        assert out.shape == (*q.shape[:3], 6) and lse.shape == q.shape[:3] and (out == 0).all()


def test_a_mod_may_return_a_number():
    q, k, v = _inputs()
    out, _ = attention(q, k, v, lambda s, b, h, i, j: 0.0)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(-1, -1, 9, -1).repeat_interleave(2, 1))


def test_the_oracle_says_what_is_wrong():
    want = torch.randn(4, 5, dtype=torch.float64)
    dense = want.float()
    assert_close_to_oracle("out", dense.clone(), dense, want)
    with pytest.raises(AssertionError, match=r"out: rmse .*allowed .*the first at \[2, 3\]"):
        bad = dense.clone()
        bad[2, 3] += 1e-3
        assert_close_to_oracle("out", bad, dense, want)
    with pytest.raises(AssertionError, match=r"lse: 1 infinities are at wrong positions"):
        bad = dense.clone()
        bad[0, 0] = -math.inf
        assert_close_to_oracle("lse", bad, dense, want, "lse")
    with pytest.raises(AssertionError, match=r"dq: 1 of 20 values are NaN"):
        bad = dense.clone()
        bad[0, 0] = math.nan
        assert_close_to_oracle("dq", bad, dense, want, "grad")


def test_a_block_mask_is_no_mask_mod():
    q, k, v = _inputs()
    mask = create_block_mask(causal, None, None, 9, 13, device="cpu")
    with pytest.raises(DtypeError, match=r"mask_mod: found a BlockMask.* Pass mask_mod=block_mask\.mask_mod\."):
        attention(q, k, v, None, mask)
    with pytest.raises(DtypeError, match=r"score_mod: found a BlockMask.* Pass mask_mod=block_mask\.mask_mod\."):
        attention(q, k, v, mask)
