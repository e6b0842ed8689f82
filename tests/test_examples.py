"""Each example runs, checks itself against the reference, and stays short; so do the notebooks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("[01]*.py"))
MODELS = ("11_paged_generation", "12_jagged_training", "15_context_parallel")  # with a small model
OF_PROCESSES = "15_context_parallel"  # they import the script
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000
OF_MACHINES = ("/root", "/home/", "/tmp", "ipykernel_", " at 0x", "\x1b[")  # texts that no output may contain


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load(ROOT / "tools" / "notebooks.py")


def test_the_ladder_is_whole():
    assert [p.name[:2] for p in SCRIPTS] == [f"{n:02}" for n in range(1, 16)]
    assert [p.stem for p in NOTEBOOKS] == [
        "debugging_a_mod", "inside_the_compiler", "masks", "packed_documents", "paged_decoding", "quickstart",
        "score_mods",
    ]  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_short(path):
    assert len(path.read_text().splitlines()) < (110 if path.stem in MODELS else 60)


@pytest.mark.slow
def test_script_that_starts_processes():
    (path,) = (path for path in SCRIPTS if path.stem == OF_PROCESSES)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, path], env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.stem != OF_PROCESSES], ids=lambda path: path.stem)
def test_script(path):
    module = load(path)
    torch.manual_seed(0)
    module.main()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_its_outputs(path):
    pytest.importorskip("matplotlib")
    assert not tool.differences(nbformat.read(path, as_version=4), tool.run(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_file(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert tool.normalized(notebook, path.stem) == notebook, "run make notebooks"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run make notebooks"
    assert path.stat().st_size < MOST_BYTES
    written = "".join(output[2] for outputs in tool.outputs(notebook) for output in outputs)
    assert written and not [word for word in OF_MACHINES if word in written]
    title, question = notebook.cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ") and question.startswith("*") and question.endswith("?*")
    assert code[-1].outputs or "assert" in code[-1].source, "ends with a picture or a check"


def test_each_notebook_is_in_the_documentation():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    for path in NOTEBOOKS:
        question = nbformat.read(path, as_version=4).cells[0].source.split("\n\n")[1].strip("*")
        (line,) = [line for line in page.splitlines() if f"(../examples/notebooks/{path.name})" in line]
        assert question in line


def small(*outputs: NotebookNode) -> NotebookNode:
    return new_notebook(cells=[new_code_cell("x", outputs=list(outputs))])


def printed(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


def picture(data: str) -> NotebookNode:
    return new_output("display_data", {"image/png": data, "text/plain": "<Figure size 640x480>"})


def test_outputs_that_differ_are_found():
    """Pictures need only exist. The last digits of numbers and spaces may differ; nothing else may."""
    numbers = small(printed("error  2.2508\nrows 12"), picture("a"))
    for other in (small(printed("error 2.251\nrows 12"), picture("b")), numbers):
        assert not tool.differences(numbers, other)
    for other in (
        small(printed("error  2.2508\nrows 13"), picture("a")),
        small(printed("error  2.3508\nrows 12"), picture("a")),
        small(printed("error  nan\nrows 12"), picture("a")),
        small(printed("error  2.2508\nrows 12")),
        small(picture("a"), printed("error  2.2508\nrows 12")),
        small(printed("error  2.2508\nrows 12"), new_output("display_data", {"text/plain": "<Figure size 640x480>"})),
        small(new_output("stream", name="stderr", text="error  2.2508\nrows 12"), picture("a")),
        small(),
    ):
        assert len(tool.differences(numbers, other)) == 1


def test_normalized_notebooks_have_no_times():
    notebook = small(printed("one\n"), printed("two\n"), picture("a"))
    notebook.cells[0].metadata = {"execution": {"iopub.execute_input": "2025-01-01"}}
    before = deepcopy(notebook)
    found = tool.normalized(notebook, "small")
    assert notebook == before
    assert [o.get("text") for o in found.cells[0].outputs] == ["one\ntwo\n", None]
    assert "2025" not in nbformat.writes(found) and found.cells[0].id == "small-0"


@pytest.mark.slow
def test_a_cell_that_raises_is_an_error(tmp_path):
    path = tmp_path / "fails.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("assert False, 'as expected'")]), path)
    with pytest.raises(CellExecutionError, match="as expected"):
        tool.run(path)
