"""Every shape on every card: a plan is found and fits, Triton takes what was planned and compiles it. No GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flexattn import create_block_mask, explain, mods
from flexattn.compile import kernels
from flexattn.compile.head_dims import split_head_dim
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.render import render
from flexattn.compile.shared_memory import fit, shared_bytes, units
from flexattn.compile.tile_choice import choose
from flexattn.compile.tiles import TileKey
from flexattn.errors import ArgumentError, CompileError, OptionError
from flexattn.explanation import target_named
from flexattn.machine.target import Target
from flexattn.runtime.build import build

pytest.importorskip("triton")

from allocation import allocated
from quick import slow_unless

CARDS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
S = 512
LARGEST = 512


def widths(dim: int) -> tuple[int, ...]:
    return tuple(p.width for p in split_head_dim(dim))


# The largest head dim of each way to split one: what a kernel takes depends on the parts alone.
HEAD_DIMS = tuple({widths(dim): dim for dim in range(1, LARGEST + 1)}.values())
KINDS = ((torch.float16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float32, "tf32x3"))
KERNELS = ("forward", "backward_dq", "backward_dkdv")


def fitted(kernel: str, card: str, dtype: torch.dtype, precision: str, D: int, Dv: int, aligned: bool) -> KernelPlan:
    """Return the plan that a call would get, without its tensors."""
    target = target_named(card)
    products = precision if precision != "ieee" else str(dtype).removeprefix("torch.")
    key = TileKey(kernel, products, D, Dv, "none" if aligned else "unaligned", True)
    tma = aligned and card in ("sm_90", "sm_100", "sm_120")
    tile = choose(key, target).tile
    return fit(KernelPlan(kernels.KERNELS[kernel], target, dtype, D, Dv, tile, aligned, tma, precision=precision))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
def test_every_head_dim_has_a_plan(machine, card: str, dtype: torch.dtype, precision: str):
    target = target_named(card)
    if precision not in target.precisions:
        pytest.skip(f"{card} has no {precision}")
    for D in HEAD_DIMS:
        for Dv in (16, 64, 128, D, LARGEST):
            for kernel in KERNELS:
                if card == "sm_75" and dtype == torch.float32 and kernel != "forward" and D + Dv > 640:
                    continue  # 8 rows of each tile are 64 KB: test_what_no_plan_holds
                for aligned in (True, False):
                    plan = fitted(kernel, card, dtype, precision, D, Dv, aligned)
                    assert shared_bytes(plan) <= target.shared_memory
                    assert plan.precision in (precision, "ieee")
    fitted("forward", card, dtype, precision, 576, 512, True)  # MLA


def test_what_no_plan_holds(machine):
    with pytest.raises(CompileError, match=r"head dims: found D 512, Dv 512 in torch.float32.*sm_75"):
        fitted("backward_dq", "sm_75", torch.float32, "ieee", 512, 512, True)


def test_tf32_gives_way_to_exact_products_where_it_does_not_fit(machine):
    assert fitted("backward_dkdv", "sm_80", torch.float32, "tf32", 512, 512, True).precision == "tf32"
    assert fitted("backward_dkdv", "sm_86", torch.float32, "tf32", 512, 512, True).precision == "ieee"


# What Triton allocates


def sources(
    card: str, dtype: torch.dtype, D: int, Dv: int, work: str, precision: str
) -> Iterator[tuple[KernelPlan, KernelSource]]:
    """Yield the plans of the Triton engine for a training step, and their sources."""
    q, k, v = (torch.zeros(1, 2, S, d, dtype=dtype, requires_grad=True) for d in (D, D, Dv))
    bias, table = torch.zeros(2, S, S), torch.zeros(2, 2 * S + 1, requires_grad=True)
    scores = {
        "bias": lambda s, b, h, q_idx, kv_idx: s + bias[h, q_idx, kv_idx],
        "relative": mods.relative_bias(table), "softcap": mods.softcap(20.0),
    }  # fmt: skip
    mask = None if work == "bias" else create_block_mask(mods.causal, None, None, S, S, device="cpu")
    options = {"BACKEND": "TRITON", "FLOAT32_PRECISION": precision}
    made = explain(q, k, v, scores.get(work), mask, target=card, kernel_options=options)
    yield from zip(made.plans, made.sources, strict=True)


def works() -> Iterator[tuple[str, torch.dtype, int, int, str, str]]:
    half, full = torch.float16, torch.float32
    yield "sm_75", half, 128, 128, "causal", "ieee"
    yield "sm_75", torch.bfloat16, 40, 40, "causal", "ieee"
    yield "sm_80", half, 256, 256, "causal", "ieee"
    yield "sm_80", half, 512, 512, "causal", "ieee"
    yield "sm_80", full, 64, 64, "causal", "tf32"
    yield "sm_86", half, 192, 128, "softcap", "ieee"
    yield "sm_86", full, 512, 512, "causal", "ieee"
    yield "sm_86", half, 64, 64, "bias", "ieee"
    yield "sm_86", full, 64, 64, "relative", "ieee"
    yield "sm_75", full, 64, 64, "bias", "ieee"
    yield "sm_80", half, 257, 33, "bias", "ieee"
    yield "sm_89", half, 96, 96, "relative", "ieee"
    yield "sm_90", half, 33, 130, "causal", "ieee"
    yield "sm_90", full, 128, 128, "causal", "ieee"
    yield "sm_100", half, 128, 128, "causal", "ieee"
    yield "sm_100", full, 64, 64, "causal", "tf32"
    yield "sm_120", half, 80, 80, "causal", "ieee"
    yield "gfx942", half, 512, 512, "causal", "ieee"
    yield "sm_89", full, 16, 16, "relative", "tf32"
    yield "gfx942", full, 64, 64, "relative", "tf32"
    yield "gfx942", full, 192, 128, "relative", "ieee"
    yield "gfx942", half, 65, 65, "relative", "ieee"
    yield "gfx950", half, 128, 128, "causal", "ieee"
    yield "gfx950", full, 192, 128, "bias", "ieee"


@pytest.mark.parametrize(("card", "dtype", "D", "Dv", "work", "precision"), list(works()), ids=str)
def test_plans_take_what_triton_allocates(card: str, dtype: torch.dtype, D: int, Dv: int, work: str, precision: str):
    for plan, source in sources(card, dtype, D, Dv, work, precision):
        taken = allocated(source, plan.target)
        assert taken <= shared_bytes(plan) <= plan.target.shared_memory, f"{plan}\ntakes {taken}"
        if plan.dtype.itemsize == 4 and plan.spec.name != "backward_delta":
            assert plan.precision == precision or plan.D == LARGEST
        assert shared_bytes(plan) <= 1.1 * taken, f"{plan}\ntakes {taken}"


@pytest.mark.parametrize(("card", "D"), [("sm_80", 64), ("sm_86", 256), ("sm_90", 64), ("sm_100", 64), ("gfx942", 64)])
def test_dropout(card: str, D: int):
    """Its numbers are made where they are needed on NVIDIA's cards before sm_100; elsewhere they are exchanged."""
    for plan, _ in sources(card, torch.float16, D, D, "causal", "ieee"):
        if plan.spec.name in KERNELS:
            plan = fit(replace(plan, features=("dropout",)))
            taken = allocated(render(plan), plan.target)
            assert taken <= shared_bytes(plan) <= 1.1 * taken, f"{plan} takes {taken}"


