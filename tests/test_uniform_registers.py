"""Tests of the search for uniform registers that are read before they are written."""

from __future__ import annotations

import pytest
from uniform_registers import read_before_written

SKIPPED = """
    /*0000*/                   R2UR UR16, R0 ;
    /*0010*/              @!P3 BRA 0x40 ;
    /*0020*/                   UIADD3 UR4, UP0, UR16, 0x2, URZ ;
    /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT ;
    /*0040*/                   UIADD3 UR40, UP0, UR4, 0x2, URZ ;
    /*0050*/                   EXIT ;
"""


def test_a_register_that_a_branch_skips() -> None:
    assert read_before_written(SKIPPED) == [
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT", "UIADD3 UR40, UP0, UR4, 0x2, URZ"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("UMOV UR4, URZ", []),
        ("ULDC.64 UR4, c[0x0][0x208]", []),
        ("UMOV UR5, URZ", ["UIADD3.64 UR6, UR4, 0x2, URZ"]),
        ("@P2 R2UR P1, UR4, R0", ["UIADD3.64 UR6, UR4, 0x2, URZ"]),
        ("UTMASTG.4D [UR4], [UR8]", ["UTMASTG.4D [UR4], [UR8]", "UIADD3.64 UR6, UR4, 0x2, URZ"]),
    ],
)
def test_what_writes_a_register(line: str, found: list[str]) -> None:
    second = "" if line != "UMOV UR4, URZ" else "/*0008*/ UMOV UR5, URZ ;\n"
    text = f"/*0000*/ {line} ;\n{second}/*0010*/ UIADD3.64 UR6, UR4, 0x2, URZ ;\n/*0020*/ EXIT ;\n"
    assert read_before_written(text) == found


def test_a_product_with_an_operand_in_registers_reads_one_descriptor() -> None:
    text = """
        /*0000*/ UIADD3.64 UR22, URZ, URZ, URZ ;
        /*0010*/ HGMMA.64x64x16.F32.BF16 R88, R160, gdesc[UR20].tnspB, R88 ;
    """
    assert read_before_written(text) == []


def test_a_loop_keeps_what_was_written_before_it() -> None:
    text = """
        /*0000*/ UMOV UR4, URZ ;
        /*0010*/ UIADD3 UR4, UR4, 0x1, URZ ;
        /*0020*/ @P0 BRA 0x10 ;
        /*0030*/ EXIT ;
    """
    assert read_before_written(text) == []
