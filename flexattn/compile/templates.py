"""templates: the folder of the kernel templates, and the jinja2 environment that renders them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from flexattn.errors import CompileError


@cache
def templates_folder() -> Path:
    """Return the folder of the templates: inside the package (wheel) or next to it (clone, editable install)."""
    package = Path(__file__).parent.parent
    for folder in (package / "templates", package.parent / "templates"):
        if (folder / "forward.py.jinja").is_file():
            return folder
    raise CompileError(f"templates: none in or next to {package}. Reinstall flexattn.")


@cache
def environment() -> jinja2.Environment:
    """Return the environment that renders all templates."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        cache_size=-1,  # unbounded: jinja2's LRU cache has a lock, which may be held when the process forks
    )
