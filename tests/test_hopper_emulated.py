"""The Gluon kernels for sm_90, as PTX on a CPU, against the float64 reference. test_gpu_hopper.py has more cases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ptx_hopper
import pytest
import torch
from kernel_cases import Call, Setting, Sizes, check, deterministic, make_call, results
from mask_bits import with_bits
from ptx import any_order, behind
from ptx_hopper import late_copy
from quick import slow_unless
from torch import Tensor

from flexattn import AuxRequest, BlockMask, create_block_mask, explain, flex_attention, mods

pytest.importorskip("triton")

from emulation import emulated

from flexattn import reference
from flexattn.block_mask import InTiles
from flexattn.compile import fixed_reference, hopper, stripes
from flexattn.engines import repeated_calls, triton
from flexattn.errors import MutationError
from flexattn.explanation import target_named
from flexattn.graph.equal_runs import EqualRuns
from flexattn.layout import TiledGrid
from flexattn.mask_build import create, token_tiles
from flexattn.mask_build.on_target import as_on_target
from flexattn.runtime import launch, load
from flexattn.runtime.launch import forget_launches
from flexattn.runtime.redone import count_on
from flexattn.torch_compile import operators
from flexattn.trace.trace import trace

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
    "D 192 and a table": (Sizes(1, 2, 1, 150, 140, 192, 128), "fixed_bias", "causal"),
    "D 144 and 40": (Sizes(2, 2, 1, 150, 140, 144, 40), "softcap", "document"),
    "D 256": (Sizes(1, 1, 1, 150, 140, 256, 256), "softcap", "causal"),
    "infinite past the end": (NARROW, "one_over_rows", None),
    "infinite past the end, causal": (WIDE, "one_over_rows", "causal"),
    "infinite past the end, any mask": (NARROW, "one_over_rows", "holes"),
    "infinite past the end, D 192": (Sizes(1, 2, 1, 150, 140, 192, 128), "one_over_rows", "causal"),
    "infinite past the end, D 256": (Sizes(1, 1, 1, 150, 140, 256, 256), "one_over_rows", "causal"),
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
    at = replace(AT, options=(("bwd_BACKEND", "HOPPER"),)) if score == "fixed_bias" else AT
    check(make_call(at, sizes, score, mask), loose=True)


LONG = ["plain", "causal", "documents", "rows without a key", "softcap", "D 96", "infinite past the end, any mask"]


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "causal", LONG))
def test_keys_in_one_buffer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with bits at D 128: the next tile of keys is loaded when dq has read the current one."""
    monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
    sizes, score, mask = CASES[name]
    check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "documents", "softcap", "D 96", "D 80 and 72", "D 192", "D 144 and 40"])
def test_two_kernels_of_the_backward(name: str) -> None:
    sizes, score, mask = CASES[name]
    with deterministic():
        check(make_call(AT, sizes, score, mask), loose=True)


