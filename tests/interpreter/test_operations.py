"""Each row of the table of operations in Triton's interpreter, through a generated mod, against torch."""

from __future__ import annotations

import pytest
from kernel_ops import check_row, odd_rows, rows

pytest.importorskip("triton")
# numpy tells of divisions by zero in the padding of tiles, which no result sees.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize(("name", "kind"), [*rows(), *odd_rows()])
def test_operation(name: str, kind: str) -> None:
    check_row(name, kind, "cpu", exact=False)
