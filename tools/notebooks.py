"""Run the notebooks of examples/notebooks on the CPU. Needs the environment of the tests.

    python tools/notebooks.py                   run all, and write their outputs into the files
    python tools/notebooks.py masks quickstart  only these
    python tools/notebooks.py --check           write nothing, and exit with an error if outputs differ from the files

Written outputs contain no times and no random ids, so running an unchanged notebook again changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LIMIT_S = 120  # of a cell

NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?")

Output = tuple[str, tuple[str, ...], str]  # its type, its MIME types and, unless it is a picture, its text


def run(path: Path) -> NotebookNode:
    """Return a notebook with new outputs, as it is written. Raise CellExecutionError if a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    # The package of this clone, no GPU and one thread, so that each machine writes the same outputs.
    changes = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "MPLBACKEND": None}
    env = {name: text for name, text in (os.environ | changes).items() if text is not None}
    client = NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    asyncio.run(client.async_execute(env=env))
    return normalized(notebook, path.stem)


def normalized(notebook: NotebookNode, name: str) -> NotebookNode:
    """Return a copy without what differs between runs: times, ids, and how often a cell's stream was flushed."""
    notebook = deepcopy(notebook)
    notebook.metadata = NotebookNode(METADATA)
    notebook.nbformat_minor = 5
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"{name}-{i}", NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = _merged(cell.outputs)
    nbformat.validate(notebook)
    return notebook


def _merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighboring outputs of one stream."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def outputs(notebook: NotebookNode) -> list[list[Output]]:
    """Return what is compared of the outputs of each code cell."""
    return [[_compared(x) for x in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def _compared(output: NotebookNode) -> Output:
    if output.output_type == "stream":
        return output.name, (), output.text
    types = tuple(sorted(output.data))
    is_picture = any(name.startswith("image/") for name in types)
    return output.output_type, types, "" if is_picture else output.data["text/plain"]


def differences(committed: NotebookNode, new: NotebookNode) -> list[str]:
    """Return a line for each code cell whose outputs differ."""
    pairs = zip(outputs(committed), outputs(new), strict=True)
    return [
        f"code cell {i}: {old} in the file, {now} now" for i, (old, now) in enumerate(pairs, 1) if not same(old, now)
    ]


def same(old: list[Output], new: list[Output]) -> bool:
    """Return whether outputs are equal, except for the last digits of numbers with a point, and spaces."""
    if len(old) != len(new) or any(x[:2] != y[:2] for x, y in zip(old, new, strict=True)):
        return False
    return all(_same_text(x[2], y[2]) for x, y in zip(old, new, strict=True))


def _same_text(old: str, new: str) -> bool:
    """CPUs and versions of torch round differently, and the width of a column may follow a number."""
    words, others = (NUMBER.sub("#", text).split() for text in (old, new))
    numbers, found = ([float(x) for x in NUMBER.findall(text)] for text in (old, new))
    return words == others and all(math.isclose(x, y, rel_tol=2e-3) for x, y in zip(numbers, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(path.stem for path in NOTEBOOKS)], metavar="name")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    failed = False
    for path in NOTEBOOKS:
        if arguments.names and path.stem not in arguments.names:
            continue
        new = run(path)
        if arguments.check:
            found = differences(nbformat.read(path, as_version=4), new)
            failed |= bool(found)
            print("\n".join([f"{path.stem}: {'different' if found else 'the same'}", *found]), flush=True)
        else:
            nbformat.write(new, path)
            print(f"{path.stem}: written, {path.stat().st_size:,} bytes", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
