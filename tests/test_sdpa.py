"""The SDPA provider on the CPU: the operators called directly, and through PyTorch's dispatcher."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import assert_close_to_oracle
from sdpa_cases import DENSE, LENGTHS, SdpaCase, attend, attend_packed, cumulative
from torch import Tensor
from torch.library import Library, get_kernel

import flexattn
from flexattn import sdpa
from flexattn.errors import ArgumentError, UnsupportedError
from flexattn.process.events import fallbacks, forget_fallbacks
from flexattn.sdpa import operators, passes, provider, rules
from flexattn.sdpa.passes import mask_for
from flexattn.sdpa.provider import OPERATORS
from flexattn.sdpa.rules import INFERENCE_RULES, RULES, InferenceCase, case_of, inference_reason_for, reason_for

ATEN: Any = torch.ops.aten
NAMES = ("dq", "dk", "dv")


def _dense(case: SdpaCase, tensors: list[Tensor], p: float = 0.0) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    """Return out [B, H, M, D], lse, and the backward, by the operators for [B, H, S, D]."""
    *given, state, unused, _ = sdpa.scaled_dot_product_flash_attention(*tensors, p, case.causal, scale=case.scale)
    out, lse, *lengths = given

    def backward(d_out: Tensor) -> Any:
        return sdpa.scaled_dot_product_flash_attention_backward(
            d_out, *tensors, out, lse, *lengths, p, case.causal, state, unused, scale=case.scale
        )

    return out, lse, backward


def _heads_last(
    case: SdpaCase, tensors: list[Tensor], p: float = 0.0
) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    """Do the same with the operators for [B, S, H, D]."""
    given = [x.transpose(1, 2) for x in tensors]
    sizes = None, None, case.M, case.N, p, case.causal
    options: dict[str, Any] = {
        "scale": case.scale, "window_size_left": case.window[0], "window_size_right": case.window[1],
    }  # fmt: skip
    out, lse, state, unused, debug_mask = sdpa.flash_attention_forward(*given, *sizes, False, **options)
    assert debug_mask.shape == (0,)

    def backward(d_out: Tensor) -> Any:
        d_out = d_out.transpose(1, 2)
        found = sdpa.flash_attention_backward(d_out, *given, out, lse, *sizes, state, unused, **options)
        return [x.transpose(1, 2) for x in found]

    return out.transpose(1, 2), lse, backward


def _check(run: Any, case: SdpaCase, p: float = 0.0, factors: Tensor | None = None) -> None:
    """Compare results and gradients with plain torch in the same dtype and in float64."""
    tensors = case.tensors()
    wide = [x.detach().double().requires_grad_() for x in tensors]
    out, lse, backward = run(case, tensors, p)
    dense, exact = case.expected(*tensors, factors), case.expected(*wide, factors)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    of_dense = torch.autograd.grad(dense[0], tensors, d_out)
    of_exact = torch.autograd.grad(exact[0], wide, d_out.double())
    assert lse.dtype == torch.float32 and not out.requires_grad and lse.is_contiguous()
    for name, found, x, y in zip(("out", "lse"), (out, lse), dense, exact, strict=True):
        assert_close_to_oracle(name, found, x, y)
    # The schema's lse is float32. Otherwise the CPU engine keeps more bits of it for its backward.
    factor = 4.0 if out.dtype == torch.float32 else 1.0
    for name, found, x, y in zip(NAMES, backward(d_out), of_dense, of_exact, strict=True):
        assert_close_to_oracle(name, found, x.nan_to_num(), y.nan_to_num(), "grad", factor=factor)


@pytest.mark.parametrize("name", [name for name, case in DENSE.items() if case.window == (None, None)])
def test_dense(name: str) -> None:
    _check(_dense, DENSE[name])


@pytest.mark.parametrize("name", DENSE)
def test_dense_with_heads_last(name: str) -> None:
    _check(_heads_last, DENSE[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    _check(_dense, replace(DENSE["gqa"], dtype=dtype))


def test_equals_the_math_of_torch() -> None:
    query, key, value = (x.detach().double() for x in DENSE["causal"].tensors())
    expected, _ = ATEN._scaled_dot_product_attention_math(query, key, value, is_causal=True)
    out, lse, *_ = sdpa.scaled_dot_product_flash_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert lse.dtype == torch.float32, "as the schema says, and compiled code assumes"


@pytest.mark.parametrize("run", [_dense, _heads_last])
@pytest.mark.parametrize("name", ["causal", "gqa"])
def test_the_backward_drops_what_the_forward_dropped(run: Any, name: str) -> None:
    case = DENSE[name]
    torch.manual_seed(5)
    factors = flexattn.dropout_mask(0.3, (case.B, case.Hq, case.M, case.N))
    torch.manual_seed(5)
    _check(run, case, 0.3, factors)


def test_dropout_of_all_weights() -> None:
    case = DENSE["plain"]
    out, _, backward = _dense(case, case.tensors(), 1.0)
    assert not out.any() and not any(x.any() for x in backward(torch.ones_like(out)))


def test_the_seed_comes_from_the_generator() -> None:
    tensors = DENSE["plain"].tensors()
    torch.manual_seed(3)
    state = sdpa.scaled_dot_product_flash_attention(*tensors, 0.5)[6]
    assert state.dtype == torch.uint64 and state.shape == (2,) and int(state[1]) == 0
    before = torch.get_rng_state()
    sdpa.scaled_dot_product_flash_attention(*tensors)
    assert torch.equal(before, torch.get_rng_state()), "a call without dropout draws nothing"


def _packed(lengths: Any, Hq: int = 2, Hkv: int = 2, D: int = 16) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return query, key, value, and the arguments cum_seq_q, cum_seq_k, max_q, max_k."""
    generator = torch.Generator().manual_seed(4)
    sizes = ((sum(lengths[0]), Hq), (sum(lengths[1]), Hkv), (sum(lengths[1]), Hkv))
    tensors = [torch.randn(t, h, D, generator=generator).requires_grad_() for t, h in sizes]
    return tensors, (*map(cumulative, lengths), max(lengths[0]), max(lengths[1]))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["equal heads", "gqa"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 3)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_packed(name: str, window: tuple[int, int], heads: tuple[int, int]) -> None:
    lengths = LENGTHS[name]
    tensors, sequences = _packed(lengths, *heads)
    options: dict[str, Any] = {"window_size_left": window[0], "window_size_right": window[1]}
    causal = window == (-1, 0)
    for _ in range(2):  # the second call is a repeated one
        out, lse, state, unused, _ = sdpa.flash_attention_forward(*tensors, *sequences, 0.0, causal, False, **options)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = attend_packed(*wide, lengths, window)
    torch.testing.assert_close((out.double(), lse.double()), expected, atol=1e-5, rtol=1e-5)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = sdpa.flash_attention_backward(d_out, *tensors, out, lse, *sequences, 0.0, causal, state, unused, **options)
    gradients = torch.autograd.grad(expected[0], wide, d_out.double())
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x.double(), y.nan_to_num(), atol=1e-5, rtol=1e-5)


