"""The Triton engine on a GPU: the interpreter's cases, larger and in all dtypes, and what only a GPU shows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_cases
import pytest
import torch
from kernel_cases import (
    CASES,
    LAYOUTS,
    SCORES,
    Call,
    Setting,
    Sizes,
    assert_near,
    check,
    check_case,
    deterministic,
    make_call,
    results,
)
from kernel_checks import CHECKS, run
from kernel_ops import check_row, operands, rows, through_kernel
from kernel_warmup import BF16, FP16, RUNS, TF32, warm_up
from oracle import assert_close_to_oracle
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention, mods
from flexattn.errors import UnsupportedError
from flexattn.graph.bound_mod import _literal_on
from flexattn.graph.tables_by_distance import read_tables_by_distance
from flexattn.machine.target import target_of
from flexattn.reference import attention
from flexattn.runtime.build import stats
from flexattn.trace.trace import trace

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile what the tests will run in all cores at once; workers of pytest-xdist share the work as it is."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        arch = target_of(torch.device("cuda", torch.cuda.current_device())).arch
        warm_up(int(arch), max(1, min(16, len(os.sched_getaffinity(0)))))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def causal(length: int, other: int | None = None) -> BlockMask:
    return create_block_mask(mods.causal, None, None, length, other or length, device="cuda")


@pytest.mark.parametrize(("name", "at"), RUNS, ids=str)
def test_case(name: str, at: Setting) -> None:
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, at == TF32  # for the dense computation
    try:
        check_case(name, at)
    finally:
        products.allow_tf32 = before


@pytest.mark.parametrize("at", [BF16, FP16], ids=str)
@pytest.mark.parametrize("run_check", CHECKS, ids=lambda f: f.__name__)
def test_check(run_check: Callable[[Setting], None], at: Setting) -> None:
    run_check(at)


# The table of operations


@pytest.mark.parametrize(("name", "kind"), rows())
def test_operation(name: str, kind: str) -> None:
    check_row(name, kind, "cuda")


def test_the_hardwares_tanh_is_within_its_bound() -> None:
    x = torch.linspace(-6, 6, 501)
    want = torch.tanh(x.double())
    fast, _ = through_kernel(torch.tanh, [x], "cuda")
    exact, _ = through_kernel(torch.tanh, [x], "cuda", exact=True)
    error = ((fast.double() - want) / want.where(want != 0, 1.0)).abs().max()
    assert error <= 2**-11 + 1e-6
    torch.testing.assert_close(exact.double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "sin", "rsqrt", "div", "log"])
def test_fast_operations(name: str) -> None:
    assert operands(name, "float")
    check_row(name, "float", "cuda", rtol=1e-5, exact=False)


# Ready mods


def documents(length: int) -> Tensor:
    return (torch.arange(length, device="cuda") // 77).int()


S = 320
MASKS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "noop_mask": lambda: mods.noop_mask,
    "causal": lambda: mods.causal,
    "causal_lower_right": lambda: mods.causal_lower_right(S, S),
    "shifted": lambda: mods.shifted(mods.causal, 20),
    "sliding_window": lambda: mods.sliding_window(50),
    "band": lambda: mods.band(100, 40),
    "dilated": lambda: mods.dilated(3, 5),
    "strided": lambda: mods.strided(50),
    "global_tokens": lambda: mods.global_tokens(30),
    "prefix_lm": lambda: mods.prefix_lm(torch.tensor([100, 7], device="cuda")),
    "document": lambda: mods.document(documents(S)),
    "document_causal": lambda: mods.document_causal(torch.stack([documents(S), documents(S) // 2])),
    "block_diffusion": lambda: mods.block_diffusion(S // 2, 16),
    "natten_2d": lambda: mods.natten_2d(16, 20, 5),
    "natten_3d": lambda: mods.natten_3d(4, 8, 10, 3),
    "padding": lambda: mods.padding(torch.tensor([200, S], device="cuda")),
    "tree": lambda: mods.tree((torch.arange(S, device="cuda") - 1) // 2),
    "and_masks": lambda: mods.and_masks(mods.causal, mods.sliding_window(90)),
    "or_masks": lambda: mods.or_masks(mods.prefix_lm(50), mods.document(documents(S))),
    "not_mask": lambda: mods.not_mask(mods.causal),
    "xor_masks": lambda: mods.xor_masks(mods.causal, mods.sliding_window(90)),
}


def learned(*shape: int) -> Tensor:
    return randn(*shape, seed=5, dtype=torch.float32).abs() + 0.5


READY: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Callable[..., Tensor]]]] = {
    "alibi": ((4,), lambda t: mods.alibi(t)),
    "softcap": ((), lambda t: mods.softcap(2.0)),
    "relative_bias": ((4, 41), lambda t: mods.relative_bias(t)),
    "t5_bias": ((16, 4), lambda t: mods.t5_bias(t)),
    "head_gate": ((4,), lambda t: mods.head_gate(t)),
    "temperature": ((4,), lambda t: mods.temperature(t)),
    "distance_decay": ((4,), lambda t: mods.distance_decay(t)),
}


def test_every_ready_mod_is_tested() -> None:
    assert {name for name, value in vars(mods).items() if callable(value)} == MASKS.keys() | READY.keys()


@pytest.mark.parametrize("name", MASKS)
def test_ready_mask(name: str) -> None:
    q, k, v = randn(2, 4, S, 64), randn(2, 2, S, 64, seed=1), randn(2, 2, S, 64, seed=2)
    mod = MASKS[name]()
    check(Call(q, k, v, None, create_block_mask(mod, 2, 4, S, S, device="cuda"), mod))


@pytest.mark.parametrize("name", READY)
def test_ready_score_mod(name: str) -> None:
    q, k, v = randn(2, 4, S, 64), randn(2, 2, S, 64, seed=1), randn(2, 2, S, 64, seed=2)
    shape, make = READY[name]
    table = learned(*shape) * (0.01 if name in ("alibi", "distance_decay") else 1.0)
    score_mod = make(table)
    check(Call(q, k, v, score_mod, causal(S), mods.causal, learned=(table,) if name != "softcap" else ()))


# Large tensors


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (192, 128), (256, 256), (320, 96)])
@pytest.mark.parametrize("masked", [False, True])
def test_head_dims_at_two_thousand(D: int, Dv: int, masked: bool) -> None:
    q, k, v = randn(1, 4, 1999, D), randn(1, 2, 2001, D, seed=1), randn(1, 2, 2001, Dv, seed=2)
    check(Call(q, k, v, None, causal(1999, 2001) if masked else None, mods.causal if masked else None))


@pytest.mark.parametrize("score", ["none", "softcap", "alibi"])
def test_eight_thousand(score: str) -> None:
    """Each head by itself is what a call with two heads gives, so the oracle sees two heads."""
    made = {"none": None, "softcap": mods.softcap(20.0), "alibi": None}
    slopes = torch.tensor([0.01, 0.1], device="cuda").repeat(8)
    made["alibi"] = mods.alibi(slopes)
    length = 8192
    q, k, v = (randn(1, 16, length, 64, seed=i) for i in range(3))
    call = Call(q, k, v, made[score], causal(length), mods.causal)
    got = results(call, "ours")
    again = results(call, "ours")
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "the same bits each time"
    slices = replace(call, query=q[:, :2], key=k[:, :2], value=v[:, :2])
    d_out, d_lse = _weights(got[0], got[1])
    for n, (same, exact) in enumerate(
        zip(_dense(slices, None, d_out, d_lse), _dense(slices, torch.float64, d_out, d_lse), strict=True)
    ):
        kind = ("out", "lse", "grad", "grad", "grad")[n]
        assert_close_to_oracle(f"{score} {n}", got[n][:, :2], same, exact, kind)


def _weights(*results: Tensor) -> list[Tensor]:
    """Return the gradients that `results` of the whole call were asked with."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x.device) for x in results]


