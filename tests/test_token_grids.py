"""Masks of grids in row-major order: their grid, their lists in the order of tiles, and the passes that read these."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_bits import assert_same_bits, reference_bits
from torch import Tensor

import flexattn
from flexattn import BlockMask, create_block_mask, create_mask, explain, mods
from flexattn.block_mask import InTiles
from flexattn.block_mask.bits import BITS_TENSORS
from flexattn.block_mask.prepared import MaskForm, MaskNumbers, digest_of
from flexattn.call.call import Call
from flexattn.call.memory_order import empty_in_order
from flexattn.call.pose import pose
from flexattn.compile.schedule import backward_in_best_order, forward_in_best_order
from flexattn.engines.mask_state import MaskState
from flexattn.errors import IndexRangeError
from flexattn.explanation import target_named
from flexattn.graph.equal_runs import EqualRuns
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.mask_build import create
from flexattn.mask_build.create import with_tiles
from flexattn.mask_build.on_target import as_on_target
from flexattn.mask_build.token_tiles import MOST_LEFT, part_left, tiles_of
from flexattn.process.config import settings
from flexattn.runtime.launch import DescriptorLayout
from flexattn.torch_compile.lists import mask_of_lists
from flexattn.torch_compile.spec import Spec, loads
from flexattn.trace.trace import trace

Mod = Callable[..., Any]
HOPPER = target_named("sm_90")
HEIGHT, WIDTH = 32, 24
S = HEIGHT * WIDTH
GRID = TiledGrid((HEIGHT, WIDTH), (16, 8))
WINDOW = mods.natten_2d(HEIGHT, WIDTH, 7)


def grid_of(mod: Mod, tokens: int) -> tuple[int, ...] | None:
    bound = trace(mod, "mask")
    return token_grid(specialized(bound.wide or bound.graph, bound.numbers), tokens)


def square(width: int) -> Mod:
    return lambda b, h, q, kv: (
        ((q // width - kv // width).abs() <= 6) & ((q % width - kv % width).abs() <= 6)
    )  # fmt: skip


def nested(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    same_plane = q // 1024 == kv // 1024
    rows = (q % 1024 // 32 - kv % 1024 // 32).abs() < 3
    return same_plane & rows & ((q % 32 - kv % 32).abs() < 3)


@pytest.mark.parametrize(
    ("mod", "tokens", "shape"),
    [
        (WINDOW, S, (HEIGHT, WIDTH)),
        (mods.natten_3d(16, 32, 8, 5), 4096, (16, 32, 8)),
        (square(100), 10_000, (100, 100)),
        (square(100), 10_050, None),  # no whole rows
        (square(100), 100, None),
        (nested, 16_384, (16, 32, 32)),
        (mods.block_diffusion(4096, 32), 8192, None),
        (mods.causal, 4096, None),
        (lambda b, h, q, kv: q // 64 == kv // 64, 4096, None),  # a width, but no column
        (lambda b, h, q, kv: (q // 64 == kv // 64) & (q % 64 >= kv), 4096, None),
        (lambda b, h, q, kv: (q // 64 == kv // 32) & (q % 64 >= kv % 32), 4096, None),
    ],
)
def test_the_grid_of_a_mask(mod: Mod, tokens: int, shape: tuple[int, ...] | None) -> None:
    assert grid_of(mod, tokens) == shape


@pytest.fixture
def always_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the order of tiles of small masks too, which have more blocks in it."""
    monkeypatch.setattr(create, "MOST_LEFT", 99.0)


def on_hopper(mod: Mod = WINDOW, tokens: int = S, B: int | None = None, H: int | None = None) -> BlockMask:
    """Return a mask as it is built on a Hopper GPU."""
    return as_on_target(create_block_mask(mod, B, H, tokens, tokens, device="cpu"), HOPPER)[0]


def tensors(D: int = 64, dtype: torch.dtype = torch.bfloat16, Dv: int | None = None) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(1, 2, S, d, dtype=dtype) for d in (D, D, Dv or D))