@pytest.mark.slow
@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("name", ["plain", "causal", "by batch and head", "D 96"])
def test_stripes(name: str, prefetches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_stripes(monkeypatch)
    if not prefetches:
        monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
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


FIRST_TILE = [("small", 0), ("far above", 1), ("far below", 1), ("no key", 1), ("deviation of 50", 0)]


@pytest.mark.parametrize("D", slow_unless(lambda D: D == 64, [64, 128]))
@pytest.mark.parametrize(("case", "redone"), slow_unless(lambda c: c[0] in ("small", "far below"), FIRST_TILE))
def test_tiles_relative_to_the_first(D: int, case: str, redone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With halves that are skipped. Sums that overflow or may lack weights are computed again."""
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, D, generator=generator).bfloat16() for n in (128, 512, 512))
    if case == "far above":
        k[:, :, 300:310] *= 60
    if case == "far below":
        k[..., 0], q[:, :, :16, 0] = 8.0, -16.0 * D**0.5
    if case == "deviation of 50":
        q *= 50

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The first 16 queries have no key from 64 to 127, the first tile that kernels take."""
        first = (q_idx < 16) & (kv_idx >= 64) & (kv_idx < 128)
        pairs = (kv_idx * 17 + q_idx * 31) % 7 < 3
        return pairs & (q_idx // 64 + kv_idx // 64 != 4) & ~first & ((q_idx != 40) | (case != "no key"))

    mask = with_bits(create_block_mask(mod, None, None, 128, 512, device="cpu"), True)
    count = count_on(q.device)
    before = int(count)
    out = flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})
    assert int(count) - before == redone
    expected = reference.attention(*(x.double() for x in (q, k, v)), None, mod)[0]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def check_two_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a program with two pairs of consumers that take eight tiles, six of which overflow."""
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1024, 64, generator=generator).bfloat16() for _ in range(3))
    k[:, :, [20, 150, 500, 650, 900]] *= 60
    mod = TiledGrid((32, 32), (16, 8)).mod(mods.natten_2d(32, 32, 13))
    mask = with_bits(create_block_mask(mod, None, None, 1024, 1024, device="cpu"), True)
    count = count_on(q.device)
    before = int(count)
    out = flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})
    assert int(count) - before == 6
    expected, _ = reference.attention(*(x.double() for x in (q, k, v)), None, mod)
    assert relative_rmse(out, expected) < 5e-3


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed == 0, range(2)))
def test_two_pairs_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with any_order(seed):
        check_two_pairs(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("warps", [range(4), range(12, 16), range(16, 17), range(17, 18)])  # two consumers, other roles
def test_two_pairs_with_one_role_behind(warps: range, monkeypatch: pytest.MonkeyPatch) -> None:
    with behind(warps):
        check_two_pairs(monkeypatch)


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


def drawn(n: Sizes) -> list[Tensor]:
    """Return query, key, value and the gradient of out."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((n.B, n.Hq, n.M, n.D), (n.B, n.Hkv, n.N, n.D), (n.B, n.Hkv, n.N, n.Dv), (n.B, n.Hq, n.M, n.Dv))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def both_passes(name: str, has_bits: bool, skips_halves: bool = False) -> list[Tensor]:
    mod, reads_heads, score_mod, n = OF_BITS[name]
    q, k, v, d_out = drawn(n)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    heads = (n.B, n.Hq) if reads_heads else (None, None)
    mask = create_block_mask(mod, *heads, n.M, n.N, device="cpu")
    if has_bits:
        with_bits(mask, skips_halves)
    out, aux = flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), kernel_options={"BACKEND": "HOPPER"}
    )
    return [out, aux.lse, *torch.autograd.grad(out, inputs, d_out)]


def both_passes_dense(name: str) -> list[Tensor]:
    mod, _, score_mod, n = OF_BITS[name]
    q, k, v, d_out = (x.double() for x in drawn(n))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(*inputs, score_mod, mod)
    return [out, lse, *torch.autograd.grad(out, inputs, d_out)]


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
        found = both_passes("patches", True, skips_halves=True)
    for of, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, both_passes_dense("patches"), strict=True):
        assert relative_rmse(x, y) < 4e-3, of


