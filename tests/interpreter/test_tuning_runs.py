"""tune in Triton's interpreter: what it measures, remembers and leaves as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flexattn
from flexattn import mods
from flexattn.compile.tiles import Tile
from flexattn.errors import ArgumentError
from flexattn.runtime import launch
from flexattn.tuning import report as trials
from flexattn.tuning import search as tuning

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

TRITON = {"BACKEND": "TRITON"}


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave three tiles to choose from."""
    monkeypatch.setattr(tuning, "_near", lambda plan: (Tile(16, 16, 4, 1), Tile(16, 32, 4, 1)))
    monkeypatch.setattr(tuning, "tiles_in_table", lambda kernel: ())


def inputs(grad: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 1, 24, 16, generator=generator).requires_grad_(grad) for _ in range(3))


def test_tune_remembers_what_later_calls_use(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_time", lambda runs, *_: {tile: (float(tile.BLOCK_M),) for tile in runs})
    q, k, v = inputs()
    table = torch.randn(64, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 24]

    mask = flexattn.create_block_mask(mods.causal, None, None, 24, 24, device="cpu", BLOCK_SIZE=16)

    def results() -> list[torch.Tensor]:
        out = flexattn.flex_attention(q, k, v, score_mod, mask, kernel_options=TRITON)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))]

    before, state = results(), torch.get_rng_state()
    tuned = flexattn.tune(q, k, v, score_mod, mask, kernel_options=TRITON)
    assert [t.key.kernel for t in tuned.kernels] == ["forward", "backward_dq", "backward_dkdv"]
    assert all(len(t.trials) == 3 and not any(trial.note for trial in t.trials) for t in tuned.kernels)
    assert tuned.file == machine / "tiles.json"
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(x.grad is not None for x in (q, k, v, table))

    shown = flexattn.explain(q, k, v, score_mod, mask, kernel_options=TRITON)
    best = {t.key.kernel: t.best.tile for t in tuned.kernels}
    assert all(tile.BLOCK_M == 16 for tile in best.values())
    assert {plan.spec.name: plan.tile for plan in shown.plans if plan.spec.name in best} == best
    assert str(shown).count("(tuned on this machine, ") == 3
    assert not launch._launches, "planned anew"
    for ours, theirs in zip(results(), before, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "tuned" not in str(flexattn.explain(q, k, v, score_mod, None, kernel_options=TRITON)), "without a mask"

    again = flexattn.tune(q, k, v, score_mod, mask, kernel_options=TRITON, kernels=("forward",))
    assert again.kernels[0].trials[0].tile == best["forward"], "searches on from there"


def test_a_forward_alone_that_is_not_remembered(machine: Path) -> None:
    q, k, v = inputs(grad=False)
    tuned = flexattn.tune(q, k, v, kernel_options=TRITON, rounds=2, remember=False)
    assert [t.key.kernel for t in tuned.kernels] == ["forward"]
    assert all(min(trial.milliseconds) > 0 for trial in tuned.kernels[0].trials)
    assert len(tuned.kernels[0].best.milliseconds) in (1, 2)
    assert tuned.file is None and not (machine / "tiles.json").exists()


def test_a_tile_with_wrong_results_cannot_win(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(plan, problem, tensors, arrays):
        run = launch.runner(plan, problem, tensors, arrays)
        return run if plan.tile.BLOCK_M != 16 else lambda: (run(), tensors["o"][0, 0, 3].zero_())

    monkeypatch.setattr(tuning, "runner", spoiled)
    monkeypatch.setattr(trials, "GAIN", 1e-9)
    (kernel,) = flexattn.tune(*inputs(grad=False), kernel_options=TRITON, rounds=1, remember=False).kernels
    assert [trial.note[:12] for trial in kernel.trials] == ["", "wrong: o is ", "wrong: o is "]
    assert kernel.best is kernel.trials[0]


def test_a_broken_table_is_told_of_before_anything_is_measured(machine: Path) -> None:
    (machine / "tiles.json").write_text("broken")
    with pytest.raises(ArgumentError, match=r"tiles\.json: found JSONDecodeError"):
        flexattn.tune(*inputs(), kernel_options=TRITON)
    assert not list(machine.glob("*/manifest.json"))
