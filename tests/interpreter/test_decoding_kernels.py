"""Decoding steps by split kernels on caches with lengths, pages and rings, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from test_decoding import CACHES, MODELS, decode

pytest.importorskip("triton")
# numpy's, of masked places
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.mark.parametrize(("name", "kind"), [("relative", "pages"), ("sinks and window", "rows"), ("window", "ring")])
def test_steps(name: str, kind: str) -> None:
    assert kind in CACHES
    out, expected, traces = decode(MODELS[name], kind, 4, BACKEND="TRITON_DECODE", SPLIT_KV=3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert traces == 0
