"""Decoding with latent keys, whose first columns are the values, on a GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_close_to_oracle
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, explain, flex_attention, mods, reference

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
D, DV = 576, 512


def tensors(B: int, Hq: int, M: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return query, and the latent keys of one head."""
    generator = torch.Generator("cuda").manual_seed(B * Hq + N)
    q, k = (torch.randn(*shape, D, device="cuda", generator=generator).to(dtype) for shape in ((B, Hq, M), (B, 1, N)))
    return q, k


def check(q: Tensor, k: Tensor, lengths: list[int] | None, **options: object) -> None:
    """Compare a call, whose keys are NaN from the lengths on, with each sequence computed alone."""
    used = [k.size(2)] * k.size(0) if lengths is None else lengths
    stored = k.clone()
    for b, n in enumerate(used):
        stored[b, :, n:] = torch.nan
    seqused_k = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out, aux = flex_attention(
        q, stored, stored[..., :DV], enable_gqa=True, seqused_k=seqused_k, return_aux=AuxRequest(lse=True), **options
    )  # fmt: skip
    assert aux.lse is not None
    for b, n in enumerate(used):
        keys = k[b : b + 1, :, :n]
        dense, exact = (
            reference.attention(q[b : b + 1], keys, keys[..., :DV], None, None, dtype=dtype)
            for dtype in (None, torch.float64)
        )
        for of, x, y, z in zip(("out", "lse"), (out, aux.lse), dense, exact, strict=False):
            assert_close_to_oracle(of, x[b : b + 1], y, z)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("Hq", "M", "lengths"),
    [
        (128, 1, None), (128, 1, [1, 0, 2000, 1999, 64, 777]), (128, 3, [65, 1, 2000, 1936, 0, 128]),
        (16, 1, [2000, 3, 1000, 1, 1, 1]), (40, 5, None), (1, 100, [500] * 6),
    ],
)  # fmt: skip
def test_results(Hq: int, M: int, lengths: list[int] | None, dtype: torch.dtype) -> None:
    q, k = tensors(6, Hq, M, 2000, dtype)
    check(q, k, lengths)


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_splits(splits: int) -> None:
    q, k = tensors(2, 128, 1, 2100, torch.bfloat16)
    check(q, k, [2099, 5], kernel_options={"SPLIT_KV": splits})


def test_one_sequence_is_shared_and_rows_are_apart() -> None:
    q, k = tensors(3, 128, 2, 1500, torch.bfloat16)
    rows = torch.zeros(1, 1, 1500, 640, dtype=torch.bfloat16, device="cuda")
    rows[..., :D] = k[:1]
    shared = rows[..., :D].expand(1, 1, 1500, D)
    out = flex_attention(q, shared, shared[..., :DV], enable_gqa=True)
    whole = k[:1].expand(3, 1, 1500, D).contiguous()
    torch.testing.assert_close(out, flex_attention(q, whole, whole[..., :DV], enable_gqa=True))


@pytest.mark.parametrize(
    "name", ["alibi", "causal", "own values", "portable"],
)  # fmt: skip
def test_other_kernels(name: str) -> None:
    q, k = tensors(3, 128, 2, 1500, torch.bfloat16)
    value = k[..., :DV].contiguous() if name == "own values" else k[..., :DV]
    score_mod = mods.alibi(128) if name == "alibi" else None
    mask = create_block_mask(mods.shifted(mods.causal, 1400), None, None, 2, 1500, device="cuda")
    block_mask = mask if name == "causal" else None
    options = {"BACKEND": "TRITON_DECODE"} if name == "portable" else {}
    out = flex_attention(q, k, value, score_mod, block_mask, enable_gqa=True, kernel_options=options)
    assert "forward_split" in str(explain(q, k, value, score_mod, block_mask, enable_gqa=True, kernel_options=options))
    mask_mod = mods.shifted(mods.causal, 1400) if name == "causal" else None
    dense, exact = (
        reference.attention(q, k, value, score_mod, mask_mod, dtype=dtype)[0] for dtype in (None, torch.float64)
    )
    assert_close_to_oracle("out", out, dense, exact)


def test_one_graph_for_all_lengths() -> None:
    q, k = tensors(4, 128, 1, 1024, torch.bfloat16)
    used = torch.full((4,), 1024, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        return flex_attention(q, k, k[..., :DV], enable_gqa=True, seqused_k=used)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1, 1024, 64, 65], [0, 2, 1000, 300]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, step())
