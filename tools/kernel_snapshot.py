"""Check that a change does not change the generated kernels.

    PYTHONPATH=<old clone> python tools/kernel_snapshot.py write before
    PYTHONPATH=<new clone> python tools/kernel_snapshot.py write after
    python tools/kernel_snapshot.py compare before after
    python tools/kernel_snapshot.py ptx before after

`write` explains every problem of tools/snapshot_problems.py and writes a JSON file for each, with the graphs, the
engine and the sources with their compile options. No GPU is needed. `compare` classifies the sources as

    identical                 the same syntax tree without docstrings, the same types and compile options
    identical but for names   the same after one-to-one renaming of names that the file itself defines
    different                 anything else

and exits with status 1 if a kernel, a graph or an engine is different. Texts for users (tiles of plans, reasons, facts)
are compared without file locations. Differences between them are listed, but are not failures. `ptx` compiles the
different kernels of both sides for their target and compares PTX (or AMD's assembly) up to names of registers and
labels.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import functools
import hashlib
import itertools
import json
import linecache
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

LEAST = 360  # problems
# All kinds of kernels that the templates generate. The name of a kernel is its kind and the names of its mods.
KINDS = (
    "forward", "backward_delta", "backward_dq", "backward_dkdv", "backward_captures", "backward_sizes",
    "backward_batch_captures", "backward_dq_rows", "hopper_forward", "hopper_backward", "hopper_backward_wide",
    "hopper_dq", "hopper_dkdv", "mask_classify", "mask_count", "mask_evaluate", "mask_fill", "mask_levels",
    "mask_lists", "mask_runs", "mask_scan", "mask_table",
)  # fmt: skip
# Fields of plans that no call of explain sets, because they depend on the requested results of a call.
VARIANTS: tuple[tuple[Callable[[Any], bool], dict[str, str]], ...] = (
    (lambda plan: plan.spec.name in ("forward", "hopper_forward"), {"feature": "max_scores"}),
    (lambda plan: plan.spec.name == "backward_delta", {"feature": "dlse"}),
    (lambda plan: plan.spec.name == "backward_dq" and bool(plan.sums), {"kernel": "backward_captures"}),
)
_FEATURE_FIELDS = {"max_scores": "max_scores", "dlse": "has_dlse"}  # in plans of versions without `features`
COMPILED = ("signature", "divisible", "num_warps", "num_stages", "maxnreg", "fp_fusion")
IDENTICAL, RENAMED, DIFFERENT = VERDICTS = ("identical", "identical but for names", "different")

Record = dict[str, Any]


# write


def write(folder: Path) -> int:
    """Write a JSON file for each problem; fail if a kind of kernel does not occur."""
    with tempfile.TemporaryDirectory() as cache:  # excludes tiles tuned on this machine
        os.environ["FLEXATTN_CACHE_DIR"] = cache
        return _write(folder)


def _write(folder: Path) -> int:
    import torch
    from snapshot_problems import PROBLEMS

    import flexattn

    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    found: collections.Counter[str] = collections.Counter()
    refused = 0
    for i, (name, problem) in enumerate(PROBLEMS.items()):
        record: Record = {"name": name, "target": problem.target, "sources": [], "mask_sources": []}
        try:
            record |= _record(problem.explain())
        except flexattn.FlexAttentionError as error:
            refused += 1
            record |= {"engine": type(error).__name__, "words": str(error)}
            print(f"refused: {name}: {error}"[:180])
        found.update(_kind(source["name"]) for source in (*record["sources"], *record["mask_sources"]))
        file = re.sub(r"[^\w.=-]+", "_", f"{i:04} {name}")[:120]
        (folder / f"{file}.json").write_text(json.dumps(record, indent=1))
    print(f"{len(PROBLEMS)} problems of {Path(str(flexattn.__file__)).parent}, {refused} refused")
    for kind in KINDS:
        print(f"    {kind:<24} {found[kind]:5} kernels")
    missing = [kind for kind in KINDS if not found[kind]]
    assert len(PROBLEMS) >= LEAST and not missing, f"no kernel of {', '.join(missing)}"
    return 0


def _record(explained: Any) -> Record:
    graphs = ("score", "gradient", "mask", "mask_bounds")
    render = _renderer()
    variants = [
        render(_variant(plan, **change)) for plan in explained.plans for applies, change in VARIANTS if applies(plan)
    ]
    return {
        "engine": explained.engine,
        "graphs": {name: _without_places(repr(getattr(explained, name))) for name in graphs},
        "words": _without_places(_text_of(explained).partition("-- source of ")[0]),
        "plans": [_without_places(repr(plan)) for plan in explained.plans],
        "reasons": explained.reasons,
        "sources": [_source(source) for source in (*explained.sources, *variants)],
        "mask_sources": [_source(source) for source in explained.mask_sources],
    }  # fmt: skip


def _text_of(explained: Any) -> str:
    """Return all stages, in any version: `str` gave them before it became a summary."""
    return explained.full() if hasattr(explained, "full") else str(explained)


def _source(source: Any) -> Record:
    return {name: getattr(source, name) for name in ("name", *COMPILED, "text")}


def _variant(plan: Any, kernel: str = "", feature: str = "") -> Any:
    """Return the plan of another kernel, or with one more feature, in the form of this version of flexattn."""
    if hasattr(plan, "spec"):
        if kernel:
            table = next(m.KERNELS for name, m in sorted(sys.modules.items()) if name.endswith(".compile.kernels"))
            return replace(plan, spec=table[kernel])
        return replace(plan, features=(*plan.features, feature))
    return replace(plan, kernel=kernel) if kernel else replace(plan, **{_FEATURE_FIELDS[feature]: True})


@functools.cache
def _renderer() -> Callable[[Any], Any]:
    """Return the function that renders a plan, in any version: explain shows no source of VARIANTS."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("flexattn.")]
    found = [module.render for module in modules if isinstance(getattr(module, "render", None), Callable)]
    assert found, "no module of flexattn has a function render(plan): tell this function its new name"
    return found[0]


