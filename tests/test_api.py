"""flex_attention and explain: what goes in, what comes out, and how long Python takes around the engine."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import AuxOutput, AuxRequest, api, create_block_mask, explain, explanation, flex_attention, reference
from flexattn.block_mask import BuildCounts
from flexattn.graph.interval_bounds import bound
from flexattn.mods import document_causal
from flexattn.process import config
from flexattn.tuning import tune


def inputs(
    B: int = 2, H: int = 2, M: int = 33, N: int = 33, D: int = 8, dtype: torch.dtype = torch.float32, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def fresh(length: int) -> Tensor:
        return torch.randn(B, H, length, D, generator=generator).to(dtype).requires_grad_(grad)

    return fresh(M), fresh(N), fresh(N)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(slopes: Tensor):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def causal_mask(M: int = 33, N: int = 33) -> flexattn.BlockMask:
    return create_block_mask(causal, None, None, M, N, device="cpu", BLOCK_SIZE=16)


def test_examples_in_docstrings() -> None:
    failed, attempted = map(sum, zip(*map(doctest.testmod, (api, explanation, tune)), strict=True))
    assert failed == 0 and attempted >= 9  # Dynamo adds functions to the module after a graph break


def test_signature_is_a_superset_of_upstreams() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (flex_attention, upstream.flex_attention))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    out, aux = flex_attention(*inputs(dtype=dtype), return_aux=AuxRequest(lse=True, max_scores=True))
    assert out.dtype == dtype
    assert aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert aux.max_scores.dtype == torch.float32


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_scores", [False, True])
@pytest.mark.parametrize("kind", [AuxRequest, upstream.AuxRequest], ids=["ours", "upstream"])
def test_return_aux_holds_what_was_asked_for(lse: bool, max_scores: bool, kind: type) -> None:
    q, k, v = inputs()
    out, aux = flex_attention(q, k, v, block_mask=causal_mask(), return_aux=kind(lse=lse, max_scores=max_scores))
    scores = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
    assert isinstance(aux, AuxOutput)
    assert (aux.lse is None, aux.max_scores is None) == (not lse, not max_scores)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    if lse:
        torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    if max_scores:
        torch.testing.assert_close(aux.max_scores, scores.amax(-1))


def test_return_lse_works_and_warns_once() -> None:
    q, k, v = inputs()
    api._warn_return_lse.cache_clear()
    with pytest.warns(FutureWarning, match="return_aux=AuxRequest") as caught:
        _, lse = flex_attention(q, k, v, return_lse=True)
    assert caught[0].filename == __file__
    torch.testing.assert_close(lse, (q @ k.mT / 8**0.5).logsumexp(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(q, k, v, return_lse=True)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_strides_of_out_follow_query(order: tuple[int, ...], grad: bool) -> None:
    q, k, v = inputs(B=2, H=3, M=5, N=7, grad=grad)
    back = tuple(order.index(i) for i in range(4))
    q = q.detach().permute(order).contiguous().permute(back).requires_grad_(grad)
    out = flex_attention(q, k, v)
    outer = [i for i in order if i != 3]
    assert out.stride(3) == 1
    assert [out.stride(i) for i in outer] == sorted((out.stride(i) for i in outer), reverse=True)
    torch.testing.assert_close(out, reference.attention(q, k, v)[0].float())


@pytest.mark.parametrize(("B", "H", "M", "N"), [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)])
def test_empty_sizes(B: int, H: int, M: int, N: int) -> None:
    q, k, v = inputs(B, H, M, N, grad=True)
    slopes = torch.ones(2, requires_grad=True)
    out, aux = flex_attention(q, k, v, alibi(slopes), return_aux=AuxRequest(True, True))
    assert out.shape == (B, H, M, 8)
    assert aux.lse.shape == aux.max_scores.shape == (B, H, M)
    assert torch.all(out == 0)
    assert torch.all(aux.lse == -torch.inf)
    (out.sum() + aux.lse.masked_fill(aux.lse == -torch.inf, 0).sum()).backward()
    for x in (q, k, v, slopes):
        assert x.grad is not None
        assert torch.all(x.grad == 0)


def test_mod_that_returns_its_score_and_mask_that_is_true_cost_nothing() -> None:
    mask = create_block_mask(flexattn.noop_mask, None, None, 33, 33, device="cpu", BLOCK_SIZE=16)
    shown = explain(*inputs(), score_mod=lambda score, b, h, q_idx, kv_idx: score, block_mask=mask)
    assert (shown.score, shown.mask) == (None, None)


def test_upstreams_stand_in_for_no_mask_is_no_mask() -> None:
    q, k, v = inputs()
    out = flex_attention(q, k, v, block_mask=upstream._create_empty_block_mask(q, k))
    torch.testing.assert_close(out, flex_attention(q, k, v))


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_sdpa_does(inner: torch.dtype) -> None:
    q, k, v = inputs(grad=True)
    with torch.autocast("cpu", dtype=inner):
        out, aux = flex_attention(q, k.half().float(), v, return_aux=AuxRequest(lse=True))
        out.float().sum().backward()  # inside, so that the backward must not be cast either
    assert (out.dtype, aux.lse.dtype) == (inner, torch.float32)
    plain = flex_attention(q.to(inner), k.half().float().to(inner), v.to(inner))
    torch.testing.assert_close(out, plain, rtol=0, atol=0)
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(*inputs(dtype=torch.float64)).dtype == torch.float64


def test_autocast_fixes_mixed_dtypes() -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(q, k.bfloat16(), v).dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [0.0, -1.5, 3, Fraction(1, 3), np.float16(0.5), np.int8(2)])
def test_scale_of_any_sign(scale) -> None:
    q, k, v = inputs()
    torch.testing.assert_close(flex_attention(q, k, v, scale=scale), (q @ k.mT * float(scale)).softmax(-1) @ v)


def test_kernel_option_chooses_the_cpu_engine() -> None:
    shown = explain(*inputs(), kernel_options={"BACKEND": "CPU"})
    assert shown.engine == "cpu"
    torch.testing.assert_close(flex_attention(*inputs(), kernel_options={"BACKEND": "CPU"}), flex_attention(*inputs()))


def test_explain_shows_every_stage() -> None:
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    shown = explain(*inputs(), score_mod=alibi(slopes), block_mask=causal_mask())
    text = shown.full()
    assert shown.score is not None
    assert shown.gradient is not None
    assert shown.mask is not None
    assert shown.gradient.sites
    for graph in (shown.score, shown.gradient, shown.mask):
        assert repr(graph) in text
    headings = [line.strip("- ") for line in text.splitlines() if line.startswith("-- ")]
    assert [h.split(" ")[0] for h in headings if not h.startswith("facts")] == [
        "call", "score_mod", "gradient", "mask_mod", "block", "engine",
    ]  # fmt: skip
    assert "test_api.py:" in headings[1]


def test_explain_of_mods_alone() -> None:
    shown = explain(mask_mod=causal)
    assert shown.mask is not None and shown.mask_facts is not None
    assert [line.split(" ")[1] for line in shown.full().splitlines() if line.startswith("-- ")] == [
        "mask_mod",
        "facts",
        "bounds",
    ]
    assert explain(score_mod=alibi(torch.ones(2))).gradient is not None
    with pytest.raises(flexattn.FlexAttentionError, match="explain: found nothing, expected tensors or mods"):
        explain()
    with pytest.raises(flexattn.FlexAttentionError, match="mask_mod: found one with other arguments"):
        explain(*inputs(), mask_mod=causal)


def test_explain_of_a_mask_with_lengths_builds_it() -> None:
    table = torch.rand(48, 33, generator=torch.Generator().manual_seed(0)) < 0.5

    def striped(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & table[q_idx, kv_idx % 33] & (h < 2)

    shown = explain(mask_mod=striped, B=2, H=3, Q_LEN=48, KV_LEN=40, BLOCK_SIZE=(16, 8))
    mask = shown.block_mask
    assert mask is not None and mask.build_counts is not None
    assert (mask.shape, mask.BLOCK_SIZE) == ((2, 3, 48, 40), (16, 8))
    full, partial, empty = mask.counts()
    counts = mask.build_counts
    built = (
        f"{counts.boxes} boxes bounded, {counts.samples} positions sampled, {counts.blocks} blocks evaluated pair by "
        f"pair; {full + partial} of {full + partial + empty} blocks live"
    )
    assert shown.full().splitlines()[-1] == built and built in str(shown)
    assert repr(bound(shown.mask)) in shown.full()
    mask.build_counts = BuildCounts(9, None, 4)  # from a GPU
    assert "9 boxes bounded, 4 blocks evaluated pair by pair; " in str(shown)
    headings = [line.split(" ")[1] for line in shown.full().splitlines() if line.startswith("-- ")]
    assert headings == ["mask_mod", "facts", "bounds", "block"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mask_mod": causal, "Q_LEN": 9}, "Q_LEN: found 9, expected both Q_LEN and KV_LEN. Pass both"),
        ({"mask_mod": causal, "B": 2}, "B: found 2, expected both Q_LEN and KV_LEN. Pass both"),
        ({"score_mod": alibi(torch.ones(2)), "KV_LEN": 9}, "KV_LEN: found 9, expected a mask_mod to build a mask from"),
        ({"query": inputs()[0], "key": inputs()[0], "value": inputs()[0], "H": 2}, "H: found 2, expected a mask_mod"),
        ({"mask_mod": causal, "Q_LEN": 9, "KV_LEN": -1}, "KV_LEN: found -1, expected an int >= 0"),
    ],
)
def test_explain_refuses_sizes_that_say_nothing(arguments: dict, text: str) -> None:
    with pytest.raises(flexattn.FlexAttentionError, match=text):
        explain(**arguments)


def test_debug_tells_each_stage(monkeypatch, capsys) -> None:
    config.settings.cache_clear()
    monkeypatch.setenv("FLEXATTN_DEBUG", "1")
    try:
        flex_attention(*inputs(), lambda score, b, h, q_idx, kv_idx: score * 1.0625, causal_mask())
        told = capsys.readouterr().err
    finally:
        config.settings.cache_clear()
    assert "flexattn trace: score_mod" in told
    assert "mul(score, 1.0625)" in told or "score * 1.0625" in told
    assert "flexattn mask: BuildCounts(" in told
    assert "flexattn call: engine flexattn.engines.cpu, torch.float32, mods: " in told


def test_explain_shows_the_kernels_of_a_gpu_that_is_not_there() -> None:
    shown = explain(*inputs(dtype=torch.float16), alibi(torch.ones(2)), causal_mask(), target="sm_90")
    assert shown.engine == "triton"
    assert len(shown.plans) == len(shown.sources) == 4  # forward, delta, dQ, dK/dV
    for source in shown.sources:
        compile(source.text, source.name, "exec")
        assert source.text.strip() in shown.full()
    with pytest.raises(flexattn.FlexAttentionError, match="target: found 'h100', expected one of sm_75, "):
        explain(*inputs(), target="h100")


def test_explain_runs_nothing() -> None:
    q, k, v = (torch.empty(1, 2, 1_000_000, 8) for _ in range(3))
    assert explain(q, k, v, alibi(torch.ones(2))).engine == "cpu"


HOST_TIME = """
import time, torch
import flexattn
from flexattn.call.call import Call
from flexattn.call.pose import pose
from flexattn.engines import cpu
torch.set_num_threads(1)
q = k = v = torch.randn(1, 2, 64, 16)
mask = flexattn.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 64, 64, device="cpu")
out = cpu.forward(pose(Call(q, k, v, None, mask)))
cpu.forward = lambda problem: out
def batch():
    start = time.process_time()
    for _ in range(200):
        flexattn.flex_attention(q, k, v, block_mask=mask)
    return (time.process_time() - start) / 200
print(min(batch() for _ in range(10)) * 1e6)
"""


@pytest.mark.slow
def test_python_around_the_engine_is_short() -> None:
    """Causal, no captures, the engine replaced by its own answer: about 20 us where this was written."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", HOST_TIME], capture_output=True, text=True, check=True, env=environment
    )
    assert float(result.stdout) < 150  # microseconds; a machine under test is a busy one


def test_explain_lists_the_kernels_that_build_the_mask_on_a_gpu():
    ids, length = torch.arange(512) // 100, 512
    mask = create_block_mask(document_causal(ids), None, None, length, length, device="cpu")
    shown = explain(*inputs(M=length, N=length, dtype=torch.float16), None, mask, target="sm_90")
    names = [source.name for source in shown.mask_sources]
    assert names == ["mask_classify_document_causal", "mask_lists", "mask_table"]
    assert "-- source of mask_classify_document_causal" in shown.full()
    assert "mask      mask_classify_document_causal, mask_lists, mask_table" in str(shown)
    assert explain(*inputs(M=length, N=length), None, mask).mask_sources == ()
