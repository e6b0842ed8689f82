"""aten: the tables of all aten operators, and the reasons why others have no row."""

from __future__ import annotations

from torch import fx

from flexattn.trace.elements import Tables
from flexattn.trace.elementwise import CREATION, ROWS
from flexattn.trace.operator_calls import entry
from flexattn.trace.order import ORDERED, PLACES_IN_ORDER
from flexattn.trace.reductions import MOMENTS, REDUCTIONS
from flexattn.trace.views import PARTS, VIEWS

# Operators without a row, with the reason.
_WRITES = "that writes to some positions of a tensor. Write torch.where(torch.arange(n) == i, new, old)"
_LOOPS = "whose number of steps depends on its values. Compute a table before the call and index it"
_TABLE = "that no kernel can compute. Compute a table before the call and index it"
_COMPLEX = "of complex numbers, which kernels do not support. Write the real and imaginary parts"
REASONS: dict[str, str] = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_put", "index_add", "index_copy"), _WRITES),
    **dict.fromkeys(("gcd", "lcm", "polygamma", "special_zeta", "igamma", "igammac"), _LOOPS),
    **dict.fromkeys(("i0", "special_i0e", "special_i1", "special_i1e", "nextafter", "frexp", "mode"), _TABLE),
    **dict.fromkeys(("_linalg_det", "_cdist_forward", "convolution", "avg_pool2d", "logcumsumexp"), _TABLE),
    **dict.fromkeys(("complex", "view_as_real", "view_as_complex", "real", "imag", "angle", "polar"), _COMPLEX),
}  # fmt: skip

TABLES = Tables(ROWS, CREATION, VIEWS | PLACES_IN_ORDER, PARTS | ORDERED | MOMENTS, REDUCTIONS, REASONS)


def has_row(node: fx.Node) -> bool:
    """Return whether elements of a node can be computed from elements of its operands."""
    return any(entry(table, node) is not None for table in (TABLES.rows, TABLES.creation, TABLES.views))