# Documents of 70 and 230 tokens: queries 0 to 63 have no key from 128 on, 256 to 299 none below 64.
FIRST = 70
FIRST_KEY = (torch.arange(300) // FIRST).clamp(max=1).int() * FIRST
TRIMMED: dict[str, tuple[Mod, Mod | None, Sizes]] = {
    "window": (lambda b, h, q, kv: abs(q - kv) <= 50, None, Sizes(1, 4, 2, 300, 300, 128, 128)),
    "window, D 64": (mods.sliding_window(100), None, Sizes(2, 6, 3, 300, 300, 64, 64)),
    "window, D 192": (lambda b, h, q, kv: abs(q - kv) <= 50, None, Sizes(1, 2, 2, 300, 300, 192, 128)),
    "window and a condition": (
        lambda b, h, q, kv: (abs(q - kv) <= 60) & (FIRST_KEY[q] == FIRST_KEY[kv]), mods.softcap(9.0),
        Sizes(1, 2, 1, 300, 290, 96, 96),
    ),
    "runs": (
        lambda b, h, q, kv: FIRST_KEY[q] == FIRST_KEY[kv], None, Sizes(1, 4, 2, 300, 300, 128, 128),
    ),
    "ends of queries": (
        lambda b, h, q, kv: (kv >= FIRST_KEY[q]) & (kv <= q), None, Sizes(1, 4, 1, 300, 300, 128, 128),
    ),
    "ends, D 64": (
        lambda b, h, q, kv: (kv >= FIRST_KEY[q]) & (kv < q + 20), mods.alibi(4), Sizes(2, 4, 2, 300, 300, 64, 64),
    ),
}  # fmt: skip


FORMS_OF_TRIMMED = [
    *((name, "fused") for name in TRIMMED), ("window", "pair"), ("ends, D 64", "pair"), ("runs", "one buffer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "form"), slow_unless(lambda c: c in (("runs", "fused"), ("ends of queries", "fused")), FORMS_OF_TRIMMED)
)
def test_runs_of_partial_blocks_are_trimmed(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, score_mod, n = TRIMMED[name]
    if form == "one buffer":
        monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
    q, k, v, d_out = drawn(n)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = create_block_mask(mod, None, None, n.M, n.N, device="cpu")
    if name == "runs":
        ends = torch.where(FIRST_KEY == 0, FIRST, 300).int()
        mask._remember(trace(mod, "mask"), (EqualRuns(0, torch.stack([FIRST_KEY, ends])),))
    with deterministic(form == "pair"):
        plans = explain(*inputs, score_mod, mask, enable_gqa=True, target="sm_90").plans
        assert [plan.trims_runs for plan in plans if "dk" in plan.spec.gradients] == [True]
        out = flex_attention(*inputs, score_mod, mask, enable_gqa=True, kernel_options={"BACKEND": "HOPPER"})
        found = torch.autograd.grad(out, inputs, d_out, retain_graph=True)
        d_out[:, :, :64] = torch.nan  # of queries that no key of the second and third tile attends to
        spoiled = torch.autograd.grad(out, inputs, d_out)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    d_out = drawn(n)[3]
    dense, _ = reference.attention(*doubles, score_mod, mod)
    expected = torch.autograd.grad(dense, doubles, d_out.double())
    for of, x, y in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert relative_rmse(x, y) < 6e-3, of
    for x, y in zip(spoiled[1:], found[1:], strict=True):
        assert x[:, :, 0].isnan().all() and torch.equal(x[:, :, 128:], y[:, :, 128:])


@pytest.mark.slow
def test_weights_without_a_product_are_kept_until_dv_has_read_them() -> None:
    """The portable backward, with a score_mod that ignores the score."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.sin(0.75 * q_idx + kv_idx)

    q, k, v, d_out = drawn(Sizes(1, 1, 1, 128, 64, 16, 96))
    out = flex_attention(q, k, v.requires_grad_(), score_mod, kernel_options={"BACKEND": "TRITON"})
    wide = v.detach().double().requires_grad_()
    expected, _ = reference.attention(q, k, wide, score_mod)
    assert relative_rmse(out, expected) < 4e-3
    (dv,), (d_wide,) = torch.autograd.grad(out, v, d_out), torch.autograd.grad(expected, wide, d_out.double())
    assert relative_rmse(dv, d_wide) < 4e-3


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


ORDERS = [(seed, D, prefetches) for seed in range(3) for D in (64, 96, 128) for prefetches in (True, False)]


@pytest.mark.parametrize(("seed", "D", "prefetches"), slow_unless(lambda x: x[1] == 64 and x[0] < 2, ORDERS))
def test_warps_in_any_order(seed: int, D: int, prefetches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs take several tiles each. Any of their warps may be far ahead of the others."""
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    if not prefetches:
        monkeypatch.setattr(hopper, "_prefetches_keys", lambda plan, problem: False)
    with any_order(seed):
        check(make_call(AT, Sizes(1, 1, 1, 390, 400, D, D), None, "causal"), loose=True)


ROLES = (
    range(4),
    range(4, 8),
    range(8, 12),
    range(12, 13),
    range(13, 14),
)  # of keys, keys, queries; producer, scheduler


@pytest.mark.slow
@pytest.mark.parametrize("warps", ROLES, ids=str)
@pytest.mark.parametrize(("D", "mask"), [(64, None), (96, "document"), (128, "causal")])
def test_prefetched_keys_with_one_role_behind(
    D: int, mask: str | None, warps: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    with behind(warps):
        check(make_call(AT, Sizes(1, 2, 1, 270, 400, D, D), None, mask), loose=True)


def check_trailing_values(fixed: bool, monkeypatch: pytest.MonkeyPatch, D: int = 128, Dv: int = 128) -> None:
    """Check a forward with two buffers of keys, whose tiles of queries have one to seven tiles of keys (D 128)."""
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0 if fixed else 1 << 30)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 780, width, generator=generator).bfloat16() for width in (D, D, Dv))
    mask = create_block_mask(mods.causal, None, None, 780, 780, device="cpu")
    plan, source = (made := explain(q, k, v, None, mask, target="sm_90")).plans[0], made.sources[0]
    assert (plan.fixed_reference, plan.tile.num_stages) == (fixed, 2) and "n0_before = n0" in source.text
    out = flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "HOPPER"})
    expected, _ = reference.attention(q.double(), k.double(), v.double(), None, mods.causal)
    assert relative_rmse(out, expected) < 5e-3


