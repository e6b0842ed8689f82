"""The structure of the package: the order of imports, the public names, and a cheap import."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexattn

PACKAGE = Path(flexattn.__file__).parent
# Reading order: a module imports only from those before it. A folder is one layer.
ORDER = (
    "errors", "options", "merge", "reference", "mods", "process", "torch_state", "machine", "graph", "trace",
    "block_mask", "call",
    "kv_cache", "compile", "runtime", "mask_build", "engines", "torch_compile", "tuning", "explain",
    "profile", "counters", "api", "varlen", "integrations", "__init__", "__main__",
)  # fmt: skip
# These modules import Dynamo, which takes a second, and Triton.
LAZY = {"flexattn.kv_cache.append_kernel", "flexattn.call.varlen.kernels"} | {
    f"flexattn.torch_compile.higher_order.{name}" for name in ("REVISION", "HOP")
}
LEAVES = ("mods", "reference")
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}
HEAVY = ("sympy", "triton", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")
MODULES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))


def _layer(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def _dotted(module: Path) -> str:
    return ".".join(("flexattn", *module.with_suffix("").parts)).removesuffix(".__init__")


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names of everything of this package that the tree imports; `from x import y` may mean module x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "flexattn")
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            if (node.module or "").split(".")[0] == "flexattn":
                yield from (f"{node.module}.{a.name}" for a in node.names)


def _module_of(name: str) -> str:
    """Return the module that `name` is or is defined in."""
    known = {_dotted(m) for m in MODULES}
    return name if name in known else name.rpartition(".")[0]


def _tree(module: Path) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_to_earlier_layers(module: Path) -> None:
    layer = _layer(module)
    assert layer in ORDER, f"{module} has no place in ORDER"
    imported = [_module_of(name) for name in _imports(_tree(module))]
    layers = {name.split(".")[1] if "." in name else "__init__" for name in imported}
    if layer in LEAVES:
        assert layers <= {layer}
    elif layer != "__init__":
        late = {other for other in layers - {layer} if ORDER.index(other) > ORDER.index(layer)}
        assert not late, f"{module} imports {sorted(late)}, which come later"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_is_named_for_what_is_in_it(module: Path) -> None:
    parts = {part for name in module.with_suffix("").parts for part in name.split("_")}
    assert not parts & VAGUE_NAMES


PACKAGES = [m for m in MODULES if m.name == "__init__.py"]


@pytest.mark.parametrize("module", PACKAGES, ids=str)
def test_a_package_says_in_one_sentence_what_it_is(module: Path) -> None:
    docstring = ast.get_docstring(_tree(module))
    assert docstring is not None, "no docstring"
    first = docstring.partition("\n\n")[0]
    assert first.endswith(".")
    assert not re.search(r"\.\s", first), "more than one sentence"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_import_of_the_package_hides_in_a_function_or_condition(module: Path) -> None:
    tree = _tree(module)
    hidden = [
        name for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom)) for name in _imports(node)
    ]
    assert set(hidden) <= LAZY


def test_modules_import_each_other_without_cycles() -> None:
    graph = {_dotted(m): {_module_of(n) for n in _imports(_tree(m))} - {_dotted(m)} for m in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_public_names() -> None:
    assert flexattn.__all__ == [
        "AuxOutput", "AuxRequest", "BlockMask", "Counters", "Explanation", "FlexAttentionError", "FlexKernelOptions",
        "PagedKVCache",
        "Profile", "Tuning", "and_masks", "counters", "create_block_mask", "create_mask", "dropout_mask", "explain",
        "flex_attention", "merge_attention", "mods", "noop_mask", "or_masks", "profile", "reference",
            "register_operator", "tune", "varlen_attn", "varlen_attn_out",
    ]  # fmt: skip
    assert all(hasattr(flexattn, name) for name in flexattn.__all__)
    assert dir(flexattn) == sorted([*flexattn.__all__, "__version__"])


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert flexattn.__version__ == project["version"]
    assert (PACKAGE / "py.typed").exists()


def test_the_door_holds_names_only() -> None:
    docstring, *statements = _tree(Path("__init__.py")).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(s, (ast.ImportFrom, ast.Assign)) for s in statements)


def test_import_is_cheap_and_needs_no_triton() -> None:
    script = f"""
import sys, torch
sys.modules["triton"] = None
before = set(sys.modules)
import flexattn
print([name for name in {HEAVY} if sys.modules.get(name) is not None and name not in before])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
