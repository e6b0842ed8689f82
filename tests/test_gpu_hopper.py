"""The Gluon kernels on sm_90: every kind of mod, mask, shape and layout against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import kernel_cases
import pytest
import torch
from kernel_cases import MASKS, SCORES, Call, Setting, Sizes, check, deterministic, make_call
from torch import Tensor

from flexattn import AuxRequest, BlockMask, create_block_mask, explain, flex_attention, mods, varlen_attn
from flexattn.compile import hopper, stripes
from flexattn.errors import UnsupportedError
from flexattn.process.config import settings
from flexattn.runtime.launch import forget_launches

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="not an sm_90 GPU"
    ),
]

HOPPER = (("BACKEND", "HOPPER"),)
BF16 = Setting("cuda", torch.bfloat16, block=4, options=HOPPER)
FP16 = Setting("cuda", torch.float16, block=4, options=HOPPER)
WIDE, NARROW = Sizes(2, 2, 1, 333, 427, 128, 128), Sizes(2, 2, 1, 333, 427, 64, 64)


@pytest.fixture
def stripes_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let programs own stripes of keys also where that is slower."""
    for name, value in (("_BUSY", 0.0), ("_MOST_TILES", 1 << 30), ("_OF_L2", 1e9), ("_PACKED", (256,))):
        monkeypatch.setattr(stripes, name, value)
    forget_launches()
    yield
    forget_launches()


@pytest.fixture
def keys_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the next keys when the current ones are read, as with bits at D 128."""
    monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
    forget_launches()
    yield
    forget_launches()


@pytest.fixture(params=["fused", "late keys", "pair", "stripes"])
def backward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take gradients by one kernel (three forms), or by those of deterministic mode; say which.

    The reference may not know deterministic mode.
    """
    if request.param == "stripes":
        request.getfixturevalue("stripes_everywhere")
    if request.param == "late keys":
        request.getfixturevalue("keys_in_one_buffer")

    def results(call: Call, dtype: torch.dtype | str | None) -> tuple[Tensor | None, ...]:
        with deterministic(dtype == "ours" and request.param == "pair"):
            return plain(call, dtype)

    plain = kernel_cases.results
    monkeypatch.setattr(kernel_cases, "results", results)
    return request.param


def forced(name: str, backward: str) -> tuple[tuple[str, str], ...]:
    """Return the options that force this engine where it can compute a score_mod of SCORES, in both passes or one."""
    q = torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    score_mod, learned = SCORES[name](Setting("cpu", torch.bfloat16), 4, 256, 256)
    for x in learned:
        x.requires_grad_()
    with deterministic(backward == "pair"):
        kernels = [plan.spec.name for plan in explain(q, q, q, score_mod, target="sm_90").plans]
    gradients = {
        "fused": {"hopper_backward"}, "late keys": {"hopper_backward"}, "stripes": {"hopper_backward_stripes"},
        "pair": {"hopper_dq", "hopper_dkdv"},
    }  # fmt: skip
    phases = {"fwd_BACKEND": "hopper_forward" in kernels, "bwd_BACKEND": gradients[backward] <= set(kernels)}
    return tuple((option, "HOPPER") for option, here in phases.items() if here)


@pytest.mark.parametrize("name", sorted(SCORES))
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["D64", "D128"])
def test_score_mods(backward: str, name: str, mask: str | None, sizes: Sizes) -> None:
    options = forced(name, backward)
    if len(options) < 2:
        with pytest.raises(UnsupportedError, match="BACKEND='HOPPER', but "):
            check(make_call(BF16, sizes, name, mask))
    if options:
        check(make_call(replace(BF16, options=options), sizes, name, mask), loose=name == "constant")


