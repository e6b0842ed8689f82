"""The backward of small problems as one kernel, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Setting
from small_cases import CASES, check_small, in_one_launch
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.compile.kernels import SMALL
from flexattn.engines import repeated_calls

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of masked places

# Triton's interpreter computes bfloat16 wrong.
AT = Setting("cpu", torch.float16, options=(("BACKEND", "TRITON"),))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    check_small(name, AT)


def test_known_calls_launch_it_again() -> None:
    """No memory is allocated for it but the gradients."""
    mask = create_block_mask(mods.causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=64)
    q, k, v = (torch.randn(1, 2, 100, 32, dtype=torch.float16).requires_grad_() for _ in range(3))

    def both(q: Tensor) -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "TRITON"})
        return torch.autograd.grad(out, (q, k, v), q.detach())

    with in_one_launch() as launched:
        first = both(q)
        other = both(q.detach().flip(2).requires_grad_())
        again = both(q)
        (call,) = repeated_calls._calls.values()
        (known,) = call.backwards.values()
    assert [spec for spec in launched if spec.phase == "bwd"] == [SMALL]
    assert known.memory == 0
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