def test_packed_dropout_is_the_same_in_the_backward() -> None:
    """Out is linear in value, so <out, d_out> == <value, dv> if and only if both dropped the same weights."""
    tensors, sequences = _packed(LENGTHS["different"])
    out, lse, state, unused, _ = sdpa.flash_attention_forward(*tensors, *sequences, 0.4, True, False)
    whole, *_ = sdpa.flash_attention_forward(*tensors, *sequences, 0.0, True, False)
    assert not torch.allclose(out, whole)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    _, _, dv = sdpa.flash_attention_backward(d_out, *tensors, out, lse, *sequences, 0.4, True, state, unused)
    torch.testing.assert_close((out * d_out).sum(), (tensors[2].detach() * dv).sum())


@pytest.mark.parametrize("causal", [False, True])
def test_used_lengths(causal: bool) -> None:
    query, key, value = (x.detach().transpose(1, 2) for x in SdpaCase(M=9, N=40, Hq=4).tensors())
    used = torch.tensor([33, 12], dtype=torch.int32)
    window = (-1, 0) if causal else (-1, -1)
    out, lse, *_ = sdpa.flash_attention_forward(
        query, key, value, None, None, 9, 40, 0.0, causal, False, seqused_k=used
    )
    for b, end in enumerate(used.tolist()):
        one = (query[b].transpose(0, 1)[None], *[x[b, :end].transpose(0, 1)[None] for x in (key, value)])
        expected, of_lse = attend(*one, window, None)
        torch.testing.assert_close(out[b], expected[0].transpose(0, 1))
        torch.testing.assert_close(lse[b], of_lse[0])