def _dense(call: Call, dtype: torch.dtype | None, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (call.query, call.key, call.value)]
    out, lse = attention(*leaves, call.score_mod, call.mask_mod, None, dtype)
    weights = (d_out[:, :2].to(call.query.dtype).to(out.dtype), d_lse[:, :2].to(lse.dtype))
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, weights)


def test_gradient_of_a_table_at_four_thousand() -> None:
    length = 4096
    q, k, v = (randn(1, 2, length, 64, seed=i) for i in range(3))
    table = randn(2, 2 * 512 + 1, seed=4, dtype=torch.float32)
    check(Call(q, k, v, mods.relative_bias(table), None, None, learned=(table,)))


def pairs_of(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s + table[h, i, j]


def gate_of(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s * torch.sigmoid(table)[h, j]


def window_of(table: Tensor) -> Callable[..., Tensor]:
    """Swin's bias of a window of 32 x 32 patches."""
    place = torch.arange(1024, device="cuda")
    y, x = place // 32, place % 32
    cells = ((y[:, None] - y + 31) * 63 + x[:, None] - x + 31).int()
    return lambda s, b, h, i, j: s + table[cells[i, j], h]


# (query heads, length, shape of the captured tensor, mod): what is added to in any order, unless asked otherwise.
REPEATED: dict[str, tuple[int, int, tuple[int, ...], Callable[[Tensor], Callable[..., Tensor]]]] = {
    "t5": (4, 1024, (32, 4), mods.t5_bias),
    "swin": (4, 1024, (63 * 63, 4), window_of),
    "relative": (4, 2048, (4, 513), mods.relative_bias),
    "pairs": (4, 1024, (4, 1024, 1024), pairs_of),
    "gate": (4, 1024, (4, 1024), gate_of),
    "head gate": (8, 1024, (8,), mods.head_gate),
    "row plus column": (4, 1024, (1024,), lambda t: lambda s, b, h, i, j: s + t[i] + t[j]),
    "number": (4, 1024, (), lambda t: lambda s, b, h, i, j: s * t),
}


def ours_deterministic(call: Call, dtype: torch.dtype | str | None) -> tuple[Tensor | None, ...]:
    with deterministic(dtype == "ours"):  # not the reference: cuBLAS wants a setting of its own for that
        return results(call, dtype)


@pytest.mark.parametrize("name", REPEATED)
def test_deterministic_algorithms_repeat_every_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "results", ours_deterministic)
    heads, length, shape, make = REPEATED[name]
    q, k, v = (randn(2, n, length, 64, seed=i) for i, n in enumerate((heads, 2, 2)))
    table = randn(*shape, seed=5, dtype=torch.float32)
    mod, mask = make(table), causal(length)
    call = Call(q, k, v, mod, mask, mods.causal, learned=(table,))
    check(call)
    runs = [ours_deterministic(call, "ours") for _ in range(50)]
    for other in runs[1:]:
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_deterministic_captured_gradients_wait_for_nothing() -> None:
    """The step of integer sums is found on the device."""
    q, k, v = (randn(1, 4, 512, 64, seed=i).requires_grad_() for i in range(3))
    tables = [randn(*s, seed=5, dtype=torch.float32).requires_grad_() for s in ((4, 513), (4, 512))]
    mod = lambda s, b, h, i, j: s * torch.sigmoid(tables[1][h, j]) + tables[0][h, (i - j).clamp(-9, 9)]  # noqa: E731
    mask = causal(512)

    def step() -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, mod, mask)
        return torch.autograd.grad(out, (q, k, v, *tables), out)

    with deterministic():
        want = step()
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            again = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(want, again, strict=True))