@pytest.mark.parametrize("fixed", slow_unless(bool, [True, False]))
@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed == 0, range(3)))
def test_values_that_trail_in_any_order(seed: int, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with any_order(seed):
        check_trailing_values(fixed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(96, 96), (192, 128), (256, 256)], ids=str)
def test_values_of_other_head_dims_that_trail(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with any_order(0):
        check_trailing_values(True, monkeypatch, *dims)


@pytest.mark.slow
@pytest.mark.parametrize("warps", [range(4), range(4, 8), range(8, 9), range(9, 12)], ids=str)
def test_values_that_trail_with_one_role_behind(warps: range, monkeypatch: pytest.MonkeyPatch) -> None:
    with behind(warps):
        check_trailing_values(True, monkeypatch)


@pytest.mark.slow
def test_values_that_trail_and_late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in five."""
    late, copies = 0, 1
    while late < copies:
        with late_copy(late):
            check_trailing_values(True, monkeypatch)
            copies = ptx_hopper._copies
        late += 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_warps_of_two_kernels_of_the_backward_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above. In a second backward, one in five copies is late."""
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    call = make_call(AT, Sizes(1, 1, 1, 200, 270, 192, 128), None, "causal")
    with deterministic():
        with any_order(seed):
            check(call, loose=True)
        late, copies = seed, seed + 1
        while late < copies:
            with late_copy(late):
                check(call, loose=True)
                copies = ptx_hopper._copies
            late += 5


ROLES = [range(first, first + 4) for first in (0, 4, 8)]  # warps of those that compute products


@pytest.mark.parametrize(
    ("D", "warps"),
    slow_unless(lambda x: x == (192, ROLES[1]), [(256, ROLES[1]), *((D, warps) for D in (64, 192) for warps in ROLES)]),
)
def test_one_role_is_behind(D: int, warps: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be tiles ahead. Keys from 100 on have no queries, so roles pass over their tiles.

    A table gives D 192 one kernel for all gradients.
    """
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    generator = torch.Generator().manual_seed(0)
    Dv = 128 if D == 192 else D
    q, k, v = (
        torch.randn(1, 1, n, width, generator=generator).bfloat16().requires_grad_()
        for n, width in ((64, D), (384, D), (384, Dv))
    )
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (kv_idx < 100) & (kv_idx <= q_idx + 70), None, None, 64, 384)
    table = torch.randn(64, 384, generator=generator)
    score_mod = (lambda score, b, h, q_idx, kv_idx: score + table[q_idx, kv_idx]) if D == 192 else None
    kernels = {plan.spec.name for plan in explain(q, k, v, score_mod, mask, target="sm_90").plans}
    assert kernels & {"hopper_backward", "hopper_backward_wide"}

    def results() -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, score_mod, mask, kernel_options={"bwd_BACKEND": "HOPPER"})
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    expected = results()
    with behind(warps):
        found = results()
    for x, y in zip(found, expected, strict=True):
        assert relative_rmse(x, y) < 1e-3


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


@pytest.mark.parametrize("calls", slow_unless((1).__eq__, [1, 2]))
def test_lists_that_are_assigned_before_the_first_backward(calls: int) -> None:
    """The backward reads the lists of its forward, the first or a repeated one."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 384, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))

    def gradients(assigns: bool) -> tuple[Tensor, ...]:
        forget_launches()
        mask = create_block_mask(mods.causal, None, None, 384, 384, device="cpu")
        for _ in range(calls):
            out = flex_attention(q, k, v, None, mask, kernel_options={"BACKEND": "HOPPER"})
        if assigns:
            mask.q_runs = create_block_mask(mods.sliding_window(9), None, None, 384, 384, device="cpu").q_runs
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, expected)


# Grids of tokens in row-major order, computed in tiles


@dataclass(frozen=True)
class Grid:
    """A call with a mask of a grid of two tiles by two."""

    tile: tuple[int, int] = (16, 8)
    sizes: tuple[int, int, int] = (1, 1, 1)  # B, Hq and Hkv
    dims: tuple[int, int] = (64, 64)
    mask: str = "window"
    skips_halves: bool | None = None  # None: as it is chosen
    score_mod: Mod | None = None
    memory: str = "heads first"
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, int]:
        return 2 * self.tile[0], 2 * self.tile[1]

    @property
    def tokens(self) -> int:
        return self.shape[0] * self.shape[1]

    def mask_mod(self) -> Mod:
        (height, width), (rows, columns) = self.shape, self.tile

        def near(q_idx: Any, kv_idx: Any, y: Any, x: Any) -> Any:
            dy, dx = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
            return (dy.abs() <= y) & (dx.abs() <= x)

        window = mods.natten_2d(height, width, 5)
        found: dict[str, Mod] = {
            "window": window,
            "narrow window": mods.natten_2d(height, width, 3),
            "full blocks too": lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, rows, columns),
            "rows without a key": lambda b, h, q_idx, kv_idx: (
                window(b, h, q_idx, kv_idx) & (q_idx % width != 3) & (q_idx // width != 1)
            ),
            "by head": lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, h + 1, 3 - h),
            "by batch and head": lambda b, h, q_idx, kv_idx: near(q_idx, kv_idx, h + 1, 3 * b),
        }
        return found[self.mask]

    def block_mask(self, monkeypatch: pytest.MonkeyPatch) -> BlockMask:
        """Return the mask as it is built on Hopper, with this tile."""
        monkeypatch.setattr(create, "MOST_LEFT", 99.0)
        monkeypatch.setattr(token_tiles, "_TILES", (self.tile,))
        B = self.sizes[0] if "batch" in self.mask else None
        H = self.sizes[1] if "head" in self.mask else None
        built = create_block_mask(self.mask_mod(), B, H, self.tokens, self.tokens, device="cpu")
        mask = as_on_target(built, target_named("sm_90"))[0]
        assert mask.in_tiles is not None
        if self.skips_halves is not None:
            other = copy.copy(mask.in_tiles.mask)
            assert other.bits is not None
            other._bits = other.bits._replace(skips_halves=self.skips_halves)
            mask._in_tiles = InTiles(mask.in_tiles.grid, other)
        return mask

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        (B, Hq, Hkv), (D, Dv), S = self.sizes, self.dims, self.tokens
        generator = torch.Generator().manual_seed(2)
        if self.memory == "packed":
            q, k, v = torch.randn(B, S, 3, Hq, D, generator=generator).to(self.dtype).unbind(2)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k, v = (
            torch.randn(B, S, H, d, generator=generator).to(self.dtype).transpose(1, 2)
            for H, d in ((Hq, D), (Hkv, D), (Hkv, Dv))
        )
        return (q, k, v) if self.memory == "tokens first" else (q.contiguous(), k.contiguous(), v.contiguous())

    def call(self, monkeypatch: pytest.MonkeyPatch) -> Call:
        options = {"BACKEND": "HOPPER"}
        mask = self.block_mask(monkeypatch)
        return Call(*self.inputs(), self.score_mod, mask, self.mask_mod(), options=options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int] | None]:
    """Return the tile of tokens of each kernel that is launched."""
    found: dict[str, tuple[int, int] | None] = {}
    prepare = launch.prepare

    def prepared(plan: Any, *arguments: Any) -> Any:
        found[plan.spec.name] = plan.token_tile
        return prepare(plan, *arguments)

    monkeypatch.setattr(launch, "prepare", prepared)
    return found


