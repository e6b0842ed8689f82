"""Each recipe of docs/cookbook runs alone, checks its own result, and is listed in the index."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import flexattn
from flexattn.integrations import transformers as bridge

DOCS = Path(__file__).parent.parent / "docs"
INDEX = (DOCS / "cookbook.md").read_text()
PAGES = sorted((DOCS / "cookbook").glob("*.md"))


class Recipe(NamedTuple):
    """One section of a page."""

    page: str
    title: str
    text: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def name(self) -> str:
        return f"{self.page}/{self.anchor}"

    @property
    def blocks(self) -> list[str]:
        return re.findall(r"^```python\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)


def recipes() -> list[Recipe]:
    sections = ((page.stem, s) for page in PAGES for s in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:])
    return [Recipe(page, *section.split("\n", 1)) for page, section in sections]


RECIPES = recipes()
ALL = [pytest.param(r, id=r.name) for r in RECIPES]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[[Recipe], None]:
    """Return a function that runs a recipe in a file of its own, as errors of mods name file and line."""
    monkeypatch.chdir(tmp_path)

    def runner(recipe: Recipe) -> None:
        if "transformers" in recipe.blocks[0]:
            pytest.importorskip("transformers")
        path = tmp_path / f"{recipe.page}.py"
        path.write_text(recipe.blocks[0])
        try:
            exec(compile(path.read_text(), path, "exec"), {"__name__": "recipe"})
        finally:
            left_on = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(False)
        assert not left_on, "the recipe leaves a setting of torch changed"

    return runner


@pytest.mark.parametrize("recipe", ALL)
def test_recipe(recipe, run):
    run(recipe)


# These check other functions (`debug`, `verify`, `statistics`), which do not call flex_attention by its public name.
UNDISTURBED = {
    "checks/check-a-mod-of-your-own",
    "checks/find-a-nan",
    "checks/a-nan-in-a-gradient-only",
    "checks/where-attention-goes",
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [p for p in ALL if p.id not in UNDISTURBED])
def test_recipe_notices_a_wrong_result(recipe, run, monkeypatch):
    """The checks of a recipe can fail. Each call returns values that are wrong by some percent, the next by more."""
    calls = 0

    def disturbed(attend: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            found = attend(*arguments, **options)
            factor = 1 + 0.05 * calls
            return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

        return wrong

    places = [(flexattn, "flex_attention"), (flexattn, "varlen_attn")]
    if recipe.page == "libraries":
        places.append((bridge, "flex_attention"))
    for module, name in places:
        monkeypatch.setattr(module, name, disturbed(getattr(module, name)))
    with pytest.raises(Exception) as raised:
        run(recipe)
    assert "Tensor-likes are not" in str(raised.value) or isinstance(raised.value, AssertionError)
    assert calls


def test_there_are_recipes():
    assert len(RECIPES) >= 20
    assert len({r.name for r in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_form_of_a_recipe(recipe):
    """One sentence or two, one block that checks or prints, and a few sentences with a link to more."""
    assert len(recipe.blocks) == 1
    code = recipe.blocks[0]
    before, after = (part.strip() for part in recipe.text.split(f"```python\n{code}```"))
    assert before and after
    assert "](" in after, "no link to a page with more"
    assert 8 <= len(code.splitlines()) <= 42
    assert max(map(len, code.splitlines())) <= 88  # the width of the site's column
    assert re.search(r"^\s*(assert |torch\.testing\.assert_close|print)", code, re.MULTILINE)


def test_the_blocks_are_linted(tmp_path):  # `ruff format` formats them in the pages
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    for recipe in RECIPES:
        (tmp_path / f"{recipe.page}_{recipe.anchor}.py").write_text(recipe.blocks[0])
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,B,UP", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_index_links_each_recipe_once():
    links = re.findall(r"^\| \[([^\]]+)\]\(cookbook/(\w+)\.md#([\w-]+)\) \| .+ \|$", INDEX, re.MULTILINE)
    assert sorted(links) == sorted((r.title, r.page, r.anchor) for r in RECIPES)


def test_the_navigation_lists_each_page():
    nav = (DOCS.parent / "mkdocs.yml").read_text()
    listed = re.search(r"- Cookbook:\n((?:      - .*\n)+)", nav)
    assert listed
    pages = re.findall(r"- .*: (cookbook[\w/]*\.md)\n", listed[1])
    assert sorted(pages) == sorted(["cookbook.md", *(f"cookbook/{page.name}" for page in PAGES)])