def test_used_lengths_of_packed_keys() -> None:
    lengths, used = ((5, 12, 3), (17, 20, 9)), (11, 20, 3)
    tensors, sequences = _packed(lengths)
    found = sdpa.flash_attention_forward(
        *[x.detach() for x in tensors], *sequences, 0.0, True, False, seqused_k=torch.tensor(used, dtype=torch.int32)
    )
    expected = attend_packed(*tensors, lengths, (-1, 0), used)
    torch.testing.assert_close(found[:2], tuple(x.detach() for x in expected))


@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(6, 16, 2, 8, generator=generator) for _ in range(2))
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    used = torch.tensor([20, 31], dtype=torch.int32)
    query = torch.randn(2, 3, 4, 8, generator=generator)
    given = (query.flatten(0, 1), key, value, cumulative((3, 3)), None) if packed else (query, key, value, None, None)
    out, lse, *_ = sdpa.flash_attention_forward(*given, 3, 32, 0.0, True, False, seqused_k=used, block_table=table)
    for b, end in enumerate(used.tolist()):
        k, v = (x[table[b].long()].flatten(0, 1)[:end].transpose(0, 1)[None] for x in (key, value))
        expected, of_lse = attend(query[b].transpose(0, 1)[None], k, v, (-1, 0), None)
        torch.testing.assert_close(out.view_as(query)[b], expected[0].transpose(0, 1))
        torch.testing.assert_close((lse[:, 3 * b : 3 * b + 3] if packed else lse[b]), of_lse[0])


@pytest.mark.parametrize(
    ("out", "p", "text"),
    [
        (torch.zeros(2, 6, 4, 8, dtype=torch.float16), 0.0, r"out: found torch.float16 \[2, 6, 4, 8\]"),
        (torch.zeros(3, 2, 6, 4, 8), 0.0, r"out: found .*\[3, 2, 6, 4, 8\]"),
        (torch.zeros(2, 6, 4, 8), 0.5, r"dropout_p: found 0.5, expected 0"),
    ],
    ids=["dtype", "shape", "dropout"],
)
def test_where_the_inplace_operator_cannot_write(out: Tensor, p: float, text: str) -> None:
    query = torch.zeros(2, 6, 4, 8)
    with pytest.raises(ValueError, match=text):
        sdpa.flash_attention_forward_no_dropout_inplace(out, query, query, query, None, None, 6, 6, p, False, False)


