"""Each row of the table of operations in Triton's interpreter, through a generated mod, against torch."""

from __future__ import annotations

import pytest
import torch
from kernel_ops import WHOLE, check_row, check_whole, odd_rows, rows
from mask_cases import attended
from test_narrow import LARGE, N, by_torch

from flexattn import flex_attention

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


def test_the_sign_of_a_zero() -> None:
    """Triton makes 0.0 of the literal -0.0."""
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    zero = -0.0
    mods = (
        lambda s, b, h, i, j: torch.where(1 / ((s * s + 1) * zero) > 0, s * 3, s),
        lambda s, b, h, i, j: torch.where(torch.copysign(s.abs() + 1, s.new_tensor(-0.0)) > 0, s * 3, s),
    )
    for mod in mods:
        found = flex_attention(q, k, v, mod, kernel_options={"BACKEND": "TRITON"})
        torch.testing.assert_close(found, flex_attention(q, k, v))
