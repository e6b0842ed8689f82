"""plan: the tiles and parts of a kernel, shared memory limits, and that the source depends only on the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from expecttest import TestCase

from flexattn import create_block_mask, explain, mods
from flexattn.compile import hopper
from flexattn.compile.head_dims import split_head_dim
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernels import DELTA, DKDV, DQ, FORWARD, FORWARD_SPLIT
from flexattn.compile.render import render
from flexattn.compile.shared_memory import fit, shared_bytes, smaller_tiles, units
from flexattn.compile.tiles import Tile
from flexattn.errors import CompileError
from flexattn.machine.target import Target
from flexattn.runtime.build import digest

pytest.importorskip("triton")

SM90 = Target("cuda", 90, 32)


def plans_of(
    M: int = 256, N: int = 256, *, B: int = 1, D: int = 64, dtype: torch.dtype = torch.float16, slopes: float = 0.5,
    width: int = 7, scale: float | None = None, spread: int = 0, block: int = 128, cap: float = 20.0, **options: object,
) -> tuple[KernelPlan, ...]:  # fmt: skip
    """Return the plans of a call with a captured tensor, a number and a mask."""
    table = torch.full((4,), slopes, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap) + table[h] * (kv_idx - q_idx)

    q, k, v = (torch.zeros(B, 4, n, D + spread, dtype=dtype)[..., :D].requires_grad_() for n in (M, N, N))
    mask = create_block_mask(mods.sliding_window(width), None, None, M, N, device="cpu", BLOCK_SIZE=block)
    options = {"BACKEND": "TRITON", **options}
    return explain(q, k, v, score_mod, mask, scale, target="sm_90", kernel_options=options).plans


def test_parts_cover_the_head_dim():
    for dim in range(1, 1025):
        parts = split_head_dim(dim)
        assert [p.index for p in parts] == list(range(len(parts)))
        ends = [0, *(p.offset + p.used for p in parts)]
        assert [p.offset for p in parts] == ends[:-1] and ends[-1] == dim, "slices follow each other without a gap"
        for p in parts:
            assert p.width >= 16 and p.width & (p.width - 1) == 0 and 0 < p.used <= p.width
        assert all(p.used == p.width for p in parts[:-1]), "padding is at the end only"
        padded = max(16, 1 << (dim - 1).bit_length())
        assert sum(p.width for p in parts) <= padded
        assert len(parts) == 1 or sum(p.width for p in parts) < padded, "two parts only where they are smaller"


@pytest.mark.parametrize(
    ("dim", "widths"),
    [(192, [128, 64]), (96, [64, 32]), (80, [64, 16]), (72, [64, 16]), (128, [128]), (120, [128]), (1, [16])],
)
def test_parts(dim: int, widths: list[int]):
    assert [p.width for p in split_head_dim(dim)] == widths


@dataclass(frozen=True)
class Limited(Target):
    """A device with some amount of shared memory."""

    limit: int = 0

    @property
    def shared_memory(self) -> int:
        return self.limit


@pytest.mark.parametrize("kilobytes", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_plans_step_down_until_they_fit(kilobytes: int, dtype: torch.dtype):
    target = Limited("cuda", 90, 32, kilobytes << 10)
    for D in (16, 33, 64, 96, 128, 192, 256, 320, 512):
        for kernel in (FORWARD, DELTA, DQ, DKDV):
            wanted = KernelPlan(kernel, target, dtype, D, D, Tile(128, 128, 8, 4, 64), aligned=True)
            smallest = list(smaller_tiles(wanted))[-1]
            own = "BLOCK_N" if smallest.transposed else "BLOCK_M"
            least = {"BLOCK_M": 16, "BLOCK_N": 16} | ({own: 8} if units(smallest) == "fma" else {})
            assert {name: getattr(smallest.tile, name) for name in least} == least
            if shared_bytes(smallest) > target.shared_memory:
                assert D > 128, "what people use runs everywhere"
                with pytest.raises(CompileError, match=f"head dims: found D {D}, Dv {D} in {dtype}"):
                    fit(wanted)
                continue
            plan = fit(wanted)
            assert shared_bytes(plan) <= target.shared_memory
            larger = [p for p in smaller_tiles(wanted) if shared_bytes(p) > target.shared_memory]
            assert plan == wanted or larger, "nothing is given up without need"
            assert plan.tile.partial_m <= plan.tile.BLOCK_M


def test_hopper_kernels_have_a_tile_for_each_of_their_widths():
    fused = (hopper._FUSED, hopper._FUSED_STRIPES, hopper._FUSED_WIDE)
    for form in (*hopper.FORMS.values(), *fused):
        assert tuple(form.tiles) == form.spec.widths
        assert set(form.half_tiles) <= set(form.spec.widths)


def test_smaller_tiles_only_become_smaller():
    wanted = KernelPlan(DKDV, SM90, torch.float16, 128, 128, Tile(64, 128, 4, 3, 32), aligned=True)
    tiles = [p.tile for p in smaller_tiles(wanted)]
    assert tiles[0] == wanted.tile and len(set(tiles)) == len(tiles)
    sizes = [shared_bytes(p) for p in smaller_tiles(wanted)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(16 <= t.partial_m <= t.BLOCK_M for t in tiles)


def test_hopper_kernels_have_no_smaller_tiles():
    """With one stage, hopper_forward waits for keys whose buffer is not free."""
    plan = plans_of(fwd_BACKEND="HOPPER", dtype=torch.bfloat16)[0]
    assert plan.spec.gluon and list(smaller_tiles(plan)) == [plan]
    small = replace(plan, target=Limited("cuda", 90, 32, shared_bytes(plan) - 1))
    with pytest.raises(CompileError, match="expected ones that fit"):
        fit(small)


def test_every_field_is_in_the_key():
    """Two plans that differ give kernels that differ."""
    forward, delta, dq, dkdv = plans_of()
    gluon = plans_of(fwd_BACKEND="HOPPER", dtype=torch.bfloat16)[0]
    q = torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    fused = explain(q, q, q, target="sm_90", kernel_options={"BACKEND": "HOPPER"}).plans[2]
    mod, mask = forward.score, forward.mask
    assert mod is not None and mask is not None
    changes: dict[str, tuple[KernelPlan, object]] = {
        "spec": (dq, DKDV), "target": (forward, Target("cuda", 80, 32)),
        "dtype": (forward, torch.bfloat16), "D": (forward, 128), "Dv": (forward, 40),
        "tile": (forward, replace(forward.tile, num_stages=1)),
        "aligned": (dkdv, False), "tma": (forward, False), "wide_rows": (replace(forward, tma=False), True),
        "score": (forward, replace(mod, numbers=("i64",))), "grad": (dq, None), "mask": (forward, None),
        "blocks": (forward, (64, 64)), "full_overhangs": (forward, True),
        "page_size": (replace(forward, tma=False), 16), "float_index": (forward, False),
        "precision": (forward, "tf32"), "exact": (forward, True), "features": (forward, ("sink",)),
        "intervals": (replace(forward, spec=FORWARD_SPLIT, tma=False, blocks=None), True),
        "integer_sums": (dq, True), "batch_invariant": (dq, True),
        "fixed_reference": (gluon, True), "token_tile": (gluon, (16, 8)),
        "prefetches_keys": (fused, False), "trims_runs": (fused, True),
    }  # fmt: skip
    assert changes.keys() == {f.name for f in fields(KernelPlan)}
    for name, (plan, value) in changes.items():
        assert getattr(plan, name) != value, name
        other = replace(plan, **{name: value})
        assert digest(render(plan), plan.target) != digest(render(other), other.target), name
    for plan in (forward, delta, dkdv):
        for feature in plan.spec.features:
            plan, other = replace(plan, features=()), replace(plan, features=(feature.name,))
            assert digest(render(plan), plan.target) != digest(render(other), other.target), feature.name
    for field in fields(Tile):
        value = {"PRODUCTS_FIRST": not dkdv.tile.PRODUCTS_FIRST}.get(field.name, 16)
        other = replace(dkdv, tile=replace(dkdv.tile, **{field.name: value}))
        assert digest(render(dkdv), SM90) != digest(render(other), SM90), field.name


@pytest.mark.parametrize(
    "change",
    [
        {"M": 300, "N": 1000}, {"M": 1, "N": 17}, {"B": 5}, {"slopes": 3.0}, {"width": 1000}, {"scale": -0.3},
        {"cap": 7.5}, {"spread": 64}, {"spread": 8},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_only_known_at_run_time_changes_no_plan(change: dict):
    assert plans_of(**change) == plans_of()


@pytest.mark.parametrize(
    "change",
    [{"D": 32}, {"dtype": torch.bfloat16}, {"block": 64}, {"spread": 1}, {"EXACT": True}, {"num_stages": 1}],
    ids=str,
)
def test_what_changes_the_source_changes_the_plan(change: dict):
    assert all(a != b for a, b in zip(plans_of(**change), plans_of(), strict=True) if a.spec.name == "forward")


def test_tiles_of_the_user():
    options = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 64, "BLOCK_N2": 16}
    forward, _, dq, dkdv = plans_of(**options, num_warps=2, bwd_num_stages=1)
    assert [(p.tile.BLOCK_M, p.tile.BLOCK_N) for p in (forward, dq, dkdv)] == [(32, 16), (64, 16), (16, 32)]
    assert {p.tile.num_warps for p in (forward, dq, dkdv)} == {2}
    assert dq.tile.num_stages == dkdv.tile.num_stages == 1


def test_alignment_and_tma():
    assert all(p.aligned for p in plans_of()) and plans_of()[0].tma
    plain = plans_of(USE_TMA=False)
    assert not any(p.tma for p in plain) and plain[0].aligned
    odd = plans_of(D=40, spread=1)
    assert not odd[0].aligned and not odd[0].tma
    forward = explain(*[torch.zeros(1, 4, 128, 64, dtype=torch.float16)] * 3, target="sm_80").plans[0]
    assert forward.aligned and not forward.tma


TABLE = mods.relative_bias(torch.zeros(4, 9, requires_grad=True))
FIXED = mods.relative_bias(torch.zeros(4, 9))


@pytest.mark.parametrize(
    ("score", "deterministic", "target", "kernels"),
    [
        (mods.softcap(20.0), False, "sm_90", ["hopper_backward", "backward_dq_rows"]),
        (mods.softcap(20.0), True, "sm_90", ["hopper_dq", "hopper_dkdv"]),
        (mods.softcap(20.0), False, "sm_80", ["backward_dq", "backward_dkdv"]),
        (mods.head_gate(torch.zeros(4, requires_grad=True)), False, "sm_90", ["backward_dq", "hopper_dkdv"]),
        (TABLE, True, "sm_90", ["backward_dq", "backward_dkdv"]),
        (FIXED, False, "sm_90", ["hopper_backward", "backward_dq_rows"]),
        (FIXED, True, "sm_90", ["backward_dq", "backward_dkdv"]),
        (
            mods.head_gate(torch.zeros(4, requires_grad=True)), True, "sm_80",
            ["backward_sizes", "backward_dq", "backward_dkdv"],
        ),
    ],
    ids=["any order", "deterministic", "no Hopper", "captures", "bounded", "table", "table, pair", "measured"],
)  # fmt: skip
def test_what_follows_delta(score: Callable[..., object], deterministic: bool, target: str, kernels: list[str]):
    q = torch.zeros(1, 4, 256, 64, dtype=torch.float16, requires_grad=True)
    torch.use_deterministic_algorithms(deterministic)
    try:
        made = explain(q, q, q, score, target=target)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [plan.spec.name for plan in made.plans[2:]] == kernels
    hopper = [plan.is_hopper or plan.spec.name == "backward_dq_rows" for plan in made.plans[2:]]
    assert [reason is None for reason in made.reasons[2:]] == hopper


class Goldens(TestCase):
    def test_repr(self):
        q = torch.zeros(1, 4, 256, 64, dtype=torch.float16)
        mask = create_block_mask(mods.causal, None, None, 256, 256, device="cpu")
        forward = replace(explain(q, q, q, None, mask, target="sm_90").plans[0], tile=Tile(64, 128, 4, 3))
        self.assertExpectedInline(
            repr(forward).rpartition("/")[0].rpartition("  ")[0],
            """\
KernelPlan hopper_forward_causal
    target   sm_90
    dtype    float16  D 64  Dv 64  aligned  tma
    tile     BLOCK_M 64  BLOCK_N 128  warps 4  stages 3
    blocks   128 x 128
    mask     causal""",
        )