@pytest.mark.parametrize("name", ["grad_out", "out", "logsumexp"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_backward_of_other_results_is_refused(name: str, packed: bool) -> None:
    query = torch.randn(7, 2, 8) if packed else torch.randn(2, 6, 2, 8)
    cu = cumulative((3, 4)) if packed else None
    call = query, query, query, cu, cu, 6, 6, 0.0, True
    out, lse, state, unused, _ = sdpa.flash_attention_forward(*call, False)
    given = {"grad_out": out, "out": out, "logsumexp": lse}
    for wrong in (given[name][:1], given[name].half() if name != "logsumexp" else lse[..., :3]):
        grad_out, o, of_rows = (given | {name: wrong}).values()
        with pytest.raises(ArgumentError, match=f"{name}: found torch.float"):
            sdpa.flash_attention_backward(grad_out, *call[:3], o, of_rows, *call[3:], state, unused)


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("pages", [False, True])
def test_no_queries_with_used_lengths(pages: bool, sizes: tuple[int, int]) -> None:
    query, key = torch.randn(*sizes, 4, 8), torch.randn(2, 16, 2, 8)[: None if pages else sizes[0]]
    options = {"block_table": torch.zeros(sizes[0], 1, dtype=torch.int32)} if pages else {}
    used = torch.full(sizes[:1], 5, dtype=torch.int32)
    given = query, key, key, None, None, sizes[1], 16, 0.0, True, False
    out, lse, *_ = sdpa.flash_attention_forward(*given, seqused_k=used, **options)
    assert out.shape == query.shape and lse.shape == (sizes[0], 4, sizes[1]) and lse.dtype == torch.float32


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "sliced", "expanded", "one head"])
def test_results_are_those_of_the_fake_kernels(kind: str, dtype: torch.dtype) -> None:
    whole = torch.randn(2, 12, 4, 16).to(dtype)
    query = {
        "plain": whole, "sliced": whole[:, ::2, :, :8], "expanded": whole[:, :1].expand(2, 12, 4, 16),
        "one head": whole.transpose(1, 3)[:, :, :1],
    }[kind]  # fmt: skip
    rows, cu = query.flatten(0, 1), cumulative((3, query.size(1) * 2 - 3))
    used = torch.tensor([2, 1], dtype=torch.int32)
    calls = (
        (ATEN._scaled_dot_product_flash_attention, (query, query, query), {}),
        (ATEN._flash_attention_forward, (query, query, query, None, None, 12, 12, 0.0, True, False), {}),
        (ATEN._flash_attention_forward, (rows, rows, rows, cu, cu, 99, 99, 0.0, True, False), {}),
        (ATEN._flash_attention_forward, (rows, query, query, cu, None, 99, 12, 0.0, True, False), {"seqused_k": used}),
    )
    for operator, given, options in calls:
        if options and "seqused_k" not in str(operator.default._schema):
            continue
        found, expected = operator(*given, **options), operator(
            *[x.to("meta") if isinstance(x, Tensor) else x for x in given],
            **{name: x.to("meta") for name, x in options.items()},
        )  # fmt: skip
        for x, y in zip(found[:2], expected[:2], strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert found[0].stride() == torch.empty_like(given[0]).stride()


@pytest.mark.parametrize("splits", [1, 3])
def test_splits(splits: int) -> None:
    query, key, value = (x.detach().transpose(1, 2) for x in DENSE["causal"].tensors())
    sizes = None, None, 40, 40, 0.0, True, False
    found = sdpa.flash_attention_forward(query, key, value, *sizes, num_splits=splits)
    torch.testing.assert_close(found[:2], sdpa.flash_attention_forward(query, key, value, *sizes)[:2])
    tensors, sequences = _packed(LENGTHS["equal"])
    given = (*[x.detach() for x in tensors], *sequences, 0.0, True, False)
    found = sdpa.flash_attention_forward(*given, num_splits=splits)
    torch.testing.assert_close(found[:2], sdpa.flash_attention_forward(*given)[:2])


def test_in_place() -> None:
    query, key, value = (x.detach().transpose(1, 2) for x in DENSE["causal"].tensors())
    sizes = None, None, 40, 40, 0.0, True, False
    expected, of_lse, *_ = sdpa.flash_attention_forward(query, key, value, *sizes)
    out = torch.empty_like(query)
    lse = sdpa.flash_attention_forward_no_dropout_inplace(out, query, key, value, *sizes)
    assert torch.equal(out, expected) and torch.equal(lse, of_lse)


def _layouts() -> dict[str, list[Tensor]]:
    B, H, S, D = 2, 3, 20, 8
    rows = torch.randn(B, S, 3, H, D, generator=torch.Generator().manual_seed(0))
    one = rows[:1, :, 1, :1].transpose(1, 2).expand(B, H, S, D)
    return {
        "contiguous": [x.transpose(1, 2).contiguous() for x in rows.unbind(2)],
        "transposed": [x.contiguous().transpose(1, 2) for x in rows.unbind(2)],
        "slices": [x.transpose(1, 2) for x in rows.unbind(2)],
        "expanded": [rows[:, :, 0].transpose(1, 2), one, one],
        "columns": [x.transpose(1, 2).mT.contiguous().mT for x in rows.unbind(2)],
        "one head": [x[:, :, :1].transpose(1, 2) for x in rows.unbind(2)],
    }  # fmt: skip


@pytest.mark.parametrize("name", _layouts())
def test_results_have_the_strides_that_the_compiler_assumes(name: str) -> None:
    tensors = _layouts()[name]
    out, lse, *lengths, state, unused, _ = sdpa.scaled_dot_product_flash_attention(*tensors, is_causal=True)
    d_out = torch.ones(()).expand(out.shape)
    found = sdpa.scaled_dot_product_flash_attention_backward(
        d_out, *tensors, out, lse, *lengths, 0.0, True, state, unused
    )
    wide = [x.double().requires_grad_() for x in tensors]
    expected = attend(*wide, (-1, 0), None)[0]
    gradients = torch.autograd.grad(expected, wide, d_out.double())
    pairs = zip((out, *found), (tensors[0], *tensors), (expected.detach(), *gradients), strict=True)
    for x, like, right in pairs:
        assert x.stride() == torch.empty_like(like).stride()
        torch.testing.assert_close(x.double(), right, atol=1e-5, rtol=1e-5)
    rows = [x.transpose(1, 2) for x in tensors]
    out, *_ = sdpa.flash_attention_forward(*rows, None, None, 20, 20, 0.0, True, False)
    assert out.stride() == torch.empty_like(rows[0]).stride()


@pytest.mark.parametrize(("M", "N"), [(0, 5), (5, 0)])
def test_empty_lengths(M: int, N: int) -> None:
    case = SdpaCase(M=M, N=N, causal=True)
    out, lse, backward = _dense(case, case.tensors())
    assert not out.any() and bool((lse == -torch.inf).all()) and out.shape[2] == M
    assert [x.shape[2] for x in backward(out)] == [M, N, N]


def test_equal_windows_share_a_mask() -> None:
    query, key = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 12, 4)
    assert mask_for(query, key, (-1, 0)) is mask_for(query, key, (-1, 0))
    assert mask_for(query, key, (11, 7)) is None, "all keys are in the window"
    assert mask_for(query[:, :, :1], key, (-1, 0)) is None


