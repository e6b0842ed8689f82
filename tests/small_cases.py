"""Calls whose backward is one kernel. They run in Triton's interpreter, in the emulator and on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kernel_cases import Setting, Sizes, check, make_call

from flexattn.compile import small_backward
from flexattn.compile.kernels import SMALL
from flexattn.runtime import launch

# Sizes, score_mod and mask of kernel_cases.
CASES: dict[str, tuple[Sizes, str | None, str | None]] = {
    "plain": (Sizes(1, 2, 1, 150, 130, 64, 64), None, None),
    "causal": (Sizes(1, 2, 2, 128, 128, 64, 64), None, "causal"),
    "documents": (Sizes(2, 2, 1, 70, 200, 40, 56), None, "document"),
    "softcap": (Sizes(1, 2, 1, 100, 100, 64, 32), "softcap", "sliding"),
    "distances": (Sizes(1, 2, 2, 130, 60, 32, 64), "of_index", "causal"),
    "rows without a key": (Sizes(1, 1, 1, 130, 140, 64, 64), None, "holes"),
    "by batch and head": (Sizes(2, 2, 2, 130, 140, 64, 64), None, "per_head_and_batch"),
    "over rows": (Sizes(1, 2, 2, 70, 65, 32, 32), "fixed_over_rows", None),
    "keys shared by the batch": (Sizes(2, 2, 1, 60, 70, 64, 64, Bkv=1), "of_index", None),
}


@contextlib.contextmanager
def in_one_launch(limit: int = 10) -> Iterator[list[Any]]:
    """Let small backwards run as one kernel, which conftest.py switches off. Return the kernels that are launched."""
    launched: list[Any] = []
    prepare = launch.prepare

    def prepared(plan: Any, *arguments: Any) -> Any:
        launched.append(plan.spec)
        return prepare(plan, *arguments)

    launch.forget_launches()
    with patch.object(small_backward, "PER_PROCESSOR", limit), patch.object(launch, "prepare", prepared):
        yield launched
    launch.forget_launches()


def check_small(name: str, at: Setting) -> None:
    """Compare a case with the float64 reference."""
    sizes, score, mask = CASES[name]
    with in_one_launch() as launched:
        check(make_call(at, sizes, score, mask, block=64), loose=True)
    assert [spec for spec in launched if spec.phase == "bwd"] == [SMALL]