SLOPES = torch.ones(2)
LEARNED = torch.ones(2, requires_grad=True)
TILE = GRID.tile
# Tensors, arguments of explain, and whether the forward and the backward are computed in tiles.
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], bool, bool]] = {
    "plain": (tensors(), {}, True, True),
    "float16": (tensors(128, torch.float16), {}, True, True),
    "other widths": (tensors(40, Dv=72), {}, True, True),
    "kernels that skip no halves": (tensors(192, Dv=128), {}, False, False),
    "sink": (tensors(), {"sink": 0.5}, True, True),
    "softcap": (tensors(), {"score_mod": mods.softcap(20.0)}, True, True),
    "by head": (tensors(), {"score_mod": lambda s, b, h, q, kv: s * SLOPES[h]}, True, True),
    "learned": (tensors(), {"score_mod": lambda s, b, h, q, kv: s * LEARNED[h]}, True, False),
    "positions": (tensors(), {"score_mod": mods.alibi(2)}, False, False),
    "one position": (tensors(), {"score_mod": lambda s, b, h, q, kv: s * (kv % 2)}, False, False),
    "dropout": (tensors(), {"dropout_p": 0.5}, False, False),
    "lengths": (tensors(), {"seqused_k": torch.tensor([S], dtype=torch.int32)}, False, False),
    "float32": (tensors(dtype=torch.float32), {}, False, False),
    "rows of 24 bytes": (tensors(12), {}, False, False),
    "unaligned rows": (tuple(torch.zeros(1, 2, S, 69).bfloat16()[..., :64] for _ in range(3)), {}, False, False),
    "batch invariant": (tensors(), {"kernel_options": {"BATCH_INVARIANT": True}}, False, False),
    "a tile": (tensors(), {"kernel_options": {"fwd_BLOCK_M": 64}}, False, True),
    "no TMA": (tensors(), {"kernel_options": {"USE_TMA": False}}, False, False),
    "portable": (tensors(), {"kernel_options": {"BACKEND": "TRITON"}}, False, False),
    "portable forward": (tensors(), {"kernel_options": {"fwd_BACKEND": "TRITON"}}, False, True),
    "portable backward": (tensors(), {"kernel_options": {"bwd_BACKEND": "TRITON"}}, True, False),
}


@pytest.mark.usefixtures("always_in_tiles")
@pytest.mark.parametrize("name", CALLS)
def test_which_passes_are_computed_in_tiles(name: str) -> None:
    (q, k, v), options, forward, backward = CALLS[name]
    mask = create_block_mask(WINDOW, None, None, S, S, device="cpu")
    made = explain(q, k, v, block_mask=mask, target="sm_90", **options)
    tiles = {phase: {p.token_tile for p in made.plans if p.spec.phase == phase} for phase in ("fwd", "bwd")}
    assert tiles["fwd"] == {TILE if forward else None}
    assert tiles["bwd"] == {TILE if backward else None}
    for plan, source in zip(made.plans, made.sources, strict=True):
        assert ("tiles_across" in source.text) == (plan.token_tile is not None), plan.spec.name


@pytest.mark.usefixtures("always_in_tiles")
def test_a_deterministic_backward_is_row_major() -> None:
    """hopper_dq reads no bits."""
    mask = create_block_mask(WINDOW, None, None, S, S, device="cpu")
    torch.use_deterministic_algorithms(True)
    try:
        made = explain(*tensors(), block_mask=mask, target="sm_90")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [plan.token_tile for plan in made.plans] == [TILE, None, None, None]
    assert made.blocks_note == "The forward computes tokens in tiles of 16 x 8 of their grid, with fewer blocks."


@pytest.mark.usefixtures("always_in_tiles")
@pytest.mark.parametrize(
    ("written", "in_tiles"), [(("dq", "dk", "dv"), True), (("dk", "dv"), True), (("dq",), False), ((), True)]
)
def test_a_backward_of_some_gradients(written: tuple[str, ...], in_tiles: bool) -> None:
    """Without dq, dk and dv are computed in tiles. The kernel of dq alone reads no bits."""
    q, k, v = tensors()
    problem = pose(Call(q, k, v, None, on_hopper()), on_gpu=True)
    out = empty_in_order(q, v.size(-1))
    given = {"q": q, "k": k, "v": v, "o": out, "do": out}
    given |= {name: x for name, x in (("dq", q), ("dk", k), ("dv", v)) if name in written}
    found = backward_in_best_order(problem, given, HOPPER)
    assert found.in_tiles == in_tiles
    assert found is problem or (found.equal_runs, found.block_mask) == ((), problem.block_mask)
    assert forward_in_best_order(problem, HOPPER).in_tiles
    assert forward_in_best_order(problem, target_named("sm_80")) is problem


