"""Masks whose partial blocks are read as bits: the same results as with their mask_mod, on Hopper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mask_bits import RESULTS, assert_as_accurate, assert_same_bits, gradients_of, oracle_of
from torch import Tensor

from flexattn import AuxRequest, BlockMask, create_block_mask, explain, flex_attention, mods
from flexattn.errors import MutationError
from flexattn.layout import TiledGrid
from flexattn.mask_build import cache as mask_cache
from flexattn.mask_build import create, token_tiles
from flexattn.process.config import settings

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper, reason="bits are read by Hopper kernels")]

Mod = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    mask_cache.clear()
    yield
    mask_cache.clear()


def table(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(len(shape))
    return torch.rand(*shape, generator=generator, device="cuda") < 0.6


def hashed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 31 + kv_idx * 17) % 7 < 3


def block_diffusion(b: Any, h: Any, q_idx: Any, kv_idx: Any, n: int = 512, block: int = 24) -> Any:
    q_noisy, kv_noisy = q_idx < n, kv_idx < n
    q_block, kv_block = (q_idx % n) // block, (kv_idx % n) // block
    diagonal = (q_block == kv_block) & (q_noisy == kv_noisy)
    offset = (q_block > kv_block) & q_noisy & ~kv_noisy
    causal = (q_block >= kv_block) & ~q_noisy & ~kv_noisy
    return diagonal | offset | causal


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * (h + 2) + kv_idx * (b + 3)) % 5 < 2


def random_graph() -> Mod:
    edges = table(9, 9)
    return lambda b, h, q_idx, kv_idx: edges[q_idx * 5 % 9, kv_idx * 7 % 9] & (q_idx // 64 >= kv_idx // 64)


# mask_mod, B and H of the mask, (B, Hq, Hkv, M, N)
CASES: dict[str, tuple[Callable[[], Mod], tuple[int | None, int | None], tuple[int, int, int, int, int]]] = {
    "neighborhood": (lambda: mods.natten_2d(32, 40, 9), (None, None), (1, 4, 4, 1280, 1280)),
    "volume": (lambda: mods.natten_3d(8, 12, 12, 5), (None, None), (2, 2, 2, 1152, 1152)),
    "block diffusion": (lambda: block_diffusion, (None, None), (1, 4, 2, 1024, 1024)),
    "other lengths": (lambda: hashed, (None, None), (2, 2, 2, 300, 717)),
    "short": (lambda: hashed, (None, None), (1, 2, 2, 130, 60)),
    "grouped heads": (random_graph, (None, None), (2, 8, 2, 900, 640)),
    "by batch and head": (lambda: by_head, (2, 4), (2, 4, 4, 520, 400)),
    "by head": (lambda: by_head, (None, 4), (2, 4, 2, 384, 512)),
    "lists in steps": (lambda: by_head, (8, 4), (8, 4, 4, 640, 512)),
    "many short": (lambda: mods.natten_2d(16, 16, 5), (None, None), (64, 8, 8, 256, 256)),
}


def tensors(B: int, Hq: int, Hkv: int, M: int, N: int, D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(M + N + D)
    shapes = (B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, D)
    return tuple(torch.randn(s, generator=generator, device="cuda", dtype=dtype).requires_grad_() for s in shapes)


def arguments(name: str) -> tuple[Mod, int | None, int | None, int, int]:
    make, (B, H), sizes = CASES[name]
    mod = make()
    # by_head reads b too: give it one batch
    return (lambda b, h, q, kv: mod(0 * b, h, q, kv)) if name == "by head" else mod, B, H, *sizes[3:]


def with_halves(mask: BlockMask, skips: bool) -> BlockMask:
    """Let kernels skip the empty halves of a mask's blocks, or not: then results have the bits of the mask_mod's."""
    assert mask.bits is not None
    mask._bits = mask.bits._replace(skips_halves=skips)
    mask._prepared = mask._state = mask._in_tiles = None
    return mask


def without_bits(mask: BlockMask) -> BlockMask:
    plain = copy.copy(mask)
    plain._forget_derived()
    assert plain.bits is None
    return plain


def made(name: str, skips: bool = False) -> tuple[BlockMask, BlockMask, tuple[int, int, int, int, int]]:
    """Return a mask with bits, the same without, and sizes of a call."""
    sizes, mask = CASES[name][2], create_block_mask(*arguments(name), device="cuda")
    return with_halves(mask, skips), without_bits(mask), sizes


def run(inputs: tuple[Tensor, ...], mask: BlockMask, score_mod: Mod | None = None) -> list[Tensor]:
    out, aux = flex_attention(*inputs, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return gradients_of(out, aux.lse, inputs)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, x, y in zip(
        ("out", "lse", "dk", "dv"), [*found[:2], *found[3:]], [*expected[:2], *expected[3:]], strict=True
    ):
        assert torch.equal(x, y), f"{name}: {(x != y).sum()} of {x.numel()}"
    torch.testing.assert_close(found[2], expected[2], rtol=2e-2, atol=1e-3)  # dq is added in any order


@pytest.mark.parametrize("name", CASES)
def test_the_bits_that_are_built(name: str) -> None:
    mask = create_block_mask(*arguments(name), device="cuda")
    assert mask.bits is not None
    assert_same_bits(mask.bits, mask)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_mask_mod(name: str, D: int) -> None:
    mask, plain, sizes = made(name)
    inputs = tensors(*sizes, D, torch.bfloat16)
    plans = explain(*inputs, None, mask, enable_gqa=True).plans
    assert {"fwd", "bwd"} == {p.spec.phase for p in plans if "bits" in p.features}
    assert_same(run(inputs, mask), run(inputs, plain))


def assert_no_less_accurate(found: list[Tensor], plain: list[Tensor], oracle: Any) -> None:
    """Sums of other tiles are rounded differently. The error must be the same."""
    for name, x, y, exact in zip(RESULTS, found, plain, oracle, strict=True):
        finite = exact.isfinite()
        assert torch.equal(x.isfinite(), finite), name
        error, allowed = ((t.double() - exact)[finite].square().mean().sqrt().item() for t in (x, y))
        assert 0 < error <= (2.0 if name == "lse" else 1.1) * allowed, (
            f"{name}: {error:.3g}, {allowed:.3g} without halves"
        )


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_empty_halves_are_skipped(name: str, D: int) -> None:
    mask, plain, sizes = made(name, skips=True)
    inputs = tensors(*sizes, D, torch.bfloat16)
    plans = explain(*inputs, None, mask, enable_gqa=True).plans
    assert "fwd" in {p.spec.phase for p in plans if "halves" in p.features}
    assert_no_less_accurate(run(inputs, mask), run(inputs, plain), oracle_of(inputs, None, mask.mask_mod))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_empty_halves_with_a_score_mod(dtype: torch.dtype, deterministic: bool) -> None:
    mask, plain, sizes = made("neighborhood", skips=True)
    inputs, score_mod = tensors(*sizes, 64, dtype), mods.softcap(15.0)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found, expected = run(inputs, mask, score_mod), run(inputs, plain, score_mod)
        again = run(inputs, mask, score_mod)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_no_less_accurate(found, expected, oracle_of(inputs, score_mod, mask.mask_mod))
    assert all(torch.equal(x, y) for x, y in zip(found[:2] if not deterministic else found, again, strict=False))


def test_neighborhoods_in_tiles_skip_halves() -> None:
    """A long sequence, in the order of TiledGrid: the fixed reference, and rows of blocks that skip many halves."""
    mod = TiledGrid((64, 64), (16, 8)).mod(mods.natten_2d(64, 64, 13))
    mask = create_block_mask(mod, None, None, 4096, 4096, device="cuda")
    assert mask.skips_halves
    assert not create_block_mask(mods.natten_2d(64, 64, 13), None, None, 4096, 4096, device="cuda").skips_halves
    inputs = tensors(1, 2, 1, 4096, 4096, 64, torch.bfloat16)
    found, expected = run(inputs, mask), run(inputs, without_bits(mask))
    assert_no_less_accurate(found, expected, oracle_of(inputs, None, mod))
    with torch.no_grad():
        in_graph = torch.compile(lambda: flex_attention(*inputs, None, mask, enable_gqa=True), backend="aot_eager")
        assert torch.equal(in_graph(), found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_softcap(dtype: torch.dtype) -> None:
    mask, plain, sizes = made("neighborhood")
    inputs, score_mod = tensors(*sizes, 128, dtype), mods.softcap(15.0)
    assert_same(run(inputs, mask, score_mod), run(inputs, plain, score_mod))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_alibi(dtype: torch.dtype) -> None:
    """The compiler contracts its multiplication and addition in one of the backwards only."""
    mask, plain, sizes = made("neighborhood")
    inputs, score_mod = tensors(*sizes, 128, dtype), mods.alibi(4)
    found, expected = run(inputs, mask, score_mod), run(inputs, plain, score_mod)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert_as_accurate(found, expected, oracle_of(inputs, score_mod, mask.mask_mod))


def row_major(mask: BlockMask) -> BlockMask:
    plain = copy.copy(mask)
    plain._in_tiles = plain._state = None
    return plain


def of_rows(mod: Mod) -> Mod:
    return lambda b, h, q, kv: (mod(b, h, q, kv)) & (h + q // 64 != 3)


@pytest.fixture
def always_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "MOST_LEFT", 99.0)


@pytest.mark.usefixtures("always_in_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mod", "tile", "sizes"),
    [
        (mods.natten_2d(64, 64, 13), (16, 8), (1, 4, 4, 4096, 64)),
        (mods.natten_2d(64, 40, 13), (16, 8), (2, 4, 2, 2560, 128)),
        (mods.natten_2d(32, 64, 31), (8, 16), (2, 2, 2, 2048, 40)),
        (of_rows(mods.natten_2d(32, 64, 5)), (4, 32), (1, 4, 2, 2048, 128)),
        (lambda b, h, q, kv: ((q // 48 - kv // 48).abs() <= 9) & (q % 48 >= kv % 48), (32, 4), (1, 2, 2, 3072, 96)),
    ],
)
def test_grids_in_the_order_of_tiles(
    mod: Mod, tile: tuple[int, int], sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_tiles, "_TILES", (tile,))
    B, Hq, Hkv, N, D = sizes
    H = Hq if "of_rows" in mod.__qualname__ else None
    mask = create_block_mask(mod, None, H, N, N, device="cuda")
    assert mask.in_tiles is not None and mask.in_tiles.grid.tile == tile
    assert_same_bits(mask.in_tiles.mask.bits, mask.in_tiles.mask)
    inputs = tensors(B, Hq, Hkv, N, N, D, dtype)
    plans = explain(*inputs, block_mask=mask, enable_gqa=True).plans
    assert [plan.token_tile for plan in plans] == [tile] * 4
    expected = run(inputs, row_major(mask))
    exact = oracle_of(inputs, None, mask.mask_mod)
    for _ in range(2):  # the second call repeats the launches of the first
        for name, x, y, z in zip(RESULTS, run(inputs, mask), expected, exact, strict=True):
            finite = z.isfinite()  # lse of rows without keys is not
            assert torch.equal(x.isfinite(), finite) and torch.equal(y.isfinite(), finite), name
            error, allowed = ((t.double() - z)[finite].norm() for t in (x, y))
            # Rows are summed in another order. With a fixed reference the largest weight is rounded too.
            assert error <= (1.15 if dtype == torch.bfloat16 else 1.02) * allowed, name


@pytest.mark.usefixtures("always_in_tiles")
def test_other_calls_with_a_grid() -> None:
    """Softcap is computed in tiles. A mod of positions is not, and a backward without dq is computed in tiles too."""
    grid = 64, 64
    mask = create_block_mask(mods.natten_2d(*grid, 7), None, None, 4096, 4096, device="cuda")
    inputs = tensors(1, 2, 2, 4096, 4096, 64, torch.bfloat16)

    def tiles_of(score_mod: Mod | None = None, **options: Any) -> set[Any]:
        return {plan.token_tile for plan in explain(*inputs, score_mod, mask, **options).plans}

    assert tiles_of(mods.softcap(20.0)) == {(16, 8)}
    assert tiles_of(mods.alibi(2)) == {None}
    for options in ({"BACKEND": "TRITON"}, {"BATCH_INVARIANT": True}):
        assert tiles_of(kernel_options=options) == {None}
    found, expected = (run(inputs, m, mods.softcap(20.0)) for m in (mask, row_major(mask)))
    assert_no_less_accurate(found, expected, oracle_of(inputs, mods.softcap(20.0), mask.mask_mod))
    q, k, v = (x.detach() for x in inputs)
    k.requires_grad_()
    of_keys = []
    for m in (mask, row_major(mask)):
        of_keys += torch.autograd.grad(flex_attention(q, k, v, block_mask=m).float().square().sum(), k)
    assert (of_keys[0] - of_keys[1]).norm() <= 1e-2 * of_keys[1].norm()


@pytest.mark.usefixtures("always_in_tiles")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_with_a_grid(backend: str) -> None:
    mask = create_block_mask(mods.natten_2d(64, 64, 7), None, None, 4096, 4096, device="cuda")
    x = torch.randn(2, 4096, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        q, k, v = x.unbind(2)
        return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    d_out = torch.randn(2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
    results = [(out := f(x), *torch.autograd.grad(out, x, d_out)) for f in (attend, compiled, compiled)]
    for found in results[1:]:
        assert torch.equal(found[0], results[0][0])
        assert (found[1] - results[0][1]).norm() <= 1e-3 * results[0][1].norm()  # dq is added in any order


def test_when_grids_are_computed_in_the_order_of_tiles() -> None:
    """If it has fewer blocks."""
    window = create_block_mask(mods.natten_2d(128, 128, 13), None, None, 16384, 16384, device="cuda")
    small = create_block_mask(mods.natten_2d(128, 128, 3), None, None, 16384, 16384, device="cuda")
    assert window.in_tiles is not None and window.in_tiles.grid == TiledGrid((128, 128), (16, 8))
    assert small.in_tiles is None


def test_bits_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_WITHOUT", "bits")
    settings.cache_clear()
    try:
        mask = create_block_mask(*arguments("neighborhood"), device="cuda")
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert mask.bits is None
    assert mask.no_bits == "FLEXATTN_WITHOUT=bits"


def test_a_long_sequence_with_a_fixed_reference() -> None:
    mask = create_block_mask(block_diffusion_of(2048), None, None, 4096, 4096, device="cuda")
    mask, plain = with_halves(mask, False), without_bits(mask)
    inputs = tensors(1, 2, 2, 4096, 4096, 128, torch.bfloat16)
    assert_same(run(inputs, mask), run(inputs, plain))


def block_diffusion_of(n: int) -> Mod:
    return lambda b, h, q_idx, kv_idx: block_diffusion(b, h, q_idx, kv_idx, n, 96)


def test_wide_heads_have_bits_in_the_forward() -> None:
    mask, plain, sizes = made("neighborhood")
    inputs = tensors(*sizes, 256, torch.bfloat16)
    assert_same(run(inputs, mask), run(inputs, plain))


def test_deterministic_gradients() -> None:
    mask, plain, sizes = made("grouped heads")
    inputs = tensors(*sizes, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        found, expected = run(inputs, mask), run(inputs, plain)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, expected)
    assert torch.equal(found[2], expected[2])


def test_repeated_calls_and_other_masks_of_the_kind() -> None:
    inputs = tensors(1, 4, 4, 1280, 1280, 64, torch.bfloat16)
    for kernel in (9, 5, 9, 13):
        mask = create_block_mask(mods.natten_2d(32, 40, kernel), None, None, 1280, 1280, device="cuda")
        mask, plain = with_halves(mask, False), without_bits(mask)
        expected = run(inputs, plain)
        for _ in range(3):
            assert_same(run(inputs, mask), expected)


def test_compiled_and_captured() -> None:
    inputs = tensors(1, 4, 4, 1280, 1280, 64, torch.bfloat16)

    def forward(mask: BlockMask) -> Tensor:
        with torch.no_grad():
            return flex_attention(*inputs, None, mask)

    in_graph = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for kernel in (9, 13, 5):
        mask = create_block_mask(mods.natten_2d(32, 40, kernel), None, None, 1280, 1280, device="cuda")
        mask, plain = with_halves(mask, False).prepare(), without_bits(mask)
        expected = forward(plain)
        assert torch.equal(in_graph(mask), expected)
        assert torch.equal(in_graph(mask), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(mask)
    graph.replay()
    assert torch.equal(out, expected)


def test_changed_values_are_an_error() -> None:
    edges = table(9, 9)
    mod = lambda b, h, q_idx, kv_idx: edges[q_idx * 5 % 9, kv_idx * 7 % 9]  # noqa: E731
    mask = create_block_mask(mod, None, None, 512, 512, device="cuda")
    assert mask.bits is not None
    inputs = tensors(1, 2, 2, 512, 512, 64, torch.bfloat16)
    run(inputs, mask)
    edges.logical_not_()
    with pytest.raises(MutationError):
        run(inputs, mask)
