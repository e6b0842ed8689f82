"""svg: the picture of a BlockMask in a notebook is well formed, small, and shows the blocks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from block_masks import bind, create

from flexattn import BlockMask, mods
from flexattn.block_mask import plot
from flexattn.block_mask.plot import COLOURS

HEX = {"#{:02x}{:02x}{:02x}".format(*colour): kind for kind, colour in COLOURS.items()}


def drawn(mask: BlockMask) -> list[list[str]]:
    """Return the color of each cell of the picture. Each is drawn exactly once."""
    root = ET.fromstring(mask._repr_html_().replace("&ensp;", " "))
    svg = next(e for e in root.iter() if e.tag.endswith("svg"))
    across, down = map(int, svg.attrib["viewBox"].split()[2:])
    cells: list[list[str]] = [[""] * across for _ in range(down)]
    for path in (e for e in svg if e.tag.endswith("path")):
        for x, y, n in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path.attrib["d"]):
            for i in range(int(x), int(x) + int(n)):
                assert not cells[int(y)][i]
                cells[int(y)][i] = HEX.get(path.attrib["fill"], path.attrib["fill"])
    return cells


def test_the_cells_are_the_blocks() -> None:
    kinds = torch.tensor([[2, 1, 0], [0, 2, 1]])
    mask = BlockMask.from_blocks((kinds == 1)[None, None], (kinds == 2)[None, None], (256, 384))
    assert drawn(mask) == [["full", "partial", "empty"], ["empty", "full", "partial"]]


@pytest.mark.parametrize(("M", "N"), [(1000, 700), (1, 1), (40, 100_000), (70_000, 33)])
def test_each_cell_is_drawn_once(M: int, N: int) -> None:
    mask = create(mods.causal, None, None, M, N, BLOCK_SIZE=16)
    cells = drawn(mask)
    assert len(cells) <= 32 and len(cells[0]) <= 32
    assert all(colour for row in cells for colour in row)


def test_huge_masks_are_small() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(3, (1, 1, 300, 400), generator=generator)
    for mask in (
        BlockMask.from_blocks(kinds == 1, kinds == 2, (300 * 128, 400 * 128)),
        create(mods.causal, None, None, 2**20, 2**20),
    ):
        assert len(mask._repr_html_()) < 2**16


@pytest.mark.parametrize(("size", "note"), [((None, None), ""), ((2, 3), "batch 0, head 0 of 2 x 3")])
def test_the_line_of_text(size: Any, note: str) -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    mask_mod.__name__ = "<lambda> & co"
    mask = create(mask_mod, *size, 100, 100, BLOCK_SIZE=1)
    text = "".join(ET.fromstring(mask._repr_html_().replace("&ensp;", " ")).itertext())
    assert repr(mask).splitlines()[0] in text
    assert note in text and "4 x 4 blocks per cell" in text


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)])
def test_masks_of_nothing(lengths: tuple[int, int]) -> None:
    assert "<svg" not in create(mods.causal, None, None, *lengths)._repr_html_()
    assert "<svg" not in create(mods.causal, 2, None, 9, 9)[0:0]._repr_html_()


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    mask = create(mods.causal, None, None, 100, 90, BLOCK_SIZE=16)
    expected = mask._repr_html_()
    with torch.device("meta"):
        assert mask._repr_html_() == expected
        mask.html(tmp_path / "mask.html")
        plot.image_of_pairs(bind(mask), (0, 0), *mask._rows_at(0, 0), (100, 90), (16, 16))
