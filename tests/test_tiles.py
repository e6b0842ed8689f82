"""tiles, tile_choice: the tile of a kernel, the table of this machine, and files that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flexattn
from flexattn import mods
from flexattn.compile import tile_choice
from flexattn.compile.tile_choice import MEASURED, choose, measured_rows, remember, with_measured
from flexattn.compile.tiles import KINDS, Tile, TileKey, TileRow, read_rows, rows_text
from flexattn.errors import ArgumentError
from flexattn.machine.target import INTERPRETER, Target

SM80, SM90, GFX = Target("cuda", 80, 32), Target("cuda", 90, 32), Target("hip", "gfx942", 64)
KEY = TileKey("forward", "bfloat16", 64, 64, "none", True)
ROW = TileRow("sm_90", KEY, Tile(32, 16, 8, 1), "a card", "2026-01-02")


@pytest.mark.parametrize(
    ("kernel", "dtype", "D", "Dv", "kind", "tile"),
    [
        ("forward", "bfloat16", 64, 64, "none", Tile(64, 128, 4, 3)),
        ("forward", "float16", 65, 33, "none", Tile(64, 64, 4, 3)),
        ("forward", "float16", 192, 128, "transforms", Tile(128, 64, 8, 3)),
        ("forward", "bfloat16", 64, 64, "gathers", Tile(64, 64, 4, 2)),
        ("forward", "bfloat16", 64, 128, "gathers", Tile(64, 64, 4, 3)),
        ("forward", "bfloat16", 128, 128, "unaligned", Tile(32, 32, 4, 1)),
        ("forward", "bfloat16", 600, 64, "unaligned", Tile(64, 32, 4, 2)),
        ("forward", "tf32", 64, 64, "none", Tile(64, 32, 4, 2)),
        ("backward_dq", "bfloat16", 64, 64, "transforms", Tile(128, 64, 8, 3, 0, True)),
        ("backward_dkdv", "bfloat16", 64, 64, "none", Tile(64, 64, 4, 3, 32)),
        ("backward_dkdv", "bfloat16", 64, 64, "adds", Tile(64, 64, 4, 3, 32)),
        ("backward_dkdv", "float32", 96, 128, "adds", Tile(16, 16, 8, 2)),
        ("backward_delta", "float32", 999, 999, "none", Tile(32, 16, 4, 1)),
    ],
)
def test_measured_tiles(machine, kernel, dtype, D, Dv, kind, tile):
    for masked in (True, False):
        choice = choose(TileKey(kernel, dtype, D, Dv, kind, masked), SM90)
        assert (choice.tile, choice.origin) == (tile, "measured on sm_90")


def test_every_kernel_has_tiles_of_all_widths(machine):
    for kernel in ("forward", "backward_dq", "backward_dkdv", "backward_delta"):
        for dtype in ("float16", "float32"):
            for kind in KINDS:
                for target in (SM80, SM90, GFX):
                    assert choose(TileKey(kernel, dtype, 2000, 2000, kind, False), target).tile


@pytest.mark.parametrize("target", [SM80, Target("cuda", 120, 32), GFX], ids=str)
def test_what_was_never_measured_takes_the_nearest(machine, target):
    choice = choose(KEY, target)
    assert choice == replace(choose(KEY, SM90), origin=f"measured on sm_90, the nearest to {target}")


def test_the_nearest_of_several_architectures(machine, monkeypatch):
    old = replace(ROW, architecture="sm_80")
    rows = (*measured_rows(), old)
    monkeypatch.setattr(tile_choice, "measured_rows", lambda: rows)
    monkeypatch.setattr(tile_choice, "_measured", tile_choice._measured.__wrapped__)  # not from its cache
    assert choose(KEY, SM80).tile == old.tile
    for number, nearest in ((86, 80), (89, 80), (100, 90), (120, 90)):
        target = Target("cuda", number, 32)
        assert choose(KEY, target).origin == f"measured on sm_{nearest}, the nearest to sm_{number}"
    assert choose(KEY, SM90).tile != old.tile
    assert choose(replace(KEY, D=80), SM80).origin == "measured on sm_90, the nearest to sm_80", "too narrow there"


def test_interpreter(machine):
    assert choose(KEY, INTERPRETER).origin == "for the interpreter"


# text


def test_the_package_table_is_written_as_the_program_writes_it():
    assert MEASURED.read_text() == rows_text(measured_rows())
    assert read_rows(rows_text(reversed(measured_rows())), "x") == measured_rows()


def test_a_new_row_supersedes_that_of_its_cell():
    half = replace(ROW, key=replace(KEY, dtype="float16", masked=False))
    rows = read_rows(with_measured([half]), "x")
    assert len(rows) == len(measured_rows())
    assert half in rows and not any(row.key == KEY for row in rows)
    other = replace(ROW, architecture="sm_80")
    assert {*read_rows(with_measured([other]), "x")} == {*measured_rows(), other}


# the table of this machine


def test_a_tuned_tile_holds_for_exactly_its_key(machine):
    assert remember([ROW]) == machine / "tiles.json"
    assert choose(KEY, SM90) == tile_choice.TileChoice(ROW.tile, "tuned on this machine, 2026-01-02")
    others = (
        replace(KEY, dtype="float16"), replace(KEY, D=63), replace(KEY, Dv=32), replace(KEY, kind="adds"),
        replace(KEY, masked=False), replace(KEY, kernel="backward_dq"),
    )  # fmt: skip
    assert all(choose(key, SM90).origin == "measured on sm_90" for key in others)
    for target in (SM80, Target("cuda", 100, 32), GFX, INTERPRETER):
        assert "tuned" not in choose(KEY, target).origin


def test_remembering_adds_and_supersedes(machine):
    other, newer = replace(ROW, architecture="sm_80"), replace(ROW, tile=Tile(16, 16, 4, 1))
    remember([ROW, other])
    remember([newer])
    assert {*read_rows((machine / "tiles.json").read_text(), "x")} == {other, newer}
    (machine / "tiles.json").unlink()
    tile_choice._remembered.cache_clear()  # as in a new process
    assert choose(KEY, SM90).origin == "measured on sm_90"


TEXT = rows_text([ROW])
BROKEN = ["{", "[]", '{"tiles": []}', TEXT.replace('"format": 1', '"format": 2'), TEXT.replace(": 32,", ": 48,")]
BROKEN += [TEXT.replace(old, new) for old, new in (('"num_warps": 8', '"num_warps": "8"'), ('"none"', '"some"'))]
BROKEN += [TEXT.replace('"num_stages": 1', '"num_stages": 0'), TEXT.replace('"date"', '"day"')]
BROKEN += [
    TEXT.replace(old, f"{old.partition(':')[0]}: []") for old in ('"kernel": "forward"', '"architecture": "sm_90"')
]
BROKEN += ["[" * 100_000, '{"tiles": ' * 100_000, TEXT.replace(": 32,", f": {'9' * 5000},")]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_cannot_be_read_is_told_of_and_left_alone(machine, text):
    file = machine / "tiles.json"
    file.write_text(text)
    with pytest.warns(UserWarning, match=rf"tiles tuned on this machine are ignored: {file}: found \w+Error: "):
        assert choose(KEY, SM90).origin == "measured on sm_90"
    choose(KEY, SM90)  # no second warning
    with pytest.raises(ArgumentError, match=rf"{file}.*Correct or delete it"):
        remember([ROW])
    assert file.read_text() == text


def test_a_file_in_a_folder_that_others_may_write_is_not_read(machine):
    remember([ROW])
    machine.chmod(0o777)
    tile_choice._remembered.cache_clear()
    assert choose(KEY, SM90).origin == "measured on sm_90"


def test_remembering_without_a_folder_raises(machine, monkeypatch):
    monkeypatch.setattr(tile_choice, "open_store", lambda folder: None)
    with pytest.raises(ArgumentError, match=r"FLEXATTN_CACHE_DIR: found .*expected a folder for tiles"):
        remember([ROW])


# messages and printed plans


def tiles_shown(target: str, **options: object) -> list[str]:
    q = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    mask = flexattn.create_block_mask(mods.causal, None, None, 256, 256, device="cpu")
    options = {"BACKEND": "TRITON", **options}
    text = flexattn.explain(q, q, q, None, mask, target=target, kernel_options=options).full()
    return [line.removeprefix("    tile     ") for line in text.splitlines() if line.startswith("    tile     ")]


def test_explain_says_where_each_tile_comes_from(machine: Path):
    before = tiles_shown("sm_90")
    assert before[0] == "BLOCK_M 64  BLOCK_N 128  warps 4  stages 3  (measured on sm_90)"
    remember([ROW])
    after = tiles_shown("sm_90")
    assert after[0] == "BLOCK_M 32  BLOCK_N 16  warps 8  stages 1  (tuned on this machine, 2026-01-02)"
    assert after[1:] == before[1:]
    assert tiles_shown("sm_90", BLOCK_N=32)[0] == (
        "BLOCK_M 32  BLOCK_N 32  warps 8  stages 1  "
        "(instead of 32 x 16, warps 8, stages 1, tuned on this machine, 2026-01-02)"
    )
    assert tiles_shown("sm_80")[0].endswith("(measured on sm_90, the nearest to sm_80)")
    assert tiles_shown("sm_90", BACKEND="AUTO")[0].endswith("(measured on sm_90)"), "Hopper's own"


def test_explain_says_that_options_replace_the_tile_of_short_queries():
    q, k = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 8, 4096, 64, dtype=torch.bfloat16)

    def tile(**options: object) -> str:
        text = flexattn.explain(q, k, k, target="sm_90", kernel_options=options).full()
        return next(line.strip() for line in text.splitlines() if line.startswith("    tile "))

    assert tile().endswith("(by the number of rows)")
    assert tile(BLOCK_N=32).endswith("(instead of 16 x 64, warps 4, stages 3, by the number of rows)")


def test_a_tuned_tile_makes_the_same_kernel_as_the_same_tile_from_elsewhere(machine):
    q = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    asked = {"BACKEND": "TRITON", "BLOCK_M": 32, "BLOCK_N": 16, "fwd_num_warps": 8, "fwd_num_stages": 1}
    wanted = flexattn.explain(q, q, q, target="sm_90", kernel_options=asked)
    remember([replace(ROW, key=replace(KEY, masked=False))])
    found = flexattn.explain(q, q, q, target="sm_90", kernel_options={"BACKEND": "TRITON"})
    assert found.plans[0] == wanted.plans[0]
    assert found.sources[0] == wanted.sources[0]


def test_the_file_is_readable_json(machine):
    (row,) = json.loads(remember([ROW]).read_text())["tiles"]
    assert row == {
        "architecture": "sm_90", "kernel": "forward", "dtype": "bfloat16", "D": 64, "Dv": 64, "kind": "none",
        "masked": True, "tile": {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
        "device": "a card", "date": "2026-01-02",
    }  # fmt: skip
