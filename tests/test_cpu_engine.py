"""The CPU engine against the dense reference: both directions, every kind of mod, mask, shape, stride and dtype."""

from __future__ import annotations

import math

import pytest
import torch
from operations import Largest
from oracle import assert_close_to_oracle

from flexattn import AuxRequest, create_block_mask, flex_attention
from flexattn.block_mask import BlockMask
from flexattn.call.problem import Problem
from flexattn.engines import cpu, cpu_tiles
from flexattn.errors import IndexRangeError
from flexattn.graph.differentiate import differentiate
from flexattn.reference import attention
from flexattn.trace.trace import trace

ALL = (True, True, True, False)  # query, key, value, sink


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["wide tiles", "small tiles"])
def tile_sizes(request, monkeypatch):
    """Small problems fit into one tile; with small tiles they take many."""
    if request.param == "small tiles":
        monkeypatch.setattr(cpu_tiles, "_SCORES", 4096)
        monkeypatch.setattr(cpu_tiles, "_STACKED_ROWS", 64)


def inputs(B=2, Hq=4, Hkv=2, M=77, N=93, D=16, Dv=24, Bkv=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, M, D), (B if Bkv is None else Bkv, Hkv, N, D), (B if Bkv is None else Bkv, Hkv, N, Dv))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def pose(q, k, v, score_mod=None, mask=None, scale=None, learn=True, max_scores=False):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    score = grad = masked = None
    if score_mod is not None:
        score = trace(score_mod, "score", torch.float64 if q.dtype == torch.float64 else torch.float32)
        learned = tuple(i for i, c in enumerate(score.captures) if c.is_floating_point()) if learn else ()
        grad = differentiate(score.graph, learned)
    if mask is not None:
        masked = trace(mask.mask_mod, "mask")
    return Problem(q, k, v, scale, score, masked, mask, grad, max_scores=max_scores)


def block_mask(mask_mod, q, k, block=32, B=None, H=None):
    return create_block_mask(mask_mod, B, H, q.shape[2], k.shape[2], "cpu", block)


def check(q, k, v, score_mod=None, mask=None, scale=None, captures=(), dense_mask=None):
    """Compare out, lse and every gradient with the oracle; `captures` are the tensors that score_mod reads."""
    shared = [c.requires_grad_() for c in captures]
    problem = pose(q, k, v, score_mod, mask, scale)
    mask_mod = dense_mask if dense_mask is not None else mask.mask_mod if mask is not None else None
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def dense(dtype):
        out, lse = attention(*leaves, score_mod, mask_mod, scale, dtype)
        live = lse != -math.inf
        loss = (out * d_out.to(out.dtype)).sum() + (lse * d_lse.to(lse.dtype))[live].sum()
        return out, lse, torch.autograd.grad(loss, leaves + shared, allow_unused=True)

    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(q.dtype)
    d_lse = torch.randn(q.shape[:3], generator=generator)
    want, same = dense(torch.float64), dense(None)
    out, lse, _ = cpu.forward(problem)
    assert out.dtype == q.dtype and lse.dtype == torch.float64
    # A dense computation of so little may round once or never, and in float64 the oracle rounds like the result.
    floor = {2: 2.0, 4: 3.0, 8: 4.0}[q.dtype.itemsize]
    assert_close_to_oracle("out", out, same[0], want[0], "out", floor)
    assert_close_to_oracle("lse", lse.to(same[1].dtype), same[1], want[1], "lse", floor)
    *grads, captured, _ = cpu.backward(problem, out, lse, d_out, d_lse, ALL)
    factor, room = 1.0, {}
    if q.dtype == torch.float32:  # out, from which the backward starts, is rounded
        floor, factor = (5.0 if k.size(2) > 1 else 8.0), 1.1
        room = rounding_of_ds(q, k, v, d_out, scale)
    if q.dtype == torch.float64:  # so is lse: half an ulp of it is an error of lse / 2 ulp in every weight
        floor += float(lse[lse != -math.inf].abs().max())
    for name, leaf, got, near, exact in zip("qkv", leaves, grads, same[2], want[2], strict=False):
        assert got.dtype == leaf.dtype
        zeros = torch.zeros_like(leaf)
        assert_close_to_oracle(
            f"d{name}", got, *(zeros if x is None else x for x in (near, exact)), "grad", floor, factor,
            room.get(f"d{name}", 0.0),
        )  # fmt: skip
    if not captures:
        return
    learned = [(c, g) for c, g in zip(problem.score.captures, captured, strict=True) if c.requires_grad]
    assert all(g.dtype == c.dtype and g.shape == c.shape for c, g in learned)
    through_prologue = torch.autograd.grad([c for c, _ in learned], shared, [g for _, g in learned])
    for n, (got, near, exact) in enumerate(zip(through_prologue, same[2][3:], want[2][3:], strict=True)):
        of_compute = max(1.0, torch.finfo(q.dtype).eps / torch.finfo(got.dtype).eps)
        assert_close_to_oracle(f"gradient of capture {n}", got, near, exact, "grad", floor * of_compute, factor)


