"""follow: the interpreter of bytecode against Python; values, tools of the user, memory, other versions of Python."""

from __future__ import annotations

import ast
import contextlib
import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from follow_corpus import CASES
from followed_mods import POINTS, TABLE, agrees
from torch import Tensor

import flexattn
from flexattn import BlockMask, create_block_mask, mods
from flexattn.errors import ModError, RetraceWarning
from flexattn.integrations import transformers as bridge
from flexattn.trace import memo
from flexattn.trace.follow import Follower, ReadLog, guard_of
from flexattn.trace.follow.libraries import OUR_MODS
from flexattn.trace.recording import Inputs, Setting
from flexattn.trace.trace import trace, variant_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{type(case[1]).__name__}")
def test_python_is_run_as_by_python(case: tuple[Callable[..., Any], Any]) -> None:
    function, argument = case
    wanted = function(argument)
    inputs = Inputs(Setting(torch.device("cpu")), "score", "test")
    inputs.number = lambda value, position, name: _symbol(inputs, value, position)
    record = inputs.record = ReadLog(function, inputs)
    found = Follower(record).call(record.start(), (argument,))
    assert repr(found) == repr(wanted)
    if not record.reason:
        guard, source = guard_of(record, [])
        assert guard(function) is not None, source


def _symbol(inputs: Inputs, value: int | float, position: int) -> Any:
    """Return a symbol without a graph."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"n{position}")
    symbol = inputs.environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    inputs.sources[str(symbol)], inputs.symbol_names[str(symbol)] = f"n[{position}]", "number"
    make = inputs.environment.create_symfloatnode if isinstance(value, float) else inputs.environment.create_symintnode
    return make(symbol, hint=value, source=source)


# Values are Python's own.


def test_numbers_have_their_types() -> None:
    window, gain, size, flag = 3, 0.5, np.int64(4), True

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        good = isinstance(window, int) and type(window) is int and type(gain) is float and isinstance(size, np.integer)
        good = good and isinstance(TABLE.shape[0], int) and type(s) is Tensor and isinstance(flag, bool)
        match window:
            case int(n):
                good = good and n == 3
        return s * {3: 5, 4: 7}[window] + len(f"{gain}") + [1, 2, 3, 4, 5][size] if good else s * 0

    agrees(mod)
    window, size = 4, np.int64(1)
    assert trace(mod, "score").graph.nodes  # the match fails now
    agrees(mod)


def test_captured_objects_are_themselves() -> None:
    parameter = torch.nn.Parameter(TABLE.clone())
    other = parameter
    view = torch.randn(4, 9, dtype=torch.float64).t()

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = s + 1 if isinstance(parameter, torch.nn.Parameter) and parameter is other else s - 1
        return s * 2 if view.is_contiguous() else s * 3 + view[q, b] * view.stride()[0]

    agrees(mod)
    other = parameter.detach()
    agrees(mod)
    view = view.contiguous()
    agrees(mod)
    view = torch.randn(9, 5, dtype=torch.float64)[:, :4]
    agrees(mod)


def test_numbers_of_numpy_and_containers() -> None:
    settings = {"shift": np.float32(0.5), "sizes": (1, 2, 3), "names": {"a", "b"}}

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, *rest = settings["sizes"]
        return s * float(settings["shift"]) + first + sum(rest) + ("a" in settings["names"]) + max(rest)

    agrees(mod)
    settings["sizes"] = (4, 5, 6)
    settings["names"] = {"b"}
    agrees(mod)


def test_a_long_list_is_compared_as_a_whole() -> None:
    ids = [i // 9 for i in range(5000)]

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        table = torch.tensor(ids)
        return table[q] == table[k]

    agrees(mod, "mask")
    (known,) = memo.find(mod, variant_of("mask", torch.float64))
    assert len(known.source.splitlines()) < 30
    ids[3] = 7
    agrees(mod, "mask")
    ids[3] = 0.0  # of another type
    agrees(mod, "mask")


def twice_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def test_scripted_and_compiled_helpers() -> None:
    scripted = torch.jit.script(twice_tanh)
    compiled = torch.compile(twice_tanh)
    agrees(lambda s, b, h, q, k: scripted(s) + TABLE[q])
    found = trace(lambda s, b, h, q, k: compiled(s), "score").graph
    assert found.computes == trace(lambda s, b, h, q, k: twice_tanh(s), "score").graph.computes


# Tools of the user, memory, other versions of Python.


def test_tracers_profilers_and_debuggers_see_the_mod() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x = s + 1
        return x * 2

    lines: set[int] = set()

    def tracer(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is mod.__code__:
            lines.add(frame.f_lineno - mod.__code__.co_firstlineno)
        return tracer

    called: list[str] = []
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        trace(mod, "score")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert {1, 2} <= lines

    def profiler(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    memo.clear()
    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        trace(mod, "score")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert "mod" in called


def test_breakpoint_stops_in_the_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(sys._getframe(1).f_code.co_name))

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        breakpoint()
        return s + 1

    with pytest.warns(RetraceWarning, match=r"breakpoint\(\)"):
        agrees(mod)
    assert stopped == ["mod"] * (1 + len(POINTS))


def test_the_memo_keeps_no_object_of_the_user_alive() -> None:
    class Big:
        def __init__(self) -> None:
            self.table = TABLE.clone()

        def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + self.table[q]

    def make() -> list[weakref.ref[Any]]:
        payload = TABLE.clone()

        class Local:
            held = payload

            def mod(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return s + self.held[q]

        local, big = Local(), Big()
        agrees(local.mod)
        agrees(big.mod)
        agrees(lambda s, b, h, q, k: s + payload[q])
        return [weakref.ref(x) for x in (payload, Local, local, big, big.table)]

    references = make()
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


def test_the_users_line_is_in_the_traceback() -> None:
    def helper(x: Tensor) -> Tensor:
        raise KeyError("nothing here")

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return helper(s)

    with pytest.raises(ModError) as caught:
        trace(mod, "score")
    entries = []
    tb = caught.value.__cause__.__traceback__ if caught.value.__cause__ else None
    while tb is not None:
        entries.append((tb.tb_frame.f_code.co_name, tb.tb_frame.f_code.co_filename, tb.tb_lineno))
        tb = tb.tb_next
    ours = [e for e in entries if e[1] == __file__]
    assert [name for name, _, _ in ours[-2:]] == ["mod", "helper"]
    assert ours[-1][2] == helper.__code__.co_firstlineno + 1


def test_errors_in_a_mod_are_caught_as_by_python() -> None:
    settings: dict[str, int] = {}

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            return s * settings["gain"]
        try:
            return s + settings["shift"]
        except KeyError as error:
            return s - len(error.args)

    agrees(mod)
    settings["shift"] = 3
    agrees(mod)
    settings["gain"] = 2
    agrees(mod)


def test_a_mod_of_the_package_is_guarded_by_the_function_that_it_calls() -> None:
    for mask_mod in (mods.causal, mods.sliding_window(4), lambda b, h, q_idx, kv_idx: kv_idx >= q_idx):
        found, expected = bridge.mask(1, 32, 32, mask_function=mask_mod), create_block_mask(mask_mod, 1, None, 32, 32)
        assert isinstance(found, BlockMask)
        assert found.pairs() == expected.pairs()


def test_modules_that_define_mods_are_guarded() -> None:
    package = Path(flexattn.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.Lambda)]
        if any([a.arg for a in n.args.args][-4:] == ["b", "h", "q_idx", "kv_idx"] for n in functions):
            found.add(".".join(("flexattn", *path.relative_to(package).with_suffix("").parts)))
    frozen = "flexattn.graph.frozen"  # evaluates a graph that never changes
    assert len(found) > 20 and not {m for m in found if not m.startswith(OUR_MODS)} - {frozen}


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_versions_of_python(version: str) -> None:
    """The interpreter needs no torch: where another Python is installed, it runs the same functions there."""
    roots = [Path.home() / ".pyenv/versions", Path("/usr/bin"), Path("/usr/local/bin")]
    found = [p for root in roots for p in (*root.glob(f"{version}*/bin/python"), *root.glob(f"python{version}"))]
    if not found:
        pytest.skip(f"no Python {version} here")
    script = Path(__file__).parent / "follow_elsewhere.py"
    run = subprocess.run([found[0], script], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
