"""The kernels that build masks, in Triton's interpreter: their lists are those of the CPU, and those of brute force."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mask_cases import (
    MASKS,
    UNINTERPRETED,
    Mod,
    assert_same_lists,
    brute_force,
    classes,
    drawn,
    extents,
    make_mask,
    outside,
    plan_of,
)
from mod_grammar import CAPTURES, NUMBERS, booleans, build

from flexattn import mods
from flexattn.block_mask import BuildCounts
from flexattn.errors import ArgumentError, IndexRangeError
from flexattn.graph.bound_mod import BoundMod
from flexattn.machine.target import INTERPRETER, Target
from flexattn.mask_build import boxes
from flexattn.mask_build import launch_plan as mask_recipe
from flexattn.mask_build import on_gpu as mask_build
from flexattn.mask_build.create import classify, create_mask
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.launch_plan import recipe_of, sources
from flexattn.mask_build.on_gpu import build_lists, fits
from flexattn.runtime.build import stats
from flexattn.trace.trace import trace

pytest.importorskip("triton")
# numpy tells of masked places and of rows that hold nothing but NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

CPU = torch.device("cpu")
TOKENS = 120  # that a mask has tensors for


@dataclass(frozen=True)
class Shape:
    """Lengths, block sizes, whether full blocks are told apart, whether one program makes all lists."""

    Q: int
    KV: int
    block: tuple[int, int]
    separate: bool = True
    at_once: bool = True

    def __str__(self) -> str:
        options = ("" if self.separate else ", joined") + ("" if self.at_once else ", in steps")
        return f"{self.Q}x{self.KV} in {self.block[0]}x{self.block[1]}{options}"


# A row of blocks, in either direction, takes a tenth of a second where lists are made in steps.
SHAPES = (
    Shape(119, 79, (60, 40)), Shape(90, 118, (96, 40), at_once=False), Shape(64, 64, (32, 32)),
    Shape(70, 120, (33, 50), False), Shape(119, 79, (60, 40), False, at_once=False),
)  # fmt: skip
BORDERS = (
    ("nested", Shape(100, 7, (24, 40))),  # fewer keys than a block has
    ("nested", Shape(1, 120, (16, 16))),
    ("nested", Shape(120, 1, (64, 128), False)),
    ("nested", Shape(96, 96, (96, 24))),
    ("keys", Shape(5, 70, (4, 2), at_once=False)),  # more blocks than a word has bits
    ("keys", Shape(5, 70, (4, 2))),
    ("causal", Shape(66, 120, (1, 1))),  # most rows and words that one program takes, but for a few
    ("sums", Shape(60, 60, (20, 20))),  # what stands out is the first or the last of a range
    ("ends", Shape(60, 60, (20, 20))),
)
OTHERS = [name for name in MASKS if name not in (*UNINTERPRETED, *dict(BORDERS))]
POINTS = Shape(4, 6, (1, 1))
# What has more to compute than comparisons of positions.
BOUNDED = ("int8", "float32", "negative", "granules")
EVALUATED = (
    *((name, POINTS) for name in ("bool", "int8", "int64", "float32", "bfloat16", "negative")),
    ("three axes", Shape(1, 3, (1, 1))),
    ("causal", Shape(30, 30, (20, 10), False)),
)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Give comparisons of scalars as booleans, not in the dtype of their operands, and look for no overflows."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    original = InterpreterBuilder.binary_op

    def binary_op(self, lhs, rhs, op):
        found = original(self, lhs, rhs, op)
        return TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "binary_op", binary_op)
        # They are not reported anyway, and take a fifth of the time.
        patch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, sanitize_overflow=False))
        yield


@contextmanager
def lists_in_steps() -> Iterator[None]:
    """Count, scan and fill, as for masks of many rows of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_recipe, "SMALL_LISTS", (0, 0))
        recipe_of.cache_clear()
        yield
    recipe_of.cache_clear()


def check(mod: Mod | BoundMod, shape: Shape, blind: bool = False) -> BuildCounts:
    """Compare the lists of kernels with those of the CPU, and with brute force."""
    bound = mod if isinstance(mod, BoundMod) else trace(mod, "mask")
    sizes = (*extents(bound), shape.Q, shape.KV)
    with nullcontext() if shape.at_once else lists_in_steps():
        built = build_lists(plan_of(bound, INTERPRETER, blind), bound, sizes, shape.block, CPU, shape.separate)
    lists, counts = [built.by_query, built.by_key], built.counts
    expected = classify(bound, sizes, shape.block, CPU, shape.separate)
    assert_same_lists(lists, [expected.by_query, expected.by_key])
    some, every = classes(brute_force(mod, *sizes), shape.block)
    full = every if shape.separate else torch.zeros_like(every)
    assert torch.equal(lists[0].full.dense(some.shape[3]).view(some.shape), full)
    assert torch.equal(lists[0].partial.dense(some.shape[3]).view(some.shape), some & ~full)
    return counts


