"""Kernels as Triton compiles them for cards that are not here, run as PTX and compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Setting, check_case

pytest.importorskip("triton")

from emulation import emulated

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places


# Dropout joins numbers; with a mask of bytes beside it Triton lays out products otherwise, and 16 terms came out wrong.
@pytest.mark.parametrize(("card", "name"), [("sm_90", "dropout_unaligned"), ("sm_80", "mask_softcap-causal")])
def test_case(card: str, name: str) -> None:
    options = (("USE_TMA", False),) if card == "sm_90" else ()
    with emulated(card):
        check_case(name, Setting("cpu", torch.float16, options=options))