def test_more_heads_than_a_grid_dimension_holds() -> None:
    q, k, v = (randn(70_001, 1, 17, 16, seed=i) for i in range(3))
    check(Call(q, k, v, None, causal(17), mods.causal))


@pytest.mark.parametrize("row", [1 << 22, 1 << 24])
def test_offsets_beyond_two_to_the_31(row: int) -> None:
    """Rows so far apart that the last one lies 2.1e9 elements or more from the first."""
    length = (1 << 31) // row + 70
    if torch.cuda.mem_get_info()[0] < 3 * length * row:
        pytest.fail("this test needs 10 GiB of free memory")
    buffer = torch.empty(length, row, dtype=torch.bfloat16, device="cuda")
    views = [buffer[None, None, :, at : at + 64] for at in (0, 128, 256)]
    for i, view in enumerate(views):
        view.copy_(randn(1, 1, length, 64, seed=i))
    packed = [x.contiguous() for x in views]
    mask = causal(length)
    far, near = (results(Call(*x, mods.softcap(5.0), mask), "ours") for x in (views, packed))
    for a, b in zip(far, near, strict=True):
        assert_near("far", a, b, b.double(), torch.bfloat16)
    del buffer, views
    torch.cuda.empty_cache()


def test_captured_tensor_beyond_two_to_the_31() -> None:
    length, row = 600, 1 << 22
    buffer = torch.empty(length, row, dtype=torch.bfloat16, device="cuda")
    table = buffer[:, :length].copy_(randn(length, length, seed=9))
    q, k, v = (randn(1, 2, length, 64, seed=i) for i in range(3))
    far, near = (
        results(Call(q, k, v, lambda s, b, h, i, j, t=t: s + t[i, j], causal(length)), "ours")
        for t in (table, table.contiguous())
    )
    for a, b in zip(far, near, strict=True):
        assert_near("far", a, b, b.double(), torch.bfloat16)


