"""The default plans as sm_90 binaries, made without a GPU: spills, registers, wgmma, shared memory."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mask_cases import make_mask, plan_of

from flexattn import create_block_mask, explain, mods
from flexattn.compile import fixed_reference, hopper
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.shared_memory import shared_bytes
from flexattn.graph.equal_runs import EqualRuns
from flexattn.machine import triton_versions
from flexattn.machine.target import Target
from flexattn.mask_build import create
from flexattn.mask_build.kernels import levels_source, list_sources, small_lists_source, table_source
from flexattn.runtime.build import build
from flexattn.runtime.compiler import request_of
from flexattn.trace.trace import trace

pytest.importorskip("triton")

from quick import slow_unless
from sm90 import SM90, Report, report
from uniform_registers import read_before_written

S = 512
WORKS = (
    "causal 64", "full 128", "causal 128", "causal 256", "causal 192/128",
    "softcap causal 128", "alibi causal 128", "relative 64", "document 128",
)  # fmt: skip
QUICK = ("causal 64", "relative 64")
KERNELS = ("forward", "backward_dq", "backward_dkdv")
# Bytes that a kernel may spill, those of today rounded up; 0 where nothing is said.
SPILLS = {
    ("causal 256", "backward_dq"): 150, ("causal 256", "backward_dkdv"): 530,
    ("causal 192/128", "backward_dkdv"): 120, ("softcap causal 128", "backward_dkdv"): 160,
    ("alibi causal 128", "backward_dkdv"): 180, ("document 128", "backward_dkdv"): 140,
}  # fmt: skip
# ptxas' notes on wgmma: C7517 inserts a wait and costs nothing measurable, the others give one product after the other.
HARMLESS, SERIALISED = {"C7517"}, {"causal 256"}


@cache
def sources(
    work: str,
    backend: str = "TRITON",
    deterministic: bool = False,
    invariant: bool = False,
    prefetches: bool = True,
) -> tuple[tuple[KernelPlan, KernelSource], ...]:
    """Return the plans and sources of a work in bfloat16, as a training step has them."""
    *kinds, dims = work.split()
    D, Dv = (int(d) for d in (dims.split("/") * 2)[:2])
    q, k, v = (torch.zeros(1, 4, S, d, dtype=torch.bfloat16, requires_grad=True) for d in (D, D, Dv))
    table = torch.zeros(4, 2 * S + 1, requires_grad=True)
    gate = lambda s, b, h, q_idx, kv_idx: s * torch.sigmoid(table)[h, kv_idx]  # noqa: E731
    scores = {
        "softcap": mods.softcap(30.0), "alibi": mods.alibi(4), "relative": mods.relative_bias(table), "gate": gate,
        "table": mods.relative_bias(table.detach()),
    }  # fmt: skip
    ends = torch.arange(S, dtype=torch.int32)
    masks = {
        "causal": mods.causal, "document": mods.document_causal((torch.arange(S) // 100).int()),
        "ends": lambda b, h, q_idx, kv_idx: (kv_idx < ends[q_idx]) & (kv_idx >= ends[q_idx] - 99),
        "grid": mods.natten_2d(32, 16, 5), "window": lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= 50,
    }  # fmt: skip
    score_mod = next((scores[kind] for kind in kinds if kind in scores), None)
    mask_mod = next((masks[kind] for kind in kinds if kind in masks), None)
    mask = mask_mod and create_block_mask(mask_mod, None, None, S, S, device="cpu")
    if mask and "runs" in kinds:  # as a GPU finds them when it builds the mask
        ids = (torch.arange(S) // 100 * 100).int()
        mask._remember(trace(mask_mod, "mask"), (EqualRuns(0, torch.stack([ids, ids + 100])),))
    options = {"fwd_BACKEND": backend, "bwd_BACKEND": "TRITON" if backend == "TRITON" else "AUTO"}
    options |= {"BATCH_INVARIANT": True} if invariant else {}
    torch.use_deterministic_algorithms(deterministic)
    try:
        # A small grid has more blocks in tiles.
        with patch.object(create, "MOST_LEFT", 99.0), nullcontext() if prefetches else one_buffer_of_keys():
            made = explain(q, k, v, score_mod, mask, target="sm_90", kernel_options=options)
    finally:
        torch.use_deterministic_algorithms(False)
    return tuple(zip(made.plans, made.sources, strict=True))


def one_buffer_of_keys() -> Any:
    return patch.object(hopper, "_prefetches_keys", lambda plan, problem: False)


@cache
def compiled(work: str, kernel: str) -> tuple[KernelPlan, Report]:
    plan, source = next(pair for pair in sources(work) if pair[0].spec.name == kernel)
    return plan, report(source)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "work", slow_unless(QUICK.__contains__, [w for w in WORKS if w not in ("full 128", "causal 128")])
)
def test_triton_engine(work: str, kernel: str) -> None:
    plan, found = compiled(work, kernel)
    assert found.sass["HGMMA"] > 0, "products run on warpgroups"
    assert found.sass["UTMALDG"] > 0 or not plan.tma, "tiles come through TMA"
    assert 0 < found.registers <= 255
    assert found.spill_bytes <= SPILLS.get((work, kernel), 0)
    warnings = {code for line in found.warnings for code in re.findall(r"C75\d\d", line)}
    assert warnings <= HARMLESS or work in SERIALISED, f"ptxas warns: {found.warnings}"
    # The estimate decides whether a tile is tried: never too low, and not so high that it would cost a tile.
    assert found.shared_bytes <= shared_bytes(plan) <= 1.1 * found.shared_bytes


# Bytes that kernels with integer sums of captured gradients may spill: those of today, rounded up.
INTEGER_SUMS = {("relative 64", "backward_dq"): 16, ("gate causal 128", "backward_dq"): 200}


@pytest.mark.parametrize(
    ("work", "kernel"),
    slow_unless(lambda x: x[0] in QUICK, [*INTEGER_SUMS, ("gate causal 128", "backward_sizes")]),
    ids=lambda x: x,
)  # fmt: skip
def test_deterministic_captured_gradients(work: str, kernel: str) -> None:
    plan, source = next(pair for pair in sources(work, deterministic=True) if pair[0].spec.name == kernel)
    assert plan.sums == ("sizes" if kernel == "backward_sizes" else "integer")
    found = report(source)
    assert found.sass["HGMMA"] > 0 and found.sass["UTMALDG"] > 0
    assert found.spill_bytes <= INTEGER_SUMS.get((work, kernel), 0)
    assert found.shared_bytes <= shared_bytes(plan)


# Bytes that Gluon kernels may spill, as above; ptxas' warnings (serialised products) are never right there.
GLUON = {
    ("document runs 128", "hopper_forward"): 32, ("document 128", "hopper_forward"): 50,
    ("full 128", "hopper_backward"): 24, ("causal 128", "hopper_backward"): 24,
    ("softcap causal 128", "hopper_backward"): 160, ("alibi causal 128", "hopper_backward"): 160,
    ("document 128", "hopper_backward"): 300, ("document runs 128", "hopper_backward"): 80,
    ("causal 256", "hopper_backward_wide"): 100, ("ends 256", "hopper_backward_wide"): 130,
    ("ends 128", "hopper_backward"): 140, ("ends 64", "hopper_backward"): 48,
    ("causal 64", "hopper_backward"): 16, ("causal 96", "hopper_backward"): 16,
    ("alibi causal 128", "hopper_dkdv"): 120, ("document runs 128", "hopper_dkdv"): 110,
    ("causal 192/128", "hopper_dq"): 16, ("causal 192/128", "hopper_dkdv"): 320,
    ("softcap causal 192/128", "hopper_dq"): 16, ("softcap causal 192/128", "hopper_dkdv"): 680,
    ("grid 128", "hopper_backward"): 48, ("grid 64", "hopper_forward"): 8, ("grid 64", "hopper_backward"): 24,
    ("window 128", "hopper_backward"): 56,
    ("table 192/128", "hopper_backward_wide"): 108,  # most of it in the roles with 24 registers
}  # fmt: skip
ON_HOPPER = [w for w in (*WORKS, "document runs 128") if w not in ("relative 64", "document 128")]
FORWARDS = [(w, "hopper_forward") for w in (*ON_HOPPER, "document 128") if w != "alibi causal 128"]
BACKWARDS = [
    (w, "hopper_backward_wide" if w.endswith("256") else "hopper_backward")
    for w in (*ON_HOPPER, "document 128")
    if not w.endswith("192/128")
]
# Each kernel of the pair with a mask, with and without a score_mod, at either width; test_batch_invariant has none.
PAIRED = (
    "alibi causal 128", "document runs 128", "softcap causal 64", "causal 96", "causal 192/128",
    "softcap causal 192/128",
)  # fmt: skip
INVARIANT = [("causal 128", "hopper_forward"), ("full 128", "hopper_dq")]
QUICK_GLUON = [
    ("causal 64", "hopper_forward"), ("causal 64", "hopper_backward"), ("causal 256", "hopper_backward_wide"),
    ("softcap causal 64", "hopper_dq"), ("softcap causal 64", "hopper_dkdv"),
]  # fmt: skip
PAIRS = [(w, k) for w in PAIRED for k in ("hopper_dq", "hopper_dkdv")]
PARTS = [("causal 96", "hopper_forward"), ("causal 96", "hopper_backward")]
IN_TILES = [(f"grid {D}", f"hopper_{kernel}") for D in (64, 128) for kernel in ("forward", "backward")]
TABLES = [("table 192/128", "hopper_backward_wide")]
ENDS = [
    ("ends 128", "hopper_backward"), ("ends 64", "hopper_backward"), ("ends 256", "hopper_backward_wide"),
    ("window 128", "hopper_backward"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("work", "kernel"),
    slow_unless(QUICK_GLUON.__contains__, [*FORWARDS, *BACKWARDS, *PARTS, *PAIRS, *TABLES, *ENDS, *IN_TILES]),
)
def test_gluon(work: str, kernel: str) -> None:
    made = sources(work, "AUTO" if "table" in work else "HOPPER", deterministic=(work, kernel) in PAIRS)
    plan, source = next(pair for pair in made if pair[0].spec.name == kernel)
    found = report(source)
    assert plan.token_tile == ((16, 8) if "grid" in work else None)
    assert found.sass["HGMMA"] > 0 and found.sass["UTMALDG"] > 0
    assert found.spill_bytes <= GLUON.get((work, kernel), 0)
    assert not found.warnings, "products are not serialised, registers are given out"
    assert read_before_written(found.sass_text) == []
    assert 0.95 * shared_bytes(plan) <= found.shared_bytes <= shared_bytes(plan)


# The backward with one buffer of keys. What is the same in all steps is kept between tiles of keys.
ONE_BUFFER = {
    "full 128": 160, "causal 128": 160, "softcap causal 128": 460, "alibi causal 128": 250, "document 128": 420,
    "document runs 128": 210, "ends 128": 200, "ends 64": 172, "window 128": 176, "causal 64": 124, "causal 96": 56,
    "grid 128": 180, "grid 64": 8,
}  # fmt: skip


@pytest.mark.parametrize("work", slow_unless(("causal 64",).__contains__, ONE_BUFFER))
def test_backward_with_one_buffer_of_keys(work: str) -> None:
    made = sources(work, "HOPPER", prefetches=False)
    plan, source = next(pair for pair in made if pair[0].spec.name == "hopper_backward")
    found = report(source)
    assert not plan.prefetches_keys
    assert found.spill_bytes <= ONE_BUFFER[work]
    assert not found.warnings, "products are not serialised, registers are given out"
    assert read_before_written(found.sass_text) == []
    assert 0.95 * shared_bytes(plan) <= found.shared_bytes <= shared_bytes(plan)


# The forward with a fixed reference spills numbers of a tile of queries, outside of its inner loops.
# Weights in float32 take 32 registers more at D 128, and are faster.
FIXED_REFERENCE = {
    "full 128": 44, "causal 128": 140, "softcap causal 128": 200, "document 128": 160, "document runs 128": 200,
}  # fmt: skip


@pytest.mark.parametrize("work", slow_unless(("causal 64",).__contains__, [work for work, _ in FORWARDS]))
def test_fixed_reference(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_reference, "_FEWEST_KEYS", 0)
    plan, source = sources.__wrapped__(work, "HOPPER")[0]
    found = report(source)
    assert plan.fixed_reference and found.sass["HGMMA"] > 0
    assert found.spill_bytes <= FIXED_REFERENCE.get(work, 24)
    assert not found.warnings, "products are not serialised, registers are given out"
    assert read_before_written(found.sass_text) == []
    assert 0.95 * shared_bytes(plan) <= found.shared_bytes <= shared_bytes(plan)


def test_latent_keys() -> None:
    q, k = (torch.zeros(2, H, n, 576, dtype=torch.bfloat16) for H, n in ((128, 1), (1, 8192)))
    used = torch.full((2,), 8192, dtype=torch.int32)
    for lengths in (None, used):
        made = explain(q, k, k[..., :512], enable_gqa=True, seqused_k=lengths, target="sm_90")
        assert [plan.spec.name for plan in made.plans if plan.is_forward] == ["hopper_latent", "merge_splits"]
        found = report(made.sources[0])
        assert found.sass["HGMMA"] > 0 and found.sass["UTMALDG"] > 0
        assert found.spill_bytes == 0 and not found.warnings
        assert 0.95 * shared_bytes(made.plans[0]) <= found.shared_bytes <= shared_bytes(made.plans[0])
    apart = explain(q, k, k[..., :512].clone(), enable_gqa=True, target="sm_90")
    assert apart.plans[0].spec.name == "forward_split" and "first 512 of 576 columns" in str(apart)
    other = explain(q[..., :64], k[..., :64], k[..., :64], enable_gqa=True, target="sm_90")
    assert other.plans[0].spec.name == "forward_split" and "first 512" not in str(other), "it is the best form"


@pytest.mark.parametrize(("M", "page"), slow_unless(lambda x: x == (1, 0), [(1, 0), (16, 0), (1, 16), (16, 128)]))
def test_short_queries_with_a_window(M: int, page: int) -> None:
    """There is one loop, which spills nothing. With block lists there are three, and 16 queries spill 216 bytes."""
    q, k = torch.zeros(2, 8, M, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 4096, 128, dtype=torch.bfloat16)
    mask = create_block_mask(mods.sliding_window(1000), None, None, 4096, 4096, device="cpu")
    given = {"q_offsets": torch.zeros(2, dtype=torch.int32), "seqused_k": torch.full((2,), 4096, dtype=torch.int32)}
    if page:
        k = k.new_zeros(8192 // page, page, 2, 128)
        given["block_table"] = torch.zeros(2, 4096 // page, dtype=torch.int32)
    made = explain(q, k, k, None, mask, enable_gqa=True, target="sm_90", **given)
    plan, found = made.plans[0], report(made.sources[0])
    assert plan.spec.name == "forward_split" and plan.intervals
    assert found.spill_bytes == 0 and not found.warnings and found.sass["LDGSTS"] > 0
    assert found.shared_bytes <= shared_bytes(plan)


@pytest.mark.parametrize(("work", "kernel"), slow_unless(lambda x: x[0] == "full 128", INVARIANT))
def test_batch_invariant(work: str, kernel: str) -> None:
    """Only the exponent, which uses an explicit fma, is fused. The tiles do not change."""
    made = sources(work, "HOPPER", invariant=True)
    plan, source = next(pair for pair in made if pair[0].spec.name == kernel)
    found = report(source)
    assert found.spill_bytes == 0 and not found.warnings
    assert found.shared_bytes <= shared_bytes(plan)
    fused = len(re.findall(r"\bFFMA", found.sass_text))
    assert bool(fused) == (kernel == "hopper_forward")


@pytest.mark.slow
def test_softcap_uses_the_hardwares_tanh() -> None:
    for kernel in KERNELS:
        assert compiled("softcap causal 128", kernel)[1].sass["TANH"] > 0


@pytest.mark.slow
def test_index_differences_cost_no_conversion_for_each_score() -> None:
    """int-to-float conversions run at a quarter of the rate of additions; rows and columns are converted, not pairs."""
    plan, found = compiled("alibi causal 128", "forward")
    pairs_of_a_thread = plan.tile.BLOCK_M * plan.tile.BLOCK_N // (32 * plan.tile.num_warps)
    assert found.sass["I2F"] < 2 * pairs_of_a_thread


@pytest.mark.slow
def test_delta() -> None:
    plan, source = next(pair for pair in sources("causal 256") if pair[0].spec.name == "backward_delta")
    found = report(source)
    assert found.spill_bytes == 0 and found.shared_bytes <= shared_bytes(plan)


def older() -> Iterator[tuple[str, torch.dtype, int, bool]]:
    yield "sm_90", torch.bfloat16, 72, False
    yield "sm_90", torch.float32, 32, True


@pytest.mark.parametrize(("target", "dtype", "D", "aligned"), slow_unless(lambda x: x[3], older()), ids=str)
def test_every_template_compiles_elsewhere(target: str, dtype: torch.dtype, D: int, aligned: bool) -> None:
    """Pointers instead of TMA, products without warpgroups, float32, strides of any kind."""
    shift = 0 if aligned else 1
    q, k, v = (torch.zeros(2, 4, S, D + shift, dtype=dtype)[..., shift:].requires_grad_() for _ in range(3))
    table = torch.zeros(4, 21, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh((score + table[h, (q_idx - kv_idx).clamp(-10, 10) + 10]) / 20)

    mask = create_block_mask(mods.prefix_lm(torch.tensor([7, 90])), 2, None, S, S, device="cpu")
    made = explain(q, k, v, score_mod, mask, target=target)
    for plan, source in zip(made.plans, made.sources, strict=True):
        assert plan.aligned == aligned or plan.spec.name == "backward_delta"
        kernel = build(source, plan.target)
        assert kernel.target == Target("cuda", int(target[3:]), 32)
        assert kernel.shared <= plan.target.shared_memory


# Masks


def assert_lean(source: KernelSource) -> None:
    found = report(source)
    assert 0 < found.registers < 255 and found.spill_bytes <= 64, f"{source.name}: {found}"


@pytest.mark.parametrize("kind", ["classify", "evaluate", "pair_bits"])
@pytest.mark.parametrize("name", ["causal", "documents", "nested"])
def test_kernels_of_a_mask(name: str, kind: str) -> None:
    plan = plan_of(trace(make_mask(name, S), "mask"), SM90)
    assert_lean({"classify": plan.classify, "evaluate": plan.evaluate, "pair_bits": plan.pair_bits}[kind])


@pytest.mark.parametrize("kernel", range(5), ids=["count", "scan", "fill", "at once", "with runs"])
def test_kernels_of_lists(kernel: int) -> None:
    assert_lean((*list_sources(), small_lists_source(None), small_lists_source(torch.int64))[kernel])


@pytest.mark.parametrize("chunk", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_tables(dtype: torch.dtype, chunk: int) -> None:
    assert_lean(table_source(dtype, chunk))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_kernels_of_levels(dtype: torch.dtype) -> None:
    assert_lean(levels_source(dtype))


@pytest.mark.slow
def test_launchers_of_descriptors_are_foreseen() -> None:
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if not triton_versions.builds_launchers():
        pytest.skip("this Triton has one launcher for all kernels")
    source = next(source for plan, source in sources("causal 64", "AUTO") if plan.spec.name == "hopper_forward")
    request = request_of(source)
    found = json.loads(build(source, SM90).path.with_suffix(".json").read_text())["tensordesc_meta"]
    assert found
    foreseen = triton_versions._stand_in_metadata(request, ("cuda", 90, 32)).tensordesc_meta
    texts = [driver.make_launcher({}, dict(request.signature), meta) for meta in (found, foreseen)]
    assert texts[0] == texts[1]