def _without_places(text: str) -> str:
    """Return a text without the file locations of mods."""
    return re.sub(r"[^\s()]*\.py:\d+", "FILE", text)


def _kind(kernel: str) -> str:
    return max((kind for kind in KINDS if f"{kernel}_".startswith(f"{kind}_")), key=len, default=kernel)


# compare


def compare(before: Path, after: Path) -> int:
    """Print the verdicts per kind of kernel and list sources that differ; return 1 if there are any."""
    table: collections.Counter[tuple[str, str]] = collections.Counter()
    failures, words = [], []
    for one, other in _problems(before, after):
        name = (one or other or {})["name"]
        if one is None or other is None:
            failures.append(f"{name}: only {'after' if one is None else 'before'}")
            continue
        failures += [
            f"{name}: {part}\n{_difference(_text(one.get(part)), _text(other.get(part)))}"
            for part in ("engine", "graphs")
            if one.get(part) != other.get(part)
        ]
        if one["words"] != other["words"]:
            words.append(f"{name}\n{_difference(one['words'], other['words'])}")
        for a, b in _pairs(one, other):
            found = verdict(a, b)
            table[_kind((a or b or {})["name"]), found] += 1
            if found == DIFFERENT:
                failures.append(f"{name}: {(a or b or {})['name']}\n{_difference(_compiled(a), _compiled(b))}")
    _print_table(table)
    for title, entries in (("texts for the reader that differ (no failure)", words), ("different", failures)):
        print(f"{title}: {len(entries)}", *entries, sep="\n  ")
    return 1 if failures or not table else 0


def verdict(one: Record | None, other: Record | None) -> str:
    """Return the verdict on two sources; None means that a source does not exist."""
    if one is None or other is None or _options(one) != _options(other):
        return DIFFERENT
    if one["text"] == other["text"] and one["name"] == other["name"]:
        return IDENTICAL
    if _tree(one["text"], False) == _tree(other["text"], False) and _names(one) == _names(other):
        return IDENTICAL
    return RENAMED if _tree(one["text"], True) == _tree(other["text"], True) else DIFFERENT


def _options(source: Record) -> list[Any]:
    """Return the compile options of a source, with arguments by position."""
    names = [name for name, _ in source["signature"]]
    divisible = sorted(names.index(name) for name in source["divisible"])
    return [[kind for _, kind in source["signature"]], divisible, *(source[name] for name in COMPILED[2:])]


def _names(source: Record) -> list[str]:
    return [source["name"], *(name for name, _ in source["signature"])]


