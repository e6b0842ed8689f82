"""Each row of the table of operations in Triton's interpreter, through a generated mod, against torch."""

from __future__ import annotations

import pytest
import torch
from kernel_ops import WHOLE, check_row, check_whole, odd_rows, rows
from mask_cases import attended
from test_narrow import LARGE, N, by_torch

pytest.importorskip("triton")
# numpy tells of divisions by zero in the padding of tiles, which no result sees.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize(("name", "kind"), [*rows(), *odd_rows()])
def test_operation(name: str, kind: str) -> None:
    check_row(name, kind, "cpu", exact=False)


@pytest.mark.parametrize("name", WHOLE)
def test_integers(name: str) -> None:
    check_whole(name)


@pytest.mark.parametrize("name", LARGE)
def test_masks_of_large_integers(name: str) -> None:
    """The kernels that build a mask, and those that ask it at each place."""
    wanted = by_torch(LARGE[name])
    found = attended(LARGE[name], N, N, torch.float32, "cpu", BACKEND="TRITON")
    assert [int((x != wanted).sum()) for x in found] == [0, 0]
