"""facts: every stated fact holds. Printed facts of some mods, and random mods against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mod_grammar import CAPTURES, COMPARE, NUMBERS, booleans, briefly, build, integers, on_grid

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.facts import ModFacts, analyze
from flexattn.graph.linear import Linear
from flexattn.graph.nodes import SCORE_INPUTS

SIZE = 40


def offset(bu):
    return bu.number(0, torch.int64).cast(torch.int32)


def causal(bu, b, h, q, kv):
    return q >= kv


def sliding(bu, b, h, q, kv):
    return (q >= kv).apply("and", (q - kv) <= offset(bu))


def prefix_lm(bu, b, h, q, kv):
    return (q >= kv).apply("or", kv < bu.load(0, torch.int32, [b]))


def document(bu, b, h, q, kv):
    return (q >= kv).apply("and", bu.load(0, torch.int32, [q]).apply("eq", bu.load(0, torch.int32, [kv])))


def shifted(bu, b, h, q, kv):
    return (q + offset(bu)) >= kv


def alibi(bu, score, b, h, q, kv):
    return score + bu.load(0, torch.float32, [h]) * (q - kv).cast(torch.float32)


def relative_bias(bu, score, b, h, q, kv):
    return score + bu.load(0, torch.float32, [h, q - kv + 64])


TABLE = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("write", "captures", "numbers", "lines"),
    [
        (causal, (), (), [
            "keep    q_idx >= kv_idx", "reads   q_idx, kv_idx", "shift   only q_idx - kv_idx matters",
            "rows    kv_idx < q_idx + 1", "has key kv_idx = q_idx, wherever q_idx < KV_LEN",
        ]),
        (sliding, (), (7,), [
            "keep    (q_idx >= kv_idx) & (-kv_idx + q_idx <= n0)", "reads   q_idx, kv_idx",
            "shift   only q_idx - kv_idx matters", "rows    -n0 + q_idx <= kv_idx < q_idx + 1",
            "has key kv_idx = q_idx, wherever q_idx < KV_LEN, if 0 <= n0",
        ]),
        (prefix_lm, (TABLE,), (), [
            "keep    (q_idx >= kv_idx) | (kv_idx < c0[b])", "reads   b, q_idx, kv_idx", "rows    kv_idx < q_idx + 1",
            "rows    kv_idx < c0[b]", "has key kv_idx = q_idx, wherever q_idx < KV_LEN", "load    c0[b] by b",
        ]),
        (document, (TABLE,), (), [
            "keep    Eq(c0[q_idx], c0[kv_idx]) & (q_idx >= kv_idx)", "reads   q_idx, kv_idx",
            "rows    kv_idx < q_idx + 1, some of them", "has key kv_idx = q_idx, wherever q_idx < KV_LEN",
            "load    c0[q_idx] by q_idx", "load    c0[kv_idx] by kv_idx",
        ]),
        (shifted, (), (7,), [
            "keep    n0 + q_idx >= kv_idx", "reads   q_idx, kv_idx", "shift   only q_idx - kv_idx matters",
            "rows    kv_idx < n0 + q_idx + 1", "assumes no wrap-around of n0 + q_idx in int32",
        ]),
    ],
)  # fmt: skip
def test_facts_of_masks_print(write, captures, numbers, lines):
    facts = analyze(build(write, captures, numbers).graph)
    assert repr(facts).splitlines() == ["ModFacts(mod)", *("    " + line for line in lines)]


@pytest.mark.parametrize(
    ("write", "table", "lines"),
    [
        (alibi, torch.zeros(4), [
            "gives   c0[h]*float32(-kv_idx + q_idx) + score", "reads   score, h, q_idx, kv_idx",
            "shift   only q_idx - kv_idx matters", "load    c0[h] by h",
        ]),
        (relative_bias, torch.zeros(4, 4), [
            "gives   c0[h, -kv_idx + q_idx + 64] + score", "reads   score, h, q_idx, kv_idx",
            "shift   only q_idx - kv_idx matters",
            "load    c0[h, -kv_idx + q_idx + 64] by h, q_idx, kv_idx, index may be negative",
        ]),
    ],
)  # fmt: skip
def test_facts_of_score_mods_print(write, table, lines):
    facts = analyze(build(write, (table,), inputs=SCORE_INPUTS).graph)
    assert repr(facts).splitlines() == ["ModFacts(mod)", *("    " + line for line in lines)]
    assert facts.rows is None and facts.key is None


def rows_have_a_key(facts: ModFacts, numbers: Sequence[int | float], Q: int, KV: int) -> bool:
    """Return whether the facts state that every row attends to a key, for these numbers and lengths."""
    if facts.key is None or (KV < Q if facts.key == "q_idx" else KV < 1):
        return False
    if facts.key_condition is None:
        return True
    zero = torch.zeros((), dtype=torch.int32)
    (holds,) = facts.key_condition.evaluate(dict.fromkeys(facts.key_condition.inputs, zero), (), numbers)
    return bool(holds)


def test_a_key_in_each_row_depends_on_numbers_and_lengths():
    facts = analyze(build(sliding, (), (7,)).graph)
    assert rows_have_a_key(facts, (7,), 10, 10)
    assert not rows_have_a_key(facts, (-1,), 10, 10)
    assert not rows_have_a_key(facts, (7,), 11, 10)
    first = analyze(build(lambda bu, b, h, q, kv: (q >= kv).apply("or", kv < 4)).graph)
    assert first.key == "q_idx"
    assert rows_have_a_key(analyze(build(lambda bu, b, h, q, kv: kv < 4).graph), (), 100, 1)


def test_analyze_is_done_once():
    assert analyze(build(causal).graph) is analyze(build(causal).graph)


# Random mods.


@briefly
def affine(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Comparisons of small sums of inputs, numbers and `inner`, some inside of abs, joined by and, or, not."""
    term = st.one_of(
        st.sampled_from([lambda bu, *i, k=k: i[k] for k in (2, 3, 0)]),
        st.integers(-9, 30).map(lambda c: lambda bu, *i: bu.const(c, torch.int32)),
        st.sampled_from([lambda bu, *i, k=k: bu.number(k, torch.int64).cast(torch.int32) for k in (0, 1)]),
        inner,
    )
    distance = st.sampled_from([lambda bu, b, h, q, kv: q - kv, lambda bu, b, h, q, kv: (kv - q).apply("abs")])
    total = st.one_of(
        term,
        distance,
        st.builds(lambda x, y: lambda bu, *i: x(bu, *i) + y(bu, *i), term, term),
        st.builds(lambda x, y: lambda bu, *i: x(bu, *i) - y(bu, *i), term, term),
        st.builds(lambda c, x: lambda bu, *i: x(bu, *i) * c, st.sampled_from([-1, 2, -3]), term),
    )  # fmt: skip
    compare = st.builds(
        lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)), st.sampled_from(COMPARE), total, total
    )
    return st.recursive(
        compare,
        lambda x: st.one_of(
            st.builds(
                lambda op, x, y: lambda bu, *i: x(bu, *i).apply(op, y(bu, *i)), st.sampled_from(["and", "or"]), x, x
            ),
            st.builds(lambda x: lambda bu, *i: x(bu, *i).apply("not"), x),
        ),
        max_leaves=4,
    )


