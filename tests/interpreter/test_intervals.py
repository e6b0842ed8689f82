"""forward_split with masks whose rows are intervals of keys, in Triton's interpreter: which keys it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interval_cases import CASES, IDS, STARTS, document, from_starts
from quick import slow_unless
from torch import Tensor

from flexattn import BlockMask, create_block_mask, explain, flex_attention, mods, reference
from flexattn.call import layout
from flexattn.compile.kernel_plan import KernelPlan

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of masked places
QUICK = ("window", "window, several queries", "window, pages, several queries", "documents", "prefix by batch")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, CASES))
def test_keys_that_no_query_attends_to_are_not_read(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_check_values", lambda *_: None)  # as on a GPU: pages that are not read may be missing
    CASES[name].check(SPLIT_KV=splits)


def plan(mask: BlockMask | None, M: int = 1, **given: Any) -> KernelPlan:
    q, k = torch.zeros(2, 4, M, 16), torch.zeros(2, 2, 2048, 16)
    options = {"BACKEND": "TRITON_DECODE"}
    return explain(q, k, k, None, mask, enable_gqa=True, target="sm_90", kernel_options=options, **given).plans[0]


def either_end(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < 3) | (kv_idx > q_idx)


@pytest.mark.parametrize(
    ("mod", "M", "intervals"),
    [
        (mods.causal, 1, True),
        (mods.sliding_window(100), 7, True),
        (mods.prefix_lm(9), 7, True),
        (either_end, 1, False),
        (lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 3 > 0), 1, False),
        (from_starts("cpu"), 1, True),
        (from_starts("cpu"), 2, False),  # the starts of two queries may be far apart
        (lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx * 128) & (kv_idx < q_idx * 128 + 20), 1, True),
        (lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx * 128) & (kv_idx < q_idx * 128 + 20), 3, False),  # these too
        (lambda b, h, q_idx, kv_idx: kv_idx < (q_idx % 2) * 256 + 20, 3, False),
        (lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) & (q_idx % 3 > 0), 3, True),  # some rows are empty
        (lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) | (q_idx % 3 > 0), 3, False),  # and some have all keys
        (document("cpu"), 1, False),  # runs of equal elements are not known
    ],
)
def test_which_masks_are_intervals(mod: Any, M: int, intervals: bool) -> None:
    assert len(IDS) == len(STARTS)
    found = plan(create_block_mask(mod, None, None, M, 2048, device="cpu"), M)
    assert found.intervals == intervals and (found.blocks is None) == intervals
    assert ("each query attends to an interval of keys" in str(found)) == intervals
    offsets = torch.zeros(2, dtype=torch.int32)
    mask = create_block_mask(mod, None, None, 300, 2048, device="cpu")
    assert plan(mask, M, q_offsets=offsets).intervals == intervals


def test_lists_of_the_user_are_read() -> None:
    """Their full blocks attend where the mask_mod is false, and pairs in no list do not where it is true."""
    q, k, v = (torch.randn(1, 2, M, 16, generator=torch.Generator().manual_seed(M)) for M in (3, 320, 321))
    v = v[:, :, :320]
    count, index = torch.tensor([[[1]]]), torch.tensor([[[[1, 0, 2, 3, 4]]]])
    full_count, full_index = torch.tensor([[[2]]]), torch.tensor([[[[0, 4, 1, 2, 3]]]])
    mod = mods.prefix_lm(100)
    listed = BlockMask.from_kv_blocks(
        count, index, full_count, full_index, BLOCK_SIZE=(128, 64), mask_mod=mod, seq_lengths=(3, 320)
    )
    edited = create_block_mask(mod, None, None, 3, 320, device="cpu", BLOCK_SIZE=(128, 64))
    assert edited.is_built
    edited.kv_runs = listed.kv_runs
    kv = torch.arange(320)
    keep = (kv < 64) | (kv >= 256) | ((kv >= 64) & (kv < 100))
    expected, _ = reference.attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: keep[kv_idx])
    for mask in (listed, edited):
        assert not mask.is_built
        out = flex_attention(q, k, v, None, mask, kernel_options={"BACKEND": "TRITON_DECODE", "SPLIT_KV": 2})
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_kernels_for_lists_and_for_intervals_are_not_confused() -> None:
    mod = mods.sliding_window(100)
    built, assigned = (create_block_mask(mod, None, None, 1, 2048, device="cpu") for _ in range(2))
    assigned.mask_mod = mod
    assert plan(built).intervals and not plan(assigned).intervals
    q, k = torch.zeros(1, 2, 1, 16), torch.randn(1, 2, 2048, 16)
    results = [flex_attention(q, k, k, None, m, kernel_options={"BACKEND": "TRITON_DECODE"}) for m in (built, assigned)]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("name", ["number", "tensor", "difference", "negated"])
def test_bounds_at_the_ends_of_int64(name: str) -> None:
    """A bound beyond all positions must not wrap around when it is moved by one."""
    most = torch.iinfo(torch.int64).max
    limits = torch.tensor([most, 40])

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return {
            "number": lambda: kv_idx - q_idx <= most,
            "tensor": lambda: kv_idx <= limits[b],
            "difference": lambda: kv_idx - limits[b] <= 0,
            "negated": lambda: ~(kv_idx > limits[b]),
        }[name]()

    q, k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    mask = create_block_mask(mod, 2, None, 300, 300, device="cpu")
    offsets = torch.tensor([7, 9], dtype=torch.int32)
    options = {"BACKEND": "TRITON_DECODE"}
    found = flex_attention(q, k, v, None, mask, q_offsets=offsets, kernel_options=options)
    attended = [300, 300] if name == "number" else [300, 41]
    for b, keys in enumerate(attended):
        exact = reference.attention(q[b : b + 1], k[b : b + 1, :, :keys], v[b : b + 1, :, :keys], dtype=torch.float64)[
            0
        ]
        torch.testing.assert_close(found[b : b + 1], exact.float(), rtol=1e-5, atol=1e-5)