# Ways to the same result


@pytest.mark.parametrize("D", [64, 128, 192])
def test_tma_and_pointers_agree(D: int) -> None:
    q, k, v = randn(2, 4, 700, D), randn(2, 2, 650, D, seed=1), randn(2, 2, 650, D, seed=2)
    call = Call(q, k, v, mods.softcap(5.0), causal(700, 650))
    tma, pointers = (results(replace(call, options={"USE_TMA": use}), "ours") for use in (True, False))
    for n, (a, b) in enumerate(zip(tma, pointers, strict=True)):
        assert_near(str(n), a, b, b.double(), torch.bfloat16)


def test_layouts_agree() -> None:
    """Results depend on a tensor's values, not on its strides."""
    call = make_call(BF16, Sizes(Hq=4, Hkv=4, D=64, Dv=64), "softcap", "causal")
    want = results(call, "ours")
    for name in ("transposed", "columns", "window", "aligned_window"):
        moved = replace(call, **{x: LAYOUTS[name](getattr(call, x)) for x in ("query", "key", "value")})
        for a, b in zip(results(moved, "ours"), want, strict=True):
            assert_near(name, a, b, b.double(), torch.bfloat16)


@pytest.mark.parametrize("name", ["softcap", "alibi", "plain"])
def test_torchs_compiled_flex_attention_agrees(name: str) -> None:
    q, k, v = (randn(2, 4, 512, 64, seed=i).requires_grad_() for i in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05], device="cuda")
    score_mod = {"softcap": mods.softcap(10.0), "alibi": mods.alibi(slopes), "plain": None}[name]
    theirs = upstream.create_block_mask(mods.causal, None, None, 512, 512, device="cuda")
    peer = torch.compile(upstream.flex_attention)(q, k, v, score_mod, theirs)
    ours = flex_attention(q, k, v, score_mod, causal(512))
    d_out = randn(*ours.shape, seed=8)
    exact, _ = attention(q, k, v, score_mod, mods.causal)
    wanted = torch.autograd.grad(exact, (q, k, v), d_out.double())
    pairs = zip(
        (ours, *torch.autograd.grad(ours, (q, k, v), d_out)),
        (peer, *torch.autograd.grad(peer, (q, k, v), d_out)),
        (exact, *wanted),
        strict=True,
    )
    for n, (a, b, oracle) in enumerate(pairs):
        assert_near(str(n), a.detach(), b.detach(), oracle.detach().double(), torch.bfloat16)


