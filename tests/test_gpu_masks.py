"""create_block_mask on a GPU: its lists are those of the CPU, it takes little memory, and compiles and traces once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mask_cases import (
    MASKS,
    SQUARE,
    Mod,
    assert_same_lists,
    attended,
    brute_force,
    classes,
    documents,
    extents,
    make_mask,
    outside,
    plan_of,
    share,
)
from mod_grammar import CAPTURES, NUMBERS, booleans, build
from torch import Tensor

from flexattn import BlockMask, create_block_mask, explain, flex_attention, mods
from flexattn.block_mask import RunLists
from flexattn.errors import IndexRangeError, MutationError
from flexattn.graph.bound_mod import BoundMod
from flexattn.machine.target import target_of
from flexattn.mask_build import cache as mask_cache
from flexattn.mask_build.create import classify
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.on_gpu import build_lists
from flexattn.runtime.build import stats as build_stats
from flexattn.trace.trace import stats as trace_stats
from flexattn.trace.trace import trace

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

Block = int | tuple[int, int]
LENGTHS: tuple[tuple[int, int, Block], ...] = ((5_000, 4_321, (64, 128)), (20_000, 20_000, 128), (4_999, 5_003, 96))
SHORT: tuple[tuple[int, int, Block, bool], ...] = (
    (1_000, 900, 128, True), (777, 1_024, (64, 128), True), (512, 640, 96, False), (300, 500, (24, 40), True),
)  # fmt: skip
LINEAR = [name for name in MASKS if name not in SQUARE]


@pytest.fixture(autouse=True)
def nothing_is_cached() -> None:
    mask_cache.clear()


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def lists(mask: BlockMask) -> tuple[RunLists, RunLists]:
    assert mask.q_runs is not None
    return mask.kv_runs, mask.q_runs


def masks(make: Callable[[str], Mod], Q: int, KV: int, block: Block, separate: bool = True) -> list[BlockMask]:
    """Return the masks of one mod, made for each device, that a GPU and the CPU build."""
    B, H = extents(trace(make("cpu"), "mask"))
    return [
        create_block_mask(make(at), B, H, Q, KV, at, block, separate_full_blocks=separate) for at in ("cuda", "cpu")
    ]


@pytest.mark.parametrize(("Q", "KV", "block"), LENGTHS)
@pytest.mark.parametrize("name", LINEAR)
def test_the_cpus_lists(name: str, Q: int, KV: int, block: Block) -> None:
    ours, theirs = masks(lambda at: make_mask(name, max(Q, KV), at), Q, KV, block)
    assert_same_lists(lists(ours), lists(theirs))
    assert ours.counts() == theirs.counts()


@pytest.mark.parametrize(("name", "sizes"), list(zip(MASKS, itertools.cycle(SHORT), strict=False)), ids=str)
def test_brute_force(name: str, sizes: tuple[int, int, Block, bool]) -> None:
    Q, KV, block, separate = sizes
    make = lambda at: make_mask(name, max(Q, KV), at)  # noqa: E731
    ours, theirs = masks(make, Q, KV, block, separate)
    assert_same_lists(lists(ours), lists(theirs))
    some, every = classes(brute_force(make("cpu"), *ours.shape), ours.BLOCK_SIZE)
    full = every & separate
    assert torch.equal(ours.kv_runs.full.dense(some.shape[3]).view(some.shape).cpu(), full)
    assert torch.equal(ours.kv_runs.partial.dense(some.shape[3]).view(some.shape).cpu(), some & ~full)


def check(bound: BoundMod, Q: int, KV: int, block: tuple[int, int], separate: bool, blind: bool) -> int:
    """Compare the lists of a mod with CPU captures on both devices; return how many blocks the GPU evaluated."""
    sizes = (*extents(bound), Q, KV)
    there = BoundMod(bound.graph, tuple(c.to(gpu()) for c in bound.captures), bound.numbers)
    plan = plan_of(there, target_of(gpu()), blind)
    built = build_lists(plan, there, sizes, block, gpu(), separate)
    ours, counts = [built.by_query, built.by_key], built.counts
    expected = classify(bound, sizes, block, torch.device("cpu"), separate)
    theirs = [expected.by_query, expected.by_key]
    assert_same_lists(ours, theirs)
    return counts.blocks


@pytest.mark.parametrize("blind", [False, True], ids=["bounds", "evaluation"])
@pytest.mark.parametrize("name", MASKS)
def test_single_places(name: str, blind: bool) -> None:
    bound = trace(make_mask(name, 64), "mask")
    B, H = extents(bound)
    evaluated = check(bound, 33, 64, (1, 1), True, blind)
    assert not blind or evaluated == B * H * 33 * 64


@settings(max_examples=40)
@given(
    booleans(3), st.sampled_from([(1_000, 700, (64, 48)), (3_000, 5_000, (128, 128)), (40, 33, (1, 1))]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_random_masks(write, sizes: tuple[int, int, tuple[int, int]], separate: bool, blind: bool) -> None:
    bound = build(write, CAPTURES, NUMBERS)
    assume(plan_mask(bound, target_of(gpu())) is not None)
    check(bound, *sizes, separate, blind)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_thousands_of_blocks(turned: bool) -> None:
    """Rows span several loads of words, and there are more rows than are looked at together."""
    bits = share(0.7, 40, 9_000)
    bits[3] = bits[7, 1:8_999] = True
    bits[11, 4_000:] = bits[12, :8_200] = False
    table = bits.t().contiguous() if turned else bits

    def make(at: str) -> Mod:
        on = table.to(at)
        return lambda b, h, q_idx, kv_idx: on[q_idx, kv_idx]

    ours, theirs = masks(make, *table.shape, block=1)
    assert_same_lists(lists(ours), lists(theirs))


# Costs


@pytest.mark.parametrize("name", ["causal", "sliding", "documents"])
def test_a_quarter_of_a_million_tokens(name: str) -> None:
    tokens = 1 << 18
    create_block_mask(make_mask(name, 1_000, "cuda"), None, None, 1_000, 1_000, "cuda")  # loads the kernels
    mod = make_mask(name, tokens, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = create_block_mask(mod, None, None, tokens, tokens, "cuda")
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 16 << 20, f"{peak / 2**20:.1f} MiB"
    theirs = create_block_mask(make_mask(name, tokens), None, None, tokens, tokens, "cpu")
    assert_same_lists(lists(ours), lists(theirs))


def test_new_tensors_and_lengths_compile_and_trace_nothing() -> None:
    def build_next(n: int) -> None:
        tokens = 3_000 + 17 * n
        ids = (torch.arange(tokens, device="cuda") // (50 + n)).int()
        create_block_mask(mods.document_causal(ids), None, None, tokens, tokens, "cuda")

    def made() -> tuple[int, ...]:
        built = build_stats()
        return built["compiles"], built["disk_hits"], trace_stats()["traces"]

    build_next(0)
    before = made()
    for n in range(1, 200):
        build_next(n)
    assert made() == before


# Streams and errors


def test_a_side_stream() -> None:
    """A mask is built after what was put on its stream before, and used by what is put there next."""
    tokens = 4_096
    ids = documents(tokens).cuda()
    q, k, v = torch.randn(3, 1, 2, tokens, 64, device="cuda", dtype=torch.bfloat16).unbind(0)

    def attend(of_token: Tensor) -> tuple[Any, BlockMask]:
        mask = create_block_mask(mods.document_causal(of_token), None, None, tokens, tokens, "cuda")
        return flex_attention(q, k, v, block_mask=mask), mask

    want, mask = attend(ids)
    late = torch.zeros_like(ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(ids)
        got, other = attend(late)
    side.synchronize()
    assert_same_lists(lists(other), lists(mask))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", outside())
def test_index_outside_of_a_captured_tensor(name: str) -> None:
    with pytest.raises(IndexRangeError, match=re.escape("an index outside of 'short', [100]")):
        create_block_mask(outside("cuda")[name], None, None, 120, 120, "cuda", 48)


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(e, d) for e in ("HOPPER", "TRITON") for d in (torch.float16, torch.bfloat16)] + [("TRITON", torch.float32)],
    ids=str,
)
def test_masks_are_computed_as_written(engine: str, dtype: torch.dtype) -> None:
    """A mask says the same in each kernel, and what it says on a CPU, where roots and quotients are equal too."""
    if engine == "HOPPER" and str(target_of(gpu())) != "sm_90":
        pytest.skip("needs sm_90")
    found = attended(make_mask("thresholds", 333, "cuda"), 333, 300, dtype, "cuda", BACKEND=engine)
    want = brute_force(make_mask("thresholds", 333), 1, 1, 333, 300)[0, 0]
    assert [int((x != want).sum()) for x in found] == [0, 0]


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("size", [(16, 64), 32, 96, 512])
def test_masks_of_any_block_size_run_hopper_kernels(size: Block, D: int) -> None:
    if not target_of(torch.device("cuda")).is_hopper:
        pytest.skip("only Hopper kernels need blocks of their own size")
    ids = torch.arange(1_000, device="cuda") // 170
    mod = mods.document_causal(ids)
    mask, wanted = (create_block_mask(mod, None, None, 1_000, 1_000, BLOCK_SIZE=n) for n in (size, 128))
    x = torch.randn(3, 2, 4, 1_000, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = explain(*x, block_mask=mask)
    assert found.blocks_note is not None and all(
        "hopper" in p.spec.name for p in found.plans if "forward" in p.spec.name
    )
    results = []
    for blocks in (mask, wanted, mask):
        out = flex_attention(*x, block_mask=blocks)
        results.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
    for out, gradient in results[1:]:
        assert torch.equal(out, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-2, atol=1e-2)  # dq is summed in any order
    wide = x.detach().float()
    expected = flex_attention(*wide, block_mask=mask)
    assert explain(*wide, block_mask=mask).blocks_note is None
    torch.testing.assert_close(results[0][0].float(), expected, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(
        lambda q, k, v, m: flex_attention(q, k, v, block_mask=m), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        assert torch.equal(compiled(*x, mask), results[0][0])
    ids[7] = 5
    with pytest.raises(MutationError):
        flex_attention(*x, block_mask=mask)