def rounding_of_ds(q, k, v, d_out, scale):
    """Return what an error of half an ulp in d_out . v adds to dq and dk.

    The backward subtracts d_out . out from d_out . v. A dense softmax subtracts a sum of the same numbers, so in
    a row with one key the two cancel exactly there. A gradient of keys sums the errors of G heads.
    """
    G = q.size(1) // k.size(1)
    dp = d_out.double() @ v.repeat_interleave(G, 1).double().transpose(-1, -2)  # [B, Hq, M, N]
    rounding = torch.finfo(q.dtype).eps / 2 * float(dp.abs().max()) * abs(scale or q.size(-1) ** -0.5)
    return {"dq": rounding * float(k.abs().max()), "dk": rounding * G**0.5 * float(q.abs().max())}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx + h * 7) >= kv_idx + b * 11


def holes(b, h, q_idx, kv_idx):
    return (q_idx % 5 != 0) & (kv_idx % 3 != 0) & ((q_idx // 32 + kv_idx // 32) % 2 == 0)


MASKS = {"none": None, "causal": causal, "sliding": sliding, "by head": by_head, "holes": holes}


def mods():
    """Return score mods by name, each with the tensors it captures."""
    generator = torch.Generator().manual_seed(2)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    slopes, table, dense, gate = randn(4), randn(4, 200), randn(2, 4, 77, 93), randn(93)
    half, temperature = randn(93).bfloat16(), torch.tensor(1.3)
    return {
        "none": (None, ()),
        "softcap": (lambda s, b, h, i, j: torch.tanh(s / 2) * 2, ()),
        "alibi": (lambda s, b, h, i, j: s + slopes[h] * (j - i), (slopes,)),
        "relative": (lambda s, b, h, i, j: s + table[h, i - j + 93], (table,)),
        "wrapping": (lambda s, b, h, i, j: s + table[h, i - j], (table,)),
        "dense": (lambda s, b, h, i, j: s + dense[b, h, i, j], (dense,)),
        "transposed": (lambda s, b, h, i, j: s + dense.transpose(1, 2)[b, i, h, j], (dense,)),
        "two sites": (lambda s, b, h, i, j: s * torch.sigmoid(gate[j]) + gate[i] * gate[j], (gate,)),
        "half": (lambda s, b, h, i, j: s + half[j] * 0.5, (half,)),
        "0-d": (lambda s, b, h, i, j: s / temperature, (temperature,)),
        "no score": (lambda s, b, h, i, j: dense[b, h, i, j], (dense,)),
        "of index": (lambda s, b, h, i, j: s * 0.0 + torch.where(i > j, 0.1 * j, -0.2 * i) + h, ()),
        "infinite": (lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -math.inf, s * gate[j]), (gate,)),
        "detached": (lambda s, b, h, i, j: (s * 2 + 1) * (s * 2).detach() * 0.1 + s, ()),
    }


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("mod", mods())
def test_score_mods(mod):
    score_mod, captures = mods()[mod]
    # Captures of the mods must be those tensors, so both come from one call.
    q, k, v = inputs()
    check(q, k, v, score_mod, block_mask(causal, q, k), captures=captures)


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", [32, (16, 48), 128, 7])
def test_masks(mask, block):
    score_mod, captures = mods()["relative"]
    q, k, v = inputs()
    read = (2, 4) if mask == "by head" else (None, None)
    mask = None if MASKS[mask] is None else block_mask(MASKS[mask], q, k, block, *read)
    check(q, k, v, score_mod, mask, captures=captures)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mod", ["none", "softcap", "two sites"])
def test_dtypes(dtype, mod):
    score_mod, captures = mods()[mod]
    q, k, v = inputs(dtype=dtype)
    check(q, k, v, score_mod, block_mask(sliding, q, k), captures=captures)


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize(
    "sizes",
    [
        {"Hkv": 4}, {"Hkv": 1}, {"Hq": 6, "Hkv": 3}, {"Bkv": 1}, {"M": 1}, {"N": 1}, {"M": 1, "N": 1, "B": 1},
        {"D": 1, "Dv": 1}, {"D": 40, "Dv": 8}, {"M": 300, "N": 5}, {"M": 3, "N": 700}, {"Hq": 40, "Hkv": 20, "M": 9},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_sizes(sizes, masked):
    q, k, v = inputs(**sizes)
    mask = block_mask(lambda b, h, i, j: (i * 3 + j * 2) % 5 != 1, q, k) if masked else None
    check(q, k, v, lambda s, b, h, i, j: s + 0.1 * h - 0.2 * b + 0.01 * (i - j), mask)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Hq": 0, "Hkv": 0}, {"Hq": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_empty_sizes(sizes):
    q, k, v = inputs(**sizes)
    slopes = torch.randn(4)
    problem = pose(q, k, v, lambda s, b, h, i, j: s * slopes[h], max_scores=True)
    out, lse, largest = cpu.forward(problem)
    assert out.shape == (*q.shape[:3], 24) and (out == 0).all() and (lse == -math.inf).all()
    assert (largest == -math.inf).all() and largest.shape == lse.shape == q.shape[:3]
    dq, dk, dv, (ds,), _ = cpu.backward(problem, out, lse, out, lse, ALL)
    assert [x.shape for x in (dq, dk, dv, ds)] == [x.shape for x in (q, k, v, slopes)]
    assert all((x == 0).all() for x in (dq, dk, dv, ds))


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("sizes", [{}, {"Bkv": 1}, {"Hq": 6, "Hkv": 2}, {"M": 70, "N": 90}], ids=str)
@pytest.mark.parametrize("read", [(None, None), (11, None), (None, 4), (11, 4)], ids=str)
def test_many_short_sequences(sizes, read):
    """Batch entries share strips; where their masks differ, a strip lists what any of them attends to."""
    sizes = {"B": 11, "M": 13, "N": 21, **sizes}
    q, k, v = inputs(**sizes)
    read = (read[0], read[1] and q.shape[1])
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, sizes["N"] + 1, (11, q.shape[1]), generator=generator)
    lengths[3:5] = 0
    lengths[6:8] = sizes["N"]
    table = torch.randn(11, q.shape[1], 200, generator=generator)

    def padding(b, h, i, j):
        return j < lengths[b if read[0] else 0, h if read[1] else 0]

    mask = block_mask(padding, q, k, 8, *read)
    check(q, k, v, lambda s, b, h, i, j: s + table[b, h, i - j + 100], mask, captures=(table,))


@pytest.mark.parametrize("read", [(None, None), (1024, None), (None, 4), (1024, 4)], ids=str)
def test_short_sequences_take_few_strips(read):
    """A torch operation takes microseconds for any size. One strip each would take 20 times torch's time."""
    q, k, v = inputs(B=1024, Hq=4, Hkv=4, M=16, N=16)
    mask = block_mask(lambda b, h, i, j: i >= j + ((b if read[0] else 0) + (h if read[1] else 0)) % 3, q, k, 16, *read)
    for problem in (pose(q, k, v), pose(q, k, v, None, mask)):
        assert len(list(cpu_tiles.strips(problem))) <= 16
        assert sum(len(list(cpu_tiles.strips(problem, share))) for share in cpu_tiles.shares(problem, 2)) <= 16


def test_strides():
    q, k, v = inputs(B=2, Hq=4, Hkv=2, M=77, N=93, D=16, Dv=16)
    mask = block_mask(causal, q, k)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(*turned, None, mask)
    out, _, _ = cpu.forward(pose(*turned, None, mask))
    assert out.stride() == turned[0].stride()
    check(*(x.mT.contiguous().mT for x in (q, k, v)), None, mask)  # last dimension not the innermost
    check(q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v, None, mask)
    padded = [torch.nn.functional.pad(x, (3, 2, 1, 1))[:, :, 1:-1, 3:-2] for x in (q, k, v)]
    check(*padded, None, mask)
    out, _, _ = cpu.forward(pose(*padded, None, mask))
    assert out.stride(-1) == 1


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("mod", ["none", "softcap"])
def test_scale_of_any_sign(scale, mod):
    q, k, v = inputs()
    check(q, k, v, mods()[mod][0], block_mask(causal, q, k), scale)


def test_wholly_masked_rows():
    q, k, v = inputs()
    check(q, k, v, *mods()["alibi"][:1], block_mask(lambda b, h, i, j: (i >= 40) & (j < 50), q, k))
    problem = pose(q, k, v, None, block_mask(lambda b, h, i, j: i >= 40, q, k))
    out, lse, _ = cpu.forward(problem)
    # A loss that looks at every lse has a gradient of NaN where it is -inf.
    d_lse = torch.where(lse == -math.inf, math.nan, 1.0)
    for grad in cpu.backward(problem, out, lse, torch.ones_like(out), d_lse, ALL)[:3]:
        assert grad.isfinite().all()
    dq = cpu.backward(problem, out, lse, torch.ones_like(out), None, ALL)[0]
    assert (out[:, :, :40] == 0).all() and (dq[:, :, :40] == 0).all()


def test_rows_that_a_score_mod_empties():
    q, k, v = inputs()
    gate = torch.randn(93)
    score_mod = lambda s, b, h, i, j: torch.where(i < 10, -math.inf, s * gate[j])  # noqa: E731
    check(q, k, v, score_mod, block_mask(causal, q, k), captures=(gate,))
    check(q, k, v, score_mod, captures=(gate,))
    # The derivative of log at 0 is infinite: the pairs have no weight, so it must not count.
    table = torch.rand(93)
    table[::4] = 0.0
    problem = pose(q, k, v, lambda s, b, h, i, j: s + torch.log(table[j]))
    out, lse, _ = cpu.forward(problem)
    *_, (got,), _ = cpu.backward(problem, out, lse, torch.randn_like(out), None, ALL)
    assert got.isfinite().all() and (got[::4] == 0).all() and (got[1::4] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_largest_scores(dtype):
    q, k, v = inputs(dtype=dtype)
    mask = block_mask(holes, q, k)
    _, _, largest = cpu.forward(pose(q, k, v, lambda s, b, h, i, j: s * 2 + h, mask, max_scores=True))
    i, j = torch.arange(77).view(-1, 1), torch.arange(93)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.5 + torch.arange(4).view(4, 1, 1)
    torch.testing.assert_close(largest, scores.masked_fill(~holes(0, 0, i, j), -math.inf).amax(-1).float())


def test_only_what_is_needed():
    q, k, v = inputs()
    table = torch.randn(4)
    problem = pose(q, k, v, lambda s, b, h, i, j: s * table[h], block_mask(causal, q, k))
    out, lse, _ = cpu.forward(problem)
    every = cpu.backward(problem, out, lse, out, None, ALL)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        *grads, (captured,), _ = cpu.backward(problem, out, lse, out, None, (*needs, False))
        for need, got, want in zip(needs, grads, every, strict=False):
            assert (got is not None) == need and (got is None or torch.equal(got, want))
        assert torch.equal(captured, every[3][0])
    fixed = pose(q, k, v, lambda s, b, h, i, j: s * table[h], block_mask(causal, q, k), learn=False)
    assert cpu.backward(fixed, out, lse, out, None, ALL)[3] == (None,)


@pytest.mark.usefixtures("tile_sizes")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_leaks_from_excluded_places(bad):
    """Poison keys that are masked for all, keys that are masked for some, queries without a key, and captures."""
    q, k, v = inputs(Hkv=4, M=93)
    bias = torch.randn(93, 93)
    mask = block_mask(lambda b, h, i, j: (i >= j) & (j != 40) & (i != 3), q, k)
    score_mod = lambda s, b, h, i, j: s + bias[i, j]  # noqa: E731
    d_out = torch.randn(*q.shape[:3], 24)
    clean = pose(q, k, v, score_mod, mask)
    out, lse, _ = cpu.forward(clean)
    want = cpu.backward(clean, out, lse, d_out, None, ALL)
    q, k, v, d_out, bias = (x.clone() for x in (q, k, v, d_out, bias))
    k[:, :, 40] = v[:, :, 40] = q[:, :, 3] = d_out[:, :, 3] = bad
    bias[torch.ones(93, 93).triu(1).bool()] = bad
    bias[3] = bias[:, 40] = bad
    dirty = pose(q, k, v, score_mod, mask)
    got_out, got_lse, _ = cpu.forward(dirty)
    got = cpu.backward(dirty, got_out, got_lse, d_out, None, ALL)
    for a, b in zip((got_out, got_lse, *got[:3], *got[3]), (out, lse, *want[:3], *want[3]), strict=True):
        torch.testing.assert_close(a, b)
    # The last key is attended by the last row only: nobody else may see it.
    k[:, :, 92] = v[:, :, 92] = bad
    got_out, _, _ = cpu.forward(pose(q, k, v, score_mod, mask))
    torch.testing.assert_close(got_out[:, :, :92], out[:, :, :92])
    assert not got_out[:, :, 92].isfinite().any()


@pytest.mark.parametrize("sink", [None, 0.5, torch.tensor([math.inf, 0.0, -math.inf, 1.0])], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_that_are_not_finite_give_what_a_dense_softmax_does(dtype, masked, sink):
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs(M=93))
    bias = torch.zeros(93, 93)
    for row, (key, value) in enumerate([(0, math.inf), (80, math.inf), (0, math.nan), (80, math.nan)], 81):
        bias[row, key] = value
    bias[85, [0, 80]] = math.inf
    bias[86, 0], bias[86, 80] = math.inf, math.nan
    bias[87, 0], bias[87, 80] = math.nan, math.inf
    bias[88, 1:], bias[89], bias[90], bias[90, 70], bias[91] = -math.inf, -math.inf, -math.inf, math.inf, math.inf
    score_mod = lambda s, b, h, i, j: s + bias[i, j]  # noqa: E731
    mask = block_mask(causal, q, k) if masked else None
    results = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), sink=sink)
    out, lse = results[0], results[1].lse
    want, want_lse = attention(q, k, v, score_mod, causal if masked else None, dtype=torch.float64, sink=sink)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    if sink is None or isinstance(sink, float):
        grads, wanted = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))
        for got, exact in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got, exact.to(dtype), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_indices_out_of_range_matter_only_where_attended():
    q, k, v = inputs(M=93)
    table = torch.randn(93)
    mask = block_mask(causal, q, k)
    problem = pose(q, k, v, lambda s, b, h, i, j: s + table[torch.where(i >= j, i - j, 1000)], mask)
    inside = pose(q, k, v, lambda s, b, h, i, j: s + table[torch.where(i >= j, i - j, 0)], mask)
    out, lse, _ = cpu.forward(inside)
    assert torch.equal(cpu.forward(problem)[0], out)
    got, want = (cpu.backward(p, out, lse, out, None, ALL) for p in (problem, inside))
    assert all(torch.equal(x, y) for x, y in zip((*got[:3], *got[3]), (*want[:3], *want[3]), strict=True))
    text = "index 93 in dimension 0 of the captured tensor `table` at an attended position"
    with pytest.raises(IndexRangeError, match=text):
        cpu.forward(pose(q, k, v, lambda s, b, h, i, j: s + table[i - j + 1], mask))
    with pytest.raises(IndexRangeError, match=r"captured tensor `table`"):
        cpu.forward(pose(q, k, v, lambda s, b, h, i, j: s + table[i - j - 10]))
    short = torch.ones(50, dtype=torch.bool)
    listed = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 1, dtype=torch.int32), BLOCK_SIZE=32,
        mask_mod=lambda b, h, i, j: (j < 50) & short[j], seq_lengths=(93, 93),
    )  # fmt: skip
    cpu.forward(pose(q, k, v, None, listed))