@pytest.mark.parametrize("name", ["zero_d", "alibi", "chained", "relative"])
def test_gradients_of_captured_tensors(name: str) -> None:
    """dq uses the Triton kernel, which adds to them. dk and dv use Hopper unless score_mod loads per (q, kv) pair."""
    check(make_call(replace(BF16, options=(("fwd_BACKEND", "AUTO"), ("bwd_BACKEND", "AUTO"))), WIDE, name, "causal"))


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize(("sizes", "at"), [(WIDE, BF16), (NARROW, FP16)], ids=["D128 bfloat16", "D64 float16"])
@pytest.mark.parametrize("mask", [None, *sorted(MASKS)])
def test_masks(mask: str | None, sizes: Sizes, at: Setting) -> None:
    check(make_call(at, sizes, None, mask), loose=True)


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 1, 1, 128, 128, 128, 128), Sizes(1, 2, 1, 1, 1, 64, 64), Sizes(2, 2, 1, 129, 1, 64, 64),
        Sizes(1, 8, 1, 65, 1000, 128, 128), Sizes(3, 4, 4, 640, 127, 64, 64), Sizes(4, 4, 2, 200, 300, 128, 128, Bkv=1),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mask", [None, "causal"])
def test_shapes(sizes: Sizes, mask: str | None) -> None:
    check(make_call(BF16, sizes, "softcap", mask), loose=True)


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("dims", [(96, 96), (80, 96), (40, 72), (72, 40), (16, 128), (32, 32)])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_head_dims(dims: tuple[int, int], mask: str | None) -> None:
    check(make_call(BF16, Sizes(2, 4, 2, 300, 290, *dims), "softcap", mask), loose=True)


@pytest.mark.parametrize("dims", [(192, 128), (136, 64), (256, 256), (200, 160)])
@pytest.mark.parametrize("mask", [None, "causal", "document"])
def test_wide_heads(dims: tuple[int, int], mask: str | None) -> None:
    check(make_call(BF16, Sizes(2, 4, 2, 300, 290, *dims), "softcap", mask), loose=True)


@pytest.mark.parametrize("score", [None, "softcap", "of_index", "fixed_bias"])
@pytest.mark.parametrize("mask", [None, "causal", "document"])
@pytest.mark.parametrize("dims", [(192, 128), (136, 64)])
def test_heads_of_192(dims: tuple[int, int], score: str | None, mask: str | None) -> None:
    """Two kernels compute the gradients. If score_mod loads from a table for each pair, it is one."""
    at = replace(BF16, options=(("bwd_BACKEND", "HOPPER"),)) if score == "fixed_bias" else BF16
    call = make_call(at, Sizes(2, 4, 2, 300, 290, *dims), score, mask)
    plans = explain(call.query, call.key, call.value, call.score_mod, call.mask, enable_gqa=True).plans
    gradients = {"hopper_backward_wide"} if score == "fixed_bias" else {"hopper_dq", "hopper_dkdv"}
    assert gradients <= {plan.spec.name for plan in plans}
    check(call, loose=True)


