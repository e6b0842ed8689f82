"""The templates of the Triton engine in Triton's interpreter, on small problems, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import CASES, Setting, check_case
from kernel_checks import CHECKS
from quick import slow_unless
from test_against_reference import Case, assert_right, cases, compare

from flexattn import api, flex_attention

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of masked places

FP32, FP16 = Setting("cpu", torch.float32), Setting("cpu", torch.float16)
# Triton's interpreter computes bfloat16 wrong. Each case runs in one dtype: there is time for few.
HALVES = ("unmasked", "mask_softcap", "shape_masked", "block_holes", "gradient_layout")


# On a GPU all of them. Left out here, since others have them too: masks without a score_mod, shapes without a mask.
HERE = [n for n in CASES if not n.startswith(("mask_alone-", "shape-"))]
# What others have nearly: score_mods beside a mask, more blocks and layouts.
SLOW_CASES = ("score-", "block", "layout-", "dropout_tile-", "dropout_unaligned")
QUICK_CASES = ("score-relative", "block-(20, 128)", "layout-transposed", "dropout_tile-64x32-causal")
SLOW_CHECKS = ("nothing_leaks_from_excluded_places", "tiles_change_nothing", "bias_and_general_forms_agree")


@pytest.mark.parametrize("name", slow_unless(lambda n: n in QUICK_CASES or not n.startswith(SLOW_CASES), HERE))
def test_case(name: str) -> None:
    check_case(name, FP16 if name.startswith(HALVES) else FP32)


@pytest.mark.parametrize(
    "check", slow_unless(lambda f: f.__name__ not in SLOW_CHECKS, CHECKS), ids=lambda f: f.__name__
)
def test_check(check: Callable[[Setting], None]) -> None:
    check(FP32)


@settings(max_examples=4)  # test_fuzz_cases draws more
@given(cases().filter(lambda case: case.dtype != torch.bfloat16))
def test_random_problems_match_the_reference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "engine_of", lambda problem: api.triton)
        compare(case, assert_right)


def test_names_that_would_meet_are_kept_apart() -> None:
    """Triton compiles no function with two parameters of one name."""
    a1, b, c, d, e, f, g, h, i, j, a = torch.randn(11, 24)
    x, x0_size = torch.randn(24), 0.5

    def score_mod(score, batch, head, q_idx, kv_idx):
        first = a1[q_idx] + b[q_idx] + c[q_idx] + d[q_idx] + e[q_idx] + f[q_idx] + g[q_idx] + h[q_idx] + i[q_idx]
        return score + first * j[kv_idx] + a[kv_idx] * x[q_idx] * x0_size

    q = torch.randn(1, 1, 24, 16)
    found = flex_attention(q, q, q, score_mod, kernel_options={"BACKEND": "TRITON"})
    torch.testing.assert_close(found, flex_attention(q, q, q, score_mod), atol=1e-5, rtol=1e-5)


def test_threads_may_run_kernels_at_once() -> None:
    """Triton's interpreter changes Triton's own modules while a kernel runs."""
    q = torch.randn(1, 1, 40, 16)
    mods = [
        lambda score, b, h, q_idx, kv_idx: score + q_idx * 0.1,
        lambda score, b, h, q_idx, kv_idx: score * 2 - kv_idx,
    ]
    wanted = [flex_attention(q, q, q, mod) for mod in mods]

    def work(i: int) -> None:
        for mod, out in [*zip(mods, wanted, strict=True)] * 3:
            found = flex_attention(q, q, q, mod, kernel_options={"BACKEND": "TRITON"})
            torch.testing.assert_close(found, out, atol=1e-4, rtol=1e-4)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
