"""templates: the folder of the kernel templates, and the jinja2 environment that renders them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flexattn.errors import CompileError

if TYPE_CHECKING:
    import jinja2


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
    """Return the jinja2 environment of all templates."""
    # It imports jinja2, which takes 25 ms. Only calls that need kernels render templates.
    from flexattn.compile.jinja import make_environment

    return make_environment(templates_folder())
