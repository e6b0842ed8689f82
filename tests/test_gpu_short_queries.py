"""Short queries on a GPU: against float64, under a CUDA graph, and which kernels run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, mods, reference

pytestmark = pytest.mark.gpu


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - 0.01 * (h + 1) * (2000 - kv_idx).abs()


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx + 1900) & (kv_idx > q_idx + 700)


def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx // 300 == (b * 3 + q_idx) % 7


CASES: dict[str, dict[str, Any]] = {
    "one query": {"M": 1},
    "four queries": {"M": 4},
    "a tile of 64 rows": {"M": 16, "score_mod": alibi},
    "several tiles": {"M": 100, "mask_mod": window},
    "window": {"M": 1, "mask_mod": window, "score_mod": mods.softcap(20.0)},
    "documents": {"M": 3, "mask_mod": documents, "B": 3, "batches": 3},
    "no groups": {"M": 2, "Hkv": 8},
    "one key head": {"M": 1, "Hkv": 1},
    "head dim 64": {"D": 64, "M": 5},
    "head dims 96 and 80": {"D": 96, "Dv": 80, "M": 5},
    "head dim 256": {"D": 256, "M": 2},
    "float16": {"dtype": torch.float16, "M": 7},
    "float32": {"dtype": torch.float32, "M": 7, "score_mod": alibi},
    "sink": {"M": 1, "sink": True},
    "MLA": {"M": 1, "Hq": 16, "Hkv": 1, "D": 576, "Dv": 512},
}


def call(
    M: int, N: int = 2100, B: int = 2, Hq: int = 8, Hkv: int = 2, D: int = 128, Dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16, score_mod: Any = None, mask_mod: Any = None, batches: int | None = None,
    sink: bool = False,
) -> tuple[Any, tuple[Tensor, Tensor, Tensor], Any]:  # fmt: skip
    torch.manual_seed(0)
    shapes = ((B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv or D))
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    tensors = q, k, v
    mask = None if mask_mod is None else create_block_mask(mask_mod, batches, None, M, N)
    sinks = torch.linspace(-1, 2, Hq, device="cuda") if sink else None

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(
            q, k, v, score_mod, mask, enable_gqa=True, sink=sinks, kernel_options=options,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    def dense(dtype: torch.dtype | None) -> Tensor:
        return reference.attention(q, k, v, score_mod, mask_mod, dtype=dtype, sink=sinks)[0]

    return run, tensors, dense


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    run, tensors, dense = call(**CASES[name])
    exact, usual = dense(torch.float64), dense(None).double()
    for options in ({"BACKEND": "TRITON_DECODE"}, {"BACKEND": "TRITON_DECODE", "SPLIT_KV": 5}, {}):
        for _ in range(3):  # also repeated
            out = run(*tensors, **options)[0].double()
        error, allowed = (out - exact).abs(), (usual - exact).abs()
        assert error.max() <= 2 * allowed.max() + 4e-6, (options, float(error.max()), float(allowed.max()))


def test_one_cuda_graph_replays_with_new_values() -> None:
    run, tensors, _ = call(M=1, mask_mod=window)
    for _ in range(3):
        run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(*tensors)
    for _ in range(3):
        for x in tensors:
            x.normal_()
        graph.replay()
        expected = run(*tensors)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_two_streams_do_not_share_memory() -> None:
    run, tensors, _ = call(M=1)
    others = tuple(torch.randn_like(x) for x in tensors)
    expected = run(*tensors)[0], run(*others)[0]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for i, (stream, given) in enumerate(zip(streams, (tensors, others), strict=True)):
            with torch.cuda.stream(stream):
                found[i].append(run(*given)[0])
    torch.cuda.synchronize()
    for results, right in zip(found, expected, strict=True):
        assert all(torch.equal(out, right) for out in results)


def test_short_queries_run_the_split_kernels() -> None:
    _, (q, k, v), _ = call(M=1)
    plans = flexattn.explain(q, k, v, enable_gqa=True).plans
    assert [plan.spec.name for plan in plans if plan.is_forward] == ["forward_split", "merge_splits"]