@pytest.mark.parametrize(("name", "shape"), list(zip(OTHERS, itertools.cycle(SHAPES), strict=False)), ids=str)
def test_lists(name: str, shape: Shape) -> None:
    check(make_mask(name, TOKENS), shape)


@pytest.mark.parametrize(("name", "shape"), BORDERS, ids=str)
def test_lengths_and_blocks(name: str, shape: Shape) -> None:
    check(make_mask(name, TOKENS), shape)


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_of_single_places(name: str) -> None:
    check(make_mask(name, TOKENS), POINTS)


@pytest.mark.parametrize(("name", "shape"), EVALUATED, ids=str)
def test_evaluation_alone(name: str, shape: Shape) -> None:
    counts = check(make_mask(name, TOKENS), shape, blind=True)
    assert counts.blocks == counts.boxes > 0


def test_what_no_sample_decides_is_evaluated() -> None:
    holes = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    holes[67, 34] = holes[118, 82] = False
    mod: Mod = lambda b, h, q, k: holes[q, k]  # noqa: E731
    shape = Shape(120, 90, (60, 30))
    assert check(mod, shape).blocks == 6
    assert check(mods.and_masks(mods.causal, mod), shape).blocks == 2


@settings(max_examples=10)
@given(
    booleans(2),
    st.sampled_from([Shape(20, 33, (20, 17)), Shape(17, 9, (9, 9), False, at_once=False), Shape(2, 3, (1, 1))]),
)
def test_random_masks(write, shape: Shape) -> None:
    bound = build(write, CAPTURES, NUMBERS)
    assume(all(n.dtype != torch.bfloat16 for n in bound.graph.nodes))  # the interpreter does not round to it
    assume(plan_mask(bound, INTERPRETER) is not None)
    check(bound, shape)


# Indices


@pytest.mark.parametrize("name", outside())
def test_index_outside_of_a_captured_tensor(name: str) -> None:
    bound = trace(outside()[name], "mask")
    with pytest.raises(IndexRangeError, match=re.escape("an index outside of 'short', [100]")) as error:
        build_lists(plan_of(bound, INTERPRETER), bound, (1, 1, TOKENS, TOKENS), (48, 48), CPU, True)
    assert "mask_cases.py:" in str(error.value)


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: torch.tensor([True, False])[k // 48],
        lambda b, h, q, k: torch.arange(100)[k] <= q,
        lambda b, h, q, k: torch.stack([q < 60, k < 60])[k // 48],
        lambda b, h, q, k: torch.ones(100, dtype=torch.bool)[q],
    ],
)
def test_index_outside_of_a_tensor_that_the_mod_makes(mod: Mod) -> None:
    bound = trace(mod, "mask").on(CPU)
    with pytest.raises(IndexRangeError, match="an index outside of a tensor that it makes, ") as error:
        build_lists(plan_of(bound, INTERPRETER), bound, (1, 1, TOKENS, TOKENS), (48, 48), CPU, True)
    assert "test_mask_kernels.py:" in str(error.value)


# Plans

WIDE = torch.rand(TOKENS, dtype=torch.float64)
UNLIKE: dict[str, Mod] = {
    "exp": lambda b, h, q, k: torch.exp(q * 0.1) > k,
    "rsqrt": lambda b, h, q, k: torch.rsqrt(q + 1.0) * k > 1,
    "tanh": lambda b, h, q, k: torch.tanh(q * 0.1) * 30 > k,
    "sin": lambda b, h, q, k: torch.sin(q * 0.1) * 30 > k,
    "log": lambda b, h, q, k: torch.log(q + 1.0) * 30 > k,
    "power": lambda b, h, q, k: (q * 0.1) ** 1.5 > k,
    "quotient of floats": lambda b, h, q, k: (q * 0.5) // 0.3 > k,
    "remainder of floats": lambda b, h, q, k: (q * 0.5) % 0.3 > k * 0.01,
    "float64 capture": lambda b, h, q, k: WIDE[q] > WIDE[k],
    "float64 arithmetic": lambda b, h, q, k: q.double() * 0.1 > k,
}


@pytest.mark.parametrize("name", UNLIKE)
def test_no_plan_where_triton_would_round_differently(name: str) -> None:
    assert plan_mask(trace(UNLIKE[name], "mask"), INTERPRETER) is None


def test_roots_and_remainders_of_float32_have_a_plan_where_sums_of_products_round_once() -> None:
    gpu = Target("cuda", 90, 32)
    assert plan_mask(trace(lambda b, h, q, k: torch.sqrt(q.float()) > k, "mask"), INTERPRETER)
    assert all(plan_mask(trace(UNLIKE[f"{name} of floats"], "mask"), gpu) for name in ("quotient", "remainder"))


@pytest.mark.parametrize("name", ["numbers", "documents", "batches", "views", "nested", "float32"])
def test_masks_of_one_kind_share_their_sources(name: str) -> None:
    one, other = (plan_of(trace(make_mask(name, n), "mask"), INTERPRETER) for n in (60, TOKENS))
    assert one.classify is other.classify and one.evaluate is other.evaluate


