"""show: the arrays that matplotlib draws are those of the mods, with axes in tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_masks import create, live_pairs, table_mask
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn import heat_maps, mods, show
from flexattn.errors import ArgumentError, DtypeError, IndexRangeError, ModError, MutationError
from flexattn.reference import over_all_pairs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pyplot(request: pytest.FixtureRequest) -> Any:
    """Close all figures."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def arrays(figure: Any) -> list[np.ma.MaskedArray]:
    figure.canvas.draw()
    return [ax.images[0].get_array() for ax in figure.axes if ax.images and ax.get_xlabel() == "key"]


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx + 3 * b) & (kv_idx % 7 != h)


@pytest.mark.parametrize("at", [(0, 0), (2, 5)])
def test_maps_are_those_of_dense_mods(at: tuple[int, int]) -> None:
    table = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 2 + table[h, q_idx - kv_idx + 99]

    figure = show(score_mod, window, Q_LEN=53, KV_LEN=90, at=at, score=1.5)
    kept = over_all_pairs(window, torch.Size((3, 6, 53, 90)), device=CPU)[at]
    score = torch.full((3, 6, 53, 90), 1.5, dtype=torch.float64)
    change = over_all_pairs(score_mod, score.shape, score)[at] - 1.5
    pattern, heat = arrays(figure)
    assert np.array_equal(pattern, kept.numpy())
    assert np.array_equal(np.ma.getmaskarray(heat), ~kept.numpy())
    np.testing.assert_allclose(heat[kept.numpy()], change[kept].numpy(), rtol=1e-5, atol=1e-5)
    assert figure.axes[0].get_xlim() == (0, 90) and figure.axes[0].get_ylim() == (53, 0)
    assert figure.axes[0].images[0].get_extent() == [0, 90, 53, 0]
    assert figure.axes[1].get_title() == f"score_mod: change of a score of 1.5\nat b={at[0]}, h={at[1]}"


def test_long_axes_are_sampled() -> None:
    (pattern,) = arrays(show(mask_mod=mods.causal, Q_LEN=5000, KV_LEN=1025))
    q, kv = torch.arange(0, 5000, 5), torch.arange(0, 1025, 2)
    assert np.array_equal(pattern, (q[:, None] >= kv).numpy())


@pytest.mark.parametrize("kind", ["own", "torch", "by hand"])
@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_block_masks(kind: str, at: tuple[int, int]) -> None:
    mask: Any = create(table_mask(0), 3, 2, 70, 70, BLOCK_SIZE=(16, 8))
    expected = live_pairs(mask)[at]
    if kind == "torch":
        mask = upstream.create_block_mask(table_mask(0), 3, 2, 70, 70, device="cpu", BLOCK_SIZE=16)
    if kind == "by hand":
        mask.mask_mod = mods.causal
        expected = live_pairs(mask)[at]
    pattern, heat = arrays(show(mods.alibi(2), block_mask=mask, at=at))
    assert np.array_equal(pattern, expected.numpy())
    assert np.array_equal(np.ma.getmaskarray(heat), ~expected.numpy())


def test_scores_of_minus_infinity_are_not_drawn() -> None:
    (heat,) = arrays(show(lambda score, b, h, q, kv: torch.where(kv > q, -float("inf"), score), Q_LEN=9, KV_LEN=9))
    assert np.array_equal(np.ma.getmaskarray(heat), ~np.tri(9, dtype=bool)) and not heat.compressed().any()


ROW = torch.arange(50) // 20


@pytest.mark.parametrize(
    ("mods_", "given", "lengths"),
    [
        ({"mask_mod": mods.causal}, {}, (128, 128)),
        ({"mask_mod": mods.sliding_window(150)}, {}, (300, 300)),
        ({"mask_mod": lambda b, h, q, kv: (q * 2654435761 + kv) % 3 == 0}, {}, (1024, 1024)),
        ({"mask_mod": mods.document(ROW)}, {}, (50, 50)),
        ({"mask_mod": lambda b, h, q, kv: ROW[kv] == 1}, {}, (50, 50)),
        ({"mask_mod": lambda b, h, q, kv: ROW[kv] == 1}, {"Q_LEN": 7}, (7, 50)),
        ({"score_mod": lambda score, b, h, q, kv: score + ROW[q]}, {"KV_LEN": 90}, (50, 90)),
        ({"mask_mod": mods.causal}, {"KV_LEN": 30}, (30, 30)),
        ({"mask_mod": mods.causal}, {"Q_LEN": 3, "KV_LEN": 4}, (3, 4)),
    ],
)
def test_default_lengths(mods_: Any, given: Any, lengths: tuple[int, int]) -> None:
    ax = show(**mods_, **given).axes[0]
    assert (ax.get_ylim()[0], ax.get_xlim()[1]) == lengths


def test_files(tmp_path: Path, pyplot: Any) -> None:
    for name in ("mask.png", "mask.svg"):
        show(mods.softcap(5.0), mods.causal, path=tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert not pyplot.get_fignums()


def test_captured_tensors_that_are_too_short() -> None:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + ROW[q_idx - kv_idx]

    show(score_mod, mods.causal, Q_LEN=50, KV_LEN=50)  # masked pairs may index out of range
    with pytest.raises(IndexRangeError, match="captured tensor `ROW`"):
        show(score_mod, mods.causal, Q_LEN=51, KV_LEN=51)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ArgumentError, "show: found nothing to draw"),
        ({"mask_mod": mods.causal, "Q_LEN": 0}, ArgumentError, "Q_LEN: found 0"),
        ({"mask_mod": mods.causal, "KV_LEN": 2.0}, ArgumentError, "KV_LEN: found 2.0"),
        ({"mask_mod": mods.causal, "at": 3}, ArgumentError, "at: found 3, expected a pair"),
        ({"mask_mod": mods.causal, "at": (0, -1)}, ArgumentError, "at: found"),
        ({"mask_mod": lambda b, h, q, kv: bool(q > kv)}, ModError, "mask_mod"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        show(**arguments)


def test_errors_of_block_masks() -> None:
    limits = torch.tensor([5, 6])
    mask = create(mods.padding(limits), 2, None, 8, 8)
    with pytest.raises(ArgumentError, match="Q_LEN: found 9, expected none with block_mask"):
        show(block_mask=mask, Q_LEN=9)
    with pytest.raises(DtypeError, match=r"block_mask: found a int, expected a BlockMask.*Q_LEN="):
        show(mods.alibi(2), mods.causal, 256, 256)
    with pytest.raises(ArgumentError, match="mask_mod: found one next to block_mask"):
        show(mask_mod=mods.causal, block_mask=mask)
    with pytest.raises(IndexRangeError, match="at: found b = 2, expected below 2"):
        show(block_mask=mask, at=(2, 0))
    show(block_mask=mask, at=(1, 7))  # one mask for all heads
    limits += 1
    with pytest.raises(MutationError):
        show(block_mask=mask)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"flexattn.show: found no matplotlib, .* Run pip install flexattn\[plot\]"):
        show(mask_mod=mods.causal)


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        show(mods.alibi(4), mods.causal)
    assert heat_maps.show is show


def test_arguments_of_other_functions() -> None:
    q = torch.zeros(1, 1, 8, 8)
    with pytest.raises(DtypeError, match=r"score_mod: found a tensor, expected a function\. show takes mods"):
        show(q, q, q)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="score: found a str, expected a number"):
        show(mods.alibi(8), score="a")  # type: ignore[arg-type]
    with pytest.raises(ModError, match=r"as mask_mod= to show"):
        show(mods.causal)  # type: ignore[arg-type]