FUSED = ("hopper_forward", "backward_delta", "hopper_backward", "backward_dq_rows")
GRIDS: dict[str, Grid] = {
    "window": Grid(),
    "8 x 16": Grid((8, 16), dims=(40, 40)),
    "32 x 4": Grid((32, 4), dims=(96, 96)),
    "4 x 32": Grid((4, 32), dims=(128, 128)),
    "other widths": Grid(dims=(40, 72)),
    "float16": Grid((8, 16), dtype=torch.float16),
    "grouped heads": Grid(sizes=(1, 2, 1)),
    "tokens first": Grid(sizes=(2, 2, 1), memory="tokens first"),
    "packed": Grid((8, 16), (2, 2, 2), memory="packed"),
    "by head": Grid(sizes=(2, 2, 1), mask="by head"),
    "by batch and head": Grid((4, 32), (2, 2, 2), (128, 128), "by batch and head"),
    "rows without a key": Grid(mask="rows without a key"),
    "full blocks too": Grid(mask="full blocks too", skips_halves=False),
    "full blocks, and halves": Grid(mask="full blocks too", skips_halves=True),
    "whole blocks": Grid(skips_halves=False),
    "halves": Grid(skips_halves=True),
    "halves, D 128": Grid((8, 16), skips_halves=True, dims=(128, 128)),
    "softcap": Grid(score_mod=mods.softcap(2.0), skips_halves=True),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "window", GRIDS))
