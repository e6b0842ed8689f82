"""Type checkers accept a user's file, and the file runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [str(ROOT / "tests" / name) for name in ("typed_user.py", "typed_calls.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_strict(tmp_path):
    run(tmp_path, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), *FILES)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright(tmp_path):
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for file in FILES:
        (tmp_path / Path(file).name).symlink_to(file)
    run(tmp_path, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path))


# CI runs no GPU tests, so what they import and call could be gone.
NAMES = ("reportAttributeAccessIssue", "reportFunctionMemberAccess", "reportUndefinedVariable", "reportMissingImports")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_names_in_gpu_tests_exist(tmp_path):
    tests = Path(__file__).parent
    settings = {
        "typeCheckingMode": "off", **dict.fromkeys(NAMES, "error"), "extraPaths": [str(ROOT), str(tests)],
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for file in tests.glob("test_gpu*.py"):
        (tmp_path / file.name).symlink_to(file)
    run(tmp_path, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path))


def test_the_file_runs(tmp_path):
    run(tmp_path, "-W", "error::UserWarning", FILES[0])
