"""The first calls of a process: what they import, and which processes they start. Each test runs fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "sympy", "mpmath", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "networkx",
    "torch.onnx", "torch.distributed.tensor",
)  # fmt: skip
CALL = """
import torch, flexattn
ids, slopes = torch.arange(256) // 50, torch.rand(2)
q, k, v = (torch.randn(1, 2, 256, 32, requires_grad=True) for _ in range(3))
mask = flexattn.create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 256, 256, device="cpu")
out = flexattn.flex_attention(q, k, v, lambda s, b, h, q, k: 9.0 * torch.tanh(s / 9.0) - slopes[h] * (q - k), mask)
out.sum().backward()
"""


def run(script: str, **environment: str) -> str:
    """Run a script in a fresh process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_calls_import_no_tracer_of_torch() -> None:
    found = run(f"{CALL}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])")
    assert found == "[]\n"


def test_import_starts_nothing() -> None:
    found = run("""
import torch, flexattn, threading
from flexattn.runtime import compile_workers
print(threading.active_count(), compile_workers.started())
""")
    assert found == "1 0\n"


def test_calls_on_a_cpu_start_no_process() -> None:
    found = run(f"{CALL}\nfrom flexattn.runtime import compile_workers\nprint(compile_workers.started())")
    assert found == "0\n"


# Calls as on a GPU: kernels are compiled for it, and launches do nothing.
ON_A_GPU = """
import sys
sys.path.insert(0, {tests!r})
import torch, flexattn
from kernel_warmup import compiling_only
from flexattn.runtime import build, compile_workers
compile_workers.processes = lambda: {processes}
q, k, v = (torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
with compiling_only(90):
    out = flexattn.flex_attention(q, k, v)
    forward = build.stats()
    out.sum().backward()
    print(compile_workers.started(), build.stats()["compiles"])
"""


@pytest.mark.slow
def test_backward_kernels_are_compiled_during_the_forward(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    outputs = [
        run(ON_A_GPU.format(tests=str(Path(__file__).parent), processes=n), FLEXATTN_CACHE_DIR=str(tmp_path / str(n)))
        for n in (1, 0)
    ]
    (started, compiles), (none, alone) = (map(int, text.split()) for text in outputs)
    assert (started, none) == (1, 0)
    assert compiles == alone, "a kernel was compiled that the backward does not use"
    names = [{p.name for p in (tmp_path / n).glob("*/*.cubin")} for n in ("0", "1")]
    assert names[0] == names[1]
    # A second process finds all kernels and starts none.
    text = run(ON_A_GPU.format(tests=str(Path(__file__).parent), processes=1), FLEXATTN_CACHE_DIR=str(tmp_path / "1"))
    assert text == "0 0\n"


@pytest.mark.slow
def test_ranks_that_start_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    """Also in their compile processes, which start only for what no other rank compiles."""
    pytest.importorskip("triton")
    script = ON_A_GPU.format(tests=str(Path(__file__).parent), processes=2)
    alone, ranks = (
        [
            subprocess.Popen(
                [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "FLEXATTN_CACHE_DIR": str(tmp_path / str(n))},
            )
            for _ in range(n)
        ]
        for n in (1, 4)
    )  # fmt: skip
    (expected,), found = ([tuple(map(int, p.communicate()[0].split())) for p in some] for some in (alone, ranks))
    assert sum(compiles for _, compiles in found) == expected[1]
    assert sum(started for started, _ in found) <= expected[1]
