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

from flexattn import AuxRequest, BlockMask, create_block_mask, explain, flex_attention, mods
from flexattn.call import tiles
from flexattn.call.tiles import reads_tiles
from flexattn.errors import MutationError
from flexattn.graph.narrow import specialized
from flexattn.graph.token_grid import token_grid
from flexattn.layout import TiledGrid
from flexattn.mask_build.tiles import pays, tiles_of
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
    mask._in_tiles = grid, create_block_mask(grid.mod(mod), None, H, S, S, device="cpu")
    return mask


def tensors(B: int = 1, Hq: int = 2, Hkv: int = 2, D: int = 16, S: int = S) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(B + Hq + D)
    shapes = (B, Hq, S, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return tuple(torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes)


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_LEAST_BLOCKS", 0)


def results(inputs: tuple[Tensor, ...], mask: BlockMask, **options: Any) -> list[Tensor]:
    out, aux = flex_attention(*inputs, None, mask, return_aux=AuxRequest(lse=True, max_scores=True), **options)
    assert aux.lse is not None
    assert aux.max_scores is not None
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    loss = (out.float() * weight).sum() + (aux.lse * weight[..., 0]).sum()
    return [out, aux.lse, aux.max_scores, *torch.autograd.grad(loss, inputs)]


def by_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (((q // WIDTH - kv // WIDTH).abs() <= h + 1) & ((q % WIDTH - kv % WIDTH).abs() <= 4)) & (kv >= 0)


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("case", ["plain", "grouped", "by head", "transposed", "odd width", "volume", "expanded"])
def test_results_are_those_of_the_mask(case: str) -> None:
    grid, mod, H = GRID, WINDOW, None
    inputs, options = tensors(), {}
    match case:
        case "grouped":
            inputs, options = tensors(B=2, Hq=4), {"enable_gqa": True, "sink": torch.linspace(-1, 1, 4)}
        case "by head":
            mod, H = by_head, 2
        case "transposed":
            inputs = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs)
        case "odd width":
            inputs = tensors(D=12)  # rows of 24 bytes
        case "volume":
            grid, mod = TiledGrid((8, 8, 8), (4, 4, 8)), mods.natten_3d(8, 8, 8, 3)
            inputs = tensors(S=512)
        case "expanded":
            inputs = tensors(B=2)
            inputs = inputs[0], *(x[:1].detach().requires_grad_() for x in inputs[1:])
    mask = made(grid, mod, H)
    plain = copy.copy(mask)
    plain._in_tiles = None
    found, expected = results(inputs, mask, **options), results(inputs, plain, **options)
    for x, y in zip(found, expected, strict=True):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    x, y = (flex_attention(*inputs, None, m, **options).float() for m in (mask, plain))
    assert (x - y).norm() <= 2.0**-8 * y.norm()


@pytest.mark.usefixtures("small_calls")
def test_which_calls_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, (q, k, v) = made(), tensors()

    def reads(q: Any = q, k: Any = k, v: Any = v, score_mod: Any = None, p: float = 0.0, options: Any = None) -> bool:
        return reads_tiles(mask, q, k, v, score_mod, p, options)

    assert reads()
    assert not reads(q.float())
    assert not reads(k=k[:, :, :-1])
    assert not reads(score_mod=mods.alibi(2))
    assert not reads(p=0.5)
    assert not reads(options={"BLOCK_M": 64})
    assert not reads(options={"BATCH_INVARIANT": True})
    assert not reads(v=torch.zeros(1, 2, S, 192).bfloat16())
    assert not torch.func.vmap(lambda x: torch.tensor(reads(x)))(q[None])
    with torch.autocast("cpu", torch.bfloat16):
        assert reads(q.float())
    monkeypatch.setattr(tiles, "_LEAST_BLOCKS", 13)
    assert not reads()  # 2 heads of 6 blocks
    assert reads(*tensors(B=2))


@pytest.mark.usefixtures("small_calls")
def test_explain_says_so() -> None:
    mask, note = made(), "The tokens of a 32 x 24 grid are copied into tiles of 16 x 8, and the results back."
    found = explain(*tensors(), block_mask=mask)
    assert found.blocks_note == note
    assert note in str(found)
    assert found.block_mask is not None and mask._in_tiles is not None
    assert found.block_mask is mask._in_tiles[1]
    assert explain(*tensors(), mods.alibi(2), mask).blocks_note is None


@pytest.mark.parametrize("block", [128, 64])
def test_explain_for_a_hopper_gpu(block: int) -> None:
    mask = create_block_mask(mods.natten_2d(64, 128, 13), None, None, 8192, 8192, device="cpu", BLOCK_SIZE=block)
    x = torch.zeros(2, 16, 8192, 64, dtype=torch.bfloat16).requires_grad_()
    found = explain(x, x, x, block_mask=mask, target="sm_90")
    assert found.blocks_note is not None
    assert "The tokens of a 64 x 128 grid are copied into tiles of 16 x 8, and the results back." in found.blocks_note
    assert found.bits is not None
    assert found.bits.startswith("bits of ")
    assert all(
        "bits" in plan.features for plan in found.plans if plan.spec.name in ("hopper_forward", "hopper_backward")
    )
    assert (mask.bits, mask._in_tiles) == (None, None)
    few = explain(*(x[:1] for _ in range(3)), block_mask=mask, target="sm_90")
    assert "tiles" not in (few.blocks_note or "")


@pytest.mark.usefixtures("small_calls")
def test_it_is_never_stale() -> None:
    reach = torch.tensor(3)

    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q // WIDTH - kv // WIDTH).abs() <= reach) & ((q % WIDTH - kv % WIDTH).abs() <= reach)

    mask, inputs = made(mod=window), tensors()
    flex_attention(*inputs, None, mask)
    for changed in (mask[:, :, :2], mask.to("meta"), pickle.loads(pickle.dumps(mask))):
        assert changed._in_tiles is None
    edited = copy.copy(mask)
    edited.mask_mod = WINDOW
    assert edited._in_tiles is None
    copied = copy.deepcopy(mask)
    assert torch.equal(flex_attention(*inputs, None, copied), flex_attention(*inputs, None, mask))
    reach.add_(1)
    with pytest.raises(MutationError):
        flex_attention(*inputs, None, mask)


@pytest.mark.usefixtures("small_calls")
def test_compiled_calls_read_them() -> None:
    inputs, graphs = tensors(), []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), fullgraph=True, backend=count
    )
    for mask in (made(), made()):
        found, expected = compiled(*inputs, mask), flex_attention(*inputs, None, mask)
        assert torch.equal(found, expected)
        for x, y in zip(
            torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
        ):
            assert torch.equal(x, y)
    assert len(graphs) == 1


@pytest.mark.usefixtures("small_calls")
def test_second_derivatives() -> None:
    mask, inputs = made(), tensors()
    plain = copy.copy(mask)
    plain._in_tiles = None
    found = []
    for m in (mask, plain):
        out = flex_attention(*inputs, None, m)
        (first,) = torch.autograd.grad(out.float().square().sum(), inputs[0], create_graph=True)
        found.append(torch.autograd.grad(first.float().square().sum(), inputs))
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


@pytest.mark.parametrize(("saved", "expected"), [(16 * 6, True), (16 * 6 - 1, False)])
def test_when_copies_pay(saved: int, expected: bool) -> None:
    """Six rows of blocks."""
    before, after = with_bits(WINDOW, S), with_bits(WINDOW, S)
    assert before.bits is not None
    assert after.bits is not None
    before._bits = before.bits._replace(computed=None)
    assert not pays(before, after)
    before._bits, after._bits = before.bits._replace(computed=200), after.bits._replace(computed=200 - saved)
    assert pays(before, after) == expected