def test_lists_of_the_user_rule_over_the_mask_mod():
    q, k, v = inputs(M=64, N=93)
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    partial, full = torch.tensor([[[[1], [0]]]]), torch.tensor([[[[0], [2]]]])  # blocks of keys for each of two rows
    mask = BlockMask.from_kv_blocks(
        counts, partial.int(), counts, full.int(), 32, lambda b, h, i, j: (i + j) % 2 == 0, seq_lengths=(64, 93)
    )
    i, j = torch.arange(64).view(-1, 1), torch.arange(93)
    even, block = (i + j) % 2 == 0, j // 32
    dense = torch.where(i < 32, (block == 0) | ((block == 1) & even), (block == 2) | ((block == 0) & even))
    check(q, k, v, None, mask, dense_mask=dense)


@pytest.mark.parametrize("sizes", [{}, {"Hq": 6, "Hkv": 3}, {"Bkv": 1}, {"B": 3, "Hq": 5, "Hkv": 5, "M": 300}], ids=str)
@pytest.mark.parametrize("by_heads", [False, True])
def test_threads_change_nothing(sizes, by_heads, monkeypatch):
    q, k, v = inputs(**sizes)
    mask = block_mask(by_head, q, k, 32, *(q.shape[:2] if by_heads else (None, None))) if by_heads else None
    table = torch.randn(8, requires_grad=True)
    problem = pose(q, k, v, lambda s, b, h, i, j: s * table[h] + table[b], mask)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(cpu, "_threads", lambda _, n=threads: n)
        out, lse, _ = cpu.forward(problem)
        *grads, captured, _ = cpu.backward(problem, out, lse, torch.ones_like(out), lse.clamp(min=0), ALL)
        results.append((out, lse, *grads, *captured))
    assert torch.get_num_threads() == 1
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(cpu.forward(problem)[0], results[1][0])
    table.data = table.data[:2]
    with pytest.raises(IndexRangeError, match="table"):
        cpu.forward(pose(q, k, v, lambda s, b, h, i, j: s * table[h + 2], mask))