def between_heads(x: Tensor) -> Tensor:
    """The same values as a view of [B, S, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_more(x: Tensor) -> Tensor:
    """The same values as part of a larger tensor, as q, k and v of one projection are."""
    return torch.cat((x, x, x), -1).split(x.size(-1), -1)[1]


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("layout", [between_heads, inside_more])
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    call = make_call(BF16, WIDE, None, "causal")
    check(Call(*map(layout, (call.query, call.key, call.value)), None, call.mask, call.mask_mod, options=call.options))


def big(B: int, Hq: int, Hkv: int, S: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16, generator=generator) for H in (Hq, Hkv, Hkv)
    )
    return q, k, v


def documents(S: int) -> Callable[..., Tensor]:
    cuts = torch.sort(torch.randperm(S - 1, generator=torch.Generator().manual_seed(1))[:11] + 1)[0]
    return mods.document_causal(torch.bucketize(torch.arange(S), cuts, right=True).int().cuda())


@pytest.mark.parametrize(
    ("S", "D", "mask", "score"),
    [
        (8192, 128, None, None), (8192, 64, mods.causal, None), (16384, 128, documents, mods.softcap(30.0)),
        (32768, 128, mods.sliding_window(1024), None), (8192, 128, mods.prefix_lm(2048), mods.alibi(8)),
        (8192, 256, documents, None), (8192, 192, mods.causal, mods.softcap(30.0)),
    ],
    ids=["full", "causal", "documents softcap", "sliding", "prefix alibi", "documents 256", "softcap 192"],
)  # fmt: skip
def test_long_sequences_agree_with_the_triton_engine(S, D, mask, score) -> None:
    q, k, v = (x.requires_grad_() for x in big(1, 8, 2, S, D))
    d_out = torch.randn_like(q)
    mask = mask(S) if mask is documents else mask
    blocks = mask and create_block_mask(mask, None, None, S, S, device="cuda")
    results = []
    for backend in ("HOPPER", "TRITON"):
        aux = AuxRequest(lse=True, max_scores=True)
        out, extra = flex_attention(
            q, k, v, score, blocks, enable_gqa=True, return_aux=aux, kernel_options={"BACKEND": backend}
        )
        grads = torch.autograd.grad(out, (q, k, v), d_out)
        results.append((out.float(), extra.lse, extra.max_scores, *(g.float() for g in grads)))
    bounds = (2.0**-6, 2.0**-14, 2.0**-14, 2.0**-6, 2.0**-6, 2.0**-6)
    for (ours, theirs), bound in zip(zip(*results, strict=True), bounds, strict=True):
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max().clamp(min=1)


def test_the_same_call_twice_is_bitwise_equal() -> None:
    q, k, v = big(2, 8, 8, 4096, 128)
    blocks = create_block_mask(mods.causal, None, None, 4096, 4096, device="cuda")
    outs = [flex_attention(q, k, v, block_mask=blocks, kernel_options={"BACKEND": "HOPPER"}) for _ in range(20)]
    assert all(torch.equal(outs[0], x) for x in outs)


def gradients(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, options: dict[str, str]) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flex_attention(q, k, v, mods.softcap(9.0), mask, enable_gqa=True, kernel_options=options)
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_deterministic_gradients_are_bitwise_equal(D: int, Dv: int) -> None:
    """dk and dv always are; dq is a sum in any order, unless deterministic algorithms are asked for."""
    q, k, v = big(2, 8, 4, 2048, D)
    inputs = q, k, v[..., :Dv].contiguous()
    blocks = create_block_mask(mods.causal, None, None, 2048, 2048, device="cuda")
    fused = [gradients(*inputs, blocks, {"bwd_BACKEND": "HOPPER"}) for _ in range(20)]
    with deterministic():
        pair = [gradients(*inputs, blocks, {"bwd_BACKEND": "HOPPER"}) for _ in range(20)]
        made = explain(*inputs, mods.softcap(9.0), blocks, enable_gqa=True)
    assert [plan.spec.name for plan in made.plans[2:]] == ["hopper_dq", "hopper_dkdv"]
    assert all(torch.equal(x, y) for other in fused for x, y in zip(fused[0][1:], other[1:], strict=True))
    assert all(torch.equal(x, y) for other in pair for x, y in zip(pair[0], other, strict=True))
    for x, y in zip(fused[0], pair[0], strict=True):
        assert (x.float() - y.float()).norm() <= 2.0**-7 * y.float().norm()


def test_nothing_of_other_heads_or_past_the_end_leaks() -> None:
    """Queries, keys and values past the length, in the same allocation, are NaN; so is the next head."""
    S = 200
    tensors = big(1, 2, 2, 256, 128)
    for x in tensors:
        x[:, :, S:] = float("nan")
    q, k, v = (x[:, :, :S] for x in tensors)
    out = flex_attention(q, k, v, kernel_options={"BACKEND": "HOPPER"})
    assert out.isfinite().all()
    for pair in (False, True):
        with deterministic(pair):
            assert all(g.isfinite().all() for g in gradients(q, k, v, None, {"BACKEND": "HOPPER"}))


STRIPED = [(256,) * 64, (0, 5, 128, 0, 300, 1, 127, 129, 900, 0, 64, 64, 0), tuple(8 + 7 * i % 113 for i in range(300))]


@pytest.mark.usefixtures("stripes_everywhere")
@pytest.mark.parametrize("lengths", STRIPED, ids=["64 x 256", "some empty", "300 short"])
@pytest.mark.parametrize("window", [(-1, 0), (70, 30)], ids=str)
@pytest.mark.parametrize(("Hkv", "D"), [(4, 128), (2, 72)], ids=str)
def test_stripes_of_packed_sequences(lengths: tuple[int, ...], window: tuple[int, int], Hkv: int, D: int) -> None:
    """Sequences end inside of blocks of keys, so some queries have keys in two stripes."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q, k, v = (x[0].transpose(0, 1).requires_grad_() for x in big(1, 4, Hkv, sum(lengths), D))
    d_out, results = torch.randn_like(q), []
    for backend in ("HOPPER", "HOPPER", "TRITON"):
        out = varlen_attn(
            q, k, v, cu, cu, max(lengths), max(lengths), window_size=window, enable_gqa=True,
            kernel_options={"BACKEND": backend},
        )  # fmt: skip
        results.append(torch.autograd.grad(out, (q, k, v), d_out))
    for ours, again, theirs in zip(*results, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 2.0**-7 * theirs.float().norm()
        assert torch.equal(ours, again) or ours is results[0][0]


def test_stripes_of_short_sequences_are_deterministic() -> None:
    """All keys of a query are in one stripe, so dq is a sum in a fixed order."""
    inputs = big(33, 4, 4, 300, 128)
    blocks = create_block_mask(mods.causal, None, None, 300, 300, device="cuda")
    assert "hopper_backward_stripes" in str(explain(*[x.requires_grad_() for x in inputs], None, blocks).plans)
    found = [gradients(*inputs, blocks, {"bwd_BACKEND": "HOPPER"}) for _ in range(10)]
    assert all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False, True, False)], ids=str)