def test_upstreams_eager_flex_attention_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = (randn(2, 4, 200, 64, seed=i, dtype=torch.float16) for i in range(3))
    theirs = upstream.create_block_mask(mods.causal, None, None, 200, 200, device="cuda")
    peer = upstream.flex_attention(q, k, v, block_mask=theirs)
    for mask in (theirs, causal(200)):
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), peer, rtol=2e-3, atol=2e-3)


# Around the kernels


def test_second_call_compiles_nothing() -> None:
    def call() -> None:
        offsets = randn(4, dtype=torch.float32).requires_grad_()
        q, k, v = (randn(1, 4, 384, 64, seed=i).requires_grad_() for i in range(3))
        mask = create_block_mask(mods.sliding_window(100), None, None, 384, 384, device="cuda")
        flex_attention(q, k, v, lambda s, b, h, i, j: s * offsets[h], mask).sum().backward()
        assert offsets.grad is not None

    call()
    before = stats()
    call()
    after = stats()
    assert (after["compiles"], after["disk_hits"]) == (before["compiles"], before["disk_hits"])


def test_nothing_of_queries_by_keys_is_allocated() -> None:
    B, H, length, D = 1, 8, 16_384, 64
    q, k, v = (randn(B, H, length, D, seed=i).requires_grad_() for i in range(3))
    table = randn(H, 257, seed=3, dtype=torch.float32).requires_grad_()
    mask = causal(length)
    bias = mods.relative_bias(table)

    def step() -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, bias, mask)
        return torch.autograd.grad(out, (q, k, v, table), out)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = step()
    peak = torch.cuda.max_memory_allocated() - before
    tensors = sum(x.numel() * x.element_size() for x in (*grads, q))  # gradients and out
    rows = 4 * B * H * length
    assert peak <= tensors + 4 * rows + (16 << 20), f"{peak / 2**20:.0f} MiB"


