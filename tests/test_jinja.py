"""jinja: templates are compiled once per machine. A file that is missing, damaged or not ours is not used."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from flexattn.compile import jinja
from flexattn.compile.jinja import make_environment
from flexattn.compile.templates import templates_folder
from flexattn.machine import kernel_store

NAME = "forward.py.jinja"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the templates that are compiled from now on."""
    names: list[str] = []
    real = jinja2.Environment.compile

    def spied(self: jinja2.Environment, source: str, name: str, *args: object, **kwargs: object) -> object:
        names.append(name)
        return real(self, source, name, *args, **kwargs)

    monkeypatch.setattr(jinja2.Environment, "compile", spied)
    return names


def load(folder: Path | None = None) -> jinja2.Template:
    """Load a template as a new process does."""
    kernel_store._examined.clear()
    return make_environment(folder or templates_folder()).get_template(NAME)


def test_a_template_is_compiled_once(machine: Path, compiled: list[str]) -> None:
    load()
    load()
    assert compiled == [NAME]


def test_another_text_is_another_template(machine: Path, compiled: list[str], tmp_path_factory) -> None:
    for text in ("one", "two", "one"):
        folder = tmp_path_factory.mktemp("templates")
        (folder / NAME).write_text(text)
        assert load(folder).render() == text
    assert compiled == [NAME] * 2


@pytest.mark.parametrize("content", [b"", b"short", b"0" * 4000])
def test_a_damaged_file_is_replaced(machine: Path, compiled: list[str], content: bytes) -> None:
    load()
    (file,) = (machine / "templates").iterdir()
    whole = file.read_bytes()
    for damaged in (content, whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]):
        file.write_bytes(damaged)
        load()
        assert file.read_bytes() == whole
    assert compiled == [NAME] * 4


def test_files_in_a_folder_that_others_can_write_are_not_used(machine: Path, compiled: list[str]) -> None:
    load()
    (machine / "templates").chmod(0o777)
    load()
    assert compiled == [NAME] * 2


def test_the_cache_may_be_deleted_at_any_time(machine: Path, compiled: list[str]) -> None:
    environment = make_environment(templates_folder())
    environment.get_template(NAME)
    for file in (machine / "templates").iterdir():
        file.unlink()
    (machine / "templates").rmdir()
    environment.get_template("backward_dq.py.jinja")
    assert len(list((machine / "templates").iterdir())) == 1


@pytest.mark.parametrize("folder", ["/proc/none", None])
def test_templates_are_compiled_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], folder: str | None
) -> None:
    store = None if folder is None else kernel_store.KernelStore(Path(folder))
    monkeypatch.setattr(jinja, "open_store", lambda wanted: store)
    load()
    load()
    assert compiled == [NAME] * 2
