"""Masks of grids in row-major order: their grid, and calls that copy tokens into the order of tiles and back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_bits import reference_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import AuxRequest, BlockMask, create_block_mask, explain, flex_attention, mods
from flexattn.block_mask import InTiles
from flexattn.block_mask.mask import NO_BITS
from flexattn.call.call import Call
from flexattn.call.layout import LayoutArguments
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.engines import cpu, token_tiles
from flexattn.engines.token_tiles import backward_in_tiles, forward_in_tiles, read_in_tiles
from flexattn.errors import IndexRangeError, MutationError
from flexattn.explanation import target_named
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.mask_build.create import with_tiles
from flexattn.mask_build.on_target import as_on_target
from flexattn.mask_build.token_tiles import LEAST_SAVED, saved_quarters, tiles_of
from flexattn.process.config import settings
from flexattn.trace.trace import trace

Mod = Callable[..., Any]
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


def made(grid: TiledGrid = GRID, mod: Mod = WINDOW, H: int | None = None) -> BlockMask:
    """Return a mask with an order of tiles, as a Hopper GPU builds it."""
    S = grid.tokens
    mask = create_block_mask(mod, None, H, S, S, device="cpu")
    other = grid.mod(mod)
    in_tiles = create_block_mask(other, None, H, S, S, device="cpu")
    mask._in_tiles = InTiles(grid, in_tiles, trace(other, "mask"), 48.0)
    return mask


def plain(mask: BlockMask) -> BlockMask:
    found = copy.copy(mask)
    found._in_tiles = None
    return found


def tensors(B: int = 1, Hq: int = 2, Hkv: int = 2, D: int = 16, S: int = S) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(B + Hq + D)
    shapes = (B, Hq, S, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return tuple(torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU engine compute in the order of tiles, as the Triton engine does. Return which passes do."""
    passes: list[str] = []
    forward, backward = cpu.forward, cpu.backward

    def in_tiles(problem: Problem) -> Any:
        found = read_in_tiles(problem)
        if found is None:
            return forward(problem)
        passes.append("forward")
        return forward_in_tiles(problem, found, forward)

    def backward_too(problem: Problem, *arguments: Any) -> Any:
        found = read_in_tiles(problem)
        if found is None:
            return backward(problem, *arguments)
        passes.append("backward")
        return backward_in_tiles(problem, found, backward, *arguments)

    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 0)
    monkeypatch.setattr(cpu, "forward", in_tiles)
    monkeypatch.setattr(cpu, "backward", backward_too)
    return passes


