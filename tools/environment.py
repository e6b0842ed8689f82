"""Create a virtual environment for the demo, the tests or the documentation. Needs only Python >= 3.11.

    python3 tools/environment.py .venv          what the package needs to run: enough for the demo
    python3 tools/environment.py .venv --tests  also what the tests need
    python3 tools/environment.py .venv-docs --docs  only what builds the documentation, which needs no torch

If the running interpreter has torch and triton within the bounds of pyproject.toml (a machine set up for its GPU), the
environment reads them from there and installs only what is missing, so a machine without a network continues with
what it has. Otherwise everything is installed, in the versions of constraints.txt. What is downloaded is printed first.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOUNDED = ("torch", "triton") if platform.system() == "Linux" else ("torch",)
RUNTIME = (*BOUNDED, "numpy", "sympy", "jinja2")
RUNS = "runs"  # the file that make leaves in an environment for the demo
FIND = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
"""


def main(folder: Path, tests: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    borrowed = all(satisfies(name, project["dependencies"]) for name in BOUNDED)
    python = create(folder, borrowed, clear=not (tests and (folder / RUNS).exists()))
    if borrowed:
        print(f"using torch {version('torch')} of {sys.executable}")
        pins = [line for line in pinned() if installed(re.split("[=;]", line)[0].strip()) is None]
    else:
        pins = pinned()
    retries = 0 if borrowed else 3
    wanted = [project["dependencies"]]
    if tests:
        wanted = [[*project["dependencies"], *optional["test"]], [*optional["plot"], *optional["transformers"]]]
    absent = missing_of(python, [name for requirements in wanted for name in requirements])
    print(f"to download: {', '.join(absent)}, and what they need" if absent else "nothing to download", flush=True)
    installs = [install(python, requirements, pins, retries) for requirements in wanted]
    missing = [name for name in RUNTIME if not runs(python, "-c", f"import {name}")]
    if missing:
        sys.exit(f"could not install {', '.join(missing)}: connect to a package index, or install them manually")
    if not all(installs):
        print("some packages could not be installed: steps and tests that need them are skipped, each with a note")


def documentation(folder: Path) -> None:
    """Create the environment that builds the documentation. It needs neither torch nor what the tests need."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    python = create(folder, borrowed=False, clear=True)
    print(f"to download: {', '.join(missing_of(python, wanted))}, and what they need", flush=True)
    if not install(python, wanted, pinned(), retries=3):
        print("some packages could not be installed: the documentation is not built")


def satisfies(name: str, requirements: list[str]) -> bool:
    """Return whether the running interpreter has `name` in at least the required version."""
    found = installed(name)
    bound = next(re.match(rf"{name}\s*>=\s*([\d.]+)", r) for r in requirements if r.startswith(name))
    return found is not None and bound is not None and numbers(found) >= numbers(bound[1])


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:2])


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def missing_of(python: Path, requirements: list[str]) -> list[str]:
    """Return the names of required packages that an environment does not have."""
    system = platform.system()
    here = [r for r in requirements if "platform_system" not in r or f"'{system}'" in r]
    return output(python, "-c", FIND, *(re.split(r"[\[>=; ]", r)[0] for r in here)).split()


def create(folder: Path, borrowed: bool, clear: bool) -> Path:
    """Create the environment, with this clone on its path and, if `borrowed`, the packages of this interpreter."""
    with_pip = importlib.util.find_spec("ensurepip") is not None
    venv.create(folder, clear=clear, with_pip=with_pip, symlinks=True)
    python = folder.absolute() / "bin" / "python"  # not resolved: the link makes it the environment's own interpreter
    purelib = output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # A .pth file, because --system-site-packages would skip the packages of an interpreter that is itself in a venv.
    paths = [str(ROOT), *(p for p in sys.path if borrowed and p.endswith(("site-packages", "dist-packages")))]
    (Path(purelib) / "flexattn-clone.pth").write_text("\n".join(paths) + "\n")
    return python


def install(python: Path, wanted: list[str], pins: list[str], retries: int) -> bool:
    """Install `wanted` with the versions in `pins`; return whether it succeeded."""
    pip = [str(python), "-m", "pip"]
    if not runs(python, "-m", "pip", "--version"):
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    options = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location", f"--retries={retries}"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins) + "\n")
        constraints.flush()
        return subprocess.run([*pip, "install", *options, "-c", constraints.name, *wanted]).returncode == 0


def runs(python: Path, *arguments: str) -> bool:
    return subprocess.run([str(python), *arguments], capture_output=True).returncode == 0


def output(python: Path, *arguments: str) -> str:
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    if "--docs" in sys.argv[2:]:
        documentation(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), tests="--tests" in sys.argv[2:])