def test_some_gradients_alone(wanted: tuple[bool, ...]) -> None:
    """They are those of deterministic mode: what the other kernel makes is not asked for."""
    inputs = big(2, 4, 2, 500, 128)
    mask = create_block_mask(mods.causal, None, None, 500, 500, device="cuda")
    with deterministic():
        expected = gradients(*inputs, mask, {"BACKEND": "HOPPER"})
    tensors = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
    out = flex_attention(*tensors, mods.softcap(9.0), mask, enable_gqa=True, kernel_options={"BACKEND": "HOPPER"})
    found = torch.autograd.grad(out, [x for x in tensors if x.requires_grad], torch.ones_like(out))
    for x, y in zip(found, [g for g, want in zip(expected, wanted, strict=True) if want], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("pair", [False, True])
def test_keys_and_queries_that_no_block_reaches(pair: bool) -> None:
    """Their gradients are 0, not what the memory held before."""
    q, k, v = big(1, 4, 2, 640, 64)
    middle = lambda b, h, q_idx, kv_idx: (q_idx // 128 == 2) & (kv_idx // 128 == 3)  # noqa: E731
    mask = create_block_mask(middle, None, None, 640, 640, device="cuda")
    with deterministic(pair):
        dq, dk, dv = gradients(q, k, v, mask, {"BACKEND": "HOPPER"})
    assert (dq[:, :, :256] == 0).all() and (dq[:, :, 384:] == 0).all() and dq[:, :, 256:384].any()
    for x in (dk, dv):
        assert (x[:, :, :384] == 0).all() and (x[:, :, 512:] == 0).all() and x[:, :, 384:512].any()


@pytest.mark.parametrize(("ascending", "offset"), [(True, 0), (False, 0), (True, 200)])
def test_documents_by_their_runs(ascending: bool, offset: int) -> None:
    """If ids are sorted, the mask reads bounds of documents, not the id of each key. Otherwise it is as written.

    A part of a sequence at an offset reads them too.
    """
    q, k, v = (x.requires_grad_() for x in big(2, 4, 2, 1000, 128))
    cuts = torch.tensor([[0, 130, 131, 500, 999], [0, 1, 2, 640, 650]], device="cuda")
    ids = (torch.arange(1000 + offset, device="cuda")[None, :, None] >= cuts[:, None, :]).sum(-1, dtype=torch.int32)
    ids = ids if ascending else ids % 4
    same = lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx >= kv_idx)  # noqa: E731
    mask = create_block_mask(mods.shifted(same, offset, offset), 2, None, 1000, 1000, device="cuda")
    assert len(mask.equal_runs()) == ascending
    own = ids[:, offset:]
    dense = (own[:, :, None] == own[:, None, :]).tril()[:, None]
    for backend in ("HOPPER", "TRITON"):
        out = flex_attention(q, k, v, None, mask, enable_gqa=True, kernel_options={"BACKEND": backend})
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=dense, enable_gqa=True
        )
        theirs = torch.autograd.grad(expected, (q, k, v), torch.ones_like(expected))
        for x, y in zip((out, *grads), (expected, *theirs), strict=True):
            assert (x.double() - y).norm() <= 2.0**-7 * y.double().norm()


