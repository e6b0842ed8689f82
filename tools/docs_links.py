"""A hook of mkdocs: what pages of docs/ link to outside of docs/.

In the repository such a link leads to the file. On the site, a script gets a page with its source, and any other link
becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> None:
    """Add a page for each script that a page links to."""
    for page in list(files.documentation_pages()):
        for _, up, path, _ in LINK.findall(page.content_string):
            if not leaves(page.src_uri, up):
                continue
            if not (ROOT / path).exists():
                raise FileNotFoundError(f"docs/{page.src_uri}: {path} does not exist")
            if path.endswith(".py") and files.get_file_from_path(f"{path}.md") is None:
                source = f"# {path}\n\n```python\n{(ROOT / path).read_text()}```\n"
                file = File.generated(config, f"{path}.md", content=source)
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to scripts lead to their pages, and replace other links out of docs/ by their text."""

    def rewritten(link: re.Match[str]) -> str:
        text, up, path, _ = link.groups()
        if not leaves(page.file.src_uri, up):
            return link[0]
        back = "../" * page.file.src_uri.count("/")
        return f"[{text}]({back}{path}.md)" if path.endswith(".py") else text

    return LINK.sub(rewritten, markdown)


def leaves(page: str, up: str) -> bool:
    """Return whether a link that starts with `up` leaves docs/."""
    return up.count("../") > page.count("/")
