"""Known calls in Triton's interpreter: they compute what the first call of their kind computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_cases import CASES, Setting, results
from quick import slow_unless
from torch import Tensor

from flexattn import api, create_block_mask, flex_attention, mods
from flexattn.engines import repeated_calls, triton
from flexattn.errors import MutationError
from flexattn.runtime import launch
from flexattn.torch_compile import operators, repeated_operators

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

# Captured tensors with and without gradients, masks, layouts that are copied, sinks, dropout, gradients of lse.
KINDS = (
    "plain", "score-relative", "score-views", "score-dense_factor", "unmasked-clamped", "mask-document",
    "mask_softcap-sliding", "layout-transposed", "gradient_layout-expanded_rows", "sink-heads-None-late_rows",
    "dropout_tile-16x32-captured",
)  # fmt: skip

# Kinds whose calls go through all stages each time: a sink, dropout.
POSED = {"sink-heads-None-late_rows", "dropout_tile-16x32-captured"}


def equal(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("plain", "score-relative"), KINDS))
def test_a_known_call_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CASES[name](Setting("cpu", torch.float32))
    second = replace(first, query=first.query * 0.5, value=first.value.flip(2))
    launch.forget_launches()
    found = results(second, "ours")
    launch.forget_launches()
    other = results(first, "ours")
    assert len(triton._forwards) == len(triton._backwards) == 1
    monkeypatch.setattr(triton, "_forward", None)
    monkeypatch.setattr(triton, "_backward", None)
    known = results(second, "ours")
    assert equal(found, known)
    assert not torch.equal(other[0], known[0]), "the calls differ"
    assert len(repeated_calls._calls) == (name not in POSED)
    if name not in POSED:
        monkeypatch.setattr(api, "pose", None)
        monkeypatch.setattr(triton, "forward", None)
        monkeypatch.setattr(triton, "backward", None)
    assert equal(found, results(second, "ours"))
    assert equal(other, results(first, "ours"))


@pytest.mark.parametrize("captures_parameter", [False, True])
def test_a_known_operator_computes_the_same(captures_parameter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of torch.compile."""
    torch.manual_seed(0)
    ids, slopes = torch.arange(32) // 12, torch.rand(2, requires_grad=captures_parameter)
    mask = create_block_mask(mods.document_causal(ids), None, None, 32, 32, BLOCK_SIZE=16)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod, mask, kernel_options={"BACKEND": "TRITON"})

    def run(call: Callable[..., Tensor], seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(1, 2, 32, 16, generator=generator).requires_grad_() for _ in range(3)]
        out = call(*leaves)
        learned = [slopes] if captures_parameter else []
        return out.detach(), *torch.autograd.grad(out, [*leaves, *learned], out.detach() * 0.5)

    expected = [run(attend, seed) for seed in (1, 2)]
    launch.forget_launches()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert equal(run(compiled, 1), expected[0])
    assert len(repeated_operators._known) == 2
    monkeypatch.setattr(operators, "_problem", None)
    for seed in (2, 1, 2):
        assert equal(run(compiled, seed), expected[seed - 1])
    monkeypatch.undo()
    ids[5] += 1
    with pytest.raises(MutationError, match="was changed in place"):
        run(compiled, 1)