def masks_to_trim(kind: str, S: int, seed: int) -> Callable[..., object]:
    """Return a mask_mod whose blocks begin and end at any query."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randint(0, 400, (2,), generator=generator).tolist()
    cuts = torch.randint(1, S, (S // 150,), generator=generator).sort().values.unique()
    edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([S])]).cuda()
    ids = torch.repeat_interleave(edges.diff())
    first = edges[ids].int()
    return {
        "window": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right),
        "distance": lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= left,
        "documents": mods.document(ids),
        "causal documents": mods.document_causal(ids),
        "bounds of queries": lambda b, h, q_idx, kv_idx: (kv_idx >= first[q_idx]) & (kv_idx <= q_idx + right),
    }[kind]


@pytest.mark.parametrize("form", ["fused", "late keys", "pair"])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["window", "distance", "documents", "causal documents", "bounds of queries"])
def test_trimmed_runs_give_the_same_bits(kind: str, D: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that are left out have no pair, so dk and dv are the same sums."""
    if form == "late keys":
        monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
    S = 1400 + 53 * (D // 32)
    inputs = [x.requires_grad_() for x in big(2, 4, 2, S, D)]
    mask = create_block_mask(masks_to_trim(kind, S, D), None, None, S, S, device="cuda")
    found = {}
    for without in ("trimmed_runs", ""):
        monkeypatch.setenv("FLEXATTN_WITHOUT", without)
        settings.cache_clear()
        forget_launches()
        with deterministic(form == "pair"):
            plans = explain(*inputs, None, mask, enable_gqa=True).plans
            made = next(plan for plan in plans if "dk" in plan.spec.gradients)
            assert made.trims_runs == (made.is_hopper and not without)
            out = flex_attention(*inputs, None, mask, enable_gqa=True)
            found[without] = torch.autograd.grad(out, inputs, torch.cos(out.detach() * 9))
    monkeypatch.undo()
    settings.cache_clear()
    forget_launches()
    (dq, dk, dv), (dq_all, dk_all, dv_all) = found[""], found["trimmed_runs"]
    assert torch.equal(dk, dk_all) and torch.equal(dv, dv_all)
    assert (dq.double() - dq_all.double()).norm() <= 2.0**-9 * dq_all.double().norm()


def test_rows_without_a_key_are_zero() -> None:
    q, k, v = big(1, 2, 2, 512, 128)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= 130) & (kv_idx < q_idx - 100), None, None, 512, 512)
    out, lse = flex_attention(
        q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True), kernel_options={"BACKEND": "HOPPER"}
    )
    lse = lse.lse
    assert not out[:, :, :130].any()
    assert (lse[:, :, :130] == -torch.inf).all() and lse[:, :, 130:].isfinite().all()


@pytest.mark.parametrize("block", [64, 96])
def test_blocks_that_are_no_whole_tiles_are_refused_by_name(block: int) -> None:
    q, k, v = big(1, 2, 2, 512, 128)
    mask: BlockMask = create_block_mask(mods.causal, None, None, 512, 512, device="cuda", BLOCK_SIZE=block)
    mask.kv_runs = mask.kv_runs  # lists that were assigned are read as they are
    with pytest.raises(UnsupportedError, match=f"blocks of {block} x {block} are not multiples"):
        flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})
    assert flex_attention(q, k, v, block_mask=mask).isfinite().all()  # by the Triton engine


@pytest.mark.usefixtures("backward")
@pytest.mark.parametrize("sink", sorted(kernel_cases.SINKS))
@pytest.mark.parametrize(
    ("sizes", "score", "mask"), [(WIDE, None, "late_rows"), (NARROW, "softcap", None), (NARROW, None, "nothing")]
)
def test_sinks(sizes: Sizes, score: str | None, mask: str | None, sink: str) -> None:
    check(kernel_cases.with_sink(make_call(BF16, sizes, score, mask), BF16, sink), loose=True)
