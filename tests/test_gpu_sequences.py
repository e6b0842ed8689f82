"""Lengths, pages, packed sequences and paged caches on a GPU: results, CUDA graphs and streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import interval_cases
import packed_cases
import pytest
import sequence_cases
import torch
from cache_cases import ModelledCache
from oracle import assert_close_to_oracle
from sequence_cases import SequenceCase
from torch import Tensor

from flexattn import PagedKVCache, counters, create_block_mask, flex_attention, mods

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

CALLS = [
    (name, backend, dtype)
    for name, case in sequence_cases.CASES.items()
    for backend in ("TRITON", "TRITON_DECODE")
    for dtype in (torch.bfloat16, torch.float32)
    if backend == "TRITON" or (case.M <= 128 and not case.max_scores)
]


@pytest.mark.parametrize(("name", "backend", "dtype"), CALLS)
def test_sequences(name: str, backend: str, dtype: torch.dtype) -> None:
    case = replace(sequence_cases.CASES[name], device="cuda", dtype=dtype)
    q, k, v = case.tensors()
    found = case.run(q, k, v, BACKEND=backend)
    for of, x, dense, exact in zip(
        ("out", "lse"), found, case.expected(q, k, v, None), case.expected(q, k, v), strict=False
    ):
        assert_close_to_oracle(of, x.cpu(), dense, exact)


@pytest.mark.parametrize("options", [{}, {"SPLIT_KV": 3}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", interval_cases.CASES)
def test_intervals_of_keys(name: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    replace(interval_cases.CASES[name], device="cuda", dtype=dtype).check(**options)


@pytest.mark.parametrize("name", ["many queries", "window", "lengths, mask", "by batch", "pages, many queries"])
def test_gradients_of_sequences(name: str) -> None:
    case = replace(sequence_cases.CASES[name], device="cuda", dtype=torch.bfloat16, D=64, Dv=64)
    tensors = [x.requires_grad_() for x in case.tensors()]
    d_out = torch.randn(3, case.Hq, case.M, case.Dv, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = torch.autograd.grad(case.run(*tensors)[0], tensors, d_out.cuda())
    dense = torch.autograd.grad(case.expected(*tensors, None)[0], tensors, d_out)
    exact = torch.autograd.grad(case.expected(*tensors)[0], tensors, d_out.double())
    for of, x, y, z in zip(("dq", "dk", "dv"), found, dense, exact, strict=True):
        assert_close_to_oracle(of, x.cpu(), y, z, "grad")


@pytest.mark.parametrize("changes", [{"used": (1, 301, 300)}, {"used": (1, -1, 300)}, {"offsets": (0, -1, 299)}])
def test_a_sequence_with_a_wrong_number_is_nan(changes: dict[str, tuple[int, ...]]) -> None:
    case = replace(sequence_cases.CASES["one query, causal"], device="cuda")
    q, k, v = case.tensors()
    mask = case.mask()
    key, value, layout = case.arguments(k, v)
    for name, values in changes.items():
        argument = {"used": "seqused_k", "offsets": "q_offsets"}[name]
        layout[argument] = torch.tensor(values, dtype=torch.int32, device="cuda")
    for backend in ("TRITON", "TRITON_DECODE"):
        out = flex_attention(
            q.cuda(), key, value, None, mask, enable_gqa=True, kernel_options={"BACKEND": backend}, **layout
        )  # fmt: skip
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("name", packed_cases.CASES)
def test_packed(name: str, num_splits: int | None, dtype: torch.dtype) -> None:
    """Keys that are not used are NaN, and rows of query after the last sequence large."""
    case = replace(packed_cases.CASES[name], device="cuda", dtype=dtype, poison=1e4, D=64, Dv=64)
    tensors = case.tensors()
    found = case.run(*tensors, num_splits=num_splits)
    dense, exact = case.expected(*tensors, dtype=None), case.expected(*tensors)
    for of, x, y, z in zip(("out", "lse"), found, dense, exact, strict=True):
        assert_close_to_oracle(of, x, y, z, factor=1.5)  # rows with few keys
    d_out = torch.randn_like(found[0])
    gradients = (torch.autograd.grad(o[0], tensors, d_out.to(o[0].dtype)) for o in (found, dense, exact))
    for of, x, y, z in zip(("dq", "dk", "dv", "dtable"), *gradients, strict=False):
        scale = 2e-2 if dtype == torch.bfloat16 else 1e-5  # few keys: errors relative to the largest element
        if x.numel() and float((x - z).abs().max()) > scale * max(1.0, float(z.abs().max())):
            assert_close_to_oracle(of, x, y, z, "grad")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_appended_tokens(layout: str) -> None:
    model = ModelledCache(device="cuda", kv_layout=layout)
    model.append([40, 3, 0, 16])
    model.append([2, 33], [3, 1])
    model.fork(0, [2])
    for _ in range(3):
        model.append([1, 1, 1, 1])
    model.erase([1], [20])
    model.append([5, 7, 0, 1])
    model.check()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary(interleaved: bool) -> None:
    angle = torch.arange(400)[:, None] * 100 ** (-torch.arange(32) / 32)
    key, query = torch.randn(2, 2, 300, 128), torch.randn(2, 8, 300, 128)
    found = []
    for device in ("cpu", "cuda"):
        cache = PagedKVCache(2, 400, pages=60, heads=2, head_dim=128, dtype=torch.float32, device=device)
        x = key.to(device)
        cache.append(x[:, :, :9], x[:, :, :9], lengths=[9, 4])
        rotated = cache.append(
            x, x, query=query.to(device), rotary_cos=angle.cos().to(device), rotary_sin=angle.sin().to(device),
            rotary_interleaved=interleaved, lengths=[300, 55],
        )  # fmt: skip
        assert rotated is not None
        pages = cache.block_table.clamp(min=0).long()
        tokens = [x[pages].flatten(1, 2)[b, :n].cpu() for x in (cache.key, cache.value) for b, n in ((0, 309), (1, 59))]
        found.append((rotated.cpu(), *tokens))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


HQ, HKV, D, PROMPT, CAPACITY = 8, 2, 64, 300, 2048


class Decoder:
    """A paged cache, and a step on it whose results are kept on the device."""

    def __init__(self, seed: int, steps: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.cache = PagedKVCache(3, CAPACITY, pages=400, heads=HKV, head_dim=D, device="cuda")
        self.mask = create_block_mask(mods.sliding_window(200), None, None, CAPACITY, CAPACITY, device="cuda")
        self.alibi = mods.alibi(HQ)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        self.prompt = draw(3, HKV, PROMPT, D)
        self.q, self.k, self.v = draw(steps, 3, HQ, 1, D), draw(steps, 3, HKV, 1, D), draw(steps, 3, HKV, 1, D)
        self.at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.out = torch.zeros(steps, 3, HQ, 1, D, dtype=torch.bfloat16, device="cuda")
        self.start(steps)

    def start(self, steps: int) -> None:
        self.cache.erase()
        self.cache.append(self.prompt, self.prompt, lengths=[PROMPT, 1, 77])
        self.cache.reserve(steps)
        self.at.zero_()

    def step(self) -> None:
        q, k, v = (x.index_select(0, self.at).squeeze(0) for x in (self.q, self.k, self.v))
        self.cache.append(k, v)
        out = flex_attention(
            q, self.cache.key, self.cache.value, self.alibi, self.mask, enable_gqa=True, **self.cache.arguments()
        )  # fmt: skip
        self.out.index_copy_(0, self.at, out[None])
        self.at += 1


def test_steps_of_two_replayed_graphs_at_the_same_time() -> None:
    """Each has the results of the same steps without a graph, and nothing is compiled."""
    steps = 64
    decoders = [Decoder(seed, steps + 2) for seed in (0, 1)]
    expected = []
    for decoder in decoders:
        for _ in range(steps):
            decoder.step()
        expected.append(decoder.out.clone())
        decoder.out.zero_()
        decoder.start(steps + 2)
    torch.cuda.synchronize()
    streams, graphs = [torch.cuda.Stream() for _ in decoders], [torch.cuda.CUDAGraph() for _ in decoders]
    for decoder, graph in zip(decoders, graphs, strict=True):
        with torch.cuda.graph(graph):
            decoder.step()
    torch.cuda.synchronize()
    before = counters()
    for _ in range(steps):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    after = counters()
    assert (after.kernels_compiled, after.traces) == (before.kernels_compiled, before.traces)
    for decoder, wanted in zip(decoders, expected, strict=True):
        assert torch.equal(decoder.out[:steps], wanted[:steps])
        assert decoder.cache.synchronize() == [PROMPT + steps, 1 + steps, 77 + steps]


def test_replays_without_room() -> None:
    """The sequence whose pages are full returns NaN. Its length is what it was, and the others go on."""
    decoder = Decoder(0, 40)
    graph = torch.cuda.CUDAGraph()
    decoder.cache.erase([1], 1)  # gives back what was reserved for it
    decoder.cache.reserve([0, 15, 0])
    with torch.cuda.graph(graph):
        decoder.step()
    for _ in range(20):
        graph.replay()
    assert decoder.out[14].isfinite().all()
    assert decoder.out[16, 1].isnan().all() and decoder.out[16, [0, 2]].isfinite().all()
    with pytest.raises(RuntimeError, match=r"sequences: found \[1\] without room in a CUDA graph"):
        decoder.cache.synchronize()
    assert decoder.cache.synchronize() == [PROMPT + 20, 16, 97]


@pytest.mark.parametrize("form", ["rows", "pages"])
def test_calls_on_two_streams(form: str) -> None:
    """Split buffers are not shared."""
    base = SequenceCase(N=3000, offsets=None, used=(2999, 1500, 7), D=64, Dv=64, device="cuda", dtype=torch.bfloat16)
    case = replace(base, form=form)
    runs: list[Callable[[], Tensor]] = []
    for seed in range(2):
        q, k, v = (x + seed for x in case.tensors())
        key, value, layout = case.arguments(k, v)
        q = q.cuda()
        runs.append(lambda q=q, k=key, v=value, layout=layout: flex_attention(q, k, v, enable_gqa=True, **layout))
    expected = [run() for run in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in runs]
    found: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, run, outs in zip(streams, runs, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(run())
    torch.cuda.synchronize()
    for outs, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in outs)