@pytest.mark.parametrize("card", ["sm_86", "sm_90", "gfx942"])
def test_forward_of_mla(card: str):
    q, v = torch.zeros(1, 2, S, 576, dtype=torch.bfloat16), torch.zeros(1, 2, S, 512, dtype=torch.bfloat16)
    made = explain(q, q, v, target=card)
    plan = made.plans[0]
    assert (plan.D, plan.Dv) == (576, 512)
    assert allocated(made.sources[0], plan.target) <= shared_bytes(plan) <= plan.target.shared_memory


# Binaries


@pytest.mark.parametrize(
    ("card", "dtype", "D", "precision"),
    slow_unless(lambda card: card[0] == "sm_80", [
        ("sm_75", torch.float16, 64, "ieee"), ("sm_75", torch.float16, 128, "ieee"),
        ("sm_80", torch.float32, 96, "tf32"),
        ("sm_86", torch.bfloat16, 128, "ieee"), ("sm_100", torch.bfloat16, 64, "ieee"),
        ("gfx942", torch.bfloat16, 64, "ieee"),
    ]),
    ids=str,
)  # fmt: skip
def test_binaries(card: str, dtype: torch.dtype, D: int, precision: str):
    """Forward and backward, assembled and linked as for a card of the user's."""
    for plan, source in sources(card, dtype, D, D, "causal", precision):
        kernel = build(source, plan.target)
        binary = kernel.path.with_suffix(".hsaco" if plan.target.backend == "hip" else ".cubin")
        assert binary.stat().st_size > 1000
        assert kernel.target == plan.target and not plan.is_hopper
        assert kernel.shared <= shared_bytes(plan) <= plan.target.shared_memory


# What cards have


def test_waves():
    assert [target_named(name).warp_size for name in ("sm_75", "gfx90a", "gfx942", "gfx950", "gfx1100")] == [
        32, 64, 64, 64, 32,
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="target: found 'gfx'"):
        target_named("gfx")


@pytest.mark.parametrize("card", ["sm_75", "gfx942"])
def test_cards_without_tma(card: str):
    q = torch.zeros(1, 2, S, 64, dtype=torch.float16, requires_grad=True)
    made = explain(q, q, q, target=card)
    assert not any(plan.tma or plan.is_hopper for plan in made.plans)
    assert {units(plan) for plan in made.plans if plan.spec.name in KERNELS} == {"fma" if card == "sm_75" else "mfma"}


def test_tiles_of_cards_without_matrix_units_are_those_of_float32(machine):
    for kernel in KERNELS:
        half, full = (TileKey(kernel, dtype, 64, 64, "none", True) for dtype in ("float16", "float32"))
        assert choose(half, Target("cuda", 75, 32)) == choose(full, Target("cuda", 75, 32))
        assert choose(half, Target("cuda", 80, 32)) != choose(full, Target("cuda", 80, 32))


def test_tf32_of_cards_that_have_none():
    q = torch.zeros(1, 2, S, 64)
    match = r"kernel_options\['FLOAT32_PRECISION'\]: found 'tf32', expected one that gfx950 has.*ieee"
    with pytest.raises(OptionError, match=match):
        explain(q, q, q, target="gfx950", kernel_options={"FLOAT32_PRECISION": "tf32"})
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        precisions = {card: explain(q, q, q, target=card).plans[0].precision for card in ("gfx950", "gfx942", "sm_80")}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert precisions == {"gfx950": "ieee", "gfx942": "tf32", "sm_80": "tf32"}