@pytest.mark.parametrize("threads", [1, 2])
def test_every_run_gives_the_same_bits(threads, monkeypatch):
    """Each thread has heads of its own, and sums of captured tensors are added up in their order."""
    q, k, v = inputs(M=300, N=300)
    table, pairs = torch.randn(300, requires_grad=True), torch.randn(4, 599, requires_grad=True)
    mod = lambda s, b, h, i, j: s * torch.sigmoid(table[j]) + pairs[h, i - j] + table[i] + table[j]  # noqa: E731
    problem = pose(q, k, v, mod)
    monkeypatch.setattr(cpu, "_threads", lambda _: threads)
    out, lse, _ = cpu.forward(problem)
    runs = []
    for _ in range(5):
        *grads, captured, _ = cpu.backward(problem, out, lse, torch.ones_like(out), lse, ALL)
        runs.append((*grads, *captured))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_one_tensor_by_row_and_by_column():
    """PyTorch's FlexAttention rejects two uses of a tensor that requires a gradient."""
    bias = torch.randn(93, requires_grad=True)
    q, k, v = inputs()
    check(q, k, v, lambda s, b, h, i, j: s + bias[i] + bias[j], captures=(bias,))


def test_no_tensor_of_queries_by_keys():
    S = 4096
    q, k, v = inputs(B=1, Hq=2, Hkv=1, M=S, N=S, D=16, Dv=16)
    table = torch.randn(2, S)
    mask = block_mask(causal, q, k, 128)
    problem = pose(q, k, v, lambda s, b, h, i, j: s + table[h, i - j], mask)
    with Largest() as seen:
        out, lse, _ = cpu.forward(problem)
        cpu.backward(problem, out, lse, out, None, ALL)
    assert seen.numel <= 2**19 < S * S / 8


