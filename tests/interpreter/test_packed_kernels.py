"""Kernels of packed sequences, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed_cases import CASES

pytest.importorskip("triton")
# numpy's, of masked places
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=["packed", "invariant"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, options: dict[str, object]) -> None:
    case = replace(CASES[name], Hq=2, Hkv=1, poison=1e4)
    tensors = case.tensors()
    found, exact = case.run(*tensors, kernel_options={"BACKEND": "TRITON"}, **options), case.expected(*tensors)
    d_out = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(3))
    gradients = (torch.autograd.grad(o[0], tensors, d_out.to(o[0].dtype)) for o in (found, exact))
    pairs = zip((*found, *next(gradients)), (*exact, *next(gradients)), strict=True)
    for x, y in pairs:
        # In rows with few keys dq is a difference of nearly equal numbers, so errors are relative to the largest.
        largest = y.detach()[y.isfinite()].abs().max() if y.isfinite().any() else torch.ones(())
        torch.testing.assert_close(x.double(), y.double(), rtol=0.0, atol=2e-6 * max(1.0, float(largest)))
