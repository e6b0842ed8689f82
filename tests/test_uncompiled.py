"""Masks built inside of what torch.compile compiles: a graph break each, the same results, a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import BlockMask
from flexattn.torch_state.uncompiled import uncompiled

# Dynamo reads .grad of what goes on after a break; it hides the warning from users, but not from "error".
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor")

B, H, M, D = 1, 2, 48, 16
LENGTHS = torch.tensor([20, 28])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Attention(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1.0, 1.0, H))
        self.documents = torch.repeat_interleave(torch.arange(2), LENGTHS)
        self.kind = kind

    def biased(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.bias[h]

    def forward(self, x: Tensor) -> Tensor:
        q = x.sin()
        score_mod = self.biased if "score" in self.kind else None
        block_mask = None
        if "mask" in self.kind:
            documents = self.documents
            block_mask = flexattn.create_block_mask(
                lambda b, h, q_idx, kv_idx: (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx),
                None, None, M, M, device="cpu", BLOCK_SIZE=16,
            )  # fmt: skip
        return flexattn.flex_attention(q, x, x, score_mod, block_mask).cos()


def _input() -> Tensor:
    return torch.randn(B, H, M, D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _breaks() -> list[str]:
    return list(torch._dynamo.utils.counters["graph_break"].elements())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["plain", "score", "mask", "score and mask"])
def test_a_model_has_one_break_for_each_mask_and_the_results_of_the_model(kind: str, backend: str) -> None:
    model, x = Attention(kind), _input()
    want = model(x)
    tensors = [x, *(p for p in model.parameters() if "score" in kind)]
    wanted = torch.autograd.grad(want.sum(), tensors)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):  # the second runs what the first compiled
        got = compiled(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        for a, b in zip(torch.autograd.grad(got.sum(), tensors), wanted, strict=True):
            torch.testing.assert_close(a, b)
    breaks = _breaks()
    assert len(breaks) == ("mask" in kind) and all("flexattn" in text for text in breaks)


def test_a_backward_inside_of_the_compiled_function() -> None:
    x = _input()

    def step(x: Tensor) -> Tensor:
        loss = flexattn.flex_attention(2 * x, x, x, lambda score, b, h, q_idx, kv_idx: score * 0.5).square().sum()
        loss.backward()
        return loss.detach()

    want, wanted = step(x), x.grad
    x.grad = None
    torch.testing.assert_close(torch.compile(step, backend="eager")(x), want, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)
    assert not any("flexattn" in text for text in _breaks())


MASK = flexattn.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, M, M, "cpu", 16)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + flexattn.create_mask(flexattn.mods.causal, None, None, M, M, device="cpu")[..., :D],
        lambda x: x + len(flexattn.explain(x, x, x).engine),
        lambda x: x + flexattn.dropout_mask(1.0, (B, H, M, D)),
        lambda x: x + BlockMask.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool), None, (M, M), 16).numel(),
        lambda x: x + BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, BLOCK_SIZE=16).numel(),
        lambda x: x + BlockMask(*MASK.as_tuple(False)[:9], BLOCK_SIZE=16).numel(),
        lambda x: x + MASK[:, :, 1].numel(),
        lambda x: x + MASK._adjust(32, 32).numel(),
        lambda x: x + MASK.expand(1, 2).numel(),
        lambda x: x + MASK.to("cpu").numel(),
        lambda x: x + MASK.sparsity(),
        lambda x: x + MASK.counts()[0],
        lambda x: x + MASK.pairs().useful,
        lambda x: x + len(repr(MASK)),
        lambda x: x + len(str(MASK)),
    ],
    ids=lambda f: "_".join(n for n in f.__code__.co_names if n not in ("len", "MASK", "torch", "ones", "bool", "mods")),
)
def test_other_public_functions_are_one_break(use: Callable[[Tensor], Tensor]) -> None:
    x = _input().detach()
    want = use(x)
    torch.testing.assert_close(torch.compile(use, backend="eager")(x), want, rtol=0, atol=0)
    (text,) = _breaks()
    assert "flexattn" in text


def test_sizes_of_a_mask_and_its_lists_are_no_breaks() -> None:
    def use(x: Tensor) -> Tensor:
        return x + MASK.B + MASK.shape[2] + MASK.numel() + MASK.kv_num_blocks.sum() + MASK.kv_indices.sum()

    x = _input().detach()
    torch.testing.assert_close(torch.compile(use, backend="eager", fullgraph=True)(x), use(x), rtol=0, atol=0)


def test_fullgraph_says_why() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"this function of flexattn runs in Python"):
        torch.compile(Attention("mask"), backend="eager", fullgraph=True)(_input())


def test_the_function_itself_compiled_is_the_function() -> None:
    x = _input()
    got = torch.compile(flexattn.flex_attention, backend="eager")(x, x, x, return_aux=flexattn.AuxRequest(lse=True))
    want = flexattn.flex_attention(x, x, x, return_aux=flexattn.AuxRequest(lse=True))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_marking_wraps_nothing() -> None:
    def function() -> None: ...

    assert uncompiled(function) is function


def test_without_torchs_own_names_the_public_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")

    @uncompiled
    def function(x: Tensor) -> Tensor:
        return x + 1

    monkeypatch.undo()
    got = torch.compile(lambda x: function(x.sin()).cos(), backend="eager")(torch.zeros(2))
    torch.testing.assert_close(got, torch.ones(2).cos())
    (text,) = _breaks()
    assert "this function of flexattn" in text


@pytest.mark.slow
def test_a_compiled_model_prints_nothing() -> None:
    script = """
import torch, flexattn
x = torch.randn(1, 2, 48, 16, requires_grad=True)
def model(x):
    mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 48, 48, device="cpu")
    return flexattn.flex_attention(x, x, x, flexattn.mods.softcap(20.0), mask).cos()
torch.compile(model, backend="aot_eager")(x).sum().backward()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "" and run.stderr == ""
