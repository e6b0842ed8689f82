"""Settings: defaults, each variable, and messages that name the variable."""

from __future__ import annotations

import pathlib
from pathlib import Path

import pytest

from flexattn.errors import ArgumentError
from flexattn.machine.kernel_store import open_store
from flexattn.process import config, events
from flexattn.process.config import Settings, read_settings


def test_defaults(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    home = Path("/home/someone/.cache/flexattn")
    assert read_settings({}) == Settings(
        cache_dir=home, shared_cache_dir=None, cache_size=2**30, compile_processes=4, debug=False, progress=True,
        print_source=False, dump_dir=None, without=frozenset(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/flexattn"),
        ({"XDG_CACHE_HOME": "/xdg", "FLEXATTN_CACHE_DIR": "/own"}, "/own"),
        ({"XDG_CACHE_HOME": "relative", "FLEXATTN_CACHE_DIR": ""}, "/home/someone/.cache/flexattn"),
        ({"FLEXATTN_CACHE_DIR": "~/kernels"}, "/home/someone/kernels"),
    ],
)
def test_cache_dir(monkeypatch, environment, folder):
    monkeypatch.setenv("HOME", "/home/someone")
    assert read_settings(environment).cache_dir == Path(folder)


def test_relative_cache_dir_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert read_settings({"FLEXATTN_CACHE_DIR": "kernels"}).cache_dir == tmp_path / "kernels"


def test_user_without_a_home(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", no_home)
    assert read_settings({}).cache_dir is None


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_debug(value, on):
    assert read_settings({"FLEXATTN_DEBUG": value}).debug is on


@pytest.mark.parametrize(("value", "on"), [("0", False), ("off", False), ("1", True), ("", True)])
def test_progress(value, on):
    assert read_settings({"FLEXATTN_PROGRESS": value}).progress is on


@pytest.mark.parametrize(
    ("value", "prints", "folder"),
    [("1", True, None), ("true", True, None), ("0", False, None), ("/dump", False, Path("/dump"))],
)
def test_dump(value, prints, folder):
    found = read_settings({"FLEXATTN_DUMP": value})
    assert (found.print_source, found.dump_dir) == (prints, folder)


@pytest.mark.parametrize("name", ["FLEXATTN_CACHE_DIR", "FLEXATTN_DUMP"])
def test_file_in_place_of_a_folder(tmp_path, name):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentError, match=rf"{name}: found '{file}', expected a folder"):
        read_settings({name: str(file)})


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("", 2**30), ("1000", 1000), ("500M", 500 * 2**20), ("2g", 2**31), ("1.5G", None), ("3GiB", 3 * 2**30),
        ("-1", None), ("much", None), ("9" * 5000, None), ("٣", None),
    ],
)  # fmt: skip
def test_cache_size(value, size):
    if size is None:
        with pytest.raises(ArgumentError, match=r"FLEXATTN_CACHE_SIZE: found .*, expected bytes, e.g. 500M or 2G"):
            read_settings({"FLEXATTN_CACHE_SIZE": value})
    else:
        assert read_settings({"FLEXATTN_CACHE_SIZE": value}).cache_size == size
    assert read_settings({"FLEXATTN_CACHE_SIZE": "0"}).cache_size is None


def link_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize("name", ["FLEXATTN_CACHE_DIR", "FLEXATTN_DUMP"])
@pytest.mark.parametrize(
    "impossible",
    [link_loop, lambda folder: link_loop(folder) / "below", lambda folder: folder / ("x" * 300),
     lambda folder: folder / "/".join(["x" * 200] * 30)],
    ids=["loop", "below a loop", "long name", "long path"],
)  # fmt: skip
def test_folder_that_cannot_be(tmp_path, name, impossible):
    with pytest.raises(ArgumentError, match=rf"{name}: found '/.* \(.*\), expected a folder"):
        read_settings({name: str(impossible(tmp_path))})


def test_home_that_cannot_hold_kernels(tmp_path):
    """What the user did not ask for is no error: kernels last as long as the process."""
    for folder in (link_loop(tmp_path), tmp_path / ("x" * 300), Path("/proc/nothing")):
        found = read_settings({"XDG_CACHE_HOME": str(folder)}).cache_dir
        assert found == folder / "flexattn"
        assert open_store(found) is None


def test_bad_switch():
    with pytest.raises(ArgumentError, match=r"FLEXATTN_DEBUG: found 'maybe', expected 1 or 0"):
        read_settings({"FLEXATTN_DEBUG": "maybe"})


@pytest.mark.parametrize(
    ("value", "names"), [("", set()), ("stripes", {"stripes"}), (" Hopper , stripes,", {"hopper", "stripes"})]
)
def test_without(value, names):
    assert read_settings({"FLEXATTN_WITHOUT": value}).without == names


def test_without_what_does_not_exist():
    names = "bits, early_keys, fixed_reference, hopper, one_launch, stripes"
    with pytest.raises(ArgumentError, match=f"FLEXATTN_WITHOUT: found 'tma', expected names of {names}"):
        read_settings({"FLEXATTN_WITHOUT": "stripes,tma"})


def test_settings_are_read_once(monkeypatch, capsys):
    config.settings.cache_clear()
    try:
        monkeypatch.setenv("FLEXATTN_DEBUG", "1")
        events.debug("plan", "tile 128x64")
        monkeypatch.setenv("FLEXATTN_DEBUG", "0")
        events.debug("plan", "again")
    finally:
        config.settings.cache_clear()
    assert capsys.readouterr().err == "flexattn plan: tile 128x64\nflexattn plan: again\n"
