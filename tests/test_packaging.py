"""Templates are found from a wheel, from an editable install and from a clone; nothing else is packed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import editables  # noqa: F401 - without it, an editable install cannot be built, and this file is left out
import hatchling  # noqa: F401
import pytest

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted(p.name for p in (ROOT / "templates").iterdir() if p.is_file())
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation")
ASK = "from flexattn.compile.templates import templates_folder; print(templates_folder())"


def install(tmp_path: Path, *what: str) -> Path:
    """Install into an environment of its own, which sees the packages of this one; return its python."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    (purelib,) = (folder / "lib").glob("python*/site-packages")
    # The packages only, not what their .pth files add: that may be this very clone.
    (purelib / "packages.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", *PIP_OPTIONS, *what], check=True)
    return python


def templates_seen_by(python: Path, folder: Path) -> Path:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(python), "-c", ASK], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *PIP_OPTIONS, "-w", str(folder), str(ROOT)], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_package_and_templates_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if "dist-info" not in n} == {"flexattn"}
    assert sorted(n.split("/")[-1] for n in names if n.startswith("flexattn/templates/")) == TEMPLATES
    assert "flexattn/compile/tiles.json" in names
    assert not any(n.endswith(".pyc") for n in names)


def test_templates_from_a_wheel(wheel, tmp_path):
    folder = templates_seen_by(install(tmp_path, str(wheel)), tmp_path)
    assert folder.is_relative_to(tmp_path) and folder.parent.name == "flexattn"
    assert sorted(p.name for p in folder.iterdir()) == TEMPLATES


@pytest.mark.slow
def test_templates_from_an_editable_install(tmp_path):
    python = install(tmp_path, "--editable", str(ROOT))
    assert templates_seen_by(python, tmp_path) == ROOT / "templates"


def test_templates_from_a_clone():
    assert templates_seen_by(Path(sys.executable), ROOT) == ROOT / "templates"


def test_pins_satisfy_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().lower()
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in wanted:
        name = requirement.split(">=")[0].split("[")[0].strip()
        assert f"\n{name.lower()}==" in pins, f"{name} has no pin in constraints.txt"