def test_other_lengths_tensors_and_numbers_compile_nothing() -> None:
    def build_for(n: int, width: int) -> dict[str, int]:
        ids = drawn(n, n).sort().values
        check(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < width), Shape(n, n - 7, (32, 32)))
        return {name: n for name, n in stats().items() if name != "memory_hits"}

    assert build_for(50, 20) == build_for(90, 31)


def test_other_tensors_and_numbers_of_one_shape_prepare_nothing() -> None:
    def build_for(seed: int) -> int:
        ids = drawn(50, 50, seed=seed).sort().values
        check(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < 20 + seed), Shape(50, 43, (32, 32)))
        return recipe_of.cache_info().misses

    assert build_for(1) == build_for(2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("ascending", [True, False])
def test_runs_of_equal_elements(dtype: torch.dtype, ascending: bool) -> None:
    """They are found where each row ascends, and are not given where one does not."""
    ids = torch.tensor([[0, 0, 0, 2, 2, 3, 9, 9, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], dtype=dtype)
    if not ascending:
        ids[1, 4] = 0
    bound = trace(lambda b, h, q, k: ids[b, q] == ids[b, k], "mask")
    built = build_lists(plan_of(bound, INTERPRETER), bound, (2, 1, 10, 10), (8, 8), CPU, True)
    if not ascending:
        assert built.runs == ()
        return
    (runs,) = built.runs
    expected = (torch.searchsorted(ids, ids, right=right).int() for right in (False, True))
    assert all(torch.equal(x, y) for x, y in zip((runs.starts, runs.ends), expected, strict=True))


@pytest.mark.parametrize("at_once", [True, False])
def test_runs_in_two_tensors(at_once: bool) -> None:
    """The kernel that makes all lists finds those of one; a tensor whose rows lie otherwise has none."""
    some, others, apart = torch.arange(40) // 7, torch.arange(40) // 9, (torch.arange(80) // 8)[::2]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (some[q] == some[k]) & (apart[q] == apart[k]) & (others[q] == others[k])

    bound = trace(mask, "mask")
    with nullcontext() if at_once else lists_in_steps():
        plan = plan_of(bound, INTERPRETER)
        built = build_lists(plan, bound, (1, 1, 40, 40), (8, 8), CPU, True)
        names = [source.name for source in sources(plan, bound, (1, 1, 40, 40), (8, 8), False, False)]
    assert names.count("mask_runs") == 1  # the two are of one dtype
    assert len(built.runs) == 2
    for runs in built.runs:
        ids = bound.captures[runs.capture]
        assert torch.equal(runs.starts, torch.searchsorted(ids, ids).int())
        assert torch.equal(runs.ends, torch.searchsorted(ids, ids, right=True).int())
    dense = create_mask(mask, None, None, 40, 40, device="cpu")[0, 0].view(5, 8, 5, 8)
    assert torch.equal(built.by_query.full.dense(5).view(5, 5), dense.all(3).all(1))


@pytest.mark.parametrize("n", [9, 10, 11])
def test_runs_of_any_length_are_aligned(n: int) -> None:
    """Kernels of attention are built for an alignment: it must not change with the length."""
    ids = torch.arange(n) // 3
    bound = trace(lambda b, h, q, k: ids[q] == ids[k], "mask")
    (runs,) = build_lists(plan_of(bound, INTERPRETER), bound, (1, 1, n, n), (4, 4), CPU, True).runs
    assert [x.data_ptr() % 16 for x in (runs.starts, runs.ends)] == [0, 0]
    assert torch.equal(runs.ends, torch.searchsorted(ids, ids, right=True).int())


def test_a_mask_of_too_many_runs_names_the_block_size_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = trace(lambda b, h, q_idx, kv_idx: (q_idx // 16 + kv_idx // 16) % 2 == 0, "mask")
    plan = plan_mask(bound, INTERPRETER)
    assert plan is not None
    sizes = (1, 1, 128, 128)
    assert build_lists(plan, bound, sizes, (16, 16), CPU, True).by_query.full.runs.shape == (32, 2)
    monkeypatch.setattr(mask_build, "MOST_RUNS", 31)
    monkeypatch.setattr(boxes, "MOST_RUNS", 31)
    with pytest.raises(
        ArgumentError, match=r"BLOCK_SIZE: found \(16, 16\), with which .* 31 runs of blocks, .* \(32, 32\)"
    ):
        build_lists(plan, bound, sizes, (16, 16), CPU, True)


def test_masks_of_more_blocks_than_a_gpu_has_room_for_are_not_for_the_kernels() -> None:
    assert fits((1, 1, 2**20, 2**20), (32, 32))
    assert not fits((1, 1, 2**20, 2**20), (16, 16))
    assert not fits((1, 1, 0, 2**20), (16, 16))