def results(inputs: tuple[Tensor, ...], mask: BlockMask, **options: Any) -> list[Tensor]:
    out, aux = flex_attention(*inputs, None, mask, return_aux=AuxRequest(lse=True, max_scores=True), **options)
    assert aux.lse is not None
    assert aux.max_scores is not None
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    loss = (out.float() * weight).sum() + (aux.lse * weight[..., 0]).sum()
    return [out, aux.lse, aux.max_scores, *torch.autograd.grad(loss, inputs)]


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (((q // WIDTH - kv // WIDTH).abs() <= h + 1) & ((q % WIDTH - kv % WIDTH).abs() <= 4)) & (kv >= 0)


@pytest.mark.parametrize(
    "case", ["plain", "grouped", "by head", "transposed", "packed", "odd rows", "volume", "expanded"]
)
def test_results_are_those_of_the_mask(case: str, computed: list[str]) -> None:
    grid, mod, H = GRID, WINDOW, None
    inputs, options = tensors(), {}
    match case:
        case "grouped":
            sink = torch.linspace(-1, 1, 4).requires_grad_()
            inputs, options = tensors(B=2, Hq=4), {"enable_gqa": True, "sink": sink}
        case "by head":
            mod, H = by_head, 2
        case "transposed":
            inputs = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs)
        case "packed":
            inputs = tuple(torch.randn(1, S, 2, 48).bfloat16().transpose(1, 2).requires_grad_().split(16, 3))
        case "odd rows":
            inputs = tuple(torch.randn(1, 2, S, 19).bfloat16()[..., 3:].requires_grad_() for _ in range(3))
        case "volume":
            grid, mod = TiledGrid((8, 8, 8), (4, 4, 8)), mods.natten_3d(8, 8, 8, 3)
            inputs = tensors(S=512)
        case "expanded":
            inputs = tensors(B=2)
            inputs = inputs[0], *(x[:1].detach().requires_grad_() for x in inputs[1:])
    mask = made(grid, mod, H)
    found, expected = results(inputs, mask, **options), results(inputs, plain(mask), **options)
    assert computed == ["forward", "backward"]
    for x, y in zip(found, expected, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
        assert (x.float() - y.float()).norm() <= 2.0**-7 * y.float().norm()


def problem_of(mask: BlockMask, inputs: tuple[Tensor, ...], score_mod: Any = None, **options: Any) -> Problem:
    return pose(Call(*inputs, score_mod, mask, **options))


def test_which_calls_are_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 0)
    mask, inputs = made(), tensors()

    def reads(mask: BlockMask = mask, inputs: tuple[Tensor, ...] = inputs, *args: Any, **options: Any) -> bool:
        return read_in_tiles(problem_of(mask, inputs, *args, **options)) is not None

    assert reads()
    assert not reads(plain(mask))
    assert not reads(mask, tuple(x.float() for x in inputs))
    assert not reads(mask, tensors(D=12))  # rows of 24 bytes
    assert not reads(mask, inputs, mods.alibi(2))
    assert not reads(dropout_p=0.5)
    assert not reads(kernel_options={"BLOCK_M": 64})
    assert not reads(kernel_options={"BATCH_INVARIANT": True})
    assert not reads(mask, (*inputs[:2], torch.zeros(1, 2, S, 192).bfloat16()))
    assert mask._in_tiles is not None
    less = plain(mask)
    less._in_tiles = mask._in_tiles._replace(saved=24.0)
    wide = tuple(torch.zeros(1, 2, S, 128).bfloat16() for _ in range(3))
    assert reads(mask, wide)
    assert reads(less)
    assert not reads(less, wide)
    assert not reads(layout=LayoutArguments(torch.tensor([S], dtype=torch.int32)))
    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 13)
    assert not reads()  # 2 heads of 6 blocks
    assert reads(mask, tensors(B=2))


@pytest.mark.parametrize("block", [128, 64])
def test_explain_for_a_hopper_gpu(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 2048)
    mask = create_block_mask(mods.natten_2d(64, 128, 13), None, None, 8192, 8192, device="cpu", BLOCK_SIZE=block)
    x = torch.zeros(2, 16, 8192, 64, dtype=torch.bfloat16).requires_grad_()
    found = explain(x, x, x, block_mask=mask, target="sm_90")
    assert found.blocks_note is not None
    assert "The tokens of a 64 x 128 grid are copied into tiles of 16 x 8, and the results back." in found.blocks_note
    assert found.bits is not None
    assert found.bits.startswith("bits of ")
    assert found.block_mask is not None
    assert "in_tiles" in str(found.block_mask.mask_mod)
    readers = [plan.spec.name for plan in found.plans if "bits" in plan.features]
    assert readers == ["hopper_forward", "hopper_backward"]
    assert (mask.bits, mask._in_tiles) == (None, None)
    few = explain(*(x[:1] for _ in range(3)), block_mask=mask, target="sm_90")
    assert "tiles" not in (few.blocks_note or "")


def explained(mask: BlockMask, D: int = 64, dtype: torch.dtype = torch.bfloat16, target: str = "sm_90") -> Any:
    x = torch.zeros(2, 16, mask.seq_lengths[0], D, dtype=dtype)
    return explain(x, x, x, block_mask=mask, target=target)


def test_explain_for_other_kernels_and_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "_LEAST_BLOCKS", 2048)
    window, S = mods.natten_2d(64, 128, 13), 8192
    mask = create_block_mask(window, None, None, S, S, device="cpu")
    for no_hopper_kernels in ({"D": 20}, {"D": 128}, {"dtype": torch.float32}, {"target": "sm_80"}):
        assert explained(mask, **no_hopper_kernels).blocks_note is None
    expanded = explained(create_block_mask(window, 2, 16, S, S, device="cpu"))
    assert expanded.blocks_note is not None
    assert expanded.bits.partition("take")[0] == explained(mask).bits.partition("take")[0]  # evaluated for one head
    for other in (pickle.loads(pickle.dumps(mask)), mask[0]):
        found = explained(other)
        assert (found.bits, found.blocks_note) == (f"no bits of partial blocks: {NO_BITS}", None)
    in_tiles = as_on_target(mask, target_named("sm_90"))[0]
    assert in_tiles._in_tiles is not None
    assert explained(in_tiles, target="sm_80").blocks_note is None
    x = torch.zeros(2, 16, S, 69, dtype=torch.bfloat16)[..., :64]  # the copies have aligned rows
    assert [p.spec.name for p in explain(x, x, x, block_mask=mask, target="sm_90").plans][:1] == ["hopper_forward"]


