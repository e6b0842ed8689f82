"""The passes of the SDPA provider on Triton kernels: what a GPU runs, and that repeated calls launch known kernels."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from oracle import assert_close_to_oracle
from sdpa_cases import DENSE, attend_packed, cumulative
from torch._subclasses.fake_tensor import FakeTensorMode

from flexattn import api, dropout_mask
from flexattn.call.dropout import check_dropout
from flexattn.call.varlen.arguments import PackedArguments
from flexattn.engines import triton
from flexattn.mask_build import cache as mask_cache
from flexattn.runtime.launch import forget_launches
from flexattn.sdpa import passes
from flexattn.sdpa.passes import Form, backward, forward, repeated_backward, repeated_forward
from flexattn.torch_state import lasting

ON_TRITON = (("BACKEND", "TRITON"),)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["gqa", "more keys"])
def test_dense(name: str, p: float) -> None:
    case = replace(DENSE[name], B=1, Hq=2, Hkv=1, dtype=torch.float16)
    query, key, value = tensors = case.tensors()
    form = Form((-1, 0), None, None, ON_TRITON)
    torch.manual_seed(2)
    dropout = check_dropout(p, query.device)
    torch.manual_seed(2)
    factors = dropout_mask(p, (1, case.Hq, case.M, case.N))
    with torch.no_grad():
        for _ in range(2):
            out, lse = forward(query, key, value, form, dropout)
            d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
            gradients = backward(query, key, value, form, dropout, out, lse, d_out)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    dense, exact = case.expected(*tensors, factors), case.expected(*wide, factors)
    assert_close_to_oracle("out", out, dense[0], exact[0])
    assert_close_to_oracle("lse", lse, dense[1], exact[1])
    grads = (torch.autograd.grad(dense[0], tensors, d_out), torch.autograd.grad(exact[0], wide, d_out.double()))
    for of, found, x, y in zip(("dq", "dk", "dv"), gradients, *grads, strict=True):
        assert_close_to_oracle(of, found, x, y, "grad")


def test_packed() -> None:
    lengths = (5, 0, 20)
    cu = cumulative(lengths)
    tensors = [torch.randn(25, 2, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    form = Form((-1, 0), None, PackedArguments(cu, cu, 20, 20, (-1, 0)), ON_TRITON)
    with torch.no_grad():
        for _ in range(2):
            out, lse = forward(*tensors, form, None)
        gradients = backward(*tensors, form, None, out, lse, torch.ones_like(out))
    expected, of_lse = attend_packed(*tensors, (lengths, lengths), (-1, 0))
    torch.testing.assert_close((out, lse), (expected.detach(), of_lse.detach()), atol=2e-3, rtol=2e-3)
    for x, y in zip(gradients, torch.autograd.grad(expected.sum(), tensors), strict=True):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=5e-3)


def test_repeated_calls_launch_known_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = replace(DENSE["causal"], B=1, dtype=torch.float16).tensors()
    form = Form((-1, 0), None, None, ON_TRITON)
    with torch.no_grad():
        out, lse = forward(query, key, value, form, None)
        first = backward(query, key, value, form, None, out, lse, out)
        monkeypatch.setattr(api, "_through_all_stages", None)
        monkeypatch.setattr(triton, "_backward", None)
        assert torch.equal(forward(query, key, value, form, None)[0], out)
        for x, y in zip(backward(query, key, value, form, None, out, lse, out), first, strict=True):
            assert torch.equal(x, y)


def test_repeated_passes() -> None:
    """They read the values of their tensors, and are only for the same dtypes, layouts and settings."""
    tensors = query, key, value = [x.detach() for x in replace(DENSE["causal"], B=1, dtype=torch.float16).tensors()]
    form = Form((-1, 0), None, None, ON_TRITON)
    out, lse = forward(query, key, value, form, None)
    d_out = torch.ones_like(out)
    gradients = backward(query, key, value, form, None, out, lse, d_out)
    negative = [-x for x in tensors]
    found = repeated_forward(*negative, form)
    assert found is not None
    assert torch.equal(found[0], forward(*negative, form, None)[0]) and torch.equal(found[1], lse)
    again = repeated_backward(query, key, value, form, out, lse, d_out)
    assert again is not None and all(torch.equal(x, y) for x, y in zip(again, gradients, strict=True))
    others = (
        (query, key.bfloat16(), value), (query, key, value.float()),
        (query.transpose(1, 2).contiguous().transpose(1, 2), key, value),
        (torch._neg_view(query), key, value), (query, key, key), (query[..., :8], key[..., :8], value[..., :8]),
    )  # fmt: skip
    assert all(repeated_forward(*other, form) is None for other in others)
    assert repeated_forward(*tensors, form._replace(window=(-1, -1))) is None
    assert repeated_backward(query, key, value, form, out, lse, d_out[:1, :1].expand_as(d_out)) is None
    with FakeTensorMode():
        assert repeated_forward(*tensors, form) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert repeated_backward(query, key, value, form, out, lse, d_out) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_output_without_contiguous_rows() -> None:
    """The operators give the output the strides of query, whatever these are."""
    query, key, value = [x.detach() for x in replace(DENSE["causal"], B=1, dtype=torch.float16).tensors()]
    form = Form((-1, 0), None, None, ON_TRITON)
    out, lse = forward(query, key, value, form, None)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    expected = backward(query, key, value, form, None, out, lse, d_out)
    columns = out.mT.contiguous().mT
    for _ in range(2):
        for x, y in zip(backward(query, key, value, form, None, columns, lse, d_out), expected, strict=True):
            assert torch.equal(x, y)
    assert repeated_backward(query, key, value, form, columns, lse, d_out) is None


def test_a_known_backward_is_only_for_an_lse_of_the_call() -> None:
    query, key, value = [x.detach() for x in replace(DENSE["causal"], B=1, dtype=torch.float16).tensors()]
    form = Form((-1, 0), None, None, ON_TRITON)
    out, lse = forward(query, key, value, form, None)
    backward(query, key, value, form, None, out, lse, out)
    assert repeated_backward(query, key, value, form, out, lse, out) is not None
    for other in (lse[:, :, 1:].contiguous(), lse[:, :1], lse.double(), lse.mT.contiguous().mT, lse.to("meta")):
        assert repeated_backward(query, key, value, form, out, other, out) is None


def test_a_cuda_graph_keeps_the_lists_of_a_repeated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in a capture may launch known kernels without asking for the mask, whose caches may evict it later."""
    captures = [False]
    for module in (lasting, passes):
        monkeypatch.setattr(module, "is_capturing", lambda device: captures[0])
    kept = []
    forget_launches()  # of other tests
    for window in ((-1, 0), (20, 0)):
        tensors = [torch.randn(1, 1, 64, 16, dtype=torch.float16) for _ in range(3)]
        form = Form(window, None, None, ON_TRITON)
        with torch.no_grad():
            forward(*tensors, form, None)
            captures[0] = window == (-1, 0)
            assert repeated_forward(*tensors, form) is not None
            captures[0] = False
        (mask,) = passes._masks.values()
        kept.append(weakref.ref(mask.kv_runs.partial.runs))
        del mask
        forget_launches()
        passes._problem_of_sizes.cache_clear()
        mask_cache.clear()
    gc.collect()
    assert [ref() is not None for ref in kept] == [True, False]