def test_a_pair_bias_is_shared_by_many_rows():
    """Nothing of [rows, H, S, S]: neither the bias expanded, nor its gradient before it is summed."""
    rows, H, S = 128, 2, 64
    q, k, v = inputs(B=rows, Hq=H, Hkv=H, M=S, N=S, D=8, Dv=8)
    bias = torch.randn(1, H, S, S)

    def mod(s, b, h, i, j):
        return s + bias[0, h, i, j]

    check(q, k, v, mod, captures=(bias,))
    problem = pose(q, k, v, mod)
    out, lse, _ = cpu.forward(problem)
    with Largest() as seen:
        cpu.forward(problem)
        cpu.backward(problem, out, lse, out, None, ALL)
    assert seen.numel <= rows * H * S * S // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_scores_that_float32_holds_few_digits_of(dtype):
    """Scores reach 1e8. lse keeps more digits than float32 has, or weights would be off by exp of half a unit of it."""
    factor = 1e3 if dtype == torch.float16 else 1e4
    q, k, v = ((x * f).to(dtype) for x, f in zip(inputs(1, 1, 1, 64, 64, 16, 16), (factor, factor, 1.0), strict=True))
    d_out = torch.randn_like(v)
    found = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(flex_attention(*found), found, d_out)
    exact = [x.detach().double().requires_grad_() for x in found]
    expected = torch.autograd.grad(attention(*exact)[0], exact, d_out.double())
    tolerance = 4 * torch.finfo(dtype).eps * expected[2].abs().max()
    assert (gradients[2] - expected[2]).abs().max() <= tolerance  # those of query and key are products of 0
