"""The demo's parts: its table by length, the text that it writes, its picture, and the environment that it needs."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexattn import BlockMask

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


demo = loaded("examples/demo.py")
environment = loaded("tools/environment.py")
TINY = replace(demo.ON_CPU, length=128, excerpts=(16, 64), width=32, heads=2, layers=1, lengths=(64, 128))
TEXTS = [bytes(range(32, 127)) * 4]


def test_the_table_has_a_line_for_each_length_and_mask(capsys):
    model = demo.GPT(TINY)
    most = 2 * 64 * 64 * 4  # of the mask at 64 tokens
    demo.compare_lengths(model, TEXTS, replace(TINY, most_mask_bytes=most), CPU)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        ["64", "documents"], ["64", "causal"], ["128", "documents"], ["128", "causal"],
    ]  # fmt: skip
    assert ["left out" in line for line in lines] == [False, False, True, True]
    assert all(p.grad is None for p in model.parameters()), "the model is as before"


def test_sdpa_is_given_the_same_attention():
    row = demo.pack(TEXTS, TINY, CPU, random.Random(0))
    slopes = torch.tensor([0.5, 0.1])
    q, k, v = torch.randn(3, 1, 2, 128, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=demo.dense_bias(row, slopes))
    ours = demo.flex_attention(q, k, v, score_mod=demo.alibi(slopes), block_mask=demo.mask_of(row))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-4)


def test_it_writes_a_text_that_begins_with_the_prompt():
    model = demo.GPT(TINY)
    first, second = (demo.generate(model, b"def f():", TINY, 20) for _ in range(2))
    assert first == second and first.startswith("def f():") and len(first) > len("def f():")


def test_the_mask_is_drawn_with_matplotlib_and_without(tmp_path, monkeypatch, capsys):
    mask = demo.mask_of(demo.pack(TEXTS, TINY, CPU, random.Random(0)))

    def missing(self: BlockMask) -> None:
        raise ImportError

    if importlib.util.find_spec("matplotlib") is not None:
        demo.draw(mask, tmp_path / "mask.png")
        assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(BlockMask, "plot", missing)
    demo.draw(mask, tmp_path / "none.png")
    assert "matplotlib is not installed" in capsys.readouterr().out and not (tmp_path / "none.png").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="markers of Linux")
def test_the_environment_says_what_it_would_download():
    requirements = ["torch>=2.11", "no-such-package[extra]>=1", "another; platform_system == 'Windows'", "not-here>=2"]
    assert environment.missing_of(Path(sys.executable), requirements) == ["no-such-package", "not-here"]
