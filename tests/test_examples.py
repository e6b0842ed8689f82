"""Each example runs, checks itself against the reference, and stays short; so do the notebooks."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("[01]*.py"))
MODELS = ("11_paged_generation", "12_jagged_training")  # with a small model
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_the_ladder_is_whole():
    assert [p.name[:2] for p in SCRIPTS] == [f"{n:02}" for n in range(1, 15)]
    assert [p.stem for p in NOTEBOOKS] == ["masks", "quickstart", "score_mods"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path):
    assert len(path.read_text().splitlines()) < (110 if path.stem in MODELS else 60)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    module.main()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    asyncio.run(client.async_execute())
