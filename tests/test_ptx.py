"""Kernels as Triton compiles them for cards that are not here, run as PTX and compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Setting, check_case
from kernel_ops import check_whole
from mask_cases import attended, brute_force, make_mask
from quick import slow_unless

pytest.importorskip("triton")

from emulation import emulated

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
