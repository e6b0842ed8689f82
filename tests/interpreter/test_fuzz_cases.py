"""A few cases of the fuzzer in Triton's interpreter."""

from __future__ import annotations

import pytest
from fuzz.cases import SPACES
from fuzz.draw import draw_case
from fuzz.serve import run_case

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

SPACE = SPACES["interpreter"]


@pytest.mark.parametrize("index", range(3))
def test_case(index: int) -> None:
    verdict = run_case(SPACE, draw_case(SPACE, 0, index), ["triton"])["triton"]
    assert verdict.outcome == "right", verdict.text
