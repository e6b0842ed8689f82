"""Kernels with lengths, offsets and pages on the device, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import assert_close_to_oracle
from sequence_cases import CASES, SequenceCase

from flexattn import create_block_mask, flex_attention, mods
from flexattn.call import layout

pytest.importorskip("triton")
# numpy's, of masked places and of sequences whose results are NaN
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
CALLS = [(name, backend) for name in CASES for backend in ("TRITON", "TRITON_DECODE")]
CALLS = [(n, b) for n, b in CALLS if b == "TRITON" or (CASES[n].M <= 128 and not CASES[n].max_scores)]


@pytest.mark.parametrize(("name", "backend"), CALLS)
def test_equals_one_dense_computation_per_sequence(name: str, backend: str) -> None:
    case = CASES[name]
    q, k, v = case.tensors()
    found = case.run(q, k, v, BACKEND=backend)
    for of, x, dense, exact in zip(
        ("out", "lse"), found, case.expected(q, k, v, None), case.expected(q, k, v), strict=False
    ):
        assert_close_to_oracle(of, x, dense, exact)


GRADIENTS = (
    "many queries", "window", "lengths, mask", "by batch", "across rows of blocks", "without offsets",
    "without lengths", "pages, many queries",
)  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    case = replace(CASES[name], Hq=2, Hkv=1)
    if case.offsets is None:  # with one key dq is 0, and its rounding error is all there is
        case = replace(case, M=min(case.M, 200), N=200, used=(17, 70, 199))
    tensors = [x.requires_grad_() for x in case.tensors()]
    d_out = torch.randn(3, case.Hq, case.M, case.Dv, generator=torch.Generator().manual_seed(3))
    out, lse = case.run(*tensors, BACKEND="TRITON")[:2]
    found = torch.autograd.grad(out, tensors, d_out)
    dense = torch.autograd.grad(case.expected(*tensors, None)[0], tensors, d_out)
    exact = torch.autograd.grad(case.expected(*tensors)[0], tensors, d_out.double())
    # As in kernel_cases: half an ulp of the lse that the backward reads is an error of lse / 2 ulp in each weight.
    bound = 4.0 + float(lse.detach().masked_fill(lse == -torch.inf, 0).abs().amax())
    for of, x, y, z in zip(("dq", "dk", "dv"), found, dense, exact, strict=True):
        assert_close_to_oracle(of, x, y, z, "grad", bound)


@pytest.mark.parametrize("backend", ["TRITON", "TRITON_DECODE"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("one query, causal", {"used": (1, 301, 300)}),
        ("one query, causal", {"used": (1, -1, 300)}),
        ("one query, causal", {"offsets": (0, -1, 299)}),
        ("across rows of blocks", {"offsets": (0, 2**20, 63)}),
    ],
)
def test_a_sequence_with_a_wrong_number_is_nan(
    name: str, changes: dict[str, object], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CASES[name]
    q, k, v = right.tensors()
    wrong = replace(right, **changes)
    mask = right.mask()
    monkeypatch.setattr(SequenceCase, "mask", lambda self: mask)
    monkeypatch.setattr(layout, "_check_values", lambda *_: None)  # as on a GPU, where this would wait
    out, lse, _ = wrong.run(q, k, v, BACKEND=backend)
    expected = right.expected(q, k, v)[0]
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    for b in (0, 2):
        if (wrong.length(b), wrong.offset(b)) == (right.length(b), right.offset(b)):
            torch.testing.assert_close(out[b].double(), expected[b], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("page", [-1, 10**6])
def test_pages_that_do_not_exist_give_nan(page_size: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["pages"], page_size=page_size)
    q, k, v = case.tensors()
    given = SequenceCase.arguments

    def with_page(self: SequenceCase, *tensors: torch.Tensor) -> object:
        key, value, found = given(self, *tensors)
        found["block_table"][1, 0] = page
        return key, value, found

    monkeypatch.setattr(SequenceCase, "arguments", with_page)
    monkeypatch.setattr(layout, "_check_values", lambda *_: None)
    out, _, _ = case.run(q, k, v, BACKEND="TRITON_DECODE")
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


def test_gradients_of_keys_that_sequences_at_different_offsets_share() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, 2, M, 16, generator=generator) for B, M in ((3, 5), (1, 170), (1, 170)))
    mask = create_block_mask(mods.sliding_window(20), None, None, 170, 170, device="cpu", BLOCK_SIZE=32)
    offsets = torch.tensor([100, 20, 98], dtype=torch.int32)
    d_out = torch.randn(q.shape, generator=generator)

    def gradients(keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        key, value = (x.expand(keys, -1, -1, -1) for x in leaves[1:])
        options = {"BACKEND": "TRITON" if dtype == torch.float32 else "CPU"}
        out = flex_attention(leaves[0], key, value, None, mask, q_offsets=offsets, kernel_options=options)
        return torch.autograd.grad(out, leaves, d_out.to(dtype))

    expected = gradients(3, torch.float64)
    for found, exact in zip(gradients(1, torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["TRITON", "TRITON_DECODE"])
@pytest.mark.parametrize("descale", [float("nan"), float("inf"), 3e38])
def test_descales_of_pages_that_a_sequence_does_not_own(descale: float, backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(6, 16, 1, 16, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(1, 1, 1, 16, generator=generator).to(dtype)

    def run(of_page_0: float) -> torch.Tensor:
        scales = torch.tensor([of_page_0, 0.5, 2.0, 1.0, 0.25, 1.0])[:, None]
        return flex_attention(
            q, keys, values, block_table=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), k_descale=scales,
            seqused_k=torch.tensor([40], dtype=torch.int32), v_descale=scales,
            kernel_options={"BACKEND": backend, "BLOCK_N": 64},
        )  # fmt: skip

    assert torch.equal(run(descale), run(1.0))
