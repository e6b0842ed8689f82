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
import torch.nn.attention.flex_attention

import flexattn

PACKAGE = Path(flexattn.__file__).parent
# Reading order: a module imports only from those before it. A folder is one layer.
ORDER = (
    "errors", "options", "merge", "reference", "mods", "layout", "process", "torch_state", "machine", "graph", "trace",
    "block_mask", "call",
    "kv_cache", "compile", "runtime", "mask_build", "engines", "torch_compile", "tuning", "printing", "explanation",
    "profiling", "heat_maps", "debugging", "weight_statistics", "counters", "api", "precompiling", "varlen",
    "verification", "sdpa", "integrations", "distributed", "__init__", "command_line", "__main__",
)  # fmt: skip
# These modules import Dynamo, which takes a second, Triton and jinja2.
LAZY = {
    "flexattn.kv_cache.append_kernel", "flexattn.call.varlen.kernels", "flexattn.compile.jinja.make_environment",
} | {f"flexattn.torch_compile.higher_order.{name}" for name in ("REVISION", "HOP")}  # fmt: skip
# The packages and modules that `import flexattn` loads. All are part of each call, except `mods` and `counters`.
LOADED = {
    "api", "block_mask", "call", "compile", "counters", "engines", "errors", "graph", "layout", "machine", "mask_build",
    "mods", "options", "process", "runtime", "torch_compile", "torch_state", "trace",
}  # fmt: skip
LEAVES = ("mods", "reference")
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "misc"}
# What `import flexattn` may load besides its own modules. torch itself has loaded its own dependencies.
OTHERS = {"torch.nn.attention._utils", "torch.nn.attention.flex_attention", "torch.utils._device"}
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
        assert layers <= {layer, "errors"}
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


@pytest.mark.parametrize("module", [m for m in MODULES if m != Path("__init__.py")], ids=str)
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
        "AuxOutput", "AuxRequest", "BlockMask", "Counters", "DebugTable", "Explanation", "FlexAttentionError",
        "FlexKernelOptions", "PagedKVCache", "Precompiled", "Profile", "Statistics", "Tuning", "Verification",
        "and_masks", "counters", "create_block_mask", "create_mask", "debug", "distributed", "dropout_mask", "explain",
        "flex_attention", "install_as_torch_flex", "layout", "merge_attention", "mods", "noop_mask", "or_masks",
        "precompile", "profile", "reference", "register_operator", "sdpa", "show", "statistics", "tiles_redone", "tune",
        "varlen_attn", "varlen_attn_out", "verify",
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
    names, blocks, functions = ast.ImportFrom | ast.Assign, ast.With | ast.If, ast.FunctionDef
    assert all(isinstance(s, names | blocks | functions) for s in statements)
    assert [ast.unparse(s).splitlines()[0] for s in statements if not isinstance(s, names)] == [
        "with paused():", "if TYPE_CHECKING:", "def __getattr__(name: str) -> Any:"
    ]  # fmt: skip
    inner = [s for block in statements if isinstance(block, blocks) for s in block.body]
    assert all(isinstance(s, ast.ImportFrom) for s in inner)


def test_type_checkers_see_the_names_that_are_loaded_on_first_use() -> None:
    (block,) = (s for s in _tree(Path("__init__.py")).body if isinstance(s, ast.If))
    seen = {a.name: f"{s.module}" for s in block.body if isinstance(s, ast.ImportFrom) for a in s.names}
    of_torch = dict.fromkeys(flexattn._OF_TORCH, "torch.nn.attention.flex_attention")
    assert seen == {
        **flexattn._ON_FIRST_USE,
        **dict.fromkeys(("distributed", "reference", "sdpa"), "flexattn"),
        **of_torch,
    }
    assert set(seen) - set(of_torch) <= set(flexattn.__all__)


@pytest.mark.parametrize("name", flexattn._OF_TORCH)
def test_names_that_programs_import_from_torch(name: str) -> None:
    assert getattr(flexattn, name) is getattr(torch.nn.attention.flex_attention, name)


def test_no_module_hides_a_name_that_is_loaded_on_first_use() -> None:
    """Importing the module flexattn.x sets the attribute x of the package."""
    modules = {m.parts[0].removesuffix(".py") for m in MODULES}
    assert modules & set(flexattn._ON_FIRST_USE) == {"distributed", "reference", "sdpa"}


def _of_a_fresh_process(script: str) -> str:
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_loads_the_modules_of_a_call_and_nothing_else() -> None:
    """No Triton, no jinja2, no tracer of torch, and no thread and process. They take 0.02 s to 2 s."""
    found = _of_a_fresh_process("""
import gc, sys, threading, torch
before, threads, collections = set(sys.modules), threading.active_count(), []
gc.callbacks.append(lambda phase, info: collections.append(phase))
sys.modules["triton"] = sys.modules["jinja2"] = None
import flexattn
new = set(sys.modules) - before - {"triton", "jinja2"}
own = {name.split(".")[1] for name in new if name.startswith("flexattn.")}
others = {name for name in new if name.split(".")[0] != "flexattn"}
started = threading.active_count() - threads, flexattn.runtime.compile_workers.started()
operators = torch.ops.flexattn.forward.default, torch.ops.flexattn.backward.floats  # of cached and exported graphs
print((own, others, started, collections.count("stop"), gc.isenabled()))
""")
    own, others, started, collections, collects = ast.literal_eval(found)
    assert own == LOADED
    assert others <= OTHERS
    assert started == (0, 0)
    assert collections <= 3, "there were 55, and one examined all objects of torch"
    assert collects


@pytest.mark.parametrize("name", flexattn.__all__)
def test_each_name_is_available_by_itself(name: str) -> None:
    assert getattr(flexattn, name) is vars(flexattn)[name]


def test_names_are_loaded_on_first_use() -> None:
    found = _of_a_fresh_process("""
import sys, flexattn
names = sorted(flexattn._ON_FIRST_USE)
loaded = [name for name in names if name in vars(flexattn) or flexattn._ON_FIRST_USE[name] in sys.modules]
from flexattn import explain, tune
import flexattn.explanation, flexattn.profiling, flexattn.varlen, flexattn.merge
modules = [n for n in names if not callable(getattr(flexattn, n))]
print(loaded, modules == ["distributed", "reference", "sdpa"])
print(flexattn.reference.attention.__module__, flexattn.explain is explain, hasattr(flexattn, "explanations"))
""")
    assert found == "[] True\nflexattn.reference True False"


def test_a_star_import_gives_all_names() -> None:
    found = _of_a_fresh_process(
        "import flexattn\nfrom flexattn import *\nprint(set(flexattn.__all__) <= set(globals()))"
    )
    assert found == "True"


def test_only_the_init_of_a_frozen_class_is_compiled() -> None:
    """`@dataclass` compiles six methods, 0.5 ms. `slots` and mutable classes need it."""
    plain = [
        f"{module}: {node.name}"
        for module in MODULES
        if _layer(module) not in ("mods", "reference", "errors", "options", "merge")
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.startswith("dataclass(frozen=True") and "slots" not in decorator
    ]
    assert plain == []


def test_no_module_gives_a_name_two_values() -> None:
    """Of two constants with one name, the later one would be used in both places."""
    for path in PACKAGE.rglob("*.py"):
        targets = [t for x in ast.parse(path.read_text()).body if isinstance(x, ast.Assign) for t in x.targets]
        targets += [x.target for x in ast.parse(path.read_text()).body if isinstance(x, ast.AnnAssign) and x.value]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        assert len(names) == len(set(names)), f"{path}: {sorted({n for n in names if names.count(n) > 1})}"