def test_the_first_call_of_a_cuda_graph_skips_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of blocks need a wait for the device, which a graph cannot contain."""
    case = SdpaCase(M=300, N=310, causal=True)
    expected, *_ = _dense(case, case.tensors())
    forget_fallbacks()
    passes._masks.clear()
    monkeypatch.setattr(passes, "is_capturing", lambda query: True)
    out, _, backward = _dense(case, case.tensors())
    torch.testing.assert_close(out, expected)
    assert not passes._masks and "before the capture" in next(iter(fallbacks()))
    assert all(bool(x.isfinite().all()) for x in backward(out))


# What is not handled, and why.

Q = torch.zeros(2, 4, 6, 8)
UNHANDLED: dict[str, tuple[Tensor, Tensor, Tensor, bool, float]] = {
    "device": (Q, Q.to("meta"), Q, False, 0.0),
    "dtype": (Q.int(), Q.int(), Q.int(), False, 0.0),
    "rank": (Q, Q[0], Q, False, 0.0),
    "head dim": (Q, Q, Q[..., :4], False, 0.0),
    "wide": (*[Q[..., :1].expand(2, 4, 6, 257)] * 3, False, 0.0),
    "batch": (Q, Q[:1], Q[:1], False, 0.0),
    "heads": (Q, Q[:, :3], Q[:, :3], False, 0.0),
    "rows": (Q, Q, Q[:, :, :5], False, 0.0),
    "long": (Q, *[Q[:, :, :1].expand(2, 4, 2**30, 8)] * 2, False, 0.0),
    "dropout": (Q, Q, Q, False, 1.5),
}  # fmt: skip
UNHANDLED_INFERENCE = {
    "alibi": InferenceCase((False, False), 0.0, alibi=True),
    "debug mask": InferenceCase((False, False), 0.1, debug_mask=True),
    "inference dropout": InferenceCase((False, False), 0.1, seqused=True),
    "page size": InferenceCase((True, False), 0.0, seqused=True, page_size=24),
    "used lengths": InferenceCase((True, False), 0.0, page_size=16),
    "only keys packed": InferenceCase((False, True), 0.0),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_names_its_reason(name: str) -> None:
    reason = next(rule.reason for rule in RULES if rule.name == name)
    query, key, value, packed, p = UNHANDLED[name]
    assert reason_for(case_of(query, key, value, packed, p)) == reason
    assert sdpa.why_not(query, key, value, dropout_p=p) == reason
    with pytest.raises(sdpa.Unhandled) as error:
        sdpa.scaled_dot_product_flash_attention(query, key, value, p)
    assert str(error.value) == reason
    with pytest.raises(sdpa.Unhandled) as error:  # the backward decides in the same way
        sdpa.scaled_dot_product_flash_attention_backward(
            query, query, key, value, query, query[..., 0], None, None, 6, 6, p, False, query, query
        )
    assert str(error.value) == reason


@pytest.mark.parametrize("name", [rule.name for rule in INFERENCE_RULES])
def test_each_rule_of_inference_names_its_reason(name: str) -> None:
    assert inference_reason_for(UNHANDLED_INFERENCE[name]) == next(r.reason for r in INFERENCE_RULES if r.name == name)


def test_why_not() -> None:
    pages, cu, used = torch.zeros(3, 16, 2, 8), cumulative((3, 3)), torch.ones(2, dtype=torch.int32)
    rows, table = torch.zeros(6, 4, 8), torch.zeros(2, 1, dtype=torch.int32)
    assert sdpa.why_not(Q, Q[:, :2], Q[:, :2], dropout_p=0.1, is_causal=True, enable_gqa=True) is None
    assert sdpa.why_not(rows, pages, pages, cum_seq_q=cu, seqused_k=used, block_table=table) is None
    assert sdpa.why_not(Q, pages, pages, seqused_k=used, block_table=table) is None
    assert sdpa.why_not(rows, rows, rows, cum_seq_q=cu, cum_seq_k=cu) is None
    assert sdpa.why_not(rows, rows, rows, cum_seq_q=cu, cum_seq_k=cu, seqused_k=used) is None
    assert sdpa.why_not(Q, Q, Q, seqused_k=used) is None
    odd = torch.zeros(3, 16, 3, 8)
    paged = sdpa.why_not(rows, odd, odd, cum_seq_q=cu, seqused_k=used, block_table=table)
    assert "heads of query" in (paged or "")
    assert "ALiBi" in (sdpa.why_not(Q, Q, Q, alibi_slopes=torch.ones(4)) or "")
    assert "debug mask" in (sdpa.why_not(Q, Q, Q, dropout_p=0.1, return_debug_mask=True) or "")
    assert "attn_mask" in (sdpa.why_not(Q, Q, Q, torch.ones(6, 6, dtype=torch.bool)) or "")
    assert "gradient" in (sdpa.why_not(Q.clone().requires_grad_(), Q, Q, seqused_k=used) or "")


@pytest.mark.parametrize("option", ["alibi_slopes", "seqused_k", "block_table", "debug mask"])
def test_a_gradient_that_the_backward_cannot_compute_is_refused(option: str) -> None:
    query = torch.zeros(2, 6, 4, 8, requires_grad=True)
    p = 0.1 if option == "debug mask" else 0.0
    options: dict[str, Any] = {} if p else {option: torch.ones(2, dtype=torch.int32)}
    given = query, query, query, None, None, 6, 6, p, False, bool(p)
    with pytest.raises(UnsupportedError, match=r"query: found a gradient with .*no_grad") as error:
        sdpa.flash_attention_forward(*given, **options)
    assert not isinstance(error.value, sdpa.Unhandled), "PyTorch's own kernel would not compute it either"


# The dispatcher. PyTorch has none of these kernels on the CPU, where the provider can thus be tested.


@pytest.fixture
def on_cpu() -> Iterator[sdpa.Handle]:
    forget_fallbacks()
    with sdpa.activate("CPU") as handle:
        yield handle


def _through_autograd(case: SdpaCase, tensors: list[Tensor], p: float) -> Any:
    out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, p, case.causal, scale=case.scale)
    return out.detach(), lse.detach(), lambda d_out: torch.autograd.grad(out, tensors, d_out)


def _through_autograd_with_heads_last(case: SdpaCase, tensors: list[Tensor], p: float) -> Any:
    given = [x.transpose(1, 2) for x in tensors]
    out, lse, *_ = ATEN._flash_attention_forward(
        *given, None, None, case.M, case.N, p, case.causal, False, scale=case.scale,
        window_size_left=case.window[0], window_size_right=case.window[1],
    )  # fmt: skip
    out = out.transpose(1, 2)
    return out.detach(), lse.detach(), lambda d_out: torch.autograd.grad(out, tensors, d_out)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("run", [_through_autograd, _through_autograd_with_heads_last])
@pytest.mark.parametrize("name", ["gqa", "more keys"])
def test_gradients_through_autograd(run: Any, name: str) -> None:
    _check(run, DENSE[name])
    assert not fallbacks()


@pytest.mark.usefixtures("on_cpu")
def test_dropout_through_autograd() -> None:
    torch.manual_seed(5)
    factors = flexattn.dropout_mask(0.3, (2, 2, 40, 40))
    torch.manual_seed(5)
    _check(_through_autograd, DENSE["causal"], 0.3, factors)


@pytest.mark.usefixtures("on_cpu")
def test_packed_through_autograd() -> None:
    tensors, sequences = _packed(LENGTHS["different"])
    out, *_ = ATEN._flash_attention_forward(*tensors, *sequences, 0.0, True, False)
    expected, _ = attend_packed(*tensors, LENGTHS["different"], (-1, 0))
    torch.testing.assert_close(out, expected)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for x, y in zip(*(torch.autograd.grad(o, tensors, d_out) for o in (out, expected)), strict=True):
        torch.testing.assert_close(x, y.nan_to_num())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inside_torch_compile(backend: str) -> None:
    case = replace(DENSE["causal"], M=32, N=32)
    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
        return ATEN._scaled_dot_product_flash_attention(query, key, value, is_causal=True)[0] * 2

    tensors = case.tensors()
    out, expected = attention(*tensors), case.expected(*tensors)[0] * 2
    torch.testing.assert_close(out, expected)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for x, y in zip(*(torch.autograd.grad(o, tensors, d_out) for o in (out, expected)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_does_not_trace_the_provider() -> None:
    """A frame that torch.compile skips calls the operator, and the frames below are offered to torch.compile."""
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    def attention(query: Tensor) -> Tensor:
        return ATEN._scaled_dot_product_flash_attention(query, query, query)[0]

    expected = attention(Q)
    torch._dynamo.eval_frame.skip_code(attention.__code__)
    assert torch.equal(torch.compile(attention, backend=backend)(Q), expected)
    assert not compiled


@pytest.mark.usefixtures("on_cpu")
def test_autocast_and_inference_mode() -> None:
    tensors = DENSE["causal"].tensors()
    expected, of_lse, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    with torch.autocast("cpu"):
        out, lse, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    assert torch.equal(out, expected) and torch.equal(lse, of_lse)
    torch.autograd.grad(out.sum(), tensors)
    with torch.inference_mode():
        out, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("on_cpu")
def test_a_default_device_and_deterministic_algorithms() -> None:
    tensors = DENSE["more keys"].tensors()
    with torch.device("meta"):
        out, *_ = ATEN._scaled_dot_product_flash_attention(*tensors, is_causal=True)
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert out.is_cpu and all(x.is_cpu for x in gradients)


def test_an_activation_that_fails_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch refuse an operator for which another provider has a Python kernel."""
    own = provider._own_kernel

    def refuses(name: str, key: str) -> Any:
        if name == "_scaled_dot_product_flash_attention_backward":
            raise RuntimeError("already a kernel")
        return own(name, key)

    monkeypatch.setattr(provider, "_own_kernel", refuses)
    with pytest.raises(RuntimeError, match="already a kernel"):
        sdpa.activate("CPU")
    assert not _is_ours("CPU")


