"""picture: a BlockMask as text."""

from __future__ import annotations

import pytest
import torch
from block_masks import create, seeded
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as upstream

from flexattn import mods
from flexattn.block_mask import BlockMask, RunLists, Runs, picture, plot
from flexattn.block_mask import mask as mask_module
from flexattn.block_mask.runs import runs_of
from flexattn.mods import causal


def test_repr():
    mask = create(mods.document_causal(offsets=torch.tensor([0, 300, 1000])), 2, None, 1000, 1000)
    assert_expected_inline(
        repr(mask),
        """\
BlockMask(document_causal, B=2, H=1, Q_LEN=1000, KV_LEN=1000, BLOCK_SIZE=(128, 128), full=14, partial=38, empty=76, sparsity=59.49%)
    (0, 0)
    ░░
    ██░░
    ░░░░░░
        ░░░░
        ░░██░░
        ░░████░░
        ░░██████░░
        ░░░░░░░░░░░░""",  # noqa: E501
    )


def test_string_is_laid_out_as_torchs():
    mod = mods.and_masks(causal, mods.padding(torch.tensor([300, 500])))
    ours = create(mod, 2, None, 512, 512)
    theirs = upstream.create_block_mask(mod, 2, None, 512, 512, "cpu")
    assert str(ours).replace("full=11, partial=8, empty=13, ", "").replace("░", "█") == str(theirs).replace("░", "█")
    assert_expected_inline(
        str(ours[1]).replace(" ", "."),
        """\
BlockMask(shape=(1,.1,.512,.512),.full=6,.partial=4,.empty=6,.sparsity=37.50%,.
(0,.0)
░░......
██░░....
████░░..
██████░░
)""",
    )


def test_pictures_of_every_size():
    mask = create(causal, None, None, 1000, 1000, BLOCK_SIZE=8)
    lines = mask.to_string().splitlines()
    assert (len(lines), len(lines[1])) == (19, 36)  # 125 blocks, 7 to a cell
    assert lines[1].startswith("░░ ")
    assert lines[18] == "██" * 17 + "░░"
    assert len(mask.to_string(grid_size=-1).splitlines()) == 126
    assert len(mask.to_string(grid_size=(4, 9)).splitlines()) == 5
    assert len(repr(mask).splitlines()) == 17
    assert "To print out more, set BlockMask.to_string(limit=N)" in mask.expand(3, 3).to_string()
    assert "..." not in mask.expand(2, 2).to_string()
    for lengths in ((0, 0), (0, 9), (9, 0), (1, 1)):
        small = create(causal, None, None, *lengths)
        head = f"BlockMask(causal, B=1, H=1, Q_LEN={lengths[0]}, KV_LEN={lengths[1]}, BLOCK_SIZE=(128, 128), "
        counts = "full=0, partial=1, empty=0" if lengths == (1, 1) else "full=0, partial=0, empty=0"
        picture = ["    ░░"] if lengths == (1, 1) else []
        assert repr(small).splitlines() == [f"{head}{counts}, sparsity=0.00%)", *picture]
        assert small.to_string().splitlines() == ["(0, 0)", *(line.strip() for line in picture)]


def test_repr_of_an_empty_slice():
    text = repr(create(causal, 2, None, 16, 16)[0:0])
    assert text == (
        "BlockMask(causal, B=0, H=1, Q_LEN=16, KV_LEN=16, BLOCK_SIZE=(128, 128), full=0, partial=0, empty=0, "
        "sparsity=0.00%)"
    )


@given(st.integers(0, 9), st.integers(0, 30), st.integers(0, 30), st.integers(0, 9), st.integers(1, 9))
def test_a_cell_says_what_all_of_its_blocks_are(seed, rows, columns, down, across):
    coarse = torch.randint(3, (-(-rows // 4), -(-columns // 4)), generator=seeded(seed))
    noise = torch.randint(40, (rows, columns), generator=seeded(seed)) == 0
    kind = torch.where(noise, 1, coarse.repeat_interleave(4, 0).repeat_interleave(4, 1)[:rows, :columns])
    lines = picture.draw(runs_of(kind == 1), runs_of(kind == 2), columns, (down, across), 1)
    row_step, column_step = max(1, -(-rows // max(1, down))), max(1, -(-columns // across))
    cells = [[c.unique().tolist() for c in band.split(column_step, 1)] for band in kind.split(row_step)]
    expected = ["".join({(0,): " ", (2,): "█"}.get(tuple(c), "░") for c in row) for row in cells]
    assert lines == (expected if rows and columns else [])


def lower_triangle(blocks: int) -> BlockMask:
    """Return the mask of causal with this many blocks of one token, whose runs are fewer than its blocks."""
    below = torch.arange(blocks, dtype=torch.int32)
    diagonal = Runs(torch.arange(blocks + 1, dtype=torch.int32), torch.stack((below, below + 1), 1))
    full = Runs((torch.arange(blocks + 1) - 1).clamp(min=0).int(), torch.stack((0 * below, below), 1)[1:])
    lists = RunLists(diagonal, full, below.flip(0)[None])
    return BlockMask.from_runs(lists, None, 1, 1, (blocks, blocks), 1, causal)


def test_a_hundred_thousand_blocks_are_drawn_from_their_runs(monkeypatch):
    monkeypatch.setattr(Runs, "dense", None)  # would take 10 GB
    mask = lower_triangle(100_000)
    triangle = [("██" * i + "░░").ljust(40) for i in range(20)]
    assert mask.to_string().splitlines() == ["(0, 0)", *triangle]
    assert repr(mask).splitlines() == [
        "BlockMask(causal, B=1, H=1, Q_LEN=100000, KV_LEN=100000, BLOCK_SIZE=(1, 1), full=4999950000, partial=100000, "
        "empty=4999950000, sparsity=50.00%)",
        *("    " + "██" * i + "░░" for i in range(16)),
    ]
    cells, step = plot.image(*mask._rows_of(0), 100_000)
    assert (tuple(cells.shape), step) == ((2000, 2000, 3), (50, 50))
    monkeypatch.setattr(picture, "_CELLS", 64)  # in bands, and a few runs at a time
    monkeypatch.setattr(picture, "_RUNS", 777)
    assert mask.to_string().splitlines() == ["(0, 0)", *triangle]


def test_a_block_among_many_is_seen():
    one = Runs((torch.arange(10_001) > 9_000).int(), torch.tensor([[7_777, 7_778]]).int())
    none = Runs(torch.zeros(10_001).int(), torch.zeros(0, 2).int())
    order = torch.arange(10_000).int()[None]
    mask = BlockMask.from_runs(RunLists(one, none, order), None, 1, 1, (1_280_000, 1_280_000))
    assert "full=0, partial=1, empty=99999999, sparsity=99.999999%)" in repr(mask)
    assert [line for line in mask.to_string().splitlines()[1:] if line.strip()] == [" " * 30 + "░░" + " " * 8]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (100.0, "100.00"), (99.994, "99.99"), (99.996, "99.996"), (0.004, "0.004"), (49.996, "50.00")],
)
def test_percentages_of_0_and_100_are_true(value, text):
    assert mask_module._percent(value) == text
