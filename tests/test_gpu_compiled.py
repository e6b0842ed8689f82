"""flex_attention inside torch.compile on a GPU: the results of uncompiled calls, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flexattn
from flexattn import create_block_mask, flex_attention, mods

# torch captures an empty graph to start a memory pool.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")]

B, H, T, D = 2, 4, 512, 64


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def qkv(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (B, H, T, D)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def document_mask(seed: int) -> flexattn.BlockMask:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = (torch.rand(T, generator=generator, device="cuda") < 0.01 * (1 + seed % 3)).cumsum(0)
    return create_block_mask(mods.document_causal(ids), None, None, T, T)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(H, device="cuda"))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx).abs()

    def forward(self, q, k, v, mask):
        return flex_attention(q, k, v, self.score_mod, mask)


def gradients(call, args, learned):
    out = call(*args)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), learned)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_results_are_those_of_uncompiled_calls(backend):
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        layer.slopes.mul_(0.1)
    torch.use_deterministic_algorithms(True)
    try:
        for seed in range(3):
            x, mask = qkv(seed), document_mask(seed)
            learned = [*x, layer.slopes]
            found, expected = (gradients(f, (*x, mask), learned) for f in (compiled, layer))
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("number", [3, 0.5], ids=["int", "float"])
def test_reduce_overhead(number):
    """CUDA graphs: masks, closure tensors and numbers that change at each step."""

    def f(q, k, v, mask, table, n):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * n + table[h, i], mask)

    compiled = torch.compile(f, fullgraph=True, mode="reduce-overhead")
    for step in range(8):
        q, k, v = (x.detach() for x in qkv(step % 3))
        table = torch.randn(H, T, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        mask, n = document_mask(step), number * (1 + step)
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(q, k, v, mask, table, n).clone()
        assert torch.equal(found, f(q, k, v, mask, table, n)), step


def test_reduce_overhead_with_gradients():
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for step in range(6):
        x, mask = qkv(step), document_mask(step)
        torch.compiler.cudagraph_mark_step_begin()
        found, expected = (gradients(f, (*x, mask), x) for f in (compiled, layer))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_stale_mask_raises():
    ids = torch.zeros(T, device="cuda", dtype=torch.int64)
    mask = create_block_mask(mods.document_causal(ids), None, None, T, T)
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    x = [t.detach() for t in qkv(0)]
    compiled(*x)
    ids[5:] = 1
    with pytest.raises(flexattn.FlexAttentionError, match="block_mask: "):
        compiled(*x)


def test_dropout():
    def f(q, k, v):
        return flex_attention(q, k, v, dropout_p=0.25)

    compiled = torch.compile(f, fullgraph=True)
    x = [t.detach() for t in qkv(0)]
    results = []
    for call in (compiled, f, compiled):
        torch.manual_seed(3)
        results.append(call(*x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_hopper_kernels_run_in_both():
    """Eager and compiled calls choose the same plan."""
    q, k, v = (torch.randn(1, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 2048, 2048)
    f = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    assert torch.equal(f(q, k, v), flex_attention(q, k, v, block_mask=mask))