def _doubled(keys: Any, query: Tensor, *_: Any, **__: Any) -> Any:
    """An own kernel of PyTorch, as far as these tests are concerned."""
    empty = torch.empty(0)
    return query * 2, query.new_zeros(query.shape[:3]), None, None, 0, 0, empty, empty, empty


def test_the_original_kernel_computes_what_is_not_handled() -> None:
    forget_fallbacks()
    library = Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", _doubled, "CPU", with_keyset=True)
    own = get_kernel("aten::_scaled_dot_product_flash_attention", "CPU")
    query = torch.ones(1, 2, 4, 8)
    reason = "query, key and value must have one head dim: PyTorch's schema gives the output the shape of query"
    kernel = provider._with_fallback(
        "_scaled_dot_product_flash_attention", sdpa.scaled_dot_product_flash_attention, own
    )
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    out, *_ = kernel(keys, query, query, query[..., :4])
    handled, *_ = kernel(keys, query, query, query)
    library._destroy()
    assert torch.equal(out, query * 2) and torch.equal(handled, query)
    assert fallbacks() == {f"sdpa _scaled_dot_product_flash_attention: {reason}": 1}


@pytest.mark.usefixtures("on_cpu")
def test_without_an_original_kernel_the_reason_is_raised() -> None:
    with pytest.raises(UnsupportedError, match=r"head dim.*SDPBackend.MATH"):
        ATEN._scaled_dot_product_flash_attention(Q, Q, Q[..., :4])


