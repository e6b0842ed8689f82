"""Each row of the table of operations in Triton's interpreter, through a generated mod, against torch."""

from __future__ import annotations

import pytest
from kernel_ops import check_row, rows

from flexattn.errors import CompileError

pytest.importorskip("triton")
# numpy tells of divisions by zero in the padding of tiles, which no result sees.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# Those that need CUDA's libdevice and have no substitute refuse the interpreter in one sentence.
REFUSED = ("round", "asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh", "copysign")


@pytest.mark.parametrize(("name", "kind"), rows())
def test_operation(name: str, kind: str) -> None:
    if name in REFUSED:
        with pytest.raises(CompileError, match=f"{name}: Triton's interpreter does not have it"):
            check_row(name, kind, "cpu")
    else:
        check_row(name, kind, "cpu", exact=False)
