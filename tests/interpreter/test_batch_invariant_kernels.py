"""kernel_options["BATCH_INVARIANT"] in Triton's interpreter, whose products are numpy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import invariance
import numpy
import pytest
from invariance import INVARIANT, At

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

AT = At(D=16, Dv=16, M=70, N=110, block=32, score="softcap", options=(INVARIANT, ("BACKEND", "TRITON")))
# Those that other loops, tiles or masks would break; the rest is checked on the CPU and on a card.
CHECKED = (
    invariance.other_batch_entries, invariance.other_queries, invariance.neighbours_that_attend_to_more,
    invariance.blocks_of_other_classes, invariance.decoded_rows,
)  # fmt: skip


def by_rows(a: numpy.ndarray, b: numpy.ndarray, dtype: object = None) -> numpy.ndarray:
    """Return a @ b, each row alone as a GPU computes it: BLAS rounds rows by their place."""
    return (a.astype(dtype)[:, None, :] * b.astype(dtype).T[None]).sum(-1)


@pytest.mark.parametrize("check", CHECKED, ids=lambda f: f.__name__)
def test_check(check: Callable[[At], None], monkeypatch: pytest.MonkeyPatch) -> None:
    if check in (invariance.other_queries, invariance.decoded_rows):
        monkeypatch.setattr(numpy, "matmul", by_rows)
    check(AT)


def test_the_checks_fail_without_the_option() -> None:
    with pytest.raises(AssertionError, match="other bits"):
        invariance.blocks_of_other_classes(replace(AT, options=(("BACKEND", "TRITON"),)))
