"""Repeated calls of packed sequences in Triton's interpreter. They pass [rows, H, D] to kernels without views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, api, varlen_attn
from flexattn.engines import repeated_calls, triton
from flexattn.errors import MutationError
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

LENGTHS, OTHERS = (5, 0, 20, 9), (17, 3, 14, 0)
H, HKV, D, DV = 4, 2, 16, 32


def integers(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Work:
    """A call with a learned bias, and its inputs."""

    def __init__(self, seed: int, bias: bool = True) -> None:
        torch.manual_seed(seed)
        rows = sum(LENGTHS)
        self.leaves = [torch.randn(rows, h, d).requires_grad_() for h, d in ((H, D), (HKV, D), (HKV, DV))]
        self.d_out, self.d_lse = torch.randn(rows, H, DV), torch.randn(H, rows)
        self.bias = torch.randn(H, 32).requires_grad_() if bias else None
        self.cu = integers(LENGTHS)

    def attend(self) -> tuple[Tensor, Tensor]:
        bias = self.bias

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score if bias is None else score + bias[h, kv_idx]

        found = varlen_attn(
            *self.leaves, self.cu, self.cu, 24, 24, window_size=(-1, 0), enable_gqa=True,
            score_mod=None if bias is None else score_mod, return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "TRITON"},
        )  # fmt: skip
        assert isinstance(found, tuple)
        return found

    def results(self, attend: Callable[[], tuple[Tensor, Tensor]] | None = None, lse: bool = True) -> list[Tensor]:
        """Return out, lse and the gradients."""
        out, of_lse = (attend or self.attend)()
        outputs, given = ([out, of_lse], [self.d_out, self.d_lse]) if lse else ([out], [self.d_out])
        learned = [*self.leaves, *(() if self.bias is None else (self.bias,))]
        return [out.detach(), of_lse.detach(), *torch.autograd.grad(outputs, learned, given)]

    def expected(self) -> list[Tensor]:
        """Compute each sequence on its own."""

        def attend() -> tuple[Tensor, Tensor]:
            outs, lses = [], []
            for begin, end in zip(self.cu.tolist(), self.cu.tolist()[1:], strict=False):
                q, k, v = (x[begin:end].transpose(0, 1) for x in self.leaves)
                scores = q @ k.repeat_interleave(H // HKV, 0).mT * D**-0.5
                scores = scores if self.bias is None else scores + self.bias[:, None, : end - begin]
                scores = scores.masked_fill(torch.ones(end - begin, end - begin).triu(1).bool(), -torch.inf)
                lses.append(scores.logsumexp(-1))
                outs.append((scores.softmax(-1) @ v.repeat_interleave(H // HKV, 0)).transpose(0, 1))
            return torch.cat(outs), torch.cat(lses, 1)

        return self.results(attend)


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-4)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forget known calls. Return a list to which each call that goes through views is added."""
    launch.forget_launches()
    seen: list[Any] = []
    through = api._compute
    monkeypatch.setattr(api, "_compute", lambda *arguments: seen.append(arguments) or through(*arguments))
    return seen


@pytest.mark.parametrize("bias", [False, True])
def test_repeated_calls(bias: bool, views: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        work = Work(seed, bias)
        close(work.results(), work.expected())
    assert len(views) == 1 and len(repeated_calls._calls) == 2, "as a batch, and as rows"
    monkeypatch.setattr(triton, "backward", None)
    work = Work(7, bias)
    close(work.results(), work.expected())


def test_without_gradients(views: list[Any]) -> None:
    for seed in range(3):
        work = Work(seed)
        with torch.no_grad():
            found = work.attend()
        close(found, work.expected()[:2])
    assert len(views) == 1


def test_other_lengths(views: list[Any]) -> None:
    work = Work(0)
    for lengths in (LENGTHS, OTHERS, LENGTHS[::-1]):
        work.cu.copy_(integers(lengths))
        close(work.results(), work.expected())
    assert len(views) == 1
    work.cu = integers(OTHERS)
    close(work.results(), work.expected())


def test_gradients_of_some_results(views: list[Any]) -> None:
    for seed in range(3):
        work = Work(seed)
        work.d_lse.zero_()
        expected = work.expected()
        close(work.results(lse=False), expected)
        work.leaves[1].requires_grad_(False)
        out, _ = work.attend()
        close(torch.autograd.grad(out, [work.leaves[0], work.leaves[2]], work.d_out), [expected[2], expected[4]])


def test_second_derivatives(views: list[Any]) -> None:
    def second(work: Work) -> list[Tensor]:
        out, lse = work.attend()
        first = torch.autograd.grad([out, lse], work.leaves, [work.d_out, work.d_lse], create_graph=True)
        return [x.detach() for x in (*first, *torch.autograd.grad(first[0].square().sum(), work.leaves))]

    found = [second(Work(1, bias=False)) for _ in range(3)]
    assert len(views) == 1
    for again in found[1:]:
        close(again, found[0])


def test_changes_in_place(views: list[Any]) -> None:
    for _ in range(3):
        work = Work(0)
        out, _ = work.attend()
        with torch.no_grad():
            work.leaves[2].mul_(2.0)
        with pytest.raises(MutationError, match="value"):
            out.backward(work.d_out)
    work = Work(0)
    out, _ = work.attend()
    out += 1.0  # as after any operation that does not need its result
    close([out], [work.expected()[0] + 1.0])


def test_hooks_of_saved_tensors(views: list[Any]) -> None:
    for seed in range(3):
        work = Work(seed)
        with torch.autograd.graph.save_on_cpu():
            found = work.results()
        close(found, work.expected())


def test_strides_and_dtypes(views: list[Any]) -> None:
    for seed in range(3):
        work = Work(seed)
        for i in range(3):
            wide = torch.randn(sum(LENGTHS), work.leaves[i].size(1), 2 * work.leaves[i].size(2))
            work.leaves[i] = wide[..., : work.leaves[i].size(2)].requires_grad_()
        close(work.results(), work.expected())
