"""Kernels as Triton compiles them for cards that are not here, run as PTX and compared with the oracle."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from kernel_cases import Setting, check_case
from kernel_ops import check_whole
from mask_cases import attended, brute_force, make_mask
from quick import slow_unless

from flexattn import create_block_mask, explain, mods

pytest.importorskip("triton")

from emulation import emulated, load_in_emulator

from flexattn.compile.kernel_source import KernelSource
from flexattn.explanation import target_named
from flexattn.runtime.build import build

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places


CASES = [("sm_90", "dropout_unaligned"), ("sm_80", "mask_softcap-causal")]


# Dropout joins numbers; with a mask of bytes beside it Triton lays out products otherwise, and 16 terms came out wrong.
@pytest.mark.parametrize(("card", "name"), slow_unless(lambda c: c[0] == "sm_80", CASES))
def test_case(card: str, name: str) -> None:
    options = (("USE_TMA", False),) if card == "sm_90" else ()
    with emulated(card):
        check_case(name, Setting("cpu", torch.float16, options=options))


@pytest.mark.parametrize("name", ["shift left", "powers of 3", "sums"])
def test_integers(name: str) -> None:
    with emulated("sm_80"):
        check_whole(name)


@pytest.mark.slow
def test_masks_are_computed_as_written() -> None:
    mask_mod = make_mask("thresholds", 70)
    with emulated("sm_80"):
        found = attended(mask_mod, 70, 65, torch.float16, "cpu", BACKEND="TRITON")
    want = brute_force(mask_mod, 1, 1, 70, 65)[0, 0]
    assert [int((x != want).sum()) for x in found] == [0, 0]


PROBE = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_N: gl.constexpr = gl.constexpr({block_n})


{function}

@gluon.jit
def probe(s_ptr, low_ptr, high_ptr, n0, is_full, out_ptr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    near, offset = (n0 + (columns & 7))[None, :], (columns & ~7)[None, :]
    low, high = gl.load(low_ptr + rows), gl.load(high_ptr + rows)
    s = gl.load(s_ptr + rows * BLOCK_N + columns[None, :])
    s = keep_columns(s, near, offset, {ends}, is_full != 0)
    gl.store(out_ptr + rows * BLOCK_N + columns[None, :], s)
"""


@pytest.mark.parametrize(
    ("D", "mask_mod"),
    [
        (128, mods.causal),
        (64, mods.sliding_window(100)),
        pytest.param(256, mods.sliding_window(9), marks=pytest.mark.slow),
    ],
)
def test_columns_that_hopper_forward_keeps(D: int, mask_mod: Any) -> None:
    x = torch.zeros(1, 1, 512, D, dtype=torch.bfloat16)
    mask = create_block_mask(mask_mod, None, None, 512, 512, device="cpu")
    made = explain(x, x, x, None, mask, target="sm_90")
    assert made.plans[0].spec.name == "hopper_forward"
    function = re.search(r"@gluon\.jit\ndef keep_columns\(.*?(?=\n@gluon\.jit)", made.sources[0].text, re.DOTALL)
    assert function is not None
    block_n, ends = made.plans[0].tile.BLOCK_N, "low, high" if "low, high" in function[0] else "high"
    text = PROBE.format(block_n=block_n, function=function[0], ends=ends)
    signature = (
        ("s_ptr", "*fp32"), ("low_ptr", "*i32"), ("high_ptr", "*i32"), ("n0", "i32"), ("is_full", "i32"),
        ("out_ptr", "*fp32"),
    )  # fmt: skip
    kernel = build(KernelSource("probe", text, (), signature, ()), target_named("sm_90"), loader=load_in_emulator)
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(64, block_n, generator=generator)
    s[3, 5] = float("nan")
    n0 = 3 * block_n
    edges = torch.tensor([-(2**30), 2**30, 0, n0, n0 - 1, n0 + block_n, n0 + block_n + 1, n0 + 8, n0 + 9])
    low, high = (
        torch.cat([edges, torch.randint(n0 - 9, n0 + block_n + 9, (55,), generator=generator)])[order].int()
        for order in (torch.arange(64), torch.randperm(64, generator=generator))
    )
    kv_idx = n0 + torch.arange(block_n)
    inside = kv_idx < high[:, None]
    if ends == "low, high":
        inside &= kv_idx >= low[:, None]
    for is_full in (0, 1):
        out = torch.zeros(64, block_n)
        kernel.launch(1, (s, low, high, n0, is_full, out), 0)
        expected = s if is_full else s.masked_fill(~inside, float("-inf"))
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
