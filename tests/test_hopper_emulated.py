"""The Gluon kernels for sm_90, as PTX on a CPU, against the float64 reference. test_gpu_hopper.py has more cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ptx_hopper
import pytest
import torch
from kernel_cases import Setting, Sizes, check, deterministic, make_call
from mask_bits import with_bits
from ptx import any_order
from ptx_hopper import late_copy
from quick import slow_unless
from torch import Tensor

from flexattn import AuxRequest, create_block_mask, explain, flex_attention, mods

pytest.importorskip("triton")

from emulation import emulated

from flexattn import reference
from flexattn.compile import fixed_reference, hopper, stripes
from flexattn.runtime import launch, load
from flexattn.runtime.launch import forget_launches

# numpy's, of masked places and of scores of -inf
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

AT = Setting("cpu", torch.bfloat16, block=4, options=(("BACKEND", "HOPPER"),))
NARROW, WIDE = Sizes(1, 2, 1, 150, 270, 64, 64), Sizes(1, 2, 1, 150, 270, 128, 128)
CASES: dict[str, tuple[Sizes, str | None, str | None]] = {  # sizes, score_mod and mask
    "plain": (NARROW, None, None),
    "causal": (Sizes(1, 1, 1, 270, 270, 128, 128), None, "causal"),
    "documents": (NARROW, None, "document"),
    "rows without a key": (NARROW, None, "holes"),
    "by batch and head": (Sizes(2, 2, 2, 130, 140, 64, 64), None, "per_head_and_batch"),
    "softcap": (WIDE, "softcap", "sliding"),
    "distances": (NARROW, "of_index", "causal"),
    "other head dims": (Sizes(1, 2, 1, 129, 150, 40, 72), "softcap", "causal"),
    "D 96": (Sizes(1, 2, 1, 150, 140, 96, 96), None, "causal"),
    "D 80 and 72": (Sizes(1, 2, 1, 129, 150, 80, 72), "softcap", None),
    "D 192": (Sizes(1, 2, 1, 150, 140, 192, 128), None, "causal"),
    "D 256": (Sizes(1, 1, 1, 150, 140, 256, 256), "softcap", "causal"),
}


def choose_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs own stripes of keys also where that is slower."""
    for rule, value in (("_BUSY", 0.0), ("_MOST_TILES", 1 << 30), ("_OF_L2", 1e9), ("_PACKED", (256,))):
        monkeypatch.setattr(stripes, rule, value)


@pytest.fixture(autouse=True)
def on_hopper() -> Iterator[None]:
    with emulated("sm_90"):
        yield


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("causal", "by batch and head"), CASES))
def test_equals_the_reference(name: str) -> None:
    sizes, score, mask = CASES[name]
    check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "documents", "softcap", "D 96"])
def test_two_kernels_of_the_backward(name: str) -> None:
    sizes, score, mask = CASES[name]
    with deterministic():
        check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "causal", "by batch and head", "D 96"])
def test_stripes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_stripes(monkeypatch)
    sizes, score, mask = CASES[name]
    call = make_call(AT, sizes, score, mask)
    inputs = [x.requires_grad_() for x in (call.query, call.key, call.value)]
    plans = explain(*inputs, None, call.mask, enable_gqa=True, target="sm_90").plans
    assert "hopper_backward_stripes" in [plan.spec.name for plan in plans]
    check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "causal", ["plain", "causal", "softcap", "D 256"]))
def test_a_fixed_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    sizes, score, mask = CASES[name]
    check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("D", [40, 64])
def test_three_consumers(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    monkeypatch.setattr(hopper, "FEWEST_QUERIES", 0)
    call = make_call(AT, Sizes(2, 2, 1, 270, 300, D, D), None, None)
    assert explain(call.query, call.key, call.value, enable_gqa=True, target="sm_90").plans[0].consumers == 3
    check(call, loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [2, 3])
def test_a_tile_that_overflows_its_reference_is_computed_again(consumers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    monkeypatch.setattr(hopper, "FEWEST_QUERIES", 0 if consumers == 3 else 2048)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (128, 1024, 1024))
    k[:, :, 700:720] *= 60  # scores far above those of the tiles before
    out = flex_attention(q, k, v, kernel_options={"BACKEND": "HOPPER"})
    weights = torch.softmax(q.double() @ k.double().mT / 8, -1)
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=2e-2, atol=2e-2)