@pytest.mark.parametrize("block", [128, 64])
def test_explain_for_a_hopper_gpu(block: int) -> None:
    mask = create_block_mask(mods.natten_2d(64, 64, 13), None, None, 4096, 4096, device="cpu", BLOCK_SIZE=block)
    x = torch.zeros(1, 2, 4096, 64, dtype=torch.bfloat16).requires_grad_()
    found = explain(x, x, x, block_mask=mask, target="sm_90")
    assert found.blocks_note is not None
    note = "The forward and backward compute tokens in tiles of 16 x 8 of their grid, with fewer blocks."
    assert note in found.blocks_note
    assert ("instead of the mask's BLOCK_SIZE" in found.blocks_note) == (block == 64)
    read = found.block_mask
    assert read is not None and read.bits is not None and read.in_tiles is not None
    of_tiles = read.in_tiles.mask.bits
    assert of_tiles is not None and found.bits is not None
    sizes = f"{read.bits.nbytes:,} bytes; of {of_tiles.blocks:,} in tiles of their grid, {of_tiles.nbytes:,}"
    assert found.bits.endswith(sizes)
    assert found.full().count("tokens   of a row-major grid, in tiles of 16 x 8") == len(found.plans) == 4
    assert found.bits is not None
    assert found.bits.startswith("bits of ")
    assert found.block_mask is not None
    assert found.block_mask.mask_mod is mask.mask_mod
    readers = [plan.spec.name for plan in found.plans if "bits" in plan.features]
    assert readers == ["hopper_forward", "hopper_backward"]
    assert (mask.bits, mask.in_tiles) == (None, None)
    in_tiles = as_on_target(mask, HOPPER)[0]
    for other, target in ((mask, "sm_80"), (in_tiles, "sm_80"), (mask[0], "sm_90")):
        plans = explain(x, x, x, block_mask=other, target=target).plans
        assert {plan.token_tile for plan in plans} == {None}


@pytest.mark.usefixtures("always_in_tiles")
def test_masks_by_batch_and_head() -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q // WIDTH - kv // WIDTH).abs() <= h + 1) & ((q % WIDTH - kv % WIDTH).abs() <= 4 + b) & (kv >= 0)

    mask = on_hopper(mod, B=2, H=2)
    assert mask.in_tiles is not None
    assert mask.in_tiles.mask.shape == mask.shape == (2, 2, S, S)
    assert_same_bits(mask.in_tiles.mask.bits, mask.in_tiles.mask)
    order = GRID.order()
    in_tiles, row_major = (create_mask(m.mask_mod, 2, 2, S, S, device="cpu") for m in (mask.in_tiles.mask, mask))
    assert torch.equal(in_tiles, row_major[..., order, :][..., order])


