"""Templates are found from a wheel, from an editable install and from a clone; nothing else is packed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from itertools import chain
from pathlib import Path

import editables  # noqa: F401 - without it, an editable install cannot be built, and this file is left out
import hatchling  # noqa: F401
import pytest
from packaging.requirements import Requirement

from flexattn.machine import triton_versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """Return what a package with these requirements needs, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        if wanted.name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[wanted.name] = distribution(wanted.name)
        waiting += [Requirement(text) for text in found[wanted.name].requires or ()]
    return found


def install_alone(folder: Path, wheel: Path) -> Path:
    """Install a wheel into an environment that has nothing but what the wheel requires; return its python.

    There is no network, so the required packages are links to those of this environment.
    """
    venv.create(folder, symlinks=True)
    (purelib,) = (folder / "lib").glob("python*/site-packages")
    for package in needed(PROJECT["dependencies"]).values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (purelib / top).exists():
                (purelib / top).symlink_to(str(package.locate_file(top)))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    subprocess.run([*pip, *PIP_OPTIONS, str(wheel)], check=True)
    return python


def printed(python: Path, folder: Path, code: str) -> str:
    """Return what code prints, without this clone and without the user's packages."""
    done = subprocess.run([str(python), "-I", "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


FIRST_CALL = """
import flexattn, sys, torch
q = torch.randn(1, 2, 64, 16, requires_grad=True)
mask = flexattn.create_block_mask(flexattn.mods.causal, None, None, 64, 64, device="cpu")
out = flexattn.flex_attention(q, q, q, flexattn.mods.softcap(20.0), mask)
out.sum().backward()
print(tuple(out.shape), q.grad is not None, "pytest" in sys.modules, flexattn.__file__)
"""
SOURCE = """
import flexattn, torch
q = torch.randn(1, 2, 64, 16)
print("@triton.jit" in flexattn.explain(q, q, q, flexattn.mods.alibi(2), target="sm_80").full())
"""


def test_a_wheel_in_an_empty_environment(wheel, tmp_path):
    python = install_alone(tmp_path / "alone", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert printed(python, elsewhere, "import flexattn; print(flexattn.__version__)") == PROJECT["version"]
    shape, where = printed(python, elsewhere, FIRST_CALL).rsplit(" ", 1)
    assert shape == "(1, 2, 64, 16) True False"
    assert Path(where).is_relative_to(tmp_path / "alone")
    assert printed(python, elsewhere, SOURCE) == "True"
    with pytest.raises(AssertionError, match="No module named 'pytest'"):
        printed(python, elsewhere, "import pytest")


@pytest.mark.slow
def test_templates_from_an_editable_install(tmp_path):
    python = install(tmp_path, "--editable", str(ROOT))
    assert templates_seen_by(python, tmp_path) == ROOT / "templates"


def test_templates_from_a_clone():
    assert templates_seen_by(Path(sys.executable), ROOT) == ROOT / "templates"


def test_pins_satisfy_the_bounds():
    pins = (ROOT / "constraints.txt").read_text().lower()
    for requirement in [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]:
        name = requirement.split(">=")[0].split("[")[0].strip()
        assert f"\n{name.lower()}==" in pins, f"{name} has no pin in constraints.txt"


def stated(name: str) -> tuple[str, list[str]]:
    """Return the least version and the tested ones, as the README states them."""
    found = re.search(rf"{name} >= ([\d.]+) \(tested: ([\d., ]+)\)", (ROOT / "README.md").read_text())
    assert found is not None, f"the README does not state the versions of {name}"
    return found[1], found[2].split(", ")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_supported_versions_are_stated_once(name):
    least, tested = stated(name)
    (bound,) = (Requirement(text).specifier for text in PROJECT["dependencies"] if Requirement(text).name == name)
    (pin,) = re.findall(rf"^{name}==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert str(bound) == f">={least}"
    assert (tested[0], tested[-1]) == (least, pin)


def test_the_tested_versions_of_triton_are_those_in_the_code():
    _, tested = stated("triton")
    assert {tuple(version.split(".")) for version in tested} == triton_versions._CHECKED
    checked = re.search(r"checked: ([\d., ]+)", str(triton_versions.__doc__))
    assert checked is not None
    assert [version.rpartition(".")[0] for version in checked[1].split(", ")] == tested