def _is_ours(key: str) -> bool:
    """Whether the kernel of a dispatch key computes a call on the CPU."""
    try:
        kernel = get_kernel("aten::_scaled_dot_product_flash_attention", key)
    except RuntimeError:
        return False
    if "registered at /" in repr(kernel) and "RegisterCUDA" in repr(kernel):
        return False
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return kernel.call_boxed(keys, Q, Q, Q)[0].shape == Q.shape


def test_a_handle_is_removed_once() -> None:
    for _ in range(2):
        handle = sdpa.activate("CPU")
        assert handle.is_active and _is_ours("CPU") and repr(handle) == "<flexattn.sdpa.Handle, active>"
        handle.remove()
        handle.remove()
        assert not handle.is_active and not _is_ours("CPU") and repr(handle) == "<flexattn.sdpa.Handle, removed>"


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no registry"
)
def test_activate_restore_and_activate_again() -> None:
    attention: Any = torch.nn.attention
    assert sdpa.register() is None
    assert "flexattn" in attention.list_flash_attention_impls() and not _is_ours("CUDA")
    for _ in range(2):
        attention.activate_flash_attention_impl("flexattn")
        assert attention.current_flash_attention_impl() == "flexattn" and _is_ours("CUDA")
        attention.activate_flash_attention_impl("flexattn")  # restores, and activates
        assert _is_ours("CUDA")
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None and not _is_ours("CUDA")


