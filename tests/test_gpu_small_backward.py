"""The backward of small problems as one kernel, on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Setting
from small_cases import CASES, check_small, in_one_launch

from flexattn import create_block_mask, flex_attention, mods
from flexattn.compile.kernels import SMALL

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    check_small(name, Setting("cuda", dtype))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_as_it_is_chosen(is_compiled: bool) -> None:
    """8 heads of 256 tokens, as by default. Every bit is the same in each call."""
    causal = create_block_mask(mods.causal, None, None, 256, 256, device="cuda")
    q, k, v = (torch.randn(1, 8, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))

    def attend(q, k, v):
        return flex_attention(q, k, v, mods.alibi(8), causal)

    call = torch.compile(attend, fullgraph=True) if is_compiled else attend
    with in_one_launch(2) as launched:
        found = [torch.autograd.grad(call(q, k, v), (q, k, v), q.detach()) for _ in range(3)]
    assert [spec for spec in launched if spec.phase == "bwd"] == [SMALL]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    wanted = torch.autograd.grad(attend(q, k, v), (q, k, v), q.detach())
    for a, b in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
