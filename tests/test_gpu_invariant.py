"""kernel_options["BATCH_INVARIANT"] on a GPU: the bits of rows, for Triton's kernels and for Hopper's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from invariance import (
    CHECKS,
    INVARIANT,
    At,
    attend,
    blocks_of_other_classes,
    blocks_that_overrule_the_mod,
    build,
    decoded_rows,
    inputs,
)
from test_gpu_hopper import pytestmark as on_hopper

from flexattn import explain

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

TRITON, HOPPER = (INVARIANT, ("BACKEND", "TRITON")), (INVARIANT, ("BACKEND", "HOPPER"))
BY_TRITON = (
    At("cuda", torch.bfloat16, 128, 128, "softcap", options=TRITON),
    At("cuda", torch.float16, 40, 72, "none", options=TRITON),
    At("cuda", torch.float16, 33, 33, "distance", options=TRITON),  # rows that are not aligned
    At("cuda", torch.float32, 64, 64, "distance", options=(*TRITON, ("FLOAT32_PRECISION", "ieee"))),
    At("cuda", torch.float32, 64, 64, "none", options=(*TRITON, ("FLOAT32_PRECISION", "tf32"))),
)
BY_HOPPER = (
    At("cuda", torch.bfloat16, 128, 128, "none", options=HOPPER),
    At("cuda", torch.bfloat16, 64, 64, "distance", options=HOPPER),
    At("cuda", torch.float16, 128, 64, "softcap", options=HOPPER),
    # Above 128 the backward's kernels are Triton's.
    At("cuda", torch.bfloat16, 192, 128, "none", options=(INVARIANT, ("fwd_BACKEND", "HOPPER"))),
)


# The mask of these lists is another kernel, and how Triton lays out its sums may differ (docs/numerics.md).
ON_TRITON = tuple(check for check in CHECKS if check is not blocks_that_overrule_the_mod)


@pytest.mark.parametrize("at", BY_TRITON, ids=str)
@pytest.mark.parametrize("check", ON_TRITON, ids=lambda f: f.__name__)
def test_triton(check: Callable[[At], None], at: At) -> None:
    check(at)


# Steps on a cache run the portable kernels, whose bits are not Hopper's.
ON_HOPPER = tuple(check for check in CHECKS if check is not decoded_rows)


@pytest.mark.parametrize("at", BY_HOPPER, ids=str)
@pytest.mark.parametrize("check", ON_HOPPER, ids=lambda f: f.__name__)
@on_hopper[1]
def test_hopper(check: Callable[[At], None], at: At) -> None:
    check(at)


@on_hopper[1]
def test_the_kernels_are_hoppers() -> None:
    x = inputs(BY_HOPPER[0])
    q, k, v = (t.requires_grad_() for t in (x.query, x.key, x.value))
    plans = explain(q, k, v, None, build(x, 128), enable_gqa=True, kernel_options=dict(BY_HOPPER[0].options)).plans
    assert [p.spec.name for p in plans] == ["hopper_forward", "backward_delta", "hopper_dq", "hopper_dkdv"]


@pytest.mark.parametrize("at", [BY_TRITON[0], At("cuda", torch.bfloat16, 128, 128, "none")], ids=str)
def test_the_checks_fail_without_the_option(at: At) -> None:
    options = tuple(option for option in at.options if option != INVARIANT)
    with pytest.raises(AssertionError, match="other bits"):
        blocks_of_other_classes(At(at.device, at.dtype, at.D, at.Dv, at.score, options=options))


@pytest.mark.parametrize("at", [BY_TRITON[0], BY_TRITON[3]], ids=str)
def test_a_run_is_like_the_one_before(at: At) -> None:
    x = inputs(at, B=2)
    first, second = attend(at, x), attend(at, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