def test_grids_in_tiles(
    name: str, launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients are row-major, as those of the reference."""
    grid = GRIDS[name]
    check(grid.call(monkeypatch), loose=True)
    assert launched == dict.fromkeys(FUSED, grid.tile)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokens first", "softcap"])
def test_grids_in_tiles_with_two_kernels_of_the_backward(
    name: str, launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is computed in tiles. The kernels of a deterministic backward read its results in row-major order."""
    with deterministic():
        check(GRIDS[name].call(monkeypatch), loose=True)
    expected = dict.fromkeys(("backward_delta", "hopper_dq", "hopper_dkdv"))
    assert launched == {"hopper_forward": GRIDS[name].tile, **expected}


@pytest.mark.slow
def test_grids_in_tiles_as_known_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call repeats the launches of the first, with other tensors and another mask of its kind."""
    grid = Grid((8, 16), (1, 2, 1), mask="by head", memory="tokens first")
    call = grid.call(monkeypatch)
    other = replace(call, query=call.query.flip(2), mask=grid.block_mask(monkeypatch))
    expected = results(other, "ours")
    forget_launches()
    first = results(call, "ours")
    assert len(repeated_calls._calls) == 1
    for stage in ("_forward", "_backward"):
        monkeypatch.setattr(triton, stage, None)
    for again, wanted in ((other, expected), (call, first)):
        for x, y in zip(results(again, "ours"), wanted, strict=True):
            assert x is not None and y is not None and torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("learned", ["k", "v", "q"])
def test_grids_in_tiles_with_one_gradient(
    learned: str, launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = replace(GRIDS["grouped heads"], tile=(8, 16))
    call = grid.call(monkeypatch)

    def gradient(attend: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        named = {name: x.detach().to(dtype) for name, x in zip("qkv", (call.query, call.key, call.value), strict=True)}
        x = named[learned].requires_grad_()
        out = attend(*named.values())
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(dtype)
        return torch.autograd.grad(out, x, d_out)[0]

    found = gradient(lambda *x: flex_attention(*x, block_mask=call.mask, enable_gqa=True), torch.bfloat16)
    exact = gradient(lambda *x: reference.attention(*x, None, call.mask_mod)[0], torch.float64)
    assert relative_rmse(found, exact) < 6e-3
    kernels = {"backward_delta": None, "hopper_dq": None}
    if learned != "q":
        kernels = dict.fromkeys(("backward_delta", "hopper_dkdv"), grid.tile)
    assert launched == {"hopper_forward": grid.tile, **kernels}


@pytest.mark.slow
@pytest.mark.parametrize("spikes", [False, True])
def test_grids_in_tiles_with_a_fixed_reference(
    spikes: bool, launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles whose sums overflow are computed again."""
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    call = GRIDS["full blocks too"].call(monkeypatch)
    if spikes:
        call.key[:, :, 40:50] *= 60
    check(call, loose=True)
    assert launched["hopper_forward"] == (16, 8)


def test_other_results_of_grids_in_tiles(
    launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row maxima are row-major too, and a sink changes only the sums."""
    grid = Grid((8, 16), (1, 2, 1), mask="rows without a key")
    mask, (q, k, v) = grid.block_mask(monkeypatch), grid.inputs()
    plain = copy.copy(mask)
    plain._in_tiles = plain._state = None
    options: dict[str, Any] = {"enable_gqa": True, "sink": torch.tensor([0.5, -1.0])}
    request = AuxRequest(lse=True, max_scores=True)
    for _ in range(2):
        out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=request, **options)
        assert launched == {"hopper_forward": grid.tile}
    expected, other = flex_attention(q, k, v, block_mask=plain, return_aux=request, **options)
    assert launched == {"hopper_forward": None}
    assert aux.lse is not None and aux.max_scores is not None
    assert other.lse is not None and other.max_scores is not None
    assert torch.equal(aux.max_scores, other.max_scores)
    assert aux.max_scores.isinf().any()
    torch.testing.assert_close(aux.lse, other.lse, rtol=1e-5, atol=1e-5)
    assert relative_rmse(out, expected) < 5e-3


def test_the_gradient_of_a_sink_of_a_grid_in_tiles(
    launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed from delta, whose rows are in the order of tiles."""
    grid = Grid((8, 16), (1, 2, 1))
    mask, inputs = grid.block_mask(monkeypatch), [x.detach().requires_grad_() for x in grid.inputs()]
    plain = copy.copy(mask)
    plain._in_tiles = plain._state = None
    sink = torch.tensor([0.5, -1.0], requires_grad=True)
    found = []
    for m in (mask, mask, plain):  # the second call repeats the launches of the first
        out = flex_attention(*inputs, block_mask=m, enable_gqa=True, sink=sink)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        found.append(torch.autograd.grad(out, (sink, *inputs), d_out))
        assert launched["hopper_backward"] == (None if m is plain else grid.tile)
    for in_tiles in found[:2]:
        for x, y in zip(in_tiles, found[2], strict=True):
            assert relative_rmse(x, y) < 5e-3


def test_a_grid_in_tiles_whose_mask_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten mask_mod reads the same captured tensor."""
    reach = torch.tensor(3)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        dy, dx = q_idx // 16 - kv_idx // 16, q_idx % 16 - kv_idx % 16
        return (dy.abs() <= reach) & (dx.abs() <= 3)

    monkeypatch.setattr(Grid, "mask_mod", lambda grid: window)
    grid = Grid()
    mask, inputs = grid.block_mask(monkeypatch), grid.inputs()
    flex_attention(*inputs, block_mask=mask)
    reach.add_(1)
    with pytest.raises(MutationError):
        flex_attention(*inputs, block_mask=mask)


@pytest.mark.slow
def test_compiled_calls_of_grids_in_tiles(
    launched: dict[str, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists in the order of tiles are arguments of the graph. The second call repeats the launches of the first."""
    torch._dynamo.reset()
    monkeypatch.setattr(operators, "engine_of", lambda problem: triton)
    monkeypatch.setattr(operators, "lse_dtype_of", lambda query, options: torch.float32)  # as on a GPU
    grid = replace(GRIDS["packed"], sizes=(2, 1, 1))
    masks = [replace(grid, mask=name).block_mask(monkeypatch) for name in ("window", "narrow window")]
    B, heads, _ = grid.sizes
    x = torch.randn(B, grid.tokens, 3, heads, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x.requires_grad_()

    def attend(x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = x.unbind(2)
        return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask)

    def both(f: Callable[..., Tensor], mask: BlockMask) -> tuple[Tensor, Tensor]:
        out = f(x, mask)
        return out.detach(), *torch.autograd.grad(out, x, out.detach() * 0.5)

    expected = [both(attend, mask) for mask in masks]
    assert launched == dict.fromkeys(FUSED, grid.tile)
    launched.clear()
    forget_launches()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for i in (0, 0, 1):
        for found, wanted in zip(both(compiled, masks[i]), expected[i], strict=True):
            assert torch.equal(found, wanted)
    assert launched == dict.fromkeys(FUSED, grid.tile)
    torch._dynamo.reset()