@pytest.mark.parametrize("exactly", [False, True], ids=["", "deterministic"])
def test_a_pair_bias_is_shared_by_many_rows(exactly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in AlphaFold's triangular attention: nothing of [rows, H, S, S] is allocated."""
    rows, H, S, D = 128, 4, 256, 32
    q, k, v = (randn(rows, H, S, D, seed=i) for i in range(3))
    bias = randn(1, H, S, S, seed=3, dtype=torch.float32)
    mod = lambda s, b, h, i, j: s + bias[0, h, i, j]  # noqa: E731
    with monkeypatch.context() as patch:
        if exactly:
            patch.setattr(kernel_cases, "results", ours_deterministic)
        check(Call(q, k, v, mod, None, None, learned=(bias,)))
    with deterministic(exactly):
        leaves = [x.requires_grad_() for x in (q, k, v, bias)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flex_attention(q, k, v, mod)
        grads = torch.autograd.grad(out, leaves, out)
    peak = torch.cuda.max_memory_allocated() - before
    tensors = sum(x.numel() * x.element_size() for x in (*grads, out, out.float()))  # and the sum of dq
    assert peak <= tensors + (24 << 20) < 4 * rows * H * S * S, f"{peak / 2**20:.0f} MiB"


def test_memory_of_the_forward_alone() -> None:
    q, k, v = (randn(1, 8, 16_384, 64, seed=i) for i in range(3))
    flex_attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flex_attention(q, k, v)
    rows = 4 * q.shape[1] * q.shape[2]
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 2 + rows + (1 << 20)


def test_streams() -> None:
    """Work goes to the stream that is current: it sees what was put there before."""
    q, k, v = (randn(1, 4, 512, 64, seed=i) for i in range(3))
    want = flex_attention(q, k, v)
    late = torch.zeros_like(v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(v)
        got = flex_attention(q, k, late)
    side.synchronize()
    assert torch.equal(got, want)


def test_cuda_graphs() -> None:
    q, k, v = (randn(1, 4, 512, 64, seed=i) for i in range(3))
    mask = causal(512)
    with torch.no_grad():
        flex_attention(q, k, v, mods.softcap(9.0), mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flex_attention(q, k, v, mods.softcap(9.0), mask)
        q.copy_(randn(*q.shape, seed=7))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, flex_attention(q, k, v, mods.softcap(9.0), mask))


def test_a_cuda_graph_keeps_what_it_reads() -> None:
    """Constants of mods and masks that the package caches: they are evicted, and their memory is written to."""
    q, k, v = (randn(1, 4, 256, 64, seed=i) for i in range(3))
    alibi, t5 = mods.alibi(4), mods.t5_bias(randn(32, 4))

    def window(size: int) -> BlockMask:
        return create_block_mask(mods.sliding_window(size), None, None, 256, 256, device="cuda")

    def attend() -> list[Tensor]:
        return [flex_attention(q, k, v, score, window(100)) for score in (alibi, t5)]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(stream):
            want = attend()
        with torch.cuda.graph(graph, stream=stream):
            found = attend()
        stream.synchronize()
        for i in range(300):
            window(i % 90 + 3)
            _literal_on(bytes([i % 256, i // 256, 0, 0]), torch.float32, torch.Size([1]), q.device)
            read_tables_by_distance(trace(t5, "score"), 256 + i, 256)
        torch.cuda.empty_cache()
        torch.full((2**26,), -1, dtype=torch.int32, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
    assert all(map(torch.equal, found, want))


def test_the_cuda_graph_of_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs/caches.md").read_text()
    (code,) = re.findall(r"```python\n(# cuda_graph.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "cuda_graph.py", "exec"), names)
    torch.cuda.synchronize()
    assert torch.equal(names["out"], names["attend"]())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_mask_is_not_built_in_a_cuda_graph() -> None:
    with (
        pytest.raises(UnsupportedError, match="Build it before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        create_block_mask(mods.sliding_window(77), None, None, 256, 256, device="cuda")


def test_autocast() -> None:
    q, k, v = (randn(1, 4, 200, 64, seed=i, dtype=torch.float32) for i in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flex_attention(*(x.to(torch.bfloat16) for x in (q, k, v))))


def test_training_step() -> None:
    """Autograd accumulates, hooks run, and a loss goes down."""
    x = randn(2, 300, 256, dtype=torch.float32)
    project = torch.nn.Linear(256, 768, device="cuda")
    table = torch.nn.Parameter(torch.zeros(4, 2 * 32 + 1, device="cuda"))
    optimizer = torch.optim.Adam([*project.parameters(), table], 1e-3)
    mask = causal(300)
    losses = []
    for _ in range(12):
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2).to(torch.bfloat16) for t in project(x).chunk(3, -1))
        out = flex_attention(q, k, v, mods.relative_bias(table), mask)
        loss = (out.float().transpose(1, 2).flatten(2) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses)) and table.grad is not None and table.grad.any()


def test_aux_of_the_engine() -> None:
    at = replace(BF16, options=())
    q, k, v = (randn(1, 2, 200, 64, seed=i) for i in range(3))
    out, aux = run(at, q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert isinstance(aux, AuxOutput)
    scores = (q.float() @ k.float().mT) / 8
    torch.testing.assert_close(aux.max_scores, scores.amax(-1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    assert out.dtype == torch.bfloat16 and set(SCORES) and set(CASES)


@pytest.mark.parametrize("score", ["none", "softcap", "alibi"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tf32", [False, True])
def test_verify(score: str, dtype: torch.dtype, tf32: bool) -> None:
    score_mod = {"none": None, "softcap": mods.softcap(20.0), "alibi": mods.alibi(4)}[score]
    query, key, value = (2 * randn(2, heads, 700, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, tf32
    try:
        found = flexattn.verify(query, key, value, score_mod, causal(700), enable_gqa=True, rows=64)
        assert found, str(found)
    finally:
        products.allow_tf32 = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [49, 301])
def test_elements_of_rows_that_are_not_aligned(dtype: torch.dtype, size: int) -> None:
    """They are gathered into registers."""
    table = (4 * randn(2, size, size, seed=1)).to(dtype)
    query, key, value = (randn(3, 2, size, 32, seed=i) for i in range(3))

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, q_idx, kv_idx]

    found = flexattn.verify(query, key, value, bias, rows=64)
    assert found, str(found)
