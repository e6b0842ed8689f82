"""flex_attention inside torch.compile on a GPU: the results of uncompiled calls, and CUDA graphs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

import flexattn
from flexattn import create_block_mask, flex_attention, mods, varlen_attn
from flexattn.graph import mod_graph

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


# Packed sequences and layouts.


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def rows(count: int, seed: int, heads: int = H) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, heads, D, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()


class PackedLayers(nn.Module):
    """Two layers, whose sequences are described once."""

    def __init__(self, mask_mod=None) -> None:
        super().__init__()
        self.bias, self.mask_mod = nn.Parameter(torch.rand(H, device="cuda") * 0.1), mask_mod

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score - self.bias[h] * (q_idx - kv_idx).abs()

    def forward(self, q, k, v, cu, longest):
        for _ in range(2):
            q = varlen_attn(
                q, k, v, cu, cu, longest, longest, window_size=(-1, 0), score_mod=self.score_mod,
                mask_mod=self.mask_mod, enable_gqa=True,
            )  # fmt: skip
        return q


LENGTHS = (700, 300, 24), (1, 1000, 23), (400, 400, 224), (1024, 0, 0)


@pytest.mark.parametrize("mask_mod", [None, mods.sliding_window(200)], ids=["window", "mask_mod"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_packed_sequences(mode, mask_mod):
    mod_graph._kept_constant.cache_clear()  # constants of a first call must not stay in the memory of a CUDA graph
    layers = PackedLayers(mask_mod).requires_grad_(False)
    compiled = torch.compile(layers, fullgraph=True, mode=mode)
    for step in range(8):
        args = rows(1024, step), rows(1024, 50 + step, 2), rows(1024, 90 + step, 2)
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            cu = ends(*LENGTHS[step % 4])
            found = compiled(*args, cu, 1024).clone()
            assert torch.equal(found, layers(*args, cu, 1024)), step
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_packed_sequences_with_gradients(mode):
    layers = PackedLayers()
    compiled = torch.compile(layers, fullgraph=True, mode=mode)
    for step in range(6):
        x = [rows(1024, step), rows(1024, 50 + step, 2), rows(1024, 90 + step, 2)]
        torch.compiler.cudagraph_mark_step_begin()
        cu, learned = ends(*LENGTHS[step % 4]), [*x, layers.bias]
        found, expected = (gradients(f, (*x, cu, 1024), learned) for f in (compiled, layers))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_packed_sequences_of_any_lengths():
    layers = PackedLayers()
    compiled = torch.compile(layers, fullgraph=True)
    for step, lengths in enumerate(((300, 40), (500, 7, 90), (30, 30, 30, 30), (2000, 100, 5))):
        T = sum(lengths)
        x = [rows(T, step), rows(T, 50 + step, 2), rows(T, 90 + step, 2)]
        args = *x, ends(*lengths), max(lengths)
        found, expected = (gradients(f, args, [*x, layers.bias]) for f in (compiled, layers))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["contiguous", "pages", "window", "mask of more rows"])
def test_decoding_steps(kind, mode):
    """The lengths, offsets and page tables change in place, and nothing is compiled again."""
    N, Hkv, paged = 2048, 2, kind == "pages"
    shape = (4 * B * N // 64, 64, Hkv, D) if paged else (B, Hkv, N, D)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask = None if kind == "contiguous" else create_block_mask(mods.sliding_window(700), None, None, N, N)
    used = torch.tensor([1500, 3], dtype=torch.int32, device="cuda")
    offsets = used - 1
    table = torch.arange(B * N // 64, dtype=torch.int32, device="cuda").view(B, -1)

    def step(q):
        pages = {"block_table": table} if paged else {}
        at = {} if kind == "mask of more rows" else {"q_offsets": offsets}
        return flex_attention(
            q, key, value, mods.alibi(H), mask, enable_gqa=True, seqused_k=used, **at, **pages
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    with torch.no_grad():
        for i in range(8):
            q = torch.randn(B, H, 1, D, device="cuda", dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(q).clone()
            assert torch.equal(found, step(q)), i
            used.add_(1)
            offsets.add_(1)
            table.copy_(
                torch.randperm(shape[0] if paged else table.numel(), device="cuda")[: table.numel()].view(B, -1)
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_steps_of_varlen_attn(mode):
    """One query per sequence, with pages."""
    pages = [torch.randn(64, 64, 2, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randperm(64, device="cuda").int().view(2, 32)
    used, cu = torch.tensor([1000, 70], dtype=torch.int32, device="cuda"), ends(1, 1)

    def step(q):
        return varlen_attn(
            q, *pages, cu, None, 1, 2048, seqused_k=used, block_table=table, enable_gqa=True, window_size=(-1, 0)
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    with torch.no_grad():
        for i in range(6):
            q = rows(2, i).detach()
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(q).clone()
            assert torch.equal(found, step(q)), i
            used.add_(1)


def test_pages_with_gradients():
    q, k, v = (rows(n, i, heads) for i, (n, heads) in enumerate(((B * 3, H), (16 * 64, 2), (16 * 64, 2))))
    used = torch.tensor([500, 70], dtype=torch.int32, device="cuda")
    table = torch.randperm(16, device="cuda").int().view(2, 8)

    def f(q, k, v):
        q, k, v = q.view(B, 3, H, D).transpose(1, 2), k.view(16, 64, 2, D), v.view(16, 64, 2, D)
        return flex_attention(q, k, v, mods.alibi(H), enable_gqa=True, seqused_k=used, block_table=table)

    found, expected = (gradients(g, (q, k, v), [q, k, v]) for g in (torch.compile(f, fullgraph=True), f))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