def test_without_the_registry_a_handle_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    handle = sdpa.register()
    assert handle is not None and _is_ours("CUDA")
    handle.remove()
    assert not _is_ours("CUDA")


def test_an_import_registers_nothing() -> None:
    script = """
import flexattn, sys, torch
assert "flexattn.sdpa" not in sys.modules
import flexattn.sdpa
names = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
print("flexattn" in names, bool(torch.library._impls & {f"aten/{n}/CUDA" for n in flexattn.sdpa.provider.OPERATORS}))
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "False False", run.stderr


@pytest.mark.parametrize("name", [name for name in OPERATORS if hasattr(ATEN, name)])
def test_arguments_are_those_of_the_schema(name: str) -> None:
    schema = getattr(ATEN, name).default._schema
    parameters = inspect.signature(OPERATORS[name]).parameters
    kinds = {p.name: p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values()}
    assert [a.name for a in schema.arguments if not a.kwarg_only] == [n for n, last in kinds.items() if not last]
    keyword = [a.name for a in schema.arguments if a.kwarg_only]
    assert keyword == [n for n, last in kinds.items() if last][: len(keyword)]
    assert all(not a.has_default_value() or parameters[a.name].default == a.default_value for a in schema.arguments)


def test_examples_of_docstrings() -> None:
    failed, attempted = map(sum, zip(*map(doctest.testmod, (operators, provider, rules)), strict=True))
    assert failed == 0 and attempted >= 20