def value_of(mod: BoundMod, total: Linear, q: torch.Tensor) -> torch.Tensor:
    """Evaluate a sum that does not read kv_idx, for each q."""
    zero = torch.zeros((), dtype=torch.int32)
    inputs = {"b": zero, "h": zero, "q_idx": q.int(), "kv_idx": zero}
    nodes = [n for n, _ in total.terms]
    values = mod.graph.evaluate(inputs, mod.captures, mod.numbers, outputs=nodes)
    result = torch.full((SIZE,), total.constant, dtype=torch.int64)
    for (_, factor), value in zip(total.terms, values, strict=True):
        result = result + factor * value.long()
    return result


@settings(max_examples=200)
@given(st.one_of(affine(integers(0)), affine(integers(1)), booleans(1)))
def test_facts_hold(write):
    mod = build(write, CAPTURES, NUMBERS)
    facts = analyze(mod.graph)
    q = kv = torch.arange(SIZE)
    truth = on_grid(mod, 0, 0, q, kv)
    if facts.shift_invariant and not facts.assumes:
        assert (truth[1:, 1:] == truth[:-1, :-1]).all()
    if facts.rows is not None and not facts.assumes:
        union = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        for interval in facts.rows:
            inside = torch.ones(SIZE, SIZE, dtype=torch.bool)
            for low in interval.low:
                inside &= kv >= value_of(mod, low, q)[:, None]
            for high in interval.high:
                inside &= kv < value_of(mod, high, q)[:, None]
            assert not interval.exact or truth[inside].all()
            union |= inside
        assert not (truth & ~union).any()
    if rows_have_a_key(facts, NUMBERS, SIZE, SIZE):
        assert truth.any(dim=1).all()
    for load in facts.loads:
        node = mod.graph.nodes[load.node]
        inputs = dict(
            zip(mod.graph.inputs, (torch.zeros((), dtype=torch.int32),) * 2 + (q.int()[:, None], kv.int()), strict=True)
        )
        for proved, index in zip(
            load.nonnegative, mod.graph.evaluate(inputs, CAPTURES, NUMBERS, outputs=node.args), strict=True
        ):
            assert not proved or (index >= 0).all()


def test_affine_masks_have_rows():
    """The random masks are not trivial: common masks are solved exactly."""
    for write, captures, numbers in ((causal, (), ()), (sliding, (), (3,)), (prefix_lm, (TABLE,), ())):
        rows = analyze(build(write, captures, numbers).graph).rows
        assert rows is not None and all(interval.exact for interval in rows)
