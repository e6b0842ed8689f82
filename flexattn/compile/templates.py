"""templates: the folder of the kernels' templates, and jinja2 as all of them are filled by it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from flexattn.errors import CompileError


@cache
def templates_folder() -> Path:
    """Return the folder of the templates: inside the package (wheel), or beside it (clone, editable install)."""
    package = Path(__file__).parent.parent
    for folder in (package / "templates", package.parent / "templates"):
        if (folder / "forward.py.jinja").is_file():
            return folder
    raise CompileError(f"templates: none beside {package}; reinstall flexattn.")


@cache
def environment() -> jinja2.Environment:
    """Return jinja2 as all templates are filled by it."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        cache_size=-1,  # a dict: the other cache of jinja2 has a lock, which a forked child may find held
    )
