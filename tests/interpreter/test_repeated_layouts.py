"""Repeated calls with lengths, offsets and pages: numbers are read at each call, and other kinds are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sequence_cases import CASES, SequenceCase, alibi
from test_repeated_calls import afresh, is_repeated
from torch import Tensor

from flexattn import create_block_mask, flex_attention, mods
from flexattn.errors import DtypeError, MutationError
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]
NAMES = (
    "one query", "several queries", "across rows of blocks", "sinks and window", "without lengths", "without offsets",
    "wide heads", "float8", "float8 pages", "pages", "pages, causal", "large pages", "pages, heads first",
)  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    launch.forget_launches()
    yield
    launch.forget_launches()


def shorter(case: SequenceCase) -> SequenceCase:
    """Return the case with other lengths and offsets."""
    offsets = None if case.offsets is None else tuple(x // 2 for x in case.offsets)
    used = None if case.used is None else tuple((x + 1) // 2 for x in case.used)
    return replace(case, offsets=offsets, used=used)


@pytest.mark.parametrize("backend", ["TRITON", "TRITON_DECODE"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_read_at_each_call(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if backend == "TRITON_DECODE" and case.M > 16:  # up to 128 are allowed, and take half a minute each
        pytest.skip("too many queries")
    q, k, v = case.tensors()
    mask = case.mask()
    options: dict[str, Any] = {"enable_gqa": True, "kernel_options": {"BACKEND": backend}}

    def calls(case: SequenceCase) -> Any:
        key, value, layout = case.arguments(k, v)
        return lambda: flex_attention(q, key, value, case.score_mod, mask, **options, **layout), layout

    call, layout = calls(case)
    first = call()
    assert is_repeated(call, monkeypatch)
    assert torch.equal(call(), first)
    other, changed = calls(shorter(case))
    assert is_repeated(other, monkeypatch)
    second = other()
    assert not torch.equal(first, second)
    assert torch.equal(second, afresh(other))
    call()
    for argument, x in layout.items():  # in place, and only what the second call's tensors do not need
        if argument in ("seqused_k", "q_offsets"):
            x.copy_(changed[argument])
    repeated = call()
    assert torch.equal(repeated, afresh(call))


def caches() -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 70, 16)
    return q, k, torch.randn(2, 2, 70, 16)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = flex_attention(q, k, v, enable_gqa=True, kernel_options={"BACKEND": "TRITON"}, **options)
    assert isinstance(out, Tensor)
    return out


def test_one_mask_with_and_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = caches()
    reach = torch.tensor([9, 30])
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach[b], 2, None, 70, 70, device="cpu", BLOCK_SIZE=32
    )  # fmt: skip
    used, offsets = (torch.tensor(x, dtype=torch.int32) for x in ((70, 40), (69, 39)))
    kinds = [
        {"q_offsets": offsets}, {"q_offsets": offsets, "seqused_k": used}, {"seqused_k": used}, {"q_offsets": offsets},
        {"q_offsets": offsets, "score_mod": alibi}, {"score_mod": alibi, "seqused_k": used},
    ]  # fmt: skip
    for kind in kinds * 2:
        found = [attend(q, k, v, block_mask=mask, **kind) for _ in range(3)]
        expected = afresh(lambda kind=kind: attend(q, k, v, block_mask=mask, **kind))
        assert all(torch.equal(x, expected) for x in found), kind
    queries = torch.randn(2, 4, 70, 16)
    for _ in range(2):
        out = attend(queries, k, v, block_mask=mask)
        assert torch.equal(out, afresh(lambda: attend(queries, k, v, block_mask=mask)))
        attend(q, k, v, block_mask=mask, q_offsets=offsets)
    reach[0] = 3
    with pytest.raises(MutationError, match="changed in place"):
        attend(q, k, v, block_mask=mask, q_offsets=offsets)


def test_numbers_of_other_dtypes_are_refused() -> None:
    q, k, v = caches()
    used = torch.tensor([70, 40], dtype=torch.int32)
    for _ in range(2):
        attend(q, k, v, seqused_k=used)
    for wrong in (used.float(), used.long(), used.view(torch.float32)):
        with pytest.raises(DtypeError, match="seqused_k"):
            attend(q, k, v, seqused_k=wrong)


def test_lengths_that_are_not_contiguous() -> None:
    q, k, v = caches()
    used = torch.tensor([[70, 1], [40, 1]], dtype=torch.int32)[:, 0]
    found = [attend(q, k, v, seqused_k=used) for _ in range(2)]
    expected = attend(q, k, v, seqused_k=used.contiguous())
    assert all(torch.equal(x, expected) for x in found)


def test_gradients_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in caches())
    used = torch.tensor([70, 40], dtype=torch.int32)
    call = lambda: attend(q, k, v, seqused_k=used, score_mod=mods.alibi(4))  # noqa: E731
    first = torch.autograd.grad(call().sum(), (q, k, v))
    assert not is_repeated(call, monkeypatch)
    for x, y in zip(torch.autograd.grad(call().sum(), (q, k, v)), first, strict=True):
        assert torch.equal(x, y)
