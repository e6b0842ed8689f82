"""Bits of a mask's partial blocks: when a mask has them, what reads them, and the Hopper code that does."""

from __future__ import annotations

import copy
import ctypes
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mask_bits import (
    RESULTS,
    assert_as_accurate,
    assert_same_bits,
    gradients_of,
    oracle_of,
    reference_bits,
    with_bits,
)

pytest.importorskip("triton")

from emulation import load_in_emulator
from operations import Operations
from sm90 import report

from flexattn import BlockMask, create_block_mask, create_mask, explain, mods
from flexattn.block_mask.bits import BITS_BLOCK, BITS_TENSORS, BLOCK_BYTES, BLOCK_WORDS, ROW_WORDS, MaskBits
from flexattn.block_mask.prepared import MaskForm
from flexattn.call.problem import Problem
from flexattn.compile.kernel_source import KernelSource
from flexattn.engines.mask_state import MaskState
from flexattn.errors import FormatError
from flexattn.explanation import target_named
from flexattn.graph.equal_runs import captures_compared
from flexattn.graph.pair_cost import pair_cost
from flexattn.machine.target import Target
from flexattn.mask_build import launch_plan, on_gpu
from flexattn.mask_build.bits_by_pairs import evaluated_bits
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.pair_bits import MOST_BYTES, bits_of_memory, bytes_of, impossible, size_of_halves, unwanted
from flexattn.process.config import settings
from flexattn.reference import attention
from flexattn.runtime import build as build_module
from flexattn.runtime.build import build
from flexattn.torch_compile.lists import mask_of_lists
from flexattn.torch_compile.spec import FORMAT, Spec, loads
from flexattn.trace.trace import trace

HOPPER, AMPERE = target_named("sm_90"), target_named("sm_80")
SIZE = (BITS_BLOCK, BITS_BLOCK)
NEIGHBORS = mods.natten_2d(16, 32, 7)
DOCUMENTS = torch.arange(512) // 100

Mod = Callable[..., Any]


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx) % 3 == 0


CHEAP: dict[str, Mod] = {
    "causal": mods.causal,
    "window": mods.sliding_window(100),
    "both sides": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 50,
    "documents": lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx],
}
EXPENSIVE: dict[str, Mod] = {
    "dilated": dilated,
    "neighborhood": NEIGHBORS,
    "volume": mods.natten_3d(8, 8, 8, 3),
    "graph": lambda b, h, q_idx, kv_idx: (DOCUMENTS[(q_idx * 7 + kv_idx * 13) % 512] & 1) == 1,
}


@pytest.fixture
def without_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "bits")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize("name", [*CHEAP, *EXPENSIVE])
def test_masks_that_are_expensive_want_bits_on_hopper(name: str) -> None:
    graph = trace((CHEAP | EXPENSIVE)[name], "mask").graph
    assert (unwanted(graph, SIZE, (), HOPPER) == "") == (name in EXPENSIVE)
    assert name in EXPENSIVE or "instructions per pair, fewer than 8" in unwanted(graph, SIZE, (), HOPPER)
    assert unwanted(graph, SIZE, (), AMPERE) == "only Hopper kernels read them"


@pytest.mark.usefixtures("without_bits")
def test_bits_can_be_turned_off() -> None:
    assert unwanted(trace(NEIGHBORS, "mask").graph, SIZE, (), HOPPER) == "FLEXATTN_WITHOUT=bits"


def test_masks_that_cannot_have_bits() -> None:
    bound, most = trace(NEIGHBORS, "mask"), MOST_BYTES // bytes_of(1)
    assert impossible(bound, most) == ""
    assert impossible(bound, most + 1) == "those of 16,385 blocks would take more than 64 MiB"
    assert unwanted(bound.graph, (64, BITS_BLOCK), (), HOPPER) == "kernels that read them read blocks of 128 x 128"


def test_runs_of_equal_elements_make_a_mask_cheaper() -> None:
    mod = lambda b, h, q_idx, kv_idx: (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx)  # noqa: E731
    graph = trace(mod, "mask").graph
    assert captures_compared(graph) == (0,)
    assert pair_cost(graph) > 0
    assert pair_cost(graph, (0,)) == 0


