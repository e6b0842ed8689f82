"""The code of the README, and of pages of docs, runs as it stands."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import flexattn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL_LINES = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=lambda code: f"block {PYTHON_BLOCKS.index(code)}")
def test_python_block(code, tmp_path, monkeypatch):
    # A mod's errors name its file and line, so the code needs a file.
    path = tmp_path / "readme.py"
    path.write_text(code)
    exec(compile(code, path, "exec"), {"__name__": "readme"})


PAGES = [
    "concepts", "decoding", "errors", "explain", "features", "getting-started", "index", "migrating", "mods",
    "mods-list", "sdpa", "torch-flex", "varlen", "visualization", "vllm",
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch):
    """The blocks of a page continue each other. They may write files."""
    if page == "visualization":
        pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    path = tmp_path / f"{page}.py"
    path.write_text("\n".join(blocks))
    assert blocks
    exec(compile(path.read_text(), path, "exec"), {"__name__": page})
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def test_the_list_of_ready_mods_is_complete():
    page = (ROOT / "docs" / "mods-list.md").read_text()
    made = {name for name, value in vars(flexattn.mods).items() if inspect.isfunction(value)}
    assert set(re.findall(r"`(\w+)(?:\(.*?\))?`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))) == made


@pytest.mark.slow
def test_explain_from_the_shell_prints_graph_facts_and_kernels():
    page = (ROOT / "docs" / "features.md").read_text()
    (line,) = re.findall(r"^python -m flexattn explain.*$", page, re.MULTILINE)
    command = [sys.executable, *shlex.split(line)[1:]]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for stage in ("call", "score_mod", "engine"):
        assert f"-- {stage}" in printed, printed[:2000]
    assert printed.startswith("def alibi_8(") and "kernels for sm_90:" in printed


def test_stability_names_the_versions_and_what_is_deprecated():
    page = (ROOT / "docs" / "stability.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"Python": project["requires-python"]}
    for line in [*project["dependencies"], *project["optional-dependencies"]["transformers"]]:
        name, version = re.match(r"(\w+)(>=[\d.]+)", line).groups()
        needed[name] = version
    for name, version in re.findall(r"^\| (\w+)[^|]* \| (>= [\d.]+) \|", page, re.MULTILINE):
        assert version.replace(" ", "") == needed.pop(name)
    assert set(needed) == {"numpy", "sympy", "jinja2"}
    assert f"The version is {flexattn.__version__}" in page and f"meaning within {flexattn.__version__[:3]}" in page
    experimental = page.split("## Experimental")[1].split("##")[0]
    for path in re.findall(r"`flexattn\.([\w.]+)`", experimental):
        importlib.import_module(f"flexattn.{path}") if "." in path else getattr(flexattn, path)

    q = torch.zeros(1, 1, 16, 16)
    flexattn.api._warn_return_lse.cache_clear()
    for kind in (FutureWarning, DeprecationWarning):
        assert f" {kind.__name__}" in page.split("## Deprecated")[1]
    with pytest.warns(FutureWarning, match="return_aux=AuxRequest"):
        flexattn.flex_attention(q, q, q, return_lse=True)
    with pytest.warns(DeprecationWarning, match="Leave it out"):
        flexattn.create_block_mask(flexattn.mods.causal, None, None, 16, 16, device="cpu", _compile=True)


def test_pictures_are_images_with_a_text():
    for page in (ROOT / "docs").rglob("*.md"):
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(text) > 20, page
            if target.endswith(".svg"):
                ElementTree.parse(page.parent / target)


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in SHELL_LINES if line.startswith("make ")}
    assert named and named <= targets


def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


@pytest.mark.parametrize(
    "page", [Path("README.md"), *(p.relative_to(ROOT) for p in sorted((ROOT / "docs").rglob("*.md")))], ids=str
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / page.parent / target).exists(), target


def test_each_public_name_has_its_place_in_the_api_pages():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    described = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    for package in (flexattn, flexattn.mods):
        names = {path.removeprefix(f"{package.__name__}.").split(".")[-1] for path in described}
        public = getattr(package, "__all__", None) or [n for n, x in vars(package).items() if callable(x)]
        assert not [name for name in public if name not in names]
