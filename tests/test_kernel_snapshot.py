"""tools/kernel_snapshot.py: what it takes for the same kernel, and what not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).parent.parent / "tools" / "kernel_snapshot.py"
SPEC = importlib.util.spec_from_file_location("kernel_snapshot", PLACE)
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

TEXT = '''"""A kernel."""
import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(16)


@triton.jit
def halve(x, by):
    return x / by


@triton.jit
def kernel(x_ptr, n):
    """Halve x."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    mask = offs < n
    tl.store(x_ptr + offs, halve(x, by=2.0), mask=mask)
'''
SOURCE = {
    "name": "kernel", "signature": [["x_ptr", "*fp32"], ["n", "i32"]], "divisible": ["x_ptr"], "num_warps": 4,
    "num_stages": 1, "maxnreg": None, "fp_fusion": True, "text": TEXT,
}  # fmt: skip


def changed(*replacements: tuple[str, str], **fields: Any) -> dict[str, Any]:
    text = TEXT
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return {**SOURCE, "text": text, **fields}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "comments": (changed(("    x = ", "    # Loads.\n    x  =  ")), tool.IDENTICAL),
    "docstrings": (changed(('    """Halve x."""\n', ""), ("A kernel", "Another")), tool.IDENTICAL),
    "lines": (changed(("(x_ptr + offs, mask", "(\n        x_ptr + offs,\n        mask")), tool.IDENTICAL),
    "variable": (changed(("offs", "places")), tool.RENAMED),
    "variable named as a keyword of tl": (
        changed(("    mask = ", "    live = "), ("mask=mask", "mask=live")), tool.RENAMED,
    ),
    "function and its keyword": (changed(("halve", "divide"), ("by", "divisor")), tool.RENAMED),
    "constant's name": (changed(("BLOCK", "SIZE")), tool.RENAMED),
    "argument": (changed(("x_ptr", "y_ptr"), signature=[["y_ptr", "*fp32"], ["n", "i32"]], divisible=["y_ptr"]),
                 tool.RENAMED),
    "kernel": (changed(("def kernel", "def other"), name="other"), tool.RENAMED),
    "two variables as one": (changed(("    mask = ", "    x = "), ("mask=mask", "mask=x")), tool.DIFFERENT),
    "one call for another": (changed(("tl.store", "tl.atomic_add")), tool.DIFFERENT),
    "constant": (changed(("(16)", "(32)")), tool.DIFFERENT),
    "order of operands": (changed(("x / by", "by / x")), tool.DIFFERENT),
    "keyword of tl": (changed(("mask=offs", "other=offs")), tool.DIFFERENT),
    "type": (changed(signature=[["x_ptr", "*fp32"], ["n", "i64"]]), tool.DIFFERENT),
    "alignment": (changed(divisible=[]), tool.DIFFERENT),
    "warps": (changed(num_warps=8), tool.DIFFERENT),
    "fusion": (changed(fp_fusion=False), tool.DIFFERENT),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str):
    other, expected = CASES[name]
    assert tool.verdict(SOURCE, other) == tool.verdict(other, SOURCE) == expected


def write(folder: Path, **fields: Any) -> Path:
    record = {"name": "a", "target": "sm_80", "engine": "triton", "graphs": {}, "words": "", "mask_sources": []}
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps({**record, "sources": [SOURCE], **fields}))
    return folder


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = write(tmp_path / "before")
    renamed = write(tmp_path / "renamed", sources=[CASES["variable"][0]], words="in other words")
    assert tool.compare(before, renamed) == 0
    assert "in other words" in capsys.readouterr().out
    for name, fields in (
        ("kernel", {"sources": [CASES["constant"][0]]}), ("missing", {"sources": []}), ("engine", {"engine": "cpu"}),
        ("graph", {"graphs": {"score": "x"}}), ("problem", {"name": "b"}),
    ):  # fmt: skip
        assert tool.compare(before, write(tmp_path / name, **fields)) == 1, name


def test_assembly_is_numbered_as_it_appears():
    one = ".loc 1 2\nadd %r7, %r3, 1; // comment\nbra $L__BB0_4;\n.section .debug_info\nx"
    other = "add %r8, %r1, 1;\nbra $L__BB0_2;"
    assert tool.canonical(one, "//") == tool.canonical(other, "//") != tool.canonical("add %r8, %r8, 1;", "//")
