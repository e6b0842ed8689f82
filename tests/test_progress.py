"""progress: a line on stderr where work takes long, unless the user silenced it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexattn.compile.kernel_source import KernelSource
from flexattn.machine.target import Target
from flexattn.process import config, progress
from flexattn.process.progress import Waiting
from flexattn.runtime import build as build_module

SOURCE = KernelSource("slow_kernel", "", (), (), ())
SM90 = Target("cuda", 90, 32)


@pytest.fixture(autouse=True)
def patience(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress, "_PATIENCE", 0.2)
    yield


def wait(waiting: Waiting, seconds: float, text: str = "working") -> None:
    with waiting.step(lambda: text):
        time.sleep(seconds)


def test_a_short_wait_prints_nothing(capsys):
    wait(Waiting("build"), 0.0)
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_long_wait_prints_one_line(capsys):
    wait(Waiting("build"), 0.5)
    assert capsys.readouterr().err == "flexattn build: working, 0 s so far\n"


def test_steps_in_a_row_are_one_wait(capsys):
    waiting = Waiting("build")
    for i in range(12):
        wait(waiting, 0.05, f"step {i}")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 6, "the interval doubles"
    assert not any("step 0," in line for line in lines)


def test_steps_with_a_pause_between_them_are_two_waits(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    waiting = Waiting("build")
    for _ in range(6):
        wait(waiting, 0.01)
        time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_an_error_passes_and_ends_the_wait(capsys):
    with pytest.raises(KeyError), Waiting("build").step(lambda: "working"):
        raise KeyError
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_the_variable_silences_it(capsys, monkeypatch):
    monkeypatch.setenv("FLEXATTN_PROGRESS", "0")
    config.settings.cache_clear()
    wait(Waiting("build"), 0.4)
    progress.announce(1, 2**60)
    assert capsys.readouterr().err == ""


def test_the_level_of_the_logger_silences_it(capsys):
    logger = logging.getLogger("flexattn")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        wait(Waiting("build"), 0.4)
        progress.announce(1, 2**60)
    finally:
        logger.setLevel(before)
    assert capsys.readouterr().err == ""
    progress.announce(1, 2**60)
    assert capsys.readouterr().err.startswith("flexattn create_block_mask: 1 blocks are evaluated pair by pair")


def test_compiling_says_what_for_which_gpu_and_where_it_is_kept(machine, capsys, monkeypatch):
    def slow(*_: object) -> Path:
        time.sleep(0.5)
        raise OSError("this compiler only takes time")

    monkeypatch.setattr(build_module, "_find_or_compile", slow)
    monkeypatch.setattr(build_module, "_compiling", Waiting("build"))
    with pytest.raises(OSError, match="only takes time"):
        build_module.build(SOURCE, SM90)
    (line,) = capsys.readouterr().err.splitlines()
    wanted = rf"flexattn build: compiling slow_kernel for sm_90( \(.*\))?, kept in {re.escape(str(machine))} for later "
    assert re.fullmatch(wanted + r"processes \(FLEXATTN_PROGRESS=0 hides this\), 0 s so far", line)