Mod = Callable[..., Any]


def hashed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 31 + kv_idx * 17) % 7 < 3


def in_patches(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Some quarters of blocks are empty: in rows 448 to 511 all but the first and the last of fourteen halves."""
    patch = (q_idx // 64 * 3 + kv_idx // 64 * 5) % 7 < 3
    patch = patch & (q_idx // 64 != 7) | (kv_idx < 16) | (kv_idx >= 880)
    return patch & ((q_idx * 31 + kv_idx * 17) % 7 < 3)


def by_batch_and_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * (h + 2) + kv_idx * (b + 3)) % 5 < 2


# mask_mod, whether it reads b and h, score_mod, sizes
OF_BITS: dict[str, tuple[Mod, bool, Mod | None, Sizes]] = {
    "neighborhood": (mods.natten_2d(16, 20, 5), False, None, Sizes(1, 2, 2, 320, 320, 64, 64)),
    "full blocks too": (
        lambda b, h, q_idx, kv_idx: ((q_idx * 5 + kv_idx * 3) % 7 < 4) | (kv_idx < 128), False, None,
        Sizes(1, 1, 1, 300, 420, 64, 64),
    ),
    "grouped heads": (hashed, False, mods.softcap(9.0), Sizes(2, 4, 2, 200, 300, 128, 128)),
    "by batch and head": (by_batch_and_head, True, None, Sizes(2, 4, 2, 130, 260, 64, 64)),
    "D 256": (hashed, False, None, Sizes(1, 1, 1, 200, 300, 256, 256)),
    "short": (hashed, False, mods.alibi(2), Sizes(1, 2, 2, 100, 60, 64, 64)),
}  # fmt: skip


def both_passes(name: str, has_bits: bool, skips_halves: bool = False) -> list[Tensor]:
    mod, reads_heads, score_mod, n = OF_BITS[name]
    generator = torch.Generator().manual_seed(1)
    q, k, v, d_out = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((n.B, n.Hq, n.M, n.D), (n.B, n.Hkv, n.N, n.D), (n.B, n.Hkv, n.N, n.Dv), (n.B, n.Hq, n.M, n.Dv))
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    heads = (n.B, n.Hq) if reads_heads else (None, None)
    mask = create_block_mask(mod, *heads, n.M, n.N, device="cpu")
    if has_bits:
        with_bits(mask, skips_halves)
    out, aux = flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), kernel_options={"BACKEND": "HOPPER"}
    )
    return [out, aux.lse, *torch.autograd.grad(out, inputs, d_out)]


FORMS_OF_BITS = [
    *((name, "fused", False) for name in OF_BITS), ("grouped heads", "pair", False),
    ("by batch and head", "pair", False), ("neighborhood", "stripes", False), ("full blocks too", "stripes", False),
    ("full blocks too", "fused", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backward", "fixed"), slow_unless(lambda c: c == ("full blocks too", "fused", False), FORMS_OF_BITS)
)
def test_bits_are_read_as_the_mask_mod_is_computed(
    name: str, backward: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fixed:
        monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    if backward == "stripes":
        choose_stripes(monkeypatch)
    forget_launches()
    load.load.cache_clear()
    with deterministic(backward == "pair"):
        found, expected = both_passes(name, True), both_passes(name, False)
    for of, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert torch.equal(x, y), of


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("form", ["fused", "pair", "fixed", "score_mod"])
def test_empty_halves_of_blocks_are_skipped(form: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "fixed":
        monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    sizes = Sizes(1, 2, 1, 512, 890, D, D)
    monkeypatch.setitem(
        OF_BITS, "patches", (in_patches, False, mods.softcap(9.0) if form == "score_mod" else None, sizes)
    )
    mask = with_bits(create_block_mask(in_patches, None, None, sizes.M, sizes.N, device="cpu"))
    assert mask.skips_halves
    q, k = (torch.zeros(1, n, m, D, dtype=torch.bfloat16, requires_grad=True) for n, m in ((2, 512), (1, 890)))
    with deterministic(form == "pair"):
        plans = explain(q, k, k, None, mask, enable_gqa=True, target="sm_90").plans
        assert sum("halves" in plan.features for plan in plans) == 2 if form != "pair" else 1
        forget_launches()
        load.load.cache_clear()
        found, expected = both_passes("patches", True, skips_halves=True), both_passes("patches", False)
    for of, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert relative_rmse(x, y) < 4e-3, of


def relative_rmse(x: Tensor, y: Tensor) -> float:
    finite = y.isfinite()
    assert torch.equal(x.isfinite(), finite)
    x, y = x[finite].double(), y[finite].double()
    return ((x - y).norm() / y.norm()).item()


def test_tiles_past_the_end_of_a_block_read_nothing() -> None:
    """A block of 256 queries has a tile past 128 queries, whose pairs are not in the tensor."""
    table = torch.rand(128, 256, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: table[q_idx, kv_idx], None, None, 128, 256, device="cpu", BLOCK_SIZE=(256, 128)
    )
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (128, 256))
    out = flex_attention(q, k, k, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})  # the emulator checks reads
    weights = torch.softmax((q.double() @ k.double().mT / 8).masked_fill(~table, float("-inf")), -1)
    torch.testing.assert_close(out.double(), weights @ k.double(), rtol=2e-2, atol=2e-2)


# Halves of the keys that the first and the last 64 queries attend to. A ring of the forward has 4 slots at D 128. The
# first queries end with half 5, in the slot of half 1, which they skip.
NEEDED = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize("skips_halves", [True, False])
def test_each_copy_may_be_late(skips_halves: bool) -> None:
    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return NEEDED[q_idx // 64, kv_idx // 64] & ((q_idx * 31 + kv_idx * 17) % 7 < 5)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator).bfloat16() for n in (128, 384, 384))
    mask = with_bits(create_block_mask(mod, None, None, 128, 384, device="cpu"), skips_halves)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), None, mod)
    copies = 28 if skips_halves else 16  # two of each tile of queries, keys and values
    for late in range(copies):
        with late_copy(late):
            out = flex_attention(q, k, v, None, mask, kernel_options={"BACKEND": "HOPPER"})
            assert ptx_hopper._copies == copies
        assert relative_rmse(out, expected) < 5e-3, late


@pytest.mark.parametrize("seed", range(3))
def test_warps_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs take several tiles each. Any of their warps may be far ahead of the others."""
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    with any_order(seed):
        check(make_call(AT, Sizes(1, 1, 1, 390, 400, 64, 64), None, "causal"), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "mask", "late"), [(64, "causal", 0), (64, None, 1), (128, "causal", 2)])
def test_copies_of_both_passes_may_be_late(D: int, mask: str | None, late: int) -> None:
    """One in four."""
    copies = late + 1
    while late < copies:
        with late_copy(late):
            check(make_call(AT, Sizes(1, 1, 1, 200, 190, D, D), None, mask), loose=True)
            copies = ptx_hopper._copies
        late += 4
    assert copies > 10


def test_lists_that_are_assigned_before_the_backward_of_a_first_call() -> None:
    """The backward reads the lists of its forward."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 384, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))

    def gradients(assigns: bool) -> tuple[Tensor, ...]:
        forget_launches()
        mask = create_block_mask(mods.causal, None, None, 384, 384, device="cpu")
        out = flex_attention(q, k, v, None, mask, kernel_options={"BACKEND": "HOPPER"})
        if assigns:
            mask.q_runs = create_block_mask(mods.sliding_window(9), None, None, 384, 384, device="cpu").q_runs
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, expected)