def assert_equal_tiles(found: InTiles | None, expected: InTiles | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.grid == expected.grid
    (one, other) = found.mask, expected.mask
    assert (one.shape, one.BLOCK_SIZE, one.is_built) == (other.shape, other.BLOCK_SIZE, other.is_built)
    assert one.q_runs is not None
    assert other.q_runs is not None
    assert one.bits is not None
    assert other.bits is not None
    assert one.bits.skips_halves == other.bits.skips_halves
    pairs = [
        *zip(one.kv_runs.tensors, other.kv_runs.tensors, strict=True),
        *zip(one.q_runs.tensors, other.q_runs.tensors, strict=True),
        *zip(one.bits.tensors, other.bits.tensors, strict=True),
    ]
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.usefixtures("always_in_tiles")
def test_copies_of_a_mask() -> None:
    mask = on_hopper()
    assert mask.in_tiles is not None
    assert copy.copy(mask).in_tiles is mask.in_tiles
    deep = copy.deepcopy(mask)
    assert_equal_tiles(deep.in_tiles, mask.in_tiles)
    assert deep.in_tiles is not None
    assert deep.in_tiles.mask.kv_runs.order is not mask.in_tiles.mask.kv_runs.order
    assert deep._prepared is not None
    assert MaskForm.loads(deep._prepared.text).tile == GRID.tile
    # Others have other lists, or another mod.
    loaded = pickle.loads(pickle.dumps(mask))
    others = mask[:, :, :2], mask[0], mask.to("meta"), mask.expand(2, 2), mask._adjust(S - 128, S), loaded
    assert [other.in_tiles for other in others] == [None] * len(others)
    for edit in ("kv_runs", "q_runs", "mask_mod"):
        edited = copy.copy(mask)
        setattr(edited, edit, getattr(edited, edit))
        assert edited.in_tiles is None, edit
    shorter = copy.copy(mask)
    shorter.seq_lengths = (S, S - 8)
    assert shorter.in_tiles is None
    assert mask.in_tiles.mask.bits is not None


@pytest.mark.usefixtures("always_in_tiles")
def test_a_backward_reads_the_lists_of_its_forward() -> None:
    mask = on_hopper()
    assert mask.in_tiles is not None
    tiles = mask.in_tiles.mask
    assert tiles.q_runs is not None
    assert tiles.bits is not None
    q = torch.zeros(1, 1, S, 16)

    def state(mask: BlockMask) -> MaskState:
        return MaskState(mask, None, pose(Call(q, q, q, None, mask)))

    plain, before = copy.copy(mask), state(mask)
    plain._in_tiles = plain._state = None
    skipping = copy.copy(mask)
    other = copy.copy(tiles)
    other._bits = tiles.bits._replace(skips_halves=not tiles.bits.skips_halves)
    skipping._in_tiles = InTiles(GRID, other)
    assert state(copy.copy(mask)).kind is before.kind
    assert len({id(state(x).kind) for x in (mask, plain, skipping)}) == 3
    mask.mask_mod = mods.causal  # the forward has run
    expected = {
        "kv_runs_in_tiles": tiles.kv_runs.tensors, "q_runs_in_tiles": tiles.q_runs.tensors,
        "kv_bits_in_tiles": tiles.bits.by_query, "q_bits_in_tiles": tiles.bits.by_key,
    }  # fmt: skip
    for part, lists in expected.items():
        found: list[Any] = [*before.pointers(part)]  # tensors, on a CPU
        assert len(found) == len(lists)
        assert all(map(torch.equal, found, lists)), part


@pytest.mark.usefixtures("always_in_tiles")
@pytest.mark.parametrize("has_runs", [False, True])
@pytest.mark.parametrize("heads", [None, 2])
def test_they_are_arguments_of_compiled_graphs(heads: int | None, has_runs: bool) -> None:
    ids = (torch.arange(S) // 200 * 200).int()

    def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        near = ((q // WIDTH - kv // WIDTH).abs() <= 3 + h) & ((q % WIDTH - kv % WIDTH).abs() <= 3)
        return near & (ids[q] == ids[kv])

    mod = documents if has_runs or heads else WINDOW
    mask = on_hopper(mod, H=heads or (1 if has_runs else None))
    bound = trace(mod, "mask")
    if has_runs:  # as a GPU finds them when it builds the mask
        mask._remember(bound, (EqualRuns(0, torch.stack([ids, ids + 200])),))
    mask._prepared = None
    ready = mask.prepare()._prepared
    assert ready is not None
    form = MaskForm.loads(ready.text)
    assert form.tile == GRID.tile
    halves = mask.skips_halves, mask.in_tiles.mask.skips_halves
    assert MaskNumbers.of_sizes(ready.tensors[1]) == (digest_of(bound), *halves, WIDTH)
    assert form.runs == ((0,) if has_runs else ())
    assert MaskForm.loads(form.dumps()) == form
    assert loads(Spec(form=form).dumps()).form == form
    assert len(ready.tensors) == 1 + 2 * (1 + BITS_TENSORS) + len(form.runs)
    query = torch.zeros(1, 2, S, 64)
    found = mask_of_lists(ready.tensors, form, query, S, S, bound)
    assert_equal_tiles(found.in_tiles, mask.in_tiles)
    assert mask_of_lists(ready.tensors, form, query, S, S, bound) is found
    copies = [t.clone() for t in ready.tensors]  # as a CUDA graph passes them
    assert mask_of_lists(copies, form, query, S, S, bound).in_tiles is not None
    for other in (trace(mods.causal, "mask"), None):  # the lists and the mod are not of the same mask
        assert mask_of_lists(ready.tensors, form, query, S, S, other).in_tiles is None
    plain = copy.copy(mask)
    plain._in_tiles = plain._state = plain._prepared = None
    without = plain.prepare()._prepared
    assert without is not None
    assert MaskForm.loads(without.text).tile is None
    assert len(without.tensors) == 2 + BITS_TENSORS + len(form.runs)


@pytest.mark.usefixtures("always_in_tiles")
def test_grids_of_any_size_share_a_graph() -> None:
    """One with constant sizes, and one with symbols."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return lambda *arguments: [torch.zeros(1, 2, S, 64)]

    torch._dynamo.reset()
    compiled = torch.compile(flexattn.flex_attention, backend=count, fullgraph=True)
    for height, width in ((32, 16), (48, 32), (16, 32), (32, 48), (64, 16), (48, 48)):
        mask = on_hopper(mods.natten_2d(height, width, 5), height * width)
        assert mask.in_tiles is not None
        query = torch.zeros(1, 2, height * width, 64)
        compiled(query, query, query, block_mask=mask)
    torch._dynamo.reset()
    assert graphs == 2


def test_descriptors_of_a_grid_have_five_dims() -> None:
    stored = torch.zeros(2, S, 3, 4, 64, dtype=torch.bfloat16)
    query = stored.select(2, 1).transpose(1, 2)
    found = DescriptorLayout.of(query, GRID.shape)
    assert found.shape == (2, 4, HEIGHT, WIDTH, 64)
    token = 3 * 4 * 64
    assert found.strides == (S * token, 64, WIDTH * token, token, 1)
    assert DescriptorLayout.of(query).shape == (2, 4, S, 64)


def with_bits(mod: Mod, tokens: int) -> BlockMask:
    """Return a mask with bits, but without an order of tiles."""
    mask = create_block_mask(mod, None, None, tokens, tokens, device="cpu")
    mask._bits = reference_bits(mask)
    return mask


def test_which_masks_may_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles_for(mod: Mod, tokens: int) -> TiledGrid | None:
        return tiles_of(with_bits(mod, tokens), trace(mod, "mask"))

    assert tiles_for(WINDOW, S) == GRID
    assert tiles_for(mods.natten_2d(40, 48, 7), 40 * 48) == TiledGrid((40, 48), (8, 16))
    assert tiles_for(mods.natten_2d(32, 20, 7), 32 * 20) == TiledGrid((32, 20), (32, 4))
    assert tiles_for(mods.natten_2d(20, 32, 7), 20 * 32) == TiledGrid((20, 32), (4, 32))
    assert tiles_for(mods.natten_3d(8, 8, 8, 3), 512) is None  # a descriptor has at most five dims
    assert tiles_for(square(20), 400) is None  # no whole tiles
    assert tiles_for(lambda b, h, q, kv: (q * 31 + kv * 17) % 7 < 3, 256) is None
    without = create_block_mask(WINDOW, None, None, S, S, device="cpu")
    assert tiles_of(without, trace(WINDOW, "mask")) is None
    for mechanism in ("tiles", "hopper"):
        monkeypatch.setenv("FLEXATTN_WITHOUT", mechanism)
        settings.cache_clear()
        try:
            assert tiles_for(WINDOW, S) is None
        finally:
            monkeypatch.undo()
            settings.cache_clear()


@pytest.mark.parametrize("is_kept", [True, False])
def test_when_a_mask_is_kept_in_tiles(is_kept: bool) -> None:
    before, after = with_bits(WINDOW, S), with_bits(WINDOW, S)
    assert before.bits is not None
    assert after.bits is not None
    for computed in (None, 0):
        before._bits = before.bits._replace(computed=computed)
        assert part_left(before, after) == 1.0
    left = round(200 * MOST_LEFT) + (0 if is_kept else 1)
    before._bits, after._bits = before.bits._replace(computed=200), after.bits._replace(computed=left)
    assert part_left(before, after) == left / 200
    kept = with_tiles(before, trace(WINDOW, "mask"), lambda mod, bound: after).in_tiles
    assert kept == (InTiles(GRID, after) if is_kept else None)


def test_the_parts_of_neighborhoods_that_are_left() -> None:
    found = {}
    for width in (7, 13):
        mask = on_hopper(mods.natten_2d(64, 64, width), 4096)
        found[width] = None if mask.in_tiles is None else part_left(mask, mask.in_tiles.mask)
    assert found[7] is None
    assert found[13] == pytest.approx(0.54, abs=0.01)


def test_masks_by_batch_and_head_have_as_many_quarters_in_each() -> None:
    mask = with_bits(WINDOW, S)
    assert mask.bits is not None
    expanded = mask._expand(3, 2, is_exact=True).bits
    assert expanded is not None
    assert mask.bits.computed is not None
    assert expanded.computed == 6 * mask.bits.computed
    assert len(expanded.by_query.first) == 6 * len(mask.bits.by_query.first)


@pytest.mark.parametrize(
    "error", [IndexRangeError("mask_mod: captured tensor 'table' has no index 78"), torch.OutOfMemoryError("no memory")]
)
def test_a_mask_whose_order_of_tiles_cannot_be_built_has_none(error: Exception) -> None:
    mask, bound = with_bits(WINDOW, S), trace(WINDOW, "mask")

    def build(mod: Mod, bound: Any) -> BlockMask:
        raise error

    before = sum(flexattn.counters().fallbacks.values())
    assert with_tiles(mask, bound, build).in_tiles is None
    assert sum(flexattn.counters().fallbacks.values()) == before + 1
