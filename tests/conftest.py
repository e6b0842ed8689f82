"""What all tests share: which of them this machine can run, one thread, seeds, a cache of kernels of their own."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from flexattn.compile import fixed_reference, small_backward, tile_choice
from flexattn.process import config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Tools that a GPU machine without a network may lack; a test file that imports a missing one is left out, by name.
OPTIONAL_TOOLS = ("expecttest", "hatchling", "editables", "nbformat", "nbclient", "ipykernel")
MISSING_TOOLS = [tool for tool in OPTIONAL_TOOLS if importlib.util.find_spec(tool) is None]

LIMIT_S = 300.0  # of a test on a GPU: kernels whose roles wait for each other hang for ever where one is wrong

hypothesis.settings.register_profile("flexattn", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("flexattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "use hopper_forward's fixed reference also for few keys, so that all GPU tests of that kernel test it"
    parser.addoption("--fixed-reference", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fixed-reference"):
        fixed_reference._FEWEST_KEYS = 0
    small_backward.PER_PROCESSOR = 0  # most tests are small, and of other kernels; small_cases.py sets it
    torch.set_num_threads(1)  # two workers share two cores, and small tensors gain nothing from threads
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None:  # kept between runs and shared by the workers: that several processes may is a promise
        os.environ.setdefault("FLEXATTN_CACHE_DIR", str(cache.mkdir("flexattn") / "kernels"))


def pytest_report_header() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: tests marked gpu are deselected"
    missing = f"; not installed: {', '.join(MISSING_TOOLS)}, whose test files are left out" if MISSING_TOOLS else ""
    return f"torch {torch.__version__}, gpu {gpu}{missing}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and MISSING_TOOLS:
        imported = re.findall(r"^(?:import|from) (\w+)", collection_path.read_text(), re.MULTILINE)
        return True if set(imported) & set(MISSING_TOOLS) else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, not skip, what needs a GPU where there is none, and what belongs into the other kind of process."""
    kept, left_out = [], []
    for item in items:
        if Path(__file__).parent / "interpreter" in item.path.parents:
            item.add_marker("interpreter")
        needs_gpu = item.get_closest_marker("gpu") is not None
        interpreted = item.get_closest_marker("interpreter") is not None
        runs_here = interpreted == INTERPRETED and not (needs_gpu and (INTERPRETED or not torch.cuda.is_available()))
        (kept if runs_here else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Give each test the same random numbers in every order of tests."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the process, with all stacks, where a test on a GPU hangs: nothing else ends a wait for a kernel."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what torch.compile compiled and counted."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the folder of the kernels of a machine that has none and remembers no tiles."""
    caches = (config.settings, tile_choice._remembered)
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path))
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()
