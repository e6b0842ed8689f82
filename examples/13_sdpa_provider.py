"""13. A provider for PyTorch's scaled_dot_product_attention: what it computes, what it leaves to PyTorch, and why."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexattn import sdpa
from flexattn.reference import attention

B, HQ, HKV, S, D = 2, 8, 2, 200, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def main() -> None:
    q = torch.randn(B, HQ, S, D, device=DEVICE, dtype=DTYPE, requires_grad=True)
    k, v = (torch.randn(B, HKV, S, D, device=DEVICE, dtype=DTYPE) for _ in range(2))

    # Each call can be asked about. The answer depends on shapes, dtypes and devices, not on values.
    assert sdpa.why_not(q, k, v, is_causal=True, enable_gqa=True) is None
    reasons = [sdpa.why_not(q, k, v[..., :32]), sdpa.why_not(q.detach(), k, v, alibi_slopes=torch.ones(HQ))]
    for reason in reasons:
        assert reason is not None
        print("left to PyTorch:", reason)

    expected, expected_lse = attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    close = {"atol": 2e-2, "rtol": 2e-2} if DEVICE == "cuda" else {"atol": 1e-5, "rtol": 1e-4}

    # The operators are functions that also run on a CPU.
    out, lse, *_ = sdpa.scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(lse.double(), expected_lse, **close)

    # While the provider is active, they are PyTorch's kernels, and autograd calls their backward.
    # `sdpa.register()` and torch.nn.attention.activate_flash_attention_impl("flexattn") do the same for a process.
    with sdpa.activate(DEVICE.upper()), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if DEVICE == "cuda":
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:  # on a CPU scaled_dot_product_attention uses other operators
            out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        (dq,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(dq.double(), torch.autograd.grad(expected.sum(), q)[0].double(), **close)
    print("through PyTorch's operators: out and dq match the reference")


if __name__ == "__main__":
    main()
