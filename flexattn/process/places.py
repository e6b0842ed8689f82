"""places: how messages name a line of the user's code."""

from __future__ import annotations

import sys


def place(filename: str, line: int) -> str:
    """Return file:line, or In[n]:line for a cell of a notebook, whose code is in no file.

    >>> place("model.py", 12)
    'model.py:12'
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if name_of is None else name_of(filename)  # ("Cell", "In[3]")
    return f"{filename if cell is None else cell[1]}:{line}"
