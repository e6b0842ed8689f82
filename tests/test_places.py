"""places: a line of a file, and a line of a notebook's cell."""

from __future__ import annotations

import doctest
import sys
from types import SimpleNamespace

import pytest
import torch

from flexattn import explain, flex_attention
from flexattn.errors import ModError
from flexattn.process import places

BRANCHES = """
def branches(score, b, h, q_idx, kv_idx):
    return score if score > 0 else -score
"""


def test_docstring() -> None:
    assert doctest.testmod(places) == (0, 1)


def test_a_cell_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a notebook gives to a cell does not exist."""
    q = k = v = torch.zeros(1, 1, 4, 16)
    found = {}
    exec(compile(BRANCHES, "/tmp/ipykernel_1/2.py", "exec"), found)

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", "In[7]") if name == "/tmp/ipykernel_1/2.py" else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    with pytest.raises(ModError, match=r"score_mod branches at In\[7\]:3 reads the value"):
        flex_attention(q, k, v, found["branches"])
    assert "test_places.py:" in str(explain(score_mod=lambda score, b, h, q_idx, kv_idx: -score))


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(compile=None)], ids=str)
def test_other_shells(shell: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert places.place("model.py", 12) == "model.py:12"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())  # type: ignore[arg-type]
    assert places.place("model.py", 12) == "model.py:12"
