"""tuning: candidates, the choice of the fastest, and rejected calls. Measurements are in tests/interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn import mods
from flexattn.call.call import Call
from flexattn.call.pose import pose
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.render import render
from flexattn.compile.schedule import plan_best_form
from flexattn.compile.shared_memory import shared_bytes
from flexattn.compile.tiles import Tile, TileKey
from flexattn.engines import triton
from flexattn.errors import ArgumentError, OptionError, UnsupportedError
from flexattn.machine.kernel_store import open_store
from flexattn.machine.target import Target
from flexattn.process.config import settings
from flexattn.runtime.build import digest
from flexattn.runtime.compile_processes import build_apart
from flexattn.tuning import search as tuning
from flexattn.tuning import tune
from flexattn.tuning.report import KernelTuning, Trial, Tuning
from flexattn.tuning.search import TUNED, candidates

pytest.importorskip("triton")

SM90 = Target("cuda", 90, 32)


def calls(monkeypatch, D: int = 64, spread: int = 0, grad: bool = True, dtype: torch.dtype = torch.bfloat16, **options):
    """Return the kernels of a masked call on sm_90, none of which is run."""
    monkeypatch.setattr(tuning, "target_of", lambda device: SM90)
    monkeypatch.setattr("flexattn.runtime.launch.target_of", lambda device: SM90)
    q, k, v = (torch.zeros(1, 2, 256, D + spread, dtype=dtype)[..., :D].requires_grad_(grad) for _ in range(3))
    mask = flexattn.create_block_mask(mods.causal, None, None, 256, 256, device="cpu")
    problem = pose(Call(q, k, v, mods.softcap(20.0), mask, kernel_options={"BACKEND": "TRITON", **options}))
    with torch.no_grad():
        return {call.kernel: call for call in tuning._calls(problem, grad)}


def test_kernels_are_found_without_running_any(monkeypatch):
    assert list(calls(monkeypatch)) == ["forward", "backward_delta", "backward_dq", "backward_dkdv"]
    assert list(calls(monkeypatch, grad=False)) == ["forward"]
    hopper = calls(monkeypatch, BACKEND="AUTO")
    assert list(hopper) == ["forward", "backward_delta", "hopper_backward", "backward_dq_rows"]
    assert hopper["forward"].plan.is_hopper


@pytest.mark.parametrize("D", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_candidates_differ_in_their_tiles_and_may_fit(monkeypatch, D, dtype):
    for kernel, call in calls(monkeypatch, D, dtype=dtype).items():
        if kernel not in TUNED:
            continue
        plans = candidates(call.plan, call.problem, call.tensors)
        tiles = [plan.tile for plan in plans]
        assert plans[0] == call.plan and len(plans) > 5
        assert len({*tiles}) == len(tiles)
        for plan in plans:
            assert replace(plan, tile=call.plan.tile, tma=call.plan.tma) == call.plan
            assert shared_bytes(plan) <= SM90.shared_memory
            assert plan.tile.partial_m <= plan.tile.BLOCK_M
        assert any(t.PRODUCTS_FIRST != tiles[0].PRODUCTS_FIRST for t in tiles) == (kernel != "forward")


def test_candidates_keep_to_what_the_compiler_does_right(monkeypatch):
    call = calls(monkeypatch, spread=1)["forward"]
    assert not call.plan.aligned
    assert all(plan.tile.BLOCK_M <= 32 for plan in candidates(call.plan, call.problem, call.tensors))


def test_a_candidate_is_planned_as_the_tables_tile_would_be(monkeypatch):
    for call in calls(monkeypatch).values():
        if call.kernel in TUNED:
            problem, tensors = call.problem, call.tensors
            same = tuning.plan_with_tile(call.spec, problem, SM90, tensors, call.plan.tile)
            assert same == plan_best_form(call.spec, problem, SM90, tensors)[0]


# the choice of the fastest

FIRST, OTHER, BROKEN = Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(16, 64, 4, 2)
KEY = TileKey("forward", "bfloat16", 64, 64, "none", True)


def tuned(first: float, other: float) -> KernelTuning:
    trials = (Trial(FIRST, (first,) * 3), Trial(OTHER, (other,) * 3), Trial(BROKEN, note="spills 900 bytes"))
    return KernelTuning("sm_90", KEY, trials)


@pytest.mark.parametrize(("other", "best"), [(0.9, OTHER), (0.99, FIRST), (1.1, FIRST)])
def test_a_tile_must_be_clearly_faster_to_win(other, best):
    assert tuned(1.0, other).best.tile == best


def test_tuning_reads_well():
    lines = str(Tuning("a card", (tuned(1.0, 0.5),), ("hopper_backward",))).splitlines()
    assert lines == [
        "tiles on a card, not remembered",
        "",
        "forward  sm_90  bfloat16  D 64  Dv 64  score_mod none  masked: 2.00x",
        "           ms  min..max",
        "        0.500  0.500..0.500         32 x 64, warps 4, stages 2  (best)",
        "        1.000  1.000..1.000         64 x 64, warps 4, stages 2  (in use)",
        "                                    16 x 64, warps 4, stages 2: spills 900 bytes",
        "",
        "hopper_backward: its tile is fixed",
    ]


def test_a_wrong_result_is_found():
    right = {"o": torch.randn(8), "lse_ptr": torch.tensor([1.0, -math.inf, math.inf])}
    assert not tuning._difference(right, right, torch.float32)
    near = {**right, "o": right["o"] * 1.001}
    assert not tuning._difference(near, right, torch.float32)
    for name, wrong in (("o", right["o"] * 1.1), ("o", right["o"] * math.nan), ("lse_ptr", torch.zeros(3))):
        note = tuning._difference({**right, name: wrong}, right, torch.float32)
        assert note.startswith(f"wrong: {name.removesuffix('_ptr')} is ")
    assert not tuning._difference({"o": torch.zeros(3)}, {"o": torch.zeros(3)}, torch.float16)


# compile processes


@pytest.mark.slow
def test_kernels_are_built_in_other_processes(monkeypatch):
    plan = calls(monkeypatch)["backward_delta"].plan
    good = replace(render(plan), text=render(plan).text + "# test_kernels_are_built_in_other_processes\n")
    broken = replace(good, text="import nothing_of_that_name\n")
    notes = build_apart([good, broken, good], SM90, 2, 200.0)
    assert list(notes) == [broken]
    assert notes[broken].startswith("does not compile: ") and "nothing_of_that_name" in notes[broken]
    store = open_store(settings().cache_dir)
    assert store is not None and store.find(digest(good, SM90)) is not None
    assert build_apart([good, broken], SM90, 1, 0.0) == {broken: "not compiled: no time left"}


def test_late_processes_are_ended():
    source = KernelSource("late", "import time\ntime.sleep(60)\n", (), (), ())
    assert build_apart([source], SM90, 1, 0.5) == {source: "not compiled after 0 s"}


# the public function


def test_tune_refuses_what_it_cannot_tune(monkeypatch):
    q = torch.zeros(1, 1, 16, 16)
    with pytest.raises(UnsupportedError, match=r"query: found float32 \(1, 1, 16, 16\) on cpu, expected one that a"):
        flexattn.tune(q, q, q)
    with pytest.raises(ArgumentError, match=r"kernels: found \['backward'\], expected names of forward, backward_dq"):
        flexattn.tune(q, q, q, kernels=("backward",))
    monkeypatch.setattr(tune, "engine_of", lambda problem: triton)
    with pytest.raises(OptionError, match="kernel_options: found BLOCK_M, bwd_num_stages, expected no option that"):
        flexattn.tune(q, q, q, kernel_options={"BLOCK_M": 32, "bwd_num_stages": 1, "EXACT": True})


@pytest.mark.gpu
def test_tune_on_this_gpu(machine):
    q, k, v = (torch.randn(1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = flexattn.create_block_mask(mods.causal, None, None, 1000, 1000)
    options = {"BACKEND": "TRITON"}

    def results() -> list[torch.Tensor]:
        out = flexattn.flex_attention(q, k, v, mods.softcap(20.0), mask, kernel_options=options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    before = results()
    found = flexattn.tune(q, k, v, mods.softcap(20.0), mask, kernel_options=options, rounds=3)
    assert [kernel.key.kernel for kernel in found.kernels] == list(TUNED)
    for kernel in found.kernels:
        assert kernel.best.milliseconds and kernel.gain >= 1.0, str(found)
        assert not [trial for trial in kernel.trials if trial.note.startswith("wrong")], str(found)
        assert sum(bool(trial.milliseconds) for trial in kernel.trials) > 5, str(found)
    shown = str(flexattn.explain(q, k, v, mods.softcap(20.0), mask, kernel_options=options))
    assert shown.count("(tuned on this machine, ") == 3
    for ours, theirs in zip(results(), before, strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 2e-2
