"""What this package keeps between calls: bounded in bytes, and nothing of the user's but tensors that it counts."""

from __future__ import annotations

import functools
import gc
import linecache
import sys
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as upstream

import flexattn
from flexattn import create_block_mask, flex_attention, mods
from flexattn.block_mask.from_torch import from_torch
from flexattn.errors import UnsupportedError
from flexattn.graph import bound_mod
from flexattn.mask_build import cache as mask_cache
from flexattn.mask_build import create
from flexattn.runtime import launch
from flexattn.runtime.build import build
from flexattn.torch_state import lasting, tensor_cache
from flexattn.torch_state.tensor_cache import kept
from flexattn.trace.trace import trace

CPU = torch.device("cpu")


def test_tensors_that_were_used_last_are_kept():
    made: list[int] = []

    @kept(4000)
    def ones_on(n: int, device: torch.device) -> torch.Tensor:
        made.append(n)
        return torch.ones(n, device=device)

    def ones(n: int) -> torch.Tensor:
        return ones_on(n, CPU)

    first = ones(300)
    assert ones(300) is first and ones(301) is ones(301)
    assert ones(302) is not first and ones(300) is first
    ones(303), ones(304)  # five would take 4,840 bytes
    assert ones(300) is first
    ones(301)
    assert made == [300, 301, 302, 303, 304, 301]
    ones(2000)
    assert ones(2000) is not ones(2000), "none that is larger than all may be"


def test_the_number_of_tensors_is_bounded_too():
    @kept(2**20)
    def nothing(n: int, device: torch.device) -> torch.Tensor | None:
        made.append(n)
        return None

    made: list[int] = []
    for n in range(300):
        nothing(n, CPU)
    nothing(299, CPU)
    assert len(made) == 300
    nothing(0, CPU)
    assert len(made) == 301


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a CUDA graph is captured, which a test may change."""
    captures = [False]
    for module in (lasting, tensor_cache, bound_mod, create):
        monkeypatch.setattr(module, "is_capturing", lambda device: captures[0])
    return captures


def test_a_cuda_graph_keeps_what_it_reads(capture: list[bool]) -> None:
    """An evicted tensor may be freed, unless it was found in a capture: replays read its memory."""

    @kept(4000)
    def ones(n: int, device: torch.device) -> torch.Tensor:
        return torch.ones(n, device=device)

    read, other = weakref.ref(ones(300, CPU)), weakref.ref(ones(301, CPU))
    capture[0] = True
    assert ones(300, CPU) is read()
    capture[0] = False
    for n in range(400, 405):
        ones(n, CPU)
    assert read() is not None and other() is None
    assert ones(300, CPU) is not read()


def test_a_first_call_in_a_capture_is_an_error(capture: list[bool]) -> None:
    @kept(4000)
    def ones(n: int, device: torch.device) -> torch.Tensor:
        return torch.ones(n, device=device)

    capture[0] = True
    with pytest.raises(UnsupportedError, match="one such call before the capture"):
        ones(3, CPU)


def test_a_mask_found_in_a_capture_stays(capture: list[bool]) -> None:
    def build(window: int) -> flexattn.BlockMask:
        return create_block_mask(mods.sliding_window(window), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)

    mask_cache.clear()
    lists = []
    for window in (3, 5):
        capture[0] = False
        build(window)
        capture[0] = window == 3
        lists.append(weakref.ref(build(window).kv_runs.partial.runs))
    capture[0] = False
    for window in range(7, 100):
        build(window)
    gc.collect()
    assert [ref() is not None for ref in lists] == [True, False]


def test_a_mask_of_captured_tensors_is_not_found_in_a_capture(capture: list[bool]) -> None:
    ids = torch.arange(64) // 20
    for _ in range(3):
        capture[0] = False
        create_block_mask(mods.document(ids), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        capture[0] = True
        with pytest.raises(UnsupportedError, match="Build the mask before the capture and keep it"):
            create_block_mask(mods.document(ids), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)


def test_the_conversion_of_a_torch_mask_stays(capture: list[bool]) -> None:
    mask = upstream.create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    lists = []
    for capture[0] in (True, False):
        lists.append(weakref.ref(from_torch(mask).kv_runs.partial.runs))
        mask.kv_num_blocks.add_(0)
        capture[0] = False
        from_torch(mask)
    gc.collect()
    assert [ref() is not None for ref in lists] == [True, False]


def test_a_cpu_scalar_in_a_capture_is_an_error(capture: list[bool]) -> None:
    scale = torch.tensor(2.0)
    bound = trace(lambda score, b, h, q_idx, kv_idx: score * scale, "score")
    capture[0] = True
    with pytest.raises(UnsupportedError, match="'scale': found a CPU scalar in a CUDA graph"):
        bound.on(torch.device("meta"))


_OPENED = (dict, list, tuple, set, frozenset, types.CellType)


def caches() -> dict[str, Any]:
    """Return everything at module level that keeps what functions returned."""
    found: dict[str, Any] = {f"launches {i}": cache for i, cache in enumerate(launch.CACHES)}
    for name, module in list(sys.modules.items()):
        if name.startswith("flexattn."):
            for attribute, value in vars(module).items():
                if isinstance(value, functools._lru_cache_wrapper):
                    found[f"{name}.{attribute}"] = value
    return found


def held(cache: Any) -> list[Any]:
    """Return what a cache reaches through containers and objects of this package."""
    wrapped = getattr(cache, "__wrapped__", None)
    found, todo, seen = [], [x for x in gc.get_referents(cache) if x is not wrapped], set()
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, types.ModuleType):
            continue
        seen.add(id(x))
        found.append(x)
        if type(x) in _OPENED or type(x).__module__.startswith("flexattn"):
            todo += [y for y in gc.get_referents(x) if not isinstance(y, types.FunctionType) or "test_" in y.__module__]
    return found


def test_caches_hold_nothing_of_the_users():
    class Window:
        def __init__(self, width: int, ids: torch.Tensor) -> None:
            self.width, self.ids = width, ids

        def mask(self, b, h, q_idx, kv_idx):
            return (q_idx - kv_idx < self.width) & (self.ids[q_idx] == self.ids[kv_idx])

        def score(self, score, b, h, q_idx, kv_idx):
            return score + self.width * self.ids[kv_idx]

    window = Window(7, torch.arange(64) // 20)
    q = torch.randn(1, 1, 64, 16, requires_grad=True)
    mask = create_block_mask(window.mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    flex_attention(q, q, q, window.score, mask).sum().backward()
    shown = flexattn.explain(q, q, q, window.score, mask, target="sm_90")
    theirs = {id(x) for x in (Window, window, Window.mask, Window.score, window.ids, q, mask)}
    assert len(shown.sources) > 0 and len(caches()) > 40
    for name, cache in caches().items():
        assert not [x for x in held(cache) if id(x) in theirs], name


def test_the_text_of_a_compiled_kernel_is_not_kept(machine):
    pytest.importorskip("triton")
    from sm90 import SM90
    from test_build import PRODUCT

    path = str(build(PRODUCT, SM90).path)
    assert path not in linecache.cache
    assert "def product(" in "".join(linecache.getlines(path)), "tracebacks and debuggers find it in the file"