@pytest.mark.usefixtures("computed")
def test_it_is_never_stale() -> None:
    reach = torch.tensor(3)

    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q // WIDTH - kv // WIDTH).abs() <= reach) & ((q % WIDTH - kv % WIDTH).abs() <= reach)

    mask, inputs = made(mod=window), tensors()
    expected = flex_attention(*inputs, None, mask)
    copied = copy.deepcopy(mask)
    for changed in (mask[:, :, :2], mask.to("meta"), pickle.loads(pickle.dumps(mask)), copied):
        assert changed._in_tiles is None
    edited = copy.copy(mask)
    edited.mask_mod = WINDOW
    assert edited._in_tiles is None
    torch.testing.assert_close(flex_attention(*inputs, None, copied), expected, atol=2e-2, rtol=2e-2)
    reach.add_(1)
    with pytest.raises(MutationError):
        flex_attention(*inputs, None, mask)


@pytest.mark.usefixtures("computed")
def test_a_forward_and_its_backward_may_differ_in_order() -> None:
    """A checkpoint computes the forward again, here in row-major order."""
    mask, inputs = made(), tensors()
    expected = torch.autograd.grad(flex_attention(*inputs, None, plain(mask)).float().square().sum(), inputs)
    is_first = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal is_first
        chosen, is_first = (mask if is_first else plain(mask)), False
        return flex_attention(q * 1, k * 1, v * 1, None, chosen)

    out = checkpoint(attend, *inputs, use_reentrant=False)
    found = torch.autograd.grad(out.float().square().sum(), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=3e-2, rtol=3e-2)


@pytest.mark.usefixtures("computed")
def test_gradients_of_some_tensors_and_of_gradients() -> None:
    mask, (q, k, v) = made(), tensors()
    found = []
    for m in (mask, plain(mask)):
        out = flex_attention(q, k.detach(), v, None, m)
        (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        found.append((first, *torch.autograd.grad(first.float().square().sum(), (q, v))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=5e-2, rtol=5e-2)


def with_bits(mod: Mod, tokens: int) -> BlockMask:
    """Return a mask as a Hopper GPU builds it."""
    mask = create_block_mask(mod, None, None, tokens, tokens, device="cpu")
    mask._bits = reference_bits(mask)
    return mask


def test_which_masks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles_for(mod: Mod, tokens: int) -> TiledGrid | None:
        return tiles_of(with_bits(mod, tokens), trace(mod, "mask"))

    assert tiles_for(WINDOW, S) == GRID
    assert tiles_for(mods.natten_2d(40, 48, 7), 40 * 48) == TiledGrid((40, 48), (8, 16))
    assert tiles_for(mods.natten_3d(8, 8, 8, 3), 512) == TiledGrid((8, 8, 8), (8, 4, 4))
    assert tiles_for(square(20), 400) is None  # no whole tiles
    assert tiles_for(lambda b, h, q, kv: (q * 31 + kv * 17) % 7 < 3, 256) is None
    without = create_block_mask(WINDOW, None, None, S, S, device="cpu")
    assert tiles_of(without, trace(WINDOW, "mask")) is None
    monkeypatch.setenv("FLEXATTN_WITHOUT", "tiles")
    settings.cache_clear()
    try:
        assert tiles_for(WINDOW, S) is None
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.parametrize("saved", [LEAST_SAVED, LEAST_SAVED - 1])
def test_when_a_mask_is_kept_in_tiles(saved: int) -> None:
    before, after = with_bits(WINDOW, S), with_bits(WINDOW, S)
    assert before.bits is not None
    assert after.bits is not None
    before._bits = before.bits._replace(computed=None)
    assert saved_quarters(before, after) == 0
    before._bits, after._bits = before.bits._replace(computed=200), after.bits._replace(computed=200 - 6 * saved)
    assert saved_quarters(before, after) == saved  # six rows of blocks
    kept = with_tiles(before, trace(WINDOW, "mask"), lambda mod, bound: after)._in_tiles
    assert (None if kept is None else kept.saved) == (saved if saved >= LEAST_SAVED else None)


def test_masks_by_batch_and_head_have_as_many_quarters_in_each() -> None:
    mask = with_bits(WINDOW, S)
    assert mask.bits is not None
    expanded = mask._expand(3, 2, is_exact=True).bits
    assert expanded is not None
    assert mask.bits.computed is not None
    assert expanded.computed == 6 * mask.bits.computed
    assert len(expanded.by_query.first) == 6 * len(mask.bits.by_query.first)


def test_a_mask_whose_order_of_tiles_cannot_be_built_has_none() -> None:
    mask, bound = with_bits(WINDOW, S), trace(WINDOW, "mask")

    def build(mod: Mod, bound: Any) -> BlockMask:
        raise IndexRangeError("mask_mod: captured tensor 'table' has no index 78")

    before = sum(flexattn.counters().fallbacks.values())
    assert with_tiles(mask, bound, build)._in_tiles is None
    assert sum(flexattn.counters().fallbacks.values()) == before + 1
