"""plot: a BlockMask as an image."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from block_masks import create, live_pairs, table_mask

from flexattn import mods
from flexattn.block_mask import plot
from flexattn.block_mask.runs import runs_of
from flexattn.errors import IndexRangeError, MutationError
from flexattn.mods import causal


def test_image_of_blocks():
    kind = torch.tensor([[2, 1, 0], [0, 2, 1]])
    cells, step = plot.image(runs_of(kind == 1), runs_of(kind == 2), 3)
    empty, partial, full = (list(colour) for colour in plot.COLOURS.values())
    assert step == (1, 1)
    assert cells.dtype == torch.uint8
    assert cells.tolist() == [[full, partial, empty], [empty, full, partial]]


def test_image_of_many_blocks_has_their_mean_colour():
    kind = torch.tensor([[2, 2, 0, 0, 1], [2, 2, 0, 1, 1], [0, 0, 0, 0, 0]])
    cells, step = plot.image(runs_of(kind == 1), runs_of(kind == 2), 5, (2, 3))
    empty, partial, full = plot.COLOURS.values()
    assert step == (2, 2)
    mixed = [round((3 * e + p) / 4) for e, p in zip(empty, partial, strict=True)]
    assert cells.tolist() == [[list(full), mixed, list(partial)], [list(empty)] * 3]


@pytest.mark.parametrize("grid", [(0, 0), (0, 3), (3, 0)])
def test_image_of_nothing(grid):
    none = runs_of(torch.zeros(grid, dtype=torch.bool))
    assert plot.image(none, none, grid[1])[0].shape == (*grid, 3)


def test_plot_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("Run pip install flexattn[plot]")):
        create(causal, None, None, 64, 64).plot()


@pytest.mark.parametrize(("place", "text"), [({"b": 2}, "b: found 2, expected 0 <= b < 2"), ({"h": -1}, "h: found -1")])
def test_plot_refuses_places_that_are_not_there(place, text):
    with pytest.raises(IndexRangeError, match=re.escape(text)):
        create(causal, 2, None, 64, 64).plot(**place)


@pytest.mark.parametrize("most", [(2000, 2000), (9, 13), (1, 1)])
@pytest.mark.parametrize(("Q", "KV", "block"), [(70, 70, 16), (33, 61, (24, 100)), (64, 5, (1, 2))])
def test_image_of_pairs_has_the_mean_colours_of_pairs(most, Q, KV, block):
    mask = create(table_mask(1), 3, 2, Q, KV, BLOCK_SIZE=block)
    rows, columns = mask.BLOCK_SIZE
    partial, full = (x[2, 1].repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:Q, :KV] for x in mask._blocks())
    kinds = full * 3 + partial * (1 + live_pairs(mask)[2, 1].int())
    colours = torch.tensor(list(plot.OF_PAIRS.values()), dtype=torch.float64)[kinds.long()]
    cells, step = plot.image_of_pairs(
        mask._checked_mod(), (2, 1), *mask._rows_at(2, 1), mask.seq_lengths, mask.BLOCK_SIZE, most
    )
    down, across = -(-Q // step[0]), -(-KV // step[1])
    assert cells.shape == (down, across, 3) and down <= most[0] and across <= most[1]
    for y in range(down):
        for x in range(across):
            cell = colours[y * step[0] : (y + 1) * step[0], x * step[1] : (x + 1) * step[1]].flatten(0, 1)
            assert (cells[y, x] - cell.mean(0)).abs().max() <= 0.51


def test_pairs_of_a_block_that_is_larger_than_the_mask():
    mask = create(causal, None, None, 20, 30, BLOCK_SIZE=2**30)
    cells, step = plot.image_of_pairs(mask._checked_mod(), (0, 0), *mask._rows_at(0, 0), (20, 30), mask.BLOCK_SIZE)
    assert step == (1, 1) and cells.shape == (20, 30, 3)
    assert (cells[..., 2] == 0).int().sum() == 20 * 21 // 2  # blue of pairs that attend


def test_plot_of_pairs():
    pytest.importorskip("matplotlib").use("Agg")
    limits = torch.tensor([1000, 200])
    mask = create(mods.padding(limits), 2, None, 1000, 500)
    ax = mask.plot(b=1, pairs=True)
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(plot.OF_PAIRS)
    assert ax.images[0].get_extent() == [0, 500, 1000, 0]
    sys.modules["matplotlib.pyplot"].close(ax.figure)
    limits -= 1
    with pytest.raises(MutationError):
        mask.plot(pairs=True)


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    for lengths in ((1000, 500), (0, 9), (1, 1)):
        given = Figure().subplots()
        mask = create(mods.padding(torch.tensor([1000, 200])), 2, None, *lengths)
        ax = mask.plot(given, b=1)
        ax.figure.canvas.draw()
        assert ax is given
        assert ax.get_xlim() == (0, max(1, lengths[1]))
        assert ax.get_ylim() == (max(1, lengths[0]), 0)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["empty", "partial", "full"]
        assert len(ax.images) == (lengths != (0, 9))
    mask = create(causal, None, None, 1000, 500)
    ax = mask.plot()
    assert ax.images[0].get_extent() == [0, 512, 1024, 0]
    assert ax.images[0].get_array().shape == (8, 4, 3)
    sys.modules["matplotlib.pyplot"].close(ax.figure)


def test_without_a_legend() -> None:
    pytest.importorskip("matplotlib")
    mask = create(causal, None, None, 64, 64)
    assert mask.plot(legend=False).get_legend() is None
    assert mask.plot(legend=False, pairs=True).get_legend() is None