@functools.lru_cache(None)
def _tree(text: str, renamed: bool) -> str:
    """Return a digest of the syntax tree of a file, without comments, whitespace and docstrings."""
    tree = _without_docstrings(ast.parse(text))
    if renamed:
        _Renaming(tree).visit(tree)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


class _Renaming(ast.NodeVisitor):
    """Number the names that a generated file defines: globals in order, and arguments and variables per function.

    Imported names, their attributes, and keywords of their functions are kept.
    """

    def __init__(self, tree: ast.Module) -> None:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        stored = [n for node in tree.body if not isinstance(node, ast.FunctionDef) for n in _stored(node)]
        self.globals = {name: f"g{i}" for i, name in enumerate(dict.fromkeys([*stored, *(f.name for f in functions)]))}
        self.locals = {f.name: self._locals(f) for f in functions}
        self.here: dict[str, str] = {}

    @staticmethod
    def _locals(function: ast.FunctionDef) -> dict[str, str]:
        arguments = [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]
        return {name: f"v{i}" for i, name in enumerate(dict.fromkeys([*arguments, *_stored(function)]))}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.here = self.locals.get(node.name, self.here)
        self.generic_visit(node)
        node.name, self.here = self.globals.get(node.name, node.name), {}

    def visit_arg(self, node: ast.arg) -> None:
        node.arg = self.here.get(node.arg, node.arg)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        node.id = self.here.get(node.id) or self.globals.get(node.id, node.id)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.locals.get(node.func.id, {}) if isinstance(node.func, ast.Name) else {}
        for keyword in node.keywords:
            keyword.arg = called.get(keyword.arg, keyword.arg) if keyword.arg else None
        self.generic_visit(node)


def _stored(tree: ast.AST) -> list[str]:
    """Return the assigned names, in the order of the text."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [n.id for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


def _problems(before: Path, after: Path) -> Iterator[tuple[Record | None, Record | None]]:
    """Yield the records of each problem of two snapshots."""
    sides = [{r["name"]: r for r in map(_read, sorted(folder.glob("*.json")))} for folder in (before, after)]
    for name in dict.fromkeys(itertools.chain(*sides)):
        yield sides[0].get(name), sides[1].get(name)


def _read(file: Path) -> Record:
    return json.loads(file.read_text())


def _pairs(one: Record, other: Record) -> Iterator[tuple[Record | None, Record | None]]:
    for part in ("sources", "mask_sources"):
        yield from itertools.zip_longest(one[part], other[part])


def _compiled(source: Record | None) -> str:
    """Return the compile options and the text of a source, without irrelevant parts."""
    if source is None:
        return ""
    text = ast.unparse(_without_docstrings(ast.parse(source["text"])))
    return "".join(f"{name} {source[name]}\n" for name in COMPILED) + text


def _text(value: Any) -> str:
    return "\n".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _difference(one: str, other: str, lines: int = 14) -> str:
    found = difflib.unified_diff(one.splitlines(), other.splitlines(), "before", "after", lineterm="", n=1)
    return "\n".join(f"      {line}" for line in itertools.islice(found, lines))


def _print_table(table: collections.Counter[tuple[str, str]]) -> None:
    kinds = list(dict.fromkeys([*(k for k in KINDS if any(k == kind for kind, _ in table)), *(k for k, _ in table)]))
    print(f"{'kernel':<26}", *(f"{v:>24}" for v in VERDICTS))
    for kind in kinds:
        print(f"{kind:<26}", *(f"{table[kind, v]:24}" for v in VERDICTS))
    print(f"{'all':<26}", *(f"{sum(table[kind, v] for kind in kinds):24}" for v in VERDICTS))


# ptx


def ptx(before: Path, after: Path, targets: Collection[str] = (), sample: int = 0) -> int:
    """Compile each pair of different sources once and compare the assembly; return 1 if any differs.

    `targets` restricts it to some architectures, `sample` to that many pairs, evenly spaced.
    """
    pairs: dict[tuple[str, str, str], tuple[str, str, Record, Record]] = {}
    alone = 0
    for one, other in _problems(before, after):
        if one is None or other is None or (targets and one["target"] not in targets):
            continue
        for a, b in _pairs(one, other):
            if a is None or b is None:
                alone += 1
            elif verdict(a, b) == DIFFERENT:
                pairs.setdefault((one["target"], _compiled(a), _compiled(b)), (one["name"], one["target"], a, b))
    found: collections.Counter[str] = collections.Counter()
    chosen = list(pairs.values())
    if 0 < sample < len(chosen):
        chosen = [chosen[i * len(chosen) // sample] for i in range(sample)]
    for name, target, a, b in chosen:
        try:
            texts = [_assembly(source, target) for source in (a, b)]
            found[same := "identical" if texts[0] == texts[1] else "different"] += 1
            note = "" if same == "identical" else _difference(texts[0], texts[1])
        except Exception as error:  # any error of the source or of Triton
            found[same := "not compiled"] += 1
            note = f"      {type(error).__name__}: {str(error)[:500]}"
        print(f"{same}: {a['name']} for {target} ({name})", *([note] if note else []), sep="\n", flush=True)
    print(
        f"{len(pairs)} different sources, assembly of {len(chosen)}:",
        ", ".join(f"{n} {kind}" for kind, n in found.items()),
    )
    print(f"{alone} sources are on one side alone")
    return 1 if alone or found.keys() - {"identical"} else 0


def _assembly(source: Record, target: str) -> str:
    """Compile a source and return its canonical assembly."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: source[name] for name in ("num_warps", "num_stages", "maxnreg") if source[name] is not None}
    options |= {} if source["fp_fusion"] else {"enable_fp_fusion": False}
    names = [name for name, _ in source["signature"]]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in source["divisible"]}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.compilation.disable_line_info = folder, True
        function = _import(Path(folder) / "kernel.py", source)
        Source: Any = ASTSource
        if function.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        made = Source(fn=function, signature=dict(source["signature"]), constexprs={}, attrs=attributes)
        compiled = triton.compile(made, target=GPUTarget(*_gpu(target)), options=options)
        text = compiled.asm["ptx" if target.startswith("sm") else "amdgcn"]
    shared = f"\n{compiled.metadata.shared} bytes of shared memory"
    return canonical(text.replace(source["name"], "kernel"), "//" if target.startswith("sm") else ";") + shared


