"""Bounds never contradict the mod: op by op, over random graphs, and for whole masks refined box by box."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mod_grammar import CAPTURES, COMPARE, NUMBERS, booleans, build, classify_boxes, floats, integers, on_grid

from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.boxes import Bounds
from flexattn.graph.interval_bounds import BOX_INPUTS, FULL, bound
from flexattn.graph.nodes import SCORE_INPUTS
from flexattn.graph.operators import OPS
from flexattn.graph.ranges import INDEX_LIMIT, nonnegative, ranges
from flexattn.mask_build import boxes as boxes_module
from flexattn.mask_build.boxes import classify_by_boxes

torch.set_num_threads(1)
EMPTY, PARTIAL, UNKNOWN = 0, 3, 2


def brute_force(mod: BoundMod, B: int, H: int, Q: int, KV: int, block: tuple[int, int]) -> np.ndarray:
    dense = torch.stack([
        torch.stack([on_grid(mod, b, h, torch.arange(Q), torch.arange(KV)) for h in range(H)]) for b in range(B)
    ])  # fmt: skip
    blocks = -(-Q // block[0]), -(-KV // block[1])
    padded = torch.zeros(B, H, blocks[0] * block[0], blocks[1] * block[1], dtype=torch.bool)
    padded[:, :, :Q, :KV] = dense
    tiles = padded.view(B, H, blocks[0], block[0], blocks[1], block[1])
    some, every = tiles.any(3).any(-1), tiles.all(3).all(-1)
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.uint8)


# Operations, one by one.

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan, 7.25, -7.75, 88.0]
VALUES = {
    torch.float32: torch.tensor(SPECIAL),
    torch.float64: torch.tensor(SPECIAL, dtype=torch.float64),
    torch.int32: torch.tensor(
        [-(2**31), -100, -8, -3, -2, -1, 1, 2, 3, 5, 8, 100, 65536, 2**31 - 1], dtype=torch.int32
    ),
    torch.int64: torch.tensor([-(2**63), -(2**40), -7, -2, -1, 1, 2, 3, 6, 2**31, 2**40, 2**62, 2**63 - 1]),
    torch.uint8: torch.tensor([1, 2, 3, 7, 8, 100, 200, 255], dtype=torch.uint8),
    torch.bool: torch.tensor([False, True]),
}
COUNTS = torch.arange(32)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
ONLY = {
    "bitand": INTEGERS, "bitor": INTEGERS, "bitxor": INTEGERS, "bitnot": INTEGERS, "shl": INTEGERS, "shr": INTEGERS,
    "and": (torch.bool,), "or": (torch.bool,), "xor": (torch.bool,), "not": (torch.bool,),
}  # fmt: skip
ARITHMETIC = {"add", "sub", "mul", "floordiv", "mod", "fmod", "abs", "neg", "maximum", "minimum", "pow", "where"}


def operand_count(name: str) -> int:
    spec = OPS[name].triton
    return 3 if name == "where" else 1 + ("{1}" in spec)


def cases():
    for name in OPS:
        if name in ONLY:
            dtypes = ONLY[name]
        elif name in ARITHMETIC or name in COMPARE:
            dtypes = (*INTEGERS, torch.float32, torch.float64)
        else:
            dtypes = (torch.float32, torch.float64)
        for dtype in dtypes:
            powers = name == "pow" and not dtype.is_floating_point  # test_powers
            if not powers and not (name in ("neg", "abs") and dtype == torch.uint8):
                yield pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


def check_contains(mod: BoundMod, n: int, m: int, boxes: list[tuple[int, int, int, int]]) -> None:
    """Check that the bounds of each box (q_lo, q_hi, kv_lo, kv_hi) hold all that the mod computes in it."""
    table = on_grid(mod, 0, 0, torch.arange(n), torch.arange(m)).numpy()
    columns = np.array([(0, 0, 0, 0, *box) for box in boxes], np.int64).T
    evaluator = Bounds(bound(mod.graph), mod.captures, mod.numbers)
    low, high = (np.broadcast_to(x, len(boxes)) for x in evaluator(*columns))
    for i, (q_lo, q_hi, kv_lo, kv_hi) in enumerate(boxes):
        values = table[q_lo : q_hi + 1, kv_lo : kv_hi + 1]
        if np.isnan(values).any() if values.dtype.kind == "f" else False:
            assert (low[i], high[i]) == (-math.inf, math.inf), (boxes[i], low[i], high[i])
        else:
            assert (values >= low[i]).all() and (values <= high[i]).all(), (boxes[i], low[i], high[i], values)


@pytest.mark.parametrize(("name", "dtype"), list(cases()))
def test_bound_of_each_operation_contains_its_values(name, dtype):
    x, y = VALUES[dtype], VALUES[dtype]
    if name in ("shl", "shr"):
        y = COUNTS[: 8 * x.element_size() if x.element_size() < 8 else 32].to(dtype)
    elif name in ("floordiv", "mod", "fmod") and not dtype.is_floating_point:
        y = y[y != -1]  # the least integer divided by -1 traps
    x, y = (v[torch.argsort(v)] for v in (x, y))

    def write(builder, b, h, q, kv):
        first, second = builder.load(0, dtype, [q]), builder.load(1, dtype, [kv])
        match operand_count(name):
            case 1:
                return first.apply(name)
            case 2:
                return first.apply(name, second)
        return (q < kv).apply(name, first, second)

    mod = build(write, (x, y))
    spans = lambda n: [(i, j) for i in range(n) for j in (i, i + 1, i + 2, i + 5, n - 1) if j < n]  # noqa: E731
    boxes = [(*a, *b) for a, b in itertools.product(spans(len(x)), spans(len(y)))]
    check_contains(mod, len(x), len(y), boxes[:: max(1, len(boxes) // 700)])


@pytest.mark.parametrize("power", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_powers(power, dtype):
    x = VALUES[dtype]
    mod = build(lambda builder, b, h, q, kv: builder.load(0, dtype, [q]).apply("pow", power), (x,))
    check_contains(mod, len(x), 1, [(i, j, 0, 0) for i in range(len(x)) for j in range(i, len(x))])


@pytest.mark.parametrize(
    ("source", "target"), [(s, t) for s in VALUES for t in (*VALUES, torch.float16, torch.bfloat16)]
)
def test_casts(source, target):
    x = VALUES[source]
    if source.is_floating_point and not target.is_floating_point and target != torch.bool:
        x = x[x.abs() < 200]  # beyond the target's range the result is undefined
        x = x[x >= 0] if target == torch.uint8 else x
    mod = build(lambda builder, b, h, q, kv: builder.load(0, source, [q]).cast(target).cast(torch.float64), (x,))
    check_contains(mod, len(x), 1, [(i, j, 0, 0) for i in range(len(x)) for j in range(i, len(x))])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "neg", "abs", "sin", "tanh"])
def test_a_point_of_exact_operations_is_a_point(name):
    x = torch.tensor([-3.5, 0.1, 7.7])
    mod = build(
        lambda bu, b, h, q, kv: bu.load(0, torch.float32, [q]).apply(name, *[0.3] * (name in ("add", "sub", "mul"))),
        (x,),
    )
    low, high = Bounds(bound(mod.graph), mod.captures)(*(np.zeros(1, np.int64),) * 8)
    assert (low == high).all() == (name not in ("sin", "tanh"))


def test_integer_wrap_around_is_unknown_not_wrong():
    mod = build(lambda bu, b, h, q, kv: (q * bu.number(0, torch.int64).cast(torch.int32)) < 0, (), (2**20,))
    ends = (0, 0, 0, 0, 0, 4095, 0, 0)  # 4095 * 2**20 leaves int32
    assert classify_boxes(bound(mod.graph), (), mod.numbers, np.array([ends]))[0] == UNKNOWN
    assert classify_boxes(bound(mod.graph), (), (2**10,), np.array([ends]))[0] == EMPTY


def test_nan_is_never_proved():
    table = torch.tensor([1.0, math.nan, 3.0])
    above = build(lambda bu, b, h, q, kv: bu.load(0, torch.float32, [q]) >= -math.inf, (table,))
    not_below = build(lambda bu, b, h, q, kv: (bu.load(0, torch.float32, [q]) < 5.0).apply("not"), (table,))
    for mod in (above, not_below):
        boxes = np.array([(0, 0, 0, 0, 0, 2, 0, 0), (0, 0, 0, 0, 1, 1, 0, 0)])
        assert (classify_boxes(bound(mod.graph), mod.captures, (), boxes) == UNKNOWN).all()


# Captured tensors.


@settings(max_examples=60)
@given(st.data())
def test_ranges_of_captured_tensors(data):
    granule = data.draw(st.sampled_from([1, 4, 16, 128]))
    shape = data.draw(st.sampled_from([(7,), (300,), (3, 40), (40, 3), (2, 3, 50), (20000,)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    table = torch.randint(-50, 50, shape, generator=generator, dtype=torch.int32)
    axis = data.draw(st.integers(0, len(shape) - 1))
    evaluator_mod = build(
        lambda bu, b, h, q, kv: bu.load(0, torch.int32, [q if i == axis else (b, h)[i % 2] for i in range(len(shape))]),
        (table,),
    )
    evaluator = Bounds(bound(evaluator_mod.graph), evaluator_mod.captures, (), granule)
    if data.draw(st.booleans()):
        evaluator._tables.clear()
    for _ in range(10):
        n = shape[axis]
        low = data.draw(st.integers(-n, n - 1))
        high = data.draw(st.integers(low, n - 1))
        b, h = (
            data.draw(st.integers(0, shape[0] - 1)),
            data.draw(st.integers(0, min(shape[-1], shape[len(shape) // 2]) - 1)),
        )
        if any(i != axis and (b, h)[i % 2] >= shape[i] for i in range(len(shape))):
            continue
        places = torch.arange(low, high + 1)
        values = table[tuple(places if i == axis else (b, h)[i % 2] for i in range(len(shape)))].numpy()
        (least,), (greatest,) = evaluator(*(np.array([x]) for x in (b, b, h, h, low, high, 0, 0)))
        assert least <= values.min() and greatest >= values.max()
        if math.prod(shape) < 2**14 and (low >= 0 or high < 0):
            assert (least, greatest) == (values.min(), values.max())


def test_indices_out_of_range_are_unknown():
    table = torch.zeros(10, dtype=torch.int32)
    mod = build(lambda bu, b, h, q, kv: bu.load(0, torch.int32, [q]).apply("eq", 0), (table,))
    boxes = np.array([(0, 0, 0, 0, 0, 9, 0, 0), (0, 0, 0, 0, 0, 10, 0, 0), (0, 0, 0, 0, -11, -3, 0, 0)])
    assert classify_boxes(bound(mod.graph), mod.captures, (), boxes).tolist() == [FULL, UNKNOWN, UNKNOWN]


# Random masks.


@settings(max_examples=100)
@given(
    booleans(2), st.integers(1, 90), st.integers(1, 90), st.tuples(*[st.sampled_from([1, 3, 8, 16, 24])] * 2),
    st.sampled_from([30, 2**18]),
)  # fmt: skip
def test_boxes_never_contradict_brute_force(write, Q, KV, block, together):
    mod = build(write, CAPTURES, NUMBERS)
    classes = classify_by_boxes(mod, 2, 2, Q, KV, block)
    expected = brute_force(mod, 2, 2, Q, KV, block)
    found = classes.dense()
    decided = found != UNKNOWN
    assert (found == expected)[decided].all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes_module, "_TOGETHER", together)
        resolved = classify_by_boxes(mod, 2, 2, Q, KV, block, lambda b: expected.reshape(4, *expected.shape[2:])[*b.T])
    assert (resolved.dense() == expected).all() and not len(resolved.unknown)
    for kind in (FULL, PARTIAL):
        for transposed in (False, True):
            lines = expected.swapaxes(2, 3) if transposed else expected
            assert (from_runs(*resolved.runs(kind, transposed), lines.shape) == (lines == kind)).all()


def from_runs(row_ptr: np.ndarray, runs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    dense = np.zeros((math.prod(shape[:3]), shape[3]), bool)
    for line in range(len(dense)):
        of_line = runs[row_ptr[line] : row_ptr[line + 1]]
        assert (of_line[1:, 0] > of_line[:-1, 1]).all(), "runs ascend and do not touch"
        for first, end in of_line:
            dense[line, first:end] = True
    return dense.reshape(shape)


@settings(max_examples=150)
@given(st.one_of(integers(3), floats(2)), st.data())
def test_bounds_of_random_numbers_contain_them(write, data):
    mod = build(write, CAPTURES, NUMBERS)
    spans = st.tuples(st.integers(0, 39), st.integers(0, 39)).map(sorted)
    boxes = [(*data.draw(spans), *data.draw(spans)) for _ in range(8)]
    check_contains(mod, 40, 40, boxes)
    values = on_grid(mod, 0, 0, torch.arange(40), torch.arange(40))
    low, high = ranges(mod.graph)[mod.graph.outputs[0]]
    assert ((values >= low).all() and (values <= high).all()) or (low, high) == (-math.inf, math.inf)
    if nonnegative(mod.graph)[mod.graph.outputs[0]]:
        assert (values >= 0).all()


# Common masks: what is proved, and that no block needs exact evaluation unless it must.


def at(bu, k, *index):
    return bu.load(k, torch.int32, index)


def causal(bu, b, h, q, kv):
    return q >= kv


def sliding(bu, b, h, q, kv):
    return causal(bu, b, h, q, kv).apply("and", (q - kv) <= bu.number(0, torch.int64).cast(torch.int32))


def prefix_lm(bu, b, h, q, kv):
    return causal(bu, b, h, q, kv).apply("or", kv < at(bu, 0, b))


def document(bu, b, h, q, kv):
    return causal(bu, b, h, q, kv).apply("and", at(bu, 0, q).apply("eq", at(bu, 0, kv)))


def document_of_batch(bu, b, h, q, kv):
    return at(bu, 0, b, q).apply("eq", at(bu, 0, b, kv))


def dilated(bu, b, h, q, kv):
    return causal(bu, b, h, q, kv).apply("and", (q - kv).apply("mod", 4).apply("eq", 0))


def natten(bu, b, h, q, kv, width=64, radius=6):
    near = [(q.apply(op, width) - kv.apply(op, width)).apply("abs") <= radius for op in ("floordiv", "mod")]
    return near[0].apply("and", near[1])


def ancestors(bu, b, h, q, kv):
    return at(bu, 0, q).apply("shr", kv.apply("minimum", 30)).apply("bitand", 1).apply("ne", 0)


def offsets(bu, b, h, q, kv):
    """Documents by a nested gather: the start of the document of q."""
    return causal(bu, b, h, q, kv).apply("and", kv >= at(bu, 1, at(bu, 0, q)))


def block_diffusion(bu, b, h, q, kv, n=1024, size=64):
    first_q, first_kv = (x < n for x in (q, kv))
    block_q, block_kv = (x.apply("mod", n).apply("floordiv", size) for x in (q, kv))
    both = lambda *xs: xs[0] if len(xs) == 1 else xs[0].apply("and", both(*xs[1:]))  # noqa: E731
    diagonal = both(block_q.apply("eq", block_kv), first_q.apply("eq", first_kv))
    offset = both(block_q > block_kv, first_q, first_kv.apply("not"))
    past = both(block_q >= block_kv, first_q.apply("not"), first_kv.apply("not"))
    return diagonal.apply("or", offset).apply("or", past)


def sorted_ids(n, documents):
    return torch.sort(torch.randint(0, documents, (n,), generator=torch.Generator().manual_seed(3))).values.int()


IDS = sorted_ids(2048, 9)
STARTS = torch.searchsorted(IDS, torch.arange(9, dtype=torch.int32)).int()
SHUFFLED = IDS[torch.randperm(2048, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize(
    ("write", "captures", "numbers", "left"),
    [
        (causal, (), (), 0),
        (sliding, (), (300,), 0),
        (prefix_lm, (torch.tensor([300, 128], dtype=torch.int32),), (), 0),
        (document, (IDS,), (), 0),
        (document, (SHUFFLED,), (), 2),
        (document_of_batch, (torch.stack([IDS, SHUFFLED]),), (), 2),
        (offsets, (IDS, STARTS), (), 0),
        (dilated, (), (), 0),
        (natten, (), (), 0),
        (ancestors, (torch.randint(0, 2**30, (2048,), generator=torch.Generator().manual_seed(1)).int(),), (), 2),
        (block_diffusion, (), (), 2),
    ],
    ids=["causal", "sliding", "prefix-lm", "document", "unsorted", "batch", "nested", "dilated", "natten", "bits",
         "diffusion"],
)  # fmt: skip
@pytest.mark.parametrize("block", [(128, 128), (64, 96)])
def test_masks(write, captures, numbers, left, block):
    mod = build(write, captures, numbers)
    B = 2 if mod.graph.reads("b") else 1
    classes = classify_by_boxes(mod, B, 1, 2048, 2000, block)
    found, expected = classes.dense(), brute_force(mod, B, 1, 2048, 2000, block)
    assert (found == expected)[found != UNKNOWN].all()
    assert len(classes.unknown) <= left, f"{len(classes.unknown)} of {found.size} blocks are left"


def test_a_long_causal_mask_touches_thousands_of_boxes():
    classes = classify_by_boxes(build(causal), 1, 1, 65536, 65536, (128, 128))
    assert classes.boxes < 5000 and not len(classes.unknown)
    assert len(classes.partial) == 512
    row_ptr, runs = classes.runs(FULL)
    assert (np.diff(row_ptr) == np.minimum(np.arange(512), 1)).all() and (runs == [(0, i) for i in range(1, 512)]).all()


@pytest.mark.parametrize(("Q", "KV"), [(0, 5), (5, 0), (1, 1), (100, 30)])
def test_short_lengths(Q, KV):
    classes = classify_by_boxes(build(causal), 3, 2, Q, KV, (128, 128))
    assert (classes.dense() == brute_force(build(causal), 3, 2, Q, KV, (128, 128))).all()


# Facts without boxes.


def test_nonnegative():
    def write(bu, score, b, h, q, kv):
        return (
            bu.load(0, torch.float32, [h, (q - kv).apply("abs")])
            + bu.load(0, torch.float32, [q.apply("mod", 8), q - kv + 7])
            + bu.load(0, torch.float32, [q + 5, at(bu, 1, q)])
        )

    mod = build(write, (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int32)), inputs=SCORE_INPUTS)
    proved = nonnegative(mod.graph)
    loads = [[proved[a] for a in node.args] for node in mod.graph.loads.values() if node.capture == 0]
    assert sorted(loads) == sorted([[True, True], [True, False], [True, False]])
    assert dict(zip(("b",), ranges(build(lambda bu, b, h, q, kv: b).graph), strict=True)) == {"b": (0, INDEX_LIMIT - 1)}


def test_the_graph_of_bounds_prints():
    assert bound(build(causal).graph).inputs == BOX_INPUTS
    assert repr(bound(build(causal).graph)).splitlines()[1:] == [
        "    t0 = kv_hi <= q_lo  # bool",
        "    t1 = kv_lo <= q_hi  # bool",
        "    return t0, t1",
    ]