class Device:
    """A Hopper GPU without kernels: it counts what a build launches, builds and waits for.

    The lists have `blocks` partial blocks, each a run.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.launched: list[str] = []
        self.built = self.waits = 0

    def build(self, source: KernelSource, target: Target) -> Any:
        self.built += 1
        return SimpleNamespace(launch=partial(self._launch, source.name))

    def _launch(self, name: str, programs: int, arguments: tuple[Any, ...], stream: int) -> None:
        self.launched.append(name)
        if name == "mask_lists":
            report = (ctypes.c_int32 * 8).from_address(arguments[5])
            report[0] = report[2] = report[7] = self.blocks

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("blocks", [5, 0], ids=["with bits", "without"])
def test_what_bits_cost_a_build(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch and one allocation more. The host still waits once."""
    bound, device = trace(NEIGHBORS, "mask"), Device(blocks)
    plan = plan_mask(bound, HOPPER)
    assert plan is not None
    monkeypatch.setattr(launch_plan, "build", device.build)
    monkeypatch.setattr(launch_plan, "build_ahead", lambda *_, **__: None)
    monkeypatch.setattr(on_gpu, "target_of", lambda _: HOPPER)
    monkeypatch.setattr(on_gpu, "current_stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    planned = launch_plan.recipe_of, launch_plan.bits_step
    for known in (False, True):
        device.built = device.waits = 0
        device.launched.clear()
        if not known:
            for plans in planned:
                plans.cache_clear()
        with Operations() as operations:
            built = on_gpu.build_lists(plan, bound, (1, 1, 512, 512), (128, 128), torch.device("cpu"), True)
        names = [plan.classify.name, "mask_lists", *([plan.pair_bits.name] if blocks else [])]
        assert device.launched == names
        assert device.built == (0 if known else len(names)), "a known build plans nothing"
        assert device.waits == 1
        assert not known or operations.allocations == (2 if blocks else 1)
        others = {"aten.zeros.default": 1} if blocks else {}  # the counts of halves, which are read after
        assert not known or operations.others == others
        assert (built.bits is not None) == (blocks > 0)
    for plans in planned:  # of kernels that are not there
        plans.cache_clear()


@pytest.mark.parametrize("name", ["neighborhood", "lengths", "heads"])
def test_the_kernel_that_evaluates_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for Hopper, in the emulator."""
    mod, (B, H), lengths = {
        "neighborhood": (mods.natten_2d(16, 20, 5), (1, 1), (320, 320)),
        "lengths": (dilated, (1, 1), (140, 257)),
        "heads": (lambda b, h, q_idx, kv_idx: (q_idx * (h + 1) + kv_idx * (b + 2)) % 5 < 2, (2, 2), (130, 129)),
    }[name]
    mask = create_block_mask(mod, B, H, *lengths, device="cpu")
    bound = trace(mod, "mask")
    plan = plan_mask(bound, HOPPER)
    assert plan is not None
    assert mask.q_runs is not None
    directions = [(lists.partial, lists.full) for lists in (mask.kv_runs, mask.q_runs)]
    ends = [
        torch.cat((some.row_ptr, every.row_ptr, torch.zeros(1, dtype=torch.int32), some.count().cumsum(0).int()))
        for some, every in directions
    ]
    runs = torch.cat([r.runs for pair in directions for r in pair])
    blocks = int(ends[0][-1])
    words = torch.zeros(2, (blocks + 1) * BLOCK_WORDS, dtype=torch.int16)
    monkeypatch.setattr(launch_plan, "build", partial(build, loader=load_in_emulator))
    monkeypatch.setattr(build_module, "current_device", lambda: 0)
    launch_plan.bits_step.cache_clear()
    step = launch_plan.bits_step(plan, tuple((t.shape, t.stride()) for t in bound.captures), (B, H, *lengths), HOPPER)
    launch_plan.bits_step.cache_clear()
    firsts = [end[-some.rows - 1 : -1] for end, (some, _) in zip(ends, directions, strict=True)]
    halves = torch.zeros(size_of_halves(blocks, (len(firsts[0]), len(firsts[1]))), dtype=torch.int32)
    step.launch(0, (torch.cat(ends), runs, words, halves, *bound.captures), bound.numbers)
    assert_same_bits(bits_of_memory(firsts, words, halves, lengths), mask)


def assert_equal_bits(found: MaskBits, expected: MaskBits) -> None:
    assert (found.lengths, found.skips_halves, found.computed) == expected[2:]
    for x, y in zip(found.tensors, expected.tensors, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("mod", "B", "H", "lengths"),
    [
        (NEIGHBORS, None, None, (512, 512)),
        (lambda b, h, q, kv: (q * 31 + kv * 17) % 7 < 3, None, None, (300, 717)),
        (lambda b, h, q, kv: (q * (h + 2) + kv * (b + 3)) % 5 < 2, 2, 3, (200, 130)),
        (lambda b, h, q, kv: (q // 64 + kv // 64 * h) % 3 == 1, None, 2, (512, 384)),  # some blocks are full
        (lambda b, h, q, kv: (DOCUMENTS[q] == DOCUMENTS[kv]) & ((q * kv) % 3 == 0), None, None, (500, 400)),
        (mods.natten_2d(32, 64, 13), None, None, (2048, 2048)),  # more blocks than are evaluated at a time
    ],
)
def test_bits_in_torch_operations(mod: Mod, B: int | None, H: int | None, lengths: tuple[int, int]) -> None:
    mask = create_block_mask(mod, B, H, *lengths, device="cpu")
    assert_equal_bits(evaluated_bits(mask, trace(mod, "mask")), reference_bits(mask))


def masked(D: int, score_mod: Mod | None = None, mod: Mod = NEIGHBORS, **options: Any) -> Any:
    x = torch.zeros(1, 2, 512, D, dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(mod, None, None, 512, 512, device="cpu")
    return explain(x, x, x, score_mod, mask, target="sm_90", kernel_options=options)


READERS = {"hopper_forward", "hopper_backward", "hopper_backward_stripes", "hopper_dkdv"}


@pytest.mark.parametrize("D", [64, 128, 256])
def test_which_kernels_read_bits(D: int) -> None:
    made = masked(D)
    readers = {p.spec.name for p in made.plans if "bits" in p.features}
    assert readers == {p.spec.name for p in made.plans} & READERS
    assert readers
    assert "instead of mask_mod" in made.full() and "with bits" in str(made)
    for plan, source in zip(made.plans, made.sources, strict=True):
        if "bits" in plan.features:
            assert "mask_mod" not in source.text
            assert "bits_ptr" in source.text
    assert not any("bits" in p.features for p in masked(D, mod=mods.causal).plans)
    assert not any("bits" in p.features for p in masked(D, BACKEND="TRITON").plans)
    assert not any("bits" in p.features for p in masked(D, BATCH_INVARIANT=True).plans)


@pytest.mark.slow
@pytest.mark.parametrize("score_mod", [None, mods.softcap(20.0), mods.alibi(2)], ids=["plain", "softcap", "alibi"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_kernels_that_read_bits_compile(D: int, score_mod: Mod | None) -> None:
    for plan, source in zip((made := masked(D, score_mod)).plans, made.sources, strict=True):
        if "bits" in plan.features:
            found = report(source)
            assert found.spill_bytes <= 512, plan.spec.name  # 370 with mask_mods
            assert not found.warnings


def explained_bits(mod: Mod, block: int = 128, change: Callable[[BlockMask], Any] = lambda mask: mask) -> str:
    """Return what `explain` prints below the mask, for Hopper."""
    x = torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16)
    mask = change(create_block_mask(mod, None, None, 512, 512, device="cpu", BLOCK_SIZE=block))
    made = explain(x, x, x, None, mask, target="sm_90")
    assert made.bits is not None
    assert made.bits in str(made)
    assert ("mask_pair_bits" in str(made)) == ("bits of 10" in made.bits)
    return made.bits


def test_explain_says_which_bits_a_mask_has_or_why_it_has_none() -> None:
    size = 2 * 11 * BLOCK_BYTES + 2 * (2 * 10 + 1) * 4 + 2 * 2 * 4 * 4  # words, halves, and two numbers of each row
    assert explained_bits(NEIGHBORS) == f"bits of 10 partial blocks take {size:,} bytes"
    assert explained_bits(NEIGHBORS, block=64) == explained_bits(NEIGHBORS)
    assert "mask_mod takes about 0 instructions per pair, fewer than 8" in explained_bits(mods.causal)
    assert "no block is partial" in explained_bits(
        lambda b, h, q_idx, kv_idx: q_idx // 128 * 128 == kv_idx // 128 * 128
    )
    edited = explained_bits(NEIGHBORS, change=lambda mask: setattr(mask, "kv_runs", mask.kv_runs) or mask)
    assert "its blocks were given, cut, moved or edited" in edited
    x = torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16)
    mask = create_block_mask(NEIGHBORS, None, None, 512, 512, device="cpu")
    assert explain(x, x, x, None, mask, target="sm_80").bits is None
    assert explain(x, x, x, target="sm_90").bits is None


PROBE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
N: gl.constexpr = gl.constexpr({n})

{functions}

@gluon.jit
def probe(x_ptr, bits_ptr, block, row, column, out_ptr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    x = gl.load(x_ptr + rows * N + columns)
    WORDS: gl.constexpr = gl.sum(x.reshape([64, N // 8, 8]), 1).type.layout
    words = load_bits(bits_ptr, block, row, column, WORDS)
    gl.store(out_ptr + rows * N + columns, where_bits(x, words))
"""


@pytest.mark.parametrize(("D", "kernel"), [(64, "hopper_forward"), (256, "hopper_forward"), (128, "hopper_backward")])
def test_tiles_by_bits(D: int, kernel: str) -> None:
    made = masked(D)
    plan, source = next((p, s) for p, s in zip(made.plans, made.sources, strict=True) if p.spec.name == kernel)
    text = "".join(
        match[0]
        for name in ("load_bits", "where_bits")
        if (match := re.search(rf"@gluon\.jit\ndef {name}\(.*?(?=\n@gluon\.jit)", source.text, re.DOTALL))
    )
    n = plan.tile.BLOCK_M if plan.transposed else plan.tile.BLOCK_N
    signature = (
        ("x_ptr", "*fp32"), ("bits_ptr", "*i16"), ("block", "i32"), ("row", "i32"), ("column", "i32"),
        ("out_ptr", "*fp32"),
    )  # fmt: skip
    made_probe = KernelSource("probe", PROBE.format(n=n, functions=text), (), signature, ("bits_ptr",))
    loaded = build(made_probe, HOPPER, loader=load_in_emulator)
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(3, BITS_BLOCK, BITS_BLOCK, generator=generator) < 0.5
    groups = torch.arange(BITS_BLOCK // ROW_WORDS)[:, None]
    words = (dense.unflatten(-1, (-1, ROW_WORDS)).int() << groups).sum(-2).to(torch.int16).flatten()
    x = torch.randn(64, n, generator=generator)
    x[3, 5] = float("nan")
    outside = 0.0 if plan.transposed else float("-inf")
    for block in range(3):
        for row in (0, 64):
            for column in range(0, BITS_BLOCK, n):
                out = torch.zeros(64, n)
                loaded.launch(1, (x, words, block, row, column, out), 0)
                kept = dense[block, row : row + 64, column : column + n]
                expected = torch.where(kept, x, outside)
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_bits_follow_the_lists_that_they_are_of() -> None:
    def fresh() -> BlockMask:
        return with_bits(create_block_mask(NEIGHBORS, None, None, 512, 512, device="cpu"))

    mask = fresh()
    assert copy.copy(mask).bits is mask.bits
    assert copy.deepcopy(mask).bits is not None
    wide = mask.expand(2, 3)
    assert wide.bits is not None
    assert mask.bits is not None
    assert len(wide.bits.by_query.first) == 6 * 4
    assert wide.bits.by_query.words is mask.bits.by_query.words
    for first in wide.bits.by_query.first.view(6, 4):
        assert torch.equal(first, mask.bits.by_query.first)
    longer = fresh()
    longer.seq_lengths = (512, 500)
    assert longer.bits is None
    # Others have other lists, or another mod.
    assert mask[:, :, :2].bits is None
    assert mask.to("meta").bits is None
    for edit in ("kv_runs", "q_runs", "mask_mod"):
        edited = fresh()
        setattr(edited, edit, getattr(edited, edit))
        assert edited.bits is None, edit


def test_a_backward_reads_the_bits_of_its_forward() -> None:
    mask = with_bits(create_block_mask(NEIGHBORS, None, None, 512, 512, device="cpu"))
    assert mask.bits is not None
    expected = [t.clone() for t in mask.bits.tensors]
    q = torch.zeros(1, 1, 512, 16)
    state = MaskState(mask, None, Problem(q, q, q, 1.0, mask=trace(NEIGHBORS, "mask"), block_mask=mask))
    mask.mask_mod = dilated  # the forward has run
    found: list[Any] = [*state.pointers("kv_bits"), *state.pointers("q_bits")]  # tensors, on a CPU
    assert all(map(torch.equal, found, expected))
    other = MaskState(mask, None, Problem(q, q, q, 1.0, mask=trace(NEIGHBORS, "mask"), block_mask=mask))
    assert other.kind is not state.kind


def test_bits_in_graphs() -> None:
    mask = create_block_mask(NEIGHBORS, None, None, 512, 512, device="cpu")
    plain = MaskForm.loads(mask._prepared.text) if mask._prepared else None
    assert plain is not None
    assert not plain.has_bits
    with_bits(mask)._prepared = None
    ready = mask.prepare()._prepared
    assert ready is not None
    form = MaskForm.loads(ready.text)
    assert form.has_bits
    assert len(ready.tensors) == 2 + BITS_TENSORS
    bound, query = trace(NEIGHBORS, "mask"), torch.zeros(1, 2, 512, 64)
    same = mask_of_lists(ready.tensors, form, query, 512, 512, bound)
    assert same.bits is not None
    assert all(x is y for x, y in zip(same.bits.tensors, ready.tensors[2:], strict=True))
    assert mask_of_lists(ready.tensors, form, query, 512, 512, trace(dilated, "mask")).bits is None
    assert mask_of_lists(ready.tensors, form, query, 512, 512, None).bits is None
    of_bits = tuple(ready.tensors[2:])
    assert MaskBits.from_tensors(of_bits, (512, 512), False).tensors == of_bits
    text = Spec(form=form).dumps()
    assert loads(text).form == form
    with pytest.raises(FormatError):
        loads(text.replace(f"[{FORMAT},", f"[{FORMAT - 1},", 1))


def test_one_wrong_pair_is_seen() -> None:
    """Dense attention in bfloat16 stands for the kernels; the wrong pair is the only difference."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 512, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    dense = create_mask(NEIGHBORS, None, None, 512, 512, device="cpu")
    wrong = dense.clone()
    wrong[0, 0, 200, 203] ^= True
    plain, found = (
        gradients_of(*attention(*inputs, mods.alibi(2), mask, dtype=None), inputs) for mask in (dense, wrong)
    )
    oracle = oracle_of(inputs, mods.alibi(2), NEIGHBORS)
    assert_as_accurate(plain, plain, oracle)
    for i in range(len(RESULTS)):
        with pytest.raises(AssertionError, match=RESULTS[i]):
            assert_as_accurate([*plain[:i], found[i], *plain[i + 1 :]], plain, oracle)


def test_reference_bits_are_those_of_the_mask() -> None:
    mask = create_block_mask(NEIGHBORS, None, None, 512, 512, device="cpu")
    bits = reference_bits(mask).by_query
    first_row = int(mask.kv_runs.partial.runs[0, 0])
    words = bits.words.view(-1, BITS_BLOCK, ROW_WORDS)
    for q, kv in ((0, 0), (3, 5), (100, 40), (127, 127)):
        index = torch.tensor([q]), torch.tensor([first_row * BITS_BLOCK + kv])
        expected = bool(NEIGHBORS(torch.tensor(0), torch.tensor(0), *index))
        assert bool(int(words[0, q, kv % ROW_WORDS]) >> kv // ROW_WORDS & 1) == expected