def _gpu(target: str) -> tuple[str, int | str, int]:
    """Return backend, architecture and warp size."""
    if target.startswith("sm_"):
        return "cuda", int(target[3:]), 32
    return "hip", target, 32 if int(target[3:-2]) >= 10 else 64


def _import(file: Path, source: Record) -> Any:
    """Run a source as a module and return its kernel. It needs a file, because Triton reads the source of functions."""
    text = source["text"]
    file.write_text(text)
    module = types.ModuleType(source["name"])
    module.__file__ = str(file)
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    exec(compile(text, str(file), "exec"), module.__dict__)
    return getattr(module, source["name"])


_NAME = re.compile(r"%[a-z]+\d+|\$L__\w+|\.?L[A-Z]*\w*_\d+")  # registers and labels of PTX, labels of AMD's assembly


def canonical(text: str, comment: str) -> str:
    """Return assembly without comments and debug lines, with registers and labels numbered in order of appearance."""
    text = re.split(r"^\s*\.section\s+\.debug", text, maxsplit=1, flags=re.M)[0]
    lines = (line.partition(comment)[0].strip() for line in text.splitlines())
    kept = [line for line in lines if line and not re.match(r"\.(loc|file|section|cfi|ident)\b", line)]
    names: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        kind = re.match(r"%[a-z]+", match[0])
        return names.setdefault(match[0], f"{kind[0] if kind else 'L'}#{len(names)}")

    return _NAME.sub(numbered, "\n".join(kept))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="explain all problems").add_argument("folder", type=Path)
    for name in ("compare", "ptx"):
        command = commands.add_parser(name, help="compare two snapshots")
        command.add_argument("before", type=Path)
        command.add_argument("after", type=Path)
        if name == "ptx":
            command.add_argument("--sample", type=int, default=0, help="compile this many pairs; default: all")
            command.add_argument("--targets", nargs="*", default=(), help="architectures, such as sm_80; default: all")
    given = parser.parse_args()
    if given.command == "write":
        return write(given.folder)
    if given.command == "compare":
        return compare(given.before, given.after)
    return ptx(given.before, given.after, given.targets, given.sample)


if __name__ == "__main__":
    sys.exit(main())
