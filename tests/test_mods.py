"""mods: the masks and score mods against their definitions in plain Python, and their documentation."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
import pkgutil

import numpy as np
import pytest
import torch

from flexattn import flex_attention, mods
from flexattn.errors import ArgumentError, DtypeError, FlexAttentionError
from flexattn.layout import TiledGrid
from flexattn.mask_build.create import create_block_mask, create_mask
from flexattn.mods.at_heads import at_heads
from flexattn.trace.trace import stats as trace_stats
from flexattn.trace.trace import trace

S = 24
IDS = torch.tensor([0] * 5 + [1] * 7 + [2] * 12)
OFFSETS = torch.tensor([0, 5, 12, 24])
LENGTHS = torch.tensor([3, 24])
PARENTS = torch.tensor([-1, 0, 0, 1, 3, 2] + [5] * (S - 6))
MARKED = torch.arange(S) % 7 == 0


def is_ancestor(node: int, other: int) -> bool:
    while node >= 0 and node != other:
        node = int(PARENTS[node])
    return node == other


def in_window(q: int, kv: int, size: int, kernel: int) -> bool:
    first = min(max(q - kernel // 2, 0), size - kernel)
    return first <= kv < first + kernel


def diffuses(q: int, kv: int) -> bool:
    q_clean, kv_clean, q_block, kv_block = q >= 12, kv >= 12, q % 12 // 4, kv % 12 // 4
    if not q_clean:
        return kv_block < q_block if kv_clean else kv_block == q_block
    return kv_clean and kv_block <= q_block


MASKS = {
    "causal": (mods.causal, lambda b, q, kv: kv <= q),
    "noop_mask": (mods.noop_mask, lambda b, q, kv: True),
    "causal_lower_right_24_30": (mods.causal_lower_right(24, 30), lambda b, q, kv: kv <= q + 6),
    "sliding_window_5": (mods.sliding_window(5), lambda b, q, kv: 0 <= q - kv < 5),
    "band_5_2": (mods.band(5, 2), lambda b, q, kv: -5 <= kv - q <= 2),
    "band_-1_2": (mods.band(-1, 2), lambda b, q, kv: kv - q <= 2),
    "band_5_-1": (mods.band(5, -1), lambda b, q, kv: q - kv <= 5),
    "sliding_window_5_both_sides": (mods.sliding_window(5, causal=False), lambda b, q, kv: abs(q - kv) < 5),
    "prefix_lm_6": (mods.prefix_lm(6), lambda b, q, kv: kv < 6 or kv <= q),
    "prefix_lm": (mods.prefix_lm(LENGTHS), lambda b, q, kv: kv < LENGTHS[b] or kv <= q),
    "document": (mods.document(IDS), lambda b, q, kv: IDS[q] == IDS[kv]),
    "document_causal": (mods.document_causal(offsets=OFFSETS), lambda b, q, kv: IDS[q] == IDS[kv] and kv <= q),
    "dilated_3_4": (mods.dilated(3, 4), lambda b, q, kv: q - kv in (0, 4, 8)),
    "strided_5": (mods.strided(5), lambda b, q, kv: kv <= q and (q - kv < 5 or (q - kv) % 5 == 0)),
    "natten_2d_3x5": (
        mods.natten_2d(4, 6, (3, 5)),
        lambda b, q, kv: in_window(q // 6, kv // 6, 4, 3) and in_window(q % 6, kv % 6, 6, 5),
    ),
    "natten_3d_1x3x1": (
        mods.natten_3d(2, 3, 4, (1, 3, 1)),
        lambda b, q, kv: q // 12 == kv // 12 and in_window(q // 4 % 3, kv // 4 % 3, 3, 3) and q % 4 == kv % 4,
    ),
    "block_diffusion_12_4": (mods.block_diffusion(12, 4), lambda b, q, kv: diffuses(q, kv)),
    "tree": (mods.tree(PARENTS), lambda b, q, kv: is_ancestor(q, kv)),
    "global_tokens_3": (mods.global_tokens(3), lambda b, q, kv: q < 3 or kv < 3),
    "global_tokens": (mods.global_tokens(MARKED), lambda b, q, kv: MARKED[q] or MARKED[kv]),
    "padding": (mods.padding(LENGTHS), lambda b, q, kv: kv < LENGTHS[b]),
    "causal_and_sliding_window_5": (
        mods.and_masks(mods.causal, mods.sliding_window(5)),
        lambda b, q, kv: 0 <= q - kv < 5,
    ),
    "causal_or_mask": (mods.or_masks(mods.causal, lambda b, h, q, kv: kv < 3), lambda b, q, kv: kv <= q or kv < 3),
    "causal_xor_padding": (
        mods.xor_masks(mods.causal, mods.padding(LENGTHS)),
        lambda b, q, kv: (kv <= q) != bool(kv < LENGTHS[b]),
    ),
    "shifted_causal": (mods.shifted(mods.causal, 7, 2), lambda b, q, kv: kv + 2 <= q + 7),
    "shifted_prefix_lm_6": (mods.shifted(mods.prefix_lm(6), LENGTHS), lambda b, q, kv: kv < 6 or kv <= q + LENGTHS[b]),
    "not_causal": (mods.not_mask(mods.causal), lambda b, q, kv: kv > q),
    "and_mask": (mods.and_masks(), lambda b, q, kv: True),
    "or_mask": (mods.or_masks(), lambda b, q, kv: False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    mod, definition = MASKS[name]
    assert mod.__name__ == name
    expected = torch.tensor([[[bool(definition(b, q, kv)) for kv in range(S)] for q in range(S)] for b in range(2)])
    assert torch.equal(create_mask(mod, 2, 1, S, S, device="cpu")[:, 0], expected)
    mask = create_block_mask(mod, 2, 1, S, S, device="cpu", BLOCK_SIZE=1)
    assert torch.equal(mask.to_dense()[:, 0].bool(), expected)


def test_deep_trees_and_prefixes():
    parents = torch.arange(-1, 69)
    dense = create_mask(mods.tree(parents, prefix=50), None, None, 70, 120, device="cpu")[0, 0]
    assert dense[:, :50].all()
    assert torch.equal(dense[:, 50:], torch.ones(70, 70).tril().bool())


def test_documents_of_each_batch():
    ids = torch.stack((IDS, IDS.flip(0)))
    dense = create_mask(mods.document_causal(ids), 2, None, S, S, device="cpu")[:, 0]
    assert torch.equal(dense, (ids[:, :, None] == ids[:, None]) & torch.ones(S, S).tril().bool())


def test_decoding_costs_no_trace_and_is_the_rows_of_the_whole():
    ids = torch.sort(torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(0)))[0]
    whole = create_mask(mods.document_causal(ids), 2, None, 300, 300, device="cpu")
    before = None
    for length in range(120, 130):
        step = mods.shifted(mods.document_causal(ids), torch.tensor([length, length + 60]))
        mask = create_block_mask(step, 2, None, 1, length + 61, device="cpu", BLOCK_SIZE=64)
        live = create_mask(step, 2, None, 1, length + 61, device="cpu")
        for b, row in enumerate((length, length + 60)):
            assert torch.equal(live[b, 0, 0], whole[b, 0, row, : length + 61])
            blocks = live[b, 0, 0].split(64)
            assert mask[b].to_dense().flatten().tolist() == [int(x.any()) for x in blocks]
        before = before or trace_stats()["traces"]
    assert trace_stats()["traces"] == before


def test_a_shifted_score_mod_is_that_of_the_rows():
    alibi = mods.alibi(PER_HEAD)
    q, k, v = (torch.randn(1, 3, n, 8, generator=torch.Generator().manual_seed(n)) for n in (LEN, LEN + 1, LEN + 2))
    k, v = k[:, :, :LEN], v[:, :, :LEN]
    whole = flex_attention(q, k, v, alibi)
    part = flex_attention(q[:, :, 250:260], k, v, mods.shifted(alibi, 250))
    assert torch.allclose(part, whole[:, :, 250:260], rtol=0, atol=1e-6)


def t5_bucket(distance: torch.Tensor, bidirectional: bool, buckets: int, max_distance: int) -> torch.Tensor:
    """The formula of the T5 code base: distance = key position - query position."""
    result = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        result = result + (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = buckets // 2
    far = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = torch.where(distance > 0, exact + far, 0).long().clamp(max=buckets - 1)
    return result + torch.where(distance < exact, distance, far)


H, LEN = 3, 300
SCORE = torch.randn(H, LEN, LEN, generator=torch.Generator().manual_seed(0))
DISTANCE = torch.arange(LEN) - torch.arange(LEN)[:, None]  # key position - query position
PER_HEAD = torch.tensor([0.5, 1.25, 2.0])
HEAD = PER_HEAD[:, None, None]
TABLE = torch.randn(32, H, generator=torch.Generator().manual_seed(1))
STEPS = torch.randn(H, 2 * 20 + 1, generator=torch.Generator().manual_seed(2))

SCORE_MODS = {
    "alibi_3": (mods.alibi(H), SCORE + 2.0 ** (-8 * torch.arange(1, 4) / H)[:, None, None] * DISTANCE),
    "alibi": (mods.alibi(PER_HEAD), SCORE + HEAD * DISTANCE),
    "softcap_30": (mods.softcap(30.0), 30 * torch.tanh(SCORE / 30)),
    "softcap_2p5": (mods.softcap(2.5), 2.5 * torch.tanh(SCORE / 2.5)),
    "relative_bias_20": (mods.relative_bias(STEPS), SCORE + STEPS[:, (-DISTANCE).clamp(-20, 20) + 20]),
    "t5_bias": (mods.t5_bias(TABLE), SCORE + TABLE[t5_bucket(DISTANCE, True, 32, 128)].permute(2, 0, 1)),
    "t5_bias_causal": (
        mods.t5_bias(TABLE, bidirectional=False),
        SCORE + TABLE[t5_bucket(DISTANCE, False, 32, 128)].permute(2, 0, 1),
    ),
    "distance_decay": (mods.distance_decay(PER_HEAD), SCORE - HEAD * DISTANCE.abs()),
    "temperature": (mods.temperature(PER_HEAD), SCORE / HEAD),
    "head_gate": (mods.head_gate(PER_HEAD), SCORE * torch.sigmoid(HEAD)),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name):
    mod, expected = SCORE_MODS[name]
    assert mod.__name__ == name
    index = (torch.zeros(1, 1, 1).int(), torch.arange(H).view(-1, 1, 1).int())
    places = (torch.arange(LEN).view(-1, 1).int(), torch.arange(LEN).int())
    torch.testing.assert_close(trace(mod, "score")(SCORE, *index, *places), expected)


@pytest.mark.parametrize("mod", [mods.distance_decay(0.5), mods.temperature(2.0)])
def test_score_mods_of_one_number(mod):
    out = trace(mod, "score")(
        SCORE, *(torch.zeros(1).int(),) * 2, torch.arange(LEN)[:, None].int(), torch.arange(LEN).int()
    )
    expected = SCORE - 0.5 * DISTANCE.abs() if mod.__name__ == "distance_decay" else SCORE / 2
    torch.testing.assert_close(out, expected)


def test_numbers_of_factories_do_not_retrace():
    graphs = {trace(mods.sliding_window(w), "mask").graph for w in (2, 3, 1024)}
    assert {len(g.numbers) for g in graphs} == {1}


def test_masks_without_captures_pickle():
    assert pickle.loads(pickle.dumps(mods.causal)) is mods.causal


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: mods.document(), "found neither of ids and offsets, expected one"),
        (lambda: mods.document(IDS, offsets=OFFSETS), "found both of ids and offsets"),
        (lambda: mods.document(IDS.view(1, 1, -1)), "expected \\[S\\] or \\[B, S\\]"),
        (lambda: mods.natten_2d(4, 4, 2), "expected odd sizes of at most \\(4, 4\\)"),
        (lambda: mods.natten_3d(4, 4, 4, 5), "expected odd sizes"),
        (lambda: mods.tree(torch.tensor([1, -1])), "found parent 1 of node 0, expected -1 or a node before it"),
        (lambda: mods.relative_bias(torch.zeros(2, 4)), "expected \\[H, 2 \\* R \\+ 1\\]"),
        (lambda: mods.t5_bias(torch.zeros(2, 4)), "expected \\[buckets, H\\]"),
        (lambda: mods.document([0] * 200), "ids: found a list, expected \\[S\\] or \\[B, S\\]"),
        (lambda: mods.document(offsets=torch.tensor([0, 150, 100, 200])), "offsets: found descending values"),
        (lambda: mods.document(offsets=torch.tensor([100, 100])), "offsets: found a start at 100.*cumulative sum"),
        (lambda: mods.document(offsets=torch.tensor([0.0, 4.0])), "offsets: found float32 \\[2\\], expected integers"),
        (
            lambda: mods.sliding_window(-1),
            "window: found -1, expected an int from 1 on.*mods.band\\(-1, 0\\), or leave",
        ),
        (lambda: mods.sliding_window(0), "window: found 0, expected an int from 1 on"),
        (lambda: mods.sliding_window(2.5), "window: found 2.5, expected an int from 1 on"),
        (lambda: mods.softcap(0.0), "cap: found 0.0, expected .*0.0 means off in FlashAttention: leave the mod out"),
        (lambda: mods.temperature(0), "value: found 0, expected a number other than 0"),
        (lambda: mods.band(-2, 0), "left: found -2, expected an int from -1 on"),
        (lambda: mods.strided(0), "stride: found 0"),
        (lambda: mods.dilated(4, 0), "dilation: found 0"),
        (lambda: mods.block_diffusion(8, 0), "block: found 0"),
        (lambda: mods.prefix_lm(-1), "prefix: found -1, expected an int from 0 on"),
        (lambda: mods.global_tokens(True), "tokens: found True, expected an int from 0 on"),
        (lambda: mods.alibi(0), "slopes: found 0, expected an int from 1 on"),
        (lambda: mods.alibi(torch.zeros(2, 4)), "slopes: found float32 \\[2, 4\\], expected a tensor \\[H\\]"),
        (
            lambda: mods.padding(torch.ones(2, 200).bool()),
            "lengths: found bool \\[2, 200\\], expected integers \\[B\\].*sum",
        ),
        (lambda: mods.padding([3, 4]), "lengths: found a list, expected integers \\[B\\]"),
        (lambda: mods.natten_2d(4, 4, -1), "natten_2d, kernel: found"),
        (
            lambda: mods.natten_2d(8, 8, 4),
            "natten_2d, kernel: found \\(4, 4\\), expected odd sizes of at most \\(8, 8\\)",
        ),
        (lambda: mods.natten_2d(8, 8, 3.0), "natten_2d, kernel: found 3.0, expected an int from 1 on"),
        (lambda: mods.natten_2d(8, 8, True), "natten_2d, kernel: found True, expected an int from 1 on"),
        (lambda: mods.natten_2d(8, 8, "3"), "natten_2d, kernel: found '3', expected an int from 1 on"),
        (lambda: mods.natten_2d(8, 8, (3, None)), "natten_2d, kernel: found a NoneType, expected an int from 1 on"),
        (lambda: mods.natten_2d(8, 8, (3, 3, 3)), "natten_2d, kernel: found \\(3, 3, 3\\), expected odd sizes"),
        (lambda: mods.natten_2d("8", 8, 3), "height: found '8', expected an int from 1 on"),
        (lambda: mods.softcap(None), "cap: found None, expected a number. Leave the mod out"),
        (lambda: mods.softcap("x"), "cap: found 'x', expected a number"),
        (lambda: mods.temperature([1.0]), "value: found a list, expected a number"),
        (lambda: mods.distance_decay(True), "rate: found True, expected a number"),
        (lambda: mods.natten_2d(8, 8.0, 3), "width: found 8.0, expected an int from 1 on"),
        (lambda: mods.natten_2d(0, 8, 1), "height: found 0, expected an int from 1 on"),
        (lambda: mods.natten_3d(True, 8, 8, 3), "depth: found True, expected an int from 1 on"),
        (lambda: mods.natten_3d(8, 8, 8, 3.5), "natten_3d, kernel: found 3.5, expected an int from 1 on"),
        (lambda: mods.tree([-1, 0]), "parents: found a list"),
    ],
)
def test_refusals(build, text):
    with pytest.raises(ValueError, match=text) as found:
        build()
    assert isinstance(found.value, FlexAttentionError)


def test_sizes_of_numpy():
    three, eight = np.int64(3), np.int32(8)
    i = torch.arange(64)
    for mod in (
        mods.natten_2d(eight, eight, three),
        mods.natten_2d(8, 8, (three, 3)),
        mods.natten_2d(8, 8, [3, three]),
    ):
        assert mod.__name__ == "natten_2d_3x3"
        assert torch.equal(mod(i, i, i[:, None], i), mods.natten_2d(8, 8, 3)(i, i, i[:, None], i))
    assert mods.natten_3d(eight, 4, 2, np.int8(1)).__name__ == "natten_3d_1x1x1"


def test_masks_of_one_kind_are_combined():
    with pytest.raises(FlexAttentionError, match=r"mask_mods\[1\]: found softcap_1, a score_mod, expected mask_mod\("):
        mods.and_masks(mods.causal, mods.softcap(1.0))
    with pytest.raises(FlexAttentionError, match=r"mask_mods\[0\]: found a list.*Pass functions as single arguments"):
        mods.or_masks([mods.causal, mods.noop_mask])
    with pytest.raises(FlexAttentionError, match=r"mask_mods\[1\]: .* Call it: mods\.sliding_window\(window\)\."):
        mods.and_masks(mods.causal, mods.sliding_window)
    mask = create_block_mask(mods.causal, None, None, 8, 8, device="cpu")
    with pytest.raises(FlexAttentionError, match=r"mask_mods\[0\]: found a BlockMask.*block_mask\.mask_mod"):
        mods.not_mask(mask)


def test_alibi_for_another_number_of_heads():
    q = torch.zeros(1, 4, 8, 16)
    flex_attention(q, q, q, mods.alibi(4))
    with pytest.raises(FlexAttentionError, match="score_mod alibi: found 8 heads, expected those of query, 4"):
        flex_attention(q, q, q, mods.alibi(8))


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (
            mods.head_gate(torch.zeros(8)),
            r"gate of score_mod head_gate: found float32 \[8\], expected \[4\], as query",
        ),
        (mods.distance_decay(torch.zeros(2)), r"rate of score_mod distance_decay: found float32 \[2\], expected \[4\]"),
        (mods.temperature(torch.ones(8)), r"value of score_mod temperature: found float32 \[8\].*slice value"),
        (mods.alibi(torch.zeros(8)), "slopes of score_mod alibi: found"),
        (mods.relative_bias(torch.zeros(8, 9)), r"found float32 \[8, 9\], expected \[4, 2 \* R \+ 1\]"),
        (mods.relative_bias(torch.zeros(9, 5)), "table of score_mod relative_bias: found"),
        (mods.t5_bias(torch.zeros(4, 32)), r"table of score_mod t5_bias: .*expected \[buckets, 4\].*Pass table\.T\."),
        (mods.t5_bias(torch.zeros(32, 8)), r"found float32 \[32, 8\], expected \[buckets, 4\].*slice table"),
    ],
)
def test_tensors_for_another_number_of_heads(mod, text):
    q = torch.zeros(1, 4, 12, 16)
    with pytest.raises(ArgumentError, match=text):
        flex_attention(q, q, q, mod)
    with pytest.raises(ArgumentError, match="expected"):
        flex_attention(q, q, q, mods.shifted(mod, 3))
    with pytest.raises(ArgumentError, match="expected"):
        flex_attention(q, q, q, TiledGrid((3, 4), tile=(3, 2)).mod(mod))
    flex_attention(q[:, :2], q[:, :2], q[:, :2], at_heads(mods.head_gate(torch.zeros(4)), 0, 2))  # of some of its heads


def test_heads_and_positions_that_are_swapped():
    q = torch.zeros(1, 12, 4, 16)  # [B, S, H, D]
    for mod in (mods.alibi(4), mods.head_gate(torch.zeros(4))):
        with pytest.raises(ArgumentError, match=r"expected .*12.* If yours are \[B, S, H, D\], pass query\.transpose"):
            flex_attention(q, q, q, mod)


def test_tables_that_are_no_tensors():
    with pytest.raises(DtypeError, match=r"table: found a list, expected a tensor \[H, 2 \* R \+ 1\]"):
        mods.relative_bias([1.0, 2.0])
    with pytest.raises(DtypeError, match=r"table: found an Embedding, expected a tensor .*: table\.weight"):
        mods.t5_bias(torch.nn.Embedding(32, 4))
    with pytest.raises(ArgumentError, match=r"found float32 \[9, 4\].*If it is \[2 \* R \+ 1, H\], pass table\.T"):
        mods.relative_bias(torch.zeros(9, 4))


@pytest.mark.parametrize("window", [4, np.int64(4), torch.tensor(4)], ids=["int", "numpy", "tensor"])
def test_whole_numbers(window):
    mask = create_block_mask(mods.sliding_window(window), None, None, 256, 256, device="cpu")
    assert mask.to_dense().sum() == 3


@pytest.mark.parametrize("value", [True, False])
def test_the_opposite_of_a_python_bool(value: bool) -> None:
    mask = create_block_mask(mods.not_mask(lambda b, h, q_idx, kv_idx: value), None, None, 256, 256, device="cpu")
    assert mask.counts() == ((0, 0, 4) if value else (4, 0, 0))


@pytest.mark.parametrize("combine", [mods.and_masks, mods.or_masks, mods.xor_masks, mods.not_mask])
def test_combinators_refuse_what_is_not_callable(combine):
    with pytest.raises(RuntimeError, match="All inputs should be callable mask_mods"):
        combine(3)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(mods.__path__)])
def test_examples_in_the_documentation(name):
    module = importlib.import_module(f"flexattn.mods.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or name in ("arguments", "kinds")
