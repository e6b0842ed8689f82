"""plot: a BlockMask as an image."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from block_masks import create

from flexattn import mods
from flexattn.block_mask import plot
from flexattn.block_mask.runs import runs_of
from flexattn.errors import IndexRangeError
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
